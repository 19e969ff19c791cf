"""The compiled kernels (csrc/), with everything that comes in checked at the border. Below all other packages."""

from paceline.kernels._ext import (
    Chooses,
    Decoder,
    KVStore,
    Matrix,
    Team,
    choose,
    gumbel,
    isa,
    keep,
    logprobs,
    pack,
    pack_int4,
)

__all__ = [
    "Chooses",
    "Decoder",
    "KVStore",
    "Matrix",
    "Team",
    "choose",
    "gumbel",
    "isa",
    "keep",
    "logprobs",
    "pack",
    "pack_int4",
]
