"""What a search does when its server dies, freezes, is replaced, or answers nonsense: it ends in time."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.services.processes import MempoServer
from tests.services.stubs import HTML_502, Reply, StubServer, echo_result, in_turn, json_reply

from mempo.core import RetrievalError, WrongServiceError
from mempo.retrieval.bm25 import Bm25Options
from mempo.retrieval.client import HttpRetriever
from mempo.retrieval.index import build_index

ROWS = [
    {"id": "1", "title": "Paris", "text": "Paris is the capital of France."},
    {"id": "2", "title": "Rome", "text": "Rome is the capital of Italy."},
    {"id": "3", "title": "Tolvane", "text": "Mira Tolvane built a lighthouse."},
]
Client = Callable[..., HttpRetriever]

SLACK_SECONDS = 1.0
"""For a machine that is busy with other tests: what is excluded is a search that hangs."""


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("faults")
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    build_index([folder / "corpus.jsonl"], folder / "index", bm25_options=Bm25Options())
    return str(folder / "index")


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    made: list[HttpRetriever] = []

    def make(url: str, **options: Any) -> HttpRetriever:
        made.append(HttpRetriever(url, **{"timeout_seconds": 1.0, "retries": 1, "backoff_seconds": 0.05, **options}))
        return made[-1]

    yield make
    for one in made:
        await one.aclose()


async def ids(search: HttpRetriever, query: str) -> list[str]:
    [passages] = await search.search([query], 1)
    return [passage.id for passage in passages]


async def timed(search: HttpRetriever, query: str) -> tuple[object, float]:
    """What came of a search, the failure included, and how long it took."""
    started = time.monotonic()
    try:
        return await ids(search, query), time.monotonic() - started
    except RetrievalError as error:
        return error, time.monotonic() - started


async def test_a_run_survives_the_sigkill_and_the_restart_of_its_server(index: str, client: Client) -> None:
    killed, restarted = asyncio.Event(), asyncio.Event()
    outcomes: list[tuple[object, float]] = []

    async def rollout(search: HttpRetriever, number: int) -> None:
        after = 0  # searches that began after the restart
        while after < 3:
            after += restarted.is_set()
            outcomes.append(await timed(search, f"lighthouse of Tolvane {number} {len(outcomes)}"))
            if killed.is_set() and not restarted.is_set():
                await asyncio.sleep(0.05)

    with MempoServer("serve-retriever", "--index", index, "--name", "train") as first:
        search = client(first.url, expect_name="train")
        run = asyncio.gather(*(rollout(search, number) for number in range(8)))
        await asyncio.sleep(0.3)
        killed.set()
        await asyncio.to_thread(first.kill)
        start = ("serve-retriever", "--index", index, "--name", "train", "--port", first.port)
        await asyncio.sleep(0.3)
        second = await asyncio.to_thread(MempoServer, *start)
        with second:
            restarted.set()
            await run
    failures = [outcome for outcome, _ in outcomes if isinstance(outcome, RetrievalError)]
    assert failures, "the server was gone for 0.3 s and more"
    assert all(outcome == ["3"] for outcome, _ in outcomes if not isinstance(outcome, RetrievalError))
    assert all(outcome == ["3"] for outcome, _ in outcomes[-8:])
    assert max(seconds for _, seconds in outcomes) < search.deadline_seconds + SLACK_SECONDS
    assert search.counters["failed_searches"] == len(failures)


async def test_case_73_another_service_on_the_port_after_a_crash_is_refused(index: str, client: Client) -> None:
    with MempoServer("serve-retriever", "--index", index, "--name", "train") as first:
        search = client(first.url, expect_name="train")
        assert await ids(search, "Rome") == ["2"]
        await asyncio.to_thread(first.kill)
        with pytest.raises(RetrievalError, match="ConnectError"):
            await ids(search, "Paris")
        start = ("serve-retriever", "--index", index, "--name", "eval", "--port", first.port)
        with MempoServer(*start), pytest.raises(WrongServiceError, match="its name is 'eval', not 'train'"):
            await ids(search, "Paris")


async def test_a_frozen_server_costs_the_deadline_and_no_more(index: str, client: Client) -> None:
    with MempoServer("serve-retriever", "--index", index) as server:
        search = client(server.url)
        assert await ids(search, "Rome") == ["2"]
        server.send(signal.SIGSTOP)
        outcomes = await asyncio.gather(*(timed(search, f"Rome {number}") for number in range(8)))
        assert all(isinstance(outcome, RetrievalError) for outcome, _ in outcomes)
        assert max(seconds for _, seconds in outcomes) < search.deadline_seconds + SLACK_SECONDS
        server.send(signal.SIGCONT)
        assert await ids(search, "Rome") == ["2"]


async def test_hostile_queries_get_an_answer_or_a_reason(index: str, client: Client) -> None:
    with MempoServer("serve-retriever", "--index", index) as server:
        search = client(server.url)
        with pytest.raises(RetrievalError, match=r"422 .*100000 characters in one query"):
            await search.search(["x" * 100_000], 3)
        assert search.counters["retries"] == 0
        hostile = ["a\x00b\x1b[31m", "\ud800\udfff\ud800", "\u202e\ufeff", "'; DROP TABLE --", '"}]}', "<|im_end|>", ""]
        *nothing, [passage] = await search.search([*hostile, "Rome"], 1)
        assert nothing == [[]] * len(hostile)
        assert (passage.id, passage.title, passage.text) == ("2", "Rome", "Rome is the capital of Italy.")
        assert server.process.poll() is None


@pytest.mark.parametrize(
    "fault",
    [
        json_reply({}, stall_seconds=3600),
        json_reply({"result": [[]]}, trickle_seconds=0.3),
        HTML_502,
        Reply(200, b""),
        Reply(200, b'{"result": [[{"docu'),
        Reply(200, b'{"result": [[]]}', declared_bytes=1000),
        json_reply({"result": []}),
        json_reply({"result": [[], []]}),
        Reply(429, b"", {"retry-after": "3600"}),
        Reply(302, b"", {"location": "http://127.0.0.1:9/"}),
    ],
    ids=[
        "stall",
        "trickle",
        "html-502",
        "empty-body",
        "half-json",
        "cut-connection",
        "too-few-results",
        "too-many-results",
        "asks-to-wait-an-hour",
        "redirect",
    ],
)
async def test_case_47_nonsense_is_an_error_in_time_and_the_next_search_works(client: Client, fault: Reply) -> None:
    with StubServer(in_turn(fault, echo_result)) as server:
        search = client(server.url, retries=0)
        outcome, seconds = await timed(search, "first")
        assert isinstance(outcome, RetrievalError)
        assert seconds < search.deadline_seconds + SLACK_SECONDS
        assert search.counters["failed_searches"] == 1
        assert await ids(search, "second") == ["1"]


async def test_a_fault_that_passes_is_not_noticed(client: Client, tmp_path: Path) -> None:
    with StubServer(in_turn(HTML_502, echo_result)) as server:
        search = client(server.url)
        assert await ids(search, "q") == ["1"]
        assert (search.counters["retries"], search.counters["failed_searches"]) == (1, 0)
