"""`mempo serve-web`: a web search behind HTTP, in the retriever's wire format."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

from mempo import __version__
from mempo.cli.listening import ListenArgs
from mempo.core import ConfigError, MissingExtraError
from mempo.retrieval.cache import DiskCache
from mempo.retrieval.web import SERPER, Recording, WebPages, WebSearch
from mempo.retrieval.wire import Health

DESCRIPTION = """Serve a Serper-compatible web search over HTTP, in the format of every retriever.

examples:
  SERPER_API_KEY=... mempo serve-web --cache web.sqlite --port 8002
  mempo serve-web --cache web.sqlite --mode replay --port 8002      (no key, no network)

Ask it:
  curl -s localhost:8002/retrieve -d '{"queries": ["who wrote Hamlet"], "topk": 3}'
  curl -s localhost:8002/fetch -d '{"url": "https://example.org/"}'
"""


@dataclass(frozen=True)
class Args:
    endpoint: str = SERPER
    """Where searches are sent, as POST {"q", "num"} with an X-API-KEY header."""
    key_env: str = "SERPER_API_KEY"
    """Name of the environment variable that holds the key."""
    cache: Path | None = None
    """A file that keeps answers and pages; made where it is missing."""
    mode: Literal["record", "replay"] = "record"
    """`record` asks the network for what the cache lacks and keeps it; `replay` never touches the network."""
    on_miss: Literal["error", "empty"] = "error"
    """What replay answers to a query that was not recorded: 404, or no passages."""
    timeout_seconds: float = 10.0
    """Wait for one try at a search."""
    retries: int = 2
    """Further tries after a fault."""
    concurrency: int = 8
    """Searches under way at a time."""
    fetch: bool = True
    """Answer POST /fetch with the text of a page."""
    page_seconds: float = 20.0
    """Wait for one page, redirects and text extraction included."""
    page_bytes: int = 5 * 2**20
    """A larger page is refused."""
    page_chars: int = 20_000
    """A longer text is cut."""
    name: str = "web"
    """The role that /health tells; clients can insist on it."""
    listen: tyro.conf.OmitArgPrefixes[ListenArgs] = field(default_factory=lambda: ListenArgs(port=8002))


def run(prog: str, argv: Sequence[str]) -> int:
    """Entry of `mempo serve-web`."""
    args = tyro.cli(Args, prog=prog, args=list(argv), description=DESCRIPTION)
    try:
        from mempo.retrieval.fetch import PageFetcher
        from mempo.retrieval.server import create_app
    except ImportError as error:
        raise MissingExtraError(error.name or "fastapi", extra="serve") from error
    replay = args.mode == "replay"
    api_key = "" if replay else _read_key(args.key_env)
    token = args.listen.read_token()
    if replay and args.cache is not None and not args.cache.is_file():
        raise ConfigError(f"{args.cache}: no recording here; make one with --mode record, or check the path")
    cache = None if args.cache is None else DiskCache(args.cache)
    try:
        recording = Recording(cache, replay=replay)
        search = WebSearch(
            args.endpoint,
            api_key,
            recording,
            on_miss=args.on_miss,
            timeout_seconds=args.timeout_seconds,
            retries=args.retries,
            concurrency=args.concurrency,
        )
        pages = None
        if args.fetch:
            fetcher = PageFetcher(
                timeout_seconds=args.page_seconds, max_bytes=args.page_bytes, max_chars=args.page_chars
            )
            pages = WebPages(fetcher, recording)
        health = Health(args.name, search.corpus_hash, 0 if cache is None else len(cache), "web", __version__)
        # The web answers queries one by one: a batch would only make the quick wait for the slow.
        args.listen.serve(create_app(search, health, token=token, max_batch_queries=None, pages=pages))
    finally:
        if cache is not None:
            cache.close()
    return 0


def _read_key(variable: str) -> str:
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(
            f"the environment variable {variable} holds no key; set it, or answer from a recording with --mode replay"
        )
    return key
