from __future__ import annotations

import errno
import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mempo.core import DataError
from mempo.core.files import atomic_write, parse_json, read_jsonl, read_lines, render_json, write_jsonl


def test_an_error_while_writing_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old", encoding="utf-8")

    def interrupted() -> None:
        with atomic_write(path) as file:
            file.write("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text(encoding="utf-8") == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_the_file_is_not_there_before_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.txt"
    with atomic_write(path) as file:
        file.write("x")
        assert not path.exists()
    assert path.read_bytes() == b"x"


@pytest.mark.parametrize("name", ["a.bin", "a.bin.gz"])
def test_bytes_are_written_as_they_are_and_gz_is_compressed(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with atomic_write(path, "wb") as file:
        file.write(b"\x00\xff\r\n")
    content = path.read_bytes()
    assert (gzip.decompress(content) if name.endswith("gz") else content) == b"\x00\xff\r\n"


def test_equal_content_gives_equal_gz_bytes_whatever_name_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, now in (("a.jsonl.gz", 1e9), ("b.jsonl.gz", 2e9)):
        monkeypatch.setattr("time.time", lambda now=now: now)
        write_jsonl(tmp_path / name, [{"a": "é"}])
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()


def test_the_mark_crlf_blank_lines_and_a_missing_last_line_end_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \n{"a": 2}')
    assert list(read_jsonl(path)) == [(1, {"a": 1}), (4, {"a": 2})]


def test_gz_is_told_by_its_first_bytes_and_not_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(gzip.compress(b'{"a": 1}\n'))
    assert list(read_jsonl(path)) == [(1, {"a": 1})]


def test_a_cut_gz_stream_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n' * 100)[:-9])
    with pytest.raises(DataError, match="broken or cut"):
        list(read_jsonl(path))


def test_case_51_broken_bytes_are_named_by_file_line_and_byte_and_lenient_skips_one(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": "\xf4\x28"}\n{"a": 3}\n')
    # Line 1 has 9 bytes with its end; `{"a": "` has 7: the bad byte is number 16, from 0.
    with pytest.raises(DataError, match=r"bad\.jsonl, line 2: not UTF-8 at byte 16 .*byte 7 of the line"):
        list(read_jsonl(path))
    skipped: list[DataError] = []
    assert [row["a"] for _, row in read_jsonl(path, skipped.append)] == [1, 3]
    assert [error.line for error in skipped] == [2]


def test_the_byte_counts_from_the_files_start_where_a_mark_stands_before_it(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"\xef\xbb\xbf\xf4(")
    with pytest.raises(DataError, match="at byte 3 of the file"):
        list(read_jsonl(path))


def test_case_51_reading_and_writing_are_utf8_under_lang_c(tmp_path: Path) -> None:
    code = (
        "from mempo.core.files import read_jsonl, write_jsonl\n"
        "write_jsonl('a.jsonl', [{'a': '巴黎'}])\n"
        "assert next(read_jsonl('a.jsonl')) == (1, {'a': '\\u5df4\\u9ece'})\n"
    )
    environment = {**os.environ, "LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "utf-8"}
    script = tmp_path / "script.py"
    script.write_text(code, encoding="utf-8")
    subprocess.run([sys.executable, str(script)], check=True, cwd=tmp_path, env=environment, timeout=60)
    assert "巴黎" in (tmp_path / "a.jsonl").read_bytes().decode("utf-8")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1}\n{"a": ', "line 2: not JSON, and the file ends here"),
        ("[1]\n", "line 1: each line must be a JSON object"),
        ('{"a": NaN}\n', "NaN is not JSON"),
        ('{"a": "\\ud800"}\n', "half of a surrogate pair"),
        ("[" * 100_000 + "\n", "nested too deeply"),
    ],
)
def test_a_line_that_is_no_object_is_an_error_with_its_reason(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        list(read_jsonl(path))


def test_case_78_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"not there\.jsonl: the file cannot be read: No such file"):
        list(read_jsonl(tmp_path / "not there.jsonl"))


def test_lines_are_read_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"a\nb\xff\n")
    lines = read_lines(path)
    assert next(lines) == (1, "a")  # the broken second line has not been looked at
    with pytest.raises(DataError):
        next(lines)
    lines.close()  # type: ignore[attr-defined]


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(json_values)
def test_json_comes_back_as_it_was(value: object) -> None:
    line = render_json({"v": value})
    assert "\n" not in line
    assert parse_json(line) == {"v": value}


def test_a_link_stays_a_link_and_the_file_behind_it_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real.txt").write_text("old", encoding="utf-8")
    link = tmp_path / "link.txt"
    link.symlink_to("real.txt")
    with atomic_write(link) as file:
        file.write("new")
    assert link.is_symlink()
    assert (tmp_path / "real.txt").read_text(encoding="utf-8") == "new"


def test_what_is_no_file_is_never_replaced(tmp_path: Path) -> None:
    # A rename onto /dev/stdout or a named pipe would put a plain file in its place.
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(DataError, match="is no file that can be replaced"), atomic_write(path):
            pass
    assert (tmp_path / "pipe").is_fifo()
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"]


@pytest.mark.parametrize("text", ["1e999", '{"a": [-1e400]}'])
def test_a_number_too_large_for_a_float_is_refused(text: str) -> None:
    # Read as infinite it could not be written again.
    with pytest.raises(ValueError, match="too large"):
        parse_json(text)


def test_a_full_disk_is_told_with_the_file_that_was_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left on device") as caught, atomic_write(tmp_path / "a.txt"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as a write says it: without a name
    assert caught.value.filename == str(tmp_path / "a.txt")
    assert list(tmp_path.iterdir()) == []
