"""What tells a healthy training run from a sick one: figures of each batch, and a warning of collapse.

`docs/metrics.md` explains every key. A figure that is not defined (a correlation with something that
does not vary, facts of tasks that have none) is absent, never 0.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev

import torch
from torch import Tensor

from mempo.algo import group_std
from mempo.algo.groups import group_index
from mempo.config import AdvantageConfig
from mempo.core import Group, Task, Trajectory, Turn
from mempo.data.world import facts_kept, is_world_task
from mempo.text.normalise import normalise_qa
from mempo.train.batch import Batch, batch_advantage

COPIED_WORDS = 3
"""A memory copies the question where it shares runs of so many words with it."""

_WORD = re.compile(r"\w+")


def batch_health(groups: Sequence[Group], batch: Batch, config: AdvantageConfig) -> dict[str, float]:
    """The figures of one batch: of the trajectories just sampled, and of the rows that are trained on."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    # By the batch: a trajectory that is not trained on is no part of its group's statistics.
    trained, sizes = torch.unique(batch.group, return_counts=True)
    differing = trained[group_std(batch.outcome, batch.group) > 0]
    return {
        "groups/of_one": int((sizes[trained < len(groups)] == 1).sum()) / len(groups),
        "groups/equal_outcomes": 1 - int((differing < len(groups)).sum()) / len(groups),
        "tokens/prompt": float(sum(turn.usage.prompt_tokens for t in trajectories for turn in t.turns)),
        "tokens/sampled": float(sum(turn.usage.completion_tokens for t in trajectories for turn in t.turns)),
        **_probabilities(trajectories),
        **_lengths(trajectories),
        **_contents(trajectories),
        **_credit(batch, config),
    }


