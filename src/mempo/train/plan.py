"""What a run will need, from its settings alone: no weights are loaded.

Bytes of each part, with P parameters of which T are trained (w and t bytes each), L layers of width h,
feed-forward width f, k key-value heads of size d, vocabulary V, c bytes of the type that is computed in:

    weights       P w + adapters
    reference     P w where all weights train and a reference is used; the adapter's size where training
                  starts from one; 0 where it is the base of new adapters
    optimizer     2 T t                                     two moments of AdamW
    gradients     T t
    activations   m (L + 1) (24 h + (5 h + 4 f) c)          m tokens of a micro-batch; what backward needs:
                                                            norms in float32, attention, feed-forward; and
                                                            as much again for the layer that is at work
                  m (L h c + 4 layers of the above)         with gradient checkpointing: a layer's activations,
                                                            made again, and their gradients (measured: about 4)
    head          3 * 1024 V 4 + V h 4                      a chunk of logits, its softmax and gradient; the
                                                            projection's gradient, or its float32 copy
    KV cache      rows (prompt + response) 2 L k d w        at the longest prompt and response; evaluation may
                                                            sample other numbers of rows at a time than training
    forward       tokens (8 h + 3 f) c                      one layer at work, without gradient: all prompts at
                                                            once in the rollout, memory.batch_tokens in scoring,
                                                            and there 2 L k d w more: keys and values of trunks

Lengths are the longest that the settings allow, so the estimate is for the worst batch. A policy that
runs out of memory in the rollout or in scoring halves its batch and goes on; a reference that scores does not.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

from mempo.config import Config
from mempo.core import ConfigError
from mempo.policy.models import BUNDLED_SMOLLM2, DTYPES, bundled_config, check_folder, model_folder
from mempo.policy.tiny import tiny_llama
from mempo.rollout import check_room
from mempo.train.assembly import TINY, TINY_CONTEXT_TOKENS, tiny_tokenizer

MIB, GIB = 2**20, 2**30
LOGIT_CHUNK_TOKENS = 1024
MAX_ROLLOUT_ROWS = 256

KNOWN_SHAPES: Mapping[str, Mapping[str, Any]] = {
    f"Qwen/Qwen2.5-{size}{kind}": {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32768,
    }
    for size, width, inner, layers, heads, kv_heads, vocabulary, tied in (
        ("0.5B", 896, 4864, 24, 14, 2, 151936, True),
        ("1.5B", 1536, 8960, 28, 12, 2, 151936, True),
        ("3B", 2048, 11008, 36, 16, 2, 151936, True),
        ("7B", 3584, 18944, 28, 28, 4, 152064, False),
    )
    for kind in ("", "-Instruct")
}
"""Models that can be planned for without their files."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of a run. Bytes are estimates for the longest prompts and responses."""

    model: str
    parameters: int
    trainable: int
    trajectories: int
    """Of one batch."""
    rows: int
    """Turns of one batch, at most."""
    tokens: int
    """Of these rows, at most."""
    row_tokens: int
    """The longest row."""
    micro_batch_tokens: int
    steps_per_batch: int
    """Optimiser steps."""
    max_batches: int | None
    """Of the whole run; it ends before where its tasks do. None: only the tasks end it."""
    bytes: Mapping[str, int]
    """Of each part."""
    phases: Mapping[str, int]
    """Bytes at the peak of each phase of a batch."""

    @property
    def peak_bytes(self) -> int:
        return max(self.phases.values())

    def to_json(self) -> str:
        return json.dumps({**dataclasses.asdict(self), "peak_bytes": self.peak_bytes}, indent=2)


