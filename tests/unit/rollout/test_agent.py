from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence

import pytest

import mempo
from mempo import Agent
from mempo.config import ContextConfig, RolloutConfig
from mempo.core import Generation, GenerationRequest, Passage, PolicyError, StopReason, Turn
from mempo.env import SearchTool
from mempo.policy.scripted import ScriptedPolicy
from mempo.policy.tiny import tiny_policy

CALL = '<mem>m</mem><think>t</think><tool_call>{"name": "search", "arguments": {"query": "q"}}</tool_call>'
ANSWER = "<mem>m</mem><think>t</think><answer>Paris</answer>"


class ClosingRetriever:
    """Finds nothing, and knows whether it was closed."""

    closed = 0

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        await asyncio.sleep(0.01)
        return [[] for _ in queries]

    async def aclose(self) -> None:
        self.closed += 1


def test_run_gives_the_whole_trajectory_and_closes_what_it_opened() -> None:
    retriever = ClosingRetriever()
    agent = Agent(ScriptedPolicy([CALL, ANSWER]), [SearchTool(retriever)])
    trajectory = agent.run("Capital of France?")
    assert (trajectory.answer, trajectory.stop, len(trajectory.turns)) == ("Paris", StopReason.ANSWERED, 2)
    assert retriever.closed == 1
    assert agent.run("Capital of France?").answer == "Paris"


def test_several_questions_are_one_task_without_gold() -> None:
    trajectory = Agent(ScriptedPolicy([ANSWER])).run(["Who?", "Where?"])
    assert trajectory.task.question == "Who?; Where?"
    assert [objective.answers for objective in trajectory.task.objectives] == [(), ()]
    assert "There are 2 questions" in trajectory.turns[0].prompt_text


@pytest.mark.parametrize("question", ["", "  ", [], ["Who?", ""]])
def test_an_empty_question_is_refused(question: str | list[str]) -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        Agent(ScriptedPolicy([ANSWER])).run(question)


def test_stream_gives_turns_as_they_happen() -> None:
    said: list[str] = []

    def script(messages: object) -> str:
        said.append(CALL)
        return CALL if len(said) < 3 else ANSWER

    turns = Agent(ScriptedPolicy(script), [SearchTool(ClosingRetriever())]).stream("Capital of France?")
    first = next(turns)
    assert (first.index, first.observation) == (0, "No results.")
    assert len(said) == 2  # the second search is under way
    rest = list(turns)
    assert [turn.index for turn in rest] == [1, 2]
    assert rest[-1].answer == "Paris"


def test_leaving_a_stream_early_ends_the_trajectory_and_closes() -> None:
    retriever = ClosingRetriever()
    turns = Agent(ScriptedPolicy(lambda _: CALL), [SearchTool(retriever)]).stream("Capital of France?")
    next(turns)
    turns.close()  # type: ignore[attr-defined]
    assert retriever.closed == 1


async def test_the_async_stream_gives_the_same_turns() -> None:
    async with Agent(ScriptedPolicy([CALL, ANSWER]), [SearchTool(ClosingRetriever())]) as agent:
        turns = [turn async for turn in agent.astream("Capital of France?")]
    assert [(turn.index, turn.answer) for turn in turns] == [(0, None), (1, "Paris")]
    assert len(asyncio.all_tasks()) == 1


async def test_leaving_an_async_stream_early_leaves_no_task_behind() -> None:
    agent = Agent(ScriptedPolicy(lambda _: CALL), [SearchTool(ClosingRetriever())])
    turns = agent.astream("Capital of France?")
    await anext(turns)
    await turns.aclose()
    assert len(asyncio.all_tasks()) == 1


def test_a_failing_policy_is_data_in_run_and_raised_in_stream() -> None:
    agent = Agent(ScriptedPolicy([CALL, PolicyError("the server is gone")]), [SearchTool(ClosingRetriever())])
    trajectory = agent.run("Capital of France?")
    assert (trajectory.stop, trajectory.answer) == (StopReason.POLICY_ERROR, None)
    turns = agent.stream("Capital of France?")
    assert next(turns).index == 0
    with pytest.raises(PolicyError, match="the server is gone"):
        next(turns)


def test_functions_are_tools_and_a_memory_can_be_replaced() -> None:
    def search(query: str) -> list[str]:
        """Look something up."""
        return [query.upper()]

    read: list[str | None] = []

    def edit(turn: Turn) -> str:
        read.append(turn.memory)
        return "replaced"

    trajectory = Agent(ScriptedPolicy([CALL, ANSWER]), [search], edit_memory=edit).run("Capital of France?")
    assert trajectory.turns[0].observation == '["Q"]'
    assert read == ["m"]
    assert "<mem>replaced</mem>" in trajectory.turns[1].prompt_text


def test_equal_questions_and_seeds_give_equal_trajectories_with_a_real_model() -> None:
    policy = tiny_policy([*"abcdef ", "<answer>", "</answer>"])
    options = {"rollout": RolloutConfig(max_turns=1, max_response_tokens=8), "context": ContextConfig(prompts="none")}

    def texts(question: str, seed: int) -> str:
        return Agent(policy, seed=seed, **options).run(question).turns[0].text  # type: ignore[arg-type]

    assert texts("abc", 0) == texts("abc", 0)
    assert len({texts("abc", 0), texts("abd", 0), texts("abc", 1)}) == 3


def test_an_agent_is_greedy_unless_it_is_told_otherwise() -> None:
    asked: list[float] = []

    class Noting(ScriptedPolicy):
        async def generate(self, request: GenerationRequest) -> Generation:
            asked.append(request.temperature)
            return await super().generate(request)

    Agent(Noting([ANSWER])).run("Who?")
    Agent(Noting([ANSWER]), rollout=RolloutConfig()).run("Who?")
    assert asked == [0.0, 1.0]


async def test_the_plain_calls_say_what_to_use_inside_an_event_loop() -> None:
    agent = Agent(ScriptedPolicy([ANSWER]))
    with pytest.raises(RuntimeError, match="use arun and astream"):
        agent.run("Capital of France?")
    with pytest.raises(RuntimeError, match="use arun and astream"):
        next(agent.stream("Capital of France?"))


def test_the_package_itself_stays_light() -> None:
    code = "import mempo, sys; assert mempo.__version__; print([m for m in sys.modules if m.startswith('mempo.')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    heavy = "import mempo, sys; mempo.Agent; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", heavy], check=True)
    with pytest.raises(AttributeError, match="no attribute 'Agents'"):
        _ = mempo.Agents
    assert "Agent" in dir(mempo)
