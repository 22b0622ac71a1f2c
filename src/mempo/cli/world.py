"""`mempo data world` and `mempo data teach`: tasks that need no download, and a teacher that plays them."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import tyro
from rich.console import Console
from rich.progress import track

from mempo.core import ConfigError, DataError, Json, Passage, Retriever, Task, Trajectory
from mempo.core.files import atomic_write
from mempo.data import read_tasks, write_tasks
from mempo.data.teacher import Flaws, Teacher
from mempo.data.world import MAX_HOPS, ClosedWorld, OpenWorld, Split, closed_worlds, facts_kept, is_world_task
from mempo.retrieval.client import HttpRetriever
from mempo.retrieval.corpus import read_passages
from mempo.retrieval.memory import MemoryRetriever
from mempo.rewards.answers import score_task
from mempo.runlog import RunLogWriter, collect_run_info

_CONFIG = (tyro.conf.FlagCreatePairsOff,)
WORLD_VERSION = 1
"""Changes when a seed gives other bytes than before."""

WORLD_HELP = """Make a fictional encyclopedia, and tasks about it.

Writes corpus.jsonl, tasks_train.jsonl, tasks_eval.jsonl and world.json to a folder. The same seed
gives the same bytes. Training and evaluation share no entity.

Examples:
  mempo data world --seed 0 --passages 1000 --objectives 2 --out world
  mempo data world --seed 0 --mode closed --tasks 2000 --objectives 2 --out small
  mempo data world --seed 0 --split eval --passages 1000000 --tasks 500 --out big"""

TEACH_HELP = """Let a scripted searcher play tasks, and write its trajectories as a run log.

It knows how to search; what it answers it reads from its own memory alone. Flaws are for making
memories that are known to be bad.

Examples:
  mempo data teach world/tasks_train.jsonl --corpus world/corpus.jsonl --out teacher.jsonl
  mempo data teach hotpotqa.jsonl --retriever http://127.0.0.1:8000 --out teacher.jsonl
  mempo data teach small/tasks_train.jsonl --corpus small/corpus.jsonl --top-k 2 --flaw.habit 0.7 --out bad.jsonl"""


@dataclass(frozen=True)
class WorldArgs:
    out: Path
    """The folder to write to."""
    seed: int = 0
    mode: Literal["open", "closed"] = "open"
    """`closed`: about 200 words and a small world for each task, for tiny policies."""
    passages: int | None = None
    """Passages of the corpus (open mode, 1000 by default); closed worlds have as many as their tasks need."""
    objectives: int = 2
    """Questions a task."""
    hops: tuple[int, ...] = ()
    """Lengths of the chains to draw from; 1 to 4 in open mode, 1 and 2 in closed mode."""
    tasks: int = 1000
    """Tasks of the training split; the evaluation split has a fifth of it, or all where it is made alone."""
    split: Literal["both", "train", "eval"] = "both"
    """What corpus and tasks are about. One corpus for both, four fifths of it for training, or one split alone."""
    shuffled: bool = False
    """Note in each task another order of searching than that of the questions."""
    force: bool = False
    """Overwrite the files of another world."""


@dataclass(frozen=True)
class TeachArgs:
    tasks: Annotated[Path, tyro.conf.Positional]
    """World tasks, or tasks with supporting titles."""
    out: Path
    """The run log to write."""
    corpus: Path | None = None
    """Search this corpus, indexed in memory."""
    retriever: str | None = None
    """Search the server at this URL."""
    top_k: int = 3
    """Passages a search."""
    seed: int = 0
    rollouts: int = 1
    """Trajectories a task; only a flawed teacher makes different ones."""
    limit: int | None = None
    """Play the first tasks only."""
    max_turns: int = 16
    """In its last turn the teacher answers what it knows."""
    flaw: Flaws = field(default_factory=Flaws)
    """What the teacher does wrong."""
    keep: Literal["all", "right", "wrong"] = "all"
    """Which trajectories to write, by the exact match of all their answers."""
    concurrency: int = 16
    """Trajectories at once."""
    json: bool = False
    """Print the summary as JSON."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What one split adds to a world: passages to stream, and tasks."""

    passages: Iterable[Passage]
    tasks: Iterable[Task]


def world(prog: str, argv: Sequence[str]) -> int:
    args = tyro.cli(WorldArgs, prog=prog, args=argv, description=WORLD_HELP, config=_CONFIG)
    if (args.out / "world.json").exists() and not args.force:
        raise DataError("a world is there already; --force overwrites it", file=str(args.out / "world.json"))
    splits: list[Split] = ["train", "eval"] if args.split == "both" else [args.split]
    parts = {split: _part(args, split) for split in splits}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "world.json").unlink(missing_ok=True)  # written last: its presence says that all is there
    passages, digest = _write_corpus(args.out / "corpus.jsonl", [parts[split].passages for split in splits])
    tasks = {split: write_tasks(args.out / f"tasks_{split}.jsonl", parts[split].tasks) for split in splits}
    facts: dict[str, Json] = {
        "version": WORLD_VERSION,
        "seed": args.seed,
        "mode": args.mode,
        "split": args.split,
        "objectives": args.objectives,
        "hops": list(_hops(args)),
        "shuffled": args.shuffled,
        "passages": passages,
        "tasks": tasks,
        "corpus_sha256": digest,
    }
    with atomic_write(args.out / "world.json") as file:
        file.write(json.dumps(facts, indent=2) + "\n")
    counts = ", ".join(f"{count} tasks ({split})" for split, count in tasks.items())
    print(f"{args.out}: {passages} passages, {counts}, corpus sha256 {digest[:12]}")
    return 0


