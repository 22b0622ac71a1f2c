"""Indexes on disk: built aside, replaced whole, resumed, and refused where they are not what they say."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mempo.core import DataError, IndexFileError, Retriever
from mempo.retrieval import bm25
from mempo.retrieval.bm25 import Bm25Options
from mempo.retrieval.index import Manifest, build_index, open_index, read_manifest

OPTIONS = Bm25Options()


def corpus(folder: Path, *texts: str, name: str = "corpus.jsonl") -> Path:
    path = folder / name
    rows = [{"id": f"{name}:{row}", "contents": text} for row, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def build(folder: Path, *texts: str) -> Manifest:
    return build_index([corpus(folder, *texts)], folder / "index", bm25_options=OPTIONS)


def texts_found(folder: Path, query: str) -> list[str]:
    index = open_index(folder / "index")
    try:
        return [passage.text for passage in index.find([query], 5)[0]]
    finally:
        index.close()


async def test_an_index_is_a_retriever_that_knows_its_corpus(tmp_path: Path) -> None:
    manifest = build(tmp_path, "ants", "bees", "ant and bee bee bee")
    index = open_index(tmp_path / "index")
    assert isinstance(index, Retriever)
    found = await index.search(["ant", "nothing"], 1)
    index.close()
    assert [[passage.text for passage in hits] for hits in found] == [["ants"], []]
    assert (len(index), index.kind, index.corpus_sha256) == (3, "bm25", manifest.corpus.sha256)
    assert {"mempo", "bm25s", "numpy"} <= manifest.versions.keys()
    assert read_manifest(tmp_path / "index") == manifest


def test_several_files_make_one_corpus(tmp_path: Path) -> None:
    files = [corpus(tmp_path, "ant", name="a.jsonl"), corpus(tmp_path, "bee", name="b.jsonl")]
    assert build_index(files, tmp_path / "index", bm25_options=OPTIONS).corpus.passages == 2


def test_a_new_build_replaces_the_old_index_and_leaves_nothing_behind(tmp_path: Path) -> None:
    build(tmp_path, "old ant")
    manifest = build(tmp_path, "new ant")
    assert texts_found(tmp_path, "ant") == ["new ant"]
    assert sorted(path.name for path in (tmp_path / "index").iterdir()) == sorted([manifest.data, "manifest.json"])


def test_the_same_build_again_gives_the_same_files(tmp_path: Path) -> None:
    assert build(tmp_path, "ant").files == build(tmp_path, "ant").files


def test_an_open_index_goes_on_when_it_is_replaced(tmp_path: Path) -> None:
    build(tmp_path, "old ant")
    index = open_index(tmp_path / "index")
    build(tmp_path, "new bee")
    assert [passage.text for passage in index.find(["ant"], 3)[0]] == ["old ant"]
    index.close()


def test_a_build_that_fails_leaves_the_old_index_and_can_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path, "old ant")
    with monkeypatch.context() as patch:
        patch.setattr(bm25, "_place", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path, "new ant")
    assert texts_found(tmp_path, "ant") == ["old ant"]
    with monkeypatch.context() as patch:  # what was read of the corpus is not read again
        patch.setattr("mempo.retrieval.index.read_passages", _interrupt)
        build_index([tmp_path / "corpus.jsonl"], tmp_path / "index", bm25_options=OPTIONS)
    assert texts_found(tmp_path, "ant") == ["new ant"]


def test_what_is_left_of_a_cut_build_is_not_used_for_other_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(bm25, "_place", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path, "running ants")
    with pytest.raises(IndexFileError, match="a build was cut there: run it again to finish it"):
        open_index(tmp_path / "index")
    build_index([tmp_path / "corpus.jsonl"], tmp_path / "index", bm25_options=Bm25Options(stemmer="none"))
    assert texts_found(tmp_path, "run") == []
    assert texts_found(tmp_path, "running") == ["running ants"]


def test_a_bad_line_stops_a_strict_build_and_is_counted_by_a_lenient_one(tmp_path: Path) -> None:
    path = corpus(tmp_path, "ant", "bee")
    path.write_text(path.read_text(encoding="utf-8") + '{"id": "9"}\n', encoding="utf-8")
    with pytest.raises(DataError, match="line 3"):
        build_index([path], tmp_path / "index", bm25_options=OPTIONS)
    bad: list[DataError] = []
    manifest = build_index([path], tmp_path / "index", bm25_options=OPTIONS, on_error=bad.append)
    assert (manifest.bad_lines, manifest.corpus.passages, [error.line for error in bad]) == (1, 2, [3])


def test_case_78_a_missing_corpus_is_named_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"not here\.jsonl: the corpus cannot be read: No such file"):
        build_index([tmp_path / "not here.jsonl"], tmp_path / "index", bm25_options=OPTIONS)


def test_a_folder_with_other_files_is_not_built_into(tmp_path: Path) -> None:
    path = corpus(tmp_path, "ant")
    with pytest.raises(IndexFileError, match="holds files that are not an index"):
        build_index([path], tmp_path, bm25_options=OPTIONS)
    assert path.exists()


@pytest.mark.parametrize(
    "name",
    ["passages.jsonl", "offsets.npy", "bm25/data.csc.index.npy", "bm25/vocab.index.json", "bm25/params.index.json"],
)
def test_a_cut_file_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / "index" / build(tmp_path, "ant", "bee").data / name
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(IndexFileError, match=rf"{path.name}: cut or foreign: {size - 1} bytes where .* says {size}"):
        open_index(tmp_path / "index")
    path.unlink()
    with pytest.raises(IndexFileError, match=rf"{path.name}: missing"):
        open_index(tmp_path / "index")


def test_a_changed_byte_is_found_when_hashes_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "index" / build(tmp_path, "ant", "bee").data / "passages.jsonl"
    path.write_bytes(path.read_bytes().replace(b"ant", b"ape"))
    with pytest.raises(IndexFileError, match=r"passages\.jsonl: its content has changed"):
        open_index(tmp_path / "index", verify=True)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "cut or damaged"),
        ('{"format": "mempo-index", "format_vers', "cut or damaged"),
        ('{"format": "mempo-index", "format_version": 1}', "cut or damaged"),
        ('{"format": "mempo-index", "format_version": 99}', "format version 99, and this release reads 1"),
        ('{"some": "json"}', "not the manifest of a mempo index"),
        ("[1]", "not the manifest of a mempo index"),
    ],
)
def test_a_cut_or_foreign_manifest_is_refused_with_the_reason(tmp_path: Path, content: str, reason: str) -> None:
    build(tmp_path, "ant")
    (tmp_path / "index" / "manifest.json").write_text(content, encoding="utf-8")
    with pytest.raises(IndexFileError, match=reason):
        open_index(tmp_path / "index")


def test_data_of_another_index_is_refused(tmp_path: Path) -> None:
    build(tmp_path, "ant")
    other = tmp_path / "other"
    other.mkdir()
    source = other / "index" / build(other, "a longer text about ants").data
    target = tmp_path / "index" / read_manifest(tmp_path / "index").data
    shutil.copy(source / "passages.jsonl", target / "passages.jsonl")
    with pytest.raises(IndexFileError, match="cut or foreign"):
        open_index(tmp_path / "index")


def test_a_second_build_in_one_folder_is_refused_while_the_first_is_under_way(tmp_path: Path) -> None:
    path = corpus(tmp_path, "ant")

    def build_again(what: str, done: int, total: int | None) -> None:
        with pytest.raises(IndexFileError, match="another process builds here"):
            build_index([path], tmp_path / "index", bm25_options=Bm25Options(k1=1.0))

    build_index([path], tmp_path / "index", bm25_options=OPTIONS, progress=build_again)
    assert texts_found(tmp_path, "ant") == ["ant"]


@pytest.mark.parametrize("megabytes", [1, 3])
def test_a_full_disk_is_named_and_the_old_index_stays(tmp_path: Path, megabytes: int) -> None:
    """On a tmpfs of its own. 1 MB is too small for the passages (2 MB), 3 MB for the terms as well."""
    enter = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*enter, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs Linux user namespaces to mount a small disk")
    (tmp_path / "disk").mkdir()
    small = corpus(tmp_path, "old ant", name="small.jsonl")
    large = corpus(tmp_path, *(f"{row} {row + 1} {row + 2} " * 5 for row in range(20_000)), name="large.jsonl")
    build_command = f"{sys.executable} -m mempo.cli.main index build --out {tmp_path}/disk/index --corpus"
    script = (
        f"mount -t tmpfs -o size={megabytes}m tmpfs {tmp_path}/disk && {build_command} {small} >/dev/null || exit 9\n"
        f"{build_command} {large}; status=$?\n"
        f"{sys.executable} -m mempo.cli.main index search --index {tmp_path}/disk/index ant\n"
        f"exit $status"
    )
    run = subprocess.run([*enter, "sh", "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 1, run.stderr
    assert "the disk is full. What was there before is intact" in run.stderr
    assert "Traceback" not in run.stderr
    assert "old ant" in run.stdout


def _interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_building_again_repairs_a_damaged_index_of_the_same_corpus(tmp_path: Path) -> None:
    # Equal bytes have an equal data folder: it must not be taken for whole because it is there.
    manifest = build(tmp_path, "ants", "bees")
    for damaged in ("passages.jsonl", "bm25/vocab.index.json"):
        path = tmp_path / "index" / manifest.data / damaged
        whole = path.read_bytes()
        for damage in (whole[:10], b"x" * len(whole)):
            path.write_bytes(damage)
            build(tmp_path, "ants", "bees")
            assert path.read_bytes() == whole
            assert texts_found(tmp_path, "ant") == ["ants"]


@pytest.mark.parametrize("name", ["manifest.json", "building/notes.txt"])
def test_a_folder_of_someone_else_is_refused_whatever_its_files_are_called(tmp_path: Path, name: str) -> None:
    path = tmp_path / "index" / name
    path.parent.mkdir(parents=True)
    path.write_text('{"name": "a web page"}', encoding="utf-8")
    with pytest.raises(IndexFileError, match="holds files that are not an index"):
        build(tmp_path, "ants")
    assert path.read_text(encoding="utf-8") == '{"name": "a web page"}'


def test_folders_beside_an_index_stay_when_it_is_replaced(tmp_path: Path) -> None:
    first = build(tmp_path, "ants")
    folder = tmp_path / "index"
    (folder / "data-raw").mkdir()
    os.rename(folder / first.data, tmp_path / "moved")  # to another disk
    (folder / first.data).symlink_to(tmp_path / "moved")
    second = build(tmp_path, "bees")
    assert sorted(path.name for path in folder.iterdir()) == sorted(["data-raw", second.data, "manifest.json"])
    assert (tmp_path / "moved" / "passages.jsonl").exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [("data", "/etc"), ("data", "../other"), ("data", "."), ("files", "../../etc/passwd"), ("files", "/etc/passwd")],
)
def test_a_manifest_that_leads_out_of_its_folder_is_refused(tmp_path: Path, field: str, value: str) -> None:
    build(tmp_path, "ants")
    path = tmp_path / "index" / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    manifest[field] = value if field == "data" else {value: {"size_bytes": 1, "sha256": ""}}
    path.write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(IndexFileError, match="outside of its folder"):
        open_index(tmp_path / "index")


def test_a_manifest_of_brackets_is_damaged(tmp_path: Path) -> None:
    build(tmp_path, "ants")
    (tmp_path / "index" / "manifest.json").write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(IndexFileError, match="cut or damaged"):
        open_index(tmp_path / "index")
    build(tmp_path, "ants")
    assert texts_found(tmp_path, "ant") == ["ants"]


@pytest.mark.parametrize("name", ["vocab.index.json", "params.index.json", "indptr.csc.index.npy", "../offsets.npy"])
def test_a_file_of_the_right_size_and_the_wrong_content_is_named_as_damage(tmp_path: Path, name: str) -> None:
    data = tmp_path / "index" / build(tmp_path, "ants").data
    path = data / "bm25" / name
    path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(IndexFileError, match=r"a file is damaged .*; build the index again"):
        open_index(tmp_path / "index")
