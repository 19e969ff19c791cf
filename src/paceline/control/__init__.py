"""Control: how much to speculate."""
