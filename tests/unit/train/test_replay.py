"""Replay: what is drawn, how old it may be, and that it survives a checkpoint exactly."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tests.fixtures.toy import toy_config, toy_trainer

from mempo.config import AdvantageConfig, LossConfig, OptimizerConfig, ReplayConfig
from mempo.core import CheckpointError, Group, StopReason, Task, Trajectory, Turn
from mempo.train.replay import Replay


def group(name: str, policy_step: int = 0) -> Group:
    task = Task(name, ())
    turn = Turn(0, "text", logprobs=(-0.1, -1 / 3), response_ids=(1, 2), memory_reward=0.1 + 0.2)
    return Group(
        task, tuple(Trajectory(task, i, (turn,), StopReason.ANSWERED, 7, policy_step=policy_step) for i in (0, 1))
    )


def names(groups: list[Group]) -> list[str]:
    return [group.task.id for group in groups]


def filled(config: ReplayConfig, batches: int = 3, size: int = 4, seed: int = 0) -> Replay:
    """Batch b holds groups `b-0`, `b-1`, ..., sampled at optimiser step b."""
    replay = Replay(config, seed)
    for batch in range(batches):
        replay.add([group(f"{batch}-{i}", batch) for i in range(size)])
    return replay


def test_off_remembers_and_draws_nothing() -> None:
    replay = filled(ReplayConfig())
    assert len(replay) == 0
    assert replay.draw(3, fresh=4, steps_done=3) == []


def test_only_the_last_batches_are_remembered() -> None:
    replay = filled(ReplayConfig(batches=2))
    assert len(replay) == 8
    assert {name[0] for name in names(replay.draw(3, fresh=100, steps_done=3))} == {"1", "2"}


@pytest.mark.parametrize(("share", "fresh", "drawn"), [(0.5, 4, 4), (0.25, 3, 1), (0.25, 6, 2), (0.9, 4, 8)])
def test_the_share_is_that_of_all_groups(share: float, fresh: int, drawn: int) -> None:
    # 3 fresh and 1 drawn are a quarter; 0.9 would want 36 but there are 8.
    assert len(filled(ReplayConfig(batches=2, share=share)).draw(3, fresh=fresh, steps_done=3)) == drawn


def test_groups_beyond_the_age_are_not_drawn() -> None:
    replay = filled(ReplayConfig(batches=3, share=0.9, max_age_steps=2))
    # Sampled at steps 0, 1 and 2; at step 3 they are 3, 2 and 1 steps old.
    assert {name[0] for name in names(replay.draw(3, fresh=4, steps_done=3))} == {"1", "2"}
    assert replay.draw(3, fresh=4, steps_done=9) == []


def test_a_draw_depends_on_its_name_alone() -> None:
    config = ReplayConfig(batches=3, share=0.5)
    draws = [names(filled(config).draw(batch, fresh=4, steps_done=3)) for batch in (3, 3, 4)]
    assert draws[0] == draws[1] != draws[2]
    assert len(set(draws[0])) == 4, "no group twice"
    assert names(filled(config, seed=1).draw(3, fresh=4, steps_done=3)) != draws[0]


def test_what_is_written_is_read_back_exactly(tmp_path: Path) -> None:
    config = ReplayConfig(batches=3, share=0.5)
    replay = filled(config)
    replay.write(tmp_path / "replay.jsonl")
    again = Replay(config, 0)
    again.add([group("gone")])
    again.read(tmp_path / "replay.jsonl")
    assert len(again) == 12
    assert again.draw(3, fresh=100, steps_done=3) == replay.draw(3, fresh=100, steps_done=3)
    again.add([group("new")])  # the oldest batch is forgotten, as it would have been
    assert "0" not in {name[0] for name in names(again.draw(4, fresh=100, steps_done=3))}


@pytest.mark.parametrize("content", ["{", '{"type":"event","kind":"end"}', '{"type":"trajectory"}'])
def test_a_file_that_is_no_replay_is_refused_with_its_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "replay.jsonl").write_text(content + "\n")
    with pytest.raises(CheckpointError, match=r"replay\.jsonl, line 1"):
        Replay(ReplayConfig(batches=1), 0).read(tmp_path / "replay.jsonl")


async def test_replayed_groups_are_trained_on_with_the_log_probs_they_were_sampled_with() -> None:
    config = toy_config(
        replay=ReplayConfig(batches=1, share=0.5),
        advantage=AdvantageConfig(alpha=0.0),
        loss=LossConfig(kl_beta=0.0),
        optimizer=OptimizerConfig(learning_rate=0.1, micro_batch_tokens=2048),
    )
    trainer = toy_trainer(config)
    first = await trainer.train_batch()
    second = await trainer.train_batch()
    assert first.metrics["replay/groups"] == 0
    assert second.metrics["replay/groups"] == 2
    rows = sum(len(t.turns) for result in (first, second) for g in result.groups for t in g.trajectories)
    assert second.metrics["train/rows"] == rows
    # The fresh rows' gap is rounding alone; a replayed row's would be the policy's own movement.
    assert second.metrics["train/logprob_gap_max"] < 1e-4
    clipped = second.metrics["train/clip_fraction_other"] + second.metrics["train/clip_fraction_memory"]
    assert clipped > 0, "at this rate the old groups' ratios leave the clip range"


async def test_replay_off_changes_nothing() -> None:
    off, unused = toy_trainer(), toy_trainer(toy_config(replay=ReplayConfig(batches=2, max_age_steps=1)))
    unused.replay.add = lambda groups: None  # type: ignore[method-assign]
    for trainer in (off, unused):
        for _ in range(2):
            await trainer.train_batch()
    left, right = (dict(t.model.named_parameters()) for t in (off, unused))
    assert all((left[name] == right[name]).all() for name in left)


def test_the_age_of_a_group_is_that_of_its_oldest_trajectory() -> None:
    mixed = group("m", 5)
    mixed = dataclasses.replace(mixed, trajectories=(mixed.trajectories[0], group("m", 1).trajectories[1]))
    replay = Replay(ReplayConfig(batches=1, share=0.5, max_age_steps=3), 0)
    replay.add([mixed])
    assert replay.draw(0, fresh=1, steps_done=4) == [mixed]
    assert replay.draw(0, fresh=1, steps_done=5) == []
