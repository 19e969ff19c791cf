"""Triton kernels. Imported only when they run, by `kernel_launch`; nothing else imports Triton."""
