"""R^T and R^M of trajectories, written on their records: what the update and the run log read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from mempo.algo import AnswerValue, answer_value
from mempo.config import MemoryConfig, RewardConfig
from mempo.core import Group, ScoreRequest, TrainingError, Trajectory, Turn
from mempo.rewards.memory import MemoryProbes, Probe, TurnProbes
from mempo.rewards.outcome import outcome_reward, trajectory_scores
from mempo.train.batch import trajectory_name

Score = Callable[[Sequence[ScoreRequest]], Sequence[Sequence[float]]]
"""Log-probs of target tokens, one list a request: `LocalPolicy.score_now`, or the reference's."""


def with_outcomes(groups: Iterable[Group], config: RewardConfig) -> list[Group]:
    """The groups with R^T and the reported scores on every trajectory."""
    return _map_trajectories(
        groups,
        lambda trajectory: dataclasses.replace(
            trajectory,
            reward=outcome_reward(trajectory, config),
            scores=trajectory_scores(trajectory, config.mode),
        ),
    )


def with_memory_rewards(
    groups: Sequence[Group], probes: MemoryProbes, score: Score, config: MemoryConfig
) -> list[Group]:
    """The groups with P(answer | memory), the baseline and R^M on every turn that has a memory.

    With `memory.require_format` trajectories need their scores, as `with_outcomes` gives them.
    Each trajectory also gets the score `worst_gold_token`, a mean over its memories, where it has one.
    All requests of all trajectories go to the scorer at once, equal ones once.
    Raises TrainingError, naming the turn, for a log-prob that is missing or not finite: exp(0) would be a
    perfect reward.
    """
    asked = {id(t): probes.of_trajectory(t) for group in groups for t in group.trajectories}
    requests = list(
        dict.fromkeys(
            request
            for turns in asked.values()
            for turn in turns
            for probe in (turn.memory, turn.baseline)
            if probe is not None
            for request in probe.requests
        )
    )
    logprobs = dict(zip(requests, score(requests), strict=True))
    for group in groups:
        for trajectory in group.trajectories:
            _check_finite(trajectory, asked[id(trajectory)], logprobs)
    values = ProbeValues(logprobs)

    def credited(trajectory: Trajectory) -> Trajectory:
        turns = zip(trajectory.turns, asked[id(trajectory)], strict=True)
        worthless = config.require_format and not trajectory.scores["format"]
        worst = [values.worst_token(turn.memory) for turn in asked[id(trajectory)] if turn.memory is not None]
        scores = {"worst_gold_token": sum(worst) / len(worst)} if worst else {}
        return dataclasses.replace(
            trajectory,
            turns=tuple(_credited(turn, probe, values, config, worthless) for turn, probe in turns),
            scores={**trajectory.scores, **scores},
        )

    return _map_trajectories(groups, credited)


def _check_finite(
    trajectory: Trajectory, probes: Sequence[TurnProbes], logprobs: Mapping[ScoreRequest, Sequence[float]]
) -> None:
    for turn, of_turn in zip(trajectory.turns, probes, strict=True):
        for what, probe in (("its memory", of_turn.memory), ("the baseline", of_turn.baseline)):
            for request in probe.requests if probe else ():
                if len(logprobs[request]) != len(request.target_ids) or not all(map(math.isfinite, logprobs[request])):
                    raise TrainingError(
                        f"trajectory {trajectory_name(trajectory)} turn {turn.index}: the log-probability of a gold "
                        f"token given {what} is missing or not finite"
                    )


class ProbeValues:
    """Values of probes from the log-probs of their requests."""

    def __init__(self, logprobs: dict[ScoreRequest, Sequence[float]]) -> None:
        self._logprobs = logprobs
        self._known: dict[tuple[Probe, AnswerValue], float] = {}

    def value(self, probe: Probe, value: AnswerValue = "probability") -> float:
        """`answer_value` of the gold answer in the probe's context, the best alias's; in float64."""
        if (probe, value) not in self._known:
            logprobs = pad_sequence(
                [torch.tensor(self._logprobs[r], dtype=torch.float64) for r in probe.requests], True
            )
            objective = pad_sequence([torch.tensor(places) for places in probe.objectives], True, -1)
            self._known[probe, value] = float(answer_value(logprobs, objective >= 0, objective, value=value).max())
        return self._known[probe, value]

    def worst_token(self, probe: Probe) -> float:
        """Probability of the least probable gold token, the largest over the aliases: a mean hides it."""
        return math.exp(max(min(self._logprobs[request]) for request in probe.requests))


def _credited(turn: Turn, probe: TurnProbes, values: ProbeValues, config: MemoryConfig, worthless: bool) -> Turn:
    if probe.memory is None:
        return turn
    kind: AnswerValue = "logprob" if config.value == "log_probability" else "probability"
    value = 0.0 if worthless else values.value(probe.memory, kind)
    reward = value - (values.value(probe.baseline, kind) if probe.baseline else 0.0)
    return dataclasses.replace(
        turn,
        memory_probability=values.value(probe.memory),
        baseline=values.value(probe.baseline) if probe.baseline else 0.0,
        memory_reward=reward - config.length_penalty * sum(turn.mem_mask),
    )


def _map_trajectories(groups: Iterable[Group], change: Callable[[Trajectory], Trajectory]) -> list[Group]:
    return [Group(group.task, tuple(change(trajectory) for trajectory in group.trajectories)) for group in groups]
