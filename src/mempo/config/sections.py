"""Every setting of mempo: frozen dataclasses, one for each part, that do nothing but hold values.

The defaults are the paper's method (arXiv 2603.00680); an option that departs from it has a name.
A section's `problems` lists the values that contradict each other; ranges of single values stand
in their types. `load_config` checks both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta


class Problem(NamedTuple):
    """A contradiction: the key it is reported under (relative to its section) and what is wrong."""

    key: str
    message: str


class InputPath(NamedTuple):
    """Marks a string as a path that is read: a relative one in a TOML file starts at that file's folder."""

    remedy: str
    """How to get the file or folder, for the message that it is missing."""
    or_name: bool = False
    """True where the string may also be a name: then only `./...`, `../...` and `/...` are paths."""


TaskFile = Annotated[str, InputPath("make it with `mempo data compose` or `mempo data convert`")]
Positive = Annotated[int, Meta(ge=1)]
Small = Annotated[int, Meta(ge=1, le=4096)]
Count = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]

AnswerMode = Literal["qa", "hotpot", "musique", "mem1", "unicode", "chars"]
ContextName = Literal["previous_turn", "last_turns", "full_history", "truncated_history", "memory_only"]
Layout = Literal["conversation", "single_message"]
Baseline = Literal["prefix", "visible", "previous_memory", "no_memory", "none"]
Gate = Literal["mixed_groups", "right_trajectories", "skip_first_turn"]


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters."""

    rank: Count = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: PositiveFloat = 32.0
    """Scale of the adapters; their update is multiplied by alpha / rank."""
    dropout: Share = 0.0
    """Dropout inside the adapters during training."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the linear layers that get an adapter."""
    adapter: Annotated[str, InputPath("`mempo sft` writes an adapter where model.lora.rank is above 0")] | None = None
    """Folder of an adapter to start from (e.g. of `mempo sft`). A frozen copy of it is the reference."""


@dataclass(frozen=True)
class TinyModelConfig:
    """A randomly initialised Llama, used where `model.path` is `tiny`."""

    width: Small = 80
    """Size of a hidden state; a multiple of `heads`."""
    layers: Small = 3
    """Number of decoder layers."""
    heads: Small = 5
    """Attention heads of a layer."""
    mimetic: bool = False
    """Start attention as trained models end up: copying is learned in about half the steps."""

    def problems(self) -> Iterator[Problem]:
        if self.width % self.heads:
            yield Problem("width", f"must be a multiple of heads ({self.heads})")


@dataclass(frozen=True)
class ModelConfig:
    """The policy's weights."""

    path: Annotated[
        str, InputPath("give a model folder, a hub name, bundled:smollm2 or bundled:forgetful", or_name=True)
    ] = "bundled:smollm2"
    """A folder (`./model`, `/data/model`), a hub name, `bundled:smollm2`, the demo's `bundled:forgetful`, or `tiny`."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights in memory."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, or `auto`: a GPU where there is one."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    tiny: TinyModelConfig = field(default_factory=TinyModelConfig)


@dataclass(frozen=True)
class TaskConfig:
    """The questions to train on."""

    files: tuple[TaskFile, ...] = ()
    """Task files, read in this order."""
    format: str | None = None
    """Format of the files; None finds it out from their content."""
    objectives: Positive | None = None
    """Compose tasks of this many consecutive questions; None takes tasks as the files hold them."""
    shuffle: bool = True
    """Another order in each epoch, drawn from the run's seed."""


@dataclass(frozen=True)
class RetrieverConfig:
    """The search service that an environment asks."""

    url: str = "http://127.0.0.1:8000"
    """Address of the server; `/retrieve` and `/health` lie below it."""
    name: str | None = None
    """The name that the server must give in `/health`; None accepts every retriever."""
    corpus_hash: str | None = None
    """The corpus that the server must serve, as `/health` shows it; None accepts every corpus."""
    top_k: Positive = 3
    """Passages shown for a search."""
    deadline_seconds: PositiveFloat = 10.0
    """Longest wait for a search, retries included; then the policy is told that it failed."""
    retries: Count = 2
    """Further tries after a failed request, within the deadline."""


@dataclass(frozen=True)
class ContextConfig:
    """What a turn sees of the turns before it."""

    policy: ContextName = "previous_turn"
    """`previous_turn` is MemPO, `full_history` is ReAct."""
    thoughts: bool = True
    """Whether thoughts of earlier turns stay in the context."""
    last_turns: Positive = 3
    """How many turns `last_turns` shows."""
    history_tokens: Positive = 3072
    """Tokens of earlier turns that `truncated_history` shows."""
    prompts: Annotated[str, InputPath("give memory, react, compact, none or a file of your own", or_name=True)] = (
        "memory"
    )
    """The set of instructions: `memory`, `react` (no memory), `compact`, `none`, or a file of your own."""
    layout: Layout = "conversation"
    """`single_message` puts all into one user message, for servers whose template rewrites assistant turns."""


