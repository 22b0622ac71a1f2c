from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.services.stubs import Reply, Request, StubServer, echo_result, retriever

from mempo.config import ContextConfig, RolloutConfig
from mempo.core import (
    ContextOverflowError,
    FinishReason,
    Generation,
    GenerationRequest,
    Message,
    Objective,
    Passage,
    PolicyError,
    RetrievalError,
    StopReason,
    Task,
    Tool,
    ToolError,
    Trajectory,
    Turn,
    derive_seed,
)
from mempo.env import FunctionTool, SearchTool
from mempo.policy.local import LocalPolicy
from mempo.policy.scripted import ScriptedPolicy
from mempo.policy.tiny import tiny_llama, tiny_policy, word_tokenizer
from mempo.retrieval.client import HttpRetriever
from mempo.rewards import ran_out_of_room, score_task
from mempo.rollout import Rollout, RolloutHooks, group_trajectories, make_rollout
from mempo.rollout.engine import with_memory
from mempo.text.render import Renderer

TASK = Task("t", (Objective("Capital of France?", ("Paris",)),))
ANSWER = "<mem>it is Paris</mem><think>done</think><answer>Paris</answer>"
LETTERS = [chr(code) for code in range(32, 127)]


def call(query: str = "capital of France", memory: str = "nothing yet", name: str = "search") -> str:
    arguments = json.dumps({"name": name, "arguments": {"query": query}})
    return f"<mem>{memory}</mem><think>look it up</think><tool_call>{arguments}</tool_call>"


class Recorder:
    """A retriever that finds one passage, and keeps the queries."""

    def __init__(self, text: str = "Paris is the capital.", error: RetrievalError | None = None) -> None:
        self.queries: list[str] = []
        self._text, self._error = text, error

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        self.queries += queries
        if self._error is not None:
            raise self._error
        return [[Passage("1", "France", self._text)] for _ in queries]


def spelling(
    script: Sequence[str | Exception] | Callable[[tuple[Message, ...]], str], **options: Any
) -> ScriptedPolicy:
    """A scripted policy of one token a character."""
    return ScriptedPolicy(script, renderer=Renderer(word_tokenizer([*LETTERS, "\n"])), **options)


def engine(
    policy: ScriptedPolicy,
    tools: Sequence[Tool] | None = None,
    *,
    hooks: RolloutHooks | None = None,
    context: ContextConfig | None = None,
    **config: Any,
) -> Rollout:
    context = context or ContextConfig(prompts="none")
    chosen = RolloutConfig(**{"max_prompt_tokens": 100_000, **config})
    return make_rollout(policy, [SearchTool(Recorder())] if tools is None else tools, chosen, context, hooks=hooks)


def one(policy: ScriptedPolicy, tools: Sequence[Tool] | None = None, task: Task = TASK, **options: Any) -> Trajectory:
    return asyncio.run(engine(policy, tools, **options).one(task, rollout=0, seed=0))


async def everything(rollout: Rollout, tries: Sequence[tuple[Task, int]], concurrency: int = 8) -> list[Trajectory]:
    return [found async for found in rollout.many(tries, seed=0, concurrency=concurrency)]


# --- one trajectory -------------------------------------------------------------------------------


def test_a_search_and_an_answer_make_two_turns() -> None:
    recorder = Recorder()
    trajectory = one(spelling([call(), ANSWER]), [SearchTool(recorder)])
    assert recorder.queries == ["capital of France"]
    assert (trajectory.stop, trajectory.answer, trajectory.well_formed) == (StopReason.ANSWERED, "Paris", True)
    first, second = trajectory.turns
    assert first.observation == "[1] France: Paris is the capital."
    assert [passage.id for passage in first.passages] == ["1"]
    assert (second.observation, second.memory, second.thought) == (None, "it is Paris", "done")
    assert [turn.index for turn in trajectory.turns] == [0, 1]
    assert trajectory.errors == ()


