"""Indexes on disk: built aside, replaced as a whole, opened only if they are what they say.

    DIR/manifest.json     what the index is: kind, corpus hash, options, versions, size and hash of each file
    DIR/data-<hash>/      passages.jsonl, offsets.npy, bm25/, dense/ (which of them, by kind)
    DIR/building/         a build under way, or one that was cut and can go on

The manifest names its data folder, and replacing the manifest is what replaces the index: a reader
sees the old index or the new one, and a server keeps the files that it has open.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import msgspec

from mempo.core import DataError, IndexFileError, MempoError, Passage
from mempo.core.files import OnError, atomic_write
from mempo.retrieval import bm25, dense
from mempo.retrieval.bm25 import Bm25Index, Bm25Options
from mempo.retrieval.corpus import (
    PASSAGES_FILE,
    CorpusInfo,
    Progress,
    StoredPassages,
    is_empty,
    no_progress,
    read_passages,
    write_passages,
)
from mempo.retrieval.dense import DenseIndex, DenseOptions
from mempo.retrieval.hybrid import HybridIndex, Searcher

FORMAT, FORMAT_VERSION = "mempo-index", 1
MANIFEST, BUILDING, BUILD_KEY, BUILD_CORPUS = "manifest.json", "building", "key.json", "corpus.json"

_DATA_FOLDER = re.compile(r"data-[0-9a-f]{12}")

Kind = Literal["bm25", "dense", "hybrid"]


@dataclass(frozen=True, slots=True)
class FileInfo:
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an index says about itself."""

    kind: Kind
    corpus: CorpusInfo
    sources: tuple[str, ...]
    """The corpus files as they were named."""
    data: str
    """Folder of the files below."""
    files: Mapping[str, FileInfo]
    versions: Mapping[str, str]
    created: str
    bm25: Bm25Options | None = None
    dense: DenseOptions | None = None
    bad_lines: int = 0
    """Lines that a lenient build left out."""
    format: str = FORMAT
    format_version: int = FORMAT_VERSION

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())


