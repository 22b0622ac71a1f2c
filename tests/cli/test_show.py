"""`mempo show` on logs that `mempo rollout` and the run log's own writer made."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mempo.cli.main import main
from mempo.config import RolloutConfig
from mempo.core import ErrorRecord, Objective, StopReason, Task, ToolCall, Trajectory, Turn, Usage
from mempo.data import write_tasks
from mempo.runlog import RunLogWriter, collect_run_info

CALL = '<mem>Missing: it.</mem><think>look</think><tool_call>{"name": "search", "arguments": {"query": "capital"}}</tool_call>'  # noqa: E501
ANSWER = "<mem>It is Paris.</mem><think>done</think><answer>Paris</answer>"


def question(name: str, *, answers: tuple[str, ...] = ("right",)) -> Task:
    return Task(name, (Objective(f"What is {name}?", answers),))


def tried(
    name: str, reward: float | None, *, rollout: int = 0, em: float | None = None, f1: float = 0.0, answer: str = "a"
) -> Trajectory:
    turn = Turn(0, "", memory=f"memory of {name}", answer=answer, usage=Usage(10, 5))
    scores = {"f1": f1} if em is None else {"em": em, "f1": f1}
    return Trajectory(question(name), rollout, (turn,), StopReason.ANSWERED, seed=0, reward=reward, scores=scores)


@pytest.fixture
def log(tmp_path: Path) -> RunLogWriter:
    return RunLogWriter.create(tmp_path / "run.jsonl", collect_run_info(RolloutConfig(), seeds={"run": 0}))


@pytest.fixture
def training(log: RunLogWriter) -> Path:
    """Steps 1 and 2 of two tasks with two tries each, and an evaluation before them and after."""
    for step in (0, 1, 2):
        if step:
            for index, reward in enumerate((0.0, 1.0)):
                log.write_trajectory(tried("a", reward, rollout=index, f1=0.5), step=step)
                log.write_trajectory(tried("b", 0.25, rollout=index, f1=0.75 * index), step=step)
        if step != 1:
            log.write_trajectory(tried("held", None, em=step / 2), step=step, split="eval")
        log.write_metrics(step, {"reward": 0.5})
    log.close()
    return log.path


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def brief(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[tuple[str, ...]]:
    """Task, place and try of each trajectory that is shown."""
    assert main(["show", str(path), "--brief", *options]) == 0
    return [tuple(line.partition(":")[0].split(", ")) for line in lines(capsys) if not line.startswith("there are")]


def test_a_rollout_is_shown_turn_by_turn_as_mempo_run_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks, script, corpus, out = (tmp_path / name for name in ("tasks.jsonl", "script.json", "corpus.jsonl", "out"))
    write_tasks(tasks, [Task("t0", (Objective("Capital of France?", ("Paris",)),))])
    script.write_text(json.dumps([CALL, ANSWER]), encoding="utf-8")
    corpus.write_text('{"id": "1", "title": "France", "text": "Paris.\\u001b[31m"}\n', encoding="utf-8")
    options = ["--script", str(script), "--corpus", str(corpus)]
    assert main(["run", "Capital of France?", *options]) == 0
    live = lines(capsys)
    assert main(["rollout", str(tasks), "--out", str(out), *options]) == 0
    capsys.readouterr()
    for path in (out, out / "run.jsonl"):
        assert main(["show", str(path)]) == 0
        head, *shown = lines(capsys)
        assert head == "t0, eval, try 0: em 1.000, f1 1.000, exact 1.000, format 1.000, answered"
        # Everything but the last line of `mempo run`, which tells seconds.
        assert shown[: len(live) - 1] == live[:-1]
        assert shown[len(live) - 1].startswith("answered after 2 turns, ")
        assert shown[len(live) :] == ["gold       Paris", ""]


def test_what_a_training_measured_of_a_turn_is_shown_with_it(
    log: RunLogWriter, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ToolCall("search", {"query": "q"})
    turns = (
        Turn(0, "", memory="m", call=call, memory_probability=0.5, baseline=0.25, memory_reward=0.25),
        Turn(1, "", memory="m", answer="x; y", memory_probability=0.125),  # memory.baseline = "none"
        Turn(2, "broken", problems=("missing_memory",)),
    )
    task = Task("two", (Objective("First?", ("x", "ex")), Objective("Second?", ("z",))))
    errors = (ErrorRecord("policy", "PolicyError", "the server is gone"),)
    with log:
        found = Trajectory(task, 3, turns, StopReason.POLICY_ERROR, seed=0, errors=errors, reward=0.0)
        log.write_trajectory(found, step=7)
        log.write_trajectory(replace(found, turns=turns[:2], stop=StopReason.ANSWERED), step=8)
    assert main(["show", str(log.path)]) == 0
    shown = lines(capsys)
    assert shown[0] == "two, train step 7, try 3: reward 0.000, policy_error"
    assert [line.split()[1:] for line in shown if line.startswith("question")] == [["First?"], ["Second?"]]
    assert [line.split(maxsplit=1)[1].rstrip() for line in shown if line.startswith("credit")] == [
        "P(answer|memory) 0.5, baseline 0.25, reward +0.25",
        "P(answer|memory) 0.125",
    ]
    assert any(line.split() == ["problems", "missing_memory"] for line in shown)
    assert any("PolicyError: the server is gone" in line for line in shown)
    assert main(["show", str(log.path), "--step", "8"]) == 0
    shown = [line.rstrip() for line in lines(capsys)]
    assert shown[-4:] == ["answer 1   x", "answer 2   y", "gold       x; z", ""]


def test_nothing_that_a_model_or_a_task_says_reaches_the_terminal_as_a_command(
    log: RunLogWriter, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b]0;renamed\x07\x9b2J \ud83d [bold]not markup[/bold]"
    task = Task(f"{evil}\nsecond line", (Objective(evil, (evil,)),))
    turn = Turn(0, evil, memory=evil, thought=evil, call=ToolCall(evil, {evil: evil}), observation=evil, answer=evil)
    errors = (ErrorRecord("tool", evil, evil),)
    with log:
        log.write_trajectory(Trajectory(task, 0, (turn,), StopReason.MALFORMED, seed=0, errors=errors), split=evil)
    ran = subprocess.run(
        [sys.executable, "-m", "mempo.cli.main", "show", str(log.path)], capture_output=True, timeout=60, check=True
    )
    shown = ran.stdout.decode()
    assert not {"\x1b", "\x07", "\x9b"} & set(shown)
    assert "[bold]not markup[/bold]" in shown
    assert "\\ud83d" in shown
    assert "second line" in shown.splitlines()[0]
    assert main(["show", str(log.path), "--task", "absent"]) == 1
    assert not {"\x1b", "\x07", "\x9b"} & set(capsys.readouterr().err)


def test_task_step_and_split_choose(training: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert brief(training, capsys, "--task", "b", "--step", "2") == [
        ("b", "train step 2", "try 0"),
        ("b", "train step 2", "try 1"),
    ]
    assert brief(training, capsys, "--split", "eval") == [
        ("held", "eval step 0", "try 0"),
        ("held", "eval step 2", "try 0"),
    ]
    assert brief(training, capsys, "--split", "eval", "--step", "0") == [("held", "eval step 0", "try 0")]


def test_the_order_says_which_come_first(training: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = brief(training, capsys, "--limit", "2")
    assert first == [("held", "eval step 0", "try 0"), ("a", "train step 1", "try 0")]
    last = brief(training, capsys, "--order", "last", "--limit", "2")
    assert last == [("held", "eval step 2", "try 0"), ("b", "train step 2", "try 1")]
    # By reward, then by F1, then as in the log; an evaluation has no reward, and EM 1 counts as much.
    best = brief(training, capsys, "--order", "best", "--limit", "5", "--step", "2")
    assert best == [
        ("a", "train step 2", "try 1"),
        ("held", "eval step 2", "try 0"),
        ("b", "train step 2", "try 1"),
        ("b", "train step 2", "try 0"),
        ("a", "train step 2", "try 0"),
    ]
    worst = brief(training, capsys, "--order", "worst", "--limit", "2", "--step", "2")
    assert worst == [("a", "train step 2", "try 0"), ("b", "train step 2", "try 0")]


def test_trajectories_of_which_nothing_is_known_come_last_in_either_order(
    log: RunLogWriter, capsys: pytest.CaptureFixture[str]
) -> None:
    with log:
        for name, reward in (("none", None), ("nan", float("nan")), ("low", 0.0), ("high", 1.0)):
            log.write_trajectory(tried(name, reward))
    assert [row[0] for row in brief(log.path, capsys, "--order", "best")] == ["high", "low", "none", "nan"]
    assert [row[0] for row in brief(log.path, capsys, "--order", "worst")] == ["low", "high", "none", "nan"]


def test_what_is_left_out_is_said_and_only_then(training: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(training)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("memory of") == 1
    assert "there are more: --limit N" in shown
    assert main(["show", str(training), "--limit", "10"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("memory of") == 10
    assert "there are more" not in shown


def test_a_step_that_was_done_again_is_shown_as_it_was_done_last(
    training: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = collect_run_info(RolloutConfig(), seeds={"run": 0})
    with RunLogWriter.resume(training, run, from_step=1) as log:
        log.write_trajectory(tried("again", 1.0), step=2)
    assert [row[0] for row in brief(training, capsys, "--step", "2")] == ["again"]


def test_no_match_is_one_line_that_says_what_there_is(training: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(training), "--task", "c", "--step", "9"]) == 1
    assert capsys.readouterr().err == (
        f"error: {training}: nothing matches --task c --step 9; the log holds"
        " 2 of split 'eval' (steps 0, 2), tries at 1 tasks, 'held' for one;"
        " 8 of split 'train' (steps 1, 2), tries at 2 tasks, 'a' for one\n"
    )


def test_a_log_without_trajectories_says_why_that_may_be(log: RunLogWriter, capsys: pytest.CaptureFixture[str]) -> None:
    with log:
        log.write_metrics(1, {"loss": 1.0}, split="sft")
    assert main(["show", str(log.path)]) == 1
    message = capsys.readouterr().err
    assert "holds no trajectory: `mempo sft` writes none" in message
    assert len(message.splitlines()) == 1


def test_a_path_that_is_no_run_names_the_runs_near_it(
    tmp_path: Path, training: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs"
    for name in ("mempo", "grpo"):
        (folder / name).mkdir(parents=True)
        (folder / name / "run.jsonl").write_bytes(training.read_bytes())
    (folder / "tasks.jsonl").write_text('{"id": "a"}\n', encoding="utf-8")
    (tmp_path / "empty").mkdir()
    for path, message in (
        (folder, f"{folder} holds no run.jsonl; there is {folder / 'grpo/run.jsonl'}, {folder / 'mempo/run.jsonl'}"),
        (tmp_path / "empty", f"{tmp_path / 'empty'} holds no run.jsonl"),
        (tmp_path / "absent", f"{tmp_path / 'absent'}: the run log cannot be read: No such file or directory"),
        (folder / "tasks.jsonl", f"{folder / 'tasks.jsonl'}, line 1: not a run log: schema is None"),
    ):
        assert main(["show", str(path)]) == 1
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {message}")
    assert main(["show", str(training), "--limit", "0"]) == 1
    assert capsys.readouterr().err == "error: --limit must be at least 1 (got 0)\n"


def test_a_reader_that_leaves_early_is_no_traceback(training: Path) -> None:
    command = [sys.executable, "-m", "mempo.cli.main", "show", str(training), "--limit", "9"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) != 0
    process.stderr.close()
