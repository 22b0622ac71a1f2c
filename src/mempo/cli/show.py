"""`mempo show`: the trajectories of a run log, as `mempo run` shows them."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.text import Text

from mempo.cli.run import UNPRINTABLE, TerminalView
from mempo.core import ConfigError, RunLogError, Trajectory, Turn
from mempo.runlog import RunLog, TrajectoryRecord, is_runlog, read_runlog

DESCRIPTION = """Show trajectories of a run: task, reward and scores, then every turn as `mempo run` shows it.

PATH is the folder of a run, or a run log: of `mempo train`, `mempo rollout` or `mempo data teach`. Where
the log says what a turn's memory was worth, that follows the turn. Steps are batches of training; the
evaluations, of the split `eval`, have steps too.

examples:
  mempo show runs/first
  mempo show runs/first --split eval --order last --limit 3
  mempo show runs/first --step 10 --order worst
  mempo show runs/first --task closed-0-train-17 --brief
"""

WHOLE, BRIEF = 1, 20
"""How many trajectories are shown where nothing is said."""

SHOWN_SCORES = ("em", "f1", "exact", "format")
LISTED_STEPS = 8

Order = Literal["first", "last", "best", "worst"]


@dataclass(frozen=True)
class Args:
    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
    """The folder of a run, or its run.jsonl."""
    task: str | None = None
    """Only tries at the task of this id."""
    step: int | None = None
    """Only trajectories of this step."""
    split: str | None = None
    """Only trajectories of this split: `train` or `eval`."""
    order: Order = "first"
    """Which of them come first: the log's first or last ones, or those of the highest or lowest reward (EM where
    there is no reward)."""
    limit: int | None = None
    """At most so many; 1, or 20 with --brief, where nothing is said."""
    brief: bool = False
    """A line a trajectory, without its turns."""


def run(prog: str, argv: Sequence[str]) -> int:
    """Entry point of `mempo show`."""
    args = tyro.cli(Args, prog=prog, args=list(argv), description=DESCRIPTION)
    limit = (BRIEF if args.brief else WHOLE) if args.limit is None else args.limit
    if limit < 1:
        raise ConfigError(f"--limit must be at least 1 (got {limit})")
    log = read_runlog(find_log(args.path))
    console = Console(highlight=False)
    shown = 0
    for record in choose(matching(log, args), args.order, limit + 1):
        if shown == limit:
            text = "there are more: --limit N shows so many; --task, --step, --split and --order choose"
            console.print(Text(text, style="dim"), soft_wrap=True)
            break
        shown += 1
        console.print(Text(headline(record), style="bold"), soft_wrap=True)
        if not args.brief:
            show_trajectory(record.trajectory, console)
            console.print()
    if not shown:
        asked = [
            f"--{name} {value}" for name in ("task", "step", "split") if (value := getattr(args, name)) is not None
        ]
        raise RunLogError(
            f"nothing matches {' '.join(asked)}; {contents(log)}" if asked else contents(log), file=str(log.path)
        )
    return 0


def find_log(path: Path) -> Path:
    """The run log that a path names. Raises ConfigError for a folder without one, naming those near it."""
    if not path.is_dir():
        return path
    if (log := path / "run.jsonl").exists():
        return log
    near = sorted(file for file in (*path.glob("*.jsonl"), *path.glob("*/*.jsonl")) if is_runlog(file))
    raise ConfigError(f"{path} holds no run.jsonl" + (f"; there is {', '.join(map(str, near))}" if near else ""))


def matching(log: RunLog, args: Args) -> Iterator[TrajectoryRecord]:
    """The trajectories that the arguments ask for, in the order of the log."""
    found = log.trajectories(split=args.split, step=args.step)
    return (record for record in found if args.task in (None, record.trajectory.task.id))


def choose(records: Iterable[TrajectoryRecord], order: Order, count: int) -> Iterable[TrajectoryRecord]:
    """The first so many in an order. No more of them are in memory than that, and `first` reads no further."""
    match order:
        case "first":
            return islice(records, count)
        case "last":
            return reversed(deque(records, maxlen=count))
        case "best":
            return heapq.nlargest(count, records, key=lambda record: _worth(record.trajectory, 1))
        case "worst":
            return heapq.nlargest(count, records, key=lambda record: _worth(record.trajectory, -1))


def _worth(trajectory: Trajectory, sign: int) -> tuple[bool, float, float]:
    """What trajectories are ordered by: those that nothing is known of come last."""
    value = trajectory.scores.get("em") if trajectory.reward is None else trajectory.reward
    if value is None or not math.isfinite(value):
        return False, 0.0, 0.0
    return True, sign * value, sign * trajectory.scores.get("f1", 0.0)


def headline(record: TrajectoryRecord) -> str:
    """The trajectory in a line."""
    found = record.trajectory
    place = record.split if record.step is None else f"{record.split} step {record.step}"
    figures = {"reward": found.reward, **{name: found.scores.get(name) for name in SHOWN_SCORES}}
    known = [f"{name} {value:.3f}" for name, value in figures.items() if value is not None]
    line = f"{found.task.id}, {place}, try {found.rollout}: {', '.join([*known, found.stop.value])}"
    return line.translate(UNPRINTABLE).replace("\n", "\N{REPLACEMENT CHARACTER}")


def show_trajectory(trajectory: Trajectory, console: Console) -> None:
    """The whole of it."""
    view = _LogView(console)
    view.asking([objective.question for objective in trajectory.task.objectives])
    for turn in trajectory.turns:
        view.turn(turn)
    view.end(trajectory)


class _LogView(TerminalView):
    """Adds what only a log knows: what memories were worth, and the right answer."""

    def turn(self, turn: Turn) -> None:
        super().turn(turn)
        if (text := credit(turn)) is not None:
            self._rows([("credit", text, "blue")])

    def end(self, trajectory: Trajectory) -> None:
        super().end(trajectory)
        if trajectory.task.objectives and all(objective.answers for objective in trajectory.task.objectives):
            self._rows([("gold", trajectory.task.gold, "magenta")])


def credit(turn: Turn) -> str | None:
    """What the turn's memory was worth; None where that was not measured.

    >>> credit(Turn(1, "", memory_probability=0.5, baseline=0.25, memory_reward=0.25))
    'P(answer|memory) 0.5, baseline 0.25, reward +0.25'
    >>> credit(Turn(1, ""))
    """
    if turn.memory_probability is None:
        return None
    text = f"P(answer|memory) {turn.memory_probability:.3g}"
    if turn.baseline is not None:
        text += f", baseline {turn.baseline:.3g}"
    return text if turn.memory_reward is None else f"{text}, reward {turn.memory_reward:+.3g}"


def contents(log: RunLog) -> str:
    """What trajectories a log holds, for somebody who asked for others."""
    counts: dict[str, int] = {}
    steps: dict[str, set[int]] = {}
    tasks: dict[str, dict[str, None]] = {}
    for record in log.trajectories():
        split = record.split
        counts[split] = counts.get(split, 0) + 1
        steps.setdefault(split, set()).update([] if record.step is None else [record.step])
        tasks.setdefault(split, {})[record.trajectory.task.id] = None
    if not counts:
        return (
            "the log holds no trajectory: `mempo sft` writes none, nor does a run that has just begun, "
            "nor `mempo train` with log.trajectories_every_batches 0"
        )
    parts = [
        f"{count} of split {split!r}{_listed(sorted(steps[split]))}, tries at {len(tasks[split])} tasks,"
        f" {next(iter(tasks[split]))!r} for one"
        for split, count in counts.items()
    ]
    return f"the log holds {'; '.join(parts)}"


def _listed(steps: Sequence[int]) -> str:
    if not steps:
        return ""
    if len(steps) > LISTED_STEPS:
        return f" (steps {steps[0]} to {steps[-1]})"
    return f" (step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))})"
