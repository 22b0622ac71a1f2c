"""`mempo sft` and `mempo sft-data`, through the command line."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mempo.cli.main import EXIT_INTERRUPTED, main
from mempo.runlog import EventRecord, read_runlog
from mempo.train.checkpoint import find_checkpoint
from mempo.train.optimizer import optimizer_step

SETTINGS = """
preset = "tiny"
run_dir = "{run}"

[model.tiny]
width = 20
layers = 1
mimetic = true

[context]
prompts = "none"

[sft]
files = ["teacher.jsonl"]
epochs = 4
batch_tokens = 600
eval_every_steps = 4
heldout_share = 0.2
keep_wrong_share = 0.5
probe_share = 0.5
prompt_weight = 0.1

[sft.optimizer]
learning_rate = 1e-2
"""


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with trajectories of a forgetful teacher."""
    folder = tmp_path_factory.mktemp("taught")
    world = ["--mode", "closed", "--tasks", "16", "--objectives", "2", "--split", "train"]
    assert main(["data", "world", *world, "--out", str(folder / "world")]) == 0
    files = [str(folder / "world" / "tasks_train.jsonl"), "--corpus", str(folder / "world" / "corpus.jsonl")]
    flaws = ["--top-k", "2", "--flaw.habit", "0.7", "--max-turns", "6"]
    assert main(["data", "teach", *files, *flaws, "--out", str(folder / "teacher.jsonl")]) == 0
    return folder


def settings(taught: Path, run: Path) -> str:
    path = taught / f"{run.name}.toml"
    path.write_text(SETTINGS.format(run=run), encoding="utf-8")
    return str(path)


@pytest.fixture
def interrupted_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Ctrl-C between the optimiser's step whose number is put into the list and what follows from it."""
    stops: list[int] = []
    steps = itertools.count(1)

    def interrupted(*args: Any) -> float:
        norm = optimizer_step(*args)
        if next(steps) in stops:
            stops.clear()
            signal.raise_signal(signal.SIGINT)
        return norm

    monkeypatch.setattr("mempo.train.sft.optimizer_step", interrupted)
    # Where pytest runs in a shell's background, Ctrl-C is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield stops
    signal.signal(signal.SIGINT, before)


def test_a_tiny_policy_is_cloned_saved_and_logged(
    taught: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["sft", settings(taught, run), "--log.tensorboard", "True"]) == 0
    assert list((run / "sft" / "tensorboard").glob("events.*"))

    log = read_runlog(run / "sft" / "run.jsonl")
    metrics = log.metrics("sft")
    assert list(metrics) == list(range(1, len(metrics) + 1))
    assert metrics[len(metrics)]["sft/loss"] < metrics[1]["sft/loss"] - 0.5
    losses = {step: values["sft/heldout_loss"] for step, values in metrics.items() if "sft/heldout_loss" in values}
    assert all(step % 4 == 0 or step == len(metrics) for step in losses)

    printed = capsys.readouterr().out
    assert f"lowest held-out loss {min(losses.values()):.4f}" in printed
    [data] = [r for r in log.records() if isinstance(r, EventRecord) and r.kind == "data"]
    assert data.details["right"] + data.details["wrong"] == 16
    assert 0 < data.details["kept_wrong"] < data.details["wrong"]
    assert data.details["probe_rows"] > 0

    # The final folder loads as any Hugging Face model does, and holds the weights of the best check.
    model = AutoModelForCausalLM.from_pretrained(run / "sft" / "final")
    assert len(AutoTokenizer.from_pretrained(run / "sft" / "final")) == model.config.vocab_size
    best = min(losses, key=lambda step: losses[step])
    if best == len(metrics):
        checkpoint, _ = find_checkpoint(run / "sft")
        saved = load_file(checkpoint.model_folder / "model.safetensors")
        assert torch.equal(saved["model.norm.weight"], model.model.norm.weight)


@pytest.mark.parametrize("stop", [6, 8])  # an ordinary step, and one after which the held-out rows are scored
def test_an_interrupted_run_goes_on_to_the_same_weights(
    taught: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], interrupted_in: list[int], stop: int
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main(["sft", settings(taught, whole)]) == 0
    interrupted_in.append(len(read_runlog(whole / "sft" / "run.jsonl").metrics("sft")) + stop)
    assert main(["sft", settings(taught, cut)]) == EXIT_INTERRUPTED
    saved = find_checkpoint(cut / "sft")[0]
    assert saved.manifest.steps_done == stop
    assert f"saved {saved.path}: the same command goes on from there\n" in capsys.readouterr().err
    assert main(["sft", settings(taught, cut)]) == 0
    assert re.search(rf"going on from step {stop} of \d+: {saved.path}\n", capsys.readouterr().err)

    for name in ("final", "checkpoints/" + (whole / "sft/checkpoints/latest").read_text().strip() + "/model"):
        expected = load_file(whole / "sft" / name / "model.safetensors")
        found = load_file(cut / "sft" / name / "model.safetensors")
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[key], found[key]) for key in expected)
    expected_metrics, found_metrics = (
        {step: values["sft/loss"] for step, values in read_runlog(run / "sft" / "run.jsonl").metrics("sft").items()}
        for run in (whole, cut)
    )
    assert found_metrics == expected_metrics


