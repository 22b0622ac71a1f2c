"""Small HTTP servers that misbehave on request. They listen on a free port of 127.0.0.1, in a thread."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from mempo.retrieval.wire import Health, render_health


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    """The request's target as sent: a whole URL where the client takes the server for a proxy."""
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Reply:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    stall_seconds: float = 0.0
    """Wait before answering."""
    declared_bytes: int | None = None
    """What Content-Length says, where it lies."""
    trickle_seconds: float = 0.0
    """Wait before each byte of the body."""


def json_reply(value: Any, status: int = 200, **options: Any) -> Reply:
    return Reply(status, json.dumps(value).encode(), {"content-type": "application/json"}, **options)


PAGE_TEXT = "The lighthouse of Ardenvale was built in 1871 by Mira Tolvane, who had studied optics in the north."
HTML = f"""<!doctype html><html><head><title>Ardenvale lighthouse</title><script>var x = "hidden";</script></head>
<body><nav><a href="/">Home</a><a href="/about">About</a></nav><main><article><h1>Ardenvale lighthouse</h1>
<p>{PAGE_TEXT}</p><p>It was lit for the first time on a winter evening, and the whole town came to see it.</p>
</article></main><footer>Imprint and cookies</footer></body></html>""".encode()
ONLY_127_0_0_1 = [ipaddress.ip_network("127.0.0.1/32")]
HTML_502 = Reply(502, b"<html><body><h1>502 Bad Gateway</h1></body></html>", {"content-type": "text/html"})
HEALTH = Health(name="train", corpus_hash="c0ffee", passages=3, index="bm25", version="0")


def page(body: bytes = HTML, kind: str = "text/html; charset=utf-8", **options: Any) -> Reply:
    """A web page, by default one whose main text holds `PAGE_TEXT`."""
    return Reply(200, body, {"content-type": kind}, **options)


def echo_result(request: Request) -> Reply:
    """A retriever that finds, for each query, one passage whose text is the query."""
    hits = [[{"document": {"id": "1", "contents": f'"T"\n{query}'}, "score": 1.0}] for query in request.json["queries"]]
    return json_reply({"result": hits})


def retriever(retrieve: Callable[[Request], Reply], health: Health = HEALTH) -> Callable[[Request], Reply]:
    """A retriever that answers /health well and /retrieve as told."""

    def answer(request: Request) -> Reply:
        return json_reply(render_health(health)) if request.path == "/health" else retrieve(request)

    return answer


def in_turn(*replies: Reply | Callable[[Request], Reply]) -> Callable[[Request], Reply]:
    """The replies one after the other; the last one again and again."""
    left = list(replies)

    def answer(request: Request) -> Reply:
        reply = left.pop(0) if len(left) > 1 else left[0]
        return reply if isinstance(reply, Reply) else reply(request)

    return answer


class StubServer:
    """`with StubServer(answer) as server:` serves `answer` at `server.url` and keeps the requests."""

    def __init__(self, answer: Callable[[Request], Reply], port: int = 0) -> None:
        self.requests: list[Request] = []
        self._stopping = threading.Event()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                request = Request(
                    self.command,
                    self.path,
                    {name.lower(): value for name, value in self.headers.items()},
                    self.rfile.read(int(self.headers.get("content-length") or 0)),
                )
                stub.requests.append(request)
                # The client gives up before the end, as many of these tests mean it to.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    stub._send(self, answer(request))

            do_POST = do_GET  # noqa: N815  (http.server's name)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def bodies(self, path: str = "/retrieve") -> list[Any]:
        """The JSON bodies that came to `path`."""
        return [request.json for request in self.requests if request.path == path]

    def _send(self, handler: BaseHTTPRequestHandler, reply: Reply) -> None:
        if self._stopping.wait(reply.stall_seconds):
            return
        handler.send_response(reply.status)
        length = len(reply.body) if reply.declared_bytes is None else reply.declared_bytes
        for name, value in {"content-length": str(length), **reply.headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        pieces = [reply.body] if not reply.trickle_seconds else [bytes([byte]) for byte in reply.body]
        for piece in pieces:
            if self._stopping.wait(reply.trickle_seconds):
                return
            handler.wfile.write(piece)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
