"""Web search in the retriever's clothes: a Serper-compatible endpoint, recorded on disk and replayed."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Literal

from mempo.core import ConfigError, Json, Passage, RetrievalError, ToolError
from mempo.net import CallError, JsonService
from mempo.retrieval.cache import DiskCache
from mempo.retrieval.fetch import Page, PageFetcher
from mempo.retrieval.wire import replace_surrogates

SERPER = "https://google.serper.dev/search"
PAGE_OF_RESULTS = 10
"""Results are asked for in whole pages, so that a recording serves every smaller `top_k` too."""

OnMiss = Literal["error", "empty"]


class NotRecordedError(RetrievalError, ToolError):
    """Replay was asked for something that was never recorded."""


class Recording:
    """Answers by key: read from a cache, else made and recorded, or in replay never made.

    Without a cache every answer is made anew. Failures are not recorded.
    """

    def __init__(self, cache: DiskCache | None, *, replay: bool = False) -> None:
        if replay and cache is None:
            raise ConfigError("replay needs the cache that holds the recording")
        self._cache = cache
        self.replay = replay

    async def get(self, key: Sequence[Json], make: Callable[[], Awaitable[Json]]) -> Json:
        """Raises NotRecordedError in replay where the key is not in the cache."""
        name = json.dumps(list(key))
        text = None if self._cache is None else self._cache.read(name)
        if text is not None:
            return json.loads(text)
        if self.replay:
            raise NotRecordedError(f"not recorded: {key[-1]!r} (replay never asks the network; record it first)")
        answer = await make()
        if self._cache is not None:
            self._cache.write(name, json.dumps(answer))
        return answer


class WebSearch:
    """A `Retriever` over a Serper-compatible search: `POST endpoint {"q", "num"}` with an X-API-KEY header.

    A passage is one organic result: its link is the id, its snippet the text; it has no score. The
    key is sent to the endpoint and appears nowhere else, in no message and in no recording.
    """

    def __init__(
        self,
        endpoint: str,
        api_key: str,
        recording: Recording,
        *,
        on_miss: OnMiss = "error",
        timeout_seconds: float = 10.0,
        retries: int = 2,
        backoff_seconds: float = 0.25,
        concurrency: int = 8,
    ) -> None:
        """`on_miss` says what a query that replay does not know gets; `concurrency` bounds the searches under way."""
        if concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1 (got {concurrency}): no search could start")
        self._api_key = api_key
        self._recording = recording
        self._on_miss = on_miss
        self._service = JsonService(
            endpoint,
            headers={"x-api-key": api_key},
            timeout_seconds=timeout_seconds,
            retries=retries,
            backoff_seconds=backoff_seconds,
        )
        self._slots = asyncio.Semaphore(concurrency)
        self.misses = 0
        """Queries that replay did not know and answered with nothing."""

    @property
    def corpus_hash(self) -> str:
        """Stands for the endpoint, so that two webs are not taken for each other."""
        return hashlib.sha256(self._service.url.encode()).hexdigest()

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """The best `top_k` organic results of each query. Raises RetrievalError where one of them failed."""
        found = await asyncio.gather(*(self._search(query, top_k) for query in queries), return_exceptions=True)
        results: list[list[Passage]] = []
        for passages in found:  # all have ended, and been recorded, before the first failure is raised
            if isinstance(passages, BaseException):
                raise passages
            results.append(passages)
        return results

    async def aclose(self) -> None:
        await self._service.aclose()

    async def _search(self, query: str, top_k: int) -> list[Passage]:
        query = replace_surrogates(query)
        if not query.strip():
            return []
        results = -(-top_k // PAGE_OF_RESULTS) * PAGE_OF_RESULTS

        async def ask() -> Json:
            async with self._slots:
                return await self._service.post("", {"q": query, "num": results}, _checked_answer)

        try:
            answer = await self._recording.get(["search", self._service.url, results, query], ask)
        except NotRecordedError:
            if self._on_miss == "error":
                raise
            self.misses += 1
            return []
        except CallError as error:
            raise RetrievalError(self._without_key(str(error))) from None  # the cause may quote the key
        return _parse_organic(answer)[:top_k]

    def _without_key(self, text: str) -> str:
        """Some services quote the key that they refuse."""
        return text.replace(self._api_key, "(the key)") if self._api_key else text


class WebPages:
    """Pages by URL, recorded and replayed."""

    def __init__(self, fetcher: PageFetcher, recording: Recording) -> None:
        self._fetcher = fetcher
        self._recording = recording

    async def fetch(self, url: str) -> Page:
        """Raises ToolError, as `PageFetcher.fetch`, and NotRecordedError in replay."""

        url = replace_surrogates(url)

        async def get() -> Json:
            return asdict(await self._fetcher.fetch(url))

        return Page(**await self._recording.get(["page", url], get))


def _checked_answer(body: Json) -> Json:
    _parse_organic(body)
    return body


def _parse_organic(body: Json) -> list[Passage]:
    """The organic results of Serper's answer, which lacks the list where nothing was found."""
    organic = body.get("organic", []) if isinstance(body, Mapping) else None
    if not isinstance(organic, list) or not all(isinstance(hit, Mapping) for hit in organic):
        raise ValueError("it is not a search result with a list under 'organic'")
    passages = [Passage(_text(hit, "link"), _text(hit, "title"), _text(hit, "snippet")) for hit in organic]
    return [passage for passage in passages if passage.title or passage.text]


def _text(hit: Mapping[str, Json], field: str) -> str:
    value = hit.get(field)
    return " ".join(replace_surrogates(value).split()) if isinstance(value, str) else ""
