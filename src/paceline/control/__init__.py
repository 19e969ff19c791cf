"""How much to speculate."""
