"""`mempo config`: what is printed can be used, and mistakes end with a status and a name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mempo.cli.main import main
from mempo.config import Config, key_values, load_config, render_reference


def test_show_prints_a_config_that_loads_to_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--advantage.alpha", "0.3", "--advantage.gates", "mixed_groups", "--log.progress", "False"]
    assert main(["config", "show", "paper", *words]) == 0
    path = tmp_path / "mine.toml"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    assert "alpha = 0.3  # command line" in path.read_text(encoding="utf-8")
    assert load_config(path) == load_config("paper", words)


def test_show_as_json_has_values_and_origins(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "tiny", "--json", "--seed", "4"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert set(shown["config"]) == set(key_values(Config()))
    assert (shown["config"]["seed"], shown["given"]["seed"]) == (4, "command line")


def test_check_goes_through_all_files_and_fails_if_one_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad, missing = tmp_path / "good.toml", tmp_path / "bad.toml", tmp_path / "missing.toml"
    good.write_text("seed = 1")
    bad.write_text("sed = 1")
    missing.write_text('[tasks]\nfiles = ["absent.jsonl"]')
    assert main(["config", "check", str(bad), str(good), str(missing)]) == 1
    out, err = capsys.readouterr()
    assert out == f"{good}: ok\n"
    assert "unknown key sed (bad.toml); did you mean seed?" in err
    assert str(tmp_path / "absent.jsonl") in err
    assert main(["config", "check", str(good), str(missing), "--skip-inputs"]) == 0


def test_keys_prints_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "keys"]) == 0
    assert capsys.readouterr().out == render_reference(Config)


def test_the_messages_in_the_docs_are_those_that_are_printed(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (repository / "docs/config.md").read_text(encoding="utf-8")
    sessions = re.findall(r"^    \$ mempo (.*)\n    (error: .*)$", page, flags=re.MULTILINE)
    assert len(sessions) == 2
    for command, message in sessions:
        assert main(command.split()) == 1
        assert capsys.readouterr().err == f"{message}\n"


def test_check_of_nothing_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check"]) == 1
    assert "give at least one config" in capsys.readouterr().err
