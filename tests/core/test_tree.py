"""Trees of drafts against brute force: chain and branches, cuts, and the walk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.nouns import RowDraft
from paceline.core.tree import ROOT, walk
from paceline.core.tree_drafts import with_most

if TYPE_CHECKING:
    from collections.abc import Sequence

Texts = set[tuple[int, ...]]


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Tokens and parents, each before its children; siblings may carry the same token."""
    count = draw(st.integers(1, 10))
    parents = [draw(st.integers(ROOT, node - 1)) for node in range(count)]
    return [draw(st.integers(0, 3)) for _ in range(count)], parents


def texts_of(token_ids: Sequence[int], parents: Sequence[int]) -> Texts:
    """What stands along the path to each node."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(token_ids, parents, strict=True):
        found.append((*(found[parent] if parent != ROOT else ()), token))
    return set(found)


def texts_in(draft: RowDraft) -> Texts:
    chain = list(draft.token_ids)
    beside = draft.branches.token_ids if draft.branches else ()
    parents = [*range(ROOT, len(chain) - 1), *(draft.branches.parents if draft.branches else ())]
    return texts_of([*chain, *beside], parents)


@given(trees())
def test_a_tree_is_its_longest_path_and_branches(tree: tuple[list[int], list[int]]) -> None:
    draft = RowDraft.tree(*tree)
    texts = texts_of(*tree)
    assert texts_in(draft) == texts
    assert len(draft) == max(map(len, texts))
    assert len(draft) + draft.num_branch_tokens == len(tree[0])
    assert draft.branches is None or draft.branches.fits(len(draft))
    if draft.branches is not None:
        nodes = range(len(draft), len(draft) + draft.num_branch_tokens)
        assert draft.branches.depths(len(draft)) == [len(draft.branches.path(n, len(draft))) for n in nodes]


@given(trees(), st.integers(0, 10), st.integers(0, 10))
def test_a_cut_tree_has_only_paths_of_the_tree(tree: tuple[list[int], list[int]], k: int, most: int) -> None:
    draft = RowDraft.tree(*tree)
    cut = with_most(draft.first(k), most)
    assert len(cut) == min(k, len(draft))
    assert cut.num_branch_tokens <= most
    assert texts_in(cut) <= {text for text in texts_of(*tree) if len(text) <= k}
    assert cut.branches is None or cut.branches.fits(len(cut))
    assert texts_in(with_most(draft, 100)) == texts_of(*tree)


@given(trees(), st.lists(st.integers(0, 3), min_size=12, max_size=12))
def test_the_walk_goes_along_the_target_s_text(tree: tuple[list[int], list[int]], text: list[int]) -> None:
    """A target that writes one text: kept is the longest path that is a prefix of it."""
    draft = RowDraft.tree(*tree)
    chain, branches = list(draft.token_ids), draft.branches
    if branches is None:
        return
    depths = [*range(1, len(chain) + 1), *branches.depths(len(chain))]
    gained, off_chain = walk(chain, branches, lambda at: text[depths[at - 1] if at else 0])
    kept = max((t for t in texts_of(*tree) if list(t) == text[: len(t)]), key=len, default=())
    # Of siblings with the same token the first is followed, which may be the one whose path is shorter.
    assert gained == text[: len(gained)]
    assert len(gained) <= len(kept) + 1
    if len(texts_of(*tree)) == len(tree[0]):
        assert tuple(gained[:-1]) == kept
    beside = [branches.token_ids[i] for i in off_chain]
    assert gained[:-1] == [*chain[: len(gained) - 1 - len(beside)], *beside]


def test_parents_that_come_late_or_branches_that_are_too_deep_do_not_fit() -> None:
    from paceline.core.tree import Branches

    assert Branches((1, 2), (ROOT, 2)).fits(2)
    assert not Branches((1, 2), (3, 2)).fits(2)
    assert not Branches((1,), (1,)).fits(2)
    assert not Branches((1,), (-2,)).fits(2)
    assert not Branches((1, 2), (0,)).fits(2)
