"""From settings to a policy and tasks: case 58, tiny models, adapters, compositions."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from tests.fixtures.toy import WORDS, toy_policy

from mempo.config import Config, LoraConfig, ModelConfig, RolloutConfig, TinyModelConfig, load_config
from mempo.core import ConfigError, DataError, Objective, Task
from mempo.data import write_tasks
from mempo.data.world import closed_worlds
from mempo.policy.tiny import tiny_llama
from mempo.train.assembly import adapt, load_tasks, make_policy
from mempo.train.checkpoint import save_model
from mempo.train.reference import is_adapted

TINY = load_config("tiny")


def test_the_tiny_preset_is_a_small_model_that_spells_the_closed_world() -> None:
    policy = make_policy(TINY)
    [world] = closed_worlds(0, 1)
    for text in (world.task.question, world.task.gold, *(passage.text for passage in world.passages)):
        assert policy.renderer.decode(policy.renderer.encode(text)) == text
    assert policy.context_tokens == 512
    assert not policy.model.training


def test_a_tiny_model_follows_the_seed_and_its_settings() -> None:
    one, two, other = (make_policy(dataclasses.replace(TINY, seed=seed)).model for seed in (0, 0, 1))
    left, right, third = (dict(model.named_parameters()) for model in (one, two, other))
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert any(not torch.equal(left[name], third[name]) for name in left)
    wide = ModelConfig(path="tiny", device="cpu", tiny=TinyModelConfig(width=20, layers=1, heads=2))
    model = make_policy(dataclasses.replace(TINY, model=wide)).model
    assert (model.config.hidden_size, model.config.num_hidden_layers) == (20, 1)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A toy model's folder; its context is 512 tokens."""
    policy = toy_policy()
    save_model(policy.model, policy.renderer.tokenizer, tmp_path / "toy")
    return tmp_path / "toy"


def config_of(path: Path, *, prompt: int = 400, lora: LoraConfig | None = None) -> Config:
    model = ModelConfig(path=str(path), device="cpu", lora=lora or LoraConfig())
    return dataclasses.replace(
        TINY, model=model, rollout=RolloutConfig(max_prompt_tokens=prompt, max_response_tokens=64)
    )


def test_case_58_lengths_that_the_models_context_cannot_hold_are_refused_with_the_three_numbers(saved: Path) -> None:
    make_policy(config_of(saved, prompt=448))
    with pytest.raises(ConfigError, match=r"449 \+ .* 64 = 513, but the context of .* is 512"):
        make_policy(config_of(saved, prompt=449))


def test_new_adapters_change_nothing_at_first_and_follow_the_seed(saved: Path) -> None:
    lora = LoraConfig(rank=2, targets=("q_proj",))
    policies = [make_policy(config_of(saved, lora=lora)) for _ in range(2)]
    assert is_adapted(policies[0].model)
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        plain = make_policy(config_of(saved)).model(input_ids=ids).logits
        assert torch.equal(policies[0].model(input_ids=ids).logits, plain)
    left, right = (dict(policy.model.named_parameters()) for policy in policies)
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert {name for name, p in left.items() if p.requires_grad} == {name for name in left if "lora_" in name}


