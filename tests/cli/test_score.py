from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from mempo.cli.main import main
from mempo.config import RolloutConfig
from mempo.core import Objective, StopReason, Task, Trajectory, Turn
from mempo.data import compose, read_tasks, write_tasks
from mempo.runlog import RunLogWriter, collect_run_info


def make_tasks(count: int, source: str = "toy") -> list[Task]:
    return [
        Task(f"{source}:{i}", (Objective(f"Question {i}?", (f"answer {i}",)),), source=source) for i in range(count)
    ]


class Files:
    """A task file and a predictions file, and the command that scores them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tasks, self.predictions = folder, folder / "tasks.jsonl", folder / "answers.jsonl"

    def write(self, tasks: list[Task], answers: list[tuple[str, Any]]) -> None:
        write_tasks(self.tasks, tasks)
        lines = [json.dumps({"id": task_id, "answer": answer}) + "\n" for task_id, answer in answers]
        self.predictions.write_text("".join(lines), encoding="utf-8")

    def score(self, *options: str) -> int:
        return main(["score", str(self.predictions), str(self.tasks), *options])


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def read_report(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_each_dataset_has_a_row_and_the_total_comes_last(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = [*make_tasks(3, "nq"), *make_tasks(1, "hotpotqa")]
    right = [(task.id, task.gold) for task in tasks]
    files.write(tasks, [*right[:2], ("nq:2", "else"), right[3]])
    assert files.score("--json") == 0
    rows = read_report(capsys)["rows"]
    # "else" has no word of "answer 2": EM and F1 are 2/3 of nq, all of hotpotqa, 3/4 in total
    assert [(row["name"], row["tasks"], row["em"], row["f1"]) for row in rows] == [
        ("nq", 3, pytest.approx(200 / 3), pytest.approx(200 / 3)),
        ("hotpotqa", 1, 100.0, 100.0),
        ("total", 4, 75.0, 75.0),
    ]
    low, high = rows[-1]["em_interval"]
    assert low < 75.0 < high


def test_case_41_every_task_is_scored_once_in_file_order(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = make_tasks(10)
    answers = [(task.id, task.gold if i != 4 else "wrong") for i, task in enumerate(tasks)]
    random.Random(0).shuffle(answers)
    files.write(tasks, answers)
    details = files.folder / "details.jsonl"
    assert files.score("--json", "--details", str(details)) == 0
    total = read_report(capsys)["rows"][-1]
    assert (total["tasks"], total["em"]) == (10, 90.0)
    rows = [json.loads(line) for line in details.read_text(encoding="utf-8").splitlines()]
    assert [row["id"] for row in rows] == [task.id for task in tasks]
    assert [row["em"] for row in rows] == [1, 1, 1, 1, 0, 1, 1, 1, 1, 1]


def test_case_77_two_tasks_give_two_rows_and_none_give_none(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    details = files.folder / "details.jsonl"
    files.write(make_tasks(2), [("toy:1", "answer 1"), ("toy:0", "answer 0")])
    assert files.score("--details", str(details)) == 0
    assert [json.loads(line)["id"] for line in details.read_text(encoding="utf-8").splitlines()] == ["toy:0", "toy:1"]
    capsys.readouterr()

    files.write([], [])
    assert files.score("--json", "--details", str(details)) == 0
    assert details.read_text(encoding="utf-8") == ""
    [total] = read_report(capsys)["rows"]
    assert (total["tasks"], total["em"], total["em_interval"]) == (0, None, None)
    assert files.score() == 0  # and the table can show it
    assert capsys.readouterr().out.splitlines()[-1].split() == ["total", "0", "0", *"------"]


def test_missing_answers_count_as_wrong_and_are_listed(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    files.write(make_tasks(4), [("toy:0", "answer 0"), ("toy:3", None)])
    assert files.score("--json") == 0
    report = read_report(capsys)
    assert (report["missing"], report["rows"][-1]["em"]) == (["toy:1", "toy:2"], 25.0)
    assert files.score() == 0
    assert "no answer for 2 of 4 tasks, counted as wrong: toy:1, toy:2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"id": "toy:0", "answer": "x"}', '{"id": "toy:0", "answer": "y"}'], "line 2, field 'id': stands already in"),
        (['{"id": "toy:9", "answer": "x"}'], "line 1, field 'id': no task of this id in"),
        (['{"id": 0, "answer": "x"}'], "line 1, field 'id': must be a string"),
        (['{"id": "toy:0"}'], "line 1, field 'answer': must be a string"),
        (['{"id": "toy:0", "answer": ["x"]}'], "line 1, field 'answer': must be a string"),
        (['{"id": "toy:0", "answer": "x"'], "line 1: not JSON"),
    ],
    ids=["twice", "unknown", "number", "absent", "list", "cut"],
)
def test_bad_predictions_are_errors_that_name_the_place(
    lines: list[str], message: str, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    files.write(make_tasks(1), [])
    files.predictions.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert files.score() == 1
    error = capsys.readouterr().err
    assert f"error: {files.predictions}, " in error
    assert message in error


def test_the_table_shortens_long_names_of_datasets(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = make_tasks(1, "x" * 100)
    files.write(tasks, [(tasks[0].id, tasks[0].gold)])
    assert files.score() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mode qa, percent"
    assert lines[3].split() == [
        "x" * 39 + "…",
        "1",
        "1",
        "100.00",
        "100.00-100.00",
        "100.00",
        "100.00-100.00",
        "100.00",
        "100.00",
    ]


def test_the_mode_changes_the_scores(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    files.write(make_tasks(1), [("toy:0", "the answer 0")])
    figures = []
    for mode in ("qa", "mem1"):
        assert files.score("--json", "--mode", mode) == 0
        row = read_report(capsys)["rows"][-1]
        figures.append((row["em"], row["f1"]))
    # mem1 keeps the article: P 2/3, R 1
    assert figures == [(100.0, 100.0), (0.0, pytest.approx(80.0))]


@pytest.mark.data
@pytest.mark.parametrize("objectives", [1, 4])
def test_gold_answers_score_100_and_shuffled_ones_near_0_on_real_tasks(
    objectives: int, shared_data: Path, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    single = [task for name in ("hotpotqa", "nq") for task in read_tasks(shared_data / "qa" / f"{name}.jsonl")]
    tasks = list(compose(single, objectives, seed=0).tasks)
    golds = [task.gold for task in tasks]
    assert len(golds) >= 100

    files.write(tasks, [(task.id, task.gold) for task in tasks])
    assert files.score("--json") == 0
    total = read_report(capsys)["rows"][-1]
    assert (total["em"], total["f1"], total["exact"], total["count_ok"]) == (100.0, 100.0, 100.0, 100.0)

    random.Random(0).shuffle(golds)
    files.write(tasks, [(task.id, gold) for task, gold in zip(tasks, golds, strict=True)])
    assert files.score("--json") == 0
    total = read_report(capsys)["rows"][-1]
    assert total["em"] < 3.0
    assert total["f1"] < 6.0


def test_details_never_overwrite_what_is_scored(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    files.write(make_tasks(1), [("toy:0", "answer 0")])
    before = files.tasks.read_bytes(), files.predictions.read_bytes()
    (files.folder / "link.jsonl").symlink_to(files.tasks)
    for path in (files.tasks, files.predictions, files.folder / "." / "link.jsonl"):
        assert files.score("--details", str(path)) == 1
        assert "--details would overwrite what is scored" in capsys.readouterr().err
    assert (files.tasks.read_bytes(), files.predictions.read_bytes()) == before


def test_a_negative_seed_is_an_error(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    files.write(make_tasks(1), [("toy:0", "answer 0")])
    assert files.score("--seed", "-1") == 1
    assert capsys.readouterr().err == "error: --seed must be at least 0 (got -1)\n"


def test_answers_can_come_through_a_pipe(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    # `mempo score <(command) TASKS`: what is read of a pipe to find out what it is cannot be read again.
    files.write(make_tasks(1), [("toy:0", "answer 0")])
    content = files.predictions.read_bytes()
    reader, writer = os.pipe()
    os.write(writer, content)
    os.close(writer)
    files.predictions = Path(f"/dev/fd/{reader}")
    assert files.score("--json") == 0
    os.close(reader)
    report = json.loads(capsys.readouterr().out)
    assert (report["rows"][-1]["em"], report["missing"]) == (100.0, [])


def write_training_log(folder: Path, splits: dict[str, list[Task]]) -> Path:
    """A run log in which "answer 0" is the answer to every task of each split."""
    run = collect_run_info(RolloutConfig(), seeds={"run": 0}, prompts_hash="abc")
    with RunLogWriter.create(folder / "run.jsonl", run) as log:
        for split, tasks in splits.items():
            for task in tasks:
                turn = Turn(0, "", answer="answer 0")
                log.write_trajectory(Trajectory(task, 0, (turn,), StopReason.ANSWERED, seed=0), split=split)
    return folder / "run.jsonl"


def test_of_a_trainings_log_one_split_is_scored(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    held_out = make_tasks(2)
    write_tasks(files.tasks, held_out)
    log = write_training_log(files.folder, {"train": make_tasks(3, "seen"), "eval": held_out})
    score = ["score", str(log), str(files.tasks)]
    assert main([*score, "--split", "eval", "--json"]) == 0
    total = read_report(capsys)["rows"][-1]
    assert (total["tasks"], total["em"]) == (2, 50.0)  # "answer 0" is right for the first of two
    assert main(score) == 1
    assert "name the part of a training's log that was, with --split" in capsys.readouterr().err
    assert main([*score, "--split", "evl"]) == 1
    assert "no trajectory of this split (value: 'evl')" in capsys.readouterr().err


def test_tasks_and_tries_are_counted_apart_and_a_changing_policy_is_warned_of(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = make_tasks(4)
    write_tasks(files.tasks, tasks)
    path = files.folder / "run.jsonl"
    with RunLogWriter.create(path, collect_run_info(RolloutConfig(), seeds={"run": 0})) as log:

        def write(task: Task, rollout: int, answer: str, step: int | None) -> None:
            turn = Turn(0, "", answer=answer)
            found = Trajectory(task, rollout, (turn,), StopReason.ANSWERED, seed=0, policy_step=step)
            log.write_trajectory(found, step=(step or 0) + 1, split="eval" if step is None else "train")

        for step, task in enumerate(tasks[:2]):
            for rollout in range(3):
                write(task, rollout, task.gold if rollout else "else", step)
        write(tasks[3], 0, tasks[3].gold, None)
        write(tasks[3], 0, "else", None)  # a later evaluation
    score = ["score", str(path), str(files.tasks)]

    assert main([*score, "--split", "train"]) == 0
    shown = capsys.readouterr()
    # 4 of 6 tries are right; the two tasks without any count as one wrong try each: 4 / 8
    assert shown.out.splitlines()[2].split()[:4] == ["dataset", "tasks", "tries", "questions"]
    assert shown.out.splitlines()[4].split()[:6] == ["total", "4", "8", "4", "50.00", "-"]
    assert "\n6 tries at 2 of 4 tasks: each try counts, and no interval is shown\n" in shown.out
    assert "no answer for 2 of 4 tasks, each counted as one wrong try: toy:2, toy:3" in shown.out
    assert shown.err.startswith("warning: these answers were sampled at 2 different steps of a training")
    assert len(shown.err.splitlines()) == 1

    assert main([*score, "--split", "eval"]) == 0
    shown = capsys.readouterr()
    assert "tries" not in shown.out
    assert shown.out.splitlines()[4].split()[:4] == [
        "total",
        "4",
        "4",
        "0.00",
    ]  # the last evaluation, without a warning
    assert shown.err == ""


def test_a_folder_and_a_split_of_plain_answers_are_told_what_to_name(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    files.write(make_tasks(1), [("toy:0", "answer 0")])
    assert main(["score", str(files.folder), str(files.tasks)]) == 1
    assert f"name the run log in it, {files.folder / 'run.jsonl'}" in capsys.readouterr().err
    assert files.score("--split", "eval") == 1
    assert "only a run log has splits" in capsys.readouterr().err
