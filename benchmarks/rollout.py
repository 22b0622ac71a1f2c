"""How fast trajectories are sampled, and what of the time is not the model's.

    python -m benchmarks.rollout                                      # all parts, both models
    python -m benchmarks.rollout --parts engine --models tiny --rounds 7
    python -m benchmarks.rollout --models smollm2 --vllm-url http://127.0.0.1:8000

Parts (run from the root of the checkout; all ratios are of one run, rounds alternate what is compared):

engine     a batched rollout of an oracle's turns against one-by-one `generate` on the same prompts and
           lengths, and the share of the rollout's time that is spent outside the model
sampling   our sampling loop against batched `generate` on the same prompts; what rows that leave the
           batch gain over a fixed batch; whether a row depends on its neighbours
served     scripted trajectories through a retriever's server in a process of its own: speed and memory

An untrained model writes no turn that an engine could act on. So the model does its work, as many
tokens as the oracle's turn has (fewer where it draws an end token), and the oracle's text is put in
the place of what it sampled: parsing, masks, searches and contexts are those of real trajectories.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import httpx
import psutil
import torch
import tyro
from benchmarks.retrieval import as_row, mempo_server

from mempo.config import ContextConfig, RolloutConfig
from mempo.core import (
    FinishReason,
    Generation,
    GenerationRequest,
    Json,
    Message,
    Retriever,
    ScoreRequest,
    Task,
    ToolCall,
    Usage,
)
from mempo.core.files import write_jsonl
from mempo.data.teacher import Teacher
from mempo.data.world import OpenWorld, closed_pattern, closed_vocabulary, closed_worlds
from mempo.env import SearchTool
from mempo.policy import local, sampling
from mempo.policy.local import LocalPolicy
from mempo.policy.models import BUNDLED_SMOLLM2
from mempo.policy.sampling import Endings, Row, Sampled, sample_rows
from mempo.policy.scripted import ScriptedPolicy
from mempo.policy.tiny import tiny_llama, word_tokenizer
from mempo.retrieval.bm25 import Bm25Options
from mempo.retrieval.client import HttpRetriever
from mempo.retrieval.index import build_index
from mempo.retrieval.memory import MemoryRetriever
from mempo.rollout import make_rollout
from mempo.text.masks import token_offsets
from mempo.text.render import Renderer
from mempo.text.tags import parse, render_turn

Part = Literal["engine", "sampling", "served"]
ModelName = Literal["tiny", "smollm2"]
Figures = dict[str, Json]


@dataclass(frozen=True)
class Args:
    parts: tuple[Part, ...] = ("engine", "sampling", "served")
    models: tuple[ModelName, ...] = ("tiny", "smollm2")
    """tiny: 0.2 million random weights. smollm2: SmolLM2-135M."""
    trajectories: int = 64
    """Trajectories of a rollout with the tiny model, all at once."""
    smollm2_trajectories: int = 64
    """The same with SmolLM2."""
    smollm2_turns: int = 2
    """Turns of SmolLM2's trajectories; at least 2."""
    one_by_one: int = 32
    """Calls of the rollout that `generate` repeats one by one, spread evenly over all of them."""
    smollm2_one_by_one: int = 6
    """The same with SmolLM2."""
    rounds: int = 6
    """Repetitions with the tiny model; the first warms up, medians of the others are shown."""
    smollm2_rounds: int = 1
    """Repetitions with SmolLM2; a single one is shown as it is, and takes minutes."""
    served_trajectories: int = 2000
    served_turns: int = 8
    """Turns of a served trajectory: all but the last are searches."""
    served_passages: int = 20_000
    """Size of the generated corpus behind the server."""
    concurrency: int = 64
    """Served trajectories under way at once."""
    threads: int = 2
    """Threads of torch."""
    vllm_url: str | None = None
    """A running vLLM server with SmolLM2: the calls of SmolLM2's rollout are repeated there, all at once."""
    json: Path | None = None
    """Write all figures here."""


