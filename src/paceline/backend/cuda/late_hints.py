"""Hints on the device: logits for tokens that a row's own text suggests.

The rule is that of `draft/hints.py` and `csrc/host/hints.h`, over rows whose newest tokens the host does not know.
"""

from __future__ import annotations

from functools import lru_cache
from math import log
from typing import TYPE_CHECKING

import torch

from paceline.backend.cuda.kernel_launch import Variant, launch, lists_variants, uses_kernels
from paceline.backend.cuda.late_lookup import PLACES, place_matches
from paceline.backend.cuda.row_tensors import MAX_DRAFTS
from paceline.core.nouns import PAGE_TOKENS, UNCHOSEN

if TYPE_CHECKING:
    from paceline.backend.cuda.device_rows import DeviceRows, Gathered
    from paceline.backend.seam import HintRule

MAX_PLACES = 64  # most earlier places that match the text; the latest are taken
MAX_LEVELS = 6  # most lengths of match that are followed; the longest are taken
ENTRIES = 512  # entries for a row's recycled tokens
NEAR = 3  # a recycled token counts for more within this many tokens of its place
ANY = -2  # stands for any token before the last, where only the last counts
_FIRST, _SECOND = 0x9E3779B97F4A7C15 - (1 << 64), 0xD1B54A32D192ED03 - (1 << 64)

Hint = tuple[torch.Tensor, torch.Tensor]  # token id of each row, -1 for none, and what is added to its logit


class LateHints:
    """Hints of one program, and the target's choices behind refused drafts."""

    def __init__(self, rows: DeviceRows, rule: HintRule) -> None:
        n, device = rows.num_rows + 1, rows.device
        self.rows, self.rule = rows, rule
        gains = [0.0, *(rule.gain * log(match) for match in range(1, rule.max_match + 1))]
        self.gains = torch.tensor(gains, dtype=torch.float32).to(device)  # [max_match + 1] by length of match
        self.said = torch.full(
            (n, ENTRIES, 4), -1, dtype=torch.int64, device=device
        )  # before, last, next, position
        self._drafted = torch.zeros(n, dtype=torch.bool, device=device)  # this program made the row's drafts
        if rule.recycles:
            rows.verdict_sinks.append(self.learn)

    def close(self) -> None:
        """Stop learning."""
        if self.rule.recycles:
            self.rows.verdict_sinks.remove(self.learn)

    def admit(self, row: int) -> None:
        """Begin a row without recycled tokens."""
        self.said[row].fill_(-1)
        self._drafted[row].fill_(False)

    def begin(self, rows: torch.Tensor, num_pages: int) -> HintTrail:
        """Begin the hints to a drafting of rows, none longer than `num_pages` pages."""
        self._drafted.index_fill_(0, rows, True)
        return HintTrail(self, rows, min(num_pages * PAGE_TOKENS, self.rows.max_len))

    def learn(self, g: Gathered, chosen: torch.Tensor, num_tokens: torch.Tensor) -> None:
        """Keep the target's choices behind the first draft that it refused, before rows advance.

        chosen: [num_wanted]. num_tokens: [num_rows] tokens that each row gains.
        """
        d, rows, spare = self.rows.on_device, g.step.rows, self.rows.num_rows
        at = torch.arange(1, MAX_DRAFTS + 1, device=rows.device)
        length = d.length[rows, None]
        drafted = torch.cat([d.token_ids[rows[:, None], (length - 1).clamp(min=0)], g.drafts], 1)
        said = chosen[(g.first_place[:, None] + at).clamp(max=len(chosen) - 1)]
        mine = self._drafted[rows] & (d.sampling[rows, 3] > 0)
        learns = mine[:, None] & (at >= num_tokens[:, None]) & (at <= g.num_drafts[:, None]) & (said >= 0)
        before, last = drafted[:, :-1], drafted[:, 1:]
        known = torch.stack([before, torch.full_like(before, ANY)], 2)
        said_of = (x[:, :, None].expand_as(known) for x in (last, said, length + at))
        both = torch.stack([known, *said_of], 3)
        entries, learns = both.flatten(1, 2), learns.repeat_interleave(2, 1)
        slots = _slot(entries[:, :, 0], entries[:, :, 1])
        later = torch.ones(2 * MAX_DRAFTS, 2 * MAX_DRAFTS, dtype=torch.bool, device=rows.device).triu(1)
        beaten = ((slots[:, :, None] == slots[:, None, :]) & later & learns[:, None, :]).any(2)  # by a newer entry
        self.said[torch.where(learns & ~beaten, rows[:, None], spare), slots] = entries
        self._drafted.index_fill_(0, rows, False)


