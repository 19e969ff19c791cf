"""Measurements for developers: host time, memory, quality, stress, the roofline of overlap."""
