"""Requests that arrive together are searched together, and each gets its own answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from mempo.core import Passage, RetrievalError
from mempo.retrieval.batching import BatchingRetriever


class Slow:
    """Answers a query with top_k passages named after it, when it is let."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.gate = asyncio.Event()
        self.fails = False

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        self.batches.append(list(queries))
        await self.gate.wait()
        if self.fails:
            raise RetrievalError("broken")
        return [[Passage(f"{query}{rank}", "", query) for rank in range(top_k)] for query in queries]


def ids(results: list[list[Passage]]) -> list[list[str]]:
    return [[passage.id for passage in passages] for passages in results]


async def test_what_comes_while_a_batch_is_searched_is_the_next_batch() -> None:
    slow = Slow()
    retriever = BatchingRetriever(slow)
    first = asyncio.create_task(retriever.search(["a"], 1))
    await asyncio.sleep(0.01)
    others = [asyncio.create_task(retriever.search(queries, k)) for queries, k in ((["b", "c"], 2), (["c"], 1))]
    await asyncio.sleep(0.01)
    slow.gate.set()
    assert ids(await first) == [["a0"]]
    # Each answer has its own order and length, though "c" was searched once, for the larger top_k.
    assert ids(await others[0]) == [["b0", "b1"], ["c0", "c1"]]
    assert ids(await others[1]) == [["c0"]]
    assert slow.batches == [["a"], ["b", "c"]]


async def test_a_batch_is_bounded_and_one_large_request_is_never_cut() -> None:
    slow = Slow()
    slow.gate.set()
    sizes: list[int] = []
    retriever = BatchingRetriever(slow, max_queries=3, on_batch=sizes.append)
    await asyncio.gather(*(retriever.search(queries, 1) for queries in (["a", "b"], ["c", "d"], list("efgh"), ["i"])))
    assert sizes == [2, 2, 4, 1]


async def test_an_error_reaches_everyone_of_the_batch_and_the_next_batch_works() -> None:
    slow = Slow()
    slow.gate.set()
    slow.fails = True
    retriever = BatchingRetriever(slow)
    results = await asyncio.gather(retriever.search(["a"], 1), retriever.search(["b"], 1), return_exceptions=True)
    assert [type(result) for result in results] == [RetrievalError, RetrievalError]
    slow.fails = False
    assert ids(await retriever.search(["a"], 1)) == [["a0"]]


async def test_a_caller_that_leaves_does_not_disturb_the_others() -> None:
    slow = Slow()
    retriever = BatchingRetriever(slow)
    leaving, staying = (asyncio.create_task(retriever.search([query], 1)) for query in "ab")
    await asyncio.sleep(0.01)
    leaving.cancel()
    slow.gate.set()
    assert ids(await staying) == [["b0"]]
    with pytest.raises(asyncio.CancelledError):
        await leaving


async def test_no_queries_need_no_search() -> None:
    slow = Slow()
    assert await BatchingRetriever(slow).search([], 3) == []
    assert slow.batches == []
