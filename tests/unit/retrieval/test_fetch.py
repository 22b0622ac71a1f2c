"""Pages become text, within limits, and never from an address that is refused."""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.services.stubs import HTML, ONLY_127_0_0_1, PAGE_TEXT, Reply, Request, StubServer, page

from mempo.core import ConfigError, ToolError
from mempo.retrieval.fetch import PageFetcher
from mempo.retrieval.safety import UnsafeUrlError


def fetcher(**options: Any) -> PageFetcher:
    return PageFetcher(**{"allow": ONLY_127_0_0_1, "timeout_seconds": 20.0, **options})


def redirect(location: str) -> Reply:
    return Reply(302, b"", {"location": location})


async def test_a_pages_title_and_main_text_are_extracted() -> None:
    with StubServer(lambda _: page()) as server:
        found = await fetcher().fetch(f"{server.url}/a?b=c")
    assert (found.url, found.title, found.truncated) == (f"{server.url}/a?b=c", "Ardenvale lighthouse", False)
    assert PAGE_TEXT in found.text
    assert "hidden" not in found.text
    assert "cookies" not in found.text


async def test_plain_text_is_taken_as_it_is() -> None:
    with StubServer(lambda _: page(b"one\n  two \xff\n", "text/plain")) as server:
        assert (await fetcher().fetch(server.url)).text == "one\n  two \ufffd"


async def test_long_texts_are_cut_and_say_so() -> None:
    with StubServer(lambda _: page("é".encode() * 300, "text/plain")) as server:
        found = await fetcher(max_chars=200).fetch(server.url)
    assert (found.text, found.truncated) == ("é" * 200, True)


@pytest.mark.parametrize("compress", [False, True])
async def test_pages_over_the_size_limit_are_refused(compress: bool) -> None:
    body = b"x" * 200_000
    headers = {"content-type": "text/plain", **({"content-encoding": "gzip"} if compress else {})}
    reply = Reply(200, gzip.compress(body) if compress else body, headers)
    with StubServer(lambda _: reply) as server, pytest.raises(ToolError, match="larger than 10000 bytes"):
        await fetcher(max_bytes=10_000).fetch(server.url)


@pytest.mark.parametrize("reply", [page(stall_seconds=3600), page(trickle_seconds=0.1)], ids=["stalls", "trickles"])
async def test_pages_that_do_not_arrive_in_time_are_given_up(reply: Reply) -> None:
    with StubServer(lambda _: reply) as server:
        started = time.monotonic()
        with pytest.raises(ToolError, match=r"within 0\.5 s"):
            await fetcher(timeout_seconds=0.5).fetch(server.url)
        assert time.monotonic() - started < 5.0


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply(404, b"no"), "status 404"),
        (Reply(304, b""), "status 304"),
        (page(b"\x89PNG", "image/png"), "no text but 'image/png'"),
        (page(b"", "text/html"), "no readable text"),
        (page(b"<html></html>"), "no readable text"),
        (page(HTML, declared_bytes=10**6), "cannot be fetched"),
        (redirect("http://[::1"), "cannot be fetched"),
        (redirect("http://xn--/"), "cannot be fetched"),
        (Reply(200, b"not gzip", {"content-encoding": "gzip"}), "cannot be fetched"),
        (page(b"<" * 10_000), "no readable text"),
    ],
)
async def test_failures_are_told_in_words_for_the_model(reply: Reply, message: str) -> None:
    with StubServer(lambda _: reply) as server, pytest.raises(ToolError, match=message):
        await fetcher().fetch(server.url)


async def test_redirects_are_followed_relative_ones_too() -> None:
    def answer(request: Request) -> Reply:
        return page() if request.path == "/end" else redirect({"/": "/middle", "/middle": "end"}[request.path])

    with StubServer(answer) as server:
        assert (await fetcher().fetch(server.url + "/")).url == f"{server.url}/end"


async def test_endless_redirects_end() -> None:
    with StubServer(lambda _: redirect("/again")) as server:
        with pytest.raises(ToolError, match="more than 3 times"):
            await fetcher(max_redirects=3).fetch(server.url)
        assert len(server.requests) == 4


@pytest.mark.parametrize(
    "target",
    [
        *("file:///etc/passwd", "ftp://127.0.0.1/", "http://2130706433/", "http://[::1]/", "http://[::ffff:7f00:1]/"),
        *("http://169.254.169.254/latest/meta-data/", "http://0.0.0.0/", "//10.0.0.1/", "http://user@127.0.0.1/"),
        *("http://localtest.example/", "http://127.0.0.2/"),
    ],
)
async def test_redirects_to_refused_addresses_are_refused(target: str) -> None:
    async def lookup(host: str, port: int) -> list[str]:
        return {"localtest.example": ["192.168.0.1"]}[host]

    with StubServer(lambda _: redirect(target)) as server:
        with pytest.raises(UnsafeUrlError, match="refused"):
            await fetcher(lookup=lookup).fetch(server.url)
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    "make", [lambda port: f"http://127.0.0.1:{port}/", lambda port: f"http://localhost:{port}/", lambda _: "file:///x"]
)
async def test_this_machine_is_refused_by_default(make: Callable[[int], str]) -> None:
    with StubServer(lambda _: page()) as server:
        with pytest.raises(UnsafeUrlError, match="refused"):
            await PageFetcher().fetch(make(server.port))
        assert server.requests == []


async def test_no_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with StubServer(lambda _: page()) as server, StubServer(lambda _: page()) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        await fetcher().fetch(server.url)
        assert proxy.requests == []


@pytest.mark.parametrize("limits", [{"timeout_seconds": 0}, {"timeout_seconds": float("nan")}, {"max_bytes": 0}])
def test_limits_under_which_no_page_could_come_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be positive"):
        fetcher(**limits)


def test_a_negative_limit_of_characters_does_not_cut_from_the_end() -> None:
    with pytest.raises(ConfigError, match="max_chars of a page must be positive"):
        fetcher(max_chars=-1)
