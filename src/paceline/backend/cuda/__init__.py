"""The `cuda` backend: PyTorch for memory and streams, Triton for kernels."""
