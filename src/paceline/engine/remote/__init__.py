"""Drafters in their own processes. A crashed or hung process is restarted; no request notices."""
