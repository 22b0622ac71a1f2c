"""The `mempo` command: one light table of commands, each imported only when it is called."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from mempo.core import MempoError


@dataclass(frozen=True, slots=True)
class Command:
    target: str
    """`module:function`; the function takes the program's name and the arguments left, and returns an exit status."""
    summary: str


COMMANDS: dict[str, Command] = {
    "demo": Command("mempo.cli.demo:run", "train a small forgetful agent on this machine and see what it learns"),
    "index build": Command("mempo.cli.index:build", "index a corpus for search: BM25, dense or both"),
    "index info": Command("mempo.cli.index:info", "show what an index is, and check that it is whole"),
    "index search": Command("mempo.cli.index:search", "search an index from the command line"),
    "serve-retriever": Command("mempo.cli.serve:retriever", "serve an index over HTTP in Search-R1's format"),
    "serve-web": Command("mempo.cli.serve_web:run", "serve a web search in the same format, recorded or replayed"),
    "config show": Command("mempo.cli.config:show", "print the settings of a run and where each came from"),
    "config check": Command("mempo.cli.config:check", "check configs and their input files"),
    "config keys": Command("mempo.cli.config:keys", "print every setting with its meaning"),
    "data check": Command("mempo.cli.data:check", "say what is in task files, and what is wrong with them"),
    "data convert": Command("mempo.cli.data:convert", "write a task file of any known format as JSON lines or parquet"),
    "data compose": Command("mempo.cli.data:compose_files", "make tasks of several questions out of single ones"),
    "data world": Command("mempo.cli.world:world", "make a fictional encyclopedia, and tasks about it"),
    "data teach": Command("mempo.cli.world:teach", "let a scripted searcher play tasks: cold-start trajectories"),
    "run": Command("mempo.cli.run:run", "ask an agent a question and watch its turns"),
    "rollout": Command("mempo.cli.rollout:run", "run an agent on a file of tasks; resumable"),
    "show": Command("mempo.cli.show:run", "show the trajectories of a run, turn by turn"),
    "score": Command("mempo.cli.score:run", "score a file of answers against a task file: EM and F1 with intervals"),
    "sft": Command("mempo.cli.sft:sft", "behaviour cloning: teach a policy the format from a teacher's trajectories"),
    "sft-data": Command("mempo.cli.sft:sft_data", "sample a teacher and keep what is worth learning from, cost first"),
    "train": Command("mempo.cli.train:train", "train a policy with MemPO, or go on with an interrupted run"),
    "export": Command("mempo.cli.train:export", "write a checkpoint as a plain Hugging Face folder"),
}

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_OUTPUT_CLOSED = 0, 1, 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Find the command, run it, and turn errors meant for people into one line and a status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a character gets its escape
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            return _dispatch(list(sys.argv[1:] if argv is None else argv))
        finally:
            if sys.stdout is not None:  # a shell can close it: `mempo ... >&-`
                sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output (`| head`) has left
        _settle_output()
        return EXIT_OUTPUT_CLOSED
    except OSError as error:
        # What the system refuses (a full disk, a folder that may not be written to) is no fault of the program.
        _settle_output()
        place = f"{error.filename}: " if error.filename is not None else ""
        print(f"error: {place}{error.strerror or error}", file=sys.stderr)
        return EXIT_FAILED


def _settle_output() -> None:
    """Throw away output that cannot be written, or Python would complain once more when it flushes at its end."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return EXIT_OK
    if arguments[0] == "--version":
        from mempo import __version__

        print(f"mempo {__version__}")
        return EXIT_OK
    name, rest = _split(arguments)
    if name is None:
        return _unknown(arguments)
    module, function = COMMANDS[name].target.split(":")
    try:
        run = getattr(importlib.import_module(module), function)
        return int(run(f"mempo {name}", rest))
    except MempoError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def overview(group: str | None = None) -> str:
    """The list of commands, or of one group of them (`mempo data`)."""
    names = [name for name in COMMANDS if group is None or name.split()[0] == group]
    width = max((len(name) for name in names), default=0)
    rows = [f"  {name:<{width}}  {COMMANDS[name].summary}" for name in names]
    head = f"usage: mempo {group or ''}{' ' if group else ''}COMMAND ..."
    return "\n".join([head, "", *rows, "", "mempo COMMAND --help shows the options and examples of a command."])


def _split(arguments: list[str]) -> tuple[str | None, list[str]]:
    for words in (2, 1):
        name = " ".join(arguments[:words])
        if len(arguments) >= words and name in COMMANDS:
            return name, arguments[words:]
    return None, arguments


def _unknown(arguments: list[str]) -> int:
    group = arguments[0]
    if any(name.split()[0] == group for name in COMMANDS):
        if len(arguments) == 1 or arguments[1] in ("-h", "--help"):
            print(overview(group))
            return EXIT_OK
        print(f"error: no command {' '.join(arguments[:2])!r}\n\n{overview(group)}", file=sys.stderr)
        return EXIT_USAGE
    print(f"error: no command {group!r}\n\n{overview()}", file=sys.stderr)
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
