"""The header says where a run comes from, and holds no secrets."""

from __future__ import annotations

import math
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from mempo.config import Config, key_values, load_config
from mempo.runlog import RunLogWriter, collect_run_info, git_revision, read_runlog, redact_command, redact_text


def test_the_header_holds_settings_given_and_defaulted_versions_seeds_time_and_command(tmp_path: Path) -> None:
    config = load_config("tiny", ["--seed", "5", "--retriever.deadline-seconds", "12.5"])
    run = collect_run_info(config, seeds={"run": 5}, prompts_hash="abc", command=["mempo", "train", "tiny"])
    RunLogWriter.create(tmp_path / "run.jsonl", run).close()
    back = read_runlog(tmp_path / "run.jsonl").header.run
    assert back == run
    assert set(back.config) == set(key_values(Config()))
    assert back.config["retriever.deadline_seconds"] == 12.5
    assert (back.config["seed"], back.given["seed"]) == (5, "command line")
    assert back.given["rollout.group_size"] == "preset tiny"
    assert "rollout.top_p" not in back.given
    assert {"mempo", "msgspec", "numpy"} <= set(back.packages)
    assert (back.seeds, back.prompts_hash, back.command) == ({"run": 5}, "abc", ("mempo", "train", "tiny"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", back.started)


def test_any_dataclass_of_settings_can_be_noted(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Args:
        tasks: Path
        seed: int = 0
        limit: float = math.inf

    run = collect_run_info(Args(Path("a.jsonl"), seed=1), seeds={}, command=["mempo", "eval"])
    RunLogWriter.create(tmp_path / "run.jsonl", run).close()
    assert read_runlog(tmp_path / "run.jsonl").header.run == run
    assert run.config == {"tasks": "a.jsonl", "seed": 1, "limit": math.inf}
    assert run.given == {"tasks": "code", "seed": "code"}


def test_secrets_never_appear_in_the_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Args:
        api_key: str = "config-secret-1"
        url: str = "http://user:config-secret-2@host:8000/v1?api_key=config-secret-3"
        note: str = "sent environment-secret"
        headers: tuple[str, ...] = ("Authorization: Bearer config-secret-4",)
        max_tokens: int = 7

    monkeypatch.setenv("OPENAI_API_KEY", "environment-secret")
    monkeypatch.setenv("UNRELATED", "a-value-of-the-environment")
    command = [
        "mempo",
        "eval",
        "--api-key",
        "command-secret-1",
        "--token=command-secret-2",
        "--x",
        "environment-secret",
    ]
    RunLogWriter.create(tmp_path / "run.jsonl", collect_run_info(Args(), seeds={}, command=command)).close()
    text = (tmp_path / "run.jsonl").read_text(encoding="utf-8")
    assert "secret" not in text
    assert "a-value-of-the-environment" not in text
    run = read_runlog(tmp_path / "run.jsonl").header.run
    assert run.command == ("mempo", "eval", "--api-key", "***", "--token=***", "--x", "***")
    assert run.config["url"] == "http://***@host:8000/v1?api_key=***"
    assert run.config["max_tokens"] == 7


def test_harmless_words_are_left_alone() -> None:
    environment = {"DEBUG_KEY": "1", "HOME": "/home/somebody"}
    for text in ("tokens = 1", "/home/somebody/hf_cache_folder", "the bearer of this letter", "a basic question", "1"):
        assert redact_text(text, environment) == text
    command = ["mempo", "train", "--keys", "a", "--rollout.max-response-tokens", "64"]
    assert redact_command(command, environment) == tuple(command)


def test_an_option_without_a_value_hides_no_option_after_it() -> None:
    assert redact_command(["--api-key", "--seed", "1"], {}) == ("--api-key", "--seed", "1")


def test_the_revision_is_that_of_the_repository_and_says_where_it_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    assert git_revision(str(tmp_path)) is None

    def git(*words: str) -> None:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True, timeout=30)

    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-q", "--no-verify", "-m", "first")
    revision = git_revision(str(tmp_path))
    assert revision is not None
    assert re.fullmatch(r"[0-9a-f]{40}", revision)
    (tmp_path / "a").write_text("2")
    assert git_revision(str(tmp_path)) == f"{revision}-dirty"


def test_without_git_there_is_no_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert git_revision() is None
