"""The reference stays what training started from: cases 67 and 68."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tests.fixtures.toy import WORDS, toy_config, toy_policy, toy_trainer
from torch import Tensor
from transformers import PreTrainedModel

from mempo.config import OptimizerConfig
from mempo.policy.tiny import tiny_llama
from mempo.train.reference import Reference, is_adapted

IDS = torch.tensor([[3, 4, 5, 6]])


def base() -> PreTrainedModel:
    return tiny_llama(len(WORDS) + 3, width=16, layers=2, heads=2, context_tokens=512)


def new_adapters(model: PreTrainedModel, *, random: bool = False) -> PreTrainedModel:
    """LoRA on every attention projection; with `random` B is not 0, as after some training."""
    torch.manual_seed(0)
    adapted: PreTrainedModel = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"])).eval()
    if random:
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(generator=torch.Generator().manual_seed(1))
    return adapted


@pytest.fixture
def sft_adapter(tmp_path: Path) -> Path:
    new_adapters(base(), random=True).save_pretrained(tmp_path / "sft", save_embedding_layers=False)
    return tmp_path / "sft"


def from_sft(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = PeftModel.from_pretrained(base(), folder, is_trainable=True).eval()
    return model


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS).logits
    return found


def disturb(model: PreTrainedModel) -> None:
    """What training does: every trained weight moves."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.5)


@pytest.mark.parametrize("kind", ["full", "new adapters", "sft adapter"])
def test_the_reference_is_the_start_and_does_not_move_with_the_policy(kind: str, sft_adapter: Path) -> None:
    kinds: dict[str, Callable[[], PreTrainedModel]] = {
        "full": base,
        "new adapters": lambda: new_adapters(base()),
        "sft adapter": lambda: from_sft(sft_adapter),
    }
    model = kinds[kind]()
    start = logits(model)
    reference = Reference(model, starts_from_adapter=kind == "sft adapter")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    with reference.active() as scorer:
        assert torch.equal(logits(scorer), start)
    disturb(model)
    moved = logits(model)
    assert (moved - start).abs().max() > 1e-3
    with reference.active() as scorer:
        assert torch.equal(logits(scorer), start)
    assert torch.equal(logits(model), moved), "the policy is back in its place"
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == trained


def test_the_policys_mode_is_restored_even_after_an_error(sft_adapter: Path) -> None:
    model = from_sft(sft_adapter).train()
    reference = Reference(model, starts_from_adapter=True)
    disturb(model)
    moved = logits(model.eval())
    model.train()
    modes = []

    def fail(scorer: PreTrainedModel) -> None:
        modes.append(scorer.training)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), reference.active() as scorer:
        fail(scorer)
    assert modes == [False]
    assert model.training
    assert torch.equal(logits(model.eval()), moved)


async def test_case_67_kl_is_0_at_the_first_step_from_an_sft_adapter(sft_adapter: Path) -> None:
    # Against the base without the adapter it would not be: the adapter's weights are not 0.
    model = from_sft(sft_adapter)
    trainer = toy_trainer(policy=toy_policy(model=model), starts_from_adapter=True)
    first = await trainer.train_batch()
    second = await trainer.train_batch()
    assert first.metrics["train/kl"] == pytest.approx(0, abs=1e-6)
    assert second.metrics["train/kl"] > 1e-6
    assert "train/kl" in first.metrics


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
async def test_case_68_lora_trains_its_adapter_and_leaves_the_base_as_it_was(gradient_checkpointing: bool) -> None:
    model = new_adapters(base())
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = OptimizerConfig(learning_rate=1e-2, gradient_checkpointing=gradient_checkpointing)
    trainer = toy_trainer(toy_config(optimizer=optimizer), policy=toy_policy(model=model))
    result = await trainer.train_batch()
    assert result.metrics["train/grad_norm"] > 0
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed, "the adapter learned"
    assert all("lora_B" in name for name in changed), "B is 0 at the start, so A has no gradient yet"
    assert is_adapted(model)
