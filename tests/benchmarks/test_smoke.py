"""Every benchmark runs from the command line, with sizes that say nothing about speed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.services.stubs import Reply, Request, StubServer, json_reply

from mempo.core.files import write_jsonl
from mempo.data.world import OpenWorld
from mempo.retrieval.bm25 import Bm25Options
from mempo.retrieval.index import build_index

pytestmark = pytest.mark.slow

# `learning` and `smollm2` have files of their own.
TESTED = {"context", "learning", "retrieval", "retrieval_quality", "rollout", "runlog", "smollm2", "text", "training"}
STARTED_BY_OTHERS = {"plain_server", "trl_step"}


def run(repository: Path, name: str, *arguments: str | Path) -> str:
    """What the benchmark prints."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_each_benchmark_has_a_smoke_run(repository: Path) -> None:
    files = {path.stem for path in (repository / "benchmarks").glob("*.py")}
    assert files == TESTED | STARTED_BY_OTHERS


def test_runlog_measures_a_log_of_one_megabyte(repository: Path) -> None:
    megabytes, records, *_ = run(repository, "runlog", "--megabytes", "1").splitlines()[1].split()
    # The head, then steps of eight trajectories and one record of metrics until the size is reached.
    assert float(megabytes) >= 1
    assert int(records) % 9 == 1


@pytest.mark.data
def test_text_compares_all_five_pairs(repository: Path, shared_data: Path) -> None:
    printed = json.loads(run(repository, "text", "--data", shared_data, "--repeats", "1", "--json"))
    assert len(printed["results"]) == 5


@pytest.mark.parametrize(
    ("name", "file"), [("text", "trajectories/searchr1_wiki18.jsonl"), ("context", "corpus.jsonl")]
)
def test_data_that_is_not_there_is_named_with_what_to_do(
    repository: Path, tmp_path: Path, name: str, file: str
) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--data", str(tmp_path)]
    ended = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 1
    assert ended.stderr.startswith(str(tmp_path / file))
    assert "with --data or $MEMPO_DATA" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_retrieval_measures_both_servers(repository: Path, tmp_path: Path) -> None:
    sizes = ("--passages", "300", "--seconds", "0.2", "--rounds", "1", "--queries", "8")
    run(repository, "retrieval", *sizes, "--json", tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert (figures["passages"], figures["mempo_64_clients_errors"], figures["plain_64_clients_errors"]) == (300, 0, 0)


def test_retrieval_quality_finds_every_page_that_is_asked_for_by_its_title(repository: Path, tmp_path: Path) -> None:
    passages = list(OpenWorld(seed=0, passages=100).passages())
    rows = [{"id": passage.id, "title": passage.title, "text": passage.text} for passage in passages]
    write_jsonl(tmp_path / "corpus.jsonl", rows)
    build_index([tmp_path / "corpus.jsonl"], tmp_path / "index", bm25_options=Bm25Options())
    asked = [{"question": passage.title, "supporting_titles": [passage.title]} for passage in passages]
    write_jsonl(tmp_path / "titles.jsonl", asked)
    printed = run(
        repository, "retrieval_quality", "--index", tmp_path / "index", "--questions", tmp_path / "titles.jsonl"
    )
    some, every = printed.splitlines()[2].split("|")[2].split(" / ")
    assert float(some) == float(every) > 0.9  # one title each; a few others mention it more often


def test_rollout_measures_a_tiny_model_and_a_served_run(repository: Path, tmp_path: Path) -> None:
    tiny = ("--models", "tiny", "--trajectories", "4", "--one-by-one", "4", "--rounds", "1", "--threads", "1")
    served = ("--served-trajectories", "6", "--served-passages", "300")
    run(repository, "rollout", *tiny, *served, "--json", tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert (figures["served_turns"], figures["served_failures"]) == (6 * 8, 0)
    assert figures["tiny_rows_with_other_tokens"] == 0
    assert 0 < figures["tiny_engine_share_of_time"] < 1


def test_rollout_repeats_its_calls_on_a_vllm_server(repository: Path, tmp_path: Path, smollm2_folder: Path) -> None:
    asked: list[dict[str, Any]] = []

    def answer(request: Request) -> Reply:
        if request.path == "/v1/models":
            return json_reply({"data": [{"id": "m"}]})
        asked.append(request.json)
        return json_reply({"usage": {"completion_tokens": request.json["max_tokens"]}})

    sizes = ("--models", "smollm2", "--smollm2-trajectories", "1", "--smollm2-one-by-one", "1", "--threads", "1")
    with StubServer(answer) as server:
        vllm = ("--vllm-url", server.url, "--json", tmp_path / "figures.json")
        run(repository, "rollout", *sizes, "--parts", "engine", *vllm)
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert len(asked) == figures["smollm2_turns"] == 2
    assert sum(call["min_tokens"] for call in asked) == 2 * figures["smollm2_mean_response_tokens"]
    assert figures["smollm2_vllm_tokens_per_second"] > 0


def test_training_measures_updates_scoring_and_memory_and_skips_trl_where_there_is_none(
    repository: Path, tmp_path: Path
) -> None:
    tiny = ("--models", "tiny", "--worlds", "closed", "--tasks", "4", "--trajectories", "1", "--rounds", "1")
    sizes = ("--turns", "2", "4", "--peak-tokens", "4096", "--vocabularies", "20000", "--threads", "1")
    printed = run(repository, "training", *tiny, *sizes, "--json", tmp_path / "figures.json")
    assert "--trl-python" in printed
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert figures["update_tiny_closed_over_bare"] > 0
    assert figures["scoring_tiny_closed_4_turns_prefixes_speedup"] > 0
    # A table of 4096 x 20000 fp32 logits is 312 MiB; chunks of 1024 tokens make a quarter of it at a time.
    at_once, chunked = (figures[f"memory_20000_words_4096_tokens_{kind}_mib"] for kind in ("at_once", "chunked"))
    assert chunked < at_once / 2


@pytest.mark.data
def test_context_costs_grow_faster_with_a_full_history(tmp_path: Path, shared_data: Path, smollm2_folder: Path) -> None:
    from benchmarks import context

    args = context.Args(data=shared_data, objectives=(2, 6), tasks=1, passages=2000)
    costs = asyncio.run(context.measure(args))
    few, many = (
        {cost.context: cost for cost in costs if cost.objectives == objectives} for objectives in args.objectives
    )
    assert list(few) == list(many) == list(context.CONTEXTS)
    for one in (few, many):  # each shows a part of what the next one shows
        totals = [one[name].total_tokens for name in ("memory_only", "previous_turn", "last_turns, 3", "full_history")]
        assert totals == sorted(totals)
    growth = {name: many[name].total_tokens / few[name].total_tokens for name in context.CONTEXTS}
    assert growth["full_history"] > growth[context.REACT] > growth["previous_turn"]
    context.draw(costs, tmp_path / "plot.png")
    assert 0 < (tmp_path / "plot.png").stat().st_size < 100_000