def make_plan(config: Config) -> Plan:
    """The plan of a config. Raises ConfigError where the model's shape is not known, or its context is too small."""
    model = _empty_model(config)
    shape = model.config.get_text_config()
    check_room(config.rollout, getattr(shape, "max_position_embeddings", None), config.model.path)
    parameters = sum(p.numel() for p in model.parameters())
    adapters = _adapter_parameters(model, config)
    trainable = adapters or parameters

    rollout = config.rollout
    trajectories = config.train.batch_tasks * rollout.group_size
    row_tokens = rollout.max_prompt_tokens + rollout.max_response_tokens
    micro_tokens = max(config.optimizer.micro_batch_tokens, row_tokens)

    weight = DTYPES[config.model.dtype].itemsize
    trained = 4 if adapters else weight  # peft keeps adapters in float32
    computed = 2 if config.optimizer.autocast_bfloat16 else weight
    layers, width, inner = shape.num_hidden_layers, shape.hidden_size, shape.intermediate_size
    heads = shape.num_attention_heads
    kv_width = getattr(shape, "num_key_value_heads", heads) * (getattr(shape, "head_dim", None) or width // heads)
    vocabulary = shape.vocab_size

    layer = 24 * width + (5 * width + 4 * inner) * computed
    kept = layers * width * computed + 3 * layer if config.optimizer.gradient_checkpointing else layers * layer
    at_work = layer
    forward = (8 * width + 3 * inner) * weight
    most_rows = min(rollout.concurrency, MAX_ROLLOUT_ROWS)
    rows_at_once = min(most_rows, trajectories)
    eval_rows = min(most_rows, config.eval.max_tasks or most_rows) if config.eval.every_batches else 0
    cache_of_row = row_tokens * 2 * layers * kv_width * weight
    prefill_of_row = rollout.max_prompt_tokens * forward
    parts = {
        "weights": parameters * weight + adapters * trained,
        "reference": _reference_bytes(config, parameters * weight, adapters * trained),
        "optimizer": 2 * trainable * trained,
        "gradients": trainable * trained,
        "activations": micro_tokens * (kept + at_work),
        "head": 3 * LOGIT_CHUNK_TOKENS * vocabulary * 4 + vocabulary * width * 4,
        "kv_cache": rows_at_once * cache_of_row,
        "prefill": rows_at_once * prefill_of_row,
        "scoring": config.memory.batch_tokens * (forward + 2 * layers * kv_width * weight),
    }
    held = parts["weights"] + parts["reference"] + parts["optimizer"]
    return Plan(
        model=config.model.path,
        parameters=parameters + adapters,
        trainable=trainable,
        trajectories=trajectories,
        rows=trajectories * rollout.max_turns,
        tokens=trajectories * rollout.max_turns * row_tokens,
        row_tokens=row_tokens,
        micro_batch_tokens=micro_tokens,
        steps_per_batch=config.train.mini_batches * config.train.batch_epochs,
        max_batches=config.train.max_batches,
        bytes=parts,
        phases={
            "rollout": held + parts["kv_cache"] + parts["prefill"],
            "scoring": held + parts["scoring"] if config.advantage.alpha else held,
            "update": held + parts["gradients"] + parts["activations"] + parts["head"],
            "evaluation": held + eval_rows * (cache_of_row + prefill_of_row),
        },
    )


def render_plan(plan: Plan) -> str:
    """A table for people."""
    lines = [
        f"model            {plan.model}",
        f"parameters       {plan.parameters:,}, of which train {plan.trainable:,}",
        f"batch            {plan.trajectories:,} trajectories, at most {plan.rows:,} rows"
        f" of {plan.row_tokens:,} tokens = {plan.tokens:,}",
        f"micro-batch      {plan.micro_batch_tokens:,} tokens",
        f"optimiser steps  {plan.steps_per_batch} a batch",
        *([f"batches          {plan.max_batches:,} at most"] if plan.max_batches else []),
        "",
        "expected memory at the longest prompts and responses",
        *(f"  {name:<12} {_size(size)}" for name, size in plan.bytes.items()),
        "peak of each phase",
        *(f"  {name:<12} {_size(size)}" for name, size in plan.phases.items()),
    ]
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
        large = [name for name, size in plan.phases.items() if size > memory]
        fits = f"too small for {', '.join(large)}: docs/training.md says what to lower" if large else "all phases fit"
        lines.append(f"  {'this GPU':<12} {_size(memory)}, {fits}")
    return "\n".join(lines)


def _size(number: int) -> str:
    return f"{number / GIB:9.2f} GiB" if number >= GIB else f"{number / MIB:9.2f} MiB"


def _empty_model(config: Config) -> Any:
    """The model without storage for its weights."""
    with torch.device("meta"):
        if config.model.path == TINY:
            tiny = config.model.tiny
            return tiny_llama(
                len(tiny_tokenizer()),
                width=tiny.width,
                layers=tiny.layers,
                heads=tiny.heads,
                context_tokens=config.rollout.max_model_tokens or TINY_CONTEXT_TOKENS,
            )
        return AutoModelForCausalLM.from_config(_model_config(config.model.path))


def _model_config(path: str) -> Any:
    if path == BUNDLED_SMOLLM2:
        return bundled_config()
    known = KNOWN_SHAPES.get(path)
    if known is None:
        check_folder(path)
    try:
        return AutoConfig.from_pretrained(model_folder(path), local_files_only=known is not None)
    except (OSError, ValueError) as error:
        if known is not None:
            return Qwen2Config(**known)
        raise ConfigError(
            f"the shape of model.path {path!r} is not known: {error}. Give a folder with config.json, a hub name "
            f"that is reachable, or one of {', '.join(KNOWN_SHAPES)}"
        ) from error


def _adapter_parameters(model: torch.nn.Module, config: Config) -> int:
    """A pair of thin matrices at every linear layer that is named."""
    lora = config.model.lora
    adapted = [
        module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in lora.targets
    ]
    return lora.rank * sum(module.in_features + module.out_features for module in adapted)


def _reference_bytes(config: Config, weights: int, adapter: int) -> int:
    if not (config.loss.kl_beta or (config.advantage.alpha and config.memory.scorer == "reference")):
        return 0
    if config.model.lora.rank == 0:
        return weights
    return adapter if config.model.lora.adapter is not None else 0