@dataclass(frozen=True)
class RolloutConfig:
    """How trajectories are sampled."""

    group_size: Positive = 16
    """G: tries at one task, over which advantages are normalised."""
    max_turns: Positive = 16
    """A trajectory without an answer ends after this many turns."""
    temperature: NonNegative = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Sample from the smallest set of tokens with this probability."""
    max_prompt_tokens: Positive = 4096
    """Longest prompt; a longer one ends the trajectory with `context_overflow`."""
    max_response_tokens: Positive = 1024
    """Longest generation of one turn."""
    max_observation_tokens: Positive = 1000
    """Longest observation, wrapper included; the rest is cut off visibly."""
    max_model_tokens: Positive | None = None
    """Context of the model (vLLM's `max_model_len`); None asks the model itself."""
    min_response_tokens: Positive = 16
    """Where the context leaves less room than this, the trajectory ends with `context_overflow`."""
    concurrency: Positive = 128
    """Trajectories under way at the same time."""
    deadline_seconds: PositiveFloat = 600.0
    """Longest wait for one generation of a server, retries included."""
    stop_at_tool_error: bool = False
    """End a trajectory at a failed tool (server gone, deadline passed) instead of telling the policy; it is
    not trained on. A call that the tool refuses is the policy's own fault, and always told."""
    malformed: Literal["stop", "tell"] = "stop"
    """A turn without a readable action ends the trajectory, or the policy is told what was wrong."""
    max_failure_rate: Share = 0.5
    """A run stops when more than this share of its trajectories ended in a failing policy or tool."""

    def problems(self) -> Iterator[Problem]:
        needed = self.max_prompt_tokens + self.max_response_tokens
        if self.max_model_tokens is not None and needed > self.max_model_tokens:
            yield Problem(
                "max_model_tokens",
                f"must hold max_prompt_tokens + max_response_tokens = {self.max_prompt_tokens}"
                f" + {self.max_response_tokens} = {needed}; raise it or lower one of them",
            )
        if self.max_observation_tokens >= self.max_prompt_tokens:
            yield Problem(
                "max_observation_tokens",
                f"must be below max_prompt_tokens ({self.max_prompt_tokens}): the next prompt holds the observation",
            )
        if self.min_response_tokens > self.max_response_tokens:
            yield Problem("min_response_tokens", f"must not exceed max_response_tokens ({self.max_response_tokens})")


@dataclass(frozen=True)
class RewardConfig:
    """R^T: the reward of a whole trajectory."""

    correctness: Literal["exact", "mean_em", "mean_f1"] = "exact"
    """1 where every objective is right, or the mean EM or F1 over the objectives."""
    require_format: bool = True
    """Whether R^T is 0 where a turn is malformed, no answer was given, or answers are not as many as questions."""
    mode: AnswerMode = "qa"
    """How an answer is compared with the gold ones."""


@dataclass(frozen=True)
class MemoryConfig:
    """R^M: the reward of one memory, P(answer | question, memory) minus a baseline."""

    baseline: Baseline = "prefix"
    """What P is compared with: `prefix` the whole trajectory before the turn, `visible` the question and the
    previous turn, `previous_memory`, `no_memory` the question alone, `none` zero."""
    scorer: Literal["current", "reference"] = "current"
    """Whose P: the current policy's (without gradient) or the frozen reference's."""
    value: Literal["probability", "log_probability"] = "probability"
    """The geometric mean of the gold tokens' probabilities, or its logarithm."""
    gold: Literal["joined", "per_objective"] = "joined"
    """With several objectives: one mean over the joined answers, or the average of one mean for each."""
    aliases: Literal["first", "best"] = "first"
    """Which gold alias is scored; `best` is the best of the first ones of all questions, the second ones, and so on."""
    length_penalty: NonNegative = 0.0
    """Subtracted from R^M for each token of the memory; 0 as in the paper."""
    require_format: bool = False
    """Whether all memories of a trajectory have P 0 where `reward.require_format` would make its R^T 0: also where it
    ran out of turns."""
    batch_tokens: Positive = 16384
    """Tokens of one forward pass while scoring."""

    def problems(self) -> Iterator[Problem]:
        if self.require_format and self.value == "log_probability":
            yield Problem("require_format", 'needs value = "probability": P of 0 has no logarithm')


@dataclass(frozen=True)
class AdvantageConfig:
    """From rewards to advantages: A^T on every generated token, plus alpha * A^M inside the memory."""

    alpha: NonNegative = 1.0
    """Weight of the memory advantage; 0 is plain GRPO and scores no memories."""
    alpha_schedule: Literal["constant", "linear"] = "constant"
    """Course of alpha over the run's batches; `linear` falls from alpha in the first to nearly 0 in the last."""
    statistics: Literal["group", "turn_index"] = "group"
    """Over what A^M is normalised: all turns of the group, or those with the same index."""
    normaliser: Literal["std", "mean", "none"] = "std"
    """For A^M: subtract the mean and divide by the sample deviation, subtract the mean only, or leave R^M as it is."""
    std_floor: PositiveFloat = 1e-3
    """Smallest deviation that A^M is divided by."""
    gates: tuple[Gate, ...] = ()
    """Where A^M counts; several may be combined. Empty: everywhere."""
    drop_equal_groups: bool = False
    """Leave groups whose outcomes are all equal out of the update."""

    def problems(self) -> Iterator[Problem]:
        if len(set(self.gates)) != len(self.gates):
            yield Problem("gates", "names a gate twice")


@dataclass(frozen=True)
class LossConfig:
    """The clipped policy loss and its KL penalty."""

    clip_low: Share = 0.2
    """The importance ratio is clipped below at 1 - clip_low."""
    clip_high: NonNegative = 0.2
    """The importance ratio is clipped above at 1 + clip_high."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence to the reference."""
    kl_beta: NonNegative = 0.001
    """Weight of the KL penalty; 0 needs no reference model."""
    aggregation: Literal["trajectory_mean", "token_mean", "turn_mean"] = "trajectory_mean"
    """What weighs the same: each trajectory (the paper), each token of the batch, or each turn."""
    truncated: Literal["keep", "exclude"] = "keep"
    """Trajectories that were cut: kept with R^T = 0, or left out of the loss."""
    old_logprobs: Literal["sampler", "recomputed"] = "sampler"
    """Denominator of the ratio: log-probs as sampled, or computed again by the trainer before the first step."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, and how a batch goes through the model."""

    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up; the last two end at 0."""
    stable_share: Share = 0.0
    """Of the steps after the warm-up: the learning rate stays at its peak in them before it falls."""
    warmup_steps: Count = 0
    """Optimiser steps in which the learning rate rises from 0."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    beta1: Share = 0.9
    """Decay of the first moment."""
    beta2: Share = 0.999
    """Decay of the second moment."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this norm."""
    micro_batch_tokens: Positive = 8192
    """Tokens of one forward and backward pass, padding included; gradients add up over the batch."""
    gradient_checkpointing: bool = False
    """Compute activations twice instead of keeping them."""
    autocast_bfloat16: bool = False
    """Run the matrix products in bfloat16; weights and optimiser keep their type. In RL with float32 weights only with
    `loss.old_logprobs` "recomputed"."""


@dataclass(frozen=True)
class TrainConfig:
    """The training loop."""

    batch_tasks: Positive = 128
    """Tasks of one batch; it holds batch_tasks * group_size trajectories."""
    epochs: Positive = 1
    """Passes over the tasks."""
    max_batches: Positive | None = None
    """End after this many batches, wherever the epoch is; None goes to the end of the last epoch."""
    mini_batches: Positive = 1
    """Optimiser steps of one pass over a batch; a batch is split by tasks, never by rows."""
    batch_epochs: Positive = 1
    """Passes over one batch, with the old log-probs that were stored before the first."""
    stop_at_collapse: bool = False
    """End the run at a collapse warning instead of only logging it."""
    collapse_batches: Annotated[int, Meta(ge=4)] = 10
    """A collapse warning compares the newer half of so many batches with the older half."""

    def problems(self) -> Iterator[Problem]:
        if self.mini_batches > self.batch_tasks:
            yield Problem("mini_batches", f"must not exceed batch_tasks ({self.batch_tasks})")


@dataclass(frozen=True)
class ReplayConfig:
    """Trajectories of earlier batches, used again with their own log-probs as the ratio's denominator."""

    batches: Count = 0
    """How many earlier batches may be drawn from; 0 is off."""
    share: Annotated[float, Meta(gt=0, lt=1)] = 0.25
    """Share of a batch's groups that comes from replay."""
    max_age_steps: Positive = 8
    """Trajectories sampled more than this many optimiser steps ago are dropped."""


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out tasks during training."""

    files: tuple[TaskFile, ...] = ()
    """Held-out task files."""
    format: str | None = None
    """Format of the files; None finds it out from their content."""
    objectives: Positive | None = None
    """Compose tasks of this many consecutive questions; None takes tasks as the files hold them."""
    every_batches: Count = 0
    """Evaluate before the first batch, after every so many, and at the end; 0 never."""
    max_tasks: Positive | None = None
    """Evaluate on the first so many tasks; None takes all."""
    temperature: NonNegative = 0.0
    """Sampling temperature; 0 is greedy."""
    retriever: RetrieverConfig = field(default_factory=lambda: RetrieverConfig(url="http://127.0.0.1:8001"))
    """A server of its own: results must not leak between training and evaluation."""

    def problems(self) -> Iterator[Problem]:
        if self.every_batches and not self.files:
            yield Problem("every_batches", "needs held-out tasks: set files, or 0 to evaluate never")


@dataclass(frozen=True)
class CheckpointConfig:
    """What is saved, and when."""

    every_batches: Count = 10
    """Save after every so many batches, and at the end; 0 saves at the end only."""
    keep: Positive = 2
    """The newest so many checkpoints stay."""
    resume: bool = True
    """Go on from the newest whole checkpoint of the run's folder, where there is one."""


@dataclass(frozen=True)
class LogConfig:
    """What is written down of a run. The run log is always written."""

    trajectories_every_batches: Count = 1
    """Write the trajectories of every so many batches to the run log; 0 never."""
    fsync: bool = False
    """Force the run log to the disk after each batch: it then survives a power cut."""
    progress: bool = True
    """Show a progress bar on a terminal."""
    tensorboard: bool = False
    """Write TensorBoard files beside the run log."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Log to Weights & Biases."""
    wandb_project: str = "mempo"
    """The project there."""


@dataclass(frozen=True)
class SftConfig:
    """Behaviour cloning on teacher trajectories, before RL (`mempo sft`)."""

    files: tuple[Annotated[str, InputPath("make it with `mempo data teach` or `mempo sft-data`")], ...] = ()
    """Run logs with teacher trajectories."""
    heldout_share: Annotated[float, Meta(ge=0, lt=1)] = 0.05
    """Share of the tasks that is held out to watch the loss."""
    keep_wrong_share: Share = 0.0
    """Share of the well-formed trajectories with a wrong answer that is kept; the paper keeps none."""
    probe_share: Share = 0.0
    """Share of the trajectories that also give rows of the memory scorer's form: the answer that a memory alone, or
    the whole history, allows. 0 as in the paper; a policy that never saw this form scores its memories badly."""
    epochs: Positive = 3
    """Passes over the trajectories."""
    batch_tokens: Positive = 32768
    """Tokens of one optimiser step."""
    packing: bool = False
    """Several rows in one sequence, kept apart by the attention mask; False sorts rows by length instead."""
    prompt_weight: Share = 0.0
    """Weight of the loss on prompt tokens in the first half of the steps; 0 trains on the policy's tokens alone."""
    patience_evals: Positive = 3
    """Stop after so many checks of the held-out loss without a new best."""
    eval_every_steps: Positive = 50
    """Optimiser steps between checks of the held-out loss, and between checkpoints."""
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(learning_rate=1e-5, schedule="cosine", warmup_steps=20)
    )


