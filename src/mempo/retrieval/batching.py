"""Requests that arrive together are searched together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mempo.core import Passage, Retriever


@dataclass(frozen=True, slots=True)
class _Waiting:
    queries: Sequence[str]
    top_k: int
    result: asyncio.Future[list[list[Passage]]]


class BatchingRetriever:
    """A retriever in front of another that searches one batch at a time.

    The first request is searched at once; those that come while a batch is under way are the next
    one. Equal queries of a batch are searched once. Nobody waits for a batch to fill.
    """

    def __init__(
        self, retriever: Retriever, *, max_queries: int = 256, on_batch: Callable[[int], None] | None = None
    ) -> None:
        """`max_queries` bounds a batch of several requests; `on_batch` is told the size of each batch."""
        self._retriever = retriever
        self._max_queries = max_queries
        self._on_batch = on_batch
        self._waiting: list[_Waiting] = []
        self._worker: asyncio.Task[None] | None = None

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """As `Retriever.search`; an error of a batch reaches everyone in it."""
        if not queries:
            return []
        waiting = _Waiting(queries, top_k, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        return await waiting.result

    async def _work(self) -> None:
        try:
            while self._waiting:
                await asyncio.sleep(0)  # requests that are ready in this turn of the loop join in
                await self._search(self._take())
        finally:
            self._worker = None

    def _take(self) -> list[_Waiting]:
        """The oldest requests that fit one batch; one request alone always fits."""
        count = size = 0
        for waiting in self._waiting:
            size += len(waiting.queries)
            if count and size > self._max_queries:
                break
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return [waiting for waiting in batch if not waiting.result.done()]  # done: its caller has gone

    async def _search(self, batch: list[_Waiting]) -> None:
        if not batch:
            return
        queries = list(dict.fromkeys(query for waiting in batch for query in waiting.queries))
        if self._on_batch is not None:
            self._on_batch(len(queries))
        try:
            found = await self._retriever.search(queries, max(waiting.top_k for waiting in batch))
        except Exception as error:  # noqa: BLE001 - a boundary: whatever fails belongs to those who wait
            for waiting in batch:
                if not waiting.result.done():
                    waiting.result.set_exception(error)
            return
        passages = dict(zip(queries, found, strict=True))
        for waiting in batch:
            if not waiting.result.done():
                waiting.result.set_result([passages[query][: waiting.top_k] for query in waiting.queries])
