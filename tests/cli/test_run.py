from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.services.stubs import HTML_502, Reply, Request, StubServer, echo_result, json_reply, retriever

from mempo.cli.main import main
from mempo.cli.run import render_call
from mempo.core import ToolCall

CALL = '<mem>Missing: the capital.</mem><think>look it up</think><tool_call>{"name": "search", "arguments": {"query": "capital of France"}}</tool_call>'  # noqa: E501
ANSWER = "<mem>It is Paris.</mem><think>done</think><answer>Paris</answer>"


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    path = tmp_path / "corpus.jsonl"
    path.write_text(
        '{"id": "1", "title": "France", "text": "The capital of France is Paris.\\u001b[31m"}\n', encoding="utf-8"
    )
    return str(path)


def script(folder: Path, *turns: str) -> str:
    path = folder / "script.json"
    path.write_text(json.dumps(turns), encoding="utf-8")
    return str(path)


def read_lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_turns_are_shown_with_memory_thought_call_result_and_tokens(
    tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["Capital of France?", "--script", script(tmp_path, CALL, ANSWER), "--corpus", corpus]
    assert main(["run", *arguments]) == 0
    shown = capsys.readouterr().out
    for text in (
        "Capital of France?",
        "Missing: the capital.",
        "look it up",
        'search(query="capital of France")',
        "[1] France: The capital of France is Paris.",
        "It is Paris.",
        "so far",
        "answered after 2 turns",
    ):
        assert text in shown
    assert "\x1b" not in shown  # what a passage holds never reaches the terminal as a command


def test_json_lines_hold_each_turn_and_the_end(tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["Capital of France?", "--script", script(tmp_path, CALL, ANSWER), "--corpus", corpus, "--json"]
    assert main(["run", *arguments]) == 0
    first, second, end = read_lines(capsys)
    assert (first["type"], first["index"], first["memory"]) == ("turn", 0, "Missing: the capital.")
    assert first["call"] == {"name": "search", "arguments": {"query": "capital of France"}}
    assert "Paris" in first["observation"]
    assert second["total_tokens"] == end["total_tokens"]
    assert first["total_tokens"] == first["prompt_tokens"] + first["completion_tokens"]
    assert first["tokens_are_estimates"]
    assert (end["answer"], end["answers"], end["stop"], end["turns"]) == ("Paris", ["Paris"], "answered", 2)


def test_several_questions_are_one_task_with_an_answer_each(
    tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    both = script(tmp_path, "<mem>m</mem><think>t</think><answer>Paris; Lima</answer>")
    assert main(["run", "France?", "Peru?", "--script", both, "--corpus", corpus]) == 0
    shown = capsys.readouterr().out
    assert "answer 1   Paris" in shown
    assert "answer 2   Lima" in shown


def test_no_answer_is_status_1_and_says_what_failed(
    tmp_path: Path, corpus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "France?", "--script", script(tmp_path, "I do not know"), "--corpus", corpus]) == 1
    shown = capsys.readouterr().out
    assert "I do not know" in shown
    assert "missing_action" in shown
    assert "malformed after 1 turns" in shown
    assert main(["run", "France?", "--script", script(tmp_path, CALL), "--corpus", corpus]) == 1
    assert "PolicyError: the script has 1 turns" in capsys.readouterr().out


def test_a_retriever_server_and_mcp_tools_are_used(
    tmp_path: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add = '<mem>m</mem><think>t</think><tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    server = shlex.join([sys.executable, str(repository / "tests" / "fixtures" / "mcp_server.py")])
    with StubServer(retriever(echo_result)) as stub:
        turns = script(tmp_path, CALL, add, ANSWER)
        arguments = ["--script", turns, "--retriever", stub.url, "--mcp", server, "--json"]
        assert main(["run", "France?", *arguments]) == 0
    assert [line["observation"] for line in read_lines(capsys)[:2]] == ["[1] T: capital of France", "5"]


def test_an_openai_server_is_used(corpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(request: Any) -> Any:
        if request.path == "/v1/models":
            return json_reply({"data": [{"id": "m", "max_model_len": 9000}]})
        if request.path == "/v1/chat/completions":
            message = {"role": "assistant", "content": ANSWER}
            usage = {"prompt_tokens": 100, "completion_tokens": 20}
            return json_reply({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})
        return json_reply({"error": {"message": "no completions here"}}, status=404)

    with StubServer(answer) as stub:
        options = ["--base-url", stub.url, "--model", "m", "--corpus", corpus, "--json"]
        assert main(["run", "France?", *options]) == 0
        asked = stub.bodies("/v1/chat/completions")
    assert asked[-1]["temperature"] == 0  # one answer is asked for: the most likely one
    turn, end = read_lines(capsys)
    assert (turn["prompt_tokens"], turn["completion_tokens"], turn["tokens_are_estimates"]) == (100, 20, False)
    assert end["answer"] == "Paris"


def test_a_server_whose_context_is_too_small_is_refused_at_the_start(
    corpus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(request: Any) -> Any:
        if request.path == "/v1/models":
            return json_reply({"data": [{"id": "m", "max_model_len": 4000}]})
        return json_reply({"error": {"message": "no"}}, status=404)

    with StubServer(answer) as stub:
        assert main(["run", "France?", "--base-url", stub.url, "--model", "m", "--corpus", corpus]) == 1
    message = capsys.readouterr().err
    assert "--max-prompt-tokens 4096 + --max-response-tokens 1024 = 5120, but the context of m is 4000" in message
    fitting = message.strip().partition("These lengths fit: ")[2]
    assert fitting == "--max-prompt-tokens 3200 --max-response-tokens 800 --max-observation-tokens 781"


def test_a_retriever_that_does_not_answer_is_named_before_anything_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with StubServer(lambda _: HTML_502) as stub:
        assert main(["run", "France?", "--script", script(tmp_path, CALL), "--retriever", stub.url]) == 1
    message = capsys.readouterr().err
    assert "no retriever answers" in message
    assert "mempo serve-retriever" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give at least one question"),
        ([" "], "none that is empty"),
        (["Q?", "--temperature", "-1"], "temperature"),
        (["Q?", "--script", "/nonexistent.json"], "cannot be read as JSON"),
        (["Q?", "--context.prompts", "nonsense"], "nonsense"),
        (["Q?", "--index", "a", "--corpus", "b"], "give one of --index, --corpus"),
        (["Q?", "--index", "/nonexistent"], "no index here"),
        (["Q?", "--corpus", "/nonexistent"], "cannot be read"),
        (["Q?", "--mcp", "no-such-command"], "no-such-command"),
        (["Q?", "--base-url", "http://127.0.0.1:1", "--server-mode", "tokens"], "needs a renderer"),
    ],
)
def test_what_cannot_work_is_one_line_and_status_1(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted = [] if "--script" in arguments or "--base-url" in arguments else ["--script", script(tmp_path, ANSWER)]
    assert main(["run", *arguments, *scripted]) == 1
    assert message in capsys.readouterr().err


def test_a_script_that_is_no_list_of_texts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "script.json"
    path.write_text('{"a": 1}', encoding="utf-8")
    assert main(["run", "Q?", "--script", str(path)]) == 1
    assert "must be a JSON list of texts" in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_traceback(tmp_path: Path, corpus: str) -> None:
    command = [sys.executable, "-m", "mempo.cli.main", "run", "France?", "--json"]
    command += ["--script", script(tmp_path, *[CALL] * 3, ANSWER), "--corpus", corpus]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()  # gone before the first line
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == ""
    process.stderr.close()


def test_ctrl_c_ends_at_once_with_the_turns_so_far(tmp_path: Path) -> None:
    searches = 0

    def answer(request: Request) -> Reply:
        nonlocal searches
        searches += 1
        found = echo_result(request)  # the first search asks whether the retriever is there
        return found if searches <= 2 else Reply(200, found.body, found.headers, stall_seconds=60)

    with StubServer(retriever(answer)) as stub:
        command = [sys.executable, "-m", "mempo.cli.main", "run", "France?", "--json"]
        command += ["--script", script(tmp_path, CALL, CALL, ANSWER), "--retriever", stub.url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            first = json.loads(process.stdout.readline())
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=8)  # the search itself would take ten seconds
    assert (first["type"], first["index"]) == ("turn", 0)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")


def test_a_call_is_shown_as_people_write_it() -> None:
    assert render_call(ToolCall("add", {"a": 1, "names": ["é"]})) == 'add(a=1, names=["é"])'


@pytest.mark.slow
def test_the_bundled_model_runs_and_the_same_seed_repeats_it(
    smollm2_folder: Path, corpus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--max-turns", "1", "--max-response-tokens", "24", "--context.prompts", "compact", "--json"]
    main(["run", "Capital of France?", "--corpus", corpus, *options])
    first, end = read_lines(capsys)
    assert 0 < first["completion_tokens"] <= 24
    assert not first["tokens_are_estimates"]
    assert end["total_tokens"] == first["prompt_tokens"] + first["completion_tokens"]
    main(["run", "Capital of France?", "--corpus", corpus, *options])
    assert read_lines(capsys)[0]["text"] == first["text"]
