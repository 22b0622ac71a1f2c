"""`mempo data check`, `convert` and `compose`: task files on the command line."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mempo.core import ConfigError, DataError, Json, Task
from mempo.data import TaskFile, compose, interleave, read_tasks, stream_tasks, write_tasks

_CONFIG = (tyro.conf.FlagCreatePairsOff,)

FormatName = Literal["mempo", "hotpotqa", "2wikimultihopqa", "musique", "nq_open", "search_r1", "verl"]
SHOWN_PROBLEMS = 20

CHECK_HELP = """Read task files and say what is in them and what is wrong with them.

Examples:
  mempo data check hotpot_dev_distractor_v1.json
  mempo data check train.parquet dev.jsonl.gz --json

The exit status is 1 where a row cannot be used; with --lenient such rows only count."""

CONVERT_HELP = """Read a task file of any known format and write it as JSON lines or as parquet for verl.

Examples:
  mempo data convert hotpot_dev_distractor_v1.json hotpotqa.jsonl
  mempo data convert musique_full_v1.0_dev.jsonl musique.jsonl --lenient
  mempo data convert tasks.jsonl train.parquet --to verl"""

COMPOSE_HELP = """Make tasks of several questions out of files of single ones, as MEM1 does.

Several files are interleaved: one question of each in turn.

Examples:
  mempo data compose hotpotqa.jsonl nq.jsonl --objectives 2 --out train_2obj.jsonl --shuffle --seed 0
  mempo data compose musique.jsonl --objectives 16 --out test_16obj.parquet"""


@dataclass(frozen=True)
class CheckArgs:
    files: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Task files: JSON lines, a JSON array or parquet, plain or gzipped."""
    format: FormatName | None = None
    """How the rows are written; told from the first row where it is not given."""
    lenient: bool = False
    """Succeed although some rows cannot be used."""
    json: bool = False
    """Print JSON, with every problem."""


@dataclass(frozen=True)
class ConvertArgs:
    source_file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="IN")]
    """The file to read."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """The file to write; gzipped where its name ends in .gz."""
    to: Literal["jsonl", "verl"] | None = None
    """What to write; by default verl's parquet where OUT ends in .parquet, else JSON lines."""
    format: FormatName | None = None
    """How the rows of IN are written; told from the first row where it is not given."""
    lenient: bool = False
    """Leave out rows that cannot be used, and list them, instead of stopping at the first."""
    force: bool = False
    """Overwrite OUT where it exists."""