class Index:
    """Passages and a ranking of them. Implements `mempo.core.Retriever`.

    Searches run one after the other in a thread of its own, so that an event loop stays free.
    """

    def __init__(self, passages: StoredPassages, searcher: Searcher, *, kind: str, corpus_sha256: str) -> None:
        self.kind = kind
        self.corpus_sha256 = corpus_sha256
        self._passages = passages
        self._searcher = searcher
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="index")

    def __len__(self) -> int:
        return len(self._passages)

    def find(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """The best passages of each query, best first; never an empty passage."""
        return [
            [replace(passage, score=score) for row, score in hits if not is_empty(passage := self._passages[row])]
            for hits in self._searcher.search(queries, top_k)
        ]

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """`find`, without blocking the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.find, queries, top_k)

    def close(self) -> None:
        self._thread.shutdown()
        self._passages.close()


def build_index(
    corpus: Sequence[str | os.PathLike[str]],
    folder: str | os.PathLike[str],
    *,
    bm25_options: Bm25Options | None = None,
    dense_options: DenseOptions | None = None,
    on_error: OnError | None = None,
    progress: Progress = no_progress,
) -> Manifest:
    """Build an index of one or more corpus files; its kind is told by which options are given.

    What is already in `folder` is replaced when the new index is complete, and not before. A build
    that was cut goes on where it stopped if corpus and options are still the same.

    Raises DataError for a bad corpus, IndexFileError for a folder that holds something else or a
    disk that is full.
    """
    target = Path(folder)
    _refuse_foreign_folder(target)
    building = target / BUILDING
    bad_lines: list[DataError] = []

    def count_bad(error: DataError) -> None:
        bad_lines.append(error)
        if on_error is not None:
            on_error(error)

    with _full_disk_named(target), _alone(target):
        kind = _kind(bm25_options, dense_options)
        _prepare(building, _build_key(corpus, bm25_options, dense_options, lenient=on_error is not None))
        info, bad_count = _build_passages(corpus, building, count_bad if on_error else None, bad_lines, progress)
        passages = StoredPassages.open(building)
        try:
            if bm25_options is not None and not (building / "bm25" / bm25.PARAMETERS).exists():
                shutil.rmtree(building / "bm25", ignore_errors=True)
                bm25.build(passages, len(passages), building / "bm25", bm25_options, progress)
            if dense_options is not None and not (building / "dense" / dense.PROBE).exists():
                dense.build(passages, len(passages), building / "dense", dense_options, progress)
        finally:
            passages.close()
        files = _describe_files(building, progress)
        manifest = Manifest(
            kind=kind,
            corpus=info,
            sources=tuple(os.fspath(path) for path in corpus),
            data=f"data-{_digest(msgspec.json.encode(files))[:12]}",
            files=files,
            versions=_versions(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            bm25=bm25_options,
            dense=dense_options,
            bad_lines=bad_count,
        )
        _publish(building, target, manifest)
    return manifest


def read_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """Raises IndexFileError where there is no index, or one that this release does not read."""
    path = Path(folder) / MANIFEST
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        unfinished = " (a build was cut there: run it again to finish it)" if (path.parent / BUILDING).exists() else ""
        raise IndexFileError(
            f"{folder}: no index here{unfinished}; build one with: mempo index build --corpus FILE --out {folder}"
        ) from error
    except OSError as error:
        raise IndexFileError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        head = msgspec.json.decode(raw)
        if not isinstance(head, dict) or head.get("format") != FORMAT:
            raise IndexFileError(f"{path}: not the manifest of a mempo index")
        if head.get("format_version") != FORMAT_VERSION:
            raise IndexFileError(
                f"{path}: format version {head.get('format_version')}, and this release reads"
                f" {FORMAT_VERSION}; build the index again"
            )
        manifest = msgspec.convert(head, Manifest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise IndexFileError(f"{path}: cut or damaged ({error}); build the index again") from error
    # A manifest that came with a download must not make us read what lies outside of its folder.
    inside = all(not name.startswith("/") and ".." not in name.split("/") for name in manifest.files)
    if not inside or not _DATA_FOLDER.fullmatch(manifest.data):
        raise IndexFileError(f"{path}: names files outside of its folder: this release did not write it")
    return manifest


def open_index(folder: str | os.PathLike[str], *, verify: bool = False) -> Index:
    """Open an index for searching. With `verify`, the hash of every file is checked, not its size alone.

    Raises IndexFileError with the reason for one that is cut, damaged or foreign.
    """
    manifest = read_manifest(folder)
    data = Path(folder) / manifest.data
    check_files(data, manifest.files, verify=verify)
    searchers: list[Searcher] = []
    try:
        if manifest.bm25 is not None:
            searchers.append(Bm25Index.open(data / "bm25", manifest.bm25))
        if manifest.dense is not None:
            searchers.append(DenseIndex.open(data / "dense", manifest.dense))
        passages = StoredPassages.open(data)
    except (OSError, LookupError, TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        if isinstance(error, MempoError):
            raise
        # numpy, bm25s and JSON each have their own words for a damaged file.
        reason = f"{type(error).__name__}: {error}"
        raise IndexFileError(f"{data}: a file is damaged ({reason}); build the index again") from error
    searcher = searchers[0] if len(searchers) == 1 else HybridIndex(searchers)
    return Index(passages, searcher, kind=manifest.kind, corpus_sha256=manifest.corpus.sha256)


def open_faiss(corpus: str | os.PathLike[str], vectors: str | os.PathLike[str], options: DenseOptions) -> Index:
    """A corpus and a faiss index of it that were made elsewhere, unchanged: Search-R1's
    `wiki-18.jsonl` and `e5_Flat.index`. Row i of the index is line i of the corpus.

    Raises IndexFileError where the two do not belong together.
    """
    for path in (corpus, vectors):
        if not Path(path).is_file():
            raise IndexFileError(f"{path}: no such file")
    if Path(corpus).suffix == ".gz":
        raise IndexFileError(f"{corpus}: a gzipped file cannot be read by line; unpack it first (gunzip -k)")
    searcher = DenseIndex.open_faiss(Path(vectors), options)
    passages, sha256 = StoredPassages.scan(corpus)
    if len(searcher) != len(passages):
        passages.close()
        raise IndexFileError(
            f"{vectors} holds {len(searcher)} vectors and {corpus} {len(passages)} lines: they are not of one corpus"
        )
    return Index(passages, searcher, kind="dense", corpus_sha256=sha256)


def check_files(data: Path, files: Mapping[str, FileInfo], *, verify: bool) -> None:
    """Raises IndexFileError for the first file that is missing, cut or (with `verify`) changed."""
    for name, expected in files.items():
        path = data / name
        try:
            size_bytes = path.stat().st_size
        except OSError as error:
            raise IndexFileError(f"{path}: missing ({error.strerror}); build the index again") from error
        if size_bytes != expected.size_bytes:
            raise IndexFileError(
                f"{path}: cut or foreign: {size_bytes} bytes where the manifest says {expected.size_bytes};"
                " build the index again"
            )
        if verify and _file_sha256(path) != expected.sha256:
            raise IndexFileError(f"{path}: its content has changed (wrong SHA-256); build the index again")


def _build_passages(
    corpus: Sequence[str | os.PathLike[str]],
    building: Path,
    on_error: OnError | None,
    bad_lines: list[DataError],
    progress: Progress,
) -> tuple[CorpusInfo, int]:
    done = building / BUILD_CORPUS
    if done.exists():
        return msgspec.json.decode(done.read_bytes(), type=tuple[CorpusInfo, int])
    info = write_passages(read_passages(corpus, on_error), building, progress)
    with atomic_write(done, "wb") as file:
        file.write(msgspec.json.encode((info, len(bad_lines))))
    return info, len(bad_lines)


def _kind(bm25_options: Bm25Options | None, dense_options: DenseOptions | None) -> Kind:
    match bm25_options, dense_options:
        case None, None:
            raise ValueError("give bm25_options, dense_options or both")
        case _, None:
            return "bm25"
        case None, _:
            return "dense"
    return "hybrid"


def _build_key(
    corpus: Sequence[str | os.PathLike[str]],
    bm25_options: Bm25Options | None,
    dense_options: DenseOptions | None,
    *,
    lenient: bool,
) -> bytes:
    """What must be the same for a cut build to go on."""
    sources = []
    for path in corpus:
        try:
            status = os.stat(path)
        except OSError as error:
            raise DataError(f"the corpus cannot be read: {error.strerror}", file=os.fspath(path)) from error
        sources.append((os.path.abspath(path), status.st_size, status.st_mtime_ns))
    options = [asdict(part) if part is not None else None for part in (bm25_options, dense_options)]
    return msgspec.json.encode([FORMAT_VERSION, sources, options, lenient])


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Hold the folder for one build; the system lets go of it when the process ends, however it ends."""
    target.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(target, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise IndexFileError(f"{target}: another process builds here; wait for it, or stop it") from error
    finally:
        os.close(descriptor)


def _prepare(building: Path, key: bytes) -> None:
    """Keep what an equal build left, and begin anew otherwise."""
    path = building / BUILD_KEY
    if not path.exists() or path.read_bytes() != key:
        shutil.rmtree(building, ignore_errors=True)
        with atomic_write(path, "wb") as file:
            file.write(key)


def _publish(building: Path, target: Path, manifest: Manifest) -> None:
    data = target / manifest.data
    for name in (BUILD_KEY, BUILD_CORPUS):
        (building / name).unlink()
    if _is_whole(data, manifest):  # the same bytes, built again
        shutil.rmtree(building)
    else:
        _remove_data(data)
        os.rename(building, data)
    with atomic_write(target / MANIFEST, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
    for old in target.iterdir():
        if old.name != manifest.data and _DATA_FOLDER.fullmatch(old.name):
            _remove_data(old)


def _is_whole(data: Path, manifest: Manifest) -> bool:
    try:
        check_files(data, manifest.files, verify=True)
    except IndexFileError:
        return False
    return True


def _remove_data(data: Path) -> None:
    if data.is_symlink():  # moved to another disk: only the link is ours
        data.unlink()
    elif data.exists():
        shutil.rmtree(data)


def _describe_files(building: Path, progress: Progress) -> dict[str, FileInfo]:
    paths = sorted(path for path in building.rglob("*") if path.is_file())
    files = {}
    for number, path in enumerate(paths, start=1):
        if path.name in (BUILD_KEY, BUILD_CORPUS):
            continue
        files[path.relative_to(building).as_posix()] = FileInfo(path.stat().st_size, _file_sha256(path))
        progress("hashing files", number, len(paths))
    return files


def _refuse_foreign_folder(target: Path) -> None:
    if target.is_file():
        raise IndexFileError(f"{target}: is a file; an index is a folder")
    if target.is_dir() and any(target.iterdir()) and not _is_index_folder(target):
        raise IndexFileError(f"{target}: holds files that are not an index; choose a new or empty folder")


def _is_index_folder(target: Path) -> bool:
    """Whether an index or a build lies here, be it damaged: a `manifest.json` or `building` alone may be anyone's."""
    try:
        read_manifest(target)
        return True
    except IndexFileError:
        building = target / BUILDING
        if building.is_dir() and all(BUILD_KEY in path.name for path in building.iterdir()):
            return True  # killed before, or while, its first file was written
        return (building / BUILD_KEY).exists() or any(
            (folder / PASSAGES_FILE).exists() for folder in target.iterdir() if _DATA_FOLDER.fullmatch(folder.name)
        )


@contextmanager
def _full_disk_named(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # numpy's short write has no number: "180000 requested and 89056 written".
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) and not str(error).endswith("written"):
            raise
        raise IndexFileError(
            f"{target}: the disk is full. What was there before is intact. Free some space and run the same"
            f" command again to go on, or delete {target / BUILDING}"
        ) from error


def _versions() -> dict[str, str]:
    found = {}
    for package in ("mempo", "bm25s", "PyStemmer", "faiss-cpu", "sentence-transformers", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
