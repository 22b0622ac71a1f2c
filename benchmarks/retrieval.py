"""How fast the retriever's server is, against bm25s in process and against a plain server.

    python benchmarks/retrieval.py --corpus corpus.jsonl --questions qa/hotpotqa.jsonl qa/musique.jsonl
    python benchmarks/retrieval.py --passages 1000000 --seconds 60 --json retrieval.json

With --corpus a file is indexed; without it, the open world of `mempo data world` with --passages
passages, written to --folder and built anew. Prints a table, and with --json writes all figures.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import bm25s
import psutil
import tyro

from mempo.core import Json, Passage
from mempo.core.files import read_jsonl, write_jsonl
from mempo.data.world import OpenWorld
from mempo.retrieval.bm25 import Analyzer, Bm25Options
from mempo.retrieval.index import build_index, open_index, read_manifest

BATCH, CLIENTS = 64, 64


@dataclass(frozen=True)
class Args:
    corpus: tuple[Path, ...] = ()
    """Corpus files; none: a generated world."""
    questions: tuple[Path, ...] = ()
    """Task files whose questions are asked; none: those of the world."""
    passages: int = 100_000
    """Size of the generated world."""
    seconds: float = 60.0
    """How long the concurrent clients run."""
    rounds: int = 5
    """Alternating repetitions of the throughput comparison; medians are shown."""
    queries: int = 1024
    """Queries of one round, and sequential requests for the latencies."""
    plain: bool = True
    """Compare with the plain server (it keeps the whole corpus in memory)."""
    folder: Path | None = None
    """Where corpus and index are put; none: a temporary folder."""
    json: Path | None = None
    """Write all figures here."""


def main(args: Args) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        figures = run(args, folder)
    for name, value in figures.items():
        print(f"{name:42} {value:.4g}" if isinstance(value, float) else f"{name:42} {value}")
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def run(args: Args, folder: Path) -> dict[str, Json]:
    corpus, queries = prepare(args, folder)
    started = time.perf_counter()
    manifest = build_index(corpus, folder / "index", bm25_options=Bm25Options())
    figures: dict[str, Json] = {
        "passages": manifest.corpus.passages,
        "build_seconds": time.perf_counter() - started,
        "build_peak_rss_mib": peak_rss_mib(),
        "index_mib": manifest.size_bytes / 2**20,
        **open_times(folder / "index"),
    }
    with mempo_server(folder / "index") as (process, port):
        figures |= throughput(folder / "index", port, queries, args.rounds)
        figures |= {f"mempo_{name}": value for name, value in load(process, port, queries, args.seconds).items()}
    if args.plain:
        with plain_server(folder / "index") as (process, port):
            figures |= {f"plain_{name}": value for name, value in load(process, port, queries, args.seconds).items()}
            figures["plain_batch_queries_per_second"] = asyncio.run(batches(port, queries))
    return figures


def prepare(args: Args, folder: Path) -> tuple[Sequence[Path], list[str]]:
    """The corpus files and the queries, as many as asked for."""
    world = OpenWorld(seed=0, passages=args.passages)
    if args.corpus:
        corpus: Sequence[Path] = args.corpus
    else:
        corpus = [folder / "world.jsonl"]
        write_jsonl(corpus[0], map(as_row, world.passages()))
    if args.questions:
        questions = [str(row["question"]) for path in args.questions for _, row in read_jsonl(path)]
    else:
        questions = [task.question for task in world.tasks(args.queries, objectives=1)]
    return corpus, list(islice(cycle(questions), args.queries))


def as_row(passage: Passage) -> dict[str, Json]:
    return {"id": passage.id, "title": passage.title, "text": passage.text}


def open_times(index: Path) -> dict[str, Json]:
    """Time until an index has answered its first query, in a fresh process: by the clock and of the processor."""
    program = (
        "import sys, time\n"
        "from mempo.retrieval.index import open_index\n"
        "clock, processor = time.perf_counter(), time.process_time()\n"
        "open_index(sys.argv[1]).find(['a first query'], 3)\n"
        "print(time.perf_counter() - clock, time.process_time() - processor)\n"
    )
    run = subprocess.run([sys.executable, "-c", program, str(index)], capture_output=True, text=True, check=True)
    clock, processor = map(float, run.stdout.split())
    return {"open_seconds": clock, "open_cpu_seconds": processor}


def throughput(index: Path, port: int, queries: list[str], rounds: int) -> dict[str, Json]:
    """Queries a second of bm25s alone, of the index in process, and over HTTP in batches of 64, in turns."""
    manifest = read_manifest(index)
    assert manifest.bm25 is not None
    scorer = bm25s.BM25.load(index / manifest.data / "bm25", mmap=True)
    analyzer, local = Analyzer(manifest.bm25), open_index(index)
    rates: dict[str, list[float]] = {"bm25s": [], "in_process": [], "http_batch": []}
    for _ in range(rounds):
        started = time.perf_counter()
        for first in range(0, len(queries), BATCH):
            terms = [analyzer.terms(query) for query in queries[first : first + BATCH]]
            scorer.retrieve(terms, k=3, show_progress=False)
        rates["bm25s"].append(len(queries) / (time.perf_counter() - started))
        started = time.perf_counter()
        for first in range(0, len(queries), BATCH):
            local.find(queries[first : first + BATCH], 3)
        rates["in_process"].append(len(queries) / (time.perf_counter() - started))
        rates["http_batch"].append(asyncio.run(batches(port, queries)))
    local.close()
    medians = {f"{name}_queries_per_second": statistics.median(values) for name, values in rates.items()}
    ratio = medians["http_batch_queries_per_second"] / medians["bm25s_queries_per_second"]
    return {**medians, "http_batch_over_bm25s": ratio}


async def batches(port: int, queries: list[str]) -> float:
    """Queries a second of one client that sends batches of 64, one after the other."""
    async with Connection(port) as connection:
        started = time.perf_counter()
        for first in range(0, len(queries), BATCH):
            await connection.retrieve(queries[first : first + BATCH])
        return len(queries) / (time.perf_counter() - started)


def load(process: psutil.Process, port: int, queries: list[str], seconds: float) -> dict[str, Json]:
    """Latency of one client, then 64 clients at once, each with one query a request."""
    single = asyncio.run(sequential(port, queries))
    before = process.cpu_times()
    concurrent, errors, elapsed = asyncio.run(clients(port, queries, seconds))
    after = process.cpu_times()
    cpu_seconds = after.user + after.system - before.user - before.system
    return {
        **{f"single_{name}": value for name, value in percentiles(single).items()},
        **{f"64_clients_{name}": value for name, value in percentiles(concurrent).items()},
        "64_clients_queries_per_second": len(concurrent) / elapsed,
        "64_clients_errors": errors,
        "64_clients_cpu_ms_per_query": 1000 * cpu_seconds / max(len(concurrent), 1),
        "rss_mib": process.memory_info().rss / 2**20,
    }


async def sequential(port: int, queries: list[str]) -> list[float]:
    async with Connection(port) as connection:
        return [await connection.retrieve([query]) for query in queries]


async def clients(port: int, queries: list[str], seconds: float) -> tuple[list[float], int, float]:
    """Times of all requests, the number of failed ones, and how long it took."""
    times: list[float] = []
    started = time.perf_counter()

    async def client(number: int) -> int:
        async with Connection(port) as connection:
            for query in islice(cycle(queries), number, None):
                if time.perf_counter() - started > seconds:
                    return 0
                try:
                    times.append(await connection.retrieve([query]))
                except (OSError, ValueError, asyncio.IncompleteReadError):
                    return 1
        return 0

    errors = sum(await asyncio.gather(*(client(number) for number in range(CLIENTS))))
    return times, errors, time.perf_counter() - started


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=100)
    return {"p50_ms": 1000 * cuts[49], "p99_ms": 1000 * cuts[98]}


class Connection:
    """A kept-open connection that costs the client next to nothing: both share two cores here."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Connection:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    async def retrieve(self, queries: list[str]) -> float:
        """Seconds to the whole answer. Raises ValueError for any answer but the right number of results."""
        body = json.dumps({"queries": queries, "topk": 3, "return_scores": True}).encode()
        head = (
            "POST /retrieve HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        started = time.perf_counter()
        self._writer.write(head.encode() + body)
        status = await self._reader.readuntil(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in status.split(b"\r\n")[1:-2])
        answer = await self._reader.readexactly(int(fields[b"content-length"]))
        seconds = time.perf_counter() - started
        if not status.startswith(b"HTTP/1.1 200") or len(json.loads(answer)["result"]) != len(queries):
            raise ValueError(f"{status!r} {answer[:200]!r}")
        return seconds


@contextmanager
def mempo_server(index: Path) -> Iterator[tuple[psutil.Process, int]]:
    command = [sys.executable, "-m", "mempo.cli.main", "serve-retriever", "--index", str(index), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().rsplit(":", 1)[1])
        with stopped_at_the_end(process):
            yield psutil.Process(process.pid), port


@contextmanager
def plain_server(index: Path) -> Iterator[tuple[psutil.Process, int]]:
    port = free_port()
    script = Path(__file__).with_name("plain_server.py")
    command = [sys.executable, str(script), str(index), str(port)]
    with subprocess.Popen(command) as process, stopped_at_the_end(process):
        wait_for(port)
        yield psutil.Process(process.pid), port


@contextmanager
def stopped_at_the_end(process: subprocess.Popen[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(port: int, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


def peak_rss_mib() -> float:
    """The most memory that this process has held so far."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(tyro.cli(Args, description=__doc__))
