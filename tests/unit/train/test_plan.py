"""The plan of a run: sizes of known models, the formulae's cases, and memory as it is measured."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mempo.config import (
    AdvantageConfig,
    Config,
    EvalConfig,
    LoraConfig,
    LossConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    TinyModelConfig,
    TrainConfig,
    load_config,
)
from mempo.core import ConfigError
from mempo.train.plan import GIB, make_plan, render_plan

FACTOR = 1.6
"""How far the measured memory of an update may be from the plan, either way."""


def config(path: str = "Qwen/Qwen2.5-7B", **sections: Any) -> Config:
    return dataclasses.replace(Config(), model=ModelConfig(path=path), **sections)


@pytest.mark.parametrize(
    ("path", "parameters"),
    # As the model cards count them: 0.49, 1.54, 3.09 and 7.62 billion.
    [
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304),
        ("Qwen/Qwen2.5-3B", 3_085_938_688),
        ("Qwen/Qwen2.5-7B", 7_615_616_512),
    ],
)
def test_known_models_are_planned_without_their_files(path: str, parameters: int) -> None:
    plan = make_plan(config(path))
    assert plan.parameters == plan.trainable == parameters
    # float32: weights and reference once, two moments.
    assert plan.bytes["weights"] == plan.bytes["reference"] == parameters * 4
    assert plan.bytes["optimizer"] == 2 * plan.bytes["gradients"] == parameters * 8


def test_an_unknown_model_is_an_error_that_names_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"shape of model\.path '.*' is not known.*Qwen2\.5-7B"):
        make_plan(config(str(tmp_path)))
    with pytest.raises(ConfigError, match="there is no such folder"):
        make_plan(config("./nothing"))


def test_the_reference_costs_nothing_where_none_is_used() -> None:
    free: dict[str, Any] = {"loss": LossConfig(kl_beta=0.0)}
    assert make_plan(config(**free)).bytes["reference"] == 0
    scorer: dict[str, Any] = {**free, "memory": MemoryConfig(scorer="reference")}
    assert make_plan(config(**scorer)).bytes["reference"] > 0
    assert make_plan(config(**scorer, advantage=AdvantageConfig(alpha=0.0))).bytes["reference"] == 0


def test_lora_trains_thin_matrices_and_its_base_is_the_reference() -> None:
    model = ModelConfig(path="Qwen/Qwen2.5-7B", dtype="bfloat16", lora=LoraConfig(rank=2, targets=("q_proj", "k_proj")))
    plan = make_plan(dataclasses.replace(Config(), model=model))
    # q: 3584 to 3584, k: 3584 to 512 (4 heads of 128), in 28 layers.
    adapters = 2 * 28 * ((3584 + 3584) + (3584 + 512))
    assert plan.trainable == adapters
    assert plan.bytes["weights"] == 7_615_616_512 * 2 + adapters * 4
    assert plan.bytes["gradients"] == adapters * 4
    assert plan.bytes["reference"] == 0
    from_sft = dataclasses.replace(model, lora=dataclasses.replace(model.lora, adapter="/sft"))
    assert make_plan(dataclasses.replace(Config(), model=from_sft)).bytes["reference"] == adapters * 4


def test_the_cache_holds_every_row_that_runs_at_once() -> None:
    few = make_plan(config(rollout=RolloutConfig(concurrency=10)))
    # 10 rows of 4096 + 1024 tokens; keys and values of 28 layers, 4 heads of 128, float32.
    assert few.bytes["kv_cache"] == 10 * 5120 * 2 * 28 * 4 * 128 * 4
    small_batch = make_plan(config(rollout=RolloutConfig(group_size=2), train=TrainConfig(batch_tasks=2)))
    assert small_batch.bytes["kv_cache"] == few.bytes["kv_cache"] * 4 // 10
    assert small_batch.trajectories == 4
    assert small_batch.rows == 64
    assert small_batch.tokens == 64 * 5120


def test_an_evaluation_may_need_more_than_the_rollout_of_a_small_batch() -> None:
    small: dict[str, Any] = {
        "rollout": RolloutConfig(group_size=2, concurrency=10),
        "train": TrainConfig(batch_tasks=2),
    }
    never = make_plan(config(**small))
    assert never.phases["evaluation"] < never.phases["rollout"]
    tasks = EvalConfig(files=("held-out.jsonl",), every_batches=1)
    whole = make_plan(config(**small, eval=tasks))
    of_rows = whole.bytes["kv_cache"] + whole.bytes["prefill"]
    assert whole.phases["evaluation"] - whole.phases["rollout"] == of_rows * 10 // 4 - of_rows
    few = make_plan(config(**small, eval=dataclasses.replace(tasks, max_tasks=4)))
    assert few.phases["evaluation"] == few.phases["rollout"]


def test_checkpointed_gradients_keep_less() -> None:
    kept, computed_again = (
        make_plan(config(optimizer=OptimizerConfig(gradient_checkpointing=on))).bytes["activations"]
        for on in (False, True)
    )
    assert computed_again < kept / 5  # 2 of 29 layers, and the inputs of the others


def test_case_58_lengths_beyond_the_models_context_are_refused_with_the_three_numbers() -> None:
    rollout = RolloutConfig(max_prompt_tokens=30_000, max_response_tokens=4096)
    with pytest.raises(ConfigError, match=r"30000 .* 4096 = 34096, but the context of .* is 32768"):
        make_plan(config(rollout=rollout))


def test_a_table_and_json_say_the_same() -> None:
    plan = make_plan(load_config("tiny", ["--train.max-batches", "30"]))
    data = json.loads(plan.to_json())
    assert data["peak_bytes"] == max(data["phases"].values()) == plan.peak_bytes
    text = render_plan(plan)
    for name, size in plan.phases.items():
        assert f"{name:<12} {size / 2**20:9.2f} MiB" in text
    assert data["max_batches"] == 30
    assert "batches          30 at most\n" in text
    assert "batches  " not in render_plan(make_plan(config()))


@pytest.mark.parametrize(
    ("gib", "said"), [(140, "all phases fit"), (100, "too small for rollout: docs/training.md says what to lower")]
)
def test_a_gpu_is_said_to_be_large_enough_or_for_what_it_is_not(
    monkeypatch: pytest.MonkeyPatch, repository: Path, gib: int, said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    gpu = SimpleNamespace(total_memory=gib * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    text = render_plan(make_plan(load_config(repository / "configs/qwen2.5-7b-lora.toml", CROWDED)))
    assert text.endswith(f"this GPU     {gib:9.2f} GiB, {said}")


CROWDED = ["--rollout.concurrency", "128"]


@pytest.mark.parametrize("name", ["qwen2.5-1.5b", "qwen2.5-7b-lora"])
def test_what_a_config_says_of_its_memory_is_its_plan(repository: Path, name: str) -> None:
    file = repository / "configs" / f"{name}.toml"
    plan = make_plan(load_config(file, CROWDED))
    said = f"the longest prompts of 128 would need {plan.phases['rollout'] / GIB:.0f} GiB (see --dry-run)"
    assert said in file.read_text(encoding="utf-8")


MEASURE = """
import sys, torch
from mempo.config import load_config
from mempo.train.assembly import make_policy
from mempo.train.batch import Batch
from mempo.train.forward import TokenRow
from mempo.train.optimizer import make_optimizer, make_schedule
from mempo.train.update import update
from tests.unit.train.test_plan import measured_config
from mempo.train.forward import checkpoint_gradients