def teach(prog: str, argv: Sequence[str]) -> int:
    args = tyro.cli(TeachArgs, prog=prog, args=argv, description=TEACH_HELP, config=_CONFIG)
    if (args.corpus is None) == (args.retriever is None):
        raise ConfigError("give either --corpus or --retriever")
    for name in ("rollouts", "concurrency", "top_k", "max_turns"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1 (got {getattr(args, name)})")
    if args.limit is not None and args.limit < 0:
        raise ConfigError(f"--limit must be at least 0 (got {args.limit})")
    tasks = read_tasks(args.tasks).tasks[: args.limit]
    retriever = _retriever(args)
    with RunLogWriter.create(args.out, collect_run_info(args, seeds={"teacher": args.seed})) as log:
        summary = asyncio.run(_teach(args, tasks, retriever, log))
    print(json.dumps(summary, indent=2) if args.json else "\n".join(_lines(args, summary)))
    return 0


def _part(args: WorldArgs, split: Split) -> _Part:
    share = {"train": (4, 5), "eval": (1, 5)}[split] if args.split == "both" else (1, 1)
    count = args.tasks if split == args.split or split == "train" else -(-args.tasks // 5)
    hops = _hops(args)
    if args.mode == "open":
        made = OpenWorld(args.seed, (1000 if args.passages is None else args.passages) * share[0] // share[1], split)
        tasks = made.tasks(count, objectives=args.objectives, hops=hops, shuffled=args.shuffled)
        return _Part(made.passages(), tasks)
    if args.passages is not None:
        raise ConfigError("--passages is for the open mode: closed worlds have as many as their --tasks need")

    def worlds() -> Iterator[ClosedWorld]:
        return closed_worlds(
            args.seed, count, objectives=args.objectives, hops=hops, split=split, shuffled=args.shuffled
        )

    return _Part((passage for made in worlds() for passage in made.passages), (made.task for made in worlds()))


def _hops(args: WorldArgs) -> tuple[int, ...]:
    return args.hops or (tuple(range(1, MAX_HOPS + 1)) if args.mode == "open" else (1, 2))


def _write_corpus(path: Path, parts: Sequence[Iterable[Passage]]) -> tuple[int, str]:
    """Write the corpus as a stream; returns its number of passages and its hash, the one that an index will carry."""
    digest, encoder, count = hashlib.sha256(), msgspec.json.Encoder(), 0
    with atomic_write(path, "wb") as file:
        for passage in track(chain(*parts), "passages", console=Console(stderr=True), transient=True):
            line = encoder.encode({"id": passage.id, "title": passage.title, "text": passage.text}) + b"\n"
            file.write(line)
            digest.update(line)
            count += 1
    return count, digest.hexdigest()


async def _teach(args: TeachArgs, tasks: Sequence[Task], retriever: Retriever, log: RunLogWriter) -> dict[str, Json]:
    scores: Counter[str] = Counter()
    played = written = turns = 0
    total = len(tasks) * args.rollouts
    console = Console(stderr=True)
    async with aclosing(_played(args, tasks, retriever)) as trajectories:
        with console.status("teaching") as status:
            async for trajectory in trajectories:
                played += 1
                turns += len(trajectory.turns)
                scores.update(trajectory.scores)
                if args.keep == "all" or (args.keep == "right") == (trajectory.scores["em"] == 1):
                    log.write_trajectory(trajectory)
                    written += 1
                status.update(f"teaching: {played} of {total} trajectories")
    summary: dict[str, Json] = {"trajectories": played, "written": written}
    if played:
        summary["turns"] = turns / played
        summary |= {name: value / played for name, value in scores.items()}
        log.write_metrics(0, {name: float(value) for name, value in summary.items()})
    return summary


async def _played(args: TeachArgs, tasks: Sequence[Task], retriever: Retriever) -> AsyncGenerator[Trajectory, None]:
    """All trajectories with their scores, in the order of the tasks, some of them played at once."""
    teacher = Teacher(args.flaw, max_turns=args.max_turns)
    tries = [(task, rollout) for task in tasks for rollout in range(args.rollouts)]
    try:
        for start in range(0, len(tries), args.concurrency):
            batch = [
                teacher.run(task, retriever, rollout=rollout, seed=args.seed, top_k=args.top_k)
                for task, rollout in tries[start : start + args.concurrency]
            ]
            for trajectory in await asyncio.gather(*batch):
                yield _scored(trajectory)
    finally:
        if isinstance(retriever, HttpRetriever):
            await retriever.aclose()


def _retriever(args: TeachArgs) -> Retriever:
    if args.retriever is not None:
        return HttpRetriever(args.retriever)
    assert args.corpus is not None
    return MemoryRetriever(read_passages([args.corpus]))


def _scored(trajectory: Trajectory) -> Trajectory:
    """With EM (1 where every answer is right), the mean over objectives, F1, and the share of needed facts kept."""
    score = score_task(trajectory.answer, trajectory.task)
    scores = {"em": float(score.em == 1), "objective_em": score.em, "f1": score.f1}
    if is_world_task(trajectory.task):
        scores["facts_kept"] = facts_kept(trajectory.turns[-1].memory, trajectory.task)
    return replace(trajectory, scores=scores)


def _lines(args: TeachArgs, summary: dict[str, Json]) -> Iterator[str]:
    yield f"{args.out}: {summary['written']} of {summary['trajectories']} trajectories"
    names = {
        "em": "all answers right",
        "objective_em": "answers right",
        "f1": "F1",
        "facts_kept": "needed facts in the last memory",
        "turns": "turns a trajectory",
    }
    for key, name in names.items():
        if key in summary:
            yield f"  {name}: {summary[key]:.3f}"