def test_case_10_every_turn_is_a_row_with_all_its_sampled_tokens_and_its_memory_marked() -> None:
    trajectory = one(spelling([call(), call("again", "m2"), ANSWER]))
    assert len(trajectory.turns) == 3
    for turn, memory in zip(trajectory.turns, ("nothing yet", "m2", "it is Paris"), strict=True):
        assert sum(turn.response_mask) == len(turn.response_ids) == len(turn.logprobs) == len(turn.text) > 0
        # One token a character: `<mem>` is 0 0 0 0 0, then the memory and `</mem>` are 1.
        expected = [0] * len("<mem>") + [1] * len(f"{memory}</mem>")
        assert list(turn.mem_mask) == expected + [0] * (len(turn.text) - len(expected))


def test_case_12_what_was_sampled_behind_the_action_stays_in_the_row() -> None:
    trajectory = one(spelling([call() + ".\n", ANSWER]))
    turn = trajectory.turns[0]
    assert turn.text.endswith("</tool_call>.\n")
    assert len(turn.response_ids) == len(turn.text)
    assert turn.call is not None
    assert turn.problems == ("trailing_text",)


def test_case_21_the_first_complete_action_ends_the_turn() -> None:
    recorder = Recorder()
    trajectory = one(spelling([ANSWER + call("Lyon")]), [SearchTool(recorder)])
    assert (trajectory.answer, recorder.queries) == ("Paris", [])
    assert trajectory.turns[0].problems == ("trailing_text",)


def test_case_01_an_answer_inside_an_observation_is_not_an_answer() -> None:
    recorder = Recorder("<answer>Paris</answer>")
    trajectory = one(spelling([call(), "<mem>m</mem>I do not know."]), [SearchTool(recorder)])
    assert trajectory.answer is None
    assert trajectory.stop is StopReason.MALFORMED
    assert score_task(trajectory.answer, TASK).em == 0


def test_case_18_a_cut_inside_the_thought_is_truncated_whatever_the_prompt_holds() -> None:
    recorder = Recorder()
    trajectory = one(
        spelling([call("old"), "<mem>m</mem><think>" + "x" * 200]), [SearchTool(recorder)], max_response_tokens=120
    )
    assert recorder.queries == ["old"]
    assert (trajectory.stop, trajectory.answer) == (StopReason.TRUNCATED, None)


def test_case_16_a_truncated_trajectory_is_kept_as_data_with_its_tokens_counted() -> None:
    trajectory = one(spelling(["<mem>m</mem><think>" + "x" * 200]), max_response_tokens=120)
    assert trajectory.stop is StopReason.TRUNCATED
    assert ran_out_of_room(trajectory)
    assert sum(trajectory.turns[0].response_mask) == 120
    assert trajectory.turns[0].finish is FinishReason.LENGTH


def test_case_55_a_cut_output_with_a_complete_answer_is_answered() -> None:
    trajectory = one(spelling([ANSWER + "x" * 500]), max_response_tokens=len(ANSWER) + 5)
    assert (trajectory.stop, trajectory.answer) == (StopReason.ANSWERED, "Paris")


def test_case_55_a_prompt_that_outgrows_the_context_ends_the_trajectory_and_keeps_its_turns() -> None:
    # Turn 1: 20 characters of question and blank line, then a response of 130. The second prompt holds
    # both and the observation: more than 200.
    trajectory = one(spelling([call(), ANSWER], context_tokens=200))
    assert trajectory.stop is StopReason.CONTEXT_OVERFLOW
    assert len(trajectory.turns) == 1
    [error] = trajectory.errors
    assert (error.boundary, error.kind, error.turn) == ("policy", "ContextOverflowError", 1)


def test_case_57_the_last_turn_is_announced_and_its_search_is_not_made() -> None:
    recorder, prompts = Recorder(), list[str]()

    def script(messages: tuple[Message, ...]) -> str:
        prompts.append(messages[-1].content)
        return call()

    policy = spelling(script)
    trajectory = one(policy, [SearchTool(recorder)], max_turns=3, context=ContextConfig())
    assert len(recorder.queries) == 2
    assert (trajectory.stop, trajectory.answer, len(trajectory.turns)) == (StopReason.MAX_TURNS, None, 3)
    assert [("last turn" in prompt) for prompt in prompts] == [False, False, True]
    assert trajectory.total_tokens == sum(turn.usage.total_tokens for turn in trajectory.turns)
    assert score_task(trajectory.answer, TASK).f1 == 0


