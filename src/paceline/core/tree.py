"""Trees of drafts: a chain, and the branches that leave it.

A row's draft is a chain in most steps. A tree has further tokens, `Branches`, whose parents are named by index:
-1 is the row's newest token, then come the tokens of the chain, then those of the branches. A parent comes before
its children. The chain is a longest path, so that every token of a branch stands at a place of the chain.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = -1  # in place of a parent: the row's newest token


class Branches(NamedTuple):
    """Tokens of a tree beside its chain."""

    token_ids: tuple[int, ...]  # [num_branch_tokens]
    parents: tuple[int, ...]  # [num_branch_tokens] see the module

    def depths(self, num_chain: int) -> list[int]:
        """Return each token's depth; the chain's first has 1. num_chain: the chain's tokens."""
        found: list[int] = []
        for parent in self.parents:
            found.append(parent + 2 if parent < num_chain else found[parent - num_chain] + 1)
        return found

    def fits(self, num_chain: int) -> bool:
        """Return True if parents precede children and no branch outgrows the chain.

        num_chain: tokens of the chain.
        """
        if len(self.token_ids) != len(self.parents):
            return False
        if not all(ROOT <= parent < num_chain + i for i, parent in enumerate(self.parents)):
            return False
        return max(self.depths(num_chain), default=0) <= num_chain

    def path(self, index: int, num_chain: int) -> list[int]:
        """Return the indices from the root's child down to `index`, as parents have them."""
        found: list[int] = []
        while index != ROOT:
            found.append(index)
            index = self.parents[index - num_chain] if index >= num_chain else index - 1
        return found[::-1]

    def cut(self, num_chain: int, num_left: int) -> Branches | None:
        """Return the branches beside the chain's first `num_left` tokens; None without any."""
        return self.only(num_chain, num_left, lambda _: True)

    def only(self, num_chain: int, num_left: int, wanted: Callable[[int], bool]) -> Branches | None:
        """Return the wanted tokens beside the first `num_left` of a chain; None without any.

        A token goes with its parent. wanted: takes the index among the branches' tokens.
        """
        place = {index: index for index in range(ROOT, num_left)}
        depths, kept = self.depths(num_chain), list[int]()
        for i, parent in enumerate(self.parents):
            if parent in place and depths[i] <= num_left and wanted(i):
                place[num_chain + i] = num_left + len(kept)
                kept.append(i)
        if not kept:
            return None
        return Branches(tuple(self.token_ids[i] for i in kept), tuple(place[self.parents[i]] for i in kept))


def chain_and_branches(
    token_ids: Sequence[int], parents: Sequence[int]
) -> tuple[list[int], tuple[int, ...], Branches | None]:
    """Return a tree's chain, its indices in `token_ids`, and its branches.

    parents: [num_tokens] index of each token's parent, `ROOT` for the row's newest token; a parent comes before
    its children. Of several longest paths the one that ends first is the chain.
    """
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    chain: list[int] = []
    index = depths.index(max(depths)) if depths else ROOT
    while index != ROOT:
        chain.append(index)
        index = parents[index]
    chain.reverse()
    numbers = count(len(chain))
    of_chain = {old: new for new, old in enumerate(chain)}
    place = {ROOT: ROOT} | {
        old: of_chain[old] if old in of_chain else next(numbers) for old in range(len(parents))
    }
    beside = [old for old in range(len(parents)) if old not in of_chain]
    branches = Branches(tuple(token_ids[old] for old in beside), tuple(place[parents[old]] for old in beside))
    return [token_ids[old] for old in chain], tuple(chain), branches if beside else None


def walk(
    token_ids: Sequence[int], branches: Branches, choice: Callable[[int], int]
) -> tuple[list[int], tuple[int, ...]]:
    """Return the tokens that a row gains, and the indices of branch tokens among them.

    From the root on, the walk goes to the child that has the target's choice. A choice that no child has ends it.
    choice: the target's token at a scored position: 0 follows the newest token, i + 1 draft i.
    """
    num_chain, gained, off_chain = len(token_ids), list[int](), list[int]()
    at = ROOT
    while True:
        token = choice(at + 1)
        gained.append(token)
        child = _child(token_ids, branches, at, token)
        if child is None:
            return gained, tuple(off_chain)
        if child >= num_chain:
            off_chain.append(child - num_chain)
        at = child


def _child(token_ids: Sequence[int], branches: Branches, at: int, token: int) -> int | None:
    num_chain = len(token_ids)
    if at + 1 < num_chain and token_ids[at + 1] == token:  # of the root, too
        return at + 1
    for i, parent in enumerate(branches.parents):
        if parent == at and branches.token_ids[i] == token:
            return num_chain + i
    return None
