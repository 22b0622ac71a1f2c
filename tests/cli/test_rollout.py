from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.services.processes import MempoServer
from tests.services.stubs import StubServer, echo_result, json_reply, retriever

from mempo.cli.main import main
from mempo.config import Config
from mempo.core import Objective, StopReason, Task, Trajectory, Turn, derive_seed
from mempo.data import write_tasks
from mempo.runlog import EventRecord, ResumeRecord, RunLogWriter, TrajectoryRecord, collect_run_info, read_runlog

CALL = '<mem>m</mem><think>t</think><tool_call>{"name": "search", "arguments": {"query": "capital"}}</tool_call>'
ANSWER = "<mem>It is Paris.</mem><think>done</think><answer>Paris</answer>"


class Run:
    """A task file whose every other answer is Paris, a corpus, a script, and the command."""

    def __init__(self, folder: Path, tasks: int = 4, turns: tuple[str, ...] = (CALL, ANSWER)) -> None:
        self.tasks, self.out, self.script = folder / "tasks.jsonl", folder / "out", folder / "script.json"
        self.corpus = folder / "corpus.jsonl"
        self.write_tasks(tasks)
        self.script.write_text(json.dumps(turns), encoding="utf-8")
        self.corpus.write_text('{"id": "1", "title": "France", "text": "The capital is Paris."}\n', encoding="utf-8")
        self.searching = ["--corpus", str(self.corpus)]

    def write_tasks(self, count: int) -> None:
        golds = ["Paris" if index % 2 == 0 else "Lima" for index in range(count)]
        write_tasks(self.tasks, [Task(f"t{i}", (Objective(f"Question {i}?", (g,)),)) for i, g in enumerate(golds)])

    @property
    def log(self) -> Path:
        return self.out / "run.jsonl"

    def arguments(self, *options: str) -> list[str]:
        fixed = ["rollout", str(self.tasks), "--out", str(self.out), "--script", str(self.script)]
        return [*fixed, *self.searching, *options]

    def __call__(self, *options: str) -> int:
        return main(self.arguments(*options))

    def start(self, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "mempo.cli.main", *self.arguments(*options)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def tries(self) -> list[tuple[str, int]]:
        return [(r.trajectory.task.id, r.trajectory.rollout) for r in read_runlog(self.log).trajectories()]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_every_task_is_in_the_log_and_the_summary_has_scores_and_tokens(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert sorted(run.tries()) == [("t0", 0), ("t1", 0), ("t2", 0), ("t3", 0)]
    total = report["rows"][-1]
    assert (total["em"], total["f1"], total["count_ok"]) == (50.0, 50.0, 100.0)
    records = list(read_runlog(run.log).trajectories(split="eval"))
    assert report["total_tokens_mean"] == sum(r.trajectory.total_tokens for r in records) / 4
    assert report["peak_tokens_mean"] == sum(r.trajectory.peak_tokens for r in records) / 4
    assert (report["stops"], report["made_now"], report["turns_mean"]) == ({"answered": 4}, 4, 2.0)
    assert [r.trajectory.scores["em"] for r in records if r.trajectory.task.id == "t0"] == [1.0]


def test_the_summary_for_people(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    shown = capsys.readouterr().out
    assert "50.00" in shown
    assert "ends: answered 4; something failed in 0" in shown
    assert str(run.log) in shown


@pytest.mark.skipif(os.name != "posix", reason="opens a pseudo-terminal")
def test_on_a_terminal_a_bar_shows_what_is_going_on(run: Run) -> None:
    reader, terminal = os.openpty()
    command = [sys.executable, "-m", "mempo.cli.main", *run.arguments()]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "150"}
    try:
        ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal, env=environment, timeout=60, check=True)
        shown = os.read(reader, 100_000).decode()
    finally:
        os.close(reader)
        os.close(terminal)
    last = shown.split("\r")[-2]
    assert "4/4" in last
    assert "0 active" in last
    assert "tokens/s, answered 4" in last
    assert b"50.00" in ran.stdout


def test_the_header_tells_the_settings(run: Run) -> None:
    run("--temperature", "0.5", "--context.prompts", "compact", "--seed", "7")
    info = read_runlog(run.log).header.run
    assert (info.config["rollout.temperature"], info.config["context.prompts"], info.seeds) == (
        0.5,
        "compact",
        {"run": 7},
    )
    assert len(info.prompts_hash) == 12


def test_started_again_it_makes_nothing_twice(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run()
    before = run.log.read_bytes()
    capsys.readouterr()
    assert run("--json") == 0
    assert json.loads(capsys.readouterr().out)["made_now"] == 0
    assert run.log.read_bytes() == before


def test_more_tasks_or_tries_are_added_to_the_log(run: Run) -> None:
    run("--limit", "1")
    assert run.tries() == [("t0", 0)]
    run.write_tasks(5)
    run("--limit", "2", "--group-size", "2")
    assert sorted(run.tries()) == [("t0", 0), ("t0", 1), ("t1", 0), ("t1", 1)]


def test_a_log_that_was_cut_goes_on_to_the_same_trajectories(run: Run, tmp_path: Path) -> None:
    run()
    lines = run.log.read_bytes().splitlines(keepends=True)
    whole = {r.trajectory.task.id: r.trajectory for r in read_runlog(run.log).trajectories()}
    run.log.write_bytes(b"".join(lines[:3]) + lines[3][:50])  # killed while it wrote the third trajectory
    assert run() == 0
    tries = run.tries()
    assert sorted(tries) == [("t0", 0), ("t1", 0), ("t2", 0), ("t3", 0)]
    for record in read_runlog(run.log).trajectories():
        before = whole[record.trajectory.task.id]
        assert [t.text for t in record.trajectory.turns] == [t.text for t in before.turns]
        assert record.trajectory.seed == before.seed
    resumes = [r for r in read_runlog(run.log).records() if isinstance(r, ResumeRecord)]
    assert [resume.cut_bytes for resume in resumes] == [50]


def test_a_log_that_was_cut_in_its_header_starts_anew(run: Run) -> None:
    run.out.mkdir()
    run.log.write_bytes(b'{"type":"header","nonfi')
    assert run() == 0
    assert len(run.tries()) == 4


def test_other_settings_are_refused_unless_told(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("--limit", "1")
    assert run("--temperature", "0.5", "--context.prompts", "compact") == 1
    message = capsys.readouterr().err
    assert "rollout.temperature: 1.0 in the log, 0.5 now" in message
    assert "context.prompts: 'memory' in the log, 'compact' now" in message
    assert len(run.tries()) == 1
    assert run("--concurrency", "3", "--limit", "1") == 0  # changes no trajectory
    assert run("--temperature", "0.5", "--context.prompts", "compact", "--resume") == 0
    assert len(run.tries()) == 4
    # The settings of the last run are now those of the log.
    assert run("--temperature", "0.5", "--context.prompts", "compact") == 0


@pytest.mark.parametrize("options", [(), ("--resume",)])
def test_the_folder_of_a_training_is_refused_in_one_line_and_left_alone(
    run: Run, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    run.out.mkdir()
    turn = Turn(0, "", answer="Paris")
    task = Task("t0", (Objective("Another question?", ("Paris",)),))
    with RunLogWriter.create(run.log, collect_run_info(Config(), seeds={"run": 0})) as log:
        log.write_trajectory(Trajectory(task, 0, (turn,), StopReason.ANSWERED, seed=0), step=1)
    before = run.log.read_bytes()
    assert run(*options) == 1
    expected = f"error: {run.log} is of a training, not of `mempo rollout`: name another folder with --out\n"
    assert capsys.readouterr().err == expected
    assert run.log.read_bytes() == before


def test_the_log_of_a_teacher_in_the_place_of_a_rollouts_is_refused(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    taught = ["data", "teach", str(run.tasks), *run.searching, "--out", str(run.log), "--limit", "0"]
    assert main(taught) == 0
    assert run("--resume") == 1
    assert "is of `mempo data teach`, not of `mempo rollout`" in capsys.readouterr().err


def test_a_task_of_the_same_id_but_another_content_is_refused(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run()
    write_tasks(run.tasks, [Task("t0", (Objective("Another question?", ("Paris",)),))])
    assert run() == 1
    assert "'t0'" in capsys.readouterr().err


def test_a_foreign_file_in_the_place_of_the_log_is_refused(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.out.mkdir()
    run.log.write_text('{"id": "a", "answer": "b"}\n', encoding="utf-8")
    assert run() == 1
    assert "not a run log" in capsys.readouterr().err


def test_tries_in_which_the_policy_failed_are_made_again(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.script.write_text(json.dumps([CALL]), encoding="utf-8")  # nothing to say in the second turn
    assert run("--json") == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["stops"] == {"policy_error": 4}
    assert "the same command makes them again" in printed.err
    run.script.write_text(json.dumps([CALL, ANSWER]), encoding="utf-8")
    assert run("--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["stops"], report["trajectories"], report["made_now"]) == ({"answered": 4}, 4, 4)
    assert len(run.tries()) == 8  # the log keeps what failed


def test_case_77_no_tasks_and_fewer_tasks_than_places(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--limit", "2", "--concurrency", "4", "--json") == 0
    assert json.loads(capsys.readouterr().out)["rows"][-1]["tasks"] == 2
    assert run("--limit", "0", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["trajectories"], report["rows"][-1]["em"]) == (0, None)


@pytest.mark.parametrize("concurrency", ["1", "3"])
def test_the_seed_decides_the_seeds_of_trajectories_whatever_the_concurrency(run: Run, concurrency: str) -> None:
    run("--concurrency", concurrency, "--seed", "5")
    seeds = {r.trajectory.task.id: r.trajectory.seed for r in read_runlog(run.log).trajectories()}
    assert seeds == {f"t{i}": derive_seed(5, f"t{i}", 0) for i in range(4)}


def test_score_takes_the_log_as_predictions(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("--limit", "3")
    capsys.readouterr()
    assert main(["score", str(run.log), str(run.tasks), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["missing"] == ["t3"]
    assert report["rows"][-1]["em"] == 50.0  # t0 and t2 are right, t1 is wrong, t3 is missing
    run("--limit", "3", "--group-size", "2")
    capsys.readouterr()
    main(["score", str(run.log), str(run.tasks), "--json"])
    total = json.loads(capsys.readouterr().out)["rows"][-1]
    # Three tasks with two tries each, and one without any, which counts as one wrong try.
    assert (total["tasks"], total["tries"], total["objectives"]) == (4, 7, 4)
    assert (total["em"], total["em_interval"]) == (pytest.approx(400 / 7), None)


def wait_for(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def slow_after(count: int) -> Any:
    """A retriever that answers `count` searches (and the one that asks whether it is there), then stalls."""
    served = 0

    def answer(request: Any) -> Any:
        nonlocal served
        served += 1
        reply = echo_result(request)
        return reply if served <= count + 1 else json_reply(json.loads(reply.body), stall_seconds=60)

    return retriever(answer)


def kept(run: Run) -> int:
    return run.log.read_bytes().count(b'{"type":"trajectory"') if run.log.exists() else 0


def test_ctrl_c_ends_cleanly_with_a_complete_log_and_the_same_command_goes_on(run: Run) -> None:
    with StubServer(slow_after(1)) as stub:  # equal queries in flight are one request: the first two share it
        run.searching = ["--retriever", stub.url]
        with run.start("--concurrency", "2") as process:
            wait_for(lambda: kept(run) == 2)
            time.sleep(0.2)  # two more are now waiting for their search
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.startswith("interrupted; ")
    assert "Traceback" not in out + err
    assert len(run.tries()) == 2
    [event] = [r for r in read_runlog(run.log).records() if isinstance(r, EventRecord)]
    assert event.details["error"] == "CancelledError"
    with StubServer(retriever(echo_result)) as stub:
        run.searching = ["--retriever", stub.url]
        assert run("--resume") == 0  # the retriever has another address now
    assert sorted(run.tries()) == [("t0", 0), ("t1", 0), ("t2", 0), ("t3", 0)]


@pytest.mark.skipif(os.name != "posix", reason="kills a process")
def test_killed_without_warning_it_loses_nothing_that_had_ended(run: Run) -> None:
    with StubServer(slow_after(3)) as stub:
        run.searching = ["--retriever", stub.url]
        with run.start("--concurrency", "1") as process:
            wait_for(lambda: kept(run) == 3)
            process.kill()
    assert len(run.tries()) == 3
    run.searching = ["--corpus", str(run.corpus)]
    assert run("--resume") == 0
    assert sorted(run.tries()) == [("t0", 0), ("t1", 0), ("t2", 0), ("t3", 0)]


def test_a_policy_server_that_dies_stops_the_run_and_the_log_stays_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, tasks=30)
    calls = 0

    def answer(request: Any) -> Any:
        nonlocal calls
        if request.path == "/v1/chat/completions":
            calls += 1
            if calls > 4:
                return json_reply({"error": {"message": "prompt rejected"}}, status=403)
            message = {"role": "assistant", "content": ANSWER}
            return json_reply({"choices": [{"message": message, "finish_reason": "stop"}], "usage": None})
        return json_reply({"error": {"message": "no"}}, status=404)

    with StubServer(answer) as stub:
        arguments = ["rollout", str(run.tasks), "--out", str(run.out), *run.searching, "--concurrency", "1"]
        server = ["--base-url", stub.url, "--model", "m"]
        assert main([*arguments, *server]) == 1
    assert "max_failure_rate" in capsys.readouterr().err
    stops = [r.trajectory.stop for r in read_runlog(run.log).records() if isinstance(r, TrajectoryRecord)]
    assert stops == [StopReason.ANSWERED] * 4 + [StopReason.POLICY_ERROR] * 16
    calls = -100
    with StubServer(answer) as stub:
        assert main([*arguments, "--base-url", stub.url, "--model", "m", "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stops"] == {"answered": 30}


@pytest.mark.slow
def test_smollm2_makes_the_same_trajectories_alone_and_together(run: Run, smollm2_folder: Path, tmp_path: Path) -> None:
    texts: list[dict[str, list[str]]] = []
    for concurrency in ("1", "4"):
        out = tmp_path / f"out{concurrency}"
        options = ["--max-turns", "2", "--max-response-tokens", "24", "--context.prompts", "compact"]
        arguments = ["rollout", str(run.tasks), "--out", str(out), "--malformed", "tell", *run.searching, *options]
        assert main([*arguments, "--concurrency", concurrency, "--limit", "3"]) == 0
        records = read_runlog(out / "run.jsonl").trajectories()
        texts.append({r.trajectory.task.id: [t.text for t in r.trajectory.turns] for r in records})
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.data
def test_real_questions_over_the_real_retriever_process_with_a_script_and_with_smollm2(
    run: Run, smollm2_folder: Path, shared_data: Path, tmp_path: Path
) -> None:
    index = str(tmp_path / "index")
    assert main(["index", "build", "--corpus", str(shared_data / "corpus.jsonl"), "--out", index]) == 0
    run.tasks = shared_data / "qa" / "hotpotqa.jsonl"
    with MempoServer("serve-retriever", "--index", index) as server:
        run.searching = ["--retriever", server.url]
        assert run("--limit", "20") == 0
        small = ["--max-turns", "2", "--max-response-tokens", "32", "--context.prompts", "compact"]
        out = tmp_path / "smollm2"
        arguments = ["rollout", str(run.tasks), "--out", str(out), "--limit", "2", "--malformed", "tell"]
        assert main([*arguments, *run.searching, *small]) == 0
    scripted = [record.trajectory for record in read_runlog(run.log).trajectories()]
    assert len(scripted) == 20
    assert all(len(trajectory.turns[0].passages) == 3 for trajectory in scripted)
    sampled = [record.trajectory for record in read_runlog(out / "run.jsonl").trajectories()]
    assert len(sampled) == 2
    for turn in (turn for trajectory in sampled for turn in trajectory.turns):
        assert len(turn.response_ids) == len(turn.logprobs) == turn.usage.completion_tokens <= 32
        assert len(turn.prompt_ids) == turn.usage.prompt_tokens
