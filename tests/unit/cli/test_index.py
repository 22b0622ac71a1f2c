"""`mempo index build | info | search` and the token of `mempo serve-retriever`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mempo.cli.listening import ListenArgs
from mempo.cli.main import main
from mempo.core import ConfigError


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    rows = [{"id": "1", "contents": '"Paris"\nCapital of France'}, {"id": "1", "contents": "again"}, {"id": "2"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_build_info_and_search(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "index")
    assert main(["index", "build", "--corpus", str(corpus), "--out", out, "--lenient"]) == 0
    built = capsys.readouterr()
    assert "1 duplicate, 0 empty, 1 bad" in built.out
    assert "left out: " in built.err
    assert "line 3" in built.err
    assert main(["index", "info", "--index", out, "--verify", "--corpus", str(corpus), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["corpus"]["duplicate_ids"] == ["1"]
    assert main(["index", "search", "--index", out, "capital", "zzzzqqqq", "--json"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert [passage["title"] for passage in first["passages"]] == ["Paris"]
    assert second == {"query": "zzzzqqqq", "passages": []}


def test_a_bad_line_is_an_error_of_one_line(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index", "build", "--corpus", str(corpus), "--out", str(tmp_path / "index")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert "line 3, field 'contents'" in error


def test_an_index_of_another_corpus_is_told_apart(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, other = str(tmp_path / "index"), tmp_path / "other.jsonl"
    other.write_text('{"id": "1", "contents": "something else"}\n', encoding="utf-8")
    assert main(["index", "build", "--corpus", str(corpus), "--out", out, "--lenient"]) == 0
    assert main(["index", "info", "--index", out, "--corpus", str(other)]) == 1
    assert "made of another corpus" in capsys.readouterr().err


def test_a_token_comes_from_a_variable_or_a_file_and_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text("hush\n", encoding="utf-8")
    monkeypatch.setenv("TOKEN_OF_TEST", "hush-hush")
    assert ListenArgs().read_token() is None
    assert ListenArgs(token_env="TOKEN_OF_TEST").read_token() == "hush-hush"
    assert ListenArgs(token_file=file).read_token() == "hush"
    with pytest.raises(ConfigError, match="not both") as error:
        ListenArgs(token_env="TOKEN_OF_TEST", token_file=file).read_token()
    assert "hush" not in str(error.value)
    with pytest.raises(ConfigError, match=r"UNSET_OF_TEST .* holds no token"):
        ListenArgs(token_env="UNSET_OF_TEST").read_token()


def test_what_is_served_must_be_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve-retriever"]) == 1
    assert "--index DIR, or --corpus FILE --faiss FILE --encoder NAME" in capsys.readouterr().err
    assert main(["serve-retriever", "--index", "x", "--corpus", "y"]) == 1
    assert "not both" in capsys.readouterr().err
