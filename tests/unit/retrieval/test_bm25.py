"""BM25: our streamed build against bm25s's own, ties, and queries that match nothing."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mempo.core import ConfigError, DataError, Passage
from mempo.retrieval import bm25
from mempo.retrieval.bm25 import Analyzer, Bm25Index, Bm25Options, best

PLAIN = Bm25Options(k1=1.2, b=0.75, stemmer="none", stopwords="none", title_weight=1)
WORDS = st.lists(st.sampled_from(["ant", "bee", "cat", "dog", "eel"]), max_size=8).map(" ".join)


def passages(*texts: str) -> list[Passage]:
    return [Passage(str(row), "", text) for row, text in enumerate(texts)]


def test_scores_are_lucenes_formula() -> None:
    index = Bm25Index.from_passages(passages("ant ant bee", "bee"), PLAIN)
    # "ant": 1 of 2 passages: idf = ln(1 + 1.5 / 1.5) = ln 2. Passage 0 has 3 words, the mean is 2:
    # norm = 1.2 * (0.25 + 0.75 * 3/2) = 1.65; score = ln 2 * 2 / (2 + 1.65).
    [[(row, score)]] = index.search(["ant"], 3)
    assert row == 0
    assert score == pytest.approx(math.log(2) * 2 / 3.65, rel=1e-6)


@settings(max_examples=30, deadline=None)
@given(texts=st.lists(WORDS, min_size=1, max_size=9).filter(any), query=WORDS, chunk=st.integers(1, 4))
def test_the_streamed_build_equals_bm25s_own_for_any_size_of_chunks(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], query: str, chunk: int
) -> None:
    folder = tmp_path_factory.mktemp("bm25") / "index"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bm25, "CHUNK_PASSAGES", chunk)
        bm25.build(passages(*texts), len(texts), folder, PLAIN)
    [streamed] = Bm25Index.open(folder, PLAIN).search([query], 5)
    [whole] = Bm25Index.from_passages(passages(*texts), PLAIN).search([query], 5)
    assert dict(streamed) == pytest.approx(dict(whole), rel=1e-5)


def test_case_49_a_query_that_matches_nothing_gets_an_empty_list() -> None:
    index = Bm25Index.from_passages(passages("ant", "bee"), Bm25Options())
    assert index.search(["zzzzqqqq", "", "  ", "the of", "?!", "\x00\x07", "\ud800"], 3) == [[]] * 7


def test_case_52_a_corpus_without_words_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no passage holds a word"):
        Bm25Index.from_passages(passages("?!", "the"), Bm25Options())
    with pytest.raises(DataError, match="no passage holds a word"):
        bm25.build(passages("?!"), 1, tmp_path / "index", Bm25Options())


def test_passages_that_share_no_word_with_the_query_are_no_hits_even_if_more_are_asked_for() -> None:
    index = Bm25Index.from_passages(passages("ant", "bee", "cat"), PLAIN)
    assert [row for row, _ in index.search(["bee"], 100)[0]] == [1]


def test_half_a_surrogate_in_a_query_leaves_the_other_words() -> None:
    index = Bm25Index.from_passages(passages("ant", "bee"), Bm25Options())
    assert [row for row, _ in index.search(["bee\ud800\x00 "], 3)[0]] == [1]


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0]), max_size=12), st.integers(1, 14))
def test_best_is_a_sort_by_score_then_row_without_zeros(scores: list[float], top_k: int) -> None:
    expected = sorted(
        ((row, score) for row, score in enumerate(scores) if score > 0), key=lambda hit: (-hit[1], hit[0])
    )
    assert best(np.array(scores, dtype=np.float32), top_k) == expected[:top_k]


def test_titles_count_as_often_as_they_are_told_to() -> None:
    analyzer = Analyzer(Bm25Options(title_weight=3))
    assert analyzer.passage_words(Passage("1", "Ant", "bee")) == ["ant", "ant", "ant", "bee"]


def test_stems_and_stop_words_can_be_switched_off() -> None:
    assert Analyzer(Bm25Options(stemmer="none")).terms("The running") == ["running"]
    assert Analyzer(Bm25Options(stopwords="none")).terms("The running") == ["the", "run"]


@pytest.mark.parametrize("wrong", [{"k1": -0.1}, {"b": 1.5}, {"title_weight": -1}])
def test_options_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="at least 0"):
        Bm25Options(**wrong)  # type: ignore[arg-type]
