from __future__ import annotations

from collections.abc import Sequence

import pytest

from mempo.core import Passage, RetrievalError, ToolCall, ToolError
from mempo.env import SearchTool, ToolEnvironment
from mempo.retrieval.memory import MemoryRetriever

PASSAGES = [Passage("1", "Paris", "Capital of France."), Passage("2", "Rome", "Capital of Italy.")]


class CountingRetriever:
    """Counts its searches, or fails each of them."""

    def __init__(self, error: RetrievalError | None = None) -> None:
        self.queries: list[str] = []
        self.error = error

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        self.queries += queries
        if self.error is not None:
            raise self.error
        return [[] for _ in queries]


async def test_a_search_shows_its_passages_and_keeps_them() -> None:
    observation = await SearchTool(MemoryRetriever(PASSAGES), top_k=1).call({"query": "france"})
    assert observation.text == "[1] Paris: Capital of France."
    assert [passage.id for passage in observation.passages] == ["1"]
    assert observation.error is None


async def test_case_49_nothing_found_is_no_error() -> None:
    observation = await SearchTool(MemoryRetriever(PASSAGES)).call({"query": "zzzzqqqq"})
    assert (observation.text, observation.passages, observation.error) == ("No results.", (), None)


@pytest.mark.parametrize("arguments", [{"query": ""}, {"query": " \n"}, {}, {"query": 3}, {"query": "a", "top": 1}])
async def test_case_49_a_blank_query_is_an_invalid_call_and_never_sent(arguments: dict[str, object]) -> None:
    retriever = CountingRetriever()
    with pytest.raises(ToolError, match="not blank"):
        await SearchTool(retriever).call(arguments)
    assert retriever.queries == []


async def test_case_47_a_failed_search_is_told_and_kept_as_an_error() -> None:
    tool = SearchTool(CountingRetriever(RetrievalError("502 from http://127.0.0.1:1")))
    environment = ToolEnvironment([tool], cut=lambda text, n: text[:n], count=len)
    observation = await environment.call(ToolCall("search", {"query": "a"}))
    assert observation.text == "The search failed. Try again."
    assert observation.error == "RetrievalError: 502 from http://127.0.0.1:1"