class HintTrail:
    """Hints to one drafting, guess by guess."""

    def __init__(self, hints: LateHints, rows: torch.Tensor, width: int) -> None:
        """width: more than the tokens of any of the rows."""
        self._hints, self._rows, self._width = hints, rows, width
        state = hints.rows.on_device
        self._length = state.length[rows]
        newest = self._length[:, None] + torch.arange(-2, 0, device=rows.device)
        tail = torch.where(newest >= 0, state.token_ids[rows[:, None], newest.clamp(min=0)], UNCHOSEN)
        self._before, self._last = tail[:, 0], tail[:, 1]
        self._match = torch.zeros(0)
        if hints.rule.gain:
            self._match = place_matches(state, rows, hints.rule.max_match, width)

    def next(self, index: int, guess: torch.Tensor | None) -> Hint:
        """Return the hint to guess number `index`.

        guess: [n] the guess before; None: this is the first.
        """
        if guess is not None:
            self._before, self._last = self._last, guess
        rule = self._hints.rule
        text = said = None
        if rule.gain:
            text = self._repeated(guess)
        if rule.recycles:
            said = self._recycled(index)
        if text is None or said is None:
            found = text or said
            assert found is not None
            return found
        agree, more = text[0] == said[0], text[1] >= said[1]
        add = torch.where(agree, text[1] + said[1], torch.maximum(text[1], said[1]))
        return torch.where(agree | more, text[0], said[0]), add

    def ahead(self, depth: torch.Tensor, deepest: int) -> Hint:
        """Return hints to guesses that do not know those before them. ([n, deepest], [n])"""
        found = self._followed(depth, deepest)
        return found[0], self._hints.gains[found[1]]

    def _repeated(self, guess: torch.Tensor | None) -> Hint:
        """Return what followed earlier places that match the text and its guesses."""
        text = self._hints.rows.on_device.token_ids
        if uses_kernels(self._hints.gains):
            token_ids, level = self._by_kernels(text, guess)
        else:
            if guess is not None:
                here = text[self._rows, : self._width].roll(1, 1) == guess[:, None]
                longer = (self._match.roll(1, 1) + 1).clamp(max=self._hints.rule.max_match)
                place = torch.arange(self._width, device=guess.device)
                self._match = torch.where(here & (place > 0) & (place < self._length[:, None]), longer, 0)
            tokens, level = self._followed(torch.ones_like(self._length), 1)
            token_ids = tokens[:, 0]
        return token_ids, self._hints.gains[level]

    def _by_kernels(self, text: torch.Tensor, guess: torch.Tensor | None) -> Hint:
        rule, rows, n = self._hints.rule, self._rows, len(self._rows)
        longer = self._match if guess is None else torch.empty_like(self._match)
        ends, lengths = rows.new_zeros(n, MAX_PLACES), self._match.new_zeros(n, MAX_PLACES)
        sizes = text.stride(0), self._width, rule.min_match, rule.max_match
        length = self._hints.rows.on_device.length
        latest = _latest_variant(has_guess=guess is not None)
        launch(latest, (n,), text, length, rows, guess, self._match, longer, ends, lengths, *sizes)
        token_ids, level = torch.empty_like(rows), torch.empty_like(rows)
        launch(_most_variant(), (n,), text, rows, ends, lengths, token_ids, level, text.stride(0))
        self._match = longer
        return token_ids, level

    def _followed(self, depth: torch.Tensor, deepest: int) -> Hint:
        """Return paths of most of the earlier places, and their matches. ([n, deepest], [n])

        Of the longest matches the one whose path most places share; see `TextIndex.propose`.
        """
        rule, text = self._hints.rule, self._hints.rows.on_device.token_ids
        place = torch.arange(self._width, device=depth.device)
        as_now = torch.where(self._match >= rule.min_match, place, -1)
        ends = as_now.topk(min(MAX_PLACES, self._width), 1).values  # the latest first
        match = torch.where(ends >= 0, self._match.gather(1, ends.clamp(min=0)), 0)
        best, of = torch.full((len(depth), deepest), UNCHOSEN, device=depth.device), torch.zeros_like(depth)
        most = torch.zeros(len(depth), dtype=torch.float64, device=depth.device)
        level = torch.full_like(depth, rule.max_match + 1)
        order = torch.arange(ends.shape[1], device=depth.device)
        for _ in range(MAX_LEVELS):
            level = torch.where(match < level[:, None], match, 0).amax(1)
            path = (match >= level[:, None]) & (level > 0)[:, None]
            began, out = path.sum(1), torch.full_like(best, UNCHOSEN)
            reach = torch.minimum(depth, (level * rule.reach).to(torch.int64))
            chance, expected = torch.ones_like(most), torch.zeros_like(most)
            for index in range(deepest):
                at = ends + index
                behind = (at - self._length[:, None]).clamp(0, deepest - 1)
                token = torch.where(
                    at < self._length[:, None], text[self._rows[:, None], at.clamp(min=0)], out.gather(1, behind)
                )
                alike = (token[:, :, None] == token[:, None, :]) & path[:, None, :]
                votes = torch.where(path, alike.sum(2) * MAX_PLACES + (MAX_PLACES - 1 - order), -1).amax(1)
                winner = token.gather(1, (MAX_PLACES - 1 - votes % MAX_PLACES)[:, None]).squeeze(1)
                votes = votes // MAX_PLACES
                goes_on = (index < reach) & (votes > 0) & ~(votes < rule.least_share * began)
                out[:, index] = torch.where(goes_on, winner, UNCHOSEN)
                share = votes.to(torch.float64) / path.sum(1).clamp(min=1)
                chance = torch.where(goes_on, chance * share, 0.0)
                expected = expected + chance
                path = path & goes_on[:, None] & (token == winner[:, None])
            better = expected > most
            best, of = torch.where(better[:, None], out, best), torch.where(better, level, of)
            most = torch.maximum(most, expected)
        return best, of

    def _recycled(self, index: int) -> Hint:
        """Return what the target said behind the newest two tokens, or behind the last alone."""
        rule, said, here = self._hints.rule, self._hints.said, self._length + index
        known = torch.stack([self._before, torch.full_like(self._before, ANY)], 1)
        entry = said[self._rows[:, None], _slot(known, self._last[:, None])]  # [n, 2, 4]
        there = (entry[..., 0] == known) & (entry[..., 1] == self._last[:, None]) & (here >= 2)[:, None]
        near = (entry[..., 3] - here[:, None]).abs() <= NEAR
        pair, single = there[:, 0], there[:, 1] & near[:, 1]
        token_ids = torch.where(pair, entry[:, 0, 2], torch.where(single, entry[:, 1, 2], UNCHOSEN))
        of_pair = torch.where(near[:, 0], rule.pair, rule.far_pair)
        return token_ids, torch.where(pair, of_pair, torch.where(single, rule.token, 0.0)).to(torch.float32)


