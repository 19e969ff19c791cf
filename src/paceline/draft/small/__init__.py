"""Draft models cut from their target, which share its tables."""
