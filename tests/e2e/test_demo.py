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
    for row in ("before", "before, all turns", "GRPO", "MemPO (guarded)", "MemPO, all turns"):
        assert f"│ {row} " in shown or f"│ {row}│" in shown
    assert shown.count("right would be:") == 2
    before, after = shown.split("it forgets")[1].split("the same task")
    assert before.split("turn 1:")[0].split("question")[1:] == after.split("turn 1:")[0].split("question")[1:]


def test_the_words_below_the_table_say_what_its_columns_and_rows_are(demo: tuple[Path, str]) -> None:
    words = " ".join(demo[1].split("what was learned")[1].split())
    assert "Both right: exact match of the whole answer of a task. EM, F1: means over the single answers." in words
    assert "MemPO (guarded): the preset `guarded`" in words
    assert "It never saw such a context in training" in words


def test_contexts_of_all_turns_cost_more_tokens_in_the_largest_call(demo: tuple[Path, str]) -> None:
    # PT, the third column from the right: two updates change little of how the policy searches.
    rows = [line.strip("│").split("│") for line in demo[1].splitlines() if line.startswith("│")]
    largest = {row[0].strip(): int(row[-3]) for row in rows}
    assert largest["before, all turns"] > largest["before"]
    assert largest["MemPO, all turns"] > largest["MemPO (guarded)"]


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