def test_an_answer_in_the_last_turn_counts() -> None:
    trajectory = one(spelling([call(), ANSWER]), max_turns=2)
    assert (trajectory.stop, trajectory.answer) == (StopReason.ANSWERED, "Paris")


def test_a_turn_without_an_action_stops_the_trajectory_or_is_told() -> None:
    script = ["no action at all", ANSWER]
    stopped = one(spelling(script))
    assert (stopped.stop, len(stopped.turns)) == (StopReason.MALFORMED, 1)
    told = one(spelling(script), malformed="tell")
    assert told.stop is StopReason.ANSWERED
    observation = told.turns[0].observation
    assert observation is not None
    assert observation.startswith("No action could be read: no complete mem block")
    [error] = told.errors
    assert (error.boundary, error.kind, error.turn) == ("environment", "malformed turn", 0)
    assert one(spelling(script), malformed="tell", stop_at_tool_error=True).stop is StopReason.ANSWERED
    last = one(spelling(["no action"]), malformed="tell", max_turns=1)
    assert last.stop is StopReason.MALFORMED


def test_case_28_nothing_of_an_older_turn_is_left_in_a_prompt() -> None:
    class Numbered(Recorder):
        async def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
            self.queries += queries
            return [[Passage("1", "", f"DOC{len(self.queries)}MARK")] for _ in queries]

    trajectory = one(spelling([call("one", "MEM1MARK"), call("two", "MEM2MARK"), ANSWER]), [SearchTool(Numbered())])
    prompt = trajectory.turns[2].prompt_text
    assert [prompt.count(mark) for mark in ("DOC1MARK", "MEM1MARK", TASK.question)] == [0, 0, 1]
    assert [prompt.count(mark) for mark in ("DOC2MARK", "MEM2MARK")] == [1, 1]


def test_the_next_prompt_holds_the_very_ids_that_were_sampled() -> None:
    trajectory = one(spelling([call(), ANSWER]))
    first, second = trajectory.turns
    ids, wanted = second.prompt_ids, first.response_ids
    assert any(ids[start : start + len(wanted)] == wanted for start in range(len(ids)))


def test_case_59_total_and_peak_tokens_are_sums_and_maximum_over_calls() -> None:
    trajectory = one(spelling([call(), ANSWER]))
    sizes = [len(turn.prompt_ids) + len(turn.response_ids) for turn in trajectory.turns]
    assert (trajectory.total_tokens, trajectory.peak_tokens) == (sum(sizes), max(sizes))


# --- failures -------------------------------------------------------------------------------------


def test_a_failing_policy_is_data_with_its_boundary() -> None:
    trajectory = one(spelling([call(), PolicyError("the server is gone")]))
    assert (trajectory.stop, len(trajectory.turns)) == (StopReason.POLICY_ERROR, 1)
    [error] = trajectory.errors
    assert (error.boundary, error.kind, error.message, error.turn) == ("policy", "PolicyError", "the server is gone", 1)


def test_case_47_a_failing_search_is_told_and_the_trajectory_goes_on() -> None:
    tools = [SearchTool(Recorder(error=RetrievalError("502")))]
    trajectory = one(spelling([call(), ANSWER]), tools)
    assert trajectory.stop is StopReason.ANSWERED
    assert trajectory.turns[0].observation == "The search failed. Try again."
    [error] = trajectory.errors
    assert (error.boundary, error.kind, error.message, error.turn) == ("tool", "RetrievalError", "502", 0)


def test_a_run_may_be_told_to_stop_at_a_failing_tool() -> None:
    tools = [SearchTool(Recorder(error=RetrievalError("502")))]
    trajectory = one(spelling([call(), ANSWER]), tools, stop_at_tool_error=True)
    assert (trajectory.stop, len(trajectory.turns)) == (StopReason.TOOL_ERROR, 1)
    assert trajectory.turns[0].observation == "The search failed. Try again."


@pytest.mark.parametrize(
    ("fault", "stop"),
    [
        (ToolError("no such page"), StopReason.ANSWERED),
        (TypeError("oops"), StopReason.TOOL_ERROR),
        (TimeoutError("late"), StopReason.TOOL_ERROR),
    ],
)
def test_a_run_that_stops_at_failing_tools_still_tells_a_call_that_is_refused(
    fault: Exception, stop: StopReason
) -> None:
    def search(query: str) -> str:
        raise fault

    trajectory = one(spelling([call(), ANSWER]), [FunctionTool(search)], stop_at_tool_error=True)
    assert trajectory.stop is stop
    assert [error.kind for error in trajectory.errors] == [type(fault).__name__]


