"""Heads as drafters: what they draft from pages is what they would draft from scratch, whatever went before."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from paceline.backend.reference.block_head import context_keys, correction
from paceline.backend.reference.head import fuse, last_norm, read_out, run_layers
from paceline.control.fixed import FixedK
from paceline.core.errors import ConfigError, DrafterMismatch
from paceline.core.nouns import PAGE_TOKENS, Batch, Draft, Plan, Scores, Taps, Verdict
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.core.sampling import choose_token
from paceline.draft import shipped
from paceline.draft.autoregressive import CATCH_UP_TOKENS, catch_up_tokens, in_pieces, share_out
from paceline.draft.heads import head_drafter
from paceline.draft.heads.head_drafter import HeadDrafter
from paceline.draft.heads.parallel import BLIND_GAIN
from paceline.draft.hints import MAX_MATCH, MIN_MATCH, Hints
from paceline.draft.registry import parse_spec
from paceline.engine.assembly import build
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.assembly.kv_choices import KV_SHARE
from paceline.engine.drafter_pool import DrafterPool
from paceline.engine.request_table import Limits
from paceline.model.heads.checkpoint import Head, load_head
from paceline.model.heads.config import read_config
from tests.draft.heads import CORRECTED, drafter_of, head_values, random_weights, trained_head, write_head
from tests.draft.recycled import PlainRecycled, merged
from tests.draft.test_head_forward import causal
from tests.engine.same_text import (
    BACKEND_OF,
    KV_TYPES,
    MAX_LEN,
    PLAIN,
    RestlessK,
    Settings,
    assert_same,
    make_engine,
    plain_answers,
    run,
    target,
)
from tests.model.helpers import pack
from tests.oracles.lookup import propose

if TYPE_CHECKING:
    from paceline.backend.reference.decoder import ReferenceDecoder
    from paceline.backend.seam import PassRequest, Pending
    from paceline.engine.engine import Engine

KINDS = ("eagle", "eagle3", "peagle", "block", CORRECTED)


def spec(kind: str, k: int = 4) -> str:
    decoder: ReferenceDecoder = target().decoder  # type: ignore[assignment]
    return f"{drafter_of(kind)}:model={trained_head(kind, decoder)},k={k}"


def requests(count: int = 12, max_tokens: int = 40) -> list[Request]:
    """Prompts that share a stem and part at a page border and beside it, greedy and not."""
    stem = tuple(range(40, 75))
    return [
        Request(
            str(i),
            stem[: (15, 16, 17, 32, 33)[i % 5]] + (50 + i % 3,) * (1 + i % 4),
            SamplingParams(
                temperature=(0.0, 0.7, 1.0)[i % 3],
                repetition_penalty=1.1 if i % 4 == 1 else 1.0,
                max_tokens=max_tokens,
                ignore_eos=True,
            ),
            seed=i,
        )
        for i in range(count)
    ]


# From scratch ------------------------------------------------------------------------------------


class Scratch:
    """Drafts for a text with nothing kept: the readable forward pass over all of it, for every token."""

    def __init__(self, head: Head, decoder: ReferenceDecoder) -> None:
        self.token_ids, self.decoder, self.config = head.token_ids, decoder, head.config
        self.weights = {name: torch.from_numpy(np.asarray(w, np.float64)) for name, w in head.weights.items()}
        if head.config.algorithm.guesses_features:
            self.weights |= {"head": decoder.head[head.token_ids], "target_norm": decoder.final_norm}
        self.fixed = self.weights["head"], head.token_ids

    def write_also(self, ids: list[int]) -> None:
        """Score the target's rows of these tokens, too."""
        rows, fixed_ids = self.fixed
        self.weights["head"] = torch.cat([rows, self.decoder.head[torch.tensor(ids, dtype=torch.int64)]])
        self.token_ids = np.concatenate([fixed_ids, np.array(ids, np.int64)])

    def features(self, ids: list[int]) -> torch.Tensor:
        """What the target has to say of every token, as it is kept: 16 bit."""
        pages = range(-(-len(ids) // 16))
        _, states = self.decoder.forward(
            pack([(ids, 0, pages)]), self.decoder.new_kv(len(pages)), taps=tuple(set(self.config.taps))
        )
        tapped = torch.cat([states[tap] for tap in self.config.taps], dim=-1)
        return fuse(self.config, self.weights, tapped).half().double()

    def last(self, ids: list[int], features: torch.Tensor, first: int, count: int) -> tuple[Any, Any]:
        """Logits [count, vocab] and fed-back features after the last entries of a text."""
        embedded = self.decoder.embed[torch.tensor(ids[first:])]
        positions = torch.arange(first, len(ids))
        hidden = run_layers(self.config, self.weights, embedded, features, positions, causal(self.config))
        logits, fed_back = read_out(self.config, self.weights, hidden[-count:])
        spread = np.full((count, self.decoder.config.vocab_size), -np.inf)
        spread[:, self.token_ids] = logits.numpy()
        return spread, fed_back

    def draft(self, ids: list[int], k: int, choose: Any, first: int = 1) -> list[int]:
        """Draft k tokens; `choose(logits, guesses)` picks one. Entries before `first` are not there."""
        if self.config.block:
            return self.draft_block(ids, k, choose, first - 1)
        features, guesses = self.features(ids)[first - 1 : -1], list[int]()
        if self.config.algorithm.parallel:
            mask = fuse(self.config, self.weights, self.weights["mask_hidden"][None]).float().double()
            inputs = torch.cat([features, mask.expand(k - 1, -1)])
            logits, _ = self.last(ids + [self.config.mask_token_id] * (k - 1), inputs, first, k)
            for row in logits:
                guesses.append(choose(row, guesses))
            return guesses
        for _ in range(k):
            logits, fed_back = self.last(ids + guesses, features, first, 1)
            guesses.append(choose(logits[0], guesses))
            features = torch.cat([features, fed_back.float().double()])
        return guesses

    def draft_block(self, ids: list[int], k: int, choose: Any, first: int) -> list[int]:
        """Draft k tokens of a block behind the context from token `first` on."""
        c, block, n = self.config, self.config.block, len(ids)
        assert block is not None
        features = self.features(ids[:-1])[first:] if n > 1 else torch.empty((0, c.layers.hidden_size)).double()
        context = list(context_keys(c, self.weights, features, torch.arange(first, n - 1)))

        def attend(layer: int, query: Any, key: Any, value: Any) -> Any:
            group = c.layers.num_heads // c.layers.num_kv_heads
            k, v = (
                torch.cat(pair).repeat_interleave(group, 1)
                for pair in zip(context[layer], (key, value), strict=True)
            )
            q, k, v = (x.transpose(0, 1)[None] for x in (query, k, v))
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            return mixed[0].transpose(0, 1).flatten(1)

        tokens = [ids[-1]] + [c.mask_token_id or 0] * (block.size - 1)
        embedded = self.decoder.embed[torch.tensor(tokens)]
        positions = torch.arange(n - 1, n - 1 + block.size)
        hidden = run_layers(c, self.weights, embedded, embedded, positions, attend)
        states = last_norm(c, self.weights, hidden)[block.first :]
        guesses, told = list[int](), torch.zeros((1, block.state_size)).double()
        for place in range(k):
            state, before = states[place : place + 1], torch.tensor([(ids + guesses)[-1]])
            logits = state @ self.weights["head"].T
            added, told = correction(block, self.weights, state, before, told)
            if added is not None:
                logits[:, : added.shape[1]] += added
            row = np.full(self.decoder.config.vocab_size, -np.inf)
            row[self.token_ids] = logits[0].numpy()
            guesses.append(choose(row, guesses))
        return guesses


def watch(engine: Engine, every: int = 1, first: int = 1, near: int | None = None) -> list[int]:
    """Compare every draft of an engine's head with one from scratch. Returns the lengths of those compared.

    Entries are there from `first` on, or from the last `near` ones of a row's first draft on.
    """
    drafter: Any
    (drafter,) = engine.drafting.drafters.values()
    decoder: ReferenceDecoder = target().decoder  # type: ignore[assignment]
    scratch = Scratch(load_head(Path(drafter.report()["model"]), decoder.config), decoder)
    rows, propose, compared = engine.target.rows, drafter.propose, list[int]()
    fixed = set(scratch.token_ids.tolist())
    own: dict[int, set[int]] = {}  # of the rows that drafted since they were admitted
    release, commit = drafter.release, drafter.commit
    begins: dict[int, int] = {}  # of the same rows, the first entry that is there
    said: defaultdict[int, PlainRecycled] = defaultdict(PlainRecycled)
    drafted: dict[int, list[int]] = {}

    def released(row: int) -> None:
        own.pop(row, None)
        begins.pop(row, None)
        said.pop(row, None)
        release(row)

    def committed(batch: Batch, scores: Scores, verdict: Verdict) -> None:
        for i, (r, v) in enumerate(zip(batch.rows, verdict.rows, strict=True)):
            chosen = scores.chosen[scores.cu_len[i] : scores.cu_len[i + 1]].tolist()
            if r.row in drafted:
                place = int(rows.length[r.row]) - len(v.token_ids)
                said[r.row].learn(drafted.pop(r.row)[: len(chosen)], chosen, v.num_accepted, place)
        commit(batch, scores, verdict)

    drafter.release, drafter.commit = released, committed  # type: ignore[method-assign]

    def watched(batch: Batch, plan: Plan) -> Draft:
        draft = propose(batch, plan)
        drafting = [r.row for r, d in zip(batch.rows, draft.rows, strict=True) if len(d)]
        own.update((row, set(rows.tokens(row).tolist()) - fixed) for row in drafting)
        scratch.write_also(sorted(set().union(*own.values())) if scratch.config.request_tokens else [])
        for r, d in zip(batch.rows, draft.rows, strict=True):
            ids = rows.tokens(r.row).tolist()
            if len(d):
                begins.setdefault(r.row, len(ids) - near + bool(scratch.config.block) if near else first)
            if len(d) and (batch.step + r.row) % every == 0:
                hint = partial(hinted_after, ids, len(d), drafter.hints, said[r.row])
                choose = partial(chosen_after, rows, r.row, hint)
                assert list(d.token_ids) == scratch.draft(ids, len(d), choose, begins[r.row])
                compared.append(len(d))
            if len(d):
                drafted[r.row] = [int(rows.tokens(r.row)[-1]), *d.token_ids]
        return draft

    drafter.propose = watched  # type: ignore[method-assign]
    return compared


def hinted_after(
    ids: list[int], k: int, hints: Hints, said: PlainRecycled, guesses: list[int]
) -> tuple[int, float] | None:
    """What followed where the text looked like its end before, or the target said, and what that is given.

    A gain of 0: of drafters none of whose guesses knows the others; all look at the end of what is committed.
    """
    if hints.gain:
        tail = (ids + guesses)[-MAX_MATCH:]
        token_ids, _, match = propose(ids, tail, 1, MIN_MATCH, MAX_MATCH, 1, 0)
        found = (token_ids[0], hints.gain * math.log(match)) if token_ids else None
        return merged(found, said.look(tail[-2], tail[-1], len(ids) + len(guesses), hints.recycled_gains))
    token_ids, _, match = propose(ids, ids[-MAX_MATCH:], k, MIN_MATCH, MAX_MATCH, MAX_MATCH, 0.05)
    place = len(guesses)
    return (token_ids[place], BLIND_GAIN * math.log(match)) if place < len(token_ids) else None


def chosen_after(rows: Any, row: int, hint: Any, logits: np.ndarray, guesses: list[int]) -> int:
    choose, hinted = rows.spec_after(row, guesses), hint(guesses)
    if choose.edits is None and hinted:
        logits = logits.copy()
        logits[hinted[0]] += hinted[1]
    return choose_token(logits, choose)


@pytest.mark.parametrize(
    "changed",
    [
        PLAIN,
        Settings(num_rows=3, prefill_tokens=5, prefix_cache=True),
        Settings(num_rows=5, num_pages=12, prefill_tokens=16, prefix_cache=True),
    ],
    ids=["plain", "chunks and prefix hits", "few pages"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_from_pages_are_drafts_from_scratch(
    kind: str, changed: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With K changing from step to step, rows that fell behind, cached pages and preempted requests."""
    monkeypatch.setattr(head_drafter, "catch_up_tokens", lambda *_: 30)
    monkeypatch.setattr(head_drafter, "CATCH_UP_TOKENS", 30)
    monkeypatch.setattr(head_drafter, "_LEAST_NEAR", 1000)  # all of a prompt: that less is read has its own test
    engine = make_engine(spec(kind), changed)
    if changed is not PLAIN:
        engine.controller = RestlessK(drafter_of(kind), 4, seed=2)
    compared = watch(engine, every=3)
    assert_same(plain_answers(requests()), run(engine, requests(), stagger=2))
    stats = engine.stats()
    assert len(compared) > 50
    assert stats.drafters[drafter_of(kind)].accepted > 10
    assert stats.drafter_failures == stats.untapped_tokens == 0
    assert (stats.cached_tokens > 0) == changed.prefix_cache
    assert (stats.preemptions > 0) == (changed.num_pages == 12)


def positions_read(engine: Engine) -> list[int]:
    """Return a list that gets the first position of every pass of an engine's head."""
    (drafter,) = engine.drafting.drafters.values()
    head, read = drafter._head, list[int]()  # type: ignore[attr-defined]
    launch = head.launch

    def launched(request: PassRequest) -> Pending:
        read.append(int(request.packed.positions.min()))
        return launch(request)

    head.launch = launched
    return read


def first_read(kind: str) -> int:
    """The first token that has an entry: that of most heads is made of the token before."""
    return 0 if drafter_of(kind) == "block" else 1


@pytest.mark.parametrize("kind", KINDS)
def test_cached_pages_are_not_computed_again(kind: str) -> None:
    engine = make_engine(spec(kind), Settings(prefix_cache=True))
    computed = positions_read(engine)
    prompt, params = tuple(range(40, 80)) * 2, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    run(engine, [Request("a", prompt, params, seed=0)])
    assert min(computed) == first_read(kind)
    computed.clear()
    run(engine, [Request("b", (*prompt[:70], 50, 51, 52), params, seed=0)])
    assert min(computed) == 64, "four pages of entries were there"


@pytest.mark.parametrize("kind", KINDS)
def test_with_many_rows_only_the_end_of_a_prompt_is_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was left out is not told to the prefix cache: a row alone reads it all."""
    monkeypatch.setattr(head_drafter, "_NEAR", 40)
    monkeypatch.setattr(head_drafter, "_LEAST_NEAR", 4)
    engine = make_engine(spec(kind), Settings(num_rows=5, num_pages=60, prefill_tokens=256, prefix_cache=True))
    compared = watch(engine, near=8)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    wanted = [Request(str(i), (*range(40, 70 + i), 50 + i), params, seed=0) for i in range(5)]
    assert_same(plain_answers(wanted), run(engine, wanted))
    assert len(compared) > 20
    assert engine.stats().drafter_failures == 0
    assert not any(engine.scheduler.pool._valid[drafter_of(kind)])
    alone: Any = engine.drafting.drafters[drafter_of(kind)]
    del alone.propose  # which compares with the end of a prompt
    read = positions_read(engine)
    run(engine, [replace(wanted[0], request_id="alone")])
    assert min(read) == first_read(kind)
    assert any(engine.scheduler.pool._valid[drafter_of(kind)])
    assert engine.stats().untapped_tokens == engine.stats().drafter_failures == 0


# Holes and failures ------------------------------------------------------------------------------


@pytest.mark.parametrize("types", ["f64", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_drafts_from_behind_a_hole(kind: str, types: str) -> None:
    """Pages that were cached while nobody took taps."""
    engine = make_engine(spec(kind), Settings(prefix_cache=True), types=types)
    kept = engine.drafting, engine.controller
    prompt, params = tuple(range(40, 80)), SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    engine.drafting, engine.controller = DrafterPool([], 320), FixedK()
    run(engine, [Request("a", prompt, params, seed=0)])
    engine.drafting, engine.controller = kept
    compared = watch(engine, first=33) if types == "f64" else []
    again = [Request(str(i), (*prompt[:36], 50 + i), params, seed=0) for i in range(2)]
    plain = plain_answers(again, types)
    assert_same(plain, run(engine, again))
    assert engine.stats().untapped_tokens == 64
    assert engine.stats().drafters[drafter_of(kind)].drafted > 20
    assert bool(compared) == (types == "f64")
    fresh = [Request("new", (99, *prompt), params, seed=0)]
    run(engine, fresh)
    assert engine.stats().untapped_tokens == 64


@pytest.mark.parametrize("kind", KINDS)
def test_lost_taps_cost_drafts_and_nothing_else(kind: str) -> None:
    engine = make_engine(spec(kind), Settings(num_rows=2, prefix_cache=True))
    head: Any = engine.drafting.drafters[drafter_of(kind)]
    write, calls = head._taps.write, [0]

    def sometimes(*tapped: Any) -> None:
        calls[0] += 1
        if calls[0] % 9 == 0:
            raise RuntimeError("lost")
        write(*tapped)

    head._taps.write = sometimes
    wanted = requests(6)
    answers = run(engine, wanted)
    assert_same(plain_answers(wanted), answers)
    assert engine.stats().drafter_failures == calls[0] // 9 > 3
    assert engine.stats().drafters[drafter_of(kind)].drafted > 50
    longer = [r.prompt_ids + tuple(answers[r.request_id].token_ids) for r in wanted]
    run(engine, [replace(r, prompt_ids=ids) for r, ids in zip(wanted, longer, strict=True)])
    assert engine.stats().untapped_tokens > 0, "what was cached without features is a hole for later requests"


@pytest.mark.parametrize("types", ["f64", "f32"])
@pytest.mark.parametrize("law", ["coupled", "block"])
@pytest.mark.parametrize("kind", KINDS)
def test_features_that_are_no_numbers_cost_drafts_only(kind: str, law: str, types: str) -> None:
    engine = make_engine(spec(kind), PLAIN, law, types)
    head: Any = engine.drafting.drafters[drafter_of(kind)]

    write = head._taps.write

    def broken(taps: Taps, counts: list[int]) -> None:
        write(replace(taps, states={tap: states * np.nan for tap, states in taps.states.items()}), counts)

    head._taps.write = broken
    wanted = [r for r in requests(6) if r.params.temperature == 0 or law == "coupled"]
    assert_same(plain_answers(wanted, types), run(engine, wanted))
    assert engine.stats().drafter_failures > 3
    assert not engine.stats().drafters


@pytest.mark.parametrize("law", ["rejection", "block"])
@pytest.mark.parametrize("kind", KINDS)
def test_other_laws_get_the_distributions_they_need(kind: str, law: str) -> None:
    engine = make_engine(spec(kind), PLAIN, law)
    got, expected = run(engine, requests()), plain_answers(requests())
    assert all(got[r.request_id] == expected[r.request_id] for r in requests() if r.params.temperature == 0)
    assert engine.stats().drafter_failures == 0
    assert engine.stats().drafters[drafter_of(kind)].accepted > 20


# Specs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ("eagle3", "peagle"))
def test_a_head_without_a_name_is_the_one_that_ships(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    with pytest.raises(ConfigError, match=f"paceline train {kind}"):
        make_engine(kind, PLAIN)
    decoder: ReferenceDecoder = target().decoder  # type: ignore[assignment]
    (tmp_path / target().fingerprint).mkdir()
    (tmp_path / target().fingerprint / kind).symlink_to(trained_head(kind, decoder))
    engine = make_engine(f"{kind}:k=3", PLAIN)
    assert_same(plain_answers(requests(4)), run(engine, requests(4)))
    assert engine.stats().drafters[drafter_of(kind)].accepted > 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_costs_is_known_from_its_files(kind: str) -> None:
    config = parse_spec(spec(kind))
    assert config is not None
    weights = load_head(Path(getattr(config, "model", "")), target().decoder.config).weights
    model = SimpleNamespace(config=target().decoder.config)
    assert config.num_weights(model) == sum(w.size for w in weights.values())  # type: ignore[arg-type]
    engine = make_engine(spec(kind), PLAIN)
    per_token = engine.kv_bytes_per_token - engine.target.kv_bytes_per_token
    num_layers = 2 if drafter_of(kind) in ("peagle", "block") else 1
    assert per_token == len(engine.target.taps) * 32 * 2 + num_layers * 2 * 2 * 8 * 8


@pytest.mark.parametrize(("kind", "other"), permutations(KINDS[:3], 2))
def test_a_head_of_another_kind_is_refused_with_its_spec(kind: str, other: str, tmp_path: Path) -> None:
    config = target().decoder.config
    values = head_values(other, config)
    write_head(tmp_path, values, config, random_weights(heads_config(values)))
    with pytest.raises(DrafterMismatch, match=f"--draft {other}:model="):
        make_engine(f"{kind}:model={tmp_path}", PLAIN)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_of_another_target_is_refused_with_a_reason(kind: str, tmp_path: Path) -> None:
    """The target has another width or vocabulary; the message names the head's target."""
    mine, named = target().decoder.config, {"verifier": {"name_or_path": "some/other-model"}}
    for change, reason in (({"hidden_size": 64}, "64"), ({"vocab_size": 9000}, "9000 tokens")):
        other = replace(mine, **change)
        values = head_values(kind, other, target_hidden_size=other.hidden_size, speculators_config=named)
        folder = tmp_path / reason
        folder.mkdir()
        config = read_config(values, other)
        write_head(folder, values, other, random_weights(config))
        with pytest.raises(DrafterMismatch, match=f"{reason}.*another model, some/other-model"):
            make_engine(f"{drafter_of(kind)}:model={folder}", PLAIN)


def test_an_eagle_head_may_write_some_tokens_only(tmp_path: Path) -> None:
    """These are the tokens that its file names, or as many of the lowest as are asked for."""
    mine = target().decoder.config
    values = head_values("eagle", mine, draft_vocab_size=mine.vocab_size)
    write_head(tmp_path, values, mine, random_weights(heads_config(values)))
    for given, size in (
        (spec("eagle"), 290),
        (f"eagle:model={tmp_path}", 320),
        (f"{spec('eagle')},vocabulary=50", 50),
    ):
        engine = make_engine(given, PLAIN)
        assert engine.drafting.drafters["eagle"].report()["tokens"] == size
    answers = run(engine, requests())
    assert_same(plain_answers(requests()), answers)
    assert engine.stats().drafters["eagle"].drafted > 50
    assert engine.stats().drafter_failures == 0
    with pytest.raises(ConfigError, match="vocabulary must be between 1 and 320"):
        make_engine(f"eagle:model={tmp_path},vocabulary=321", PLAIN)


def test_a_block_head_with_a_map_of_tokens_keeps_to_them(tmp_path: Path) -> None:
    """The corrector has rows for these tokens, also where the output rows are the target's."""
    mine = target().decoder.config
    values = head_values(CORRECTED, mine)
    weights = random_weights(heads_config(values))
    write_head(tmp_path, values, mine, {n: w for n, w in weights.items() if n != "head"})
    engine = make_engine(f"block:model={tmp_path},k=16", PLAIN)
    drafter = engine.drafting.drafters["block"]
    assert drafter.report()["tokens"] == 290
    assert drafter.report()["k"] == drafter.needs.max_k < 16
    with pytest.raises(ConfigError, match="its own tokens"):
        make_engine(f"block:model={tmp_path},vocabulary=300", PLAIN)


def test_the_pages_that_blocks_reach_into_are_counted() -> None:
    """One page for each row, beside the stores over the target's page table."""
    engine = make_engine(spec("block"), PLAIN)
    (drafter,) = engine.drafting.drafters.values()
    assert isinstance(drafter, HeadDrafter)
    assert drafter.needs.bytes_per_row == PAGE_TOKENS * drafter._kv.bytes_per_token
    (other,) = make_engine(spec("eagle3"), PLAIN).drafting.drafters.values()
    assert other.needs.bytes_per_row == 0


@pytest.mark.parametrize("types", ["f64", "int8"])
def test_spare_pages_are_in_the_promised_memory(types: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's pages and what blocks keep for rows are one share of the free memory, to a page."""
    own, limits = target(types), Limits(16, MAX_LEN, 512)
    page = PAGE_TOKENS * own.decoder.new_kv(1).bytes_per_token
    free = 40 * page
    monkeypatch.setattr("paceline.backend.registry.available_bytes", lambda: free)
    plain, drafting = (
        EngineConfig(
            draft=draft, backend=BACKEND_OF.get(types, "native"), weights=types, kv=KV_TYPES[types], limits=limits
        )
        for draft in ("off", spec("block"))
    )
    assert build.assemble(plain, own).engine.scheduler.pool.num_pages == 20
    engine = build.assemble(drafting, own).engine
    (drafter,) = engine.drafting.drafters.values()
    assert isinstance(drafter, HeadDrafter)
    pages = drafter._config.spare_pages(limits.num_rows)  # of rows and padding
    beside = pages * PAGE_TOKENS * drafter._kv.bytes_per_token
    assert beside > limits.num_rows * drafter.needs.bytes_per_row
    left = free * KV_SHARE - engine.scheduler.pool.num_pages * page - beside
    assert 0 <= left < page


def test_a_map_to_the_lowest_tokens_fits_the_corrector(tmp_path: Path) -> None:
    """The output rows are then the target's own matrix, which has more of them."""
    mine = target().decoder.config
    values = head_values(CORRECTED, mine)
    tensors = random_weights(heads_config(values))
    write_head(tmp_path, values, mine, {n: w for n, w in tensors.items() if n != "head"})
    stored = load_file(tmp_path / "model.safetensors")
    save_file(stored | {"d2t": np.zeros_like(stored["d2t"])}, tmp_path / "model.safetensors")
    engine = make_engine(f"block:model={tmp_path}", PLAIN, types="int8")
    assert_same(plain_answers(requests(), types="int8"), run(engine, requests()))
    assert engine.stats().drafter_failures == 0
    assert engine.stats().drafters["block"].drafted > 50


def heads_config(values: dict[str, Any]) -> Any:
    return read_config(values, target().decoder.config)


def test_what_fits_is_shared_out_nearest_first() -> None:
    assert share_out({1: 5, 2: 100, 3: 7}, 20) == ([1, 3], {2: 8})
    assert share_out({1: 5, 2: 100, 3: 7}, 12) == ([1, 3], {})
    assert share_out({4: 50}, 20) == ([], {4: 20})
    assert share_out({}, 20) == ([], {})


def test_what_is_caught_up_on_comes_in_pieces() -> None:
    assert list(in_pieces({1: 5, 2: 9, 3: 2}, 6)) == [{1: 5, 2: 1}, {2: 6}, {2: 2, 3: 2}]
    assert list(in_pieces({1: 6, 2: 0}, 6)) == [{1: 6}]
    assert not list(in_pieces({}, 6))


def test_a_small_drafter_catches_up_on_more_tokens() -> None:
    big, small = SimpleNamespace(num_layers=30, hidden_size=64), SimpleNamespace(num_layers=9, hidden_size=32)
    assert catch_up_tokens(big, 30, big) == CATCH_UP_TOKENS  # type: ignore[arg-type]
    assert catch_up_tokens(big, 3, big) == 10 * CATCH_UP_TOKENS  # type: ignore[arg-type]
    assert catch_up_tokens(small, 3, big) == 40 * CATCH_UP_TOKENS  # type: ignore[arg-type]
    assert catch_up_tokens(big, 9, small) == CATCH_UP_TOKENS, "a larger one is not starved"  # type: ignore[arg-type]


@pytest.mark.parametrize("types", ["f64", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_says_how_sure_it_is_of_every_draft(kind: str, types: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Draft] = []
    propose = DrafterPool.propose

    def watched(self: DrafterPool, batch: Batch, plan: Plan) -> Draft:
        seen.append(propose(self, batch, plan))
        return seen[-1]

    monkeypatch.setattr(DrafterPool, "propose", watched)
    engine = make_engine(spec(kind), PLAIN, types=types)
    run(engine, requests(6))
    drafts = [d for draft in seen for d in draft.rows if len(d)]
    assert drafts
    assert all(len(d.confidence or ()) == len(d) for d in drafts)
    found = [c for d in drafts for c in d.confidence or ()]
    assert all(0.0 <= c <= 1.0 for c in found)
    assert (min(found) < 0.5) == (kind == CORRECTED), "the lead of a best token is never negative, doubts may be"
