"""`mempo index build | info | search`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from mempo.core import DataError, IndexFileError
from mempo.retrieval.bm25 import Bm25Options
from mempo.retrieval.corpus import Progress as ReportProgress
from mempo.retrieval.corpus import corpus_sha256
from mempo.retrieval.dense import DenseOptions
from mempo.retrieval.index import Manifest, build_index, check_files, open_index, read_manifest

SHOWN_BAD_LINES = 5

BUILD = """Build a search index of a corpus, or replace one when the new one is complete.

examples:
  mempo index build --corpus corpus.jsonl --out indexes/train
  mempo index build --corpus core.jsonl extra.jsonl.gz --out indexes/eval
  mempo index build --corpus corpus.jsonl --out indexes/hybrid --kind hybrid --dense.encoder minilm

A build that was cut goes on where it stopped: run the same command again.
"""
INFO = """Show what an index is and check that its files are whole.

examples:
  mempo index info --index indexes/train
  mempo index info --index indexes/train --verify --corpus corpus.jsonl
"""
SEARCH = """Search an index from the command line.

examples:
  mempo index search --index indexes/train "who wrote Hamlet" "capital of Peru" --top-k 3
"""


@dataclass(frozen=True)
class BuildArgs:
    corpus: tuple[Path, ...]
    """Corpus files, plain or gzipped: JSON lines of {"id", "contents"} or {"id", "title", "text"}."""
    out: Path
    """Folder of the index."""
    kind: Literal["bm25", "dense", "hybrid"] = "bm25"
    """`hybrid` fuses the ranks of the other two."""
    lenient: bool = False
    """Leave bad lines out, and count them, instead of stopping at the first."""
    bm25: Bm25Options = field(default_factory=Bm25Options)
    dense: DenseOptions = field(default_factory=DenseOptions)
    json: bool = False
    """Print the manifest as JSON."""


@dataclass(frozen=True)
class InfoArgs:
    index: Path
    """Folder of the index."""
    verify: bool = False
    """Check the hash of every file, not its size alone."""
    corpus: tuple[Path, ...] = ()
    """Check that the index was made of these files."""
    json: bool = False
    """Print the manifest as JSON."""


@dataclass(frozen=True)
class SearchArgs:
    queries: tyro.conf.Positional[tuple[str, ...]]
    """What to search for."""
    index: Path
    """Folder of the index."""
    top_k: int = 3
    """Passages a query."""
    json: bool = False
    """Print one JSON object a query."""


def build(prog: str, argv: Sequence[str]) -> int:
    """Entry of `mempo index build`."""
    args = tyro.cli(BuildArgs, prog=prog, args=list(argv), description=BUILD)
    bad: list[DataError] = []
    with _progress() as progress:
        manifest = build_index(
            args.corpus,
            args.out,
            bm25_options=None if args.kind == "dense" else args.bm25,
            dense_options=None if args.kind == "bm25" else args.dense,
            on_error=bad.append if args.lenient else None,
            progress=progress,
        )
    console = Console(stderr=True)
    for error in bad[:SHOWN_BAD_LINES]:
        console.print(f"left out: {error}", markup=False, highlight=False)
    _show(args.out, manifest, as_json=args.json)
    return 0


def info(prog: str, argv: Sequence[str]) -> int:
    """Entry of `mempo index info`."""
    args = tyro.cli(InfoArgs, prog=prog, args=list(argv), description=INFO)
    manifest = read_manifest(args.index)
    check_files(args.index / manifest.data, manifest.files, verify=args.verify)
    if args.corpus:
        found = corpus_sha256(args.corpus, (lambda _: None) if manifest.bad_lines else None)
        if found != manifest.corpus.sha256:
            names = ", ".join(map(str, args.corpus))
            raise IndexFileError(
                f"{args.index}: made of another corpus: its hash is {manifest.corpus.sha256[:12]}…"
                f" and that of {names} {found[:12]}…; build an index of this corpus"
            )
    _show(args.index, manifest, as_json=args.json)
    return 0


def search(prog: str, argv: Sequence[str]) -> int:
    """Entry of `mempo index search`."""
    args = tyro.cli(SearchArgs, prog=prog, args=list(argv), description=SEARCH)
    index = open_index(args.index)
    try:
        results = index.find(args.queries, args.top_k)
    finally:
        index.close()
    for query, passages in zip(args.queries, results, strict=True):
        if args.json:
            print(json.dumps({"query": query, "passages": [asdict(p) for p in passages]}, ensure_ascii=False))
            continue
        print(f"{query}" if passages else f"{query}\n  no results")
        for passage in passages:
            print(f"  {passage.score:8.4f}  {passage.id}  {passage.title}\n            {_shortened(passage.text)}")
    return 0


def _show(folder: Path, manifest: Manifest, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(manifest), ensure_ascii=False))
        return
    corpus = manifest.corpus
    left_out = {
        "duplicate": corpus.duplicates,
        "empty": corpus.empty,
        "bad": manifest.bad_lines,
    }
    rows = {
        "index": f"{folder} ({manifest.kind}, {manifest.size_bytes / 2**20:.1f} MiB, made {manifest.created})",
        "corpus": f"{corpus.passages} passages, {corpus.size_bytes / 2**20:.1f} MiB, sha256 {corpus.sha256}",
        "sources": ", ".join(manifest.sources),
        "left out": ", ".join(f"{count} {what}" for what, count in left_out.items()),
        "bm25": _options(manifest.bm25),
        "dense": _options(manifest.dense),
        "versions": ", ".join(f"{package} {number}" for package, number in manifest.versions.items()),
    }
    if corpus.duplicate_ids:
        rows["duplicates"] = f"first kept, e.g. {', '.join(corpus.duplicate_ids)}"
    for name, value in rows.items():
        if value:
            print(f"{name:10} {value}")


def _options(options: Bm25Options | DenseOptions | None) -> str:
    return "" if options is None else ", ".join(f"{name} {value}" for name, value in asdict(options).items())


def _shortened(text: str, limit: int = 160) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


@contextmanager
def _progress() -> Iterator[ReportProgress]:
    """Bars on standard error, one for each part of the work; nothing where it is not a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield report
