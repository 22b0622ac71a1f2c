"""`mempo train` and `mempo export` as a user runs them: processes, servers, signals."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.fixtures.toy import toy_policy, toy_tasks
from tests.services.processes import MempoServer
from transformers import AutoModelForCausalLM

from mempo.core import Passage
from mempo.core.files import write_jsonl
from mempo.data import write_tasks
from mempo.runlog import EventRecord, read_runlog

pytestmark = pytest.mark.slow


def mempo(*arguments: str, wait: bool = True) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "mempo.cli.main", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if wait:
        process.wait(240)
    return process


def passed(*arguments: str) -> str:
    process = mempo(*arguments)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a toy model, tasks, a config, and the two retrievers that it names."""
    folder = tmp_path_factory.mktemp("train here")
    policy = toy_policy()
    policy.model.save_pretrained(folder / "toy")
    tokenizer = policy.renderer.tokenizer
    tokenizer.save_pretrained(folder / "toy")  # type: ignore[attr-defined]
    write_tasks(folder / "train.jsonl", toy_tasks(8))
    write_tasks(folder / "held-out.jsonl", toy_tasks(3))
    passages = [Passage("1", "France", "Paris"), Passage("2", "Italy", "Rome")]
    write_jsonl(folder / "corpus.jsonl", ({"id": p.id, "title": p.title, "text": p.text} for p in passages))
    passed("index", "build", "--corpus", str(folder / "corpus.jsonl"), "--out", str(folder / "index"))
    serve = ("serve-retriever", "--index", str(folder / "index"))
    with MempoServer(*serve, "--name", "train") as train, MempoServer(*serve, "--name", "eval") as held_out:
        (folder / "toy.toml").write_text(
            f"""
preset = "tiny"
[model]
path = "./toy"
[tasks]
files = ["train.jsonl"]
objectives = 1
[rollout]
max_turns = 3
max_response_tokens = 12
max_observation_tokens = 60
min_response_tokens = 1
[retriever]
url = "{train.url}"
name = "train"
[reward]
require_format = false
[train]
batch_tasks = 2
epochs = 50
max_batches = 6
[optimizer]
learning_rate = 1e-2
[eval]
files = ["held-out.jsonl"]
objectives = 1
every_batches = 3
[eval.retriever]
url = "{held_out.url}"
name = "eval"
[checkpoint]
every_batches = 2
""",
            encoding="utf-8",
        )
        yield folder


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(run / "final")
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    """A run that nothing interrupted."""
    run = place / "whole"
    curves = ("--log.tensorboard", "True", "--log.wandb", "offline")
    out = passed("train", str(place / "toy.toml"), "--run-dir", str(run), *curves)
    assert "eval 0/6: EM" in out
    assert "train 6/6: reward" in out
    assert "done: 6 batches, 6 optimiser steps" in out
    return run


def test_a_run_leaves_its_log_checkpoints_curves_and_model(whole: Path) -> None:
    log = read_runlog(whole / "run.jsonl")
    assert list(log.metrics()) == [1, 2, 3, 4, 5, 6]
    assert list(log.metrics("eval")) == [0, 3, 6]
    assert log.header.run.config["retriever.name"] == "train"
    assert any(record.trajectory.turns[0].passages for record in log.trajectories()), "the retriever was asked"
    assert (whole / "checkpoints" / "latest").read_text() == "batch-000006\n"
    assert list((whole / "tensorboard").iterdir())
    assert list((whole / "wandb").glob("offline-run-*/*.wandb"))
    assert final_weights(whole)


def test_case_71_a_killed_run_goes_on_and_ends_where_the_whole_one_did(place: Path, whole: Path) -> None:
    run = place / "killed"
    process = mempo("train", str(place / "toy.toml"), "--run-dir", str(run), wait=False)
    deadline = time.monotonic() + 200
    while not (run / "checkpoints" / "latest").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert "end" not in [r.kind for r in read_runlog(run / "run.jsonl").records() if isinstance(r, EventRecord)]
    passed("train", str(place / "toy.toml"), "--run-dir", str(run))
    expected = final_weights(whole)
    assert all(torch.equal(weight, expected[name]) for name, weight in final_weights(run).items())
    assert list(read_runlog(run / "run.jsonl").metrics()) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_a_polite_end_save_and_tell_it_by_the_status(
    place: Path, number: signal.Signals, status: int
) -> None:
    run = place / number.name
    process = mempo(
        "train", str(place / "toy.toml"), "--run-dir", str(run), "--train.max-batches", "200",
        "--checkpoint.every-batches", "0", "--eval.every-batches", "0", wait=False,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline().startswith("train 1/200")
    process.send_signal(number)
    _, err = process.communicate(timeout=100)
    assert process.returncode == status, err
    assert "Traceback" not in err
    [checkpoint] = (run / "checkpoints").glob("batch-*")
    done = int(checkpoint.name.removeprefix("batch-"))
    assert list(read_runlog(run / "run.jsonl").metrics()) == list(range(1, done + 1))
    assert err.splitlines()[0] == f"saved {checkpoint}: the same command goes on from there"


def test_case_73_the_retriever_of_evaluation_is_not_taken_for_that_of_training(place: Path) -> None:
    process = mempo("train", str(place / "toy.toml"), "--run-dir", str(place / "no"), "--retriever.name", "other")
    out, err = process.communicate()
    assert process.returncode == 1
    assert "its name is 'train', not 'other'" in err
    assert "Traceback" not in out + err
    assert not (place / "no").exists()


def test_a_dry_run_prints_the_plan_and_touches_nothing(place: Path) -> None:
    plan = json.loads(passed("train", str(place / "toy.toml"), "--run-dir", str(place / "dry"), "--dry-run", "--json"))
    assert plan["parameters"] == sum(p.numel() for p in toy_policy().model.parameters())
    assert plan["trajectories"] == 8
    assert not (place / "dry").exists()


def test_a_checkpoint_is_exported(place: Path, whole: Path) -> None:
    out = passed("export", str(whole / "checkpoints" / "batch-000004"), "--out", str(place / "four"))
    assert "batch-000004, 4 optimiser steps" in out
    assert AutoModelForCausalLM.from_pretrained(place / "four").num_parameters()
    asked = shlex.split(out.splitlines()[-1].removeprefix("ask it: "))
    assert asked[:3] == ["mempo", "run", "QUESTION"]
    # The toy's context holds less than the lengths of `mempo run`. Whether it answers is another question.
    ran, err = mempo(*asked[1:], "--json").communicate()
    assert err == ""
    assert json.loads(ran.splitlines()[-1])["type"] == "end"
    passed("export", str(whole), "--out", str(place / "newest"))
    newest = AutoModelForCausalLM.from_pretrained(place / "newest")
    assert all(torch.equal(p, final_weights(whole)[name]) for name, p in newest.named_parameters())


def test_case_72_a_cut_checkpoint_is_named_by_export_and_the_one_before_is_taken(place: Path, whole: Path) -> None:
    cut = place / "cut"
    shutil.copytree(whole, cut)
    file = cut / "checkpoints" / "batch-000006" / "optimizer.pt"
    os.truncate(file, file.stat().st_size - 8)
    process = mempo("export", str(cut / "checkpoints" / "batch-000006"), "--out", str(place / "none"))
    _, err = process.communicate()
    assert process.returncode == 1
    assert str(file) in err
    process = mempo("export", str(cut), "--out", str(place / "before"))
    out, err = process.communicate()
    assert process.returncode == 0
    assert str(file) in err
    assert "batch-000004" in out
