"""Web search behind the retriever's interface: results, recording, replay, and a key that stays secret."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.services.stubs import HTML_502, ONLY_127_0_0_1, Reply, Request, StubServer, in_turn, json_reply, page

from mempo.core import ConfigError, Passage, RetrievalError, Retriever, ToolError
from mempo.retrieval.cache import DiskCache
from mempo.retrieval.fetch import PageFetcher
from mempo.retrieval.web import NotRecordedError, Recording, WebPages, WebSearch

KEY = "serper-key-123"
Web = Callable[..., WebSearch]


def organic(*titles: str) -> Reply:
    return json_reply(
        {
            "searchParameters": {"q": "x"},
            "organic": [
                {"title": title, "link": f"https://{title}.example/", "snippet": f"About\n{title}.", "position": index}
                for index, title in enumerate(titles, start=1)
            ],
        }
    )


def passage(title: str) -> Passage:
    return Passage(f"https://{title}.example/", title, f"About {title}.")


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    return DiskCache(tmp_path / "web.sqlite")


@pytest.fixture
async def web() -> AsyncIterator[Web]:
    made: list[WebSearch] = []

    def make(url: str, recording: Recording | None = None, **options: Any) -> WebSearch:
        made.append(WebSearch(url, KEY, recording or Recording(None), **{"backoff_seconds": 0.01, **options}))
        return made[-1]

    yield make
    for one in made:
        await one.aclose()


async def test_organic_results_become_passages(web: Web) -> None:
    with StubServer(lambda _: organic("a", "b", "c")) as server:
        search = web(f"{server.url}/search")
        assert isinstance(search, Retriever)
        assert await search.search(["q é", " "], 2) == [[passage("a"), passage("b")], []]
    [request] = server.requests
    assert (request.path, request.json, request.headers["x-api-key"]) == ("/search", {"q": "q é", "num": 10}, KEY)


@pytest.mark.parametrize(("top_k", "asked"), [(1, 10), (10, 10), (11, 20)])
async def test_results_are_asked_for_in_whole_pages(web: Web, top_k: int, asked: int) -> None:
    with StubServer(lambda _: organic()) as server:
        await web(server.url).search(["q"], top_k)
    assert server.requests[0].json["num"] == asked


async def test_a_search_that_found_nothing_is_no_failure(web: Web) -> None:
    with StubServer(lambda _: json_reply({"searchParameters": {}})) as server:
        assert await web(server.url).search(["zzzzqqqq"], 3) == [[]]


@pytest.mark.parametrize("answer", [[], "x", {"organic": "x"}, {"organic": ["x"]}])
async def test_other_answers_are_an_error_and_are_not_recorded(web: Web, cache: DiskCache, answer: Any) -> None:
    with StubServer(lambda _: json_reply(answer)) as server, pytest.raises(RetrievalError, match="not a search result"):
        await web(server.url, Recording(cache), retries=0).search(["q"], 3)
    assert len(cache) == 0
    cache.close()


async def test_passing_faults_are_retried(web: Web) -> None:
    with StubServer(in_turn(HTML_502, Reply(429), organic("a"))) as server:
        assert await web(server.url).search(["q"], 3) == [[passage("a")]]


async def test_a_recording_is_replayed_without_the_network(web: Web, cache: DiskCache) -> None:
    with StubServer(lambda request: organic(request.json["q"])) as server:
        recorder = web(server.url, Recording(cache))
        for _ in range(2):  # the second time from the recording
            assert await recorder.search(["a", "b"], 5) == [[passage("a")], [passage("b")]]
        assert len(server.requests) == 2
        replayed = web(server.url, Recording(cache, replay=True))
        assert await replayed.search(["b"], 3) == [[passage("b")]]  # a smaller top_k is in the recording too
        with pytest.raises(NotRecordedError, match="not recorded: 'new'"):
            await replayed.search(["a", "new"], 3)
        assert len(server.requests) == 2
    cache.close()


async def test_replay_can_answer_what_it_does_not_know_with_nothing_and_counts_it(web: Web, cache: DiskCache) -> None:
    with StubServer(lambda _: organic("a")) as server:
        search = web(server.url, Recording(cache, replay=True), on_miss="empty")
        assert await search.search(["new"], 3) == [[]]
        assert (search.misses, server.requests) == (1, [])
    cache.close()


def test_replay_without_a_recording_is_refused() -> None:
    with pytest.raises(ConfigError, match="replay needs the cache"):
        Recording(None, replay=True)


async def test_one_failed_query_does_not_lose_the_others_recordings(web: Web, cache: DiskCache) -> None:
    def answer(request: Request) -> Reply:
        return Reply(400, b"bad") if request.json["q"] == "bad" else organic(request.json["q"])

    with StubServer(answer) as server, pytest.raises(RetrievalError, match="400"):
        await web(server.url, Recording(cache)).search(["bad", "a"], 3)
    assert len(cache) == 1
    cache.close()


async def test_the_key_is_in_no_message_and_in_no_recording(web: Web, tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "r.sqlite")

    def answer(request: Request) -> Reply:
        if request.json["q"] == "bad":
            return json_reply({"message": f"the key {request.headers['x-api-key']} is not allowed"}, 403)
        return organic("a")

    with StubServer(answer) as server:
        search = web(server.url, Recording(cache))
        await search.search(["good"], 3)
        with pytest.raises(RetrievalError, match=r"403 .*the key \(the key\) is not allowed") as caught:
            await search.search(["bad"], 3)
    assert KEY not in repr(caught.value)
    assert caught.value.__cause__ is None
    cache.close()
    files = list(tmp_path.iterdir())  # noqa: ASYNC240  a test may wait for the disk
    assert files
    assert all(KEY.encode() not in path.read_bytes() for path in files)


async def test_searches_under_way_are_bounded(web: Web) -> None:
    under_way, most = 0, 0
    loop = asyncio.get_running_loop()

    def count(change: int) -> None:
        nonlocal under_way, most
        under_way += change
        most = max(most, under_way)

    def answer(request: Request) -> Reply:
        loop.call_soon_threadsafe(count, 1)
        try:
            time.sleep(0.05)
            return organic("a")
        finally:
            loop.call_soon_threadsafe(count, -1)

    with StubServer(answer) as server:
        await web(server.url, concurrency=2).search([f"q{index}" for index in range(12)], 3)
    assert (len(server.requests), under_way) == (12, 0)
    assert most == 2


async def test_pages_are_recorded_and_replayed(cache: DiskCache) -> None:
    fetcher = PageFetcher(allow=ONLY_127_0_0_1)
    with StubServer(lambda request: page() if request.path == "/a" else Reply(404)) as server:
        recorder = WebPages(fetcher, Recording(cache))
        first = await recorder.fetch(f"{server.url}/a")
        assert await recorder.fetch(f"{server.url}/a") == first
        with pytest.raises(ToolError, match="404"):
            await recorder.fetch(f"{server.url}/b")
        assert [request.path for request in server.requests] == ["/a", "/b"]
        replayed = WebPages(fetcher, Recording(cache, replay=True))
        assert await replayed.fetch(f"{server.url}/a") == first
        with pytest.raises(NotRecordedError, match="/b"):
            await replayed.fetch(f"{server.url}/b")
        assert len(server.requests) == 2
    cache.close()


def test_recordings_are_readable_json(cache: DiskCache) -> None:
    async def make() -> Any:
        return {"a": "é"}

    asyncio.run(Recording(cache).get(["search", "q"], make))
    assert json.loads(cache.read('["search", "q"]') or "") == {"a": "é"}
    cache.close()


def test_without_a_place_for_a_search_none_could_ever_start() -> None:
    with pytest.raises(ConfigError, match="concurrency must be at least 1"):
        WebSearch("http://127.0.0.1:1", KEY, Recording(None), concurrency=0)