def main(args: Args) -> None:
    torch.set_num_threads(args.threads)
    print(f"$ {' '.join(['python -m benchmarks.rollout', *sys.argv[1:]])}")
    figures: Figures = {}
    if "served" in args.parts:
        figures |= shown(served(args))
    for name in args.models if {"engine", "sampling"} & set(args.parts) else ():
        measured = measure(SUBJECTS[name](args), args)
        figures |= shown({f"{name}_{key}": value for key, value in measured.items()})
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


# What is measured: a model with tasks and an oracle's turns.


@dataclass(frozen=True)
class Subject:
    """A model, tasks with an oracle's turns, and how often they are run."""

    policy: LocalPolicy
    tasks: Sequence[Task]
    retriever: Retriever
    turns: Sequence[Sequence[str]]
    """The texts of each task's turns."""
    context: ContextConfig
    rounds: int
    one_by_one: int
    vllm_url: str | None = None


def tiny_subject(args: Args) -> Subject:
    tokenizer = word_tokenizer(closed_vocabulary(), closed_pattern())
    policy = LocalPolicy(tiny_llama(len(tokenizer)), Renderer(tokenizer))
    worlds = list(closed_worlds(0, args.trajectories, objectives=2))
    retriever = MemoryRetriever(passage for world in worlds for passage in world.passages)
    tasks = [world.task for world in worlds]
    turns = asyncio.run(oracle_turns(tasks, retriever, max_turns=16))
    return Subject(policy, tasks, retriever, turns, ContextConfig(prompts="none"), args.rounds, args.one_by_one)


def smollm2_subject(args: Args) -> Subject:
    world = OpenWorld(seed=0, passages=2000)
    retriever = MemoryRetriever(world.passages())
    tasks = list(world.tasks(args.smollm2_trajectories, objectives=2))
    return Subject(
        LocalPolicy.load(BUNDLED_SMOLLM2),
        tasks,
        retriever,
        asyncio.run(oracle_turns(tasks, retriever, max_turns=args.smollm2_turns)),
        ContextConfig(prompts="compact"),
        args.smollm2_rounds,
        args.smollm2_one_by_one,
        args.vllm_url,
    )


SUBJECTS: dict[ModelName, Callable[[Args], Subject]] = {"tiny": tiny_subject, "smollm2": smollm2_subject}


async def oracle_turns(tasks: Sequence[Task], retriever: Retriever, max_turns: int) -> list[list[str]]:
    teacher = Teacher(max_turns=max_turns)
    return [[turn.text for turn in (await teacher.run(task, retriever)).turns] for task in tasks]


class Puppet:
    """A local policy whose model does the work of each turn, while a script decides what was said.

    It stands for one rollout of the tasks, each tried once.
    """

    def __init__(self, subject: Subject) -> None:
        self._policy = subject.policy
        renderer = subject.policy.renderer
        said = [[scripted(text, renderer) for text in texts] for texts in subject.turns]
        self._script = {task.question: iter(turns) for task, turns in zip(subject.tasks, said, strict=True)}
        self.calls: list[Row] = []
        """What the model was asked to sample, with as many tokens as it did sample."""

    @property
    def name(self) -> str:
        return self._policy.name

    @property
    def context_tokens(self) -> int | None:
        return self._policy.context_tokens

    def trajectory(self) -> AbstractContextManager[None]:
        return self._policy.trajectory()

    async def generate(self, request: GenerationRequest) -> Generation:
        said = next(self._script[request.messages[1].content])
        request = replace(request, max_tokens=len(said.token_ids), stop=())
        worked = await self._policy.generate(request)
        self.calls.append(Row(worked.prompt_ids, len(worked.token_ids), request.seed))
        usage = Usage(len(worked.prompt_ids), len(said.token_ids))
        return replace(said, prompt_text=worked.prompt_text, prompt_ids=worked.prompt_ids, usage=usage)

    async def score(self, requests: Sequence[ScoreRequest]) -> list[tuple[float, ...]]:
        return await self._policy.score(requests)

    def count_tokens(self, text: str) -> int:
        return self._policy.count_tokens(text)

    def cut_tokens(self, text: str, max_tokens: int) -> str:
        return self._policy.cut_tokens(text, max_tokens)

    async def aclose(self) -> None:
        await self._policy.aclose()


