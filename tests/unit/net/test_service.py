"""Calls of JSON services: what is retried, what is final, and how long a call may last."""

from __future__ import annotations

import asyncio
import gzip
import socket
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from tests.services.stubs import HTML_502, Reply, Request, StubServer, in_turn, json_reply

from mempo.core import ConfigError, Json
from mempo.net import CallError, JsonService, retry_after_seconds

Service = Callable[..., JsonService]


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    """Makes services with short limits and closes them."""
    made: list[JsonService] = []

    def make(url: str, **options: Any) -> JsonService:
        made.append(JsonService(url, **{"timeout_seconds": 5.0, "retries": 2, "backoff_seconds": 0.01, **options}))
        return made[-1]

    yield make
    for one in made:
        await one.aclose()


def same(body: Json) -> Json:
    return body


async def test_body_and_headers_arrive_and_the_answer_is_parsed(service: Service) -> None:
    with StubServer(lambda request: json_reply({"got": request.json})) as server:
        client = service(server.url + "/", headers={"authorization": "Bearer k"})
        assert await client.post("/v1/x", {"a": "é"}, lambda body: body["got"]["a"]) == "é"
    [request] = server.requests
    assert (request.method, request.path) == ("POST", "/v1/x")
    assert request.headers["authorization"] == "Bearer k"
    assert client.counters.snapshot() == {"requests": 1, "retries": 0, "failures": 0}


@pytest.mark.parametrize(
    "fault",
    [
        HTML_502,
        Reply(429, b"slow down"),
        Reply(200, b""),
        Reply(200, b'{"result": [['),
        Reply(200, b'{"a": 1}', declared_bytes=500),
        Reply(200, b"not gzip", {"content-encoding": "gzip"}),
        Reply(200, b"\xff\xfe"),
        Reply(200, b"[" * 200_000),
        json_reply({"wrong": True}),
    ],
    ids=["502", "429", "empty", "half-json", "cut", "bad-gzip", "not-utf8", "too-deep", "refused-by-parse"],
)
async def test_passing_faults_are_retried(service: Service, fault: Reply) -> None:
    def parse(body: Json) -> Json:
        if "a" not in body:
            raise ValueError("no a")
        return body["a"]

    with StubServer(in_turn(fault, json_reply({"a": 1}))) as server:
        client = service(server.url)
        assert await client.post("/", {}, parse) == 1
    assert client.counters.snapshot() == {"requests": 2, "retries": 1, "failures": 0}


@pytest.mark.parametrize("status", [204, 301, 400, 401, 403, 404, 413, 422])
async def test_other_statuses_are_final_and_say_why(service: Service, status: int) -> None:
    body = b"" if status == 204 else b"top_k\nis too large"
    with StubServer(lambda _: Reply(status, body, {"location": "/elsewhere"})) as server:
        client = service(server.url)
        with pytest.raises(CallError, match=rf"POST {server.url}/x failed after 1 attempt .*status {status}") as caught:
            await client.post("/x", {}, same)
    assert (caught.value.status, caught.value.body, caught.value.attempts) == (status, body.decode(), 1)
    assert len(server.requests) == 1
    assert client.counters.snapshot() == {"requests": 1, "retries": 0, "failures": 1}


async def test_retries_end_and_the_last_fault_is_reported(service: Service) -> None:
    message = r"after 3 attempts .*502 Bad Gateway"
    with StubServer(lambda _: HTML_502) as server, pytest.raises(CallError, match=message) as caught:
        await service(server.url, retries=2).get("/", same)
    assert caught.value.attempts == len(server.requests) == 3


async def test_a_refused_connection_is_retried_and_named(service: Service) -> None:
    with socket.socket() as held:  # bound but not listening: connections are refused, and nobody else takes the port
        held.bind(("127.0.0.1", 0))
        with pytest.raises(CallError, match=r"after 2 attempts .*ConnectError") as caught:
            await service(f"http://127.0.0.1:{held.getsockname()[1]}", retries=1).get("/", same)
    assert caught.value.status is None


@pytest.mark.parametrize(
    "reply",
    [json_reply({}, stall_seconds=3600), json_reply({"a": "long"}, trickle_seconds=0.2)],
    ids=["stalls", "trickles"],
)
async def test_no_call_outlives_its_deadline(service: Service, reply: Reply) -> None:
    with StubServer(lambda _: reply) as server:
        client = service(server.url, timeout_seconds=0.3, retries=1, backoff_seconds=0.1)
        assert client.deadline_seconds == pytest.approx(0.7)  # 2 attempts of 0.3 s and one wait of at most 0.1 s
        started = time.monotonic()
        with pytest.raises(CallError, match=r"no answer within 0\.3 s"):
            await client.get("/", same)
        assert time.monotonic() - started < 5.0


