"""BranchPages in a pass: each token sees its ancestors only, and has the bits of a pass over its own path."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from paceline.backend.branches import NUM_BRANCH_PAGES, BranchPages
from paceline.backend.reference.attention import attend, plan_tiles
from paceline.backend.seam import Packed, PassRequest
from paceline.core.nouns import Batch, BatchRow, Draft, RowDraft, RowVerdict, SamplingSpec, Scores, Taps, Verdict
from paceline.core.params import SamplingParams
from paceline.core.tree import ROOT
from tests.backend.backends import ALL_BACKENDS
from tests.engine.trees import paths
from tests.model.helpers import pack, run_pass
from tests.oracles.tree_attention import attend_along_paths
from tests.tiny import tiny_config, tiny_weights

if TYPE_CHECKING:
    from paceline.backend.seam import Decoder

CONFIG = tiny_config(num_layers=3)
WEIGHTS: Any = tiny_weights(CONFIG, dtype=torch.float32)
NUM_PAGES = 6  # of rows
LOGITS = SamplingSpec("logits", SamplingParams(temperature=0.0))


class NoCopies:
    """A store that only notes which pages are copied."""

    bytes_per_token = 0

    def __init__(self) -> None:
        self.copied: list[tuple[int, int]] = []
        self.refuses = False

    def copy_page(self, source: int, target: int) -> None:
        if self.refuses:
            raise RuntimeError("out of order")
        self.copied.append((source, target))


def random_tree(random: Random, most: int = 9) -> tuple[RowDraft, list[list[int]], list[int]]:
    """A tree with at least one branch; the paths of its tokens, chain first; and these tokens."""
    while True:
        count = random.randint(2, most)
        parents = [random.randint(ROOT, node - 1) for node in range(count)]
        draft = RowDraft.tree([random.randrange(CONFIG.vocab_size) for _ in range(count)], parents)
        if draft.branches is not None:
            in_order = [*range(ROOT, len(draft) - 1), *draft.branches.parents]
            return draft, paths(in_order), [*draft.token_ids, *draft.branches.token_ids]


def one_row(length: int, newest: int, draft: RowDraft) -> tuple[Batch, Packed]:
    """A row of `length` committed tokens in pages 0, 1, ..., its newest token and the chain."""
    row = BatchRow(0, "0", 1, len(draft), samples=True, max_len=length + 12, decodes=True)
    pages = range(-(-(length + 12) // 16))
    return Batch(0, (row,)), pack([([newest, *draft.token_ids], length, pages)])


def decoder_of(backend: str, weights: str) -> Decoder:
    spec = ALL_BACKENDS[backend]
    kv_type = spec.kv_type(None, weights)
    return spec.load()(CONFIG, WEIGHTS, weights, kv_type, 2)


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize(("backend", "weights"), [("reference", "f64"), ("native", "int8"), ("native", "f32")])
def test_a_token_of_a_tree_says_what_the_last_of_its_path_says(backend: str, weights: str, number: int) -> None:
    """At every place of a page, over page borders: bit for bit on `native`."""
    random = Random(number)
    decoder, length = decoder_of(backend, weights), 9 + 3 * number
    text = [random.randrange(CONFIG.vocab_size) for _ in range(length + 1)]
    draft, all_paths, tokens = random_tree(random)
    batch, packed = one_row(length, text[-1], draft)
    kv: Any = decoder.new_kv(NUM_PAGES + NUM_BRANCH_PAGES)
    run_pass(decoder, pack([(text[:-1], 0, range(NUM_PAGES))]), kv, [LOGITS] * length)
    branches = BranchPages(kv, NUM_PAGES)
    tree = branches.pack(batch, Draft((draft,), branched=True), packed)
    tree.check(16 * (NUM_PAGES + NUM_BRANCH_PAGES), CONFIG.vocab_size)
    got = decoder.launch(PassRequest(tree, kv, [LOGITS] * len(tree.wanted))).wait().logits
    assert got is not None
    assert len(got) == 1 + len(tokens)
    for node, path in enumerate(all_paths):
        alone = [*text, *(tokens[n] for n in path)]
        own = decoder.new_kv(NUM_PAGES)
        specs = [LOGITS] * len(alone)
        expected = run_pass(decoder, pack([(alone, 0, range(NUM_PAGES))]), own, specs).logits
        assert expected is not None
        if backend == "native":
            np.testing.assert_array_equal(got[1 + node], expected[-1])
        else:
            np.testing.assert_allclose(got[1 + node], expected[-1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("length", [30, 31])
@pytest.mark.parametrize("branched", range(4))
def test_a_branch_reads_what_its_row_writes_in_the_same_pass(length: int, branched: int) -> None:
    """Enough rows for a tile of each to be one thread's; a branch at a page's border needs no copies."""
    decoder, count = decoder_of("native", "int8"), 4
    random = Random(branched)
    texts = [[random.randrange(CONFIG.vocab_size) for _ in range(length + 1)] for _ in range(count)]
    draft = RowDraft.tree([5, 6, 7], [ROOT, 0, ROOT])
    chain = RowDraft(draft.token_ids)
    drafts = [draft if index == branched else chain for index in range(count)]
    pages = [range(3 * index, 3 * index + 3) for index in range(count)]
    rows = tuple(
        BatchRow(index, str(index), 1, len(d), samples=True, max_len=length + 12, decodes=True)
        for index, d in enumerate(drafts)
    )
    packed = pack([([text[-1], *draft.token_ids], length, own) for text, own in zip(texts, pages, strict=True)])
    alone = decoder.new_kv(3)
    path = [*texts[branched], 7]
    expected = run_pass(decoder, pack([(path, 0, range(3))]), alone, [LOGITS] * len(path)).logits
    assert expected is not None
    for _ in range(4):
        kv: Any = decoder.new_kv(3 * count + NUM_BRANCH_PAGES)
        before = pack([(text[:-1], 0, own) for text, own in zip(texts, pages, strict=True)])
        run_pass(decoder, before, kv, [LOGITS] * len(before.wanted))
        tree = BranchPages(kv, 3 * count).pack(Batch(0, rows), Draft(tuple(drafts), branched=True), packed)
        assert tree.copies is not None
        assert bool(len(tree.copies)) == (length == 30)
        got = decoder.launch(PassRequest(tree, kv, [LOGITS] * len(tree.wanted))).wait().logits
        assert got is not None
        np.testing.assert_array_equal(got[3 * branched + 3], expected[-1])


@pytest.mark.parametrize("number", range(6))
def test_attention_over_branch_pages_is_attention_with_an_ancestor_mask(number: int) -> None:
    """Against a dense mask in numpy, over random queries, keys and values."""
    random, rng = Random(number), np.random.default_rng(number)
    length = 3 + 7 * number
    draft, all_paths, _ = random_tree(random)
    batch, packed = one_row(length, 1, draft)
    tree = BranchPages(NoCopies(), NUM_PAGES).pack(batch, Draft((draft,), branched=True), packed)
    shape = (len(tree.token_ids), 2, 8)
    query, key, value = (torch.from_numpy(rng.standard_normal(shape)) for _ in range(3))
    store = torch.from_numpy(rng.standard_normal((2, 16 * (NUM_PAGES + NUM_BRANCH_PAGES), 2, 8)))
    kv = NoCopies()
    again = BranchPages(kv, NUM_PAGES).pack(batch, Draft((draft,), branched=True), packed)
    np.testing.assert_array_equal(again.slots, tree.slots)
    committed = store[:, :length].clone()
    for source, target in kv.copied:
        store[:, target * 16 : target * 16 + 16] = store[:, source * 16 : source * 16 + 16]
    assert tree.copies is not None
    for part, own in ((0, key), (1, value)):
        store[part, tree.slots] = own
        store[part, tree.copies[:, 1]] = own[tree.copies[:, 0]]
    got = attend(query, store, plan_tiles(tree, 1, "cpu"))
    ancestors = [[0], *([0, *(1 + n for n in path)] for path in all_paths)]
    order = tree.wanted  # the newest token, the chain, the branches
    expected = attend_along_paths(
        query[order].numpy(),
        np.concatenate((committed[0].numpy(), key[order].numpy())),
        np.concatenate((committed[1].numpy(), value[order].numpy())),
        [[*range(length), *(length + n for n in path)] for path in ancestors],
    )
    np.testing.assert_allclose(got[order].numpy().reshape(expected.shape), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("number", range(10))
def test_a_kept_path_gives_its_taps_and_its_pages_to_the_row(number: int) -> None:
    random = Random(number)
    draft, all_paths, tokens = random_tree(random)
    batch, packed = one_row(20 + number, 1, draft)
    kv = NoCopies()
    branches = BranchPages(kv, NUM_PAGES)
    tree = branches.pack(batch, Draft((draft,), branched=True), packed)
    node = random.randrange(len(draft), len(tokens))
    path = all_paths[node]
    off_chain = tuple(n - len(draft) for n in path if n >= len(draft))
    verdict = Verdict((RowVerdict([*(tokens[n] for n in path), 0], len(path), off_chain=off_chain),))
    verdict.check(batch, Draft((draft,), branched=True))
    states = np.arange(len(tree.token_ids), dtype=np.float32)[:, None]
    taps = Taps({1: states.copy()}, tree.cu_len[:2], tree.slots)
    chosen = np.arange(len(tree.wanted)) + 100
    scores = Scores([0, len(chosen)], [LOGITS] * len(chosen), chosen, taps=taps)
    before, table = len(kv.copied), [7, 8, 9]
    rows: Any = SimpleNamespace(known_len=lambda _: 21 + number, page_ids=lambda _, first, end: table[first:end])
    read = branches.keep(rows, batch, Draft((draft,), branched=True), scores, verdict)
    read.check()
    assert read.chosen.tolist() == chosen[: 1 + len(draft)].tolist()
    assert read.taps is not None
    places = [0, *(int(tree.wanted[1 + n]) for n in path)]
    assert read.taps.states[1][: 1 + len(path), 0].tolist() == [float(at) for at in places]
    moved = kv.copied[before:]
    last = (20 + number + len(path)) // 16
    assert moved[-1][1] == table[last]
    assert all(source >= NUM_PAGES for source, _ in moved)
    assert not branches._held


def test_a_pass_that_cannot_be_packed_keeps_no_pages() -> None:
    """Where a store refuses the copy, the row's pages come back with the row."""
    draft = RowDraft.tree([1, 2, 3], [ROOT, 0, 0])
    batch, packed = one_row(20, 1, draft)
    kv = NoCopies()
    branches = BranchPages(kv, NUM_PAGES)
    rows: Any = SimpleNamespace(
        grammars=SimpleNamespace(states={}), num_scored=lambda _: (), may_branch=lambda _: True
    )
    for _ in range(2 * NUM_BRANCH_PAGES):
        kv.refuses = True
        with pytest.raises(RuntimeError):
            branches.pack(batch, Draft((draft,), branched=True), packed)
        assert branches._held
        branches.release(0)
        assert not branches._held
    assert branches.fit(rows, batch, [draft]).branched, "all pages are free again"
