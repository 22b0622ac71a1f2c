"""Writes run logs: every record is on its way to the disk when the call returns."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from mempo.core import Json, RunLogError, Trajectory
from mempo.runlog.encoding import render_record
from mempo.runlog.info import now
from mempo.runlog.reader import cut_bytes, read_runlog
from mempo.runlog.records import (
    EventRecord,
    HeaderRecord,
    MetricsRecord,
    Record,
    ResumeRecord,
    RunInfo,
    TrajectoryRecord,
)
from mempo.runlog.secrets import redact_text, redact_values


class RunLogWriter:
    """Appends records to one run log; the only writer of its file.

    As a context manager it notes how the run ended: an `end` event, or an `exception` event with
    the traceback, which goes on to the caller.

        with RunLogWriter.create(run_dir / "run.jsonl", collect_run_info(config, seeds={"run": 0})) as log:
            log.write_trajectory(trajectory, step=1)
            log.write_metrics(1, {"reward": 0.5})

    Each record goes to the operating system in one write, so that a killed process loses none that
    was written; with `fsync` the metrics of a step, and all before them, also survive a power cut.
    """

    def __init__(self, path: Path, descriptor: int, *, fsync: bool = False) -> None:
        """Use `create`, `resume` or `open` instead."""
        self.path = path
        self._descriptor = descriptor
        self._fsync = fsync

    @classmethod
    def create(cls, path: str | os.PathLike[str], run: RunInfo, *, fsync: bool = False) -> Self:
        """Start a new log with its header. Raises RunLogError where the file exists: a log is never overwritten."""
        place = Path(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        except FileExistsError as error:
            raise RunLogError("the run log exists already; resume it, or name another file", file=str(place)) from error
        writer = cls(place, descriptor, fsync=fsync)
        writer._write(HeaderRecord(run=run))
        return writer

    @classmethod
    def resume(cls, path: str | os.PathLike[str], run: RunInfo, *, from_step: int, fsync: bool = False) -> Self:
        """Go on with a log after `from_step`, the step of the checkpoint.

        A half-written last line is cut off first; a `resume` record notes how many bytes, and the
        settings of now. A log that was killed within its header starts anew. Raises RunLogError
        for a file that is missing or no run log of a known version.
        """
        place = Path(path)
        if place.is_file() and killed_in_header(place):
            place.unlink()
            return cls.create(place, run, fsync=fsync)
        cut = read_runlog(place).cut_bytes
        descriptor = os.open(place, os.O_RDWR | os.O_APPEND)
        writer = cls(place, descriptor, fsync=fsync)
        if cut:
            os.ftruncate(descriptor, place.stat().st_size - cut)
        elif os.pread(descriptor, 1, place.stat().st_size - 1) != b"\n":
            os.write(descriptor, b"\n")  # the last record is whole, only its line end is missing
        writer._write(ResumeRecord(from_step=from_step, run=run, cut_bytes=cut))
        return writer

    @classmethod
    def open(cls, path: str | os.PathLike[str], run: RunInfo, *, from_step: int = 0, fsync: bool = False) -> Self:
        """Resume the log where there is one, else create it."""
        if Path(path).exists():
            return cls.resume(path, run, from_step=from_step, fsync=fsync)
        return cls.create(path, run, fsync=fsync)

    def write_trajectory(self, trajectory: Trajectory, *, step: int | None = None, split: str = "train") -> None:
        """Append one trajectory, whole and exact."""
        self._write(TrajectoryRecord(trajectory=trajectory, step=step, split=split))

    def write_metrics(self, step: int, values: Mapping[str, float], *, split: str = "train") -> None:
        """Append the metrics of one step; with `fsync`, everything so far is then on the disk."""
        plain = {name: float(value) for name, value in values.items()}
        self._write(MetricsRecord(step=step, values=plain, split=split, time=now()))
        if self._fsync:
            os.fsync(self._descriptor)

    def write_event(
        self, kind: str, message: str = "", *, step: int | None = None, details: Mapping[str, Json] | None = None
    ) -> None:
        """Append something that happened once, e.g. a `warning`; secrets in its texts are masked."""
        self._write(
            EventRecord(
                kind=kind, message=redact_text(message), step=step, time=now(), details=redact_values(details or {})
            )
        )

    def write_exception(self, error: BaseException, *, step: int | None = None) -> None:
        """Append an `exception` event with its traceback."""
        details = {"error": type(error).__name__, "traceback": "".join(traceback.format_exception(error))}
        self.write_event("exception", str(error), step=step, details=details)

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        if self._descriptor >= 0:
            if self._fsync:
                os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.write_event("end")
            else:
                self.write_exception(error)
        finally:
            self.close()

    def _write(self, record: Record) -> None:
        if self._descriptor < 0:
            raise RunLogError("the run log is closed", file=str(self.path))
        line, start = memoryview(render_record(record)), os.fstat(self._descriptor).st_size
        try:
            # One call, as a rule; the system may take less, e.g. of a very long line.
            while line:
                line = line[os.write(self._descriptor, line) :]
        except BaseException:
            # A full disk must not leave half a line for the next record to be glued to.
            os.ftruncate(self._descriptor, start)
            raise


def killed_in_header(path: Path) -> bool:
    """Whether a log holds no more than a part of its first line: `RunLogWriter.open` starts it anew."""
    with open(path, "rb") as file:
        first = file.readline()
        return not first.endswith(b"\n") and cut_bytes(file) == len(first)
