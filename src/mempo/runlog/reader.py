"""Reads run logs, one line at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from mempo.core import RunLogError
from mempo.runlog.encoding import parse_record
from mempo.runlog.records import READS, SCHEMA, AnyRecord, HeaderRecord, MetricsRecord, ResumeRecord, TrajectoryRecord

_BLOCK_BYTES = 1 << 20


class _Head(msgspec.Struct):
    """What the first line of any version says about itself."""

    schema: object = None
    version: object = None


@dataclass(frozen=True, slots=True)
class RunLog:
    """An opened run log: its header, and its other records as often as they are asked for.

    Nothing is kept in memory but the record at hand, so that a log may be larger than memory. A log
    that is still being written can be read: a last line that is not finished yet is left out.
    """

    path: Path
    header: HeaderRecord
    cut_bytes: int
    """Length of a half-written last line (a killed process leaves one); 0 for a whole log."""

    def records(self) -> Iterator[AnyRecord]:
        """Every record after the header, in the order of the file.

        Raises RunLogError with the line's number for a line that is none, unless it is the last
        one and was not finished.
        """
        return (record for _, record in self._numbered())

    def current(self) -> Iterator[AnyRecord]:
        """The records as the run in the end went: without those of steps that were done again after a resume."""
        resumes = self._resumes()
        for number, record in self._numbered():
            step = getattr(record, "step", None)
            if step is None or not any(number < line and from_step < step for line, from_step in resumes):
                yield record

    def trajectories(self, *, split: str | None = None, step: int | None = None) -> Iterator[TrajectoryRecord]:
        """The current trajectories, of one split and of one step where they are given."""
        for record in self.current():
            if isinstance(record, TrajectoryRecord) and split in (None, record.split) and step in (None, record.step):
                yield record

    def metrics(self, split: str = "train") -> dict[int, dict[str, float]]:
        """Step → metric → value, of the current records, in the order of steps; those of one step are merged."""
        steps: dict[int, dict[str, float]] = {}
        for record in self.current():
            if isinstance(record, MetricsRecord) and record.split == split:
                steps.setdefault(record.step, {}).update(record.values)
        return dict(sorted(steps.items()))

    def _numbered(self) -> Iterator[tuple[int, AnyRecord]]:
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    continue
                try:
                    record = parse_record(line)
                except ValueError as error:
                    if not line.endswith(b"\n"):
                        return
                    raise RunLogError(
                        f"not a record of a run log: {error}", file=str(self.path), line=number, value=line[:200]
                    ) from error
                yield number, record

    def _resumes(self) -> list[tuple[int, int]]:
        """Line and `from_step` of every resume; the other lines are not parsed."""
        found = []
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, start=1):
                # A line that is not finished ends the log in `_numbered`, and counts for nothing here.
                if line.startswith(b'{"type":"resume",') and line.endswith(b"\n"):
                    record = parse_record(line)
                    assert isinstance(record, ResumeRecord)
                    found.append((number, record.from_step))
        return found


def read_runlog(path: str | os.PathLike[str]) -> RunLog:
    """Open a run log and read its header.

    Raises RunLogError for a file that is missing or empty, that is not a run log, or whose schema
    version this release does not read (the message names both).
    """
    place = Path(path)
    try:
        with open(place, "rb") as file:
            line = file.readline()
            header = _parse_header(line, str(place))
            return RunLog(place, header, cut_bytes=cut_bytes(file))
    except OSError as error:
        raise RunLogError(f"the run log cannot be read: {error.strerror}", file=str(place)) from error


def is_runlog(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as a run log of any version does, so that a command may take other files, too.

    A pipe is none, and nothing is read of it: that would be gone for whoever reads it next.
    """
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as file:
            return f'"schema":"{SCHEMA}"'.encode() in file.read(200).replace(b" ", b"")
    except OSError:
        return False


def cut_bytes(file: IO[bytes]) -> int:
    """Length of a last line that is not a whole record; 0 where there is none.

    A whole record that lacks only its line end is not cut.
    """
    end = file.seek(0, os.SEEK_END)
    tail = b""
    while b"\n" not in tail and len(tail) < end:
        start = max(0, end - len(tail) - _BLOCK_BYTES)
        file.seek(start)
        tail = file.read(end - len(tail) - start) + tail
    line = tail.rpartition(b"\n")[2]
    return len(line) if line and not _is_record(line) else 0


def _is_record(line: bytes) -> bool:
    try:
        parse_record(line)
    except ValueError:
        return False
    return True


def _parse_header(line: bytes, file: str) -> HeaderRecord:
    if not line:
        raise RunLogError("the run log is empty: its header is missing", file=file)
    try:
        head = msgspec.json.decode(line, type=_Head)
    except ValueError as error:
        cut = "" if line.endswith(b"\n") else " (the file ends within its first line)"
        raise RunLogError(f"not a run log{cut}: {error}", file=file, line=1, value=line[:200]) from error
    if head.schema != SCHEMA:
        raise RunLogError(f"not a run log: schema is {head.schema!r}, not {SCHEMA!r}", file=file, line=1)
    if head.version not in READS:
        known = ", ".join(map(str, READS))
        raise RunLogError(
            f"schema version {head.version!r} of the run log is not known; this release reads {known}."
            " Read it with the release that wrote it",
            file=file,
            line=1,
            field="version",
        )
    try:
        record = parse_record(line)
    except ValueError as error:
        raise RunLogError(f"the header cannot be read: {error}", file=file, line=1, value=line[:200]) from error
    if not isinstance(record, HeaderRecord):
        raise RunLogError(f"the first line is no header but {type(record).__name__}", file=file, line=1)
    return record
