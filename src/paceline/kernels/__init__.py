"""The compiled kernels (csrc/), with everything that comes in checked at the border. Below all other packages."""

from paceline.kernels._ext import (
    Chooses,
    Decoder,
    KVStore,
    Matrix,
    Team,
    TextIndex,
    choose,
    dot_peak,
    gumbel,
    isa,
    keep,
    logprobs,
    pack,
    pack_int4,
    read_bandwidth,
    time_products,
)

__all__ = [
    "Chooses",
    "Decoder",
    "KVStore",
    "Matrix",
    "Team",
    "TextIndex",
    "choose",
    "dot_peak",
    "gumbel",
    "isa",
    "keep",
    "logprobs",
    "pack",
    "pack_int4",
    "read_bandwidth",
    "time_products",
]
