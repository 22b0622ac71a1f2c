"""The `mempo` command itself: what the system refuses is told in one line and a status, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mempo.cli.main import EXIT_FAILED, EXIT_OK, EXIT_OUTPUT_CLOSED, main

MEMPO = [sys.executable, "-m", "mempo.cli.main"]


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": "a", "question": "Q?", "answers": ["A"]}\n', encoding="utf-8")
    return path


def test_a_place_that_cannot_be_written_to_is_an_error_and_no_traceback(
    tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    too_long = tasks.parent / f"{'x' * 300}.jsonl"
    assert main(["data", "convert", str(tasks), str(tasks / "below a file.jsonl")]) == EXIT_FAILED
    assert main(["data", "convert", str(tasks), str(too_long)]) == EXIT_FAILED
    assert capsys.readouterr().err.splitlines() == [
        f"error: {tasks}: File exists",
        f"error: {too_long}: File name too long",
    ]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_under_the_output_is_one_line(tasks: Path) -> None:
    with open("/dev/full", "wb") as full:
        ran = subprocess.run([*MEMPO, "data", "check", str(tasks)], stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert (ran.returncode, ran.stderr) == (EXIT_FAILED, b"error: No space left on device\n")


def test_a_closed_output_is_no_failure(tasks: Path) -> None:
    # The shell's `>&-` leaves the program without a standard output: Python sets `sys.stdout` to None.
    command = 'exec "$@" >&-'
    ran = subprocess.run(
        ["sh", "-c", command, "sh", *MEMPO, "data", "check", str(tasks)], stderr=subprocess.PIPE, timeout=60
    )
    assert (ran.returncode, ran.stderr) == (EXIT_OK, b"")


def test_a_reader_that_leaves_ends_the_command_quietly(tasks: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run([*MEMPO, "config", "keys"], stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (EXIT_OUTPUT_CLOSED, b"")
