"""Rollout: tasks in, trajectories out. Training, evaluation and inference use the same engine."""

from mempo.rollout.engine import Rollout, RolloutHooks, group_trajectories

__all__ = ["Rollout", "RolloutHooks", "group_trajectories"]
