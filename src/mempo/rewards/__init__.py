"""Scores of answers and the rewards made of them. Imports nothing heavy."""

from mempo.rewards.answers import (
    MODES,
    AnswerScore,
    Mode,
    TaskScore,
    contains_answer,
    score_answer,
    score_task,
    split_answers,
)
from mempo.rewards.outcome import outcome_reward, ran_out_of_room, trajectory_scores

__all__ = [
    "MODES",
    "AnswerScore",
    "Mode",
    "TaskScore",
    "contains_answer",
    "outcome_reward",
    "ran_out_of_room",
    "score_answer",
    "score_task",
    "split_answers",
    "trajectory_scores",
]