@pytest.mark.parametrize("query", ["", "  "])
def test_case_49_a_blank_query_is_an_error_of_the_call_and_never_sent(query: str) -> None:
    recorder = Recorder()
    trajectory = one(spelling([call(query), ANSWER]), [SearchTool(recorder)])
    assert recorder.queries == []
    assert [(error.boundary, error.kind) for error in trajectory.errors] == [("tool", "ToolError")]


def test_case_53_an_observation_has_at_most_its_tokens_in_the_prompt_wrapper_included() -> None:
    trajectory = one(spelling([call(), ANSWER]), [SearchTool(Recorder("x" * 10_000_000))], max_observation_tokens=512)
    prompt = trajectory.turns[1].prompt_text
    start, end = prompt.index("<information>"), prompt.index("</information>") + len("</information>")
    assert end - start == 512  # one token a character
    assert "[... cut]" in prompt
    assert trajectory.turns[0].observation_truncated


def test_a_tool_that_raises_does_not_end_the_trajectory() -> None:
    def search(query: str) -> str:
        raise ZeroDivisionError("oops")

    trajectory = one(spelling([call(), ANSWER]), [FunctionTool(search)])
    assert trajectory.stop is StopReason.ANSWERED
    assert trajectory.errors[0].kind == "ZeroDivisionError"


async def test_a_run_stops_when_too_many_trajectories_fail_and_all_ended_ones_are_given_first() -> None:
    rollout = engine(spelling([PolicyError("gone")]), max_failure_rate=0.2)
    seen: list[int] = []

    async def run() -> None:
        async for trajectory in rollout.many([(TASK, i) for i in range(40)], seed=0, concurrency=4):
            seen.append(trajectory.rollout)

    with pytest.raises(PolicyError, match=r"20 of 20 trajectories .*max_failure_rate = 0\.2; the last reason: gone"):
        await run()
    assert len(seen) == 20


async def test_failures_up_to_the_rate_and_few_failures_do_not_stop_a_run() -> None:
    always = engine(spelling([PolicyError("gone")]), max_failure_rate=1.0)
    assert len(await everything(always, [(TASK, i) for i in range(40)])) == 40
    few = engine(spelling([PolicyError("gone")]), max_failure_rate=0.0)
    assert len(await everything(few, [(TASK, i) for i in range(19)])) == 19


async def test_failing_tools_that_end_trajectories_count_as_failures_and_others_do_not() -> None:
    tools = [SearchTool(Recorder(error=RetrievalError("502")))]
    tries = [(TASK, i) for i in range(30)]
    told = engine(spelling([call(), ANSWER]), tools, max_failure_rate=0.0)
    assert {trajectory.stop for trajectory in await everything(told, tries)} == {StopReason.ANSWERED}
    ended = engine(spelling([call(), ANSWER]), tools, max_failure_rate=0.0, stop_at_tool_error=True)
    with pytest.raises(ToolError, match=r"trajectories ended in a failing policy or tool, .* the last reason: 502"):
        await everything(ended, tries)


async def test_overflows_are_not_failures_of_the_policy() -> None:
    class Overflowing(ScriptedPolicy):
        async def generate(self, request: GenerationRequest) -> Generation:
            raise ContextOverflowError("too long")

    found = await everything(engine(Overflowing([]), max_failure_rate=0.0), [(TASK, i) for i in range(30)])
    assert {trajectory.stop for trajectory in found} == {StopReason.CONTEXT_OVERFLOW}


# --- hooks ----------------------------------------------------------------------------------------


def test_a_hook_reads_each_turn_and_may_replace_what_the_next_one_remembers() -> None:
    read: list[str | None] = []

    def edit(turn: Turn) -> str | None:
        read.append(turn.memory)
        return "Paris, says the hook" if turn.index == 0 else None

    hooks = RolloutHooks(edit_memory=edit)
    trajectory = one(spelling([call(memory="mine"), call("b", "second"), ANSWER]), hooks=hooks)
    assert read == ["mine", "second"]
    assert "<mem>Paris, says the hook</mem>" in trajectory.turns[1].prompt_text
    assert "mine" not in trajectory.turns[1].prompt_text
    assert trajectory.turns[0].memory == "mine"  # the record is of what was sampled
    assert trajectory.turns[0].response_ids