def test_a_finished_run_without_its_best_weights_says_so(
    taught: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    options = [settings(taught, run), "--sft.epochs", "1"]
    assert main(["sft", *options]) == 0
    shutil.rmtree(run / "sft" / "final")
    assert main(["sft", *options]) == 1
    assert "final, where its best weights were, is gone" in capsys.readouterr().err


def test_a_checkpoint_of_other_rows_is_refused_by_name(
    taught: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], interrupted_in: list[int]
) -> None:
    run = tmp_path / "run"
    interrupted_in.append(3)
    assert main(["sft", settings(taught, run)]) == EXIT_INTERRUPTED
    assert main(["sft", settings(taught, run), "--seed", "1"]) == 1
    message = capsys.readouterr().err
    assert "batch-000003 belongs to another run" in message
    assert "Set run_dir to a new folder" in message


def test_adapters_are_trained_and_saved_alone(taught: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ["--model.lora.rank", "2", "--sft.epochs", "1", "--sft.packing", "True"]
    assert main(["sft", settings(taught, run), *options]) == 0
    final = run / "sft" / "final"
    assert json.loads((final / "adapter_config.json").read_text())["r"] == 2
    names = load_file(final / "adapter_model.safetensors").keys()
    assert names
    assert all("lora_" in name for name in names)
    assert not (final / "model.safetensors").exists()
    # The base is the tiny model, which no folder holds.
    assert main(["export", str(run / "sft"), "--out", str(tmp_path / "whole")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "whole")) == model.config.vocab_size


def test_without_trajectories_the_error_says_how_to_get_some(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "tiny"]) == 1
    assert "sft.files is empty: name run logs" in capsys.readouterr().err


# ---------------------------------------------------------------- sampling a teacher


@pytest.fixture
def sampled(tmp_path: Path) -> list[str]:
    """Options of a scripted teacher that answers `Paris` to two questions, of which one is about Paris."""
    tasks = [
        {"id": "a", "question": "Capital of France?", "answers": ["Paris"]},
        {"id": "b", "question": "Capital of Italy?", "answers": ["Rome"]},
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8")
    corpus = {"id": "1", "title": "France", "text": "Paris is the capital of France."}
    (tmp_path / "corpus.jsonl").write_text(json.dumps(corpus) + "\n", encoding="utf-8")
    turns = [
        '<mem>nothing</mem>\n<think>t</think>\n<tool_call>{"name": "search", "arguments": {"query": "q"}}</tool_call>',
        "<mem>Paris</mem>\n<think>t</think>\n<answer>Paris</answer>",
    ]
    (tmp_path / "script.json").write_text(json.dumps(turns), encoding="utf-8")
    options = {"--out": "out", "--script": "script.json", "--corpus": "corpus.jsonl"}
    return [str(tmp_path / "tasks.jsonl"), *(w for key, name in options.items() for w in (key, str(tmp_path / name)))]


def test_only_right_and_well_formed_trajectories_are_kept(
    sampled: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prices = ["--prompt-price", "2", "--completion-price", "8"]
    assert main(["sft-data", *sampled, "--yes", *prices, "--max-turns", "4"]) == 0
    printed = capsys.readouterr().out
    assert "2 trajectories to sample (assumed: " in printed
    # Two trajectories of at most 4 turns, each of at most 4096 and 1024 tokens; 32768 * 2 + 8192 * 8 = 131072 / 1e6.
    assert "at most:  32,768 prompt and 8,192 completion tokens" in printed
    assert "at most 0.13" in printed
    assert "1 trajectories; of all: 1 right, 1 wrong, 0 unanswered, 0 malformed" in printed
    kept = [record.trajectory.task.id for record in read_runlog(tmp_path / "out" / "teacher.jsonl").trajectories()]
    assert kept == ["a"]

    # The same command again samples nothing, and the estimate is a measurement now.
    assert main(["sft-data", *sampled, *prices, "--max-turns", "4", "--keep-wrong"]) == 0
    printed = capsys.readouterr().out
    assert "0 trajectories to sample (measured on 2 in" in printed
    assert len(list(read_runlog(tmp_path / "out" / "teacher.jsonl").trajectories())) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt-price", "-1"], "--prompt-price is -1.0"),
        (["--completion-price", "nan"], "--completion-price is nan"),
        (["--limit", "-1"], "--limit must be at least 0"),
    ],
)
def test_prices_and_limits_that_mean_nothing_are_refused_before_anything_is_sampled(
    sampled: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["sft-data", *sampled, "--yes", *options]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["sft-data", *sampled, "--yes", "--limit", "0"]) == 0


def test_nothing_is_spent_without_a_yes(
    sampled: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert main(["sft-data", *sampled]) == 1
    assert "this spends tokens; add --yes" in capsys.readouterr().err

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: "n")
    assert main(["sft-data", *sampled]) == 1
    assert "nothing was sampled" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
