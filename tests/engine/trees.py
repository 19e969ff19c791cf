"""A drafter of random trees, which knows what its target answers plainly and is right now and then."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from paceline.core.nouns import NO_DRAFT, Draft, RowDraft
from paceline.core.tree import ROOT
from paceline.draft.drafter import Needs
from tests.engine.same_text import VOCAB, Answer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.core.nouns import Batch, Plan, Scores, Verdict
    from paceline.core.request_nouns import Request
    from paceline.engine.engine import Engine

MOST = 16  # tokens of branches


class TreeDrafter:
    """Takes the place of an engine's only drafter."""

    needs = Needs(branches=MOST)

    def __init__(self, engine: Engine, answers: Mapping[str, Answer], seed: int) -> None:
        (self.name,) = engine.drafting.drafters
        self._rows, self._answers, self._random = engine.target.rows, answers, Random(seed)
        self._requests: dict[int, Request] = {}
        self.kept_beside = 0  # tokens of branches

    def propose(self, batch: Batch, plan: Plan) -> Draft:
        drafts = [self._tree(r.row, min(plan.k(r.row), r.max_drafts), plan.branches(r.row)) for r in batch.rows]
        return Draft(tuple(drafts))

    def _tree(self, row: int, depth: int, most: int) -> RowDraft:
        if not depth:
            return NO_DRAFT
        request = self._requests[row]
        known = self._rows.known_len(row) - len(request.prompt_ids)
        truth = self._answers[request.request_id].token_ids[known:]
        token_ids, parents, depths = list[int](), list[int](), list[int]()
        right = {ROOT: 0}  # node -> depth, of those whose path is the answer
        for node in range(self._random.randint(1, depth + most)):
            parent = self._random.choice([node - 1, *([ROOT, *range(node)] if node else [])])
            at = 0 if parent == ROOT else depths[parent]
            if at >= depth or len(parents) - max(depths, default=0) >= most:
                break
            token = self._random.randrange(VOCAB)
            if parent in right and at < len(truth) and self._random.random() < 0.7:
                token = truth[at]
                right[node] = at + 1
            token_ids.append(token)
            parents.append(parent)
            depths.append(at + 1)
        return RowDraft.tree(token_ids, parents, self.name)

    def admit(self, row: int, request: Request, valid_lens: Mapping[str, int]) -> None:
        self._requests[row] = request

    def commit(self, batch: Batch, scores: Scores, verdict: Verdict) -> None:
        self.kept_beside += sum(len(v.off_chain) for v in verdict.rows)

    def valid_lens(self, row: int) -> Mapping[str, int]:
        return {}

    def release(self, row: int) -> None:
        del self._requests[row]

    def forget(self) -> None:
        pass

    def report(self) -> Mapping[str, Any]:
        return {}


def plant(engine: Engine, answers: Mapping[str, Answer], seed: int) -> TreeDrafter:
    """Put random trees in the place of an engine's only drafter."""
    drafter = TreeDrafter(engine, answers, seed)
    engine.drafting.drafters[drafter.name] = drafter
    return drafter


def paths(parents: Sequence[int]) -> list[list[int]]:
    """Each node's path from the root's child."""
    found: list[list[int]] = []
    for node, parent in enumerate(parents):
        found.append([*(found[parent] if parent != ROOT else []), node])
    return found
