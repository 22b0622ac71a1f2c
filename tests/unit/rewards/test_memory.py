"""What the probes of a memory ask: each baseline's context, to the letter, and whose token is whose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.fixtures.tokenizers import FAMILIES, family

from mempo.config import MemoryConfig
from mempo.core import ContextOverflowError, Objective, ScoreRequest, StopReason, Task, Trajectory, Turn
from mempo.rewards.memory import MemoryProbes, Probe, TurnProbes
from mempo.text.context import ContextPolicy
from mempo.text.prompts import Notices
from mempo.text.render import Renderer

TASK = Task("t", (Objective("Capital of France?", ("Paris", "City of Light")), Objective("When?", ("1969",))))
RENDERER = Renderer(family("qwen25"))


def turn(index: int, memory: str | None, renderer: Renderer = RENDERER) -> Turn:
    text = f"<think>T{index}</think> ..." if memory is None else f"<mem>{memory}</mem>\n<think>T{index}</think> ..."
    # As a policy may sample it: a token for each character, where encoding the text would give fewer.
    ids = tuple(id for character in text for id in renderer.encode(character))
    mask = (1,) * len(ids)
    return Turn(index, text, memory=memory, response_ids=ids, response_mask=mask, observation=f"O{index}")


def trajectory(*memories: str | None, renderer: Renderer = RENDERER) -> Trajectory:
    turns = tuple(turn(index, memory, renderer) for index, memory in enumerate(memories))
    return Trajectory(TASK, 0, turns, StopReason.ANSWERED, seed=0)


FOUR = trajectory("M0", "M1", None, "M3")


def probes(
    of: Trajectory = FOUR, renderer: Renderer = RENDERER, context: Any = None, **config: Any
) -> list[TurnProbes]:
    context = context or ContextPolicy(notices=Notices(last_turn="LAST", no_memory="NONE LEFT"))
    return MemoryProbes(
        renderer, MemoryConfig(**config), context=context, system_prompt=lambda task: "S"
    ).of_trajectory(of)


def asked(probe: Probe | None) -> ScoreRequest:
    assert probe is not None
    [request] = probe.requests
    return request


def prompt(*parts: str) -> str:
    """The conversation of system prompt, question and these messages, the policy's and the user's in turn."""
    roles = ("assistant", "user") * len(parts)
    messages = [("system", "S"), ("user", TASK.question), *zip(roles, parts, strict=False)]
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
    return f"{text}<|im_start|>assistant\n"


FIRST = ("<mem>M0</mem>\n<think>T0</think> ...", "<information>O0</information>")
SECOND = ("<mem>M1</mem>\n<think>T1</think> ...", "<information>O1</information>")
THIRD = ("<think>T2</think> ...", "<information>O2</information>")


def test_a_memory_is_asked_for_the_gold_answer_after_question_and_memory_alone() -> None:
    for index, memory in ((0, "M0"), (1, "M1"), (3, "M3")):
        request = asked(probes()[index].memory)
        assert RENDERER.decode(request.prompt_ids) == prompt() + f"<mem>{memory}</mem>\n<answer>"
        assert RENDERER.decode(request.target_ids) == "Paris; 1969"


@pytest.mark.parametrize(
    ("baseline", "contexts"),
    [
        # Of the turns 0, 1 and 3; the third has no memory.
        ("prefix", [prompt(), prompt(*FIRST), prompt(*FIRST, *SECOND, *THIRD)]),
        ("visible", [prompt(), prompt(*FIRST), prompt(THIRD[0], f"{THIRD[1]}\n\nNONE LEFT")]),
        ("previous_memory", [prompt(), prompt() + "<mem>M0</mem>\n", prompt()]),
        ("no_memory", [prompt()] * 3),
    ],
)
def test_a_baseline_is_asked_in_its_own_context(baseline: str, contexts: Sequence[str]) -> None:
    found = probes(baseline=baseline)
    for index, context in zip((0, 1, 3), contexts, strict=True):
        request = asked(found[index].baseline)
        assert RENDERER.decode(request.prompt_ids) == context + "<answer>"
        assert request.target_ids == asked(found[index].memory).target_ids


def test_a_turn_without_a_memory_is_asked_nothing_and_none_subtracts_nothing() -> None:
    assert probes()[2] == TurnProbes(None, None)
    assert [probe.baseline for probe in probes(baseline="none")] == [None] * 4


def test_earlier_turns_stand_in_the_prefix_as_they_were_sampled() -> None:
    ids = asked(probes(baseline="prefix")[3].baseline).prompt_ids
    for earlier in FOUR.turns[:3]:
        wanted = earlier.response_ids
        assert len(wanted) > len(RENDERER.encode(earlier.text))
        assert any(ids[start : start + len(wanted)] == wanted for start in range(len(ids)))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("layout", ["conversation", "single_message"])
def test_before_the_first_turn_every_baseline_knows_the_question_alone(name: str, layout: Any) -> None:
    renderer = Renderer(family(name), layout)
    of = trajectory("M0", renderer=renderer)
    first = {
        baseline: asked(probes(of, renderer, baseline=baseline)[0].baseline)
        for baseline in ("prefix", "visible", "previous_memory", "no_memory")
    }
    assert len(set(first.values())) == 1


def test_each_target_token_belongs_to_the_objective_that_it_spells() -> None:
    [probe] = [found.memory for found in probes(trajectory("M0"), gold="per_objective")]
    assert probe is not None
    [objectives] = probe.objectives
    ids = asked(probe).target_ids
    spelled = {
        k: RENDERER.decode([id for id, own in zip(ids, objectives, strict=True) if own == k]) for k in (-1, 0, 1)
    }
    assert spelled[0] == "Paris"
    assert spelled[1].strip() == "1969"  # a token may hold the blank before it
    assert spelled[-1].strip() == ";"
    joined = probes(trajectory("M0"))[0].memory
    assert joined is not None
    assert set(joined.objectives[0]) == {0}


def test_every_alias_is_asked_for_where_the_best_counts() -> None:
    [probe] = [found.memory for found in probes(trajectory("M0"), aliases="best")]
    assert probe is not None
    # The second question has one alias: its first stands in.
    assert [RENDERER.decode(request.target_ids) for request in probe.requests] == ["Paris; 1969", "City of Light; 1969"]


def test_a_prefix_that_the_scorer_cannot_read_loses_its_oldest_turns_and_is_counted() -> None:
    whole = asked(probes()[3].baseline)
    shorter = asked(probes(trajectory("M1", None, "M3"))[2].baseline)  # turn 3 without turn 0 before it
    limit = len(whole.prompt_ids) + len(whole.target_ids)

    def at(context_tokens: int) -> tuple[ScoreRequest, int]:
        made = MemoryProbes(
            RENDERER,
            MemoryConfig(),
            context=ContextPolicy(),
            system_prompt=lambda task: "S",
            context_tokens=context_tokens,
        )
        return asked(made.of_trajectory(FOUR)[3].baseline), made.shortened

    assert at(limit) == (whole, 0)
    cut, count = at(limit - 1)
    assert count == 1
    assert len(cut.prompt_ids) == len(shorter.prompt_ids)
    assert "O1" in RENDERER.decode(cut.prompt_ids)
    assert "O0" not in RENDERER.decode(cut.prompt_ids)
    with pytest.raises(ContextOverflowError, match="task t: the question and its gold answer are longer"):
        at(10)
