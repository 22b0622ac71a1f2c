"""`mempo train` up to the point where it would load a model."""

from __future__ import annotations

import dataclasses
import shlex
import socket
from pathlib import Path

import pytest
import torch
import tyro

from mempo.cli import run
from mempo.cli.main import main
from mempo.cli.train import _run_command
from mempo.config import load_config


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


@pytest.fixture
def told(tmp_path: Path) -> list[str]:
    """A command that would go on to ask a retriever, which does not run."""
    (tmp_path / "tasks.jsonl").write_text('{"id": "a", "question": "Q?", "answers": ["A"]}\n', encoding="utf-8")
    (tmp_path / "run.toml").write_text(
        'preset = "tiny"\n[tasks]\nfiles = ["tasks.jsonl"]\n[sft]\nfiles = ["no-teacher.jsonl"]\n'
        '[eval]\nfiles = ["not-held-out.jsonl"]\n[retriever]\nurl = "http://127.0.0.1:9"\nretries = 0\n',
        encoding="utf-8",
    )
    return [str(tmp_path / "run.toml"), "--run-dir", str(tmp_path / "run")]


def test_files_that_training_does_not_read_may_be_missing_and_cloning_asks_for_its_own(
    told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *told]) == 1
    assert capsys.readouterr().err.startswith("error: no retriever answers")
    assert main(["train", *told, "--eval.every-batches", "2"]) == 1
    assert "eval.files: there is no" in capsys.readouterr().err
    assert main(["sft", *told, "--tasks.files", "nothing.jsonl"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: sft.files: there is no")
    assert line.endswith("no-teacher.jsonl; make it with `mempo data teach` or `mempo sft-data`")


def test_a_missing_device_or_model_folder_is_known_before_a_retriever_is_asked(
    told: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["train", *told, "--model.device", "cuda"]) == 1
    assert "error: the device 'cuda' cannot be used: torch finds no GPU" in capsys.readouterr().err
    for dry in ([], ["--dry-run"]):
        assert main(["train", *told, "--model.path", "runs/a/final", *dry]) == 1
        assert "error: the model 'runs/a/final': there is no such folder" in capsys.readouterr().err


def test_the_command_after_an_export_sets_what_the_model_was_trained_with_and_nothing_else() -> None:
    # The four options that the presets `tiny` and `demo` need; the rest are defaults of both.
    options = ["--context.thoughts", "False", "--context.prompts", "my file", "--retriever.url", "http://me:pw@host:1"]
    config = load_config("tiny", options)
    words = shlex.split(_run_command(config, Path("./my model")))
    assert words[:5] == ["mempo", "run", "QUESTION", "--model", "my model"]
    args = tyro.cli(run.Args, args=words[2:])
    assert args.context == config.context
    for name in ("max_turns", "max_prompt_tokens", "max_response_tokens", "max_observation_tokens"):
        assert getattr(args.sampling, name) == getattr(config.rollout, name)
    assert args.tools.top_k == config.retriever.top_k
    assert args.tools.retriever == "http://***@host:1"
    paper = dataclasses.replace(load_config("paper"), retriever=dataclasses.replace(config.retriever, url="http://h"))
    assert "context" not in _run_command(paper, Path("m"))


def test_cloning_says_that_it_makes_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "tiny", "--dry-run"]) == 1
    assert "error: mempo sft makes no plan; `mempo train CONFIG --dry-run`" in capsys.readouterr().err
