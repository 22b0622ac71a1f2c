"""A rollout over a server that fails: each failure is data on its trajectory, and the others go on."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
from tests.fixtures.tokenizers import family
from tests.services.openai_stub import CHAT, chat_reply, hosted, ids_reply, vllm
from tests.services.stubs import Reply, Request, StubServer, json_reply

from mempo.config import RolloutConfig
from mempo.core import Objective, Passage, PolicyError, StopReason, Task, Trajectory
from mempo.env.search import SearchTool
from mempo.policy.openai import Abilities, OpenAIPolicy
from mempo.retrieval.memory import MemoryRetriever
from mempo.rollout.assembly import make_rollout
from mempo.text.render import Renderer

SEARCH = '<mem>m</mem>\n<think>t</think>\n<tool_call>{"name": "search", "arguments": {"query": "France"}}</tool_call>'
ANSWER = "<mem>Paris</mem>\n<think>t</think>\n<answer>Paris</answer>"
PASSAGES = [Passage("1", "Paris", "Paris is the capital of France.")]
CHAT_ONLY = Abilities(token_ids=False, prompt_logprobs=False)


def task(name: str) -> Task:
    return Task(name, (Objective(f"Capital of France ({name})?", ("Paris",)),))


async def run(policy: OpenAIPolicy, count: int = 6, concurrency: int = 6, **settings: Any) -> list[Trajectory]:
    """One trajectory each of so many tasks, in the order of the tasks."""
    rollout = make_rollout(policy, [SearchTool(MemoryRetriever(PASSAGES))], RolloutConfig(max_turns=4, **settings))
    tries = [(task(f"t{i}"), 0) for i in range(count)]
    try:
        done = [one async for one in rollout.many(tries, seed=1, concurrency=concurrency)]
    finally:
        await policy.aclose()
    return sorted(done, key=lambda one: one.task.id)


def policy(url: str, **options: Any) -> OpenAIPolicy:
    limits = {"timeout_seconds": 10.0, "deadline_seconds": 20.0, "retries": 1, "backoff_seconds": 0.01}
    return OpenAIPolicy(url, "m", **{**limits, "abilities": CHAT_ONLY, **options})


def play(request: Request) -> Reply:
    """Search first, answer when information has come."""
    return chat_reply(ANSWER if "Paris is the capital" in json.dumps(request.json["messages"]) else SEARCH)


def stops(trajectories: list[Trajectory]) -> list[StopReason]:
    return [one.stop for one in trajectories]


async def test_a_healthy_server_gives_whole_trajectories() -> None:
    with StubServer(hosted(play)) as server:
        trajectories = await run(policy(server.url))
    assert stops(trajectories) == [StopReason.ANSWERED] * 6
    for one in trajectories:
        assert [turn.text for turn in one.turns] == [SEARCH, ANSWER]
        assert one.well_formed
        assert (one.total_tokens, one.peak_tokens) == (50, 25)  # each call's usage is 20 + 5


async def test_case_11_a_server_that_cuts_stop_strings_gives_the_same_trajectories() -> None:
    def cut(request: Request) -> Reply:
        text = ANSWER if "Paris is the capital" in json.dumps(request.json["messages"]) else SEARCH
        return chat_reply(text.removesuffix("</answer>").removesuffix("</tool_call>"))

    with StubServer(hosted(cut)) as server:
        trajectories = await run(policy(server.url))
    assert [turn.text for one in trajectories for turn in one.turns] == [SEARCH, ANSWER] * 6


@pytest.mark.parametrize(
    ("body", "stop", "kind"),
    [
        ("bad request", StopReason.POLICY_ERROR, "PolicyError"),
        ("maximum context length is 4096 tokens", StopReason.CONTEXT_OVERFLOW, "ContextOverflowError"),
    ],
)
async def test_a_400_for_one_trajectory_ends_that_one_alone(body: str, stop: StopReason, kind: str) -> None:
    def answer(request: Request) -> Reply:
        return Reply(400, body.encode()) if "(t2)" in json.dumps(request.json["messages"]) else play(request)

    with StubServer(hosted(answer)) as server:
        trajectories = await run(policy(server.url))
        calls = [sent for sent in server.bodies(CHAT) if "(t2)" in json.dumps(sent["messages"])]
    assert len(calls) == 1
    assert stops(trajectories) == [stop if i == 2 else StopReason.ANSWERED for i in range(6)]
    [error] = trajectories[2].errors
    assert (error.boundary, error.kind, error.turn) == ("policy", kind, 0)
    assert body in error.message


async def test_one_answer_that_never_ends_holds_nobody_else_up() -> None:
    def answer(request: Request) -> Reply:
        endless = Reply(200, b" " * 10_000, trickle_seconds=0.05)
        return endless if "(t0)" in json.dumps(request.json["messages"]) else play(request)

    with StubServer(hosted(answer)) as server:
        started = time.monotonic()
        trajectories = await run(policy(server.url, timeout_seconds=2.0, deadline_seconds=3.0))
        assert time.monotonic() - started < 30  # the whole endless answer would take 500 s
    assert stops(trajectories) == [StopReason.POLICY_ERROR, *[StopReason.ANSWERED] * 5]
    assert "no answer within" in trajectories[0].errors[0].message


async def test_a_server_that_dies_in_mid_run_ends_the_run_above_the_failure_rate() -> None:
    lock, left = threading.Lock(), 12
    gone = Reply(200, b"{", declared_bytes=500)  # the connection breaks off

    def answer(request: Request) -> Reply:
        nonlocal left
        with lock:
            left -= 1
        return play(request) if left >= 0 else gone

    # Twelve good answers are six trajectories, one at a time. Of 20 then 14 have failed: 70 %.
    too_many = "14 of 20 trajectories ended in a failing policy"
    with StubServer(hosted(answer)) as server, pytest.raises(PolicyError, match=too_many):
        await run(policy(server.url, retries=0), count=40, concurrency=1)
    left = 12
    with StubServer(hosted(answer)) as server:
        trajectories = await run(policy(server.url, retries=0), count=24, concurrency=1, max_failure_rate=1.0)
    assert sorted(stops(trajectories)) == [StopReason.ANSWERED] * 6 + [StopReason.POLICY_ERROR] * 18


async def test_ids_without_log_probs_are_a_failure_of_the_policy_not_a_zero() -> None:
    renderer = Renderer(family("qwen25"))
    ids = renderer.encode(ANSWER)
    bare = json_reply({"choices": [{"text": "", "token_ids": list(ids), "logprobs": None, "finish_reason": "stop"}]})
    with StubServer(vllm(lambda _: bare)) as server:
        exact = policy(server.url, mode="tokens", renderer=renderer, abilities=None)
        trajectories = await run(exact, count=2)
    assert stops(trajectories) == [StopReason.POLICY_ERROR] * 2
    assert "but 0 log-probabilities" in trajectories[0].errors[0].message


async def test_sampled_ids_go_into_the_next_prompt_as_they_were() -> None:
    renderer = Renderer(family("qwen25"))
    # One token a character: never what the tokenizer itself would make of these texts.
    odd = {text: [i for character in text for i in renderer.encode(character)] for text in (SEARCH, ANSWER)}

    def complete(request: Request) -> Reply:
        searched = "Paris is the capital" in renderer.decode(request.json["prompt"])
        ids = odd[ANSWER if searched else SEARCH]
        return ids_reply(ids, [-1.0] * len(ids))

    with StubServer(vllm(complete)) as server:
        exact = policy(server.url, mode="tokens", renderer=renderer, abilities=None)
        [one] = await run(exact, count=1)
        sent = [body["prompt"] for body in server.bodies("/v1/completions")][1:]
    assert one.stop is StopReason.ANSWERED
    assert [list(turn.prompt_ids) for turn in one.turns] == sent
    assert list(one.turns[0].response_ids) == odd[SEARCH]
    assert str(odd[SEARCH])[1:-1] in str(sent[1])
    assert all(sum(turn.response_mask) == len(turn.logprobs) == len(turn.response_ids) for turn in one.turns)
