"""The frozen policy that the KL penalty holds on to: the weights that RL started from."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

POLICY_ADAPTER, REFERENCE_ADAPTER = "default", "reference"
SAMPLED_VALUES = 1024


class Reference:
    """Gives the reference model when it is needed.

    A fully trained model needs a frozen copy. A LoRA model needs none: its base weights are the
    reference where training started without an adapter, and a frozen copy of the adapter where it
    started from one, e.g. of behaviour cloning. At the first step the KL is 0 in all three cases, unless
    the adapter drops out in the update: the reference never does.

    Make it before anything is trained or restored.
    """

    def __init__(self, model: PreTrainedModel, *, starts_from_adapter: bool = False) -> None:
        self._model = model
        self.copy: PreTrainedModel | None = None
        """Of all weights; None where the reference lives in the adapted model itself."""
        self._starts_from_adapter = starts_from_adapter
        if not is_adapted(model):
            self.copy = copy.deepcopy(model).eval().requires_grad_(False)
        elif starts_from_adapter:
            _copy_adapter(model)

    @contextmanager
    def active(self) -> Iterator[PreTrainedModel]:
        """The reference, in evaluation mode; the policy is back in its place and mode afterwards."""
        if self.copy is not None:
            yield self.copy
            return
        peft: Any = self._model
        was_training = self._model.training
        self._model.eval()
        try:
            if self._starts_from_adapter:
                peft.set_adapter(REFERENCE_ADAPTER, inference_mode=True)
                yield self._model
            else:
                with peft.disable_adapter():
                    yield self._model
        finally:
            if self._starts_from_adapter:
                peft.set_adapter(POLICY_ADAPTER)
            self._model.train(was_training)


def start_sha256(model: PreTrainedModel, *, starts_from_adapter: bool = False) -> dict[str, str]:
    """What training starts from, by the setting that names it: later the KL is to be taken to the same.

    Of 1,024 values of each weight: quick for any model, and another training of it changes nearly all.
    """
    digests = {"model.path": hashlib.sha256()}
    if starts_from_adapter:
        digests["model.lora.adapter"] = hashlib.sha256()
    for name, weight in model.named_parameters():
        key = "model.lora.adapter" if ".lora_" in name else "model.path"
        if key in digests:  # new adapters follow from the seed
            values = weight.detach().flatten()
            digests[key].update(values[:: max(1, len(values) // SAMPLED_VALUES)].float().cpu().numpy().tobytes())
    return {key: digest.hexdigest() for key, digest in digests.items()}


def is_adapted(model: torch.nn.Module) -> bool:
    """Whether the model is one of peft's, with an adapter on frozen weights."""
    return hasattr(model, "peft_config")


def _copy_adapter(model: PreTrainedModel) -> None:
    peft: Any = model
    peft.add_adapter(REFERENCE_ADAPTER, peft.peft_config[POLICY_ADAPTER])
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            if f".{REFERENCE_ADAPTER}." in name:
                parameter.copy_(parameters[name.replace(f".{REFERENCE_ADAPTER}.", f".{POLICY_ADAPTER}.")])
                parameter.requires_grad_(False)
    peft.set_adapter(POLICY_ADAPTER)