def test_a_memory_is_replaced_where_it_stands_or_put_in_front() -> None:
    turn = Turn(0, "<mem>a</mem><think>t</think>", response_ids=(1,), response_mask=(1,), memory="a")
    replaced = with_memory(turn, "b")
    assert (replaced.text, replaced.memory, replaced.response_ids) == ("<mem>b</mem><think>t</think>", "b", ())
    assert with_memory(Turn(0, "x"), "b").text == "<mem>b</mem>\nx"


def test_turns_are_told_as_they_happen() -> None:
    told: list[tuple[str, int, str | None]] = []
    hooks = RolloutHooks(on_turn=lambda task, turn: told.append((task.id, turn.index, turn.observation)))
    one(spelling([call(), ANSWER]), hooks=hooks)
    assert told == [("t", 0, "[1] France: Paris is the capital."), ("t", 1, None)]


# --- many trajectories ----------------------------------------------------------------------------


def sampled(trajectories: Sequence[Trajectory]) -> dict[tuple[str, int], tuple[tuple[int, ...], ...]]:
    return {(t.task.id, t.rollout): tuple(turn.response_ids for turn in t.turns) for t in trajectories}


def test_the_same_seed_gives_the_same_trajectories_whatever_the_concurrency_and_order() -> None:
    words = ["<mem>", "</mem>", "<answer>", "</answer>", *"abcdefgh", " "]
    tasks = [Task(f"t{i}", (Objective("abc"[i] * 3, ("a",)),)) for i in range(3)]
    tries = [(task, index) for task in tasks for index in range(4)]

    def run(concurrency: int, order: Sequence[tuple[Task, int]]) -> dict[Any, Any]:
        rollout = make_rollout(
            tiny_policy(words),
            [],
            RolloutConfig(max_turns=3, max_response_tokens=12, malformed="tell", max_observation_tokens=300),
            ContextConfig(prompts="none"),
        )
        return sampled(asyncio.run(everything(rollout, order, concurrency)))

    alone, together, backwards = run(1, tries), run(12, tries), run(5, tries[::-1])
    assert alone == together == backwards
    assert len({str(value) for value in alone.values()}) == 12  # each try has a seed of its own


def test_seeds_are_named_by_run_task_and_rollout() -> None:
    rollout = engine(spelling([ANSWER]))
    trajectory = asyncio.run(rollout.one(TASK, rollout=3, seed=5))
    assert (trajectory.seed, trajectory.rollout) == (derive_seed(5, "t", 3), 3)


async def test_no_more_run_at_once_than_allowed_and_all_are_given() -> None:
    running = most = 0

    async def search(query: str) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.005)
        running -= 1
        return "found"

    rollout = engine(spelling([call(), ANSWER]), [FunctionTool(search)])
    found = await everything(rollout, [(TASK, i) for i in range(20)], concurrency=3)
    assert sorted(trajectory.rollout for trajectory in found) == list(range(20))
    assert most == 3


async def test_case_77_few_tasks_and_none() -> None:
    rollout = engine(spelling([ANSWER]))
    found = await everything(rollout, [(TASK, 0), (TASK, 1)], concurrency=4)
    assert sorted(trajectory.rollout for trajectory in found) == [0, 1]
    assert await everything(rollout, []) == []


async def test_case_48_a_slow_search_delays_its_own_trajectory_only() -> None:
    async def search(query: str) -> str:
        await asyncio.sleep(30 if query == "slow" else 0)
        return "found"

    def script(messages: tuple[Message, ...]) -> str:
        text = "".join(message.content for message in messages)
        return ANSWER if "<information>" in text else call("slow" if "slow" in text else "quick")

    tasks = [Task(str(i), (Objective("slow?" if i == 0 else "quick?", ("a",)),)) for i in range(8)]
    rollout = engine(spelling(script), [FunctionTool(search)])
    found: list[str] = []
    stream = rollout.many([(task, 0) for task in tasks], seed=0, concurrency=8)
    started = time.perf_counter()
    async for trajectory in stream:
        found.append(trajectory.task.id)
        if len(found) == 7:
            break
    assert time.perf_counter() - started < 5
    await stream.aclose()
    assert sorted(found) == [str(i) for i in range(1, 8)]


