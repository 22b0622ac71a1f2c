"""Rows of a file, whatever holds them: JSON lines, one JSON array, or parquet.

A row knows its place, so that whoever finds a fault in it can name file, line and field.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mempo.core import DataError, Json
from mempo.core.files import OnError, parse_json, read_jsonl, reading_bytes

PARQUET_MAGIC = b"PAR1"
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One record of a file, not yet understood. Fields are named by dotted paths (`extra_info.id`)."""

    file: str
    line: int
    """Line from 1; in a parquet file the row from 1."""
    fields: Mapping[str, Json]
    place: str = ""
    """Where inside the line the record stands: `[3].` for the fourth item of a JSON array."""

    def get(self, field: str) -> Json:
        """The value, or None where it is missing or null (parquet knows no difference)."""
        value: Json = self.fields
        for name in field.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def text(self, field: str) -> str:
        """The string at `field`; DataError where it is missing or of another type."""
        value = self._required(field)
        if not isinstance(value, str):
            raise self.error("must be a string", field, value)
        return value

    def optional_text(self, field: str, default: str = "") -> str:
        return default if self.get(field) is None else self.text(field)

    def texts(self, field: str) -> tuple[str, ...]:
        """The list of strings at `field`; empty where it is missing."""
        value = self.get(field)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error("must be a list of strings", field, value)
        return tuple(value)

    def text_lists(self, field: str) -> tuple[tuple[str, ...], ...]:
        """The list of lists of strings at `field`; empty where it is missing."""
        value = self.get(field)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(
            isinstance(inner, list) and all(isinstance(item, str) for item in inner) for inner in value
        ):
            raise self.error("must be a list of lists of strings", field, value)
        return tuple(tuple(inner) for inner in value)

    def error(self, message: str, field: str | None = None, value: object = None) -> DataError:
        shown = f"{self.place}{field}" if field is not None else self.place.rstrip(".") or None
        return DataError(message, file=self.file, line=self.line, field=shown, value=value)

    def _required(self, field: str) -> Json:
        value = self.get(field)
        if value is None:
            raise self.error("is missing", field)
        return value


def read_rows(path: str | os.PathLike[str], on_error: OnError | None = None) -> Iterator[Row]:
    """The rows of a file one at a time; what holds them is told by the first bytes.

    Raises DataError for a broken file. With `on_error`, a bad line of a JSON-lines file goes there
    and is left out; a broken array or parquet file has no next row to go on with, and raises.
    """
    name = os.fspath(path)
    with reading_bytes(path) as file:
        head = file.read(64)
    if head.startswith(PARQUET_MAGIC):
        from mempo.data.parquet import read_parquet

        for number, fields in enumerate(read_parquet(path), start=1):
            yield Row(name, number, fields)
    elif head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        yield from _read_array(name)
    else:
        for number, fields in read_jsonl(path, on_error):
            yield Row(name, number, fields)


def _read_array(path: str) -> Iterator[Row]:
    """The objects of one JSON array, without holding the file: raw HotpotQA is half a gigabyte on one line."""
    window = _Window(path)
    window.expect("[")
    index = 0
    while window.peek() != "]":
        if index:
            window.expect(",")
            window.peek()
        line, text = window.take_object(index)
        try:
            fields = parse_json(text)
        except ValueError as error:
            raise DataError(f"not JSON: {error}", file=path, line=line, field=f"[{index}]") from error
        yield Row(path, line, fields, place=f"[{index}].")
        index += 1
    window.expect("]")
    if trailing := window.peek():
        raise DataError("text follows the end of the array", file=path, line=window.line, value=trailing)


class _Window:
    """A piece of a UTF-8 text file that moves forward, and the line it has come to."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.line = 1
        self._text = ""
        self._at = 0
        self._chunks = self._read_chunks()

    def peek(self) -> str:
        """The next character that is not blank, or an empty string at the end."""
        while True:
            while self._at < len(self._text):
                char = self._text[self._at]
                if char not in " \t\r\n":
                    return char
                self.line += char == "\n"
                self._at += 1
            if not self._read_more(1):
                return ""

    def expect(self, char: str) -> None:
        found = self.peek()
        if found != char:
            what = repr(found) if found else "the end of the file (cut?)"
            raise DataError(f"expected {char!r} of a JSON array, found {what}", file=self.path, line=self.line)
        self._at += 1

    def take_object(self, index: int) -> tuple[int, str]:
        """The line where the next object starts, and its text."""
        if self.peek() != "{":
            message = "each item of the array must be a JSON object"
            raise DataError(message, file=self.path, line=self.line, field=f"[{index}]")
        while True:
            try:
                _, end = _DECODER.raw_decode(self._text, self._at)
                break
            except (ValueError, RecursionError) as error:
                # Perhaps only cut by the window: double it, so that all tries together stay linear.
                if not self._read_more(len(self._text) - self._at):
                    raise DataError(
                        f"not JSON, or the file is cut: {error}", file=self.path, line=self.line, field=f"[{index}]"
                    ) from error
        text, line = self._text[self._at : end], self.line
        self.line += text.count("\n")
        self._at = end
        return line, text

    def _read_more(self, characters: int) -> bool:
        """Forget what was taken and append at least `characters` more; False at the end of the file."""
        pieces = [self._text[self._at :]]
        added = 0
        for chunk in self._chunks:
            pieces.append(chunk)
            added += len(chunk)
            if added >= characters:
                break
        self._text, self._at = "".join(pieces), 0
        return added > 0

    def _read_chunks(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        offset, line = 0, 1
        with reading_bytes(self.path) as file:
            chunk = file.read(len(codecs.BOM_UTF8))
            if chunk == codecs.BOM_UTF8:
                offset, chunk = len(chunk), file.read(CHUNK_BYTES)
            while True:
                held = len(decoder.getstate()[0])  # bytes of a character that the last chunk cut
                try:
                    text = decoder.decode(chunk, final=not chunk)
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"not UTF-8 at byte {offset - held + error.start} of the file; convert the file to UTF-8",
                        file=self.path,
                        line=line + error.object[: error.start].count(b"\n"),
                        value=error.object[error.start : error.start + 4],
                    ) from error
                if text:
                    yield text
                if not chunk:
                    return
                line += text.count("\n")
                offset += len(chunk)
                chunk = file.read(CHUNK_BYTES)


_DECODER = json.JSONDecoder()
