"""The native backend: C++ kernels for CPUs (csrc/)."""