@dataclass(frozen=True)
class Config:
    """All settings of a run: one file serves `mempo sft` and `mempo train`."""

    run_dir: str = "runs/mempo"
    """Folder that the run writes: log, checkpoints, exports. Relative to the working directory."""
    seed: Count = 0
    """Seed that all others are derived from."""
    model: ModelConfig = field(default_factory=ModelConfig)
    tasks: TaskConfig = field(default_factory=TaskConfig)
    retriever: RetrieverConfig = field(default_factory=RetrieverConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    sft: SftConfig = field(default_factory=SftConfig)

    def problems(self) -> Iterator[Problem]:
        if not self.run_dir.strip() or self.run_dir.startswith("~"):
            yield Problem("run_dir", "must name a folder, and ~ is not looked up: write it out")
        if self.rollout.group_size < 2:
            yield Problem(
                "rollout.group_size", "must be at least 2: a group of one has no advantage, so nothing would be learned"
            )
        if self.rollout.temperature == 0:
            yield Problem("rollout.temperature", "must be above 0: greedy tries at one task are all equal")
        if self.replay.batches and self.loss.old_logprobs != "sampler":
            yield Problem(
                "replay.batches",
                f"needs the log-probs that trajectories were sampled with, but loss.old_logprobs is"
                f' "{self.loss.old_logprobs}"; set it to "sampler", or replay.batches to 0',
            )
        if (
            self.optimizer.autocast_bfloat16
            and self.model.dtype == "float32"  # weights of 16 bits round in the sampler too
            and self.loss.old_logprobs == "sampler"
        ):
            yield Problem(
                "optimizer.autocast_bfloat16",
                "makes log-probs that differ from the float32 sampler's by more than the clip allows; set "
                'loss.old_logprobs to "recomputed"'
                + (", and replay.batches to 0, which needs the sampler's" if self.replay.batches else ""),
            )
        if self.model.lora.rank == 0 and self.model.lora.adapter is not None:
            yield Problem("model.lora.adapter", "needs model.lora.rank, the rank of that adapter")