@lru_cache
def _latest_variant(*, has_guess: bool) -> Variant:
    return Variant(
        name="latest_places" + " guess" * has_guess,
        kernel="lookup_kernels:latest_places",
        arguments={
            **dict.fromkeys(("token_ids", "length", "rows"), "*i64"),
            "guess": "*i64" if has_guess else "none",
            **dict.fromkeys(("match", "longer"), "*i32"),
            "ends": "*i64",
            "lengths": "*i32",
            **dict.fromkeys(("stride", "width", "min_match", "max_match"), "i32"),
        },
        constants={"PLACES": PLACES, "MAX_PLACES": MAX_PLACES},
        unaligned=frozenset({"rows"}),
    )


@lru_cache
def _most_variant() -> Variant:
    return Variant(
        name="most_followed",
        kernel="lookup_kernels:most_followed",
        arguments={
            **dict.fromkeys(("token_ids", "rows", "ends"), "*i64"),
            "lengths": "*i32",
            **dict.fromkeys(("next_ids", "levels"), "*i64"),
            "stride": "i32",
        },
        constants={"MAX_PLACES": MAX_PLACES, "MAX_LEVELS": MAX_LEVELS, "NONE": UNCHOSEN},
        unaligned=frozenset({"rows"}),
    )


@lists_variants
def variants() -> list[Variant]:
    """Return the variants that there are."""
    return [_latest_variant(has_guess=False), _latest_variant(has_guess=True), _most_variant()]


def _slot(before: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return the slot of two tokens, as `RecycledTokens::slot`: products wrap."""
    return ((before * _FIRST ^ last) * _SECOND >> 32) & (ENTRIES - 1)