async def test_case_48_a_search_that_hangs_is_told_as_failed_while_seven_others_have_long_ended() -> None:
    def answer(request: Request) -> Reply:
        [query] = request.json["queries"]
        found = echo_result(request)
        return Reply(200, found.body, found.headers, stall_seconds=3600) if query == "slow" else found

    def script(messages: tuple[Message, ...]) -> str:
        text = "".join(message.content for message in messages)
        if "<information>" in text:
            return ANSWER
        return call("slow" if "slow" in text else f"quick {text.count('q')}")

    with StubServer(retriever(answer)) as stub:
        client = HttpRetriever(stub.url, timeout_seconds=1.0, retries=1, backoff_seconds=0.1)
        tasks = [Task(str(i), (Objective("slow?" if i == 0 else "quick?", ("a",)),)) for i in range(8)]
        found = await everything(engine(spelling(script), [SearchTool(client)]), [(task, 0) for task in tasks])
        await client.aclose()
    assert [trajectory.task.id for trajectory in found][-1] == "0"
    slow = found[-1]
    assert (slow.stop, slow.turns[0].observation) == (StopReason.ANSWERED, "The search failed. Try again.")
    assert [error.kind for error in slow.errors] == ["RetrievalError"]
    assert 2.0 <= slow.turns[0].tool_seconds < 4.0  # two attempts of a second, and the wait between
    assert max(trajectory.seconds for trajectory in found[:-1]) < 1.5


async def test_a_blocked_tool_holds_a_local_policy_up_for_the_gather_window_only() -> None:
    release = threading.Event()

    def search(query: str) -> str:
        release.wait(60)
        return "late"

    tokenizer = word_tokenizer([call("a"), ANSWER, "x"])
    policy = LocalPolicy(tiny_llama(len(tokenizer)), Renderer(tokenizer), gather_seconds=0.2)
    with policy.trajectory():  # one trajectory that waits for its tool
        started = time.perf_counter()
        rollout = make_rollout(policy, [FunctionTool(search)], RolloutConfig(max_turns=1, max_response_tokens=4))
        await rollout.one(TASK, rollout=0, seed=0)
        assert 0.2 <= time.perf_counter() - started < 3
    release.set()


async def test_stopping_early_ends_every_trajectory_under_way() -> None:
    cancelled = 0

    async def search(query: str) -> str:
        nonlocal cancelled
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled += 1
            raise
        return ""

    rollout = engine(spelling([call(), ANSWER]), [FunctionTool(search)])
    running = asyncio.create_task(everything(rollout, [(TASK, i) for i in range(10)], concurrency=4))
    await asyncio.sleep(0.1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert cancelled == 4
    assert len(asyncio.all_tasks()) == 1


async def test_a_fault_of_the_code_is_not_hidden_in_a_trajectory() -> None:
    def broken(task: Task, turn: Turn) -> None:
        raise TypeError("a bug in a hook")

    rollout = engine(spelling([ANSWER]), hooks=RolloutHooks(on_turn=broken))
    with pytest.raises(TypeError, match="a bug"):
        await everything(rollout, [(TASK, 0)])


def test_groups_hold_the_tries_of_a_task_in_order() -> None:
    other = Task("o", (Objective("?", ("a",)),))
    made = [Trajectory(task, index, (), StopReason.ANSWERED, 0) for task, index in [(TASK, 1), (other, 0), (TASK, 0)]]
    groups = group_trajectories(made)
    assert [(group.task.id, [t.rollout for t in group.trajectories]) for group in groups] == [("t", [0, 1]), ("o", [0])]


def test_the_system_prompt_names_the_tools_and_the_number_of_questions() -> None:
    two = Task("t", (Objective("Who?", ("a",)), Objective("Where?", ("b",))))
    trajectory = one(spelling([ANSWER]), task=two, context=ContextConfig())
    prompt = trajectory.turns[0].prompt_text
    assert "There are 2 questions" in prompt
    assert '"name": "search"' in prompt
