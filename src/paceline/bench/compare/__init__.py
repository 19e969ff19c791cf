"""Comparisons of `auto` with what a user could have chosen by hand, on real runs."""
