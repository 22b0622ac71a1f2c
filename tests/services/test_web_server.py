"""`mempo serve-web` in a process of its own, in front of a stub of the search service."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.services.processes import MempoServer
from tests.services.stubs import ONLY_127_0_0_1, PAGE_TEXT, Reply, Request, StubServer, json_reply, page

from mempo.core import ConfigError, RetrievalError
from mempo.retrieval.cache import DiskCache
from mempo.retrieval.client import HttpRetriever
from mempo.retrieval.fetch import PageFetcher
from mempo.retrieval.server import Limits, create_app
from mempo.retrieval.web import Recording, WebPages, WebSearch
from mempo.retrieval.wire import Health

KEY = {"SERPER_API_KEY": "secret-of-the-test"}


def serper(request: Request) -> Reply:
    """Finds one result a query; refuses "bad", and quotes the key in its refusal."""
    query = request.json["q"]
    if query == "bad":
        return json_reply({"message": f"{request.headers['x-api-key']} may not"}, 403)
    return json_reply({"organic": [{"title": query, "link": "https://a.example/", "snippet": "Found it."}]})


@pytest.fixture(scope="module")
def endpoint() -> Iterator[StubServer]:
    with StubServer(serper) as server:
        yield server


def retrieve(url: str, *queries: str) -> httpx.Response:
    return httpx.post(f"{url}/retrieve", json={"queries": list(queries), "topk": 3}, timeout=30)


def test_it_answers_by_plain_curl_records_and_replays_with_the_endpoint_gone(tmp_path: Path) -> None:
    cache = str(tmp_path / "web.sqlite")
    with StubServer(serper) as endpoint:
        arguments = ("serve-web", "--endpoint", f"{endpoint.url}/search", "--cache", cache)
        with MempoServer(*arguments, env=KEY) as server:
            command = ["curl", "-s", f"{server.url}/retrieve", "-d", '{"queries": ["Hamlet"], "topk": 3}']
            run = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        assert endpoint.requests[0].headers["x-api-key"] == KEY["SERPER_API_KEY"]
    expected = {"result": [[{"id": "https://a.example/", "contents": '"Hamlet"\nFound it.'}]]}
    assert json.loads(run.stdout) == expected
    with MempoServer(*arguments, "--mode", "replay", env={"SERPER_API_KEY": ""}) as server:
        assert retrieve(server.url, "Hamlet").json() == expected
        missed = retrieve(server.url, "Hamlet", "Macbeth")
        assert (missed.status_code, missed.json()["detail"].partition(" (")[0]) == (404, "not recorded: 'Macbeth'")
        health = httpx.get(f"{server.url}/health").json()
    assert (health["name"], health["index"], health["passages"]) == ("web", "web", 1)


def test_replay_can_answer_unknown_queries_with_nothing(tmp_path: Path) -> None:
    cache = str(tmp_path / "web.sqlite")
    DiskCache(cache).close()  # a recording in which nothing was asked
    with MempoServer("serve-web", "--cache", cache, "--mode", "replay", "--on-miss", "empty") as server:
        assert retrieve(server.url, "Macbeth").json() == {"result": [[]]}


async def test_the_client_searches_the_web_as_any_retriever_and_sees_no_key(endpoint: StubServer) -> None:
    with MempoServer("serve-web", "--endpoint", endpoint.url, env=KEY) as server:
        search = HttpRetriever(server.url, expect_name="web", retries=0)
        [[found]] = await search.search(["Hamlet"], 3)
        with pytest.raises(RetrievalError, match=r"503 .*403 .*\(the key\) may not") as caught:
            await search.search(["bad"], 3)
        await search.aclose()
        assert server.stop() == 0
    assert (found.title, found.text, found.score) == ("Hamlet", "Found it.", None)
    assert KEY["SERPER_API_KEY"] not in str(caught.value) + server.output


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "http://127.0.0.1:1/", "http://localhost/", "http://2130706433/", "http://[::1]/", "\ud800"],
)
def test_pages_of_this_machine_are_refused(refusing: str, url: str) -> None:
    answer = httpx.post(f"{refusing}/fetch", content=json.dumps({"url": url}), timeout=30)
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith("refused: ")


@pytest.fixture(scope="module")
def refusing(endpoint: StubServer) -> Iterator[str]:
    with MempoServer("serve-web", "--endpoint", endpoint.url, env=KEY) as server:
        yield server.url


async def test_a_page_is_fetched_as_text() -> None:
    web = WebSearch("http://127.0.0.1:9/", "", Recording(None))
    pages = WebPages(PageFetcher(allow=ONLY_127_0_0_1), Recording(None))
    app = create_app(web, Health("web", web.corpus_hash, 0, "web", "0"), token="t", pages=pages)
    transport = httpx.ASGITransport(app)
    with StubServer(lambda request: page() if request.path == "/a" else Reply(404)) as server:
        async with httpx.AsyncClient(transport=transport, base_url="http://web") as client:
            bearer = {"authorization": "Bearer t"}
            found = await client.post("/fetch", json={"url": f"{server.url}/a"}, headers=bearer)
            missing = await client.post("/fetch", json={"url": f"{server.url}/b"}, headers=bearer)
            stranger = await client.post("/fetch", json={"url": f"{server.url}/a"})
    assert found.json().keys() == {"url", "title", "text", "truncated"}
    assert PAGE_TEXT in found.json()["text"]
    assert (missing.status_code, missing.json()) == (422, {"detail": "the page answers with status 404"})
    assert stranger.status_code == 401
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "SERPER_API_KEY holds no key; set it, or answer from a recording with --mode replay"),
        (("--mode", "replay"), "replay needs the cache"),
        (("--mode", "replay", "--cache", __file__), "the cache cannot be used"),
        (("--mode", "replay", "--cache", "{tmp}/c", "--host", "0.0.0.0"), "add --allow-remote"),
        (("--mode", "replay", "--cache", "{tmp}/d"), "/d: no recording here; make one with --mode record"),
    ],
)
def test_settings_that_cannot_work_are_told_before_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    DiskCache(tmp_path / "c").close()
    filled = [argument.format(tmp=tmp_path) for argument in arguments]
    command = [sys.executable, "-m", "mempo.cli.main", "serve-web", "--port", "0", *filled]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1
    assert run.stderr.startswith("error: ")
    assert message in run.stderr
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    "limits", [{"queries": 0}, {"query_chars": -5}, {"top_k": 0}, {"body_bytes": 0}, {"top_k": 5, "default_top_k": 6}]
)
def test_limits_that_would_refuse_every_request_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Limits(**limits)