def _probabilities(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """P(answer | memory): its spread, over all turns and by the turn's index."""
    scored = [turn for trajectory in trajectories for turn in trajectory.turns if turn.memory_probability is not None]
    figures = _percentiles("memory/probability", scored)
    for index in sorted({turn.index for turn in scored}):
        of_turn = [turn for turn in scored if turn.index == index]
        name = f"memory/probability/turn_{index}"
        figures[name] = fmean(turn.memory_probability or 0.0 for turn in of_turn)
        figures |= _percentiles(name, of_turn)
    return figures


def _percentiles(name: str, turns: Sequence[Turn]) -> dict[str, float]:
    if not turns:
        return {}
    values = torch.tensor([turn.memory_probability for turn in turns], dtype=torch.float64)
    return {f"{name}/p{percent}": float(values.quantile(percent / 100)) for percent in (10, 50, 90)}


def _lengths(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Tokens of memories, and their share of the prompts that hold them."""
    lengths = [float(sum(turn.mem_mask)) for t in trajectories for turn in t.turns if any(turn.mem_mask)]
    shares = [
        sum(turn.mem_mask) / following.usage.prompt_tokens
        for t in trajectories
        for turn, following in zip(t.turns, t.turns[1:], strict=False)
        if any(turn.mem_mask) and following.usage.prompt_tokens
    ]
    figures = {"memory/context_share": fmean(shares)} if shares else {}
    if lengths:
        values = torch.tensor(lengths, dtype=torch.float64)
        figures |= {f"memory/tokens_p{percent}": float(values.quantile(percent / 100)) for percent in (50, 95)}
    return figures


def _contents(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What memories say: how much of the question, of the gold answers, of the facts that are needed."""
    memories = [(t.task, turn) for t in trajectories for turn in t.turns if turn.memory is not None]
    last = [(t.task, t.turns[-1].memory) for t in trajectories if t.turns]
    of_worlds = [(task, memory) for task, memory in last if is_world_task(task)]
    credited = [(task, turn) for task, turn in memories if is_world_task(task) and turn.memory_reward is not None]
    figures: dict[str, float] = {}
    if memories:
        figures["memory/question_copy"] = fmean(question_copy(turn.memory, task) for task, turn in memories)
        figures["memory/gold_held"] = fmean(gold_held(turn.memory, task) for task, turn in memories)
    if last:
        figures["memory/gold_held_last"] = fmean(gold_held(memory, task) for task, memory in last)
    if of_worlds:
        figures["memory/facts_kept_last"] = fmean(facts_kept(memory, task) for task, memory in of_worlds)
    if credited:
        figures |= _correlation(
            "memory/corr_reward_facts",
            torch.tensor([turn.memory_reward for _, turn in credited]),
            torch.tensor([facts_kept(turn.memory, task) for task, turn in credited]),
        )
    return figures


def question_copy(memory: str | None, task: Task) -> float:
    """The share, in [0, 1], of the question's runs of three words that stand in the memory.

    >>> from mempo.core import Objective
    >>> task = Task("t", (Objective("Who wrote the Iliad?", ("Homer",)),))
    >>> question_copy("I am asked: who wrote the Iliad", task), question_copy("Homer wrote the Iliad.", task)
    (1.0, 0.5)
    """
    asked, held = _runs(task.question), _runs(memory or "")
    return len(asked & held) / len(asked) if asked else 0.0


def gold_held(memory: str | None, task: Task) -> float:
    """The share, in [0, 1], of the questions of which the memory holds a gold answer, as whole words.

    >>> from mempo.core import Objective
    >>> task = Task("t", (Objective("Who?", ("Homer",)), Objective("Where?", ("Chios", "the isle of Chios"))))
    >>> gold_held("Homer, of unknown birth", task), gold_held("Homeric", task), gold_held(None, task)
    (0.5, 0.0, 0.0)
    """
    text = f" {normalise_qa(memory or '')} "
    return fmean(any(f" {normalise_qa(a)} " in text for a in objective.answers) for objective in task.objectives)


def _runs(text: str) -> set[tuple[str, ...]]:
    """Neighbouring words, three at a time; a shorter text is one run."""
    words = _WORD.findall(text.casefold())
    size = min(COPIED_WORDS, len(words)) or 1
    return {tuple(words[start : start + size]) for start in range(len(words) - size + 1)}


def _credit(batch: Batch, config: AdvantageConfig) -> dict[str, float]:
    """How the memory's reward and advantage lie to what they should, and should not, follow."""
    if not len(batch):
        return {}
    advantage, memory_part = batch_advantage(batch, config)
    has_credit = batch.mem_mask.any(1) & batch.memory_reward.isfinite()
    figures = {
        "rows/no_advantage": float((advantage == 0).all(1).double().mean()),
        "rows/no_memory": float((~batch.mem_mask.any(1)).double().mean()),
    }
    if not bool(has_credit.any()):
        return figures
    reward, turn_index = batch.memory_reward[has_credit], batch.turn_index[has_credit]
    groups = [batch.group_of_turn[has_credit]] + ([turn_index] if config.statistics == "turn_index" else [])
    figures["groups/below_std_floor"] = float(
        (group_std(reward, group_index(*groups)) < config.std_floor).double().mean()
    )
    figures["memory/reward_std"] = float(reward.double().std(correction=0))
    # A^M is the same on all tokens of a memory.
    of_turn = (memory_part * batch.mem_mask).sum(1)[has_credit] / batch.mem_mask.sum(1)[has_credit]
    outcome = batch.outcome[batch.trajectory][has_credit]
    figures |= _correlation("memory/corr_advantage_turn", of_turn, turn_index)
    return figures | _correlation("memory/corr_reward_outcome", reward, outcome)


def _correlation(name: str, left: Tensor, right: Tensor) -> dict[str, float]:
    """Pearson's correlation; nothing where one of the two does not vary."""
    pair = torch.stack([left.double(), right.double()])
    if pair.shape[1] < 2 or bool((pair.std(1, correction=0) < 1e-12).any()):
        return {}
    return {name: float(torch.corrcoef(pair)[0, 1].clamp(-1, 1))}


# ---------------------------------------------------------------- collapse


class CollapseWatch:
    """Compares the newer half of the last `batches` batches with the older half.

    Fed with the metrics of each batch in turn; after a warning it starts to look anew, so that one
    collapse gives one warning in `batches` batches. It depends on the metrics alone: a run that goes on
    feeds it the metrics of its log first.
    """

    def __init__(self, batches: int) -> None:
        self._last: deque[Mapping[str, float]] = deque(maxlen=batches)

    def look(self, metrics: Mapping[str, float]) -> str | None:
        """A warning in plain words, None while there is nothing to warn of."""
        self._last.append(metrics)
        if len(self._last) < (self._last.maxlen or 0):
            return None
        reasons = list(collapse_reasons(list(self._last)))
        if not reasons:
            return None
        self._last.clear()
        return "; ".join(reasons)


def collapse_reasons(history: Sequence[Mapping[str, float]]) -> Iterable[str]:
    """Why a run seems to collapse, from the metrics of some batches, oldest first."""
    # What is paid for memories, not A^M: divided by its deviation, that has the same size whatever is paid.
    reward, memory = _Halves(history, "reward"), _Halves(history, "memory/reward")
    form, length = _Halves(history, "format"), _Halves(history, "memory/tokens_p95")
    span = f"in the last {len(history)} batches"
    if reward.changed and memory.changed and reward.new < 0.8 * reward.old and memory.new > memory.old:
        yield (
            f"the reward fell from {reward.old:.3f} to {reward.new:.3f} {span} while the memory reward rose from "
            f"{memory.old:.3f} to {memory.new:.3f}: memories are trained for something else than the outcome; lower "
            "advantage.alpha, let it fade (advantage.alpha_schedule), or let advantage.gates keep mixed_groups only"
        )
    if form.changed and form.new < form.old - 0.1:
        yield (
            f"the share of well-formed trajectories fell from {form.old:.3f} to {form.new:.3f} {span}: the policy "
            "forgets the turn format; lower optimizer.learning_rate or raise loss.kl_beta"
        )
    if length.changed and length.new > 1.5 * length.old:
        yield (
            f"long memories (p95) grew from {length.old:.0f} to {length.new:.0f} tokens {span}: they run away; "
            "set memory.length_penalty or lower advantage.alpha"
        )


class _Halves:
    """One metric in the older and in the newer half of some batches."""

    def __init__(self, history: Sequence[Mapping[str, float]], key: str) -> None:
        middle = len(history) // 2
        halves = [[metrics[key] for metrics in half if key in metrics] for half in (history[:middle], history[middle:])]
        known = all(len(half) >= 2 for half in halves)
        self.old, self.new = (fmean(half) if half else 0.0 for half in halves)
        # Two standard errors of the difference: what the batches' own noise would explain.
        noise = sum(stdev(half) ** 2 / len(half) for half in halves) ** 0.5 if known else 0.0
        self.changed = known and abs(self.new - self.old) > 2 * noise
