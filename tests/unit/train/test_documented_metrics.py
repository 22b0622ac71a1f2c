"""`docs/metrics.md` and what is logged name the same keys."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tests.fixtures.closed import closed_renderer, closed_tokenizer, taught

from mempo.config import (
    Config,
    ContextConfig,
    LossConfig,
    ReplayConfig,
    RolloutConfig,
    SftConfig,
    TrainConfig,
)
from mempo.core import Group, Trajectory
from mempo.data.world import closed_worlds
from mempo.env import SearchTool
from mempo.policy.local import LocalPolicy
from mempo.policy.tiny import tiny_llama
from mempo.retrieval.memory import MemoryRetriever
from mempo.rewards.memory import MemoryProbes
from mempo.text.context import ContextPolicy
from mempo.text.masks import mem_mask
from mempo.text.tags import parse
from mempo.train.batch import make_batch
from mempo.train.coldstart import ColdStart, RowMaker
from mempo.train.credit import with_memory_rewards, with_outcomes
from mempo.train.health import batch_health
from mempo.train.metrics import batch_metrics
from mempo.train.optimizer import make_optimizer, make_schedule
from mempo.train.reference import Reference
from mempo.train.run import RunParts, make_trainer
from mempo.train.sft import SftTrainer
from mempo.train.trainer import BatchResult
from mempo.train.update import update

ROLLOUT = RolloutConfig(
    group_size=2,
    max_turns=2,
    max_prompt_tokens=300,
    max_response_tokens=4,
    max_observation_tokens=100,
    min_response_tokens=2,
)
CONFIG = Config(
    context=ContextConfig(prompts="none"),
    rollout=ROLLOUT,
    train=TrainConfig(batch_tasks=2, max_batches=1),
    loss=LossConfig(truncated="exclude"),
    replay=ReplayConfig(batches=1),
)
CONTEXT = ContextPolicy()


def model() -> Any:
    return tiny_llama(len(closed_tokenizer()), width=20, layers=1, heads=5)


def as_sampled(trajectory: Trajectory, rollout: int) -> Trajectory:
    """A teacher's trajectory as if the policy had sampled it."""
    rows = RowMaker(closed_renderer(), CONTEXT, lambda task: "", max_turns=16).turn_rows(trajectory)
    turns = tuple(
        replace(
            turn,
            prompt_ids=row.prompt_ids,
            response_ids=row.response_ids,
            response_mask=(1,) * len(row.response_ids),
            logprobs=(-1.0,) * len(row.response_ids),
            mem_mask=mem_mask(row.response_ids, closed_renderer(), parse(turn.text).memory_span),
            usage=replace(turn.usage, prompt_tokens=len(row.prompt_ids), completion_tokens=len(row.response_ids)),
        )
        for turn, row in zip(trajectory.turns, rows, strict=True)
    )
    return replace(trajectory, turns=turns, rollout=rollout)


def emitted_with_memories() -> set[str]:
    """Groups of a flawless and a forgetful try, scored and trained on."""
    pairs = zip(taught(4), taught(4, habit=1.0), strict=True)
    groups = [Group(a.task, (as_sampled(a, 0), as_sampled(b, 1))) for a, b in pairs]
    probes = MemoryProbes(closed_renderer(), CONFIG.memory, context=CONTEXT, system_prompt=lambda task: "")
    scored = with_memory_rewards(
        with_outcomes(groups, CONFIG.reward),
        probes,
        lambda requests: [[-0.01 * len(request.prompt_ids)] * len(request.target_ids) for request in requests],
        CONFIG.memory,
    )
    batch, policy = make_batch(scored), model()
    optimizer = make_optimizer(policy, CONFIG.optimizer)
    figures = update(
        policy, optimizer, make_schedule(optimizer, CONFIG.optimizer, 1), batch, CONFIG,
        reference=Reference(policy), generator=torch.Generator(),
    )  # fmt: skip
    health = batch_health(scored, batch, CONFIG.advantage)
    return set(batch_metrics(BatchResult(0, scored, figures | health | {"seconds/rollout": 1.0})))


def emitted_by_the_trainer() -> set[str]:
    """A batch of a random policy, whose turns are all cut."""
    worlds = list(closed_worlds(0, 2, objectives=2, hops=(1,)))
    retriever = MemoryRetriever([passage for world in worlds for passage in world.passages])
    policy = LocalPolicy(model(), closed_renderer())
    parts = RunParts(policy, [SearchTool(retriever, 2)], [world.task for world in worlds])

    async def one() -> BatchResult:
        try:
            return await make_trainer(CONFIG, parts).train_batch()
        finally:
            await policy.aclose()

    return set(batch_metrics(asyncio.run(one())))


def emitted_by_cloning() -> set[str]:
    rows = RowMaker(closed_renderer(), CONTEXT, lambda task: "", max_turns=16).turn_rows(taught(1)[0])
    settings = replace(CONFIG, sft=SftConfig(epochs=1))
    return set(SftTrainer(model(), ColdStart(rows, rows, {}), settings).step().metrics)


def documented(repository: Path) -> set[str]:
    """The keys in the first column of the tables, as regular expressions."""
    page = (repository / "docs/metrics.md").read_text(encoding="utf-8")
    first_cells = re.findall(r"^\| (`.*?) \|", page, flags=re.MULTILINE)
    keys = {key for cell in first_cells for key in re.findall(r"`([^`]+)`", cell)}
    patterns = {re.sub(r"\bREASON\b|\bCAUSE\b", r"[a-z_]+", re.sub(r"(?<=[_/])I\b", r"\\d+", key)) for key in keys}
    return {f"{key}(/p10|/p50|/p90)?" if key.startswith("memory/probability") else key for key in patterns}


def test_every_logged_key_is_documented_and_every_documented_key_is_logged(repository: Path) -> None:
    emitted = emitted_with_memories() | emitted_by_the_trainer() | emitted_by_cloning()
    patterns = documented(repository)

    assert {key for key in emitted if not any(re.fullmatch(pattern, key) for pattern in patterns)} == set()
    assert {pattern for pattern in patterns if not any(re.fullmatch(pattern, key) for key in emitted)} == set()
