"""What `mempo sft-data` keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mempo.cli.main import main
from mempo.runlog import read_runlog


@pytest.mark.parametrize(("options", "kept"), [([], 1), (["--mode", "qa"], 1), (["--mode", "mem1"], 0)])
def test_answers_of_a_teacher_are_judged_in_the_mode_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], kept: int
) -> None:
    # "The Beatles" and "Beatles" are one answer to `qa`, and two to `mem1`, which keeps articles.
    (tmp_path / "tasks.jsonl").write_text('{"id": "a", "question": "Who?", "answers": ["Beatles"], "source": "toy"}\n')
    (tmp_path / "corpus.jsonl").write_text('{"id": "1", "title": "T", "text": "x"}\n')
    turns = ["<mem>m</mem>\n<think>t</think>\n<answer>The Beatles</answer>"]
    (tmp_path / "script.json").write_text(json.dumps(turns))
    files = {"--script": "script.json", "--corpus": "corpus.jsonl", "--out": "out"}
    words = [word for option, name in files.items() for word in (option, str(tmp_path / name))]
    assert main(["sft-data", str(tmp_path / "tasks.jsonl"), *words, "--yes", *options]) == 0
    verdicts = f"of all: {kept} right, {1 - kept} wrong, 0 unanswered, 0 malformed"
    assert f"{kept} trajectories; {verdicts}" in capsys.readouterr().out
    assert len(list(read_runlog(tmp_path / "out" / "teacher.jsonl").trajectories())) == kept
