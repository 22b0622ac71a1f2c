"""Read and write task files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, overload

from mempo.core import ConfigError, DataError, Task
from mempo.core.files import OnError, write_jsonl
from mempo.data.check import check_task
from mempo.data.formats import TaskFormat, detect_format, parse_task, render_task, render_verl
from mempo.data.rows import Row, read_rows


@dataclass(frozen=True, slots=True)
class TaskFile(Sequence[Task]):
    """The tasks of a file, in its order, and what was noticed on the way."""

    path: str
    format: TaskFormat | None
    """None where the file holds no row."""
    tasks: tuple[Task, ...]
    lines: tuple[int, ...]
    """The line of each task (the row of a parquet file), from 1."""
    skipped: tuple[DataError, ...] = ()
    """Why each row that is not among the tasks was left out; empty unless read leniently."""
    warnings: tuple[DataError, ...] = ()
    """Aliases that can never be matched, or that keep a task out of compositions."""

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Task, ...]: ...
    def __getitem__(self, index: int | slice) -> Task | tuple[Task, ...]:
        return self.tasks[index]

    def __len__(self) -> int:
        return len(self.tasks)


def read_tasks(
    path: str | os.PathLike[str], format: TaskFormat | str | None = None, *, lenient: bool = False
) -> TaskFile:
    """Read a whole task file: JSON lines, a JSON array or parquet, plain or gzipped.

    The format is told from the first row where it is not given. Each task is checked: strings where
    strings belong, no empty question or gold answer, the gold answer scored against itself is 1, no
    id twice. The first fault raises a DataError with file, line, field and value; with `lenient` such rows
    are left out and listed in `skipped`. An empty file holds no tasks.
    """
    skipped: list[DataError] = []
    warnings: list[DataError] = []
    on_error = skipped.append if lenient else None
    told = _known(format) if format is not None else tell_format(path, _ignore if lenient else None)
    found = list(stream_tasks(path, told, on_error=on_error, on_warning=warnings.append))
    lines, tasks = tuple(line for line, _ in found), tuple(task for _, task in found)
    return TaskFile(os.fspath(path), told, tasks, lines, tuple(skipped), tuple(warnings))


def stream_tasks(
    path: str | os.PathLike[str],
    format: TaskFormat | str | None = None,
    *,
    on_error: OnError | None = None,
    on_warning: Callable[[DataError], None] | None = None,
) -> Iterator[tuple[int, Task]]:
    """`read_tasks` one task at a time, each with its line, for files larger than memory."""
    _must_exist(path)
    chosen = None if format is None else _known(format)
    seen: dict[str, int] = {}
    for row in read_rows(path, on_error):
        chosen = chosen or detect_format(row)
        try:
            task = _checked(row, parse_task(row, chosen), seen, on_warning)
        except DataError as error:
            if on_error is None:
                raise
            on_error(error)
            continue
        seen[task.id] = row.line
        yield row.line, task


def tell_format(path: str | os.PathLike[str], on_error: OnError | None = None) -> TaskFormat | None:
    """The format of a task file, told from the fields of its first row; None where it has no row."""
    _must_exist(path)
    first = next(read_rows(path, on_error), None)
    return None if first is None else detect_format(first)


def write_tasks(
    path: str | os.PathLike[str], tasks: Iterable[Task], format: Literal["jsonl", "verl"] | None = None
) -> int:
    """Write tasks, atomically: for verl where the name ends in `.parquet`, else as our own JSON lines.

    Either file gives the same tasks back to `read_tasks`. Returns how many were written.
    """
    if format == "verl" or (format is None and os.fspath(path).endswith(".parquet")):
        from mempo.data.parquet import write_verl_parquet

        return write_verl_parquet(path, (render_verl(task, index) for index, task in enumerate(tasks)))
    return write_jsonl(path, map(render_task, tasks))


def _known(name: TaskFormat | str) -> TaskFormat:
    try:
        return TaskFormat(name)
    except ValueError:
        raise ConfigError(f"unknown task format {name!r}; known: {', '.join(TaskFormat)}") from None


def _must_exist(path: str | os.PathLike[str]) -> None:
    if not Path(path).is_file():
        raise DataError(
            "no such task file; write one with `mempo data convert` or `mempo data compose`", file=os.fspath(path)
        )


def _ignore(_: DataError) -> None:
    """The first rows are read twice; the second reading reports them."""


def _checked(row: Row, task: Task, seen: dict[str, int], on_warning: OnError | None) -> Task:
    if not task.id:
        raise row.error("is empty", "id", task.id)
    if task.id in seen:
        raise row.error(f"stands already in line {seen[task.id]}", "id", task.id)
    problems = [
        (finding.fatal, row.error(finding.message, finding.field, finding.value)) for finding in check_task(task)
    ]
    for fatal, problem in problems:
        if fatal:
            raise problem
    for _, problem in problems:
        if on_warning is not None:
            on_warning(problem)
    return task
