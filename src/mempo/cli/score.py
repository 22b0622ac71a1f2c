"""`mempo score`: score a file of answers against a task file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import tyro

from mempo.core import ConfigError, DataError, Json, Task, Trajectory
from mempo.core.files import read_jsonl, write_jsonl
from mempo.data import read_tasks
from mempo.rewards import Mode, TaskScore, score_task
from mempo.rewards.intervals import Interval
from mempo.rewards.summary import ScoreSummary, summarise_by_source
from mempo.rollout.resume import last_tries
from mempo.runlog import is_runlog, read_runlog

SHOWN_MISSING = 10
NAME_CHARACTERS = 40

HELP = """Score a file of answers against a task file: EM and F1 in percent, with 95 % bootstrap intervals.

PREDICTIONS holds one JSON object a line, {"id": ..., "answer": ...}, in any order; the answer to a task
of several questions is one text with the answers separated by ";", null is no answer. A task without a
line counts as wrong and is listed. An id twice, or of no task, is an error.

PREDICTIONS may also be a run log, of `mempo rollout` or, with --split eval, of `mempo train`. Of each try at a
task the last one in the log counts. Several tries at a task count each, and no interval is shown: they are not
independent. Of a training's own tries there is a warning: the policy changed between them.

Examples:
  mempo score answers.jsonl tasks.jsonl
  mempo score answers.jsonl hotpot_dev_distractor_v1.json --mode hotpot --json
  mempo score answers.jsonl tasks.jsonl --details scored.jsonl
  mempo score runs/capitals/run.jsonl tasks.jsonl
  mempo score runs/trained/run.jsonl heldout.jsonl --split eval"""

Answers = dict[str, list[str | None]]
"""The answers to each task id, one for each try."""


class Found(NamedTuple):
    """What there is to score."""

    answers: Answers
    policies: int = 1
    """How many states of a policy they come from; more than one where it was in training."""


@dataclass(frozen=True)
class Args:
    predictions: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PREDICTIONS")]
    """JSON lines with "id" and "answer", or a run log."""
    tasks: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TASKS")]
    """A task file of any format that `mempo data check` reads."""
    split: str | None = None
    """Of a run log, the trajectories of this split alone: `train` or `eval`."""
    mode: Mode = "qa"
    """How answers are compared: the default, an official script's way, or one for other languages."""
    json: bool = False
    """Print JSON, with every missing id."""
    details: Path | None = None
    """Also write the scores of each task here, one JSON object a line, in the order of TASKS."""
    seed: int = 0
    """Seed of the bootstrap."""


def run(prog: str, argv: Sequence[str]) -> int:
    """Entry point of `mempo score`."""
    args = tyro.cli(Args, prog=prog, args=argv, description=HELP)
    if args.seed < 0:
        raise ConfigError(f"--seed must be at least 0 (got {args.seed})")
    for source in (args.predictions, args.tasks):
        if args.details is not None and args.details.resolve() == source.resolve():
            raise DataError("--details would overwrite what is scored; name another file", file=str(args.details))
    tasks = read_tasks(args.tasks).tasks
    known = {task.id for task in tasks}
    answers, policies = read_answers(args.predictions, known, tasks_path=args.tasks, split=args.split)
    tries = [(task, answer) for task in tasks for answer in answers.get(task.id, [None])]
    asked = [task for task, _ in tries]
    scores = [score_task(answer, task, args.mode) for task, answer in tries]
    missing = [task.id for task in tasks if task.id not in answers]
    rows = summarise_by_source(asked, scores, seed=args.seed)
    if args.details is not None:
        write_jsonl(args.details, render_details(asked, scores, [answer for _, answer in tries]))
    if args.json:
        report: dict[str, Json] = {"mode": args.mode, "unit": "percent", "seed": args.seed}
        report |= {"rows": [render_row(row) for row in rows], "missing": missing}
        print(json.dumps(report, ensure_ascii=False, indent=2))
    else:
        print(render_table(rows, args.mode))
        if len(tries) > len(tasks):
            made = len(tries) - len(missing)
            print(f"\n{made} tries at {len(answers)} of {len(tasks)} tasks: each try counts, and no interval is shown")
        if missing:
            shown = ", ".join(missing[:SHOWN_MISSING]) + (", ..." if len(missing) > SHOWN_MISSING else "")
            wrong = "each counted as one wrong try" if len(tries) > len(tasks) else "counted as wrong"
            print(f"\nno answer for {len(missing)} of {len(tasks)} tasks, {wrong}: {shown}")
    if policies > 1:
        print(
            f"warning: these answers were sampled at {policies} different steps of a training, by a policy that changed"
            " in between: this is the score of none of its states. --split eval scores the last evaluation, where the"
            " run made any; `mempo export` and `mempo rollout` evaluate the policy as it ended",
            file=sys.stderr,
        )
    return 0


