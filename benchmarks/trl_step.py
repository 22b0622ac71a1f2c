"""Training steps of TRL's GRPOTrainer, in processor time. `benchmarks.training` starts it in an environment with TRL.

It reads its settings as JSON from stdin and writes its figures as the last line of stdout. Nothing of
this project is imported, so TRL's environment needs nothing of it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def main() -> None:
    asked = json.load(sys.stdin)
    torch.set_num_threads(asked["threads"])
    model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(asked["model"])
    rows = len(asked["prompts"]) * asked["group_size"]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=1,
            num_generations=asked["group_size"],
            max_completion_length=asked["response_tokens"],
            generation_kwargs={"min_new_tokens": asked["response_tokens"]},
            max_steps=asked["steps"],
            learning_rate=asked["learning_rate"],
            lr_scheduler_type="constant",
            loss_type="grpo",
            beta=0.0,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            logging_strategy="no",
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = TimedTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=every_other_is_right,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in asked["prompts"]]),
        )
        trainer.train()
    print(json.dumps(trainer.figures()))


def every_other_is_right(completions: list[str], **_: Any) -> list[float]:
    return [float(index % 2) for index in range(len(completions))]


class TimedTrainer(GRPOTrainer):  # type: ignore[misc]  # unknown where TRL is not installed
    """Notes the processor time when each step begins and when its samples are there, and how many tokens it had."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.began: list[float] = []
        self.sampled: list[float] = []
        self.prompt_tokens = self.response_tokens = 0

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        self.began.append(time.process_time())
        inputs = super()._prepare_inputs(generation_batch)
        self.sampled.append(time.process_time())
        self.prompt_tokens = int(inputs["prompt_mask"].sum())
        self.response_tokens = int(inputs["completion_mask"].sum())
        return inputs

    def figures(self) -> dict[str, Any]:
        """Seconds of each whole step but the last, which no other one follows."""
        begins = zip(self.began, self.began[1:], strict=False)
        steps = [following - began for began, following in begins]
        sampling = [sampled - began for began, sampled in zip(self.began, self.sampled, strict=True)][: len(steps)]
        return {
            "step_seconds": steps,
            "sampling_seconds": sampling,
            "prompt_tokens": self.prompt_tokens,
            "response_tokens": self.response_tokens,
        }


if __name__ == "__main__":
    main()
