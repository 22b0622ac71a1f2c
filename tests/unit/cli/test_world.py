"""`mempo data world` and `mempo data teach`, as a user calls them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from mempo.cli.main import main
from mempo.data import read_tasks
from mempo.retrieval.corpus import corpus_sha256, read_passages
from mempo.runlog import read_runlog

FILES = ["corpus.jsonl", "tasks_eval.jsonl", "tasks_train.jsonl", "world.json"]


def run(*words: object) -> None:
    assert main([str(word) for word in words]) == 0


def titles(folder: Path) -> list[str]:
    return [passage.title for passage in read_passages([folder / "corpus.jsonl"])]


def test_a_world_is_four_files_that_fit_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("data", "world", "--seed", 3, "--passages", 500, "--tasks", 20, "--objectives", 3, "--out", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    facts = json.loads((tmp_path / "world.json").read_text())
    assert (facts["seed"], facts["mode"], facts["passages"], facts["tasks"]) == (
        3,
        "open",
        500,
        {"train": 20, "eval": 4},
    )
    assert facts["corpus_sha256"] == corpus_sha256([tmp_path / "corpus.jsonl"])
    for split in ("train", "eval"):
        tasks = read_tasks(tmp_path / f"tasks_{split}.jsonl")
        assert {title for task in tasks for o in task.objectives for title in o.supporting_titles} <= set(
            titles(tmp_path)
        )
        assert {len(task.objectives) for task in tasks} == {3}
    assert "500 passages, 20 tasks (train), 4 tasks (eval)" in capsys.readouterr().out


@pytest.mark.parametrize("mode", [["--passages", 500], ["--mode", "closed"]])
def test_the_same_seed_gives_the_same_bytes(tmp_path: Path, mode: Sequence[object]) -> None:
    for folder in ("a", "b"):
        run("data", "world", *mode, "--tasks", 10, "--out", tmp_path / folder)
    for name in FILES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_one_split_alone_has_its_own_corpus(tmp_path: Path) -> None:
    for split in ("train", "eval"):
        run("data", "world", "--passages", 200, "--tasks", 7, "--split", split, "--out", tmp_path / split)
        assert len(read_tasks(tmp_path / split / f"tasks_{split}.jsonl")) == 7
        assert len(titles(tmp_path / split)) == 200
    assert not set(titles(tmp_path / "train")) & set(titles(tmp_path / "eval"))


def test_a_world_is_not_overwritten_without_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["data", "world", "--mode", "closed", "--tasks", "5", "--out", str(tmp_path)]
    assert main(command) == 0
    assert main(command) == 1
    assert "a world is there already; --force overwrites it" in capsys.readouterr().err
    assert main([*command, "--force"]) == 0


def test_passages_of_a_closed_world_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "world", "--mode", "closed", "--passages", "9", "--out", str(tmp_path)]) == 1
    assert "--passages is for the open mode" in capsys.readouterr().err


def test_the_teacher_writes_a_run_log_and_says_how_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("data", "world", "--mode", "closed", "--tasks", 40, "--out", tmp_path)
    capsys.readouterr()
    tasks, corpus, out = tmp_path / "tasks_train.jsonl", tmp_path / "corpus.jsonl", tmp_path / "teacher.jsonl"
    run("data", "teach", tasks, "--corpus", corpus, "--top-k", 2, "--out", out, "--json")
    summary = json.loads(capsys.readouterr().out)
    assert summary["written"] == summary["trajectories"] == 40
    assert summary["em"] == summary["facts_kept"] == 1.0
    records = list(read_runlog(out).trajectories())
    assert [record.trajectory.task.id for record in records] == [task.id for task in read_tasks(tasks)]
    assert all(record.trajectory.well_formed for record in records)


def test_flawed_trajectories_can_be_kept_by_their_outcome(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("data", "world", "--mode", "closed", "--tasks", 40, "--out", tmp_path)
    shares = {}
    for keep in ("right", "wrong"):
        capsys.readouterr()
        out = tmp_path / f"{keep}.jsonl"
        flaw = ["--flaw.habit", 0.7, "--rollouts", 2, "--keep", keep, "--json"]
        run("data", "teach", tmp_path / "tasks_train.jsonl", "--corpus", tmp_path / "corpus.jsonl", *flaw, "--out", out)
        shares[keep] = json.loads(capsys.readouterr().out)["written"]
        scores = [record.trajectory.scores["em"] for record in read_runlog(out).trajectories()]
        assert set(scores) == {1.0 if keep == "right" else 0.0}
    assert shares["right"] + shares["wrong"] == 80


def test_the_teacher_wants_one_place_to_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "teach", "tasks.jsonl", "--out", str(tmp_path / "out.jsonl")]) == 1
    assert "give either --corpus or --retriever" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [("--hops", "9"), ("--objectives", "17"), ("--tasks", "-1"), ("--passages", "0")])
def test_a_world_that_cannot_be_made_leaves_the_one_that_is_there(tmp_path: Path, wrong: tuple[str, str]) -> None:
    command = ["data", "world", "--passages", "250", "--tasks", "2", "--out", str(tmp_path)]
    assert main(command) == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert main([*command, "--force", *wrong]) == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("option", ["--rollouts", "--concurrency", "--top-k", "--max-turns"])
def test_a_teacher_that_could_not_play_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    out = tmp_path / "out.jsonl"
    assert main(["data", "teach", "tasks.jsonl", "--corpus", "c.jsonl", "--out", str(out), option, "0"]) == 1
    assert capsys.readouterr().err == f"error: {option} must be at least 1 (got 0)\n"
    assert not out.exists()
