"""Drafters in processes of their own: one that crashes or hangs is started again, and no request notices."""
