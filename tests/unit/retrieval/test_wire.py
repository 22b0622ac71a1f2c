"""The wire format: what is written can be read, and nothing else is taken for it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mempo.core import Passage
from mempo.retrieval.wire import (
    Health,
    parse_health,
    parse_response,
    render_health,
    render_request,
    render_response,
    replace_surrogates,
)

texts = st.text()  # of hypothesis never hold half surrogates
titles = texts.filter(lambda title: "\n" not in title)
passages = st.builds(Passage, texts, titles, texts, st.floats(allow_nan=False, allow_infinity=False))


@given(st.lists(st.lists(passages, max_size=3), max_size=3))
def test_what_is_rendered_with_scores_is_parsed_unchanged(results: list[list[Passage]]) -> None:
    assert parse_response(render_response(results, scores=True), len(results)) == results


@given(st.lists(passages, max_size=3))
def test_without_scores_only_the_score_is_lost(hits: list[Passage]) -> None:
    [parsed] = parse_response(render_response([hits], scores=False), 1)
    assert parsed == [Passage(hit.id, hit.title, hit.text) for hit in hits]


def test_the_request_is_search_r1s() -> None:
    assert render_request(["a", "b\ud800"], 3) == {"queries": ["a", "b\ufffd"], "topk": 3, "return_scores": True}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ([], "no list under 'result'"),
        (None, "no list under 'result'"),
        ({"error": "x"}, "no list under 'result'"),
        ({"result": "x"}, "no list under 'result'"),
        ({"result": []}, "1 queries were sent and 0 results came back"),
        ({"result": [[], []]}, "1 queries were sent and 2 results came back"),
        ({"result": ["x"]}, r"result\[0\] is not a list"),
        ({"result": [["x"]]}, r"result\[0\]\[0\] is not an object"),
        ({"result": [[{"id": "1"}]]}, r"result\[0\]\[0\] has no text"),
        ({"result": [[{"document": None, "score": 1}]]}, "has no text"),
        ({"result": [[{"document": {"contents": 3}, "score": 1}]]}, "has no text"),
        ({"result": [[{"document": {"contents": "t"}, "score": "1"}]]}, "not a finite number: '1'"),
        ({"result": [[{"document": {"contents": "t"}, "score": True}]]}, "not a finite number"),
        ({"result": [[{"document": {"contents": "t"}, "score": float("nan")}]]}, "not a finite number"),
        ({"result": [[{"document": {"contents": "t"}, "score": 10**400}]]}, "not a finite number"),
    ],
)
def test_other_answers_are_refused_with_the_place(body: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_response(body, 1)


def test_half_surrogates_in_an_answer_are_replaced() -> None:
    [[passage]] = parse_response({"result": [[{"id": "\udc00", "contents": "\ud83d and \U0001f600"}]]}, 1)
    assert (passage.id, passage.text) == ("\ufffd", "\ufffd and \U0001f600")


@given(texts)
def test_texts_without_half_surrogates_are_left_alone(text: str) -> None:
    assert replace_surrogates(text) == text


def test_health_is_read_back() -> None:
    health = Health("eval", "abc", 7, "bm25", "1.0")
    assert parse_health(render_health(health)) == health


@pytest.mark.parametrize(
    "body",
    [
        *({"status": "ok"}, [], "ok", None, {"service": "other"}, {"service": "mempo-retriever", "name": "x"}),
        render_health(Health("eval", "abc", 7, "bm25", "1.0")) | {"passages": float("inf")},  # 1e999 in its JSON
    ],
)
def test_a_strangers_health_is_refused(body: Any) -> None:
    with pytest.raises(ValueError, match="its /health"):
        parse_health(body)