def peak_bytes():
    # Not getrusage: that peak is inherited from the process that started this one, a large test run.
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024

config = measured_config(sys.argv[1] == "True")
model = make_policy(config).model
if config.optimizer.gradient_checkpointing:
    checkpoint_gradients(model)
rows, prompt, response = 16, 192, 64
mask = torch.ones(rows, response, dtype=torch.bool)
batch = Batch(
    rows=[TokenRow(tuple(range(prompt)), tuple(range(response))) for _ in range(rows)],
    names=[str(i) for i in range(rows)], response_mask=mask, mem_mask=mask, old_logprobs=-torch.ones(rows, response),
    memory_reward=torch.rand(rows), turn_index=torch.zeros(rows, dtype=torch.long), trajectory=torch.arange(rows),
    outcome=torch.arange(rows) % 2.0, group=torch.zeros(rows, dtype=torch.long),
    fresh=torch.ones(rows, dtype=torch.bool), left_out={},
)
optimizer = make_optimizer(model, config.optimizer)
before = peak_bytes()
update(model, optimizer, make_schedule(optimizer, config.optimizer, 1), batch, config, reference=None,
       generator=torch.Generator().manual_seed(0))
print(peak_bytes() - before)
"""


def measured_config(gradient_checkpointing: bool) -> Config:
    """A model of 7 million parameters, and one micro-batch of 4,096 tokens: 16 rows of 256."""
    return Config(
        model=ModelConfig(path="tiny", device="cpu", tiny=TinyModelConfig(width=320, layers=6, heads=5)),
        rollout=RolloutConfig(max_prompt_tokens=192, max_response_tokens=64, max_observation_tokens=100),
        loss=LossConfig(kl_beta=0.0),
        optimizer=OptimizerConfig(micro_batch_tokens=4096, gradient_checkpointing=gradient_checkpointing),
    )


@pytest.mark.slow
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_the_memory_of_an_update_is_what_was_planned(gradient_checkpointing: bool) -> None:
    plan = make_plan(measured_config(gradient_checkpointing))
    # The measure begins after the weights are there; AdamW makes its moments in the first step.
    expected = sum(plan.bytes[part] for part in ("optimizer", "gradients", "activations", "head"))
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE, str(gradient_checkpointing)], capture_output=True, text=True, timeout=200
    )
    assert ran.returncode == 0, ran.stderr
    measured = int(ran.stdout)
    assert expected / FACTOR < measured < expected * FACTOR, (measured / expected, plan.bytes)
