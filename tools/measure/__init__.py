"""Measurements that developers run: host time, memory, quality, stress."""
