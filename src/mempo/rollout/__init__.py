"""Rollout: tasks in, trajectories out. Training, evaluation and inference use the same engine."""

from mempo.rollout.agent import Agent
from mempo.rollout.assembly import check_room, make_context, make_rollout, make_system_prompt
from mempo.rollout.engine import Rollout, RolloutHooks, group_trajectories

__all__ = [
    "Agent",
    "Rollout",
    "RolloutHooks",
    "check_room",
    "group_trajectories",
    "make_context",
    "make_rollout",
    "make_system_prompt",
]
