"""The frozen policy that the KL penalty holds on to: the weights that RL started from."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

REFERENCE_ADAPTER = "reference"


class Reference:
    """Gives the reference model when it is needed.

    A fully trained model needs a frozen copy. A LoRA model needs none: its base weights are the
    reference where training started without an adapter, and a frozen copy of the adapter where it
    started from one, e.g. of behaviour cloning. At the first step the KL is 0 in all three cases.
    """

    def __init__(self, model: PreTrainedModel, *, starts_from_adapter: bool = False) -> None:
        self._copy: PreTrainedModel | None = None
        self._adapters = hasattr(model, "peft_config")
        self._starts_from_adapter = starts_from_adapter
        if not self._adapters:
            self._copy = copy.deepcopy(model).eval().requires_grad_(False)
        elif starts_from_adapter:
            _copy_adapter(model)

    @contextmanager
    def active(self, model: PreTrainedModel) -> Iterator[PreTrainedModel]:
        """The reference, in evaluation mode; the policy's adapter is back in place afterwards."""
        if self._copy is not None:
            yield self._copy
            return
        peft: Any = model
        trained = model.training
        model.eval()
        if self._starts_from_adapter:
            peft.set_adapter(REFERENCE_ADAPTER)
            try:
                yield model
            finally:
                peft.set_adapter("default")
                _train_only_default(model)
        else:
            with peft.disable_adapter():
                yield model
        model.train(trained)


def _copy_adapter(model: PreTrainedModel) -> None:
    peft: Any = model
    peft.add_adapter(REFERENCE_ADAPTER, peft.peft_config["default"])
    with torch.no_grad():
        parameters = dict(model.named_parameters())
        for name, parameter in parameters.items():
            if f".{REFERENCE_ADAPTER}." in name:
                parameter.copy_(parameters[name.replace(f".{REFERENCE_ADAPTER}.", ".default.")])
    peft.set_adapter("default")
    _train_only_default(model)


def _train_only_default(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name and f".{REFERENCE_ADAPTER}." not in name)
