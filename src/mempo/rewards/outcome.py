"""R^T, the reward of a whole trajectory, and the scores that are reported of it.

The default is the paper's: 1 where every objective is an exact match and the format is right in
every turn, else 0. Ours are the options of `RewardConfig`, and two rules where the paper is silent:

1. A wrong number of answers is wrong format, so that naming more answers than were asked for, or
   dropping the hard ones, never pays.
2. A trajectory that ended because a generation or the context ran out of room earns 0, whatever it
   held. Whether it stays in the loss is the loss's own option (`loss.truncated`).
"""

from __future__ import annotations

from typing import assert_never

from mempo.config import RewardConfig
from mempo.core import StopReason, Trajectory
from mempo.rewards.answers import Mode, TaskScore, score_task


def outcome_reward(trajectory: Trajectory, config: RewardConfig) -> float:
    """R^T, in [0, 1]; exactly 0.0 or 1.0 unless the config asks for a mean.

    >>> from mempo.core import Objective, Task, Turn
    >>> task = Task("t", (Objective("Capital of France?", ("Paris",)), Objective("Red planet?", ("Mars",))))
    >>> def reward(answer, *problems, **config):
    ...     turn = Turn(0, "...", answer=answer, problems=problems)
    ...     return outcome_reward(Trajectory(task, 0, (turn,), StopReason.ANSWERED, 0), RewardConfig(**config))
    >>> reward("Paris; Mars"), reward("Paris; Venus"), reward("Paris; Mars", "stray_text"), reward("Paris; Mars; Io")
    (1.0, 0.0, 0.0, 0.0)
    >>> reward("Paris; Venus", correctness="mean_em"), reward("Paris; Mars", "stray_text", require_format=False)
    (0.5, 1.0)
    """
    if ran_out_of_room(trajectory) or trajectory.answer is None:
        return 0.0
    score = score_task(trajectory.answer, trajectory.task, config.mode)
    if config.require_format and not _format_ok(trajectory, score):
        return 0.0
    match config.correctness:
        case "exact":
            return float(score.exact)
        case "mean_em":
            return score.em
        case "mean_f1":
            return score.f1
        case other:
            assert_never(other)


def ran_out_of_room(trajectory: Trajectory) -> bool:
    """The trajectory was cut: a generation hit its token limit, or the context was full."""
    return trajectory.stop in (StopReason.TRUNCATED, StopReason.CONTEXT_OVERFLOW)


def trajectory_scores(trajectory: Trajectory, mode: Mode = "qa") -> dict[str, float]:
    """What is reported of one trajectory; `docs/metrics.md` explains each key.

    Figures that are not known (memory lengths where a server hides its tokens) are absent.
    """
    score = score_task(trajectory.answer, trajectory.task, mode)
    memory_tokens = [sum(turn.mem_mask) for turn in trajectory.turns if turn.mem_mask]
    figures = {
        "em": score.em,
        "f1": score.f1,
        "exact": float(score.exact),
        "count_ok": float(score.count_ok),
        "format": float(_format_ok(trajectory, score)),
        "turns": float(len(trajectory.turns)),
        "tool_calls": float(sum(turn.call is not None for turn in trajectory.turns)),
        "total_tokens": float(trajectory.total_tokens),
        "peak_tokens": float(trajectory.peak_tokens),
    }
    if memory_tokens:
        figures["memory_tokens_mean"] = sum(memory_tokens) / len(memory_tokens)
        figures["memory_tokens_max"] = float(max(memory_tokens))
    for index, objective in enumerate(score.per_objective):
        figures[f"objective/{index}/em"] = objective.em
        figures[f"objective/{index}/f1"] = objective.f1
    return figures


def _format_ok(trajectory: Trajectory, score: TaskScore) -> bool:
    return trajectory.well_formed and score.count_ok
