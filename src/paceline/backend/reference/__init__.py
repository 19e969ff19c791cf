"""The reference backend: readable PyTorch on any device."""
