"""A retriever behind HTTP: Search-R1's and ReSearch's requests, health, metrics.

    POST /retrieve      {"queries": [str], "topk": int | null, "return_scores": bool}    (mempo.retrieval.wire)
    POST /search        {"query": str, "top_n": int, "return_score": bool}
                        -> [document], or [[document], [score]] with scores
    POST /batch_search  the same with a list of queries, one such list each
    POST /fetch         {"url": str} -> {"url", "title", "text", "truncated"}            (web search only)
    GET  /health        who this is      GET /metrics  Prometheus      GET /docs  OpenAPI

Bodies are read by hand, not by pydantic: half surrogates and control characters in a query are a
policy's doing and get an answer, any content type is accepted, and limits are told in one sentence.
"""

from __future__ import annotations

import hmac
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from starlette.requests import ClientDisconnect

from mempo.core import ConfigError, Json, MempoError, Passage, Retriever, ToolError
from mempo.retrieval.batching import BatchingRetriever
from mempo.retrieval.models import Document, HealthResponse, PageResponse, RetrieveResponse
from mempo.retrieval.web import NotRecordedError, WebPages
from mempo.retrieval.wire import Health, render_contents, render_health, render_response, replace_surrogates


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may ask for; more is refused with 422, and a larger body with 413."""

    queries: int = 512
    query_chars: int = 8192
    top_k: int = 100
    body_bytes: int = 8 * 2**20
    default_top_k: int = 3
    """Passages a query where the request does not say."""

    def __post_init__(self) -> None:
        for name, limit in asdict(self).items():
            if limit < 1:
                raise ConfigError(f"the limit {name} must be at least 1 (got {limit})")
        if self.default_top_k > self.top_k:
            raise ConfigError(f"default_top_k is {self.default_top_k}, above the limit top_k of {self.top_k}")


class RetrieveBody(msgspec.Struct):
    """Search-R1's request."""

    queries: list[str]
    topk: Annotated[int, msgspec.Meta(ge=1)] | None = None
    return_scores: bool = False


class SearchBody(msgspec.Struct):
    """ReSearch's request of one query."""

    query: str
    top_n: Annotated[int, msgspec.Meta(ge=1)] = 10
    return_score: bool = False


class BatchSearchBody(msgspec.Struct):
    """ReSearch's request of several queries."""

    query: list[str]
    top_n: Annotated[int, msgspec.Meta(ge=1)] = 10
    return_score: bool = False


class FetchBody(msgspec.Struct):
    """A page that is wanted."""

    url: Annotated[str, msgspec.Meta(max_length=8192)]


Body = TypeVar("Body", RetrieveBody, SearchBody, BatchSearchBody, FetchBody)


def create_app(
    retriever: Retriever,
    health: Health,
    *,
    limits: Limits | None = None,
    token: str | None = None,
    max_batch_queries: int | None = 256,
    pages: WebPages | None = None,
) -> FastAPI:
    """The web application of a retriever, and of `pages` where they can be fetched too.

    With a `token`, every path but `/health` wants `Authorization: Bearer <token>`. Requests that
    arrive together are searched as one batch of up to `max_batch_queries`; None hands each request
    to the retriever by itself.
    """
    app = FastAPI(title="mempo retriever", version=health.version, description=__doc__)
    service = _Service(retriever, limits or Limits(), token, max_batch_queries)
    path = service.add_path(app)

    @path("/retrieve", RetrieveBody, RetrieveResponse)
    async def retrieve(body: RetrieveBody) -> Json:
        results = await service.search(body.queries, body.topk)
        return render_response(results, scores=body.return_scores)

    @path("/search", SearchBody, list[Document] | tuple[list[Document], list[float]])
    async def search(body: SearchBody) -> Json:
        [passages] = await service.search([body.query], body.top_n)
        documents = _documents(passages)
        return [documents, _scores(passages)] if body.return_score else documents

    @path("/batch_search", BatchSearchBody, list[list[Document]] | tuple[list[list[Document]], list[list[float]]])
    async def batch_search(body: BatchSearchBody) -> Json:
        results = await service.search(body.query, body.top_n)
        documents = [_documents(passages) for passages in results]
        return [documents, [_scores(passages) for passages in results]] if body.return_score else documents

    if pages is not None:

        @path("/fetch", FetchBody, PageResponse)
        async def fetch(body: FetchBody) -> Json:
            return asdict(await pages.fetch(body.url))

    @app.get("/health", response_model=HealthResponse)
    async def health_() -> Json:
        return render_health(health)

    @app.get("/metrics", response_class=Response)
    async def metrics(request: Request) -> Response:
        return service.refusal(request) or Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return app


class _RefusedError(Exception):
    """A request that gets a 4xx."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class _Metrics:
    """Counters of one application (a registry of its own, so that two can live in one process)."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        prefix, registry = "mempo_retriever", self._registry
        self.requests = Counter(
            f"{prefix}_requests", "Answers by path and status", ["path", "status"], registry=registry
        )
        self.queries = Counter(f"{prefix}_queries", "Queries answered", registry=registry)
        self.empty = Counter(f"{prefix}_empty_results", "Queries that matched nothing", registry=registry)
        self.seconds = Histogram(
            f"{prefix}_request_seconds", "Time from request to answer", ["path"], registry=registry
        )
        self.batch = Histogram(
            f"{prefix}_batch_queries",
            "Queries searched together",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
            registry=registry,
        )

    def render(self) -> bytes:
        return generate_latest(self._registry)