def read_answers(path: Path, known: set[str], *, tasks_path: Path, split: str | None = None) -> Found:
    """The answers of a predictions file, or of a run log (of one split of it, where that is named).

    Raises DataError as `read_predictions` does, and where the log holds nothing of the split.
    """
    if path.is_dir():
        raise DataError(f"is a folder; name the run log in it, {path / 'run.jsonl'}", file=str(path))
    if not is_runlog(path):
        if split is not None:
            raise DataError("only a run log has splits; leave out --split", file=str(path))
        predictions = read_predictions(path, known, tasks_path=tasks_path)
        return Found({task_id: [answer] for task_id, answer in predictions.items()})
    found: Answers = {}
    policies: set[int | None] = set()
    for (task_id, _), (answer, policy_step) in last_tries(read_runlog(path), _kept, split=split).items():
        if task_id not in known:
            message = f"no task of this id in {tasks_path}; score against the file that was answered"
            if split is None:
                message += ", or name the part of a training's log that was, with --split"
            raise DataError(message, file=str(path), field="task", value=task_id)
        found.setdefault(task_id, []).append(answer)
        policies.add(policy_step)
    if split is not None and not found:
        raise DataError("the log holds no trajectory of this split", file=str(path), field="split", value=split)
    return Found(found, len(policies))


def _kept(trajectory: Trajectory) -> tuple[str | None, int | None]:
    return trajectory.answer, trajectory.policy_step


def read_predictions(path: Path, known: set[str], *, tasks_path: Path) -> dict[str, str | None]:
    """The answer to each task id.

    Raises DataError with file, line and field where a field is absent or of the wrong type, where an
    id stands twice, or is not among the `known` ones of `tasks_path`.
    """
    answers: dict[str, str | None] = {}
    lines: dict[str, int] = {}
    for line, row in read_jsonl(path):
        task_id, answer = row.get("id"), row.get("answer")
        if not isinstance(task_id, str):
            raise DataError("must be a string, the id of a task", file=str(path), line=line, field="id", value=task_id)
        if "answer" not in row or not isinstance(answer, str | None):
            message = 'must be a string ("a1; a2" for several questions) or null for no answer'
            raise DataError(message, file=str(path), line=line, field="answer", value=answer)
        if task_id in lines:
            message = f"stands already in line {lines[task_id]}; keep one answer for each task"
            raise DataError(message, file=str(path), line=line, field="id", value=task_id)
        if task_id not in known:
            message = f"no task of this id in {tasks_path}; score against the file that was answered"
            raise DataError(message, file=str(path), line=line, field="id", value=task_id)
        answers[task_id], lines[task_id] = answer, line
    return answers


def render_details(
    tasks: Sequence[Task], scores: Sequence[TaskScore], answers: Sequence[str | None]
) -> Iterable[dict[str, Json]]:
    """One row a try, in order; scores are shares here, as in run logs."""
    for task, score, answer in zip(tasks, scores, answers, strict=True):
        yield {
            "id": task.id,
            "answer": answer,
            "gold": task.gold,
            "em": score.em,
            "f1": score.f1,
            "count_ok": score.count_ok,
            "objectives": [{"em": objective.em, "f1": objective.f1} for objective in score.per_objective],
        }


def render_row(row: ScoreSummary) -> dict[str, Json]:
    """A row of the JSON report, in percent."""
    return {
        "name": row.name,
        "tasks": row.tasks,
        "tries": row.tries,
        "objectives": row.objectives,
        "em": _percent(row.em),
        "em_interval": _percents(row.em_interval),
        "f1": _percent(row.f1),
        "f1_interval": _percents(row.f1_interval),
        "exact": _percent(row.exact),
        "count_ok": _percent(row.count_ok),
    }


def render_table(rows: Sequence[ScoreSummary], mode: Mode) -> str:
    """The readable table; all figures but the counts are percent."""
    several = any(row.tries != row.tasks for row in rows)
    tries = ("tries",) if several else ()
    head = ("dataset", "tasks", *tries, "questions", "EM", "95 %", "F1", "95 %", "all right", "count right")
    cells = [
        (
            _shortened(row.name),
            str(row.tasks),
            *((str(row.tries),) if several else ()),
            str(row.objectives),
            _figure(row.em),
            _range(row.em_interval),
            _figure(row.f1),
            _range(row.f1_interval),
            _figure(row.exact),
            _figure(row.count_ok),
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    lines = [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in (head, *cells)
    ]
    return "\n".join([f"mode {mode}, percent", "", *lines])


def _shortened(name: str) -> str:
    return name if len(name) <= NAME_CHARACTERS else f"{name[: NAME_CHARACTERS - 1]}…"


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _percents(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [100 * interval.low, 100 * interval.high]


def _figure(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}"


def _range(interval: Interval | None) -> str:
    return "-" if interval is None else f"{100 * interval.low:.2f}-{100 * interval.high:.2f}"
