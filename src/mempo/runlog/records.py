"""The lines of a run log: one JSON object each, told apart by `type`.

Departures from plain JSON, none: every line is standard JSON in UTF-8. A float that JSON cannot
hold stands as null, and `nonfinite` says where and what it was, so that a loss that became NaN is
neither lost nor taken for "not measured". Half a surrogate pair in a text stands as its `\\ud83d`
escape. The reader turns both back.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from mempo.core import Json, Trajectory

SCHEMA = "mempo.runlog"
VERSION = 1
READS = (1,)
"""The versions of the schema that this release reads."""

NonFinite = tuple[tuple[str | int, ...], str]
"""The way to a value (field names, keys and indices), and `nan`, `inf` or `-inf`."""


class Record(Struct, frozen=True, kw_only=True, tag_field="type"):
    """What all lines have."""

    nonfinite: tuple[NonFinite, ...] = ()
    """Where null stands for a float that JSON cannot hold."""


class RunInfo(Struct, frozen=True, kw_only=True):
    """What is needed to tell, and to repeat, where the numbers came from. Secrets are cut out."""

    started: str
    """UTC, ISO 8601."""
    command: tuple[str, ...]
    """The words of the command line."""
    config: Mapping[str, Json]
    """Every setting by dotted key."""
    given: Mapping[str, str]
    """The settings that were given, and by what; the others are defaults."""
    seeds: Mapping[str, int]
    prompts_hash: str
    """Of the prompt texts that the run used; empty where it used none."""
    packages: Mapping[str, str]
    """Versions of mempo and of what it computes with, as installed."""
    python: str
    platform: str
    git_revision: str | None = None
    """Of the repository of the working directory; ends in `-dirty` where it has changes. None outside of one."""


class HeaderRecord(Record, frozen=True, kw_only=True, tag="header"):
    """The first line."""

    schema: str = SCHEMA
    version: int = VERSION
    run: RunInfo


class ResumeRecord(Record, frozen=True, kw_only=True, tag="resume"):
    """The run went on here. Lines above it with a later step belong to steps that were done again."""

    from_step: int
    """The last step that is kept; the next one is `from_step + 1`."""
    run: RunInfo
    cut_bytes: int = 0
    """Bytes of a half-written last line that were cut off."""


class TrajectoryRecord(Record, frozen=True, kw_only=True, tag="trajectory"):
    """One trajectory, whole."""

    trajectory: Trajectory
    step: int | None = None
    """The step that it was sampled for; None outside training."""
    split: str = "train"
    """`train`, `eval`, or what else the run calls it."""


class MetricsRecord(Record, frozen=True, kw_only=True, tag="metrics"):
    """What was measured in one step."""

    step: int
    values: Mapping[str, float]
    split: str = "train"
    time: str = ""
    """UTC, ISO 8601."""


class EventRecord(Record, frozen=True, kw_only=True, tag="event"):
    """Something that happened once: `warning`, `exception`, `end`, `checkpoint`, ..."""

    kind: str
    message: str = ""
    step: int | None = None
    time: str = ""
    """UTC, ISO 8601."""
    details: Mapping[str, Json] = {}


AnyRecord = HeaderRecord | ResumeRecord | TrajectoryRecord | MetricsRecord | EventRecord