class _Service:
    """What the paths share: reading, limits, the token, counting."""

    def __init__(self, retriever: Retriever, limits: Limits, token: str | None, max_batch_queries: int | None) -> None:
        self.metrics = _Metrics()
        self._limits = limits
        self._token = token.encode() if token is not None else None
        self._retriever = (
            retriever
            if max_batch_queries is None
            else BatchingRetriever(retriever, max_queries=max_batch_queries, on_batch=self.metrics.batch.observe)
        )

    def add_path(self, app: FastAPI) -> Callable[..., Callable[[Callable[[Any], Awaitable[Json]]], None]]:
        """A decorator that makes a handler of a read body a POST path of the application."""

        def path(
            name: str, body_type: type[Body], answer_type: Any
        ) -> Callable[[Callable[[Body], Awaitable[Json]]], None]:
            def add(handler: Callable[[Body], Awaitable[Json]]) -> None:
                async def endpoint(request: Request) -> Response:
                    return await self._answer(name, request, body_type, handler)

                app.post(
                    name,
                    name=handler.__name__,
                    responses={200: {"model": answer_type}, **_REFUSALS},
                    openapi_extra={"requestBody": self._describe_body(body_type)},
                )(endpoint)

            return add

        return path

    async def search(self, queries: list[str], top_k: int | None) -> list[list[Passage]]:
        wanted = self._limits.default_top_k if top_k is None else top_k
        self._check(len(queries), self._limits.queries, "queries in one request")
        self._check(wanted, self._limits.top_k, "passages a query (topk)")
        self._check(max(map(len, queries), default=0), self._limits.query_chars, "characters in one query")
        results = await self._retriever.search(queries, wanted)
        self.metrics.queries.inc(len(queries))
        self.metrics.empty.inc(sum(not passages for passages in results))
        return results

    def refusal(self, request: Request) -> Response | None:
        """The answer to a request without the right token; None where it may pass."""
        if self._token is None:
            return None
        given = request.headers.get("authorization", "").encode("latin-1")
        if hmac.compare_digest(given, b"Bearer " + self._token):
            return None
        return Response(
            _render({"detail": "this retriever wants its bearer token in the Authorization header"}),
            status_code=401,
            headers={"www-authenticate": "Bearer"},
            media_type="application/json",
        )

    async def _answer(
        self, path: str, request: Request, body_type: type[Body], handler: Callable[[Body], Awaitable[Json]]
    ) -> Response:
        started = time.perf_counter()
        response = self.refusal(request)
        if response is None:
            try:
                body = _parse(await self._read(request), body_type)
                status, answer = 200, await handler(body)
            except _RefusedError as error:
                status, answer = error.status, {"detail": str(error)}
            except NotRecordedError as error:
                status, answer = 404, {"detail": str(error)}
            except ToolError as error:
                status, answer = 422, {"detail": str(error)}
            except MempoError as error:
                status, answer = 503, {"detail": f"the search failed: {error}"}
            except ClientDisconnect:
                status, answer = 400, {"detail": "the client left before its request was whole"}
            response = Response(_render(answer), status_code=status, media_type="application/json")
        self.metrics.requests.labels(path, response.status_code).inc()
        self.metrics.seconds.labels(path).observe(time.perf_counter() - started)
        return response

    async def _read(self, request: Request) -> bytes:
        """The body, given up as soon as it is too large."""
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self._limits.body_bytes:
                raise _RefusedError(413, f"the body is larger than {self._limits.body_bytes} bytes")
        return bytes(body)

    def _check(self, value: int, limit: int, what: str) -> None:
        if value > limit:
            raise _RefusedError(422, f"{value} {what}: this retriever allows {limit}")

    def _describe_body(self, body_type: type[Body]) -> dict[str, Json]:
        """The body's JSON schema, with this server's limits."""
        _, components = msgspec.json.schema_components([body_type])
        schema = components[body_type.__name__]
        query = {"type": "string", "maxLength": self._limits.query_chars}
        queries = {"type": "array", "maxItems": self._limits.queries, "items": query}
        fields = schema["properties"]
        for name in {"query", "queries"} & fields.keys():
            fields[name] = queries if fields[name]["type"] == "array" else query
        for name in {"topk", "top_n"} & fields.keys():
            integer = {"type": "integer", "minimum": 1, "maximum": self._limits.top_k}
            fields[name] = {"anyOf": [integer, {"type": "null"}]} if name == "topk" else {**integer, "default": 10}
        return {"required": True, "content": {"application/json": {"schema": schema}}}


_REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The body is not JSON"},
    401: {"description": "The bearer token is missing or wrong"},
    404: {"description": "A replaying web search was asked for what it has not recorded"},
    413: {"description": "The body is too large"},
    422: {"description": "A field is missing, of the wrong type or beyond a limit; a page that cannot be fetched"},
    503: {"description": "The search failed"},
}


def _parse(raw: bytes, body_type: type[Body]) -> Body:
    try:
        # json, not msgspec: it reads half surrogates, which clients that escape their bodies do send.
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _RefusedError(400, f"the body is not JSON: {replace_surrogates(str(error))}") from error
    try:
        return msgspec.convert(value, body_type)
    except msgspec.ValidationError as error:
        raise _RefusedError(422, replace_surrogates(str(error))) from error
    except UnicodeEncodeError as error:
        raise _RefusedError(422, "the name of a field holds half of a surrogate pair") from error


def _documents(passages: list[Passage]) -> list[dict[str, Json]]:
    return [{"id": passage.id, "contents": render_contents(passage.title, passage.text)} for passage in passages]


def _scores(passages: list[Passage]) -> list[float | None]:
    return [passage.score for passage in passages]


def _render(answer: Json) -> bytes:
    return msgspec.json.encode(answer)
