"""One JSON service behind HTTP: a pool of connections, a deadline for every call, retries, counters."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

import httpx

from mempo.core import ConfigError, Json, MempoError

T = TypeVar("T")

BACKOFF_FACTOR, BACKOFF_MAX_SECONDS = 2.0, 10.0
SHOWN_BODY_CHARS = 2000


class CallError(MempoError, RuntimeError):
    """A call got no usable answer. Each caller turns it into the error of its own part."""

    def __init__(self, message: str, *, status: int | None = None, body: str = "", attempts: int = 1) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status of the last attempt; None where no answer came."""
        self.body = body
        """The head of the last answer, where it was a refusal (a 4xx often says why)."""
        self.attempts = attempts


@dataclass(slots=True)
class Counters:
    """What a service cost so far; a run logs them."""

    requests: int = 0
    """Attempts that were sent."""
    retries: int = 0
    """Attempts after the first of a call."""
    failures: int = 0
    """Calls that ended in a CallError."""

    def snapshot(self) -> dict[str, int]:
        return asdict(self)


class JsonService:
    """Calls of one service.

    A call makes at most `retries + 1` attempts of `timeout_seconds` each, and waits between them
    with exponential back-off and jitter (or as long as `Retry-After` asks). It never lasts longer
    than `deadline_seconds`, whatever the server does: stalls, trickles or asks for patience. Without
    a deadline of its own, a call may take all its attempts and the longest waits between them.

    Retried are 429, 5xx, connection faults, timeouts, and answers of 200 that are no JSON or that
    `parse` refuses with a ValueError. Any other status is final, and so is an answer larger than
    `max_response_bytes`.

    Loopback addresses are always reached directly; for all others the usual variables
    (`http_proxy`, `https_proxy`, `no_proxy`, ...) hold. Redirects are not followed.

    Connections belong to the running event loop; used from another loop, the service opens new
    ones. Call `aclose` before a loop ends; the service can be used again after it.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float = 30.0,
        retries: int = 3,
        deadline_seconds: float | None = None,
        backoff_seconds: float = 0.25,
        max_response_bytes: int = 64 * 2**20,
        connections: int = 256,
        secrets: Sequence[str] = (),
    ) -> None:
        """`secrets` are texts that no error may show, e.g. a key that a server repeats in its refusal."""
        self.url = _checked_url(url)
        limits = {"timeout_seconds": timeout_seconds, "deadline_seconds": deadline_seconds}
        for name, seconds in limits.items():
            if seconds is not None and not seconds > 0:
                raise ConfigError(f"{name} must be positive (got {seconds})")
        if retries < 0 or backoff_seconds < 0:
            raise ConfigError(f"retries and backoff_seconds must be at least 0 (got {retries} and {backoff_seconds})")
        self.timeout_seconds = timeout_seconds
        self.retries = retries
        self.max_response_bytes = max_response_bytes
        self.counters = Counters()
        for name, value in (headers or {}).items():
            if not (value.isascii() and value.isprintable()):  # httpx would complain with the value, a key perhaps
                raise ConfigError(f"the value of the header {name} must be printable ASCII: is its key copied whole?")
        self._headers = {"content-type": "application/json", **(headers or {})}
        self._limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._backoff_seconds = backoff_seconds
        self._secrets = tuple(secret for secret in secrets if secret)
        waits = sum(self._backoff(retry) for retry in range(retries))
        longest_seconds = (retries + 1) * timeout_seconds + waits
        self.deadline_seconds = min(longest_seconds, deadline_seconds or longest_seconds)
        self._random = random.Random()
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def get(self, path: str, parse: Callable[[Json], T]) -> T:
        """`parse` of the answer to `GET path`. Raises CallError."""
        return await self._call("GET", path, None, parse)

    async def post(self, path: str, body: Json, parse: Callable[[Json], T]) -> T:
        """`parse` of the answer to `POST path` with `body` as JSON. Raises CallError."""
        return await self._call("POST", path, json.dumps(body, allow_nan=False).encode(), parse)

    async def aclose(self) -> None:
        """Close all connections."""
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.aclose()

    async def _call(self, method: str, path: str, content: bytes | None, parse: Callable[[Json], T]) -> T:
        started = time.monotonic()
        deadline = started + self.deadline_seconds
        attempt = 0
        while True:
            left = deadline - time.monotonic()
            self.counters.requests += 1
            try:
                async with asyncio.timeout(min(self.timeout_seconds, left)):
                    return parse(await self._attempt(method, path, content))
            except _AttemptError as error:
                failure = error
            except TimeoutError:
                failure = _AttemptError(f"no answer within {min(self.timeout_seconds, left):.1f} s")
            except (httpx.RequestError, OSError) as error:
                failure = _AttemptError(f"{type(error).__name__}: {error}".rstrip(": "))
            except ValueError as error:
                failure = _AttemptError(f"the answer cannot be used: {error}", status=200)
            wait = self._wait_seconds(failure, attempt)
            attempt += 1
            if failure.final or attempt > self.retries or time.monotonic() + wait >= deadline:
                self.counters.failures += 1
                raise self._call_error(method, path, failure, attempt, time.monotonic() - started)
            self.counters.retries += 1
            await asyncio.sleep(wait)

    async def _attempt(self, method: str, path: str, content: bytes | None) -> Json:
        request = self._pool().stream(method, f"{self.url}{path}", content=content)
        async with request as response:
            body = bytearray()
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > self.max_response_bytes:
                    raise _AttemptError(f"the answer is larger than {self.max_response_bytes} bytes", final=True)
        if response.status_code == 200:
            try:
                return json.loads(body)
            except (ValueError, RecursionError) as error:
                raise _AttemptError(f"the answer is not JSON: {error}", status=200) from error
        text = self._without_secrets(body.decode("utf-8", "replace"))[:SHOWN_BODY_CHARS]
        raise _AttemptError(
            f"status {response.status_code} {response.reason_phrase}: {_one_line(text)}".rstrip(": "),
            status=response.status_code,
            body=text,
            final=response.status_code != 429 and response.status_code < 500,
            retry_after_seconds=retry_after_seconds(response.headers.get("retry-after")),
        )

    def _pool(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            # Time limits are ours: httpx's hold for one read, and a trickling server evades them.
            self._client = httpx.AsyncClient(
                headers=self._headers,
                limits=self._limits,
                timeout=None,
                trust_env=not is_loopback(httpx.URL(self.url).host),
            )
            self._loop = loop
        return self._client

    def _backoff(self, retry: int) -> float:
        return float(min(self._backoff_seconds * BACKOFF_FACTOR**retry, BACKOFF_MAX_SECONDS))

    def _wait_seconds(self, failure: _AttemptError, retry: int) -> float:
        if failure.retry_after_seconds is not None:
            return failure.retry_after_seconds
        return self._backoff(retry) * self._random.uniform(0.5, 1.0)

    def _call_error(self, method: str, path: str, failure: _AttemptError, attempts: int, seconds: float) -> CallError:
        tries = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        message = f"{method} {_shown(self.url)}{path} failed after {tries} in {seconds:.1f} s: {failure}"
        return CallError(self._without_secrets(message), status=failure.status, body=failure.body, attempts=attempts)

    def _without_secrets(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "[secret]")
        return text


class _AttemptError(Exception):
    """Why one attempt failed, and whether another may help."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        body: str = "",
        final: bool = False,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.body, self.final, self.retry_after_seconds = status, body, final, retry_after_seconds


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine by definition; names are not looked up.

    >>> [is_loopback(host) for host in ("127.0.0.1", "127.8.8.8", "localhost", "::1", "10.0.0.1", "example.org")]
    [True, True, True, True, False, False]
    """
    name = host.lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def retry_after_seconds(header: str | None) -> float | None:
    """Seconds that a `Retry-After` header asks for, given as a number or as a date; None where it is neither.

    >>> retry_after_seconds("2.5"), retry_after_seconds("Wed, 21 Oct 2015 07:28:00 GMT"), retry_after_seconds("soon")
    (2.5, 0.0, None)
    """
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            moment = parsedate_to_datetime(header)
        except ValueError:
            return None
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        seconds = (moment - datetime.now(UTC)).total_seconds()
    return max(0.0, seconds) if seconds == seconds else None  # "nan" is a number to float()


def _checked_url(url: str) -> str:
    try:
        parsed = httpx.URL(url)
        host = parsed.host  # decoded only here: `http://xn--/` is a URL until then
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ConfigError(f"not a URL: {url!r} ({error})") from error
    if parsed.scheme not in ("http", "https") or not host:
        raise ConfigError(f"not an http:// or https:// URL with a host: {url!r}")
    return url.rstrip("/")


def _shown(url: str) -> str:
    """The URL without a user's name and password, which belong in no log."""
    parsed = httpx.URL(url)
    return str(parsed.copy_with(userinfo=b"")).rstrip("/") if parsed.userinfo else url


def _one_line(text: str, limit: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"
