"""`mempo rollout`: an agent on a file of tasks, written to a run log, resumable."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Task as BarTask
from rich.text import Text

from mempo.cli.main import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from mempo.cli.score import render_row, render_table
from mempo.cli.wiring import PolicyArgs, ToolArgs, check_policy, make_policy, open_tools
from mempo.config import ContextConfig, RolloutConfig, check
from mempo.core import FAILURES, ConfigError, Json, Policy, StopReason, Task
from mempo.data import read_tasks
from mempo.rewards import Mode, score_task, trajectory_scores
from mempo.rewards.summary import ScoreSummary, summarise_by_source
from mempo.rollout import RolloutHooks, make_context, make_rollout
from mempo.rollout.progress import RolloutProgress, TryResult
from mempo.rollout.resume import (
    TryId,
    check_same_kind,
    check_same_run,
    check_same_tasks,
    last_tries,
    open_tries,
    try_id,
)
from mempo.runlog import RunInfo, RunLogWriter, collect_run_info, killed_in_header, read_runlog
from mempo.text.prompts import prompts_hash

DESCRIPTION = """Run an agent on every task of a file, many at once. OUT/run.jsonl gets each trajectory as it ends.

Killed or interrupted, the same command goes on: what is in the log is not made again, except where
the policy failed. A log of other settings is refused, unless --resume is given. The exit status is 1
where the policy failed in some trajectories, 130 after Ctrl-C.

examples:
  mempo rollout tasks.jsonl --out runs/smollm2 --corpus corpus.jsonl --max-turns 6
  mempo rollout tasks.jsonl --out runs/qwen --base-url http://127.0.0.1:8080/v1 --model qwen2.5-7b --concurrency 32
  mempo rollout tasks.jsonl --out runs/group --group-size 8 --model ./checkpoint --index indexes/train
  mempo score runs/smollm2/run.jsonl tasks.jsonl
