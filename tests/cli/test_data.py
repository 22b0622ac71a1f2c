from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mempo.cli.main import EXIT_FAILED, EXIT_OK, main
from mempo.data import read_tasks
from mempo.rewards.answers import score_task


def write_items(path: Path, *answers: str, source: str = "demo") -> Path:
    rows = [
        {"id": f"{source}{i}", "question": f"what is {source} {i}", "answers": [answer], "source": source}
        for i, answer in enumerate(answers)
    ]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def test_check_says_what_is_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_items(tmp_path / "a.jsonl", "yes", "1,969", "Mars", "the Red Planet", "a; b")
    assert main(["data", "check", str(path)]) == EXIT_OK
    out = capsys.readouterr().out
    assert "a.jsonl: 5 tasks (mempo)" in out
    assert "5 tasks of demo" in out
    assert "2 several words, 1 yes/no, 1 number, 1 one word" in out
    assert "warnings: 1" in out
    assert "line 5, field 'answers': a gold answer with a separator is left out of compositions (value: 'a; b')" in out


def test_check_lists_all_faults_and_fails_unless_lenient(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_items(tmp_path / "a.jsonl", "A", "", "C", " ")
    assert main(["data", "check", str(path)]) == EXIT_FAILED
    out = capsys.readouterr().out
    assert "cannot be used: 2" in out
    assert "line 2, field 'answers'" in out
    assert "line 4, field 'answers'" in out
    assert main(["data", "check", str(path), "--lenient"]) == EXIT_OK


def test_check_prints_json_for_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_items(tmp_path / "a.jsonl", "A", "")
    assert main(["data", "check", str(path), "--json"]) == EXIT_FAILED
    [found] = json.loads(capsys.readouterr().out)
    assert (found["file"], found["format"], found["tasks"], found["objectives"]) == (str(path), "mempo", 1, {"1": 1})
    assert [(error["line"], error["field"]) for error in found["errors"]] == [(2, "answers")]


def test_a_long_list_of_faults_is_cut_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_items(tmp_path / "a.jsonl", "A", *[""] * 25)
    assert main(["data", "check", str(path)]) == EXIT_FAILED
    assert "... and 5 more" in capsys.readouterr().out  # 20 of 25 are shown


def test_convert_there_and_back_gives_the_same_file(tmp_path: Path) -> None:
    first = write_items(tmp_path / "a.jsonl", "A", "B")
    ours, parquet, back = (tmp_path / name for name in ("ours.jsonl", "b.parquet", "back.jsonl"))
    for source, target in ((first, ours), (ours, parquet), (parquet, back)):
        assert main(["data", "convert", str(source), str(target)]) == EXIT_OK
    assert back.read_bytes() == ours.read_bytes()
    assert read_tasks(parquet).format == "verl"


def test_a_file_is_overwritten_only_by_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    items, out = write_items(tmp_path / "a.jsonl", "A", "B"), tmp_path / "out.jsonl"
    out.write_text("precious", encoding="utf-8")
    for command in (["convert", str(items), str(out)], ["compose", str(items), "--objectives", "2", "--out", str(out)]):
        assert main(["data", *command]) == EXIT_FAILED
        assert "--force overwrites it" in capsys.readouterr().err
        assert out.read_text(encoding="utf-8") == "precious"
    assert main(["data", "convert", str(items), str(out), "--force"]) == EXIT_OK
    assert len(read_tasks(out)) == 2


def test_convert_stops_at_the_first_fault_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    items, out = write_items(tmp_path / "a.jsonl", "A", "", "C"), tmp_path / "out.jsonl"
    assert main(["data", "convert", str(items), str(out)]) == EXIT_FAILED
    assert "a.jsonl, line 2, field 'answers'" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    assert main(["data", "convert", str(items), str(out), "--lenient"]) == EXIT_OK
    assert "skipped: 1" in capsys.readouterr().out
    assert len(read_tasks(out)) == 2


def test_compose_interleaves_files_and_says_what_it_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write_items(tmp_path / "a.jsonl", "A", "x; y", "C", source="a")
    b = write_items(tmp_path / "b.jsonl", "D", "E", source="b")
    out = tmp_path / "out.jsonl"
    assert main(["data", "compose", str(a), str(b), "--objectives", "2", "--out", str(out)]) == EXIT_OK
    # In turn a0 b0 a1 b1 a2; a1's only answer holds a separator.
    assert [task.gold for task in read_tasks(out)] == ["A; D", "E; C"]
    said = capsys.readouterr().out
    assert "2 tasks of 2 questions, in the order of the files" in said
    assert "a1: a gold answer holds a separator: 'x; y'" in said


def test_a_shuffled_composition_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    items = write_items(tmp_path / "a.jsonl", *map(str, range(30)))
    for name, seed in (("one", "1"), ("again", "1"), ("two", "2")):
        out = str(tmp_path / f"{name}.jsonl")
        command = ["data", "compose", str(items), "--objectives", "3", "--out", out, "--shuffle", "--seed", seed]
        assert main(command) == EXIT_OK
    one, again, two = ((tmp_path / f"{name}.jsonl").read_bytes() for name in ("one", "again", "two"))
    assert one == again != two


@pytest.mark.parametrize("command", [["check"], ["compose", "--objectives", "2", "--out", "never.jsonl"]])
def test_no_file_is_an_error(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", *command]) == EXIT_FAILED
    assert "give at least one task file" in capsys.readouterr().err


def test_case_77_composing_nothing_writes_an_empty_file(tmp_path: Path) -> None:
    empty = write_items(tmp_path / "a.jsonl")
    out = tmp_path / "out.jsonl"
    assert main(["data", "compose", str(empty), "--objectives", "4", "--out", str(out)]) == EXIT_OK
    assert read_tasks(out).tasks == ()


def run_elsewhere(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    environment |= {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "mempo.cli.main", "data", *argv]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", timeout=60)


def test_cases_51_and_78_it_works_in_a_folder_with_blanks_without_home_and_under_lang_c(tmp_path: Path) -> None:
    folder = tmp_path / "two words"
    folder.mkdir()
    write_items(folder / "my items.jsonl", "巴黎", "1969")
    made = run_elsewhere(folder, "compose", "my items.jsonl", "--objectives", "2", "--out", "out/two.jsonl")
    assert (made.returncode, made.stderr) == (0, "")
    assert [task.gold for task in read_tasks(folder / "out" / "two.jsonl")] == ["巴黎; 1969"]
    write_items(folder / "b.jsonl", "1969", source="巴黎")
    checked = run_elsewhere(folder, "check", "b.jsonl")
    assert (checked.returncode, checked.stderr) == (0, "")
    # The locale's encoding is ASCII there: what it cannot show is escaped, and no reason to fail.
    assert "1 tasks of 巴黎" in checked.stdout or "1 tasks of \\u5df4\\u9ece" in checked.stdout
    missing = run_elsewhere(folder, "check", "none.jsonl")
    assert missing.returncode == EXIT_FAILED
    assert "none.jsonl: no such task file; write one with `mempo data convert`" in missing.stderr


@pytest.mark.parametrize("command", ["check", "convert", "compose"])
def test_each_help_shows_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["data", command, "--help"])
    assert f"Examples:\n  mempo data {command} " in capsys.readouterr().out


@pytest.mark.data
def test_four_real_questions_are_composed_and_their_golds_score_1(
    shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(shared_data / "qa" / f"{name}.jsonl") for name in ("hotpotqa", "nq")]
    out = tmp_path / "four.jsonl"
    assert main(["data", "compose", *files, "--objectives", "4", "--out", str(out)]) == EXIT_OK
    assert "172 tasks of 4 questions" in capsys.readouterr().out  # 198 + 492 = 690 = 4 * 172 + 2
    tasks = read_tasks(out)
    assert all(score_task(task.gold, task).em == 1.0 for task in tasks)
    golds: list[Any] = [task.gold for task in tasks]
    shifted = [score_task(gold, task).em for gold, task in zip(golds[1:] + golds[:1], tasks, strict=True)]
    assert sum(shifted) / len(shifted) < 0.05
