"""Nothing that was written is lost, and nothing half-written is kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.runlog.strategies import a_trajectory, run_info

from mempo.core import RunLogError
from mempo.runlog import (
    AnyRecord,
    EventRecord,
    HeaderRecord,
    MetricsRecord,
    ResumeRecord,
    RunLogWriter,
    TrajectoryRecord,
    read_runlog,
)
from mempo.runlog.encoding import parse_record


def records(path: Path) -> list[AnyRecord]:
    return list(read_runlog(path).records())


def test_a_log_reads_back_in_the_order_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "run.jsonl"
    with RunLogWriter.create(path, run_info()) as log:
        log.write_trajectory(a_trajectory(), step=1)
        log.write_metrics(1, {"reward": 0.5})
        log.write_event("warning", "memory grows", step=1, details={"tokens": 900})
    assert read_runlog(path).header.run == run_info()
    trajectory, metrics, warning, end = records(path)
    assert trajectory == TrajectoryRecord(trajectory=a_trajectory(), step=1)
    assert isinstance(metrics, MetricsRecord)
    assert (metrics.step, metrics.values, metrics.split) == (1, {"reward": 0.5}, "train")
    assert isinstance(warning, EventRecord)
    assert (warning.kind, warning.message, warning.details) == ("warning", "memory grows", {"tokens": 900})
    assert isinstance(end, EventRecord)
    assert end.kind == "end"


def test_case_75_an_exception_at_step_7_leaves_steps_1_to_6_and_itself_in_the_log(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    def train() -> None:
        with RunLogWriter.create(path, run_info()) as log:
            for step in range(1, 10):
                if step == 7:
                    raise ValueError("loss is nan")
                log.write_metrics(step, {"loss": float(step)})

    with pytest.raises(ValueError, match="loss is nan"):
        train()
    *steps, last = records(path)
    assert [record.step for record in steps if isinstance(record, MetricsRecord)] == [1, 2, 3, 4, 5, 6]
    assert isinstance(last, EventRecord)
    assert (last.kind, last.message, last.details["error"]) == ("exception", "loss is nan", "ValueError")
    assert "in train" in last.details["traceback"]


def test_case_75_each_record_is_in_the_file_when_the_call_returns_even_if_the_process_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    program = (
        "import os, signal, sys\n"
        "from mempo.runlog import RunLogWriter\n"
        "from tests.unit.runlog.strategies import run_info\n"
        "log = RunLogWriter.create(sys.argv[1], run_info())\n"
        "for step in range(1, 7): log.write_metrics(step, {'loss': 1.0})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).resolve().parents[3]
    ran = subprocess.run([sys.executable, "-c", program, str(path)], cwd=root, check=False, timeout=60)
    assert ran.returncode == -signal.SIGKILL
    assert list(read_runlog(path).metrics()) == [1, 2, 3, 4, 5, 6]


def test_a_log_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    RunLogWriter.create(path, run_info()).close()
    before = path.read_bytes()
    with pytest.raises(RunLogError, match="exists already"):
        RunLogWriter.create(path, run_info())
    assert path.read_bytes() == before


def test_resuming_appends_a_resume_record_and_changes_nothing_above_it(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with RunLogWriter.create(path, run_info()) as log:
        log.write_metrics(1, {"loss": 1.0})
    before = path.read_bytes()
    later = run_info(config={"seed": 1})
    with RunLogWriter.resume(path, later, from_step=1) as log:
        log.write_metrics(2, {"loss": 2.0})
    assert path.read_bytes().startswith(before)
    assert records(path)[2] == ResumeRecord(from_step=1, run=later, cut_bytes=0)
    assert read_runlog(path).metrics() == {1: {"loss": 1.0}, 2: {"loss": 2.0}}


def test_resuming_after_every_possible_cut_keeps_all_whole_records_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    log = RunLogWriter.create(path, run_info())
    log.write_metrics(1, {"loss": 1.0})
    whole = path.stat().st_size
    log.write_event("warning", "two\nlines \U0001f600 é", step=1)
    log.close()
    content = path.read_bytes()
    last = len(content) - whole
    for kept in range(last + 1):
        path.write_bytes(content[: whole + kept])
        RunLogWriter.resume(path, run_info(), from_step=1).close()
        found = records(path)
        # With all bytes but the line end the record is whole: only its end is set.
        survives = kept >= last - 1
        assert [type(record) for record in found] == [
            MetricsRecord,
            *([EventRecord] if survives else []),
            ResumeRecord,
        ]
        assert isinstance(found[-1], ResumeRecord)
        assert found[-1].cut_bytes == (0 if survives else kept)
        assert path.read_bytes().startswith(content[: whole + last] if survives else content[:whole])


def test_a_log_that_was_killed_within_its_header_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    RunLogWriter.create(path, run_info()).close()
    header = path.read_bytes()
    for kept in (0, 1, 40, len(header) - 2):
        path.write_bytes(header[:kept])
        RunLogWriter.resume(path, run_info(), from_step=0).close()
        assert path.read_bytes() == header
    path.write_bytes(header[:-1])
    RunLogWriter.resume(path, run_info(), from_step=0).close()
    assert isinstance(parse_record(path.read_bytes().splitlines()[0]), HeaderRecord)
    assert [type(record) for record in records(path)] == [ResumeRecord]


def test_a_foreign_file_is_not_resumed_and_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    for content in (b"dear diary\nno log", b'{"a": 1}\n{"b":'):
        path.write_bytes(content)
        with pytest.raises(RunLogError, match="not a run log"):
            RunLogWriter.resume(path, run_info(), from_step=0)
        assert path.read_bytes() == content
    with pytest.raises(RunLogError, match="cannot be read"):
        RunLogWriter.resume(tmp_path / "absent.jsonl", run_info(), from_step=0)


def test_open_creates_a_log_and_resumes_one_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    RunLogWriter.open(path, run_info()).close()
    assert records(path) == []
    RunLogWriter.open(path, run_info(), from_step=4).close()
    assert records(path) == [ResumeRecord(from_step=4, run=run_info())]


def test_a_write_that_fails_leaves_no_half_line(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    # A file size limit acts as a full disk: the system writes the bytes that fit, then refuses.
    program = (
        "import resource, sys\n"
        "from mempo.runlog import RunLogWriter\n"
        "from tests.unit.runlog.strategies import run_info\n"
        "log = RunLogWriter.create(sys.argv[1], run_info())\n"
        "log.write_metrics(1, {'loss': 1.0})\n"
        "size = log.path.stat().st_size + 500\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))\n"
        "try: log.write_event('warning', 'x' * 5000)\n"
        "except OSError as error: print('refused')\n"
        "log.write_metrics(2, {'loss': 2.0})\n"
    )
    root = Path(__file__).resolve().parents[3]
    ran = subprocess.run(
        [sys.executable, "-c", program, str(path)], cwd=root, check=True, timeout=60, capture_output=True, text=True
    )
    assert ran.stdout.strip() == "refused"
    assert read_runlog(path).cut_bytes == 0
    assert [type(record) for record in records(path)] == [MetricsRecord, MetricsRecord]


def test_with_fsync_the_disk_is_asked_once_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(os, "fsync", asked.append)
    for fsync, expected in ((False, 0), (True, 2)):
        asked.clear()
        log = RunLogWriter.create(tmp_path / f"{fsync}.jsonl", run_info(), fsync=fsync)
        log.write_trajectory(a_trajectory(), step=1)
        log.write_metrics(1, {})
        log.write_trajectory(a_trajectory(), step=2)
        log.write_metrics(2, {})
        assert len(asked) == expected
        log.close()


def test_a_closed_log_takes_no_more_records_and_may_be_closed_again(tmp_path: Path) -> None:
    log = RunLogWriter.create(tmp_path / "run.jsonl", run_info())
    log.close()
    log.close()
    with pytest.raises(RunLogError, match="closed"):
        log.write_event("warning")


def test_events_hold_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERPER_API_KEY", "0123456789abcdef")
    path = tmp_path / "run.jsonl"
    log = RunLogWriter.create(path, run_info())
    log.write_event("warning", "refused: 0123456789abcdef", details={"url": "http://me:pw@host/"})
    try:
        raise RuntimeError("no access with 0123456789abcdef")
    except RuntimeError as error:
        log.write_exception(error, step=1)
    log.close()
    text = path.read_text(encoding="utf-8")
    assert "0123456789abcdef" not in text
    assert "me:pw" not in text
    assert "refused: ***" in text


def test_numbers_of_other_libraries_are_taken_as_metrics(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    log = RunLogWriter.create(tmp_path / "run.jsonl", run_info())
    log.write_metrics(1, {"a": numpy.float32(0.5), "b": numpy.int64(3), "c": True})
    log.close()
    assert read_runlog(log.path).metrics() == {1: {"a": 0.5, "b": 3.0, "c": 1.0}}
    assert os.path.getsize(log.path) > 0
