"""The experiment with SmolLM2: what it splits, counts and reports. Its models are not run here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.runlog.strategies import run_info

from benchmarks import smollm2
from mempo.core import Objective, StopReason, Task, Trajectory, Turn
from mempo.data import read_tasks, write_tasks
from mempo.runlog import RunLogWriter

TASK = Task("t", (Objective("Who wrote it?", ("Ann Lee",)), Objective("Was it a book?", ("yes",))))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, place in {"ROOT": tmp_path, "DATA": tmp_path, "RUN": tmp_path, "COSTS": tmp_path / "costs.jsonl"}.items():
        monkeypatch.setattr(smollm2, name, place)
    return tmp_path


def test_the_last_questions_of_either_file_are_held_out_and_no_others(folder: Path) -> None:
    (folder / "qa").mkdir()
    for name, count in {"hotpotqa": 70, "hotpotqa_train": 5, "nq": 90}.items():
        tasks = [Task(f"{name}-{place}", (Objective(f"{name} {place}?", ("a",)),)) for place in range(count)]
        write_tasks(folder / "qa" / f"{name}.jsonl", tasks)
    smollm2.split(folder)
    parts = {name: [task.id for task in read_tasks(folder / f"{name}.jsonl")] for name in smollm2_parts()}
    assert parts["hotpotqa-heldout"] == [f"hotpotqa-{place}" for place in range(6, 70)]
    assert parts["nq-heldout"] == [f"nq-{place}" for place in range(26, 90)]
    assert len(parts["hotpotqa-train"]) == len(parts["nq-train"]) == 11
    assert not set(parts["hotpotqa-train"]) & set(parts["hotpotqa-heldout"])
    assert not set(parts["nq-train"]) & set(parts["nq-heldout"])


def smollm2_parts() -> list[str]:
    return [f"{source}-{part}" for source in smollm2.SOURCES for part in ("train", "heldout")]


def test_an_answer_counts_as_held_where_the_last_memory_says_it_and_the_question_does_not_give_it_away() -> None:
    turns = (Turn(0, "", memory="nothing yet"), Turn(1, "", memory="it was written by Ann Lee, yes"))
    trajectory = Trajectory(TASK, 0, turns, StopReason.ANSWERED, 0)
    assert smollm2.held_share([trajectory], smollm2.last_memory) == 0.5
    assert smollm2.held_share([trajectory], smollm2.passages) == 0.0


def test_the_report_shows_what_is_there_and_leaves_out_what_is_not(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grade = {"name": "cloned", "format": 0.5, "format_95": [0.25, 0.75], "p_own_joined": 0.125}
    (folder / "cloned.json").write_text(json.dumps(grade) + "\n")
    smollm2.print_report()
    shown = capsys.readouterr().out
    assert "| cloned | 0.500 [0.25, 0.75] |" in shown
    assert "| cloned | 0.1250 |" in shown
    assert "trained" not in shown


def test_a_command_that_fails_ends_the_experiment_and_does_not_count_as_run(folder: Path) -> None:
    smollm2.run(("python", "-c", "pass"))
    with pytest.raises(SystemExit, match="status 3"):
        smollm2.run(("python", "-c", "raise SystemExit(3)"))
    assert list(smollm2.costs()) == ["python -c pass"]


def test_batches_are_reported_as_means_of_five(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLogWriter.create(folder / "run.jsonl", run_info()) as log:
        for batch in range(1, 9):
            log.write_metrics(batch, {"reward": batch / 10, **({"train/grad_norm": 2.0} if batch > 6 else {})})
    smollm2.print_report()
    shown = capsys.readouterr().out
    assert "| means of batches | 1 to 5 | 6 to 8 |" in shown
    assert "| reward | 0.300 | 0.700 |" in shown
    assert "| train/grad_norm |  | 2.00 |" in shown
