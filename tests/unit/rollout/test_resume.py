from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mempo.config import Config, RolloutConfig
from mempo.core import ConfigError, Objective, RunLogError, StopReason, Task, Trajectory, Turn
from mempo.rollout.resume import check_same_kind, check_same_run, check_same_tasks, last_tries, open_tries
from mempo.runlog import RunLogWriter, collect_run_info, is_runlog, read_runlog

TASKS = [Task(f"t{i}", (Objective(f"Question {i}?", ("a",)),)) for i in range(3)]
RUN = collect_run_info(RolloutConfig(), seeds={"run": 0}, prompts_hash="abc")


def trajectory(task: Task, rollout: int, stop: StopReason = StopReason.ANSWERED, answer: str = "a") -> Trajectory:
    return Trajectory(task, rollout, (Turn(0, "", answer=answer),), stop, seed=0)


def write(path: Path, *trajectories: Trajectory) -> Path:
    with RunLogWriter.create(path / "run.jsonl", RUN) as log:
        for found in trajectories:
            log.write_trajectory(found)
    return path / "run.jsonl"


def test_the_last_trajectory_of_a_try_counts(tmp_path: Path) -> None:
    failed = trajectory(TASKS[0], 0, StopReason.POLICY_ERROR)
    log = read_runlog(write(tmp_path, failed, trajectory(TASKS[1], 0), trajectory(TASKS[0], 0, answer="b")))
    assert last_tries(log, lambda found: found.answer) == {("t0", 0): "b", ("t1", 0): "a"}


@given(
    done=st.sets(st.tuples(st.sampled_from(["t0", "t1", "t2", "other"]), st.integers(0, 3))),
    group_size=st.integers(1, 4),
)
def test_open_tries_and_done_ones_are_all_tries_and_share_none(done: set[tuple[str, int]], group_size: int) -> None:
    left = [(task.id, index) for task, index in open_tries(TASKS, group_size, done)]
    every = [(task.id, index) for task in TASKS for index in range(group_size)]
    assert left == [identity for identity in every if identity not in done]


def test_settings_are_compared_with_those_of_the_last_run(tmp_path: Path) -> None:
    log = read_runlog(write(tmp_path))
    check_same_run(log, RUN)
    hotter = collect_run_info(RolloutConfig(temperature=0.5), seeds={"run": 0}, prompts_hash="abc")
    with pytest.raises(ConfigError, match=r"temperature: 1\.0 in the log, 0\.5 now"):
        check_same_run(log, hotter)
    check_same_run(log, hotter, ignored=["temperature"])
    with pytest.raises(ConfigError, match="the prompts' words: abc in the log, xyz now"):
        check_same_run(log, collect_run_info(RolloutConfig(), seeds={"run": 0}, prompts_hash="xyz"))
    RunLogWriter.resume(log.path, hotter, from_step=0).close()
    check_same_run(log, hotter)
    with pytest.raises(ConfigError, match=r"temperature: 0\.5 in the log, 1\.0 now"):
        check_same_run(log, RUN)


def test_a_log_of_another_kind_of_run_is_told_by_its_settings(tmp_path: Path) -> None:
    training = collect_run_info(Config(), seeds={"run": 0})
    log = read_runlog(write(tmp_path))
    check_same_kind(log, RUN)
    with pytest.raises(ConfigError, match="is of another command, not of a training: name another folder with --out"):
        check_same_kind(log, training)
    # What a log began as counts, also where something else was written to it later.
    RunLogWriter.resume(log.path, training, from_step=0).close()
    check_same_kind(log, RUN)


def test_a_task_whose_content_changed_is_refused_and_unknown_ones_are_not_judged(tmp_path: Path) -> None:
    log = read_runlog(write(tmp_path, trajectory(TASKS[0], 0)))
    check_same_tasks(log, TASKS)
    check_same_tasks(log, TASKS[1:])
    changed = dataclasses.replace(TASKS[0], objectives=(Objective("Question 0?", ("b",)),))
    with pytest.raises(RunLogError, match="'t0'"):
        check_same_tasks(log, [changed])


def test_a_run_log_is_told_from_other_files(tmp_path: Path) -> None:
    assert is_runlog(write(tmp_path))
    other = tmp_path / "answers.jsonl"
    other.write_text('{"id": "a", "answer": "mempo.runlog"}\n', encoding="utf-8")
    assert not is_runlog(other)
    assert not is_runlog(tmp_path / "absent")
