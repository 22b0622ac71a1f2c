"""`mempo serve-retriever`: an index behind HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from mempo import __version__
from mempo.cli.listening import ListenArgs
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
    listen: tyro.conf.OmitArgPrefixes[ListenArgs] = field(default_factory=ListenArgs)
    verify: bool = False
    """Check the hash of every file of the index before serving it, not its size alone."""
    limits: tyro.conf.OmitArgPrefixes[LimitArgs] = field(default_factory=LimitArgs)


def retriever(prog: str, argv: Sequence[str]) -> int:
    """Entry of `mempo serve-retriever`."""
    args = tyro.cli(Args, prog=prog, args=list(argv), description=DESCRIPTION)
    try:
        from mempo.retrieval.server import Limits, create_app
    except ImportError as error:
        raise MissingExtraError(error.name or "fastapi", extra="serve") from error
    token = args.listen.read_token()
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
        args.listen.serve(create_app(index, health, limits=limits, token=token))
    finally:
        index.close()
    return 0


def _open(args: Args) -> Index:
    if args.index is not None:
        if args.corpus or args.faiss or args.encoder:
            raise ConfigError("give --index, or --corpus with --faiss and --encoder, not both")
        return open_index(args.index, verify=args.verify)
    if args.corpus is None or args.faiss is None or args.encoder is None:
        raise ConfigError("name what to serve: --index DIR, or --corpus FILE --faiss FILE --encoder NAME")
    return open_faiss(args.corpus, args.faiss, DenseOptions(encoder=args.encoder))
