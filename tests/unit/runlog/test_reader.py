"""Logs are read as streams, and what is wrong with one is named with its line."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from tests.unit.runlog.strategies import a_trajectory, run_info

from mempo.core import RunLogError
from mempo.runlog import EventRecord, MetricsRecord, RunLogWriter, TrajectoryRecord, read_runlog
from mempo.runlog.encoding import render_record


def a_log(path: Path, steps: int = 3) -> Path:
    with RunLogWriter.create(path, run_info()) as log:
        for step in range(1, steps + 1):
            log.write_trajectory(a_trajectory(rollout=step), step=step)
            log.write_trajectory(a_trajectory(rollout=step), step=step, split="eval")
            log.write_metrics(step, {"loss": float(step)})
            log.write_metrics(step, {"em": step / 10}, split="eval")
    return path


def test_records_can_be_read_as_often_as_wanted(tmp_path: Path) -> None:
    log = read_runlog(a_log(tmp_path / "run.jsonl"))
    assert log.cut_bytes == 0
    # 3 steps of 4 records, and the end.
    assert len(list(log.records())) == len(list(log.records())) == 13


def test_trajectories_and_metrics_are_found_by_split_and_step(tmp_path: Path) -> None:
    log = read_runlog(a_log(tmp_path / "run.jsonl"))
    assert [record.step for record in log.trajectories()] == [1, 1, 2, 2, 3, 3]
    assert [record.step for record in log.trajectories(split="eval")] == [1, 2, 3]
    assert [record.trajectory.rollout for record in log.trajectories(split="train", step=2)] == [2]
    assert log.metrics() == {1: {"loss": 1.0}, 2: {"loss": 2.0}, 3: {"loss": 3.0}}
    assert log.metrics("eval") == {1: {"em": 0.1}, 2: {"em": 0.2}, 3: {"em": 0.3}}
    assert log.metrics("other") == {}


def test_metrics_of_one_step_are_merged(tmp_path: Path) -> None:
    log = RunLogWriter.create(tmp_path / "run.jsonl", run_info())
    log.write_metrics(1, {"a": 1.0, "b": 1.0})
    log.write_metrics(1, {"b": 2.0})
    log.close()
    assert read_runlog(log.path).metrics() == {1: {"a": 1.0, "b": 2.0}}


def test_steps_that_were_done_again_count_as_they_were_done_last(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    first = RunLogWriter.create(path, run_info())
    for step in (1, 2, 3, 4):
        first.write_trajectory(a_trajectory(rollout=1), step=step)
        first.write_metrics(step, {"loss": 1.0})
    first.write_trajectory(a_trajectory(rollout=1))  # of no step: never done again
    first.close()
    # Back to the checkpoint of step 2; step 4 is not reached again, so it never was.
    second = RunLogWriter.resume(path, run_info(), from_step=2)
    second.write_trajectory(a_trajectory(rollout=2), step=3)
    second.write_metrics(3, {"loss": 2.0})
    second.close()
    log = read_runlog(path)
    assert log.metrics() == {1: {"loss": 1.0}, 2: {"loss": 1.0}, 3: {"loss": 2.0}}
    found = [(record.step, record.trajectory.rollout) for record in log.trajectories()]
    assert found == [(1, 1), (2, 1), (None, 1), (3, 2)]
    # The log itself has lost nothing.
    assert sum(isinstance(record, MetricsRecord) for record in log.records()) == 5


def test_a_cut_last_line_is_reported_and_everything_before_it_is_read(tmp_path: Path) -> None:
    path = a_log(tmp_path / "run.jsonl", steps=1)
    lines = path.read_bytes().splitlines(keepends=True)
    for tail in (b"{", lines[1][:100], lines[1][:-3], b"\x00" * 64, b'{"type":"resume",'):
        path.write_bytes(b"".join(lines) + tail)
        log = read_runlog(path)
        assert log.cut_bytes == len(tail)
        assert len(list(log.records())) == len(lines) - 1
        assert log.metrics() == {1: {"loss": 1.0}}


def test_a_last_record_that_lacks_only_its_line_end_is_whole(tmp_path: Path) -> None:
    path = a_log(tmp_path / "run.jsonl", steps=1)
    path.write_bytes(path.read_bytes()[:-1])
    log = read_runlog(path)
    assert log.cut_bytes == 0
    assert isinstance(list(log.records())[-1], EventRecord)


def test_a_cut_line_longer_than_a_block_is_measured(tmp_path: Path) -> None:
    path = a_log(tmp_path / "run.jsonl", steps=1)
    tail = b'{"type":"event","kind":"' + b"x" * 3_000_000
    with open(path, "ab") as file:
        file.write(tail)
    assert read_runlog(path).cut_bytes == len(tail)


@pytest.mark.parametrize("bad", [b'{"type":"metrics","step":\n', b"\n", b'{"type":"new_thing"}\n', b"\x00\x00\n"])
def test_a_bad_line_in_the_middle_is_an_error_with_its_number(tmp_path: Path, bad: bytes) -> None:
    path = a_log(tmp_path / "run.jsonl", steps=1)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], bad, *lines[3:]]))
    stream = read_runlog(path).records()
    assert isinstance(next(stream), TrajectoryRecord)
    assert isinstance(next(stream), TrajectoryRecord)
    with pytest.raises(RunLogError, match="line 4") as caught:
        next(stream)
    assert str(path) in str(caught.value)


def test_an_unknown_version_is_refused_by_name(tmp_path: Path) -> None:
    path = a_log(tmp_path / "run.jsonl")
    path.write_bytes(path.read_bytes().replace(b'"version":1', b'"version":7', 1))
    with pytest.raises(RunLogError, match=r"line 1, field 'version': schema version 7 .*this release reads 1\."):
        read_runlog(path)


def test_a_header_of_another_version_need_not_look_like_ours(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"schema":"mempo.runlog","version":"2b","all":"different"}\n')
    with pytest.raises(RunLogError, match="schema version '2b'"):
        read_runlog(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b'{"id": "1", "contents": "x"}\n', "schema is None, not 'mempo.runlog'"),
        (b'{"schema":"other","version":1}\n', "schema is 'other'"),
        (b"PK\x03\x04", "not a run log"),
        (b"[1]\n", "not a run log"),
        (b'{"schema":"mempo.runlog","ver', "ends within its first line"),
        (b'{"type":"header","schema":"mempo.runlog","version":1}\n', "header cannot be read.*run"),
        (b'{"type":"event","kind":"x","schema":"mempo.runlog","version":1}\n', "EventRecord"),
    ],
)
def test_a_file_that_is_no_run_log_is_refused_with_the_reason(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    with pytest.raises(RunLogError, match=message) as caught:
        read_runlog(path)
    assert caught.value.file == str(path)


def test_a_missing_log_is_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(RunLogError, match="cannot be read: No such file") as caught:
        read_runlog(tmp_path / "absent.jsonl")
    assert caught.value.file == str(tmp_path / "absent.jsonl")


def test_a_log_is_streamed_in_memory_that_does_not_grow_with_it(tmp_path: Path) -> None:
    # 25 MB of large trajectories; one of them takes well under 2 MB in memory.
    path = tmp_path / "run.jsonl"
    RunLogWriter.create(path, run_info()).close()
    line = render_record(TrajectoryRecord(trajectory=a_trajectory(turn_count=4, tokens=1000), step=1))
    count = 25_000_000 // len(line)
    with open(path, "ab") as file:
        for _ in range(count):
            file.write(line)
    log = read_runlog(path)
    tracemalloc.start()
    try:
        seen = sum(1 for _ in log.trajectories())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seen == count
    assert peak < 2_000_000
