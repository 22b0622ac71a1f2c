"""`mempo train` up to the point where it would load a model."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from mempo.cli.main import main


def test_a_retriever_that_does_not_run_is_told_with_the_command_that_starts_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"id": "a", "question": "Q?", "answers": ["A"]}\n', encoding="utf-8")
    options = ["--tasks.files", str(tasks), "--run-dir", str(tmp_path / "run"), "--retriever.retries", "0"]
    with socket.socket() as silent:  # bound, but nobody listens
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert main(["train", "demo", *options, "--retriever.url", url]) == 1
        named = capsys.readouterr().err
        assert main(["train", "tiny", *options, "--retriever.url", url]) == 1
        unnamed = capsys.readouterr().err
    assert named.startswith(f"error: no retriever answers: GET {url}/health failed")
    assert "Start one with `mempo serve-retriever --index DIR --name train`" in named
    assert "Start one with `mempo serve-retriever --index DIR`," in unnamed
    assert not (tmp_path / "run").exists()
