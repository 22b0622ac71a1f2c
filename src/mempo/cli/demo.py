"""`mempo demo`: the whole method on a laptop, from two retriever processes to a table of what was learned."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Column, Table

from mempo.cli.run import TerminalView
from mempo.cli.train import train
from mempo.cli.wiring import make_http_retriever
from mempo.config import Config, ContextConfig, load_config
from mempo.core import ConfigError, MempoError, Trajectory
from mempo.data.world import facts_kept
from mempo.env import SearchTool

HELP = """Train a small forgetful agent on this machine and see what it learns.

A policy of a quarter million parameters searches a fictional encyclopedia and writes its own memory. It
comes with a bad habit: it drops an old fact when it learns a new one. The demo shows that, trains it twice
from the same start, with GRPO (the outcome alone) and with MemPO (memory credit too), and evaluates all on
questions about entities that training never met. The policy before and the one that MemPO trained are also
evaluated beside contexts that hold all earlier turns.

MemPO is the preset `guarded` here: credit against what the turn could see, for each answer on its own, with a
weight that fades over the run, and without a KL penalty. `mempo config show demo` prints all of it.

examples:
  mempo demo
  mempo demo --seed 1 --batches 10 --out runs/quick
"""

LEGEND = """\
{tasks} tasks of two questions on entities that training never met, greedy; {seconds:.0f} s in all.
Both right: exact match of the whole answer of a task. EM, F1: means over the single answers.
TT, PT: tokens of all calls, of the largest. Memory: its mean tokens. Facts kept: share of the
deciding facts in the last memory. MemPO (guarded): the preset `guarded`, whose credit fades.
All turns: the same policy shown every earlier turn. It never saw such a context in training, so
its format fails there, and tokens are what to compare.
One seed tells little about GRPO against MemPO: docs/results.md has more."""

STARTUP_SECONDS = 60.0
METHODS: Mapping[str, tuple[str, Sequence[str]]] = {
    "GRPO": ("GRPO", ["--advantage.alpha", "0"]),
    "MemPO": ("MemPO (guarded)", []),
}
"""The row of each in the table, and how it differs from the preset `demo`."""


@dataclass(frozen=True)
class Args:
    out: Path = Path("runs/demo")
    """Folder for the world, the indexes and the runs; it must not hold an earlier demo; `make demo` removes it."""
    seed: int = 0
    """Seed of the world and of training."""
    batches: int = 60
    """Optimiser steps of each training."""
    tasks: Annotated[int, tyro.conf.arg(metavar="N")] = 200
    """Unseen tasks to evaluate on."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row of the table."""

    name: str
    trajectories: Sequence[Trajectory]


def run(prog: str, argv: Sequence[str]) -> int:
    args = tyro.cli(Args, prog=prog, args=list(argv), description=HELP)
    console = Console()
    started = time.perf_counter()
    for option, value in (("--batches", args.batches), ("--tasks", args.tasks)):
        if value < 1:
            raise ConfigError(f"{option} must be at least 1 (got {value})")
    if args.out.exists() and any(args.out.iterdir()):
        raise ConfigError(f"{args.out} is not empty: remove it, or choose another folder with --out")
    console.rule("a world of its own, and a retriever process for each split")
    _make_world(args, load_config("demo").train.batch_tasks)
    with ExitStack() as stack:
        urls = {name: stack.enter_context(_retriever(args.out, name)) for name in ("train", "eval")}
        outcomes = _learn(args, _overrides(args, urls), console)
    console.rule("what was learned")
    console.print(_table(outcomes))
    logs = ", ".join(str(args.out / name.lower() / "run.jsonl") for name in METHODS)
    seconds = time.perf_counter() - started
    console.print(LEGEND.format(tasks=args.tasks, seconds=seconds), soft_wrap=True)
    console.print(f"Every trajectory of training: {logs}", soft_wrap=True)
    return 0


def _learn(args: Args, settings: list[str], console: Console) -> list[Outcome]:
    """Evaluate the policy as it comes, then train it with each method and evaluate again."""
    config = load_config("demo", settings)
    all_turns = dataclasses.replace(config.context, policy="full_history")
    before = _evaluate(config, config.context)
    outcomes = [Outcome("before", before), Outcome("before, all turns", _evaluate(config, all_turns))]
    shown = _forgetful_task(before)
    console.rule("before training: it forgets")
    _show(before[shown], console)
    for name, (row, overrides) in METHODS.items():
        folder = args.out / name.lower()
        console.rule(f"training with {name}: mempo train demo {' '.join(overrides)}")
        train("mempo train", ["demo", *settings, "--run-dir", str(folder), *overrides])
        trained = dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(folder / "final")))
        outcomes.append(Outcome(row, _evaluate(trained, trained.context)))
    after = outcomes[-1].trajectories[shown]
    outcomes.append(Outcome("MemPO, all turns", _evaluate(trained, all_turns)))
    console.rule("after training with MemPO: the same task")
    _show(after, console)
    return outcomes


