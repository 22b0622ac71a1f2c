"""The main job as a newcomer runs it, with real retriever processes, only shorter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mempo.runlog import read_runlog

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("demo") / "a folder"
    command = [sys.executable, "-m", "mempo.cli.main", "demo", "--out", str(out), "--batches", "2", "--tasks", "24"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout


def test_the_demo_shows_a_table_and_the_same_task_before_and_after(demo: tuple[Path, str]) -> None:
    _, shown = demo
    for row in ("before", "before, all turns", "after GRPO", "after MemPO"):
        assert f"│ {row}" in shown
    assert shown.count("right would be:") == 2
    before, after = shown.split("it forgets")[1].split("the same task")
    assert before.split("turn 1:")[0].split("question")[1:] == after.split("turn 1:")[0].split("question")[1:]


def test_both_trainings_start_from_the_same_trajectories(demo: tuple[Path, str]) -> None:
    out, _ = demo
    grpo, mempo = (
        [record.trajectory for record in read_runlog(out / name / "run.jsonl").trajectories(split="train", step=1)]
        for name in ("grpo", "mempo")
    )
    assert [[turn.response_ids for turn in t.turns] for t in grpo] == [
        [turn.response_ids for turn in t.turns] for t in mempo
    ]
    assert all(turn.memory_reward is None for t in grpo for turn in t.turns)
    assert any(turn.memory_reward is not None for t in mempo for turn in t.turns)


def test_the_two_retrievers_serve_worlds_without_a_common_passage(demo: tuple[Path, str]) -> None:
    out, _ = demo
    train, evaluation = (
        set((out / split / "corpus.jsonl").read_text(encoding="utf-8").splitlines()) for split in ("train", "eval")
    )
    assert train
    assert evaluation
    assert not train & evaluation


def test_a_demo_does_not_touch_a_folder_that_holds_something(demo: tuple[Path, str]) -> None:
    out, _ = demo
    command = [sys.executable, "-m", "mempo.cli.main", "demo", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "is not empty" in done.stderr
