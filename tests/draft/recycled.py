"""The plain twin of what the kernels keep of what targets said behind drafts that they refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.draft.hints import RecycledGains

ENTRIES, NEAR, ANY = 512, 3, -2
WORD = 1 << 64


def slot(before: int, last: int) -> int:
    pair = before % WORD * 0x9E3779B97F4A7C15 % WORD ^ last
    return (pair * 0xD1B54A32D192ED03 % WORD >> 32) % ENTRIES


class PlainRecycled:
    """Recycled tokens by slot; of those with the same slot the newest is kept."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[int, int, int, int]] = {}

    def learn(self, drafted: Sequence[int], chosen: Sequence[int], num_kept: int, place: int) -> None:
        for i in range(num_kept + 1, len(drafted)):
            for before in (drafted[i - 1], ANY) if chosen[i] >= 0 else ():
                self.kept[slot(before, drafted[i])] = (before, drafted[i], chosen[i], place + i)

    def look(self, before: int, last: int, place: int, gains: RecycledGains) -> tuple[int, float] | None:
        for known in (before, ANY):
            *pair, said, at = self.kept.get(slot(known, last), (None,) * 4)
            if pair == [known, last]:
                assert said is not None and at is not None
                near = abs(at - place) <= NEAR
                if known == ANY:
                    return (said, gains.token) if near else None
                return said, gains.pair if near else gains.far_pair
        return None


def merged(found: tuple[int, float] | None, said: tuple[int, float] | None) -> tuple[int, float] | None:
    """What the text and the target name together: both gains if they agree, else whoever gives more."""
    if found is None or said is None:
        return found or said
    if found[0] == said[0]:
        return found[0], found[1] + said[1]
    return max(found, said, key=lambda one: one[1])
