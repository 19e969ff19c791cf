"""Counter-based noise: a function of (seed, choice, lane, position, depth, token id) alone.

It does not depend on batch, step or drafter, so the same seed gives the same text however the engine runs. The
native kernels have their own copy (`csrc/model/noise.h`); tests hold golden values of this one. All arithmetic is
on unsigned 32-bit integers, modulo 2**32, with `>>` a logical shift:

    murmur(x):   x ^= x >> 16; x *= 0x85EBCA6B; x ^= x >> 13; x *= 0xC2B2AE35; x ^= x >> 16
    lowbias(x):  x ^= x >> 16; x *= 0x7FEB352D; x ^= x >> 15; x *= 0x846CA68B; x ^= x >> 16

    words = (seed & 0xFFFFFFFF, seed >> 32, choice, lane + 256 * depth, position)
    k0 = 0x243F6A88;  for w in words: k0 = murmur((k0 ^ w) + 0x9E3779B9)
    k1 = 0x85A308D3;  for w in words: k1 = lowbias((k1 ^ w) + 0x7F4A7C15)

    h1 = lowbias(lowbias(id ^ k0) + k1)           first word of a token id
    h2 = murmur(murmur(id ^ k1) + k0)             second word
    n  = h1 * 2**32 + h2                          64 bits
    v  = (n + 1/2) / 2**64                        uniform, never 0 or 1
    E  = -log1p(-v) if n < 2**63 else -log((2**64 - 1 - n + 1/2) / 2**64)      exponential, both tails resolved
    gumbel = -log(E)                              a small h1 is a large gumbel

murmur is the finaliser of MurmurHash3 (A. Appleby), lowbias that of C. Wellons' hash prospector.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numpy import float64, floating, integer, uint32, uint64
    from numpy.typing import NDArray

Key = tuple[int, int]  # two 32-bit words

_MASK = 0xFFFFFFFF
_MURMUR = (16, 0x85EBCA6B, 13, 0xC2B2AE35, 16)
_LOWBIAS = (16, 0x7FEB352D, 15, 0x846CA68B, 16)
_FEW = 8  # ids; up to here plain integers are faster than numpy


class Lane(IntEnum):
    """Purpose of a number. Two uses never share a lane."""

    CHOICE = 0  # the target's own choice, and that of drafters which imitate it
    DRAFT = 1  # drafts that are drawn independently of the target
    ACCEPT = 2  # the coin that accepts a draft
    RESIDUAL = 3  # the token in place of a rejected draft


def key(seed: int, choice: int, lane: int, position: int, depth: int = 0) -> Key:
    """Return one draw's two 32-bit words. `seed` has 63 bits, the others at most 32.

    `position` is the index, in the row's tokens, of the token that is drawn or judged. `depth` is 0 where a draw
    is used once per position. Under block verification (lanes DRAFT and ACCEPT) draws behind the last kept token
    are used and thrown away. There `depth` counts the drafts before this one in its step, so that the next step
    comes to the same position with another depth, and thus with fresh noise.
    """
    return _absorb(_stem(seed, choice, lane + (depth << 8)), position)


@lru_cache(maxsize=4096)
def _stem(seed: int, choice: int, lane: int) -> Key:
    """Return a key's state before its position, constant over a row's steps."""
    state = 0x243F6A88, 0x85A308D3
    for word in (seed & _MASK, seed >> 32, choice, lane):
        state = _absorb(state, word)
    return state


def _absorb(state: Key, word: int) -> Key:
    k0, k1 = state
    k0 = _mix_int(((k0 ^ word) + 0x9E3779B9) & _MASK, _MURMUR)
    k1 = _mix_int(((k1 ^ word) + 0x7F4A7C15) & _MASK, _LOWBIAS)
    return k0, k1


def leading(key: Key, ids: NDArray[integer]) -> NDArray[uint32]:
    """Return h1 of each token id: its uniform's leading 32 bits. Shaped as `ids`."""
    return _word(ids, key[0], key[1], _LOWBIAS)


def gumbel(key: Key, ids: NDArray[integer]) -> NDArray[float64]:
    """Return the standard Gumbel noise of each token id, float64, same shape as `ids`."""
    import numpy as np

    n = _bits(key, ids)
    tail = np.where(n < 1 << 63, n, ~n).astype(np.float64)  # the distance to the nearer end
    v = (tail + 0.5) * 2.0**-64
    return -np.log(np.where(n < 1 << 63, -np.log1p(-v), -np.log(v)))


def uniform(key: Key, token_id: int = 0) -> float:
    """Scale n's leading 53 bits to [0, 1). `uniform < p` holds with probability p."""
    return (_bits_int(key, token_id) >> 11) * 2.0**-53


def noisy_argmax(z: NDArray[floating], key: Key, ids: NDArray[integer] | None = None) -> int:
    """Return the id of the largest z + gumbel (lowest on ties), sampling softmax(z).

    z: [n] logits divided by the temperature. ids: [n] token ids, None for 0..n-1. Every candidate gets its exact
    noise here; `csrc/model/sampling.cpp` computes it only for those that can still win.
    """
    import numpy as np

    ids = np.arange(len(z), dtype=np.uint32) if ids is None else ids
    scores = z.astype(np.float64) + gumbel(key, ids)
    return int(ids[scores == scores.max()].min())


def _bits(key: Key, ids: NDArray[integer]) -> NDArray[uint64]:
    import numpy as np

    if len(ids) <= _FEW:
        return np.array([_bits_int(key, i) for i in ids.tolist()], np.uint64)
    high = leading(key, ids).astype(np.uint64)
    return (high << np.uint64(32)) | _word(ids, key[1], key[0], _MURMUR)


def _bits_int(key: Key, token_id: int) -> int:
    k0, k1 = key
    h1 = _mix_int((_mix_int(token_id ^ k0, _LOWBIAS) + k1) & _MASK, _LOWBIAS)
    h2 = _mix_int((_mix_int(token_id ^ k1, _MURMUR) + k0) & _MASK, _MURMUR)
    return h1 << 32 | h2


def _word(ids: NDArray[integer], before: int, between: int, mixer: tuple[int, ...]) -> NDArray[uint32]:
    import numpy as np

    x = ids.astype(np.uint32)
    scratch = np.empty_like(x)
    x ^= np.uint32(before)
    _mix(x, scratch, mixer)
    x += np.uint32(between)
    _mix(x, scratch, mixer)
    return x


def _mix(x: NDArray[uint32], scratch: NDArray[uint32], mixer: tuple[int, ...]) -> None:
    import numpy as np

    a, m, b, n, c = (np.uint32(word) for word in mixer)
    np.right_shift(x, a, out=scratch)
    x ^= scratch
    x *= m
    np.right_shift(x, b, out=scratch)
    x ^= scratch
    x *= n
    np.right_shift(x, c, out=scratch)
    x ^= scratch


def _mix_int(x: int, mixer: tuple[int, ...]) -> int:
    a, m, b, n, c = mixer
    x = ((x ^ (x >> a)) * m) & _MASK
    x = ((x ^ (x >> b)) * n) & _MASK
    return x ^ (x >> c)
