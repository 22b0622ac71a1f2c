"""Rollout: tasks in, trajectories out. Training, evaluation and inference use the same engine."""

from mempo.rollout.agent import Agent
from mempo.rollout.assembly import make_context, make_rollout, make_system_prompt
from mempo.rollout.engine import Rollout, RolloutHooks, group_trajectories

__all__ = [
    "Agent",
    "Rollout",
    "RolloutHooks",
    "group_trajectories",
    "make_context",
    "make_rollout",
    "make_system_prompt",
]
