"""One recorded trajectory through every path that renders prompts: all of them see the same ids."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from tests.fixtures.closed import taught
from tests.fixtures.tokenizers import FAMILIES, family
from tests.services.openai_stub import ids_reply, vllm
from tests.services.stubs import Reply, Request, StubServer

from mempo.config import ContextConfig, MemoryConfig, RolloutConfig
from mempo.core import GenerationRequest, Json, Message, Observation, Policy, Trajectory
from mempo.policy.local import LocalPolicy
from mempo.policy.openai import OpenAIPolicy
from mempo.policy.scripted import ScriptedPolicy
from mempo.policy.tiny import tiny_llama
from mempo.rewards.memory import MemoryProbes, probe_prefix
from mempo.rollout import Rollout, make_context, make_rollout, make_system_prompt
from mempo.text.render import Renderer
from mempo.train.coldstart import RowMaker

[RECORDED] = taught(1)
CONTEXT = ContextConfig()
ROLLOUT = RolloutConfig(max_turns=16)


class Replay:
    """The tool that gives the recorded observations again, in order."""

    name, description = "search", "Search."
    parameters: Mapping[str, Json] = {"type": "object", "properties": {"query": {"type": "string"}}}

    def __init__(self) -> None:
        self._left = [turn.observation for turn in RECORDED.turns if turn.observation is not None]

    async def call(self, arguments: Any) -> Observation:
        return Observation(self._left.pop(0))


def played(policy: Policy) -> tuple[Trajectory, Rollout]:
    rollout = make_rollout(policy, [Replay()], ROLLOUT, CONTEXT)
    return asyncio.run(rollout.one(RECORDED.task, rollout=0, seed=0)), rollout


def replies(renderer: Renderer) -> Any:
    """A server that says the recorded turns, as token ids, and keeps the prompts it was sent."""
    sent: list[tuple[int, ...]] = []

    def complete(request: Request) -> Reply:
        sent.append(tuple(request.json["prompt"]))
        ids = renderer.encode_turn(RECORDED.turns[len(sent) - 1].text)
        return ids_reply(ids, [-1.0] * len(ids))

    return sent, vllm(complete, context_tokens=100_000)


@pytest.mark.parametrize("name", FAMILIES)
def test_rollout_cloning_scoring_and_a_server_see_the_same_ids(name: str) -> None:
    renderer = Renderer(family(name))
    texts = [turn.text for turn in RECORDED.turns]

    rolled, _ = played(ScriptedPolicy(texts, renderer=renderer))
    assert [turn.text for turn in rolled.turns] == texts
    prompts = [turn.prompt_ids for turn in rolled.turns]

    # Behaviour cloning: one row a turn.
    system, context = make_system_prompt([Replay()], CONTEXT), make_context(CONTEXT)
    rows = RowMaker(renderer, context, system, max_turns=ROLLOUT.max_turns).turn_rows(RECORDED)
    assert [row.prompt_ids for row in rows] == prompts
    assert [row.response_ids for row in rows] == [turn.response_ids for turn in rolled.turns]

    # Scoring: the `visible` baseline asks after the very prompt of each turn.
    probes = MemoryProbes(renderer, MemoryConfig(baseline="visible"), context=context, system_prompt=system)
    for probe, prompt in zip(probes.of_trajectory(rolled), prompts, strict=True):
        assert probe.baseline is not None
        assert probe.baseline.requests[0].prompt_ids == prompt + renderer.encode_turn(probe_prefix(None))

    # A server that takes token ids.
    sent, answer = replies(renderer)
    with StubServer(answer) as stub:
        served, _ = played(OpenAIPolicy(stub.url, "m", mode="tokens", renderer=renderer))
    assert sent == prompts
    assert [turn.prompt_ids for turn in served.turns] == prompts
    assert [turn.response_ids for turn in served.turns] == [turn.response_ids for turn in rolled.turns]
    assert [turn.mem_mask for turn in served.turns] == [turn.mem_mask for turn in rolled.turns]

    # The policy in this process, asked for one token after the same messages.
    local = LocalPolicy(tiny_llama(len(family(name)), width=8, layers=1, heads=1, context_tokens=100_000), renderer)
    messages = context.messages(system(RECORDED.task), RECORDED.task.question, rolled.turns[:1], last_turn=False)
    assert asyncio.run(one_token(local, messages)) == prompts[1]


async def one_token(policy: LocalPolicy, messages: tuple[Message, ...]) -> tuple[int, ...]:
    return (await policy.generate(GenerationRequest(messages, max_tokens=1, seed=0))).prompt_ids


def test_the_recorded_trajectory_has_several_turns_and_observations() -> None:
    assert len(RECORDED.turns) >= 3
    assert all(turn.observation for turn in RECORDED.turns[:-1])