async def test_a_deadline_shorter_than_all_attempts_cuts_them(service: Service) -> None:
    with StubServer(lambda _: json_reply({}, stall_seconds=3600)) as server:
        client = service(server.url, timeout_seconds=0.3, retries=9, deadline_seconds=0.5)
        started = time.monotonic()
        with pytest.raises(CallError, match="after 2 attempts "):  # of 0.3 s and of what is left, 0.2 s
            await client.get("/", same)
        assert 0.5 <= time.monotonic() - started < 5.0


async def test_retry_after_is_kept_to(service: Service) -> None:
    with StubServer(in_turn(Reply(429, b"", {"retry-after": "0.4"}), json_reply(1))) as server:
        started = time.monotonic()
        assert await service(server.url).get("/", same) == 1
        assert time.monotonic() - started >= 0.4


async def test_a_retry_after_beyond_the_deadline_ends_the_call_at_once(service: Service) -> None:
    with StubServer(lambda _: Reply(503, b"", {"retry-after": "3600"})) as server:
        started = time.monotonic()
        with pytest.raises(CallError, match="after 1 attempt "):
            await service(server.url).get("/", same)
        assert time.monotonic() - started < 5.0


def test_retry_after_dates_are_relative_to_now() -> None:
    header = format_datetime(datetime.now(UTC) + timedelta(seconds=100))
    assert 90 < (retry_after_seconds(header) or 0) <= 100
    assert retry_after_seconds("nan") is None
    assert retry_after_seconds("-5") == 0.0


@pytest.mark.parametrize("compress", [False, True])
async def test_answers_over_the_size_limit_are_refused_once(service: Service, compress: bool) -> None:
    text = b"[" + b"1," * 100_000 + b"1]"  # 200 kB of JSON; under 1 kB as gzip
    reply = Reply(200, gzip.compress(text), {"content-encoding": "gzip"}) if compress else Reply(200, text)
    with StubServer(lambda _: reply) as server, pytest.raises(CallError, match="larger than 10000 bytes"):
        await service(server.url, max_response_bytes=10_000).get("/", same)
    assert len(server.requests) == 1


async def test_case_54_loopback_is_never_reached_through_a_proxy(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with StubServer(lambda _: json_reply("direct")) as server:
        assert await service(server.url).get("/", same) == "direct"
        assert await service(f"http://localhost:{server.port}").get("/", same) == "direct"


async def test_case_54_other_hosts_are_reached_through_the_proxy(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with StubServer(lambda _: json_reply("proxied")) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        assert await service("http://retriever.invalid").get("/health", same) == "proxied"
    assert [request.path for request in proxy.requests] == ["http://retriever.invalid/health"]


async def test_a_password_in_the_url_is_in_no_message(service: Service) -> None:
    with StubServer(lambda _: Reply(404)) as server, pytest.raises(CallError) as caught:
        await service(server.url.replace("http://", "http://user:secret@")).get("/x", same)
    assert "secret" not in str(caught.value)
    assert f"GET {server.url}/x failed" in str(caught.value)


@pytest.mark.parametrize("before", [0, 290, 1990])
async def test_secrets_that_a_server_repeats_are_in_no_message_not_even_in_part(service: Service, before: int) -> None:
    # Messages are cut at 300 characters and bodies at 2000: a secret across the cut must not leave its head.
    echo = StubServer(lambda _: Reply(401, b"x" * before + b"the-secret-key"))
    with echo as server, pytest.raises(CallError) as caught:
        await service(server.url, secrets=("the-secret-key", "")).get("/", same)
    assert "the-" not in str(caught.value) + caught.value.body


def test_a_service_can_be_used_from_one_event_loop_after_the_other() -> None:
    async def once(client: JsonService) -> Json:
        try:
            return await client.get("/", same)
        finally:
            await client.aclose()

    with StubServer(lambda _: json_reply(7)) as server:
        client = JsonService(server.url)
        assert [asyncio.run(once(client)) for _ in range(2)] == [7, 7]


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "", "http://[::1"])
def test_urls_that_are_no_http_service_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="not a"):
        JsonService(url)


@pytest.mark.parametrize(
    "options", [{"timeout_seconds": 0}, {"timeout_seconds": float("nan")}, {"deadline_seconds": 0}, {"retries": -1}]
)
def test_limits_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        JsonService("http://127.0.0.1:1", **options)


async def test_cancelling_a_call_is_not_retried(service: Service) -> None:
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()

    def stall(_: Request) -> Reply:
        loop.call_soon_threadsafe(arrived.set)
        return json_reply({}, stall_seconds=3600)

    with StubServer(stall) as server:
        call = asyncio.create_task(service(server.url).get("/", same))
        await arrived.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert len(server.requests) == 1


@pytest.mark.parametrize("key", ["k-ü", "first line\nsecond", "\x00"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError, match="the value of the header x-api-key must be printable ASCII") as caught:
        JsonService("http://127.0.0.1:1", headers={"x-api-key": f"secret{key}"})
    assert "secret" not in str(caught.value)


def test_a_host_that_no_name_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a URL"):
        JsonService("http://xn--/")
