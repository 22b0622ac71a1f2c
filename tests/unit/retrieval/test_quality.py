"""BM25 with its defaults finds what plain BM25 finds on the real questions, and more."""

from __future__ import annotations

from pathlib import Path

import pytest

from mempo.core.files import read_jsonl
from mempo.retrieval.bm25 import Bm25Index, Bm25Options
from mempo.retrieval.corpus import read_passages

FLOORS = {"hotpotqa": (0.91, 0.33), "2wikimultihopqa": (0.95, 0.26), "musique": (0.83, 0.13)}
"""Shares of questions with any and with all gold titles in the top 3, of BM25 without tuning."""


@pytest.mark.data
@pytest.mark.slow
def test_gold_titles_in_the_top_three_reach_the_floors_of_plain_bm25(shared_data: Path) -> None:
    passages = list(read_passages([shared_data / "corpus.jsonl"]))
    index = Bm25Index.from_passages(passages, Bm25Options())
    for name, floors in FLOORS.items():
        rows = [row for _, row in read_jsonl(shared_data / "qa" / f"{name}.jsonl")]
        found = [{passages[row].title for row, _ in hits} for hits in index.search([r["question"] for r in rows], 3)]
        gold = [set(row["supporting_titles"]) for row in rows]
        some = sum(bool(titles & wanted) for titles, wanted in zip(found, gold, strict=True)) / len(rows)
        every = sum(wanted <= titles for titles, wanted in zip(found, gold, strict=True)) / len(rows)
        assert some >= floors[0], name
        assert every >= floors[1], name
