"""Tests of `paceline.ray`: the parts that need no ray, and a cluster on this machine."""
