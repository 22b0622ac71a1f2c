"""The in-memory retriever follows the rules of the served ones."""

from __future__ import annotations

import pytest

from mempo.core import DataError, Passage, Retriever
from mempo.retrieval.memory import MemoryRetriever


async def test_it_is_a_retriever_and_gives_scores_in_falling_order() -> None:
    retriever = MemoryRetriever(
        [Passage("1", "Ant", "ant ant"), Passage("2", "", "an ant and a bee"), Passage("3", "", "x")]
    )
    assert isinstance(retriever, Retriever)
    [hits] = await retriever.search(["ant"], 5)
    assert [passage.id for passage in hits] == ["1", "2"]
    assert hits[0].score is not None
    assert hits[1].score is not None
    assert hits[0].score > hits[1].score > 0


def test_the_first_of_equal_ids_is_kept_and_empty_passages_never_come_back() -> None:
    retriever = MemoryRetriever([Passage("1", "", "ant"), Passage("1", "", "bee"), Passage("2", "", " ")])
    assert [[passage.text for passage in hits] for hits in retriever.find(["ant", "bee", ""], 5)] == [["ant"], [], []]


def test_case_52_a_retriever_of_empty_passages_is_refused() -> None:
    with pytest.raises(DataError, match="no passage holds a word"):
        MemoryRetriever([Passage("x", "", "")])
