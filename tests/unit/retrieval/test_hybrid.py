"""Reciprocal rank fusion."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mempo.retrieval.bm25 import Hit
from mempo.retrieval.hybrid import DEPTH, HybridIndex, fuse


class Fixed:
    def __init__(self, ranking: list[Hit]) -> None:
        self.ranking = ranking
        self.asked: list[int] = []

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        self.asked.append(top_k)
        return [self.ranking[:top_k] for _ in queries]


def test_scores_are_sums_of_inverse_ranks_and_ties_go_to_the_smaller_row() -> None:
    # Row 5 is 1st and 2nd: 1/61 + 1/62. Rows 3 and 4 are 3rd once each: 1/63, a tie.
    fused = fuse([[(5, 9.0), (8, 8.0), (4, 7.0)], [(8, 1.0), (5, 0.9), (3, 0.8)]])
    assert [row for row, _ in fused] == [5, 8, 3, 4]
    assert fused[0][1] == pytest.approx(1 / 61 + 1 / 62)
    assert fused[2][1] == pytest.approx(1 / 63)


def test_a_ranking_that_is_empty_changes_nothing() -> None:
    assert [row for row, _ in fuse([[(2, 1.0), (1, 0.5)], []])] == [2, 1]


def test_parts_are_read_deeper_than_what_is_returned() -> None:
    # Row 9 is last of ten in both rankings and beats the first of each, which is in one alone.
    parts = [Fixed([(row, 1.0) for row in (*range(9), 9)]), Fixed([(row, 1.0) for row in (*range(20, 29), 9)])]
    [[hit]] = HybridIndex(parts).search(["q"], 1)
    assert hit[0] == 9
    assert parts[0].asked == [DEPTH]
