"""Fuzzing of everything that reads bytes of others: `scripts/fuzz`, and in small as ordinary tests."""
