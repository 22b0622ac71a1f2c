"""Files that other parts read and write: atomic writes, and JSON lines with errors that name the place.

Everything is UTF-8, whatever the locale says. Files are read plain or gzipped (told by their first
bytes) and written gzipped where the name ends in `.gz`.
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Literal, NoReturn, cast

from mempo.core.errors import DataError
from mempo.core.records import Json

GZIP_MAGIC = b"\x1f\x8b"
UTF8_BOM = b"\xef\xbb\xbf"

OnError = Callable[[DataError], None]
"""What to do with a bad line: a lenient reader collects the error and goes on."""


@contextmanager
def atomic_write(path: str | os.PathLike[str], mode: Literal["w", "wb"] = "w") -> Iterator[IO[Any]]:
    """Open a file that appears under its name whole, or not at all.

    The content goes to a file beside `path`, is synced to the disk, and is renamed at the end: a
    reader never sees half of it, and an error or an interrupt leaves what was there before. Text
    is UTF-8 with `\\n` line ends. The folder is made where it is missing. A link stays a link: the
    file that it leads to is replaced. Raises DataError for a folder or a device, which no file may replace.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_write(Path(folder, "new", "a.txt")) as file:
    ...         _ = file.write("é")
    ...     Path(folder, "new", "a.txt").read_bytes()
    b'\\xc3\\xa9'
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise DataError("is no file that can be replaced; name another place to write to", file=os.fspath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with ExitStack() as stack:
            stream: IO[bytes] = stack.enter_context(open(aside, "wb"))
            stack.callback(_sync, stream)
            if target.suffix == ".gz":  # neither name nor time inside: equal content gives equal bytes
                zipped = gzip.GzipFile(filename="", mode="wb", fileobj=stream, mtime=0)
                stream = cast("IO[bytes]", stack.enter_context(zipped))
            if mode == "w":
                text = io.TextIOWrapper(stream, encoding="utf-8", newline="\n")
                stack.callback(text.detach)
                yield text
            else:
                yield stream
        os.replace(aside, target)
    except BaseException as error:
        aside.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            error.filename = os.fspath(path)  # a failed write does not say where it wrote to
        raise
    _sync_folder(target.parent)


@contextmanager
def reading_bytes(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a plain or gzipped file for reading.

    Raises DataError where it cannot be opened, or where the gzip stream turns out broken or cut.
    """
    name = os.fspath(path)
    try:
        with _open_bytes(path) as file:
            yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"the gzip stream is broken or cut: {error}", file=name) from error


def read_lines(path: str | os.PathLike[str], on_error: OnError | None = None) -> Iterator[tuple[int, str]]:
    """The lines of a UTF-8 file with their numbers from 1, without line ends, blank ones left out.

    A byte-order mark and CRLF are accepted. A line that is not UTF-8 raises a DataError that names
    file, line and byte, or goes to `on_error`; a broken gzip stream always raises.
    """
    for number, line, _ in _read_lines(path, on_error):
        yield number, line


def read_jsonl(path: str | os.PathLike[str], on_error: OnError | None = None) -> Iterator[tuple[int, dict[str, Json]]]:
    """The objects of a JSON-lines file with their line numbers, one at a time.

    Raises DataError with file and line for a line that is not UTF-8, not JSON (`NaN` is not, and
    a cut last line is called so), or not an object. With `on_error` such a line is passed to it
    instead and left out, so that a lenient reader can count and list what it skipped.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.jsonl").write_text('{"a": 1}\\n\\n{"a": ', encoding="utf-8")
    ...     errors = []
    ...     print(list(read_jsonl(Path(folder, "a.jsonl"), errors.append)))
    ...     print(errors[0].line, errors[0].message.split(":")[0])
    [(1, {'a': 1})]
    3 not JSON, and the file ends here
    """
    for number, line, ended in _read_lines(path, on_error):
        try:
            value = parse_json(line)
        except ValueError as error:
            message = f"not JSON: {error}" if ended else f"not JSON, and the file ends here: cut? {error}"
            _fail(DataError(message, file=os.fspath(path), line=number, value=line), on_error)
            continue
        if not isinstance(value, dict):
            message = "each line must be a JSON object"
            _fail(DataError(message, file=os.fspath(path), line=number, value=value), on_error)
            continue
        yield number, value


def write_jsonl(path: str | os.PathLike[str], rows: Iterable[Mapping[str, Json]]) -> int:
    """Write objects as JSON lines, atomically; returns how many."""
    count = 0
    with atomic_write(path) as file:
        for row in rows:
            file.write(render_json(row) + "\n")
            count += 1
    return count


def parse_json(text: str) -> Json:
    """Standard JSON only: no `NaN` or `Infinity`, no number too large for a float (`1e999` would be read as
    infinite and could not be written again), and no half surrogate that UTF-8 cannot hold.

    Raises ValueError.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    # Only an escape can put a half surrogate into a string that was decoded from UTF-8.
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("a string holds half of a surrogate pair") from None
    return value


def render_json(value: Json) -> str:
    """One line of standard JSON, with its characters as they are. Raises ValueError for NaN."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _read_lines(path: str | os.PathLike[str], on_error: OnError | None) -> Iterator[tuple[int, str, bool]]:
    """Number, text, and whether a line end follows, of each line that is not blank."""
    name, offset = os.fspath(path), 0
    with reading_bytes(path) as file:
        for number, raw in enumerate(file, start=1):
            start, offset = offset, offset + len(raw)
            if number == 1 and raw.startswith(UTF8_BOM):
                raw, start = raw[len(UTF8_BOM) :], len(UTF8_BOM)
            try:
                line = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                message = (
                    f"not UTF-8 at byte {start + error.start} of the file (byte {error.start} of the line, from 0);"
                    " convert the file to UTF-8"
                )
                bad = raw[error.start : error.start + 4]
                _fail(DataError(message, file=name, line=number, value=bad), on_error)
                continue
            if line.strip():
                yield number, line.rstrip("\r\n"), line.endswith("\n")


def _open_bytes(path: str | os.PathLike[str]) -> IO[bytes]:
    try:
        file = open(path, "rb")  # noqa: SIM115 - the caller closes it
    except OSError as error:
        raise DataError(f"the file cannot be read: {error.strerror}", file=os.fspath(path)) from error
    if file.peek(2)[:2] != GZIP_MAGIC:
        return file
    file.close()
    return cast("IO[bytes]", gzip.open(path, "rb"))


def _fail(error: DataError, on_error: OnError | None) -> None:
    if on_error is None:
        raise error
    on_error(error)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"the number {number:.40} is too large")
    return value


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable, where the system lets a folder be opened."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
