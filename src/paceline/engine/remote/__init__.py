"""Drafters in processes of their own. A process that crashes or hangs is restarted; no request notices."""
