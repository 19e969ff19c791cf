"""The compiled kernels (csrc/), with everything that comes in checked at the border. Below all other packages."""

from paceline.kernels._ext import choose, gumbel, isa, keep, logprobs

__all__ = ["choose", "gumbel", "isa", "keep", "logprobs"]
