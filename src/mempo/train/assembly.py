"""From settings to what is trained: the policy, its renderer and the tasks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.nn import Linear
from transformers import PreTrainedModel

from mempo.config import Config, ModelConfig
from mempo.core import ConfigError, Task, derive_seed
from mempo.data import compose, read_tasks
from mempo.data.world import FALLBACK_CHARACTERS, closed_pattern, closed_vocabulary
from mempo.policy.local import LocalPolicy
from mempo.policy.models import (
    end_token_ids,
    load_adapter,
    load_model,
    load_tokenizer,
    quiet,
    resolve_device,
    to_device,
)
from mempo.policy.tiny import tiny_llama, word_tokenizer
from mempo.rollout import check_room
from mempo.text.render import Renderer

TINY = "tiny"
"""`model.path` of a random Llama over the words of the closed world."""
TINY_CONTEXT_TOKENS = 2048


def make_policy(config: Config) -> LocalPolicy:
    """The policy of a config, with new adapters where `model.lora` asks for them and names none.

    Raises ConfigError where the model is not there, or its context is too small for the rollout's
    longest prompt and response.
    """
    settings = config.model
    device = resolve_device(settings.device)
    tokenizer = tiny_tokenizer() if settings.path == TINY else load_tokenizer(settings.path)
    model = adapt(base_model(config, len(tokenizer)), settings, config.seed)
    model = to_device(model, device)
    renderer = Renderer(tokenizer, config.context.layout, end_ids=end_token_ids(model, tokenizer))
    policy = LocalPolicy(
        model.eval(),
        renderer,
        name=settings.path,
        context_tokens=config.rollout.max_model_tokens,
        min_response_tokens=config.rollout.min_response_tokens,
        score_batch_tokens=config.memory.batch_tokens,
    )
    check_room(config.rollout, getattr(model.config.get_text_config(), "max_position_embeddings", None), settings.path)
    return policy


def tiny_tokenizer() -> Any:
    """Whole words of the closed world, and single characters for texts from outside."""
    words = closed_vocabulary()
    return word_tokenizer((*words, *(c for c in FALLBACK_CHARACTERS if c not in words)), closed_pattern())


def load_tasks(files: Sequence[str], format: str | None, objectives: int | None) -> list[Task]:
    """The tasks of some files in their order, composed of `objectives` questions each.

    Tasks that have as many questions already are taken as they are.
    """
    tasks = list(chain.from_iterable(read_tasks(file, format) for file in files))
    if objectives is None or all(len(task.objectives) == objectives for task in tasks):
        return tasks
    return list(compose(tasks, objectives).tasks)


def base_model(config: Config, vocabulary: int) -> PreTrainedModel:
    """The model that `model.path` means, without adapters; a tiny one gets so many words."""
    settings = config.model
    if settings.path == TINY:
        tiny, tokens = settings.tiny, config.rollout.max_model_tokens or TINY_CONTEXT_TOKENS
        return tiny_llama(
            vocabulary,
            width=tiny.width,
            layers=tiny.layers,
            heads=tiny.heads,
            context_tokens=tokens,
            seed=derive_seed(config.seed, "model"),
            mimetic=tiny.mimetic,
        )
    if Path(settings.path, "adapter_config.json").is_file():
        raise ConfigError(
            f"model.path {settings.path!r} holds an adapter, not a model: name the model that it belongs to, "
            "and this folder as model.lora.adapter with its model.lora.rank"
        )
    return load_model(settings.path, dtype=settings.dtype)


def adapt(model: PreTrainedModel, settings: ModelConfig, seed: int) -> PreTrainedModel:
    """The model with the adapter that `settings.lora` names, or new ones; itself where the rank is 0."""
    lora = settings.lora
    if lora.rank == 0:
        return model
    from peft import LoraConfig, get_peft_model

    if lora.adapter is None:
        wanted = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=list(lora.targets),
            task_type="CAUSAL_LM",
        )
        try:
            with quiet(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(derive_seed(seed, "lora"))
                return get_peft_model(model, wanted)
        except Exception as error:  # a name that no layer has, a layer of another kind, too little memory
            layers = {name.rsplit(".", 1)[-1] for name, part in model.named_modules() if isinstance(part, Linear)}
            raise ConfigError(
                f"model.lora: no adapters of rank {lora.rank} on {', '.join(lora.targets)}: {error} The linear layers "
                f"of {settings.path} are {', '.join(sorted(layers))}; set model.lora.targets to some of them"
            ) from error
    adapted: Any = load_adapter(model, lora.adapter)
    rank = adapted.peft_config["default"].r
    if rank != lora.rank:
        raise ConfigError(f"model.lora.rank is {lora.rank}, but the adapter in {lora.adapter} has rank {rank}")
    return adapted
