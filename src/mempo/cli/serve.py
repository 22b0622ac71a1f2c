"""`mempo serve-retriever`: an index behind HTTP."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from mempo import __version__
from mempo.core import ConfigError, MissingExtraError
from mempo.retrieval.dense import DenseOptions
from mempo.retrieval.index import Index, open_faiss, open_index
from mempo.retrieval.wire import Health

DESCRIPTION = """Serve an index over HTTP in Search-R1's and ReSearch's formats.

examples:
  mempo serve-retriever --index indexes/train --port 8000 --name train
  mempo serve-retriever --index indexes/eval --port 0 --port-file eval.port --name eval
  mempo serve-retriever --corpus wiki-18.jsonl --faiss e5_Flat.index --encoder intfloat/e5-base-v2 --port 8000

Ask it:
  curl -s localhost:8000/retrieve -d '{"queries": ["who wrote Hamlet"], "topk": 3, "return_scores": true}'
"""


@dataclass(frozen=True)
class LimitArgs:
    """Largest requests that are answered."""

    max_queries: int = 512
    """Queries in one request."""
    max_query_chars: int = 8192
    """Characters in one query."""
    max_top_k: int = 100
    """Passages a query."""
    max_body_bytes: int = 8 * 2**20
    """Bytes of one request's body."""
    default_top_k: int = 3
    """Passages a query where the request does not say."""


@dataclass(frozen=True)
class Args:
    index: Path | None = None
    """An index made by `mempo index build`."""
    corpus: Path | None = None
    """Instead of --index: a corpus file as it is, with --faiss and --encoder."""
    faiss: Path | None = None
    """A faiss index whose row i is line i of --corpus."""
    encoder: str | None = None
    """The encoder that made --faiss: a folder or name for sentence-transformers, or `minilm`."""
    name: str = "retriever"
    """The role that /health tells, e.g. train or eval; clients can insist on it."""
    host: str = "127.0.0.1"
    """Address to listen on; anything but loopback needs --allow-remote."""
    port: int = 8000
    """0 takes a free port; the line `listening on http://HOST:PORT` tells which."""
    allow_remote: bool = False
    """Let other machines reach the server."""
    port_file: Path | None = None
    """Write the port's number here once requests are answered."""
    token_env: str | None = None
    """Name of an environment variable that holds a bearer token; requests must carry it."""
    token_file: Path | None = None
    """A file that holds the bearer token."""
    verify: bool = False
    """Check the hash of every file of the index before serving it, not its size alone."""
    limits: tyro.conf.OmitArgPrefixes[LimitArgs] = field(default_factory=LimitArgs)


def retriever(prog: str, argv: Sequence[str]) -> int:
    """Entry of `mempo serve-retriever`."""
    args = tyro.cli(Args, prog=prog, args=list(argv), description=DESCRIPTION)
    try:
        from mempo.retrieval.server import Limits, create_app
        from mempo.retrieval.serving import serve
    except ImportError as error:
        raise MissingExtraError(error.name or "fastapi", extra="serve") from error
    token = read_token(args.token_env, args.token_file)
    index = _open(args)
    limits = Limits(
        queries=args.limits.max_queries,
        query_chars=args.limits.max_query_chars,
        top_k=args.limits.max_top_k,
        body_bytes=args.limits.max_body_bytes,
        default_top_k=args.limits.default_top_k,
    )
    health = Health(args.name, index.corpus_sha256, len(index), index.kind, __version__)
    try:
        serve(
            create_app(index, health, limits=limits, token=token),
            host=args.host,
            port=args.port,
            allow_remote=args.allow_remote,
            port_file=args.port_file,
            announce=lambda line: print(line, flush=True),
        )
    finally:
        index.close()
    return 0


def read_token(variable: str | None, file: Path | None) -> str | None:
    """The bearer token from a variable or a file; None where neither is named.

    Raises ConfigError for one that is named and not there, empty, or not sendable; never shows the token.
    """
    if variable is not None and file is not None:
        raise ConfigError("give --token-env or --token-file, not both")
    if variable is not None:
        token, place = os.environ.get(variable, ""), f"the environment variable {variable} (--token-env)"
    elif file is not None:
        try:
            token, place = file.read_text(encoding="latin-1"), f"{file} (--token-file)"
        except OSError as error:
            raise ConfigError(f"{file} (--token-file) cannot be read: {error.strerror}") from error
    else:
        return None
    token = token.strip()
    if not token:
        raise ConfigError(f"{place} holds no token")
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise ConfigError(f"{place} holds no token that a header can carry: printable ASCII without blanks")
    return token


def _open(args: Args) -> Index:
    if args.index is not None:
        if args.corpus or args.faiss or args.encoder:
            raise ConfigError("give --index, or --corpus with --faiss and --encoder, not both")
        return open_index(args.index, verify=args.verify)
    if args.corpus is None or args.faiss is None or args.encoder is None:
        raise ConfigError("name what to serve: --index DIR, or --corpus FILE --faiss FILE --encoder NAME")
    return open_faiss(args.corpus, args.faiss, DenseOptions(encoder=args.encoder))
