"""A retriever in memory, for small corpora, tests and notebooks: no server, no files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from mempo.core import Passage
from mempo.retrieval.bm25 import Bm25Index, Bm25Options
from mempo.retrieval.corpus import is_empty


class MemoryRetriever:
    """BM25 over passages that are given, with the rules of the served indexes.

    The first of passages with one id is kept, empty ones are never returned, and passages that
    share no term with a query are not hits. Implements `mempo.core.Retriever`.

    >>> import asyncio
    >>> retriever = MemoryRetriever([Passage("1", "Paris", "Capital of France."), Passage("2", "Rome", "In Italy.")])
    >>> [[passage.title for passage in hits] for hits in asyncio.run(retriever.search(["france", "zzzzqqqq"], 3))]
    [['Paris'], []]
    """

    def __init__(self, passages: Iterable[Passage], options: Bm25Options | None = None) -> None:
        """Raises DataError where no passage has a word to search for."""
        first: dict[str, Passage] = {}
        for passage in passages:
            first.setdefault(passage.id, passage)
        self._passages = [passage for passage in first.values() if not is_empty(passage)]
        self._index = Bm25Index.from_passages(self._passages, options or Bm25Options())

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        return self.find(queries, top_k)

    def find(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """`search` for callers that are not coroutines."""
        return [
            [replace(self._passages[row], score=score) for row, score in hits]
            for hits in self._index.search(queries, top_k)
        ]