@dataclass(frozen=True)
class ComposeArgs:
    files: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Files of single questions, of any known format."""
    objectives: int
    """Questions a task, 1 to 16."""
    out: Path
    """The file to write: parquet for verl where it ends in .parquet, else JSON lines."""
    shuffle: bool = False
    """Shuffle the questions before composing; otherwise their order is kept, as MEM1 does."""
    seed: int = 0
    """Seed of the shuffle."""
    source: str | None = None
    """Name of the composition in reports; by default the names of its sources, joined."""
    lenient: bool = False
    """Leave out rows that cannot be used, and list them, instead of stopping at the first."""
    force: bool = False
    """Overwrite the file where it exists."""


def check(prog: str, argv: Sequence[str]) -> int:
    args = tyro.cli(CheckArgs, prog=prog, args=argv, description=CHECK_HELP, config=_CONFIG)
    files = [read_tasks(path, args.format, lenient=True) for path in _given(args.files)]
    if args.json:
        print(json.dumps([_summary(file) for file in files], ensure_ascii=False, indent=2))
    else:
        for file in files:
            _print_file(file)
    return 0 if args.lenient or not any(file.skipped for file in files) else 1


def convert(prog: str, argv: Sequence[str]) -> int:
    args = tyro.cli(ConvertArgs, prog=prog, args=argv, description=CONVERT_HELP, config=_CONFIG)
    _refuse_to_overwrite(args.out, args.force)
    skipped: list[DataError] = []
    warnings: list[DataError] = []
    found = stream_tasks(
        args.source_file, args.format, on_error=skipped.append if args.lenient else None, on_warning=warnings.append
    )
    tally = _Tally()
    count = write_tasks(args.out, tally.counted(task for _, task in found), args.to)
    print(f"{args.out}: {count} tasks")
    tally.show()
    _print_problems("skipped", skipped)
    _print_problems("warnings", warnings)
    return 0


def compose_files(prog: str, argv: Sequence[str]) -> int:
    args = tyro.cli(ComposeArgs, prog=prog, args=argv, description=COMPOSE_HELP, config=_CONFIG)
    _refuse_to_overwrite(args.out, args.force)
    files = [read_tasks(path, lenient=args.lenient) for path in _given(args.files)]
    made = compose(interleave(*files), args.objectives, seed=args.seed if args.shuffle else None, source=args.source)
    tally = _Tally()
    count = write_tasks(args.out, tally.counted(made.tasks))
    order = f"shuffled with seed {args.seed}" if args.shuffle else "in the order of the files"
    print(f"{args.out}: {count} tasks of {args.objectives} questions, {order}")
    tally.show()
    for file in files:
        print(f"  from {file.path}: {len(file)} questions")
        _print_problems("skipped", file.skipped)
    print(f"  questions left over at the end: {made.remainder}")
    _print_list("left out", [f"{item.id}: {item.reason}: {item.value!r}" for item in made.left_out])
    return 0


class _Tally:
    """Counts tasks while they pass."""

    def __init__(self) -> None:
        self.sources: Counter[str] = Counter()
        self.objectives: Counter[int] = Counter()
        self.answers: Counter[str] = Counter()

    def counted(self, tasks: Iterable[Task]) -> Iterator[Task]:
        for task in tasks:
            self.sources[task.source] += 1
            self.objectives[len(task.objectives)] += 1
            self.answers.update(_answer_type(objective.answers[0]) for objective in task.objectives)
            yield task

    def show(self) -> None:
        for source, count in self.sources.most_common():
            print(f"  {count:>7} tasks of {source or '(no source)'}")
        if self.objectives:
            print(
                "  questions a task: " + ", ".join(f"{k} ({self.objectives[k]} tasks)" for k in sorted(self.objectives))
            )
            print("  gold answers: " + ", ".join(f"{count} {kind}" for kind, count in self.answers.most_common()))


def _tally(tasks: Iterable[Task]) -> _Tally:
    tally = _Tally()
    for _ in tally.counted(tasks):
        pass
    return tally


def _answer_type(answer: str) -> str:
    """
    >>> [_answer_type(answer) for answer in ("No", "1,969", "Mars", "the Red Planet")]
    ['yes/no', 'number', 'one word', 'several words']
    """
    if answer.strip().lower() in ("yes", "no"):
        return "yes/no"
    if re.fullmatch(r"[\d.,%$€£\s-]+", answer):
        return "number"
    return "one word" if len(answer.split()) == 1 else "several words"


def _print_file(file: TaskFile) -> None:
    print(f"{file.path}: {len(file)} tasks" + (f" ({file.format})" if file.format else ""))
    _tally(file).show()
    _print_problems("cannot be used", file.skipped)
    _print_problems("warnings", file.warnings)


def _summary(file: TaskFile) -> dict[str, Json]:
    tally = _tally(file)
    return {
        "file": file.path,
        "format": file.format,
        "tasks": len(file),
        "sources": tally.sources,
        "objectives": tally.objectives,
        "answers": tally.answers,
        "errors": [_problem(error) for error in file.skipped],
        "warnings": [_problem(error) for error in file.warnings],
    }


def _problem(error: DataError) -> dict[str, Json]:
    value = None if error.value is None else repr(error.value)
    return {"line": error.line, "field": error.field, "message": error.message, "value": value}


def _print_problems(title: str, problems: Sequence[DataError]) -> None:
    _print_list(title, [str(problem) for problem in problems])


def _print_list(title: str, lines: Sequence[str]) -> None:
    if not lines:
        return
    print(f"  {title}: {len(lines)}")
    for line in lines[:SHOWN_PROBLEMS]:
        print(f"    {line}")
    if len(lines) > SHOWN_PROBLEMS:
        print(f"    ... and {len(lines) - SHOWN_PROBLEMS} more")


def _refuse_to_overwrite(path: Path, force: bool) -> None:
    if path.exists() and not force:
        raise DataError("the file exists; --force overwrites it", file=str(path))


def _given(files: tuple[Path, ...]) -> tuple[Path, ...]:
    if not files:
        raise ConfigError("give at least one task file")
    return files