def scripted(text: str, renderer: Renderer) -> Generation:
    ids = renderer.encode_turn(text)
    return Generation(
        text,
        FinishReason.STOP,
        Usage(0, len(ids)),
        token_ids=ids,
        logprobs=(-1.0,) * len(ids),
        offsets=tuple(token_offsets(ids, renderer)),
    )


def measure(subject: Subject, args: Args) -> Figures:
    figures, calls = engine(subject)
    if "engine" not in args.parts:
        figures = {}
    if "sampling" in args.parts:
        figures |= loops(subject, calls) | neighbours(subject, calls)
    if subject.vllm_url is not None:
        figures["vllm_tokens_per_second"] = asyncio.run(vllm_tokens_per_second(subject.vllm_url, calls))
    return figures


# The engine.


def engine(subject: Subject) -> tuple[Figures, list[Row]]:
    """Batched rollouts and one-by-one `generate`, in turns; and the calls of one rollout."""
    rounds: list[dict[str, float]] = []
    for _ in range(subject.rounds):
        puppet = Puppet(subject)
        with timed(local, "sample_rows") as sampled, timed(sampling, "hidden_states") as forward:
            started = time.perf_counter()
            asyncio.run(rollout(subject, puppet))
            seconds = time.perf_counter() - started
        calls = puppet.calls
        single = one_by_one(subject.policy, calls[:: max(1, len(calls) // subject.one_by_one)])
        rounds.append(
            {
                "rollout_seconds": seconds,
                "rollout_tokens_per_second": tokens(calls) / seconds,
                "one_by_one_generate_tokens_per_second": single,
                "rollout_over_one_by_one_generate": tokens(calls) / seconds / single,
                "engine_share_of_time": 1 - sampled[0] / seconds,
                "sampling_loop_share_of_time": (sampled[0] - forward[0]) / seconds,
                "engine_milliseconds_a_turn": 1000 * (seconds - sampled[0]) / len(calls),
            }
        )
    figures: Figures = {
        "trajectories": len(subject.tasks),
        "turns": len(calls),
        "mean_prompt_tokens": statistics.fmean(len(call.prompt_ids) for call in calls),
        "mean_response_tokens": tokens(calls) / len(calls),
    }
    return figures | medians(rounds), calls


async def rollout(subject: Subject, puppet: Puppet) -> None:
    """All tasks at once."""
    config = RolloutConfig(max_turns=max(map(len, subject.turns)) + 1)
    runner = make_rollout(puppet, [SearchTool(subject.retriever)], config, subject.context)
    tries = [(task, 0) for task in subject.tasks]
    said = [
        [turn.text for turn in trajectory.turns]
        async for trajectory in runner.many(tries, seed=0, concurrency=len(tries))
    ]
    if sorted(said) != sorted(map(list, subject.turns)):
        raise SystemExit("the rollout's turns are not the oracle's: the engine failed")


def one_by_one(policy: LocalPolicy, calls: Sequence[Row]) -> float:
    """Tokens a second of `generate`, called for one prompt after the other."""
    return tokens(calls) / elapsed(lambda: [generate(policy, [call]) for call in calls])


@contextmanager
def timed(module: Any, name: str) -> Iterator[list[float]]:
    """Sums up the seconds spent in a function of a module, in the one value of the list."""
    function, total = getattr(module, name), [0.0]

    def wrapped(*arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            total[0] += time.perf_counter() - started

    with patch.object(module, name, wrapped):
        yield total


# Sampling loops.


def loops(subject: Subject, calls: Sequence[Row]) -> Figures:
    """Ours against transformers' `generate` on one batch, and against ours without rows that leave it.

    `equal`: every row has the length of the longest. `own`: rows end where they ended in the rollout;
    `generate` goes on until the last has ended, and only the tokens up to a row's end count. Ours
    returns log-probabilities of the tokens as well.
    """
    rows = batch(subject, calls)
    longest = max(row.max_tokens for row in rows)
    equal = [replace(row, max_tokens=longest) for row in rows]
    rounds: list[dict[str, float]] = []
    for _ in range(subject.rounds):
        theirs = elapsed(lambda: generate(subject.policy, equal))
        fixed = elapsed(lambda: sample(subject.policy, equal))
        ours = elapsed(lambda: sample(subject.policy, rows))
        rounds.append(
            {
                "generate_tokens_per_second_equal_lengths": tokens(equal) / theirs,
                "sample_rows_tokens_per_second_equal_lengths": tokens(equal) / fixed,
                "sample_rows_over_generate_equal_lengths": theirs / fixed,
                "sample_rows_over_generate_own_lengths": theirs / ours,
                "fixed_batch_seconds_over_leaving_rows": fixed / ours,
            }
        )
    shares = {"tokens_over_row_steps_of_a_fixed_batch": tokens(rows) / tokens(equal)}
    return medians(rounds) | shares


def neighbours(subject: Subject, calls: Sequence[Row]) -> Figures:
    """The same rows in one batch, and each alone: what differs and what it costs."""
    rows = batch(subject, calls)[: subject.one_by_one]
    started = time.perf_counter()
    together = sample(subject.policy, rows)
    middle = time.perf_counter()
    alone = [sample(subject.policy, [row])[0] for row in rows]
    ended = time.perf_counter()
    pairs = list(zip(together, alone, strict=True))
    gaps = [abs(one - other) for a, b in pairs for one, other in zip(a.logprobs, b.logprobs, strict=True) if same(a, b)]
    return {
        "rows_compared_alone_and_in_a_batch": len(rows),
        "rows_with_other_tokens": sum(not same(a, b) for a, b in pairs),
        "largest_logprob_difference": max(gaps, default=0.0),
        "alone_seconds_over_batch_seconds": (ended - middle) / (middle - started),
    }


def same(one: Sampled, other: Sampled) -> bool:
    return one.token_ids == other.token_ids


def batch(subject: Subject, calls: Sequence[Row]) -> list[Row]:
    """As many calls as there are tasks: the last ones, whose prompts hold information."""
    return list(calls[-len(subject.tasks) :])


NEVER = Endings(frozenset(), decode=lambda ids: "", stop_candidates=lambda stop: frozenset())
"""Rows end at their lengths alone, in both loops."""


def sample(policy: LocalPolicy, rows: Sequence[Row]) -> list[Sampled]:
    return sample_rows(policy.model, rows, NEVER)


@torch.inference_mode()
def generate(policy: LocalPolicy, rows: Sequence[Row]) -> None:
    """transformers' own loop: prompts padded on the left, all rows as long as the longest."""
    longest = max(row.max_tokens for row in rows)
    width = max(len(row.prompt_ids) for row in rows)
    ids = torch.tensor([[0] * (width - len(row.prompt_ids)) + list(row.prompt_ids) for row in rows])
    mask = torch.tensor([[0] * (width - len(row.prompt_ids)) + [1] * len(row.prompt_ids) for row in rows])
    made = policy.model.generate(
        ids,
        attention_mask=mask,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_new_tokens=longest,
        max_new_tokens=longest,
        pad_token_id=0,
    )
    assert made.shape == (len(rows), width + longest)


async def vllm_tokens_per_second(url: str, calls: Sequence[Row]) -> float:
    """The calls of a rollout, all at once, against a running vLLM server; `min_tokens` makes the lengths equal."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]

        async def complete(call: Row) -> int:
            body = {
                "model": model,
                "prompt": list(call.prompt_ids),
                "max_tokens": call.max_tokens,
                "min_tokens": call.max_tokens,
                "temperature": 1.0,
            }
            answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
            return int(answer["usage"]["completion_tokens"])

        started = time.perf_counter()
        made = sum(await asyncio.gather(*map(complete, calls)))
        return made / (time.perf_counter() - started)


# A retriever's server, and no model.


def served(args: Args) -> Figures:
    world = OpenWorld(seed=0, passages=args.served_passages)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "world.jsonl")
        write_jsonl(corpus, map(as_row, world.passages()))
        build_index([corpus], Path(folder, "index"), bm25_options=Bm25Options())
        with mempo_server(Path(folder, "index")) as (server, port):
            return asyncio.run(serve(args, world, server, port))


async def serve(args: Args, world: OpenWorld, server: psutil.Process, port: int) -> Figures:
    """Each task has as many questions as it has searches, so that hardly a query is asked twice."""
    tasks = list(world.tasks(args.served_trajectories, objectives=args.served_turns - 1))
    retriever = HttpRetriever(f"http://127.0.0.1:{port}")
    policy = ScriptedPolicy(search_on)
    runner = make_rollout(policy, [SearchTool(retriever)], RolloutConfig(max_turns=args.served_turns + 1))
    await retriever.search([tasks[0].question], 3)  # the first request opens connections
    turns = failures = 0
    own = psutil.Process()
    before = own.memory_info().rss
    with peak_memory(own) as own_peak, peak_memory(server) as server_peak:
        started = time.perf_counter()
        async for trajectory in runner.many([(task, 0) for task in tasks], seed=0, concurrency=args.concurrency):
            turns += len(trajectory.turns)
            failures += len(trajectory.errors)
        seconds = time.perf_counter() - started
    await retriever.aclose()
    return {
        "served_trajectories": len(tasks),
        "served_turns": turns,
        "served_failures": failures,
        "served_trajectories_per_second": len(tasks) / seconds,
        "served_searches_per_second": (turns - len(tasks)) / seconds,
        "served_client_peak_mib": own_peak[0] / 2**20,
        "served_client_added_mib": (own_peak[0] - before) / 2**20,
        "served_server_peak_mib": server_peak[0] / 2**20,
    }


def search_on(messages: tuple[Message, ...]) -> str:
    """Searches each question of the task, then answers; the memory holds the questions that were searched."""
    questions = messages[1].content.split("; ")
    memory = parse(messages[2].content).memory if len(messages) > 2 else None
    done = 0 if memory is None else len(memory.split("; "))
    notes = "; ".join(questions[: done + 1])
    if done == len(questions):
        return render_turn(notes, "I have searched everything.", answer="; ".join(["unknown"] * done))
    return render_turn(notes, "I search on.", call=ToolCall("search", {"query": questions[done]}))


@contextmanager
def peak_memory(process: psutil.Process, every_seconds: float = 0.05) -> Iterator[list[int]]:
    """The most bytes that a process holds during the block, in the one value of the list."""
    peak, ended = [process.memory_info().rss], threading.Event()

    def watch() -> None:
        while not ended.wait(every_seconds):
            peak[0] = max(peak[0], process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        ended.set()
        watcher.join()


# Figures.


def tokens(rows: Sequence[Row]) -> int:
    return sum(row.max_tokens for row in rows)


def elapsed(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def shown(figures: Figures) -> Figures:
    """The figures, printed as soon as they are there."""
    for name, value in figures.items():
        print(f"{name:56} {value:.4g}" if isinstance(value, float) else f"{name:56} {value}", flush=True)
    return figures


def medians(rounds: Sequence[dict[str, float]]) -> Figures:
    warm = rounds[1:] or rounds  # the first touch of memory is slow
    return {name: statistics.median(measured[name] for measured in warm) for name in rounds[0]}


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
