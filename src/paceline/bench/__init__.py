"""Measure: offline bench, load generator, reports."""
