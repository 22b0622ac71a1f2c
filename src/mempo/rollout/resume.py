"""What a run log already holds, so that a run that was cut goes on where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from mempo.core import ConfigError, Json, RunLogError, Task, Trajectory
from mempo.runlog import ResumeRecord, RunInfo, RunLog

T = TypeVar("T")

TryId = tuple[str, int]
"""A task's id and the index of the try at it."""

KINDS = {"run_dir": "a training", "policy.model": "`mempo rollout`", "flaw.habit": "`mempo data teach`"}
"""What made a log, by a setting that nothing else has."""


def try_id(trajectory: Trajectory) -> TryId:
    return trajectory.task.id, trajectory.rollout


def last_tries(log: RunLog, keep: Callable[[Trajectory], T], *, split: str | None = None) -> dict[TryId, T]:
    """What `keep` makes of the last trajectory of each try (of one split), in the order of the log's first ones.

    A try that was made again after a failure of the policy counts as it went in the end.
    """
    return {try_id(record.trajectory): keep(record.trajectory) for record in log.trajectories(split=split)}


def open_tries(tasks: Sequence[Task], group_size: int, done: Iterable[TryId]) -> Iterator[tuple[Task, int]]:
    """The tries that are left to make, all of one task before those of the next."""
    finished = set(done)
    return ((task, index) for task in tasks for index in range(group_size) if (task.id, index) not in finished)


def check_same_kind(log: RunLog, run: RunInfo, *, setting: str = "--out") -> None:
    """Raise a ConfigError where the log is of another kind of run, a training for instance.

    `setting` is what names another folder.
    """
    before, now = (_kind(info) for info in (log.header.run, run))
    if before != now:
        raise ConfigError(f"{log.path} is of {before}, not of {now}: name another folder with {setting}")


def check_same_run(log: RunLog, run: RunInfo, *, ignored: Iterable[str] = ()) -> None:
    """Raise a ConfigError that lists every setting in which the log's last run and this one differ.

    `ignored` are keys that change nothing about a trajectory.
    """
    before = _last_run(log)
    skipped = set(ignored)
    lines = [
        f"  {key}: {_shown(before.config, key)} in the log, {_shown(run.config, key)} now"
        for key in sorted(before.config.keys() | run.config.keys())
        if key not in skipped and before.config.get(key) != run.config.get(key)
    ]
    if before.prompts_hash != run.prompts_hash:
        lines.append(f"  the prompts' words: {before.prompts_hash} in the log, {run.prompts_hash} now")
    if lines:
        raise ConfigError(
            f"{log.path} is of a run with other settings:\n" + "\n".join(lines) + "\nName another folder with --out,"
            " take the old settings, or go on with the new ones with --resume"
        )


def check_same_tasks(log: RunLog, tasks: Sequence[Task]) -> None:
    """Raise RunLogError where the log holds a task of the same id with another content."""
    known = {task.id: task for task in tasks}
    for record in log.trajectories():
        task = record.trajectory.task
        if task.id in known and (known[task.id].question, known[task.id].objectives) != (
            task.question,
            task.objectives,
        ):
            raise RunLogError(
                "this task is another one in the task file now; name another folder with --out",
                file=str(log.path),
                field="task",
                value=task.id,
            )


def _kind(run: RunInfo) -> str:
    return next((kind for setting, kind in KINDS.items() if setting in run.config), "another command")


def _last_run(log: RunLog) -> RunInfo:
    run = log.header.run
    for record in log.records():
        if isinstance(record, ResumeRecord):
            run = record.run
    return run


def _shown(config: Mapping[str, Json], key: str) -> str:
    return repr(config[key]) if key in config else "absent"
