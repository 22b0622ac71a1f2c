"""Corpora: both line shapes, what is refused and where, and passages read back by row."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mempo.core import DataError, IndexFileError, Passage
from mempo.retrieval.corpus import StoredPassages, corpus_sha256, parse_passage, read_passages, write_passages
from mempo.retrieval.wire import render_contents

CASE_50 = [
    {"id": "1", "contents": '"T"\nbody'},
    {"id": "2", "title": "T", "text": "body"},
    {"id": "3", "contents": "one line"},
    {"id": "4"},
]


def write_lines(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_case_50_both_line_shapes_load_and_a_line_without_text_is_refused_with_its_number(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "corpus.jsonl", CASE_50)
    bad: list[DataError] = []
    assert list(read_passages([path], bad.append)) == [
        Passage("1", "T", "body"),
        Passage("2", "T", "body"),
        Passage("3", "", "one line"),
    ]
    assert [error.line for error in bad] == [4]
    with pytest.raises(DataError, match=r'corpus\.jsonl, line 4, field \'contents\': a passage needs "contents"'):
        list(read_passages([path]))


def test_case_51_a_byte_that_is_not_utf8_is_named_by_file_line_and_offset_whatever_the_locale(tmp_path: Path) -> None:
    first = b'{"id": "1", "contents": "\xc3\xa9t\xc3\xa9"}\n'
    # 28 bytes of the second line come before the bad one: `{"id": "2", "contents": "abc` .
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(first + b'{"id": "2", "contents": "abc\xf4\x28"}\n' + b'{"id": "3", "contents": "x"}\n')
    program = (
        "import sys\n"
        "from mempo.retrieval.corpus import read_passages\n"
        "bad = []\n"
        "kept = [p.id for p in read_passages([sys.argv[1]], bad.append)]\n"
        "print(kept, len(bad), ascii(str(bad[0])))\n"
    )
    environment = {**os.environ, "LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0"}
    run = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert run.stdout.startswith("['1', '3'] 1 ")
    assert f"corpus.jsonl, line 2: not UTF-8 at byte {len(first) + 28} of the file" in run.stdout


def test_case_52_empty_passages_are_left_out_and_counted(tmp_path: Path) -> None:
    passages = [Passage("x", "", ""), Passage("b", " ", "\n"), Passage("y", "", "words")]
    info = write_passages(passages, tmp_path)
    assert (info.passages, info.empty) == (1, 2)
    assert list(StoredPassages.open(tmp_path)) == [Passage("y", "", "words")]


def test_case_52_a_corpus_of_empty_passages_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no passage with any text"):
        write_passages([Passage("x", "", "")], tmp_path)


def test_of_passages_with_one_id_the_first_is_kept_and_the_others_are_reported(tmp_path: Path) -> None:
    info = write_passages([Passage("1", "", "first"), Passage("1", "", "second"), Passage("2", "", "x")], tmp_path)
    assert (info.passages, info.duplicates, info.duplicate_ids) == (2, 1, ("1",))
    assert StoredPassages.open(tmp_path)[0].text == "first"


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"contents": "x"}, "id"),
        ({"id": "", "contents": "x"}, "id"),
        ({"id": True, "contents": "x"}, "id"),
        ({"id": "1", "contents": None}, "contents"),
        ({"id": "1", "title": 3, "text": "x"}, "title"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(row: dict[str, object], field: str) -> None:
    with pytest.raises(DataError, match=f"line 9, field '{field}'"):
        parse_passage(row, file="c.jsonl", line=9)


def test_integer_ids_become_strings() -> None:
    assert parse_passage({"id": 7, "contents": "x"}).id == "7"


def test_gzipped_and_plain_files_and_both_shapes_have_one_hash(tmp_path: Path) -> None:
    plain = write_lines(tmp_path / "a.jsonl", [{"id": "1", "contents": '"T"\nbody'}])
    zipped = tmp_path / "b.jsonl.gz"
    zipped.write_bytes(gzip.compress(b'{"id": "1", "title": "T", "text": "body"}\n'))
    folder = tmp_path / "stored"
    folder.mkdir()
    info = write_passages(read_passages([zipped]), folder)
    assert corpus_sha256([plain]) == corpus_sha256([zipped]) == info.sha256


def test_a_plain_file_is_read_by_line_as_it_lies(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b'{"id": "1", "contents": "a"}\n{"id": "2", "contents": "\\"T\\"\\nb"}')  # no last line end
    passages, _ = StoredPassages.scan(path)
    assert [len(passages), passages[1], passages[0].text] == [2, Passage("2", "T", "b"), "a"]
    passages.close()


def test_a_stored_line_that_is_no_passage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b'{"id": "1", "contents": "a"}\n{"id": "2", "cont\n')
    passages, _ = StoredPassages.scan(path)
    with pytest.raises(IndexFileError, match=r"corpus\.jsonl, line 2: not a passage"):
        passages[1]
    passages.close()


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@settings(deadline=None)  # files are written
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=20))
def test_what_is_stored_is_read_back_by_row(
    tmp_path_factory: pytest.TempPathFactory, texts: list[tuple[str, str]]
) -> None:
    folder = tmp_path_factory.mktemp("stored")
    passages = [Passage(str(row), title, f"x{text}") for row, (title, text) in enumerate(texts)]
    write_passages(passages, folder)
    stored = StoredPassages.open(folder)
    assert [stored[row] for row in range(len(stored))] == passages == list(stored)
    stored.close()


@settings(deadline=None)
@given(TEXT.filter(lambda title: "\n" not in title), TEXT)
def test_contents_hold_title_and_text(title: str, text: str) -> None:
    passage = parse_passage({"id": "1", "contents": render_contents(title, text)})
    assert (passage.title, passage.text) == (title, text)
