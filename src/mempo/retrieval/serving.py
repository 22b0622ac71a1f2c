"""Running a web application on a port: who may reach it, where it listens, how it stops."""

from __future__ import annotations

import errno
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import uvicorn
from fastapi import FastAPI

from mempo.core import ConfigError, RetrievalError
from mempo.core.files import atomic_write
from mempo.net import is_loopback
from mempo.retrieval.wire import parse_health

GRACE_SECONDS = 10
"""How long answers that are under way may take after a signal to stop."""
KEEP_ALIVE_SECONDS = 75
"""Longer than the pauses of a training run, whose client would else find its connections closed."""


def serve(
    app: FastAPI,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    allow_remote: bool = False,
    port_file: Path | None = None,
    announce: Callable[[str], None] = print,
) -> None:
    """Serve until SIGINT or SIGTERM, then finish the answers that are under way.

    Port 0 takes a free one. Once requests are answered, `listening on http://HOST:PORT` goes to
    `announce` and the port's number to `port_file`.

    Raises ConfigError for a host that is not loopback without `allow_remote`, RetrievalError with
    the holder's name for a port that is taken.
    """
    if not allow_remote and not is_loopback(host):
        raise ConfigError(
            f"--host {host} lets other machines reach this server; add --allow-remote if that is meant,"
            " and a token (--token-env or --token-file) to keep strangers out"
        )
    listener = _bind(host, port)
    bound_port = int(listener.getsockname()[1])
    url = f"http://{f'[{host}]' if ':' in host else host}:{bound_port}"

    def started() -> None:
        if port_file is not None:
            with atomic_write(port_file) as file:
                file.write(f"{bound_port}\n")
        announce(f"listening on {url}")

    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )
    # uvicorn raises the signal again when it has stopped; that is a stop as asked for, not a failure.
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        _Server(config, started).run(sockets=[listener])
    finally:
        listener.close()
        for number, handler in before.items():
            signal.signal(number, handler)


class _Server(uvicorn.Server):
    """Tells when it answers."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._on_started()


def _bind(host: str, port: int) -> socket.socket:
    if not 0 <= port < 2**16:  # the C library would take 70000 for 4464
        raise ConfigError(f"no port has the number {port}: give 1 to 65535, or 0 for a free one")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise RetrievalError(
                f"port {port} on {host} is taken by {describe_holder(host, port)}; stop it, choose another"
                " --port, or take a free one with --port 0"
            ) from error
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def describe_holder(host: str, port: int) -> str:
    """The process that listens on a port and what it says of itself, as far as both can be found out."""
    return f"{_process_on(port)}, which {_identity(host, port)}"


def _process_on(port: int) -> str:
    try:
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status != psutil.CONN_LISTEN or not connection.pid:
                continue
            if connection.laddr and connection.laddr.port == port:
                return f"process {connection.pid} ({psutil.Process(connection.pid).name()})"
    except (psutil.Error, OSError):
        pass  # another user's process, or a system that does not tell
    return "a process that cannot be seen from here"


def _identity(host: str, port: int) -> str:
    name = f"[{host}]" if ":" in host else host
    try:
        answer = httpx.get(f"http://{name}:{port}/health", timeout=1.0, trust_env=False)
        health = parse_health(answer.json())
    except httpx.HTTPError:
        return "does not answer at /health"
    except ValueError:
        return "is not a mempo retriever"
    return f"says it is the mempo retriever {health.name!r} ({health.index}, {health.passages} passages)"
