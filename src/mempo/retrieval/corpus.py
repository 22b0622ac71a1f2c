"""Corpora: JSON lines in, passages out, never the whole file in memory.

A corpus line is `{"id", "contents"}` (Search-R1) or `{"id", "title", "text"}`. `contents` is
`"Title"\\ntext`; one line alone is a text without a title.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from mempo.core import DataError, IndexFileError, Json, Passage
from mempo.core.files import OnError, read_jsonl
from mempo.retrieval.wire import split_contents

Progress = Callable[[str, int, int | None], None]
"""Called as work goes on with what is done, how much of it, and how much there is (None: not known)."""

PASSAGES_FILE, OFFSETS_FILE = "passages.jsonl", "offsets.npy"
SHOWN_DUPLICATES = 5


def no_progress(what: str, done: int, total: int | None) -> None:
    """The `Progress` of callers that do not want any."""


def is_empty(passage: Passage) -> bool:
    """An empty passage says nothing and is never returned."""
    return not passage.title.strip() and not passage.text.strip()


def parse_passage(row: Mapping[str, Json], *, file: str | None = None, line: int | None = None) -> Passage:
    """One corpus line as a passage. Raises DataError that names what is missing.

    >>> parse_passage({"id": "2", "title": "T", "text": "body"})
    Passage(id='2', title='T', text='body', score=None)
    >>> parse_passage({"id": "4"}, file="c.jsonl", line=4)
    Traceback (most recent call last):
    mempo.core.errors.DataError: c.jsonl, line 4, field 'contents': a passage needs "contents", or "title" and "text"
    """
    number = row.get("id")
    if isinstance(number, bool) or not isinstance(number, str | int) or number == "":
        raise DataError("a passage needs an id, a string or an integer", file=file, line=line, field="id", value=number)
    if "contents" in row:
        title, text = split_contents(_string(row, "contents", file, line))
    elif "text" in row:
        text = _string(row, "text", file, line)
        title = _string(row, "title", file, line) if "title" in row else ""
    else:
        message = 'a passage needs "contents", or "title" and "text"'
        raise DataError(message, file=file, line=line, field="contents")
    return Passage(str(number), title, text)


def read_passages(paths: Sequence[str | os.PathLike[str]], on_error: OnError | None = None) -> Iterator[Passage]:
    """The passages of one or more corpus files, plain or gzipped, in order, one at a time.

    A bad line raises a DataError with file and line, or goes to `on_error` and is left out.
    Duplicates and empty passages are not judged here.
    """
    for path in paths:
        for line, row in read_jsonl(path, on_error):
            try:
                passage = parse_passage(row, file=os.fspath(path), line=line)
            except DataError as error:
                if on_error is None:
                    raise
                on_error(error)
                continue
            yield passage


@dataclass(frozen=True, slots=True)
class CorpusInfo:
    """What a corpus holds, after duplicates and empty passages were left out."""

    sha256: str
    """Of the kept passages as stored: the same for plain and gzipped files and for both line shapes."""
    size_bytes: int
    passages: int
    duplicates: int = 0
    """Passages whose id was seen before: the first one is kept."""
    duplicate_ids: tuple[str, ...] = ()
    """The first few of them."""
    empty: int = 0
    """Passages without a title and a text: left out."""


def write_passages(passages: Iterable[Passage], folder: Path, progress: Progress = no_progress) -> CorpusInfo:
    """Store passages for random access: one JSON line each, and the byte at which each begins.

    Raises DataError where no passage has any text.
    """
    encoder, digest = msgspec.json.Encoder(), hashlib.sha256()
    seen: set[str] = set()
    duplicate_ids: list[str] = []
    duplicates = empty = position = 0
    starts = _Growing()
    with open(folder / PASSAGES_FILE, "wb") as file:
        for passage in passages:
            if passage.id in seen:
                duplicates += 1
                duplicate_ids += [passage.id] if len(duplicate_ids) < SHOWN_DUPLICATES else []
                continue
            seen.add(passage.id)
            if is_empty(passage):
                empty += 1
                continue
            line = encoder.encode(_Line(passage.id, passage.title, passage.text)) + b"\n"
            file.write(line)
            digest.update(line)
            starts.append(position)
            position += len(line)
            if len(starts) % 1000 == 0:
                progress("reading passages", len(starts), None)
        file.flush()
        os.fsync(file.fileno())
    if not len(starts):
        raise DataError("the corpus holds no passage with any text: check that it is the right file")
    starts.append(position)
    np.save(folder / OFFSETS_FILE, starts.array())
    count = len(starts) - 1
    progress("reading passages", count, count)
    return CorpusInfo(digest.hexdigest(), position, count, duplicates, tuple(duplicate_ids), empty)


def corpus_sha256(paths: Sequence[str | os.PathLike[str]], on_error: OnError | None = None) -> str:
    """The hash that an index of these files would carry: reads them once, and stores nothing."""
    encoder, digest = msgspec.json.Encoder(), hashlib.sha256()
    seen: set[str] = set()
    for passage in read_passages(paths, on_error):
        if passage.id not in seen and not is_empty(passage):
            digest.update(encoder.encode(_Line(passage.id, passage.title, passage.text)) + b"\n")
        seen.add(passage.id)
    return digest.hexdigest()


class StoredPassages:
    """Passages on disk by row. Reads the rows that are asked for and keeps none in memory.

    Safe to use from several threads.
    """

    def __init__(self, path: Path, offsets: npt.NDArray[np.int64]) -> None:
        """`offsets[row]` is where a row begins and `offsets[row + 1]` where it ends."""
        self._path = path
        self._offsets = offsets
        self._file = os.open(path, os.O_RDONLY)
        self._decoder = msgspec.json.Decoder()

    @classmethod
    def open(cls, folder: Path) -> StoredPassages:
        """What `write_passages` stored in a folder."""
        return cls(folder / PASSAGES_FILE, np.load(folder / OFFSETS_FILE, mmap_mode="r"))

    @classmethod
    def scan(cls, path: str | os.PathLike[str]) -> tuple[StoredPassages, str]:
        """A plain corpus file as it lies, row by line, and its SHA-256: finds line ends, parses nothing."""
        offsets, sha256 = _scan_lines(Path(path))
        return cls(Path(path), offsets), sha256

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, row: int) -> Passage:
        start, end = int(self._offsets[row]), int(self._offsets[row + 1])
        return self._parse(os.pread(self._file, end - start, start), row)

    def __iter__(self) -> Iterator[Passage]:
        with open(self._path, "rb") as file:
            for row, line in enumerate(file):
                yield self._parse(line, row)

    def close(self) -> None:
        os.close(self._file)

    def _parse(self, line: bytes, row: int) -> Passage:
        try:
            return parse_passage(self._decoder.decode(line), file=str(self._path), line=row + 1)
        except msgspec.DecodeError as error:
            raise IndexFileError(
                f"{self._path}, line {row + 1}: not a passage ({error}); build the index again"
            ) from error


class _Line(msgspec.Struct):
    """A stored passage. (A struct: msgspec encodes it three times as fast as a dictionary.)"""

    id: str
    title: str
    text: str


class _Growing:
    """A list of 64-bit integers that takes eight bytes for each."""

    def __init__(self) -> None:
        self._array = np.empty(1024, dtype=np.int64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, value: int) -> None:
        if self._count == len(self._array):
            self._array = np.resize(self._array, 2 * self._count)
        self._array[self._count] = value
        self._count += 1

    def array(self) -> npt.NDArray[np.int64]:
        return self._array[: self._count]


def _string(row: Mapping[str, Json], field: str, file: str | None, line: int | None) -> str:
    value = row[field]
    if not isinstance(value, str):
        raise DataError("must be a string", file=file, line=line, field=field, value=value)
    return value


def _scan_lines(path: Path, block_bytes: int = 1 << 24) -> tuple[npt.NDArray[np.int64], str]:
    ends: list[npt.NDArray[np.int64]] = [np.zeros(1, dtype=np.int64)]
    digest, position = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while block := file.read(block_bytes):
            digest.update(block)
            newlines = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n"))
            ends.append(newlines.astype(np.int64) + position + 1)
            position += len(block)
    offsets = np.concatenate(ends)
    return (offsets if offsets[-1] == position else np.append(offsets, position)), digest.hexdigest()