def _evaluate(config: Config, context: ContextConfig) -> list[Trajectory]:
    """Greedy tries at the unseen tasks, in their order."""
    from mempo.train.assembly import load_tasks, make_policy
    from mempo.train.run import RunParts, evaluate

    async def run() -> list[Trajectory]:
        retriever = make_http_retriever(config.eval.retriever)
        try:
            await retriever.check()
            tasks = load_tasks(config.eval.files, None, None)
            tools = [SearchTool(retriever, config.eval.retriever.top_k)]
            parts = RunParts(make_policy(config), [], [], tools, tasks)
            return await evaluate(dataclasses.replace(config, context=context), parts)
        finally:
            await retriever.aclose()

    return asyncio.run(run())


def _overrides(args: Args, urls: Mapping[str, str]) -> list[str]:
    return [
        "--seed", str(args.seed),
        "--train.max-batches", str(args.batches),
        "--tasks.files", str(args.out / "train" / "tasks_train.jsonl"),
        "--eval.files", str(args.out / "eval" / "tasks_eval.jsonl"),
        "--retriever.url", urls["train"],
        "--eval.retriever.url", urls["eval"],
    ]  # fmt: skip


def _make_world(args: Args, batch_tasks: int) -> None:
    """Worlds whose entities do not overlap, a corpus and an index each; every training task is seen once."""
    for split, tasks in (("train", batch_tasks * args.batches), ("eval", args.tasks)):
        folder, seed = args.out / split, str(args.seed)
        world = ["--mode", "closed", "--split", split, "--seed", seed, "--tasks", str(tasks), "--out", folder]
        _mempo("data", "world", *world)
        _mempo("index", "build", "--corpus", folder / "corpus.jsonl", "--out", folder / "index")


def _mempo(*words: object) -> None:
    """Run a mempo command whose output is only of interest where it fails."""
    command = [sys.executable, "-m", "mempo.cli.main", *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise MempoError(f"mempo {' '.join(map(str, words))} failed:\n{done.stdout}")


@contextmanager
def _retriever(out: Path, name: str) -> Iterator[str]:
    """A retriever server of its own process; the address."""
    port_file = out / name / "port"
    words = [
        "serve-retriever",
        "--index",
        out / name / "index",
        "--name",
        name,
        "--port",
        "0",
        "--port-file",
        port_file,
    ]
    with open(out / name / "server.log", "w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mempo.cli.main", *map(str, words)], stdout=log, stderr=subprocess.STDOUT
        )
        try:
            deadline = time.monotonic() + STARTUP_SECONDS
            while not port_file.exists() or not port_file.read_text():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise ConfigError(f"the {name} retriever did not start: see {out / name / 'server.log'}")
                time.sleep(0.1)
            url = f"http://127.0.0.1:{port_file.read_text().strip()}"
            print(f"the {name} retriever: process {process.pid}, {url}")
            yield url
        finally:
            process.terminate()
            process.wait(timeout=STARTUP_SECONDS)


def _forgetful_task(trajectories: Sequence[Trajectory]) -> int:
    """The first task where a fact was in a memory and no longer in the last one; else the first task."""
    for index, trajectory in enumerate(trajectories):
        kept = [facts_kept(turn.memory or "", trajectory.task) for turn in trajectory.turns]
        if trajectory.scores["exact"] == 0 and len(kept) > 2 and 0 < kept[-1] < 1:
            return index
    return 0


def _show(trajectory: Trajectory, console: Console) -> None:
    view = TerminalView(console)
    view.asking([objective.question for objective in trajectory.task.objectives])
    for turn in trajectory.turns:
        view.turn(turn)
    console.print(f"right would be: {trajectory.task.gold}", style="magenta")


COLUMNS: Mapping[str, tuple[str, str]] = {
    "both right": ("exact", "{:.1%}"),
    "EM": ("em", "{:.1%}"),
    "F1": ("f1", "{:.1%}"),
    "format": ("format", "{:.1%}"),
    "TT": ("total_tokens", "{:.0f}"),
    "PT": ("peak_tokens", "{:.0f}"),
    "memory": ("memory_tokens_mean", "{:.1f}"),
}


def _table(outcomes: Sequence[Outcome]) -> Table:
    table = Table(Column("policy", no_wrap=True, min_width=17), padding=(0, 0, 0, 1))
    for column in (*COLUMNS, "facts kept"):
        table.add_column(column, justify="right")
    for outcome in outcomes:
        found = outcome.trajectories
        cells = [
            form.format(_mean([t.scores[key] for t in found if key in t.scores])) for key, form in COLUMNS.values()
        ]
        kept = _mean([facts_kept(t.turns[-1].memory or "", t.task) for t in found if t.turns])
        table.add_row(outcome.name, *cells, f"{kept:.1%}")
    return table


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