"""

SPLIT = "eval"
"""Of the trajectories in the log: they are not trained on."""

NOT_COMPARED = (
    # Where a run is written and how fast it goes changes no trajectory; tasks are compared by content.
    *("tasks", "format", "limit", "out", "resume", "json", "mode", "rollout.group_size", "rollout.concurrency"),
    *("rollout.deadline_seconds", "rollout.max_failure_rate", "policy.device", "policy.api_key_env"),
)


@dataclass(frozen=True)
class Args:
    tasks: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TASKS")]
    """A task file of any format that `mempo data check` reads."""
    out: Path
    """Folder of the run; it gets `run.jsonl`."""
    policy: tyro.conf.OmitArgPrefixes[PolicyArgs] = field(default_factory=PolicyArgs)
    tools: tyro.conf.OmitArgPrefixes[ToolArgs] = field(default_factory=ToolArgs)
    rollout: tyro.conf.OmitArgPrefixes[RolloutConfig] = field(default_factory=lambda: RolloutConfig(group_size=1))
    context: ContextConfig = field(default_factory=ContextConfig)
    seed: int = 0
    """The same seed gives the same trajectories, whatever the concurrency."""
    limit: int | None = None
    """Only the first so many tasks."""
    format: str | None = None
    """Format of TASKS; None finds it out from its content."""
    mode: Mode = "qa"
    """How answers are compared in the summary."""
    resume: bool = False
    """Go on with the rollout in --out although settings have changed."""
    json: bool = False
    """Print the summary as JSON."""


def run(prog: str, argv: Sequence[str]) -> int:
    """Entry point of `mempo rollout`."""
    args = tyro.cli(Args, prog=prog, args=list(argv), description=DESCRIPTION)
    check(args.rollout)
    check(args.context)
    make_context(args.context)  # a set of prompts that is not there is named now, not after loading a model
    tasks = first_tasks(args)
    info = collect_run_info(args, seeds={"run": args.seed}, prompts_hash=prompts_hash(args.context.prompts))
    path = args.out / "run.jsonl"
    results = _read_results(path, tasks, info, resume=args.resume)
    done = {identity for identity, result in results.items() if result.stop not in FAILURES}
    tries = list(open_tries(tasks, args.rollout.group_size, done))
    if tries:
        policy = make_policy(args.policy, args.rollout, args.context)
        try:
            asyncio.run(_roll(args, policy, tries, results, path, info))
        except KeyboardInterrupt:
            print(f"interrupted; {path} holds all that has ended. The same command goes on.", file=sys.stderr)
            return EXIT_INTERRUPTED
    report = summarise_results(tasks, results, args.rollout.group_size, args.mode)
    print(json.dumps(report.as_json(made=len(tries)), indent=2) if args.json else report.as_text(args.mode, path))
    if failed := sum(report.stops.get(reason, 0) for reason in FAILURES):
        print(f"the policy or a tool failed in {failed} tries: the same command makes them again", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_OK


def first_tasks(args: Args) -> list[Task]:
    """The tasks that the arguments ask for."""
    if args.limit is not None and args.limit < 0:
        raise ConfigError(f"--limit must be at least 0 (got {args.limit})")
    return list(read_tasks(args.tasks, args.format))[: args.limit]


def _read_results(path: Path, tasks: Sequence[Task], info: RunInfo, *, resume: bool) -> dict[TryId, TryResult]:
    """What the log already holds; nothing where there is none. Refuses a log of another run."""
    if not path.exists() or killed_in_header(path):
        return {}
    log = read_runlog(path)
    check_same_kind(log, info)
    check_same_tasks(log, tasks)
    if not resume:
        check_same_run(log, info, ignored=NOT_COMPARED)
    return last_tries(log, TryResult.of)


async def _roll(
    args: Args,
    policy: Policy,
    tries: Sequence[tuple[Task, int]],
    results: dict[TryId, TryResult],
    path: Path,
    info: RunInfo,
) -> None:
    """Make the tries; each is in the log, and in `results`, when it has ended."""
    progress = RolloutProgress(len(tries), args.rollout.concurrency)
    hooks = RolloutHooks(on_turn=lambda _, turn: progress.turn(turn))
    try:
        async with open_tools(args.tools) as tools:
            await check_policy(policy, args.rollout)
            rollout = make_rollout(policy, tools, args.rollout, args.context, hooks=hooks)
            running = rollout.many(tries, seed=args.seed, concurrency=args.rollout.concurrency)
            with RunLogWriter.open(path, info) as log, _bar(progress) as advance:
                async with aclosing(running) as trajectories:
                    async for trajectory in trajectories:
                        scored = dataclasses.replace(trajectory, scores=trajectory_scores(trajectory, args.mode))
                        log.write_trajectory(scored, split=SPLIT)
                        results[try_id(trajectory)] = TryResult.of(trajectory)
                        progress.trajectory(trajectory)
                        advance()
    finally:
        await policy.aclose()


@contextmanager
def _bar(progress: RolloutProgress) -> Iterator[Callable[[], None]]:
    """A bar on standard error while the block runs, and what moves it; nothing where it is not a terminal."""
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), _Numbers(progress))
    with Progress(*columns, console=console, refresh_per_second=4, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=progress.total)
        yield lambda: bar.update(task, completed=progress.finished)


class _Numbers(ProgressColumn):
    """Active trajectories, tokens/s and stop reasons, as they are at each redraw."""

    def __init__(self, progress: RolloutProgress) -> None:
        super().__init__()
        self._progress = progress

    def render(self, task: BarTask) -> Text:
        numbers = f"{self._progress.active} active, {self._progress.tokens_per_second():.0f} tokens/s"
        return Text(", ".join(filter(None, [numbers, self._progress.stops()])))


@dataclass(frozen=True, slots=True)
class Report:
    """What a finished rollout comes to."""

    rows: list[ScoreSummary]
    stops: Mapping[StopReason, int]
    trajectories: int
    total_tokens: float
    """TT, mean over trajectories."""
    peak_tokens: float
    """PT, mean over trajectories."""
    turns: float
    with_errors: int
    """Trajectories in which something failed."""

    def as_json(self, *, made: int) -> dict[str, Json]:
        return {
            "trajectories": self.trajectories,
            "made_now": made,
            "unit": "percent",
            "rows": [render_row(row) for row in self.rows],
            "total_tokens_mean": self.total_tokens,
            "peak_tokens_mean": self.peak_tokens,
            "turns_mean": self.turns,
            "stops": {reason.value: count for reason, count in self.stops.items()},
            "with_errors": self.with_errors,
        }

    def as_text(self, mode: Mode, path: Path) -> str:
        stops = ", ".join(f"{reason.value} {count}" for reason, count in self.stops.items())
        return "\n".join(
            [
                render_table(self.rows, mode),
                "",
                f"TT {self.total_tokens:.0f} and PT {self.peak_tokens:.0f} tokens, {self.turns:.1f} turns"
                f" (means of {self.trajectories} trajectories)",
                f"ends: {stops or 'none'}; something failed in {self.with_errors}",
                f"written to {path}",
            ]
        )


def summarise_results(tasks: Sequence[Task], results: Mapping[TryId, TryResult], group_size: int, mode: Mode) -> Report:
    """Means over the tries at these tasks."""
    pairs = [
        (task, result)
        for task in tasks
        for index in range(group_size)
        if (result := results.get((task.id, index))) is not None
    ]
    found = [result for _, result in pairs]
    scores = [score_task(result.answer, task, mode) for task, result in pairs]
    rows = summarise_by_source([task for task, _ in pairs], scores)
    count = max(len(found), 1)
    return Report(
        rows=rows,
        stops=dict(Counter(result.stop for result in found).most_common()),
        trajectories=len(found),
        total_tokens=sum(result.total_tokens for result in found) / count,
        peak_tokens=sum(result.peak_tokens for result in found) / count,
        turns=sum(result.turns for result in found) / count,
        with_errors=sum(result.errors > 0 for result in found),
    )
