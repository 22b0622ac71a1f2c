"""The record of a run: a versioned, append-only file of JSON lines. Reports read nothing else."""

from mempo.runlog.info import collect_run_info, git_revision
from mempo.runlog.reader import RunLog, is_runlog, read_runlog
from mempo.runlog.records import (
    READS,
    SCHEMA,
    VERSION,
    AnyRecord,
    EventRecord,
    HeaderRecord,
    MetricsRecord,
    ResumeRecord,
    RunInfo,
    TrajectoryRecord,
)
from mempo.runlog.secrets import redact_command, redact_text, redact_values
from mempo.runlog.writer import RunLogWriter, killed_in_header

__all__ = [
    "READS",
    "SCHEMA",
    "VERSION",
    "AnyRecord",
    "EventRecord",
    "HeaderRecord",
    "MetricsRecord",
    "ResumeRecord",
    "RunInfo",
    "RunLog",
    "RunLogWriter",
    "TrajectoryRecord",
    "collect_run_info",
    "git_revision",
    "is_runlog",
    "killed_in_header",
    "read_runlog",
    "redact_command",
    "redact_text",
    "redact_values",
]
