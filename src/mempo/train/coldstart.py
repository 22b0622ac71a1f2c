"""Teacher trajectories as rows of tokens for behaviour cloning.

A turn gives one row: the prompt that a policy would see at that turn, and the turn's text. Where asked
for, a share of the trajectories also gives rows of the memory scorer's very form. They end in the answer
that can be known from their context, a memory or the whole history before a turn, and not in the gold
one: a policy that learned to answer from nothing would find every memory good. Tasks of the embedded
world tell what can be known; of other tasks only contexts that hold every gold answer give a row.

What a teacher sampled is read as text, since its ids belong to another tokenizer.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mempo.config import Config
from mempo.core import DataError, Message, Task, Trajectory, Turn, derive_seed
from mempo.data.teacher import holds_answer, learn, script_for
from mempo.data.world import UNKNOWN, is_world_task, split_notes
from mempo.rewards.memory import FULL_HISTORY, probe_prefix
from mempo.rewards.verdict import Verdict, judge
from mempo.rollout.assembly import make_context
from mempo.text.context import ContextPolicy
from mempo.text.render import Renderer
from mempo.train.forward import TokenRow


@dataclass(frozen=True, slots=True)
class ColdStart:
    """Rows to train on, rows of other tasks to watch the loss on, and what became of the trajectories."""

    train: list[TokenRow]
    heldout: list[TokenRow]
    counts: Mapping[str, int]
    """`right`, `wrong`, `unanswered`, `malformed`: trajectories read; `kept`, `kept_wrong`: of these, used;
    `turn_rows`, `probe_rows`: made of them; `too_long`: further rows that were left out."""


def make_cold_start(
    trajectories: Iterable[Trajectory],
    renderer: Renderer,
    config: Config,
    *,
    system_prompt: Callable[[Task], str],
) -> ColdStart:
    """All rows, as `config.sft` asks for them; they depend on the seed and on the trajectories alone.

    Rows that are longer than prompt and response may be in a rollout are left out and counted.
    Raises DataError where no row is left to train on, saying what became of the trajectories.
    """
    counts = Counter(dict.fromkeys([*Verdict, "kept", "kept_wrong", "turn_rows", "probe_rows", "too_long"], 0))
    kept = list(_kept(trajectories, config, counts))
    watched = heldout_tasks({trajectory.task.id for trajectory in kept}, config.sft.heldout_share, config.seed)
    maker = RowMaker(renderer, make_context(config.context), system_prompt, max_turns=config.rollout.max_turns)
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    train: list[TokenRow] = []
    heldout: list[TokenRow] = []
    for trajectory in kept:
        draw = random.Random(derive_seed(config.seed, "probes", trajectory.task.id, trajectory.rollout))
        made = {"turn_rows": maker.turn_rows(trajectory), "probe_rows": []}
        if draw.random() < config.sft.probe_share:
            last = len(trajectory.turns) - 1
            made["probe_rows"] = maker.probe_rows(trajectory, sorted({draw.randint(0, last), last}))
        for kind, rows in made.items():
            short = [row for row in rows if len(row.prompt_ids) + len(row.response_ids) <= longest]
            counts[kind] += len(short)
            counts["too_long"] += len(rows) - len(short)
            (heldout if trajectory.task.id in watched else train).extend(short)
    if not train:
        shown = ", ".join(f"{count} {name}" for name, count in counts.items())
        raise DataError(f"no row is left to train on; of the trajectories: {shown}")
    return ColdStart(train, heldout, {str(name): count for name, count in counts.items()})


def heldout_tasks(tasks: Iterable[str], share: float, seed: int) -> frozenset[str]:
    """The tasks that are not trained on: a share of all, rounded, and at least one where there is a share.

    >>> sorted(heldout_tasks(["a", "b", "c", "d"], 0.5, seed=0)), heldout_tasks(["a", "b"], 0.0, seed=0)
    (['b', 'c'], frozenset())
    """
    drawn = sorted(set(tasks), key=lambda task: derive_seed(seed, "heldout", task))
    count = max(1, round(share * len(drawn))) if share > 0 else 0
    return frozenset(drawn[: min(count, len(drawn) - 1)])


class RowMaker:
    """Makes the rows of one trajectory, with the context and the renderer of rollouts."""

    def __init__(
        self, renderer: Renderer, context: ContextPolicy, system_prompt: Callable[[Task], str], *, max_turns: int
    ) -> None:
        self._renderer = renderer
        self._context = context
        self._system_prompt = system_prompt
        self._max_turns = max_turns

    def turn_rows(self, trajectory: Trajectory) -> list[TokenRow]:
        """One row a turn; turn number `max_turns` sees the notice that it is the last."""
        turns = self._encoded(trajectory.turns)
        return [
            TokenRow(
                self._renderer.prompt_ids(
                    self._messages(self._context, trajectory.task, turns[:index], index == self._max_turns - 1)
                ),
                turn.response_ids,
            )
            for index, turn in enumerate(turns)
        ]

    def probe_rows(self, trajectory: Trajectory, turns: Iterable[int]) -> list[TokenRow]:
        """For each of these turns: the answer that its memory allows, and the one that the history before it does."""
        return [row for index in turns for row in self._probes_of(trajectory, index)]

    def _probes_of(self, trajectory: Trajectory, index: int) -> Iterator[TokenRow]:
        task, earlier, memory = trajectory.task, self._encoded(trajectory.turns[:index]), trajectory.turns[index].memory
        if memory is not None and (answer := answer_from_memory(task, memory)) is not None:
            yield self._probe(task, (), probe_prefix(memory), answer)
        if (answer := answer_from_history(task, earlier)) is not None:
            yield self._probe(task, earlier, probe_prefix(None), answer)

    def _probe(self, task: Task, history: Sequence[Turn], prefix: str, answer: str) -> TokenRow:
        request = self._renderer.score_request(self._messages(FULL_HISTORY, task, history, False), prefix, answer)
        return TokenRow(request.prompt_ids, request.target_ids + self._renderer.encode_turn("</answer>"))

    def _encoded(self, turns: Sequence[Turn]) -> list[Turn]:
        """The turns with ids as if the policy had sampled their texts: prompts splice them as in a rollout.

        Encoded within a prompt, a turn without a template's tokens around it would melt into its neighbours.
        """
        ids = [self._renderer.encode_turn(turn.text) for turn in turns]
        return [
            replace(turn, response_ids=own, response_mask=(1,) * len(own)) for turn, own in zip(turns, ids, strict=True)
        ]

    def _messages(
        self, context: ContextPolicy, task: Task, turns: Sequence[Turn], last_turn: bool
    ) -> tuple[Message, ...]:
        return context.messages(
            self._system_prompt(task),
            task.question,
            turns,
            last_turn=last_turn,
            count_tokens=lambda text: len(self._renderer.encode(text)),
        )


def answer_from_memory(task: Task, memory: str) -> str | None:
    """What can be answered from a memory alone; None where that cannot be told."""
    if is_world_task(task):
        return _joined(script_for(task).answers(split_notes(memory)))
    return _gold_if_held(task, memory)


def answer_from_history(task: Task, turns: Sequence[Turn]) -> str | None:
    """What can be answered from all that these turns found; None where that cannot be told."""
    if is_world_task(task):
        script = script_for(task)
        found = [passage for turn in turns for passage in turn.passages]
        return _joined(script.answers(learn(script, (), found)))
    return _gold_if_held(task, "\n".join(turn.observation or "" for turn in turns))


def _joined(answers: Sequence[str | None]) -> str:
    return "; ".join(UNKNOWN if answer is None else answer for answer in answers)


def _gold_if_held(task: Task, text: str) -> str | None:
    return task.gold if all(holds_answer(text, objective) for objective in task.objectives) else None


def _kept(trajectories: Iterable[Trajectory], config: Config, counts: Counter[str]) -> Iterator[Trajectory]:
    for trajectory in trajectories:
        verdict = judge(trajectory, config.reward.mode)
        counts[verdict] += 1
        draw = random.Random(derive_seed(config.seed, "keep_wrong", trajectory.task.id, trajectory.rollout))
        wrong = verdict is Verdict.WRONG and draw.random() < config.sft.keep_wrong_share
        counts["kept_wrong"] += wrong
        if verdict is Verdict.RIGHT or wrong:
            counts["kept"] += 1
            yield trajectory
