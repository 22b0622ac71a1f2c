"""The retriever's client: searches a server of its own or of the user's, and survives its faults."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Coroutine, Hashable, Sequence
from dataclasses import astuple
from typing import Any, TypeVar

from mempo.core import ConfigError, Passage, RetrievalError, WrongServiceError
from mempo.net import CallError, JsonService
from mempo.retrieval.cache import DiskCache
from mempo.retrieval.wire import Health, parse_health, parse_response, render_request, replace_surrogates

T = TypeVar("T")

NOT_A_RETRIEVER = (200, 404, 405)
"""Statuses of a /health that is not a mempo retriever's: a page of something else, or none at all."""


class HttpRetriever:
    """A `Retriever` behind `POST /retrieve` (Search-R1's wire format).

    A search lasts at most `deadline_seconds`, retries and the check of the service's identity
    included; then it raises RetrievalError. Blank queries are never sent and find nothing. Equal
    queries in flight are sent once. Half surrogates are sent as U+FFFD.

    With `expect_name` or `expect_corpus_hash` the server must say in /health that it is meant,
    before the first search and again after each fault (a server that was restarted may be another
    one): WrongServiceError otherwise. Without them any server of this format will do, Search-R1's
    own included.

    `cache_path` keeps answers on disk, by the service's name, corpus hash and kind of index, the
    query and `top_k`; it needs a server with a /health.
    """

    def __init__(
        self,
        url: str,
        *,
        expect_name: str | None = None,
        expect_corpus_hash: str | None = None,
        token: str | None = None,
        timeout_seconds: float = 10.0,
        retries: int = 3,
        deadline_seconds: float | None = None,
        backoff_seconds: float = 0.25,
        queries_per_request: int = 64,
        max_response_bytes: int = 64 * 2**20,
        cache_path: str | os.PathLike[str] | None = None,
    ) -> None:
        """`token` is the server's bearer token; `timeout_seconds` is for one attempt, `deadline_seconds` for all."""
        if queries_per_request < 1:
            raise ConfigError(f"queries_per_request must be at least 1 (got {queries_per_request})")
        self._service = JsonService(
            url,
            headers={"authorization": f"Bearer {token}"} if token else {},
            timeout_seconds=timeout_seconds,
            retries=retries,
            deadline_seconds=deadline_seconds,
            backoff_seconds=backoff_seconds,
            max_response_bytes=max_response_bytes,
            secrets=(token,) if token else (),
        )
        self._expect_name = expect_name
        self._expect_corpus_hash = expect_corpus_hash
        self._queries_per_request = queries_per_request
        self._cache = None if cache_path is None else DiskCache(cache_path)
        self._health: Health | None = None
        self._in_flight: dict[Hashable, asyncio.Task[Any]] = {}
        self._counts = {"searches": 0, "failed_searches": 0, "cached_queries": 0, "shared_queries": 0}

    @property
    def url(self) -> str:
        return self._service.url

    @property
    def deadline_seconds(self) -> float:
        """The longest that a search lasts."""
        return self._service.deadline_seconds

    @property
    def counters(self) -> dict[str, int]:
        """`searches`, `failed_searches`, `cached_queries`, `shared_queries`, and of HTTP: `requests`, `retries`,
        `failures`."""
        return {**self._counts, **self._service.counters.snapshot()}

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """The best `top_k` passages of each query, in the order of `queries`.

        Raises RetrievalError where the server gave no usable answer in time, WrongServiceError
        where it is not the one that was meant.
        """
        if top_k < 1:
            raise ConfigError(f"top_k must be at least 1 (got {top_k})")
        clean = [replace_surrogates(query) for query in queries]
        wanted = [query for query in dict.fromkeys(clean) if query.strip()]
        self._counts["searches"] += 1
        try:
            async with asyncio.timeout(self.deadline_seconds):
                found = await self._find(wanted, top_k) if wanted else {}
        except TimeoutError as error:
            self._counts["failed_searches"] += 1
            raise RetrievalError(f"no answer from {self.url} within {self.deadline_seconds:.1f} s") from error
        except RetrievalError:
            self._counts["failed_searches"] += 1
            raise
        return [list(found.get(query, ())) for query in clean]

    async def check(self) -> Health:
        """Ask who the server is. A run does so before its first search, to fail early.

        Raises WrongServiceError where it is no mempo retriever, or not the one that is expected.
        """
        health = await self._ask_health()
        if self._expect_name not in (None, health.name):
            raise WrongServiceError(self._wrong(f"its name is {health.name!r}, not {self._expect_name!r}"))
        if self._expect_corpus_hash not in (None, health.corpus_hash):
            hashes = f"{health.corpus_hash!r}, not {self._expect_corpus_hash!r}"
            raise WrongServiceError(self._wrong(f"the hash of its corpus is {hashes}"))
        self._health = health
        return health

    async def aclose(self) -> None:
        """Stop what is in flight, close connections and the cache."""
        tasks = list(self._in_flight.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._service.aclose()
        if self._cache is not None:
            self._cache.close()

    async def _find(self, queries: list[str], top_k: int) -> dict[str, list[Passage]]:
        await self._identify()
        found = {query: hits for query in queries if (hits := self._read_cache(query, top_k)) is not None}
        self._counts["cached_queries"] += len(found)
        waiting = [query for query in queries if query not in found]
        new = [query for query in waiting if (query, top_k) not in self._in_flight]
        self._counts["shared_queries"] += len(waiting) - len(new)
        for start in range(0, len(new), self._queries_per_request):
            batch = new[start : start + self._queries_per_request]
            self._start([(query, top_k) for query in batch], self._fetch(batch, top_k))
        tasks = {query: self._in_flight[query, top_k] for query in waiting}
        # Shielded: a caller that gives up must not take the answer from the others that wait for it.
        await asyncio.gather(*(asyncio.shield(task) for task in set(tasks.values())))
        return found | {query: task.result()[query] for query, task in tasks.items()}

    async def _fetch(self, queries: list[str], top_k: int) -> dict[str, list[Passage]]:
        retries = self._service.counters.retries
        try:
            results = await self._service.post(
                "/retrieve", render_request(queries, top_k), lambda body: parse_response(body, len(queries))
            )
        except CallError as error:
            self._health = None
            raise RetrievalError(str(error)) from error
        if self._service.counters.retries != retries:
            self._health = None
        await self._identify()
        found = {query: hits[:top_k] for query, hits in zip(queries, results, strict=True)}
        for query, hits in found.items():
            self._write_cache(query, top_k, hits)
        return found

    async def _identify(self) -> None:
        """Ask for the service's identity where it matters and is not known, once for all who wait."""
        needed = self._cache is not None or self._expect_name is not None or self._expect_corpus_hash is not None
        if needed and self._health is None:
            task = self._in_flight.get("health") or self._start(["health"], self.check())
            await asyncio.shield(task)

    async def _ask_health(self) -> Health:
        try:
            return parse_health(await self._service.get("/health", lambda body: body))
        except CallError as error:
            if error.status in NOT_A_RETRIEVER:
                raise WrongServiceError(self._wrong(str(error))) from error
            raise RetrievalError(str(error)) from error
        except ValueError as error:
            raise WrongServiceError(self._wrong(str(error))) from error

    def _wrong(self, reason: str) -> str:
        return f"{self.url} is not the retriever that was meant: {reason}; check the address, or expect another service"

    def _start(self, keys: Sequence[Hashable], work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work` as a task that is found under `keys` until it ends."""
        task = asyncio.create_task(work)
        self._in_flight.update(dict.fromkeys(keys, task))

        def forget(task: asyncio.Task[T]) -> None:
            for key in keys:
                self._in_flight.pop(key, None)
            if not task.cancelled():
                task.exception()  # read, so that asyncio does not complain where all who waited have left

        task.add_done_callback(forget)
        return task

    def _read_cache(self, query: str, top_k: int) -> list[Passage] | None:
        text = None if self._cache is None else self._cache.read(self._cache_key(query, top_k))
        return None if text is None else [Passage(*row) for row in json.loads(text)]

    def _write_cache(self, query: str, top_k: int, hits: list[Passage]) -> None:
        if self._cache is not None:
            self._cache.write(self._cache_key(query, top_k), json.dumps([astuple(hit) for hit in hits]))

    def _cache_key(self, query: str, top_k: int) -> str:
        assert self._health is not None, "the cache is asked after the service's identity"
        return json.dumps([self._health.name, self._health.corpus_hash, self._health.index, top_k, query])