def test_an_adapter_is_gone_on_with_where_it_is_named(saved: Path, tmp_path: Path) -> None:
    lora = LoraConfig(rank=2, targets=("q_proj",))
    trained = adapt(toy_policy().model, ModelConfig(lora=lora), 0)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.5)
    save_model(trained, toy_policy().renderer.tokenizer, tmp_path / "sft")
    named = dataclasses.replace(lora, adapter=str(tmp_path / "sft"))
    loaded = dict(make_policy(config_of(saved, lora=named)).model.named_parameters())
    assert all(bool((p == 0.5).all()) and p.requires_grad for name, p in loaded.items() if "lora_B" in name)
    with pytest.raises(ConfigError, match=r"rank is 4, but the adapter in .*sft has rank 2"):
        make_policy(config_of(saved, lora=dataclasses.replace(named, rank=4)))
    with pytest.raises(ConfigError, match=r"the adapter '.*nothing': there is no such folder"):
        make_policy(config_of(saved, lora=dataclasses.replace(lora, adapter=str(tmp_path / "nothing"))))
    with pytest.raises(ConfigError, match=r"holds an adapter, not a model.*model\.lora\.adapter"):
        make_policy(config_of(tmp_path / "sft"))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("adapter_config.json", None, "Can't find 'adapter_config.json'"),
        ("adapter_config.json", '{"peft_type": "LO', "Unterminated string"),
        ("adapter_model.safetensors", None, "adapter_model.safetensors|Repo id"),
        ("adapter_model.safetensors", "", "SafetensorError"),
        ("adapter_model.safetensors", "x" * 100, "SafetensorError"),
    ],
)
def test_a_damaged_adapter_is_named_with_the_key_and_a_remedy(
    saved: Path, tmp_path: Path, file: str, content: str | None, message: str
) -> None:
    lora = LoraConfig(rank=2, targets=("q_proj",))
    save_model(adapt(toy_policy().model, ModelConfig(lora=lora), 0), toy_policy().renderer.tokenizer, tmp_path / "sft")
    if content is None:
        (tmp_path / "sft" / file).unlink()
    else:
        (tmp_path / "sft" / file).write_text(content, encoding="utf-8")
    named = dataclasses.replace(lora, adapter=str(tmp_path / "sft"))
    with pytest.raises(ConfigError, match=rf"model\.lora\.adapter .* cannot be loaded: .*({message}).*mempo sft"):
        make_policy(config_of(saved, lora=named))


@pytest.mark.parametrize(("width", "layers"), [(32, 2), (16, 1), (16, 3)])
def test_an_adapter_of_another_model_is_refused_and_no_layer_stays_untrained(
    saved: Path, tmp_path: Path, width: int, layers: int
) -> None:
    lora = LoraConfig(rank=2, targets=("q_proj",))
    tokenizer = toy_policy().renderer.tokenizer
    other = tiny_llama(len(WORDS) + 3, width=width, layers=layers, heads=2)
    save_model(adapt(other, ModelConfig(lora=lora), 0), tokenizer, tmp_path / "sft")
    with pytest.raises(ConfigError, match=r"model\.lora\.adapter .*sft' (is of another model|cannot be loaded)"):
        make_policy(config_of(saved, lora=dataclasses.replace(lora, adapter=str(tmp_path / "sft"))))


def test_adapters_on_layers_that_are_not_there_are_refused_with_those_that_are(saved: Path) -> None:
    with pytest.raises(ConfigError, match=r"on nope: .* are .*down_proj, .*q_proj.*set model\.lora\.targets"):
        make_policy(config_of(saved, lora=LoraConfig(rank=2, targets=("nope",))))


@pytest.mark.parametrize("device", ["tpu:9", "nonsense"])
def test_a_device_that_is_not_there_is_refused_before_a_model_is_looked_for(tmp_path: Path, device: str) -> None:
    config = config_of(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=rf"the device '{device}' cannot be used"):
        make_policy(dataclasses.replace(config, model=dataclasses.replace(config.model, device=device)))


def singles(folder: Path, count: int, source: str = "a") -> str:
    path = folder / f"{source}.jsonl"
    write_tasks(path, [Task(f"{source}{i}", (Objective(f"{source} {i}?", (f"x{i}",)),)) for i in range(count)])
    return str(path)


def test_tasks_are_read_in_order_and_composed_where_it_is_asked_for(tmp_path: Path) -> None:
    files = [singles(tmp_path, 3), singles(tmp_path, 2, "b")]
    assert [task.id for task in load_tasks(files, None, None)] == ["a0", "a1", "a2", "b0", "b1"]
    pairs = load_tasks(files, None, 2)
    assert [[o.question for o in task.objectives] for task in pairs] == [["a 0?", "a 1?"], ["a 2?", "b 0?"]]


def test_tasks_of_as_many_questions_are_taken_as_they_are_and_others_refused(tmp_path: Path) -> None:
    write_tasks(tmp_path / "two.jsonl", [world.task for world in closed_worlds(0, 3, objectives=2)])
    assert len(load_tasks([str(tmp_path / "two.jsonl")], None, 2)) == 3
    with pytest.raises(DataError, match="only single questions can be composed"):
        load_tasks([str(tmp_path / "two.jsonl")], None, 3)
