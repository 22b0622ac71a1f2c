"""How often the top k of a question's own text hold a gold title, and all of them.

    python benchmarks/retrieval_quality.py --index indexes/bm25 --questions qa/hotpotqa.jsonl qa/musique.jsonl

A question counts for `any` if one of its supporting titles is among the titles of the top k, for
`all` if every one is. Of a hybrid index its parts are measured
as well, and of flat vectors an HNSW graph of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from mempo.core.files import read_jsonl
from mempo.retrieval.bm25 import Bm25Index
from mempo.retrieval.corpus import StoredPassages
from mempo.retrieval.dense import DenseIndex
from mempo.retrieval.hybrid import HybridIndex, Searcher
from mempo.retrieval.index import read_manifest


@dataclass(frozen=True)
class Args:
    index: Path
    """An index made by `mempo index build`."""
    questions: tuple[Path, ...]
    """Files of {"question", "supporting_titles"}."""
    top_k: int = 3


def main(args: Args) -> None:
    manifest = read_manifest(args.index)
    data = args.index / manifest.data
    passages = StoredPassages.open(data)
    searchers: dict[str, Searcher] = {}
    if manifest.bm25 is not None:
        searchers["bm25"] = Bm25Index.open(data / "bm25", manifest.bm25)
    if manifest.dense is not None:
        dense = DenseIndex.open(data / "dense", manifest.dense)
        searchers[f"dense, {manifest.dense.search}"] = dense
        if manifest.bm25 is not None:
            searchers["hybrid"] = HybridIndex(list(searchers.values()))
        if manifest.dense.search == "flat":
            searchers["dense, hnsw"] = dense.approximate()
    print(f"| index | {' | '.join(path.stem for path in args.questions)} |")
    print("|---" * (1 + len(args.questions)) + "|")
    for name, searcher in searchers.items():
        cells = [
            " / ".join(f"{rate:.3f}" for rate in measure(searcher, passages, path, args.top_k))
            for path in args.questions
        ]
        print(f"| {name} | {' | '.join(cells)} |")


def measure(searcher: Searcher, passages: StoredPassages, questions: Path, top_k: int) -> tuple[float, float]:
    """Shares of questions with some and with all gold titles in the top k."""
    rows = [row for _, row in read_jsonl(questions)]
    found = searcher.search([row["question"] for row in rows], top_k)
    some, all_ = 0, 0
    for row, hits in zip(rows, found, strict=True):
        titles, gold = {passages[place].title for place, _ in hits}, set(row["supporting_titles"])
        some += bool(titles & gold)
        all_ += gold <= titles
    return some / len(rows), all_ / len(rows)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
