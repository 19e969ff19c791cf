"""Small language models as drafters, whatever their vocabulary."""
