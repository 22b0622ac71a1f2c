"""The retriever's server in a process of its own: what it answers, where it listens, how it stops."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from mempo.cli.listening import ListenArgs
from mempo.core import ConfigError
from mempo.retrieval.bm25 import Bm25Options
from mempo.retrieval.index import build_index

MEMPO = [sys.executable, "-m", "mempo.cli.main"]
ROWS = [
    {"id": "1", "title": "Paris", "text": "Paris is the capital of France."},
    {"id": "2", "title": "Rome", "text": "Rome is the capital of Italy."},
    {"id": "3", "contents": "Tomatoes grow in Italy"},
]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Case 78: blanks in the path.
    folder = tmp_path_factory.mktemp("an index with blanks")
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    build_index([corpus], folder / "index", bm25_options=Bm25Options())
    return folder / "index"


class Server:
    """`mempo serve-retriever` under way."""

    def __init__(
        self, index: Path, *arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None
    ) -> None:
        command = [*MEMPO, "serve-retriever", "--index", str(index), "--port", "0", *arguments]
        self.process = subprocess.Popen(
            command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("listening on http://127.0.0.1:"), (line, self.process.communicate(timeout=30))
        self.url = line.removeprefix("listening on ").strip()
        self.port = int(self.url.rsplit(":", 1)[1])

    def stop(self) -> tuple[int, str]:
        """Exit status and everything that was logged."""
        self.process.send_signal(signal.SIGTERM)
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out + err


@pytest.fixture(scope="module")
def server(index: Path) -> Iterator[Server]:
    running = Server(index, "--name", "train", "--max-queries", "4", "--max-query-chars", "50", "--max-top-k", "5")
    yield running
    status, log = running.stop()
    assert status == 0
    assert "Traceback" not in log


def test_search_r1s_request_by_plain_curl(server: Server) -> None:
    body = '{"queries": ["capital of France", "zzzzqqqq"], "topk": 1, "return_scores": true}'
    run = subprocess.run(
        ["curl", "-s", f"{server.url}/retrieve", "-d", body], capture_output=True, text=True, timeout=30, check=True
    )
    [[hit], nothing] = json.loads(run.stdout)["result"]
    assert hit["document"] == {"id": "1", "contents": '"Paris"\nParis is the capital of France.'}
    assert hit["score"] > 0
    assert nothing == []


def test_without_scores_the_document_wrapper_is_absent_and_topk_may_be_null_or_missing(server: Server) -> None:
    document = {"id": "2", "contents": '"Rome"\nRome is the capital of Italy.'}
    for body in ({"queries": ["Rome"]}, {"queries": ["Rome"], "topk": None, "return_scores": False}):
        assert httpx.post(f"{server.url}/retrieve", json=body).json() == {"result": [[document]]}


def test_research_requests_are_answered_in_its_shapes(server: Server) -> None:
    rome = {"id": "2", "contents": '"Rome"\nRome is the capital of Italy.'}
    tomatoes = {"id": "3", "contents": "Tomatoes grow in Italy"}
    one = {"query": "rome", "top_n": 2}
    two = {"query": ["rome", "tomatoes"], "top_n": 1}
    plain = httpx.post(f"{server.url}/search", json=one).json()
    documents, [score] = httpx.post(f"{server.url}/search", json={**one, "return_score": True}).json()
    plain_batch = httpx.post(f"{server.url}/batch_search", json=two).json()
    batch, scores = httpx.post(f"{server.url}/batch_search", json={**two, "return_score": True}).json()
    assert plain == documents == [rome]
    assert plain_batch == batch == [[rome], [tomatoes]]
    assert score == scores[0][0] > 0


def test_health_says_who_it_is_and_metrics_count(server: Server) -> None:
    health = httpx.get(f"{server.url}/health").json()
    assert {key: health[key] for key in ("service", "name", "passages", "index")} == {
        "service": "mempo-retriever",
        "name": "train",
        "passages": 3,
        "index": "bm25",
    }
    httpx.post(f"{server.url}/retrieve", json={"queries": ["Rome"]})
    assert 'mempo_retriever_requests_total{path="/retrieve",status="200"}' in httpx.get(f"{server.url}/metrics").text


def test_case_73_a_taken_port_is_named_with_its_holder_and_what_it_says_it_is(server: Server, index: Path) -> None:
    command = [*MEMPO, "serve-retriever", "--index", str(index), "--port", str(server.port)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1
    assert f"port {server.port} on 127.0.0.1 is taken by process {server.process.pid} (" in run.stderr
    assert "says it is the mempo retriever 'train' (bm25, 3 passages)" in run.stderr


def test_case_73_a_stranger_that_answers_200_at_health_is_called_a_stranger(index: Path) -> None:
    class Stranger(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"status": "ok"}')

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as stranger:
        thread = threading.Thread(target=stranger.serve_forever)
        thread.start()
        try:
            port = stranger.server_address[1]
            command = [*MEMPO, "serve-retriever", "--index", str(index), "--port", str(port)]
            run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        finally:
            stranger.shutdown()
            thread.join()
    assert run.returncode == 1
    assert f"is taken by process {os.getpid()} (" in run.stderr
    assert "is not a mempo retriever" in run.stderr


def test_case_78_it_runs_from_another_folder_without_a_home(index: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    running = Server(index, "--port-file", "port.txt", cwd=tmp_path, env=environment)
    assert (tmp_path / "port.txt").read_text(encoding="utf-8") == f"{running.port}\n"
    assert running.stop() == (0, "")


def test_case_78_a_missing_index_is_named_with_how_to_build_it(tmp_path: Path) -> None:
    command = [*MEMPO, "serve-retriever", "--index", str(tmp_path / "no where"), "--port", "0"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1
    assert f"{tmp_path / 'no where'}: no index here; build one with: mempo index build --corpus FILE" in run.stderr


def test_a_host_that_is_not_loopback_needs_an_explicit_word(index: Path) -> None:
    command = [*MEMPO, "serve-retriever", "--index", str(index), "--port", "0", "--host", "0.0.0.0"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1
    assert "add --allow-remote if that is meant" in run.stderr


def test_a_token_guards_everything_but_health_and_is_never_logged(index: Path) -> None:
    running = Server(index, "--token-env", "SECRET_OF_TEST", env={**os.environ, "SECRET_OF_TEST": "hush-hush"})
    body = {"queries": ["Rome"]}
    statuses = [
        httpx.post(f"{running.url}/retrieve", json=body, headers=headers).status_code
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer hush-hush"})
    ]
    others = [httpx.get(f"{running.url}{path}").status_code for path in ("/metrics", "/health")]
    status, log = running.stop()
    assert statuses == [401, 401, 200]
    assert others == [401, 200]
    assert status == 0
    assert "hush" not in log


def test_a_signal_to_stop_lets_answers_under_way_finish(index: Path) -> None:
    running = Server(index)
    body = json.dumps({"queries": ["Rome"]}).encode()
    with socket.create_connection(("127.0.0.1", running.port), timeout=30) as connection:
        # Half of a request: the server is in the middle of it when the signal comes.
        head = f"POST /retrieve HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        connection.sendall(head + body[:5])
        httpx.get(f"{running.url}/health")
        running.process.send_signal(signal.SIGTERM)
        connection.sendall(body[5:])
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    assert answer.startswith(b"HTTP/1.1 200")
    assert b'"id":"2"' in answer
    assert running.process.wait(timeout=30) == 0
    running.process.communicate()


@pytest.mark.slow
def test_schemathesis_finds_no_server_error(server: Server) -> None:
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
        *("--checks", "not_a_server_error", "--max-examples", "40", "--phases", "examples,coverage,fuzzing"),
        *("--generation-allow-x00", "true", "--no-color", "--generation-database", "none", "--seed", "1"),
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stdout[-3000:]


HOSTILE = {
    "half a surrogate": '{"queries": ["\\ud800 Rome"]}',
    "control characters": '{"queries": ["\\u0000\\u0007\\u001b Rome"]}',
    "empty and blank queries": '{"queries": ["", "   "]}',
    "no queries": '{"queries": []}',
    "unknown keys": '{"queries": ["Rome"], "more": {"\\ud800": 1}}',
}
REFUSED = {
    "100k characters": (
        json.dumps({"queries": ["x" * 100_000]}),
        422,
        "100000 characters in one query: this retriever allows 50",
    ),
    "too many queries": (
        '{"queries": ["a", "b", "c", "d", "e"]}',
        422,
        "5 queries in one request: this retriever allows 4",
    ),
    "topk too large": ('{"queries": ["a"], "topk": 6}', 422, "6 passages a query (topk): this retriever allows 5"),
    "topk 0": ('{"queries": ["a"], "topk": 0}', 422, "$.topk"),
    "topk NaN": ('{"queries": ["a"], "topk": NaN}', 422, "$.topk"),
    "topk huge": ('{"queries": ["a"], "topk": 1' + "0" * 5000 + "}", 400, "not JSON"),
    "queries a string": ('{"queries": "a"}', 422, "$.queries"),
    "a query that is no string": ('{"queries": [1]}', 422, "$.queries[0]"),
    "no queries key": ("{}", 422, "queries"),
    "a list": ("[]", 422, "object"),
    "half a JSON": ('{"queries": ["a"', 400, "not JSON"),
    "nothing": ("", 400, "not JSON"),
    "half a surrogate in a name": ('{"\\ud800": 1, "queries": ["a"]}', 422, "surrogate"),
    "deep": ("[" * 100_000, 400, "not JSON"),
    "not UTF-8": (b'{"queries": ["\xf4\x28"]}', 400, "not JSON"),
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_queries_get_an_answer(server: Server, body: str) -> None:
    answer = httpx.post(f"{server.url}/retrieve", content=body)
    assert answer.status_code == 200
    assert len(answer.json()["result"]) == len(json.loads(body)["queries"])


@pytest.mark.parametrize(("body", "status", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_beyond_a_limit_or_no_request_is_refused_with_the_reason(
    server: Server, body: str | bytes, status: int, reason: str
) -> None:
    answer = httpx.post(f"{server.url}/retrieve", content=body)
    assert answer.status_code == status
    assert reason in answer.json()["detail"]


def test_a_body_beyond_the_limit_is_refused(index: Path) -> None:
    running = Server(index, "--max-body-bytes", "1000")
    answer = httpx.post(f"{running.url}/retrieve", json={"queries": ["x" * 1000]})
    running.stop()
    assert (answer.status_code, answer.json()["detail"]) == (413, "the body is larger than 1000 bytes")


def test_a_client_that_leaves_in_the_middle_of_its_request_is_no_failure_of_the_server(index: Path) -> None:
    running = Server(index)
    with socket.create_connection(("127.0.0.1", running.port)) as connection:
        connection.sendall(b'POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"que')
    assert httpx.post(f"{running.url}/retrieve", json={"queries": ["Rome"]}).status_code == 200
    assert running.stop() == (0, "")


@pytest.mark.parametrize("port", ["70000", "-1"])
def test_a_port_out_of_range_is_refused_and_no_other_one_taken(index: Path, port: str) -> None:
    command = [*MEMPO, "serve-retriever", "--index", str(index), "--port", port]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert f"no port has the number {port}" in ran.stderr


@pytest.mark.parametrize("token", [b"\xff\xfe", "caf\u00e9".encode(), b"two words", b"two\nlines"])
def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(tmp_path: Path, token: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(token)
    with pytest.raises(ConfigError, match="holds no token that a header can carry: printable ASCII") as caught:
        ListenArgs(token_file=path).read_token()
    assert token.decode("latin-1") not in str(caught.value)


@pytest.mark.data
@pytest.mark.slow
def test_the_real_corpus_and_corpus_plus_extra_are_served_side_by_side(shared_data: Path, tmp_path: Path) -> None:
    core, extra = shared_data / "corpus.jsonl", shared_data / "corpus_extra.jsonl"
    build_index([core], tmp_path / "train", bm25_options=Bm25Options())
    build_index([core, extra], tmp_path / "eval", bm25_options=Bm25Options())
    servers = [Server(tmp_path / name, "--name", name) for name in ("train", "eval")]
    sizes = [httpx.get(f"{running.url}/health").json()["passages"] for running in servers]
    body = {"queries": ["Who founded the Playboy Club?"], "topk": 3}
    answers = [httpx.post(f"{running.url}/retrieve", json=body).json()["result"][0] for running in servers]
    stops = [running.stop() for running in servers]
    assert sizes == [28509, 43372]
    assert [len(hits) for hits in answers] == [3, 3]
    assert stops == [(0, ""), (0, "")]
