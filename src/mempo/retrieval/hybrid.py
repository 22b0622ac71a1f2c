"""Reciprocal rank fusion of two or more rankings (Cormack, Clarke and Buettcher, SIGIR 2009)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from mempo.retrieval.bm25 import Hit

FUSION_CONSTANT = 60
"""The paper's k: how little the first ranks stand out."""
DEPTH = 100
"""How far down each ranking is read."""


class Searcher(Protocol):
    """Anything that ranks rows for queries."""

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]: ...


class HybridIndex:
    """Ranks by the sum of 1 / (60 + rank) over its parts."""

    def __init__(self, parts: Sequence[Searcher]) -> None:
        self._parts = tuple(parts)

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        rankings = [part.search(queries, max(DEPTH, top_k)) for part in self._parts]
        return [fuse(ranked)[:top_k] for ranked in zip(*rankings, strict=True)]


def fuse(rankings: Sequence[Sequence[Hit]]) -> list[Hit]:
    """One ranking of several; ranks count from 1, ties go to the smaller row.

    >>> [(row, round(score, 6)) for row, score in fuse([[(7, 9.0), (3, 8.0)], [(3, 0.5)]])]
    [(3, 0.032522), (7, 0.016393)]
    """
    scores: defaultdict[int, float] = defaultdict(float)
    for ranking in rankings:
        for rank, (row, _) in enumerate(ranking, start=1):
            scores[row] += 1 / (FUSION_CONSTANT + rank)
    return sorted(scores.items(), key=lambda hit: (-hit[1], hit[0]))
