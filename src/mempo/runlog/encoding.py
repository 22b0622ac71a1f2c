"""Records as lines, and lines as records, without loss.

msgspec does the work; the two things that it cannot write take the slow way around it: floats that
JSON has no word for, and halves of surrogate pairs (a server may send them, UTF-8 cannot hold them).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from mempo.runlog.records import AnyRecord, NonFinite, Record

T = TypeVar("T", bound=Record)

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyRecord)


def render_record(record: T) -> bytes:
    """One line, with its end."""
    plain = msgspec.to_builtins(record)
    found = tuple(_nonfinite(plain))
    if found:
        record = msgspec.structs.replace(record, nonfinite=found)
    try:
        return _encoder.encode(record) + b"\n"
    except UnicodeEncodeError:
        plain = _with_nulls(msgspec.to_builtins(record), dict(found))
        return json.dumps(plain, ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def parse_record(line: bytes) -> AnyRecord:
    """The record of one line. Raises ValueError where it is none."""
    try:
        record: AnyRecord = _decoder.decode(line)
    except (ValueError, RecursionError):
        # The quick way refuses null in the place of a float, and half surrogates; both are rare.
        return _parse_slowly(line)
    return _parse_slowly(line) if record.nonfinite else record


def _parse_slowly(line: bytes) -> AnyRecord:
    try:
        plain = json.loads(line)
        if not isinstance(plain, dict):
            raise ValueError("not a JSON object")
        for way, name in msgspec.convert(plain.pop("nonfinite", ()), tuple[NonFinite, ...]):
            _put(plain, way, float(name))
        record: AnyRecord = msgspec.convert(plain, AnyRecord)
    except (LookupError, TypeError, RecursionError) as error:  # a way that leads nowhere; thousands of brackets
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return record


def _nonfinite(value: Any, way: tuple[str | int, ...] = ()) -> Iterator[NonFinite]:
    """Where floats stand that JSON cannot hold, and what they are."""
    if isinstance(value, float):
        if not math.isfinite(value):
            yield way, repr(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _nonfinite(item, (*way, key))
    elif isinstance(value, list | tuple):
        # Most values of a log are token ids and log-probs, in long flat lists: not worth a call each.
        kinds = set(map(type, value))
        if kinds <= {int, str} or (kinds == {float} and all(map(math.isfinite, value))):
            return
        for index, item in enumerate(value):
            yield from _nonfinite(item, (*way, index))


def _with_nulls(value: Any, found: Mapping[tuple[str | int, ...], str], way: tuple[str | int, ...] = ()) -> Any:
    if way in found:
        return None
    if isinstance(value, Mapping):
        return {key: _with_nulls(item, found, (*way, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_nulls(item, found, (*way, index)) for index, item in enumerate(value)]
    return value


def _put(plain: Any, way: tuple[str | int, ...], value: float) -> None:
    *path, last = way
    for step in path:
        plain = plain[step]
    plain[last] = value
