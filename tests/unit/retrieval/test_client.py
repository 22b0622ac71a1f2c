"""The retriever's client against servers that behave, misbehave, or are somebody else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.services.stubs import (
    HEALTH,
    HTML_502,
    Reply,
    Request,
    StubServer,
    echo_result,
    in_turn,
    json_reply,
    retriever,
)

from mempo.core import ConfigError, Passage, RetrievalError, Retriever, WrongServiceError
from mempo.retrieval.client import HttpRetriever

Client = Callable[..., HttpRetriever]


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    """Makes clients with short limits and closes them."""
    made: list[HttpRetriever] = []

    def make(url: str, **options: Any) -> HttpRetriever:
        made.append(HttpRetriever(url, **{"timeout_seconds": 5.0, "retries": 1, "backoff_seconds": 0.01, **options}))
        return made[-1]

    yield make
    for one in made:
        await one.aclose()


def found(*queries: str) -> list[list[Passage]]:
    """What `echo_result` finds."""
    return [[Passage("1", "T", query, 1.0)] for query in queries]


async def test_it_is_a_retriever_and_keeps_the_order_of_queries(client: Client) -> None:
    with StubServer(echo_result) as server:
        search = client(server.url)
        assert isinstance(search, Retriever)
        assert await search.search(["b", "a", "b", "c"], 3) == found("b", "a", "b", "c")
    assert server.bodies() == [{"queries": ["b", "a", "c"], "topk": 3, "return_scores": True}]  # "b" is sent once


async def test_more_queries_than_one_request_may_hold_are_split(client: Client) -> None:
    queries = [f"q{index}" for index in range(7)]
    with StubServer(echo_result) as server:
        assert await client(server.url, queries_per_request=3).search(queries, 1) == found(*queries)
    assert sorted(len(body["queries"]) for body in server.bodies()) == [1, 3, 3]


async def test_surplus_passages_are_cut(client: Client) -> None:
    hits = [[{"id": str(index), "contents": "x"} for index in range(5)]]
    with StubServer(lambda _: json_reply({"result": hits})) as server:
        [passages] = await client(server.url).search(["q"], 2)
    assert [passage.id for passage in passages] == ["0", "1"]


async def test_case_49_a_query_without_hits_finds_nothing_and_is_no_failure(client: Client) -> None:
    with StubServer(lambda _: json_reply({"result": [[]]})) as server:
        search = client(server.url)
        assert await search.search(["zzzzqqqq"], 3) == [[]]
    assert search.counters["failed_searches"] == search.counters["failures"] == 0


async def test_case_49_blank_queries_are_never_sent(client: Client) -> None:
    with StubServer(echo_result) as server:
        search = client(server.url)
        assert await search.search(["", "  \t\n", "\u3000"], 3) == [[], [], []]
        assert server.requests == []
        assert await search.search(["", "a", " "], 3) == [[], *found("a"), []]
    assert [body["queries"] for body in server.bodies()] == [["a"]]


@pytest.mark.parametrize("query", ["x" * 100_000, "a\x00b\x1b[31m\u202e", "\U0001f600" * 1000, "<|im_end|>"])
async def test_hostile_queries_arrive_unchanged(client: Client, query: str) -> None:
    with StubServer(echo_result) as server:
        assert await client(server.url).search([query], 1) == found(query)


async def test_half_surrogates_are_sent_as_replacement_characters(client: Client) -> None:
    with StubServer(echo_result) as server:
        assert await client(server.url).search(["a\ud800"], 1) == found("a\ufffd")


async def test_case_47_a_passing_502_and_an_empty_body_are_retried(client: Client) -> None:
    with StubServer(in_turn(HTML_502, Reply(200, b""), echo_result)) as server:
        search = client(server.url, retries=2)
        assert await search.search(["q"], 1) == found("q")
    assert (search.counters["retries"], search.counters["failed_searches"]) == (2, 0)


async def test_case_47_a_lasting_502_is_an_error_that_is_counted_and_says_what_failed(client: Client) -> None:
    with StubServer(lambda _: HTML_502) as server:
        search = client(server.url, retries=2)
        with pytest.raises(RetrievalError, match=r"retrieve failed after 3 attempts .* 502 Bad Gateway"):
            await search.search(["q"], 1)
    expected = {"searches": 1, "failed_searches": 1, "requests": 3, "retries": 2, "failures": 1}
    assert search.counters.items() >= expected.items()


async def test_wrong_lengths_are_an_error(client: Client) -> None:
    message = "2 queries were sent and 1 results came back"
    with StubServer(lambda _: json_reply({"result": [[]]})) as server, pytest.raises(RetrievalError, match=message):
        await client(server.url).search(["a", "b"], 1)
    assert len(server.requests) == 2


async def test_case_48_one_stalled_search_ends_in_time_and_delays_no_other(client: Client) -> None:
    def answer(request: Request) -> Reply:
        return json_reply({}, stall_seconds=3600) if request.json["queries"] == ["stall"] else echo_result(request)

    with StubServer(answer) as server:
        search = client(server.url, timeout_seconds=1.0, retries=1, backoff_seconds=0.25)
        seconds: dict[str, float] = {}

        async def rollout(query: str) -> object:
            started = time.monotonic()
            try:
                return await search.search([query], 3)
            except RetrievalError as error:
                return error
            finally:
                seconds[query] = time.monotonic() - started

        queries = ["stall", *(f"q{index}" for index in range(7))]
        results = await asyncio.gather(*map(rollout, queries))
    assert isinstance(results[0], RetrievalError)
    assert results[1:] == [found(query) for query in queries[1:]]
    assert 2.0 <= seconds["stall"] < 3.0  # two attempts of 1 s and a wait of at most 0.25 s
    assert max(seconds[query] for query in queries[1:]) < seconds["stall"]


async def test_equal_queries_in_flight_are_sent_once(client: Client) -> None:
    def slow(request: Request) -> Reply:
        return replace(echo_result(request), stall_seconds=0.2)

    with StubServer(slow) as server:
        search = client(server.url)
        results = await asyncio.gather(*(search.search(["same"], 3) for _ in range(5)), search.search(["same"], 4))
        assert results == [found("same")] * 6
    assert sorted(body["topk"] for body in server.bodies()) == [3, 4]  # another top_k is another question
    assert search.counters["shared_queries"] == 4


async def test_a_caller_that_gives_up_does_not_take_the_answer_from_the_others(client: Client) -> None:
    def slow(request: Request) -> Reply:
        return replace(echo_result(request), stall_seconds=0.3)

    with StubServer(slow) as server:
        search = client(server.url)
        first = asyncio.create_task(search.search(["q"], 1))
        await asyncio.sleep(0)
        second = asyncio.create_task(search.search(["q"], 1))
        await asyncio.sleep(0.05)
        first.cancel()
        assert await second == found("q")
        with pytest.raises(asyncio.CancelledError):
            await first
    assert len(server.requests) == 1


async def test_closing_ends_what_is_in_flight(client: Client) -> None:
    with StubServer(lambda _: json_reply({}, stall_seconds=3600)) as server:
        search = client(server.url)
        task = asyncio.create_task(search.search(["q"], 1))
        await asyncio.sleep(0.05)
        await search.aclose()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_case_54_a_proxy_in_the_environment_is_not_used_for_loopback(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with StubServer(echo_result) as server:
        assert await client(server.url).search(["q"], 1) == found("q")


async def test_case_54_other_hosts_are_searched_through_the_proxy(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with StubServer(echo_result) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        assert await client("http://retriever.invalid:8000").search(["q"], 1) == found("q")
    assert [request.path for request in proxy.requests] == ["http://retriever.invalid:8000/retrieve"]


async def test_case_73_the_service_that_is_meant_is_asked_once(client: Client) -> None:
    with StubServer(retriever(echo_result)) as server:
        search = client(server.url, expect_name="train", expect_corpus_hash="c0ffee")
        await asyncio.gather(*(search.search([f"q{index}"], 1) for index in range(5)))
    assert [request.path for request in server.requests].count("/health") == 1


async def test_case_73_a_check_at_start_tells_who_the_service_is_and_spares_the_first_search_its_own(
    client: Client,
) -> None:
    with StubServer(retriever(echo_result)) as server:
        search = client(server.url, expect_name="train")
        assert await search.check() == HEALTH
        await search.search(["q"], 1)
    assert [request.path for request in server.requests] == ["/health", "/retrieve"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda _: json_reply({"status": "ok"}), "does not say"),
        (lambda _: json_reply("ok"), "does not say"),
        (lambda _: Reply(200, b"<html>It works!</html>"), "is not JSON"),
        (lambda _: Reply(404, b"no such page"), "404"),
        (retriever(echo_result, replace(HEALTH, name="eval")), "its name is 'eval', not 'train'"),
        (retriever(echo_result, replace(HEALTH, corpus_hash="beef")), "the hash of its corpus is 'beef', not 'c0ffee'"),
    ],
    ids=["json", "text", "html", "404", "name", "corpus"],
)
async def test_case_73_a_stranger_is_refused_before_any_query_is_sent(
    client: Client, answer: Callable[[Request], Reply], reason: str
) -> None:
    with StubServer(answer) as server:
        search = client(server.url, expect_name="train", expect_corpus_hash="c0ffee")
        for call in (search.check(), search.search(["q"], 1)):
            message = f"{server.url} is not the retriever that was meant: .*{reason}"
            with pytest.raises(WrongServiceError, match=message):
                await call
    assert {request.path for request in server.requests} == {"/health"}
    assert search.counters["failed_searches"] == 1


async def test_case_73_a_service_that_changes_after_a_fault_is_noticed(client: Client) -> None:
    names = iter(["train", "eval"])

    def answer(request: Request) -> Reply:
        if request.path == "/health":
            return retriever(echo_result, replace(HEALTH, name=next(names)))(request)
        return next(replies)(request)

    replies = iter([echo_result, lambda _: HTML_502, echo_result])
    with StubServer(answer) as server:
        search = client(server.url, expect_name="train")
        assert await search.search(["a"], 1) == found("a")
        with pytest.raises(WrongServiceError, match="its name is 'eval'"):
            await search.search(["b"], 1)


async def test_without_an_expectation_a_server_without_health_will_do(client: Client) -> None:
    with StubServer(echo_result) as server:
        assert await client(server.url).search(["q"], 1) == found("q")
    assert [request.path for request in server.requests] == ["/retrieve"]


async def test_the_token_is_sent_and_in_no_message(client: Client) -> None:
    def refuse(request: Request) -> Reply:  # and repeat what was sent, as some servers do
        return Reply(401, request.headers["authorization"].encode())

    with StubServer(refuse) as server, pytest.raises(RetrievalError, match="401") as caught:
        await client(server.url, token="s3cret").search(["q"], 1)
    assert server.requests[0].headers["authorization"] == "Bearer s3cret"
    assert "s3cret" not in str(caught.value)


async def test_answers_are_kept_on_disk_by_service_corpus_query_and_top_k(client: Client, tmp_path: Path) -> None:
    cache = tmp_path / "answers.sqlite"
    with StubServer(retriever(echo_result)) as server:
        first, second = (client(server.url, cache_path=cache) for _ in range(2))
        assert await first.search(["q", "é"], 2) == found("q", "é")
        assert await second.search(["é", "q"], 2) == found("é", "q")
        assert second.counters["cached_queries"] == 2
        assert len(server.bodies()) == 1
        await second.search(["q"], 3)
        assert len(server.bodies()) == 2
    with StubServer(retriever(lambda _: json_reply({"result": [[]]}), replace(HEALTH, corpus_hash="other"))) as other:
        assert await client(other.url, cache_path=cache).search(["q"], 2) == [[]]


async def test_failures_are_not_cached(client: Client, tmp_path: Path) -> None:
    with StubServer(retriever(in_turn(Reply(400, b"no"), echo_result))) as server:
        search = client(server.url, cache_path=tmp_path / "c.sqlite")
        with pytest.raises(RetrievalError, match="400"):
            await search.search(["q"], 1)
        assert await search.search(["q"], 1) == found("q")


async def test_settings_that_make_no_sense_are_refused(client: Client) -> None:
    with pytest.raises(ConfigError, match="queries_per_request"):
        client("http://127.0.0.1:1", queries_per_request=0)
    with pytest.raises(ConfigError, match="top_k"):
        await client("http://127.0.0.1:1").search(["q"], 0)
