"""How fast a policy is trained and its memories are scored, and what the vocabulary costs.

    python -m benchmarks.training                                      # all parts, all models
    python -m benchmarks.training --parts update --models tiny --rounds 9
    python -m benchmarks.training --parts trl --trl-python PATH        # a Python that has TRL

Parts (run from the root of the checkout; all ratios are of one run, rounds alternate what is compared). Times are
of this process's processor, so what else the machine does hardly counts; give `--threads 1` where it is busy:

update     `mempo.train.update` on the turns of a batch, optimiser step included, against bare loops of
           forward and backward passes over the same rows: rows of equal length together, no pads, plain
           cross-entropy on the responses
scoring    the `prefix` baselines of memories, and all their probes: shared prefixes once, against each
           request on its own, at several numbers of turns
memory     peak memory of log-probs and their gradient, in chunks and at once, a process for each point
trl        sampling and update of GRPO, against TRL's GRPOTrainer on the same model, prompts and numbers
           of tokens; TRL runs in the environment that `--trl-python` names

The rows are an oracle's turns in a closed world (short) and in an open one (as long as HotpotQA's).
"""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import tyro
from benchmarks.rollout import NEVER, medians, shown
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from mempo.algo import hidden_logprobs, token_logprobs
from mempo.config import (
    AdvantageConfig,
    Config,
    ContextConfig,
    LossConfig,
    MemoryConfig,
    OptimizerConfig,
    RolloutConfig,
)
from mempo.core import Group, Json, ScoreRequest, Task, Trajectory, Turn
from mempo.data.teacher import Teacher
from mempo.data.world import OpenWorld, closed_pattern, closed_vocabulary, closed_worlds
from mempo.env import SearchTool
from mempo.policy.models import BUNDLED_SMOLLM2, backbone, load_model, load_tokenizer, output_head
from mempo.policy.sampling import Row, Sampled, sample_rows
from mempo.policy.scoring import score_targets
from mempo.policy.scripted import ScriptedPolicy
from mempo.policy.tiny import tiny_llama, word_tokenizer
from mempo.retrieval.memory import MemoryRetriever
from mempo.rewards.memory import MemoryProbes, Probe
from mempo.rollout import make_rollout
from mempo.rollout.assembly import make_context, make_system_prompt
from mempo.text.render import Renderer
from mempo.train.batch import make_batch
from mempo.train.forward import TokenRow
from mempo.train.optimizer import make_optimizer, make_schedule
from mempo.train.update import update

Part = Literal["update", "scoring", "memory", "trl"]
ModelName = Literal["tiny", "smollm2"]
WorldName = Literal["closed", "open"]
Figures = dict[str, Json]
T = TypeVar("T")


@dataclass(frozen=True)
class Args:
    parts: tuple[Part, ...] = ("update", "scoring", "memory", "trl")
    models: tuple[ModelName, ...] = ("tiny", "smollm2")
    """tiny: 0.2 million random weights and the vocabulary that fits the world. smollm2: SmolLM2-135M."""
    worlds: tuple[WorldName, ...] = ("closed", "open")
    """closed: rows of some hundred tokens. open: rows of some hundreds, with passages as in HotpotQA."""
    tasks: int = 32
    """Tasks whose turns are an update of the tiny model in the closed world; in the open world it is a quarter of
    them, and SmolLM2 has a quarter of what the tiny model has."""
    micro_batch_tokens: int = 4096
    """Padded tokens of a micro-batch, and tokens of a bucket of the bare loops."""
    turns: tuple[int, ...] = (2, 4, 8, 16)
    """Turns of the trajectories whose memories are scored."""
    trajectories: int = 8
    """Trajectories that the tiny model scores at once."""
    smollm2_trajectories: int = 1
    """The same of SmolLM2."""
    rounds: int = 6
    """Repetitions with the tiny model; the first warms up, medians of the others are shown."""
    smollm2_rounds: int = 3
    """The same with SmolLM2."""
    peak_tokens: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    """Sequence lengths whose peak memory is measured."""
    vocabularies: tuple[int, ...] = (49_152, 151_936)
    """SmolLM2's and Qwen2.5's."""
    peak_width: int = 64
    """Width of the hidden states there: it does not matter to the tables that are compared."""
    unchunked_gib: float = 2.0
    """Tables of logits that are larger than this are not made at once: that takes three of them."""
    trl_python: Path | None = None
    """A Python with TRL and torch. Without it the part is skipped."""
    trl_prompts: int = 4
    """Prompts of a step."""
    trl_group_size: int = 4
    """Responses to each."""
    trl_response_tokens: int = 64
    """Tokens of each response."""
    threads: int = 2
    """Threads of torch."""
    json: Path | None = None
    """Write all figures here."""


def main(args: Args) -> None:
    torch.set_num_threads(args.threads)
    print(f"$ {' '.join(['python -m benchmarks.training', *sys.argv[1:]])}")
    figures: Figures = {}
    if "memory" in args.parts:
        figures |= peaks(args)
    for subject in subjects(args) if set(args.parts) - {"memory"} else ():
        for part in PARTS:
            if part in args.parts:
                measured = PARTS[part](subject, args)
                figures |= shown({f"{part}_{subject.name}_{key}": value for key, value in measured.items()})
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def cpu_seconds(function: Callable[[], object]) -> float:
    """Seconds that this process spent computing, all its threads together."""
    began = time.process_time()
    function()
    return time.process_time() - began


# What is measured: a model, and an oracle's trajectories in its tokens.


@dataclass(frozen=True)
class Subject:
    """A model with a world's trajectories."""

    name: str
    model_name: ModelName
    world: WorldName
    args: Args

    @cached_property
    def tokenizer(self) -> Any:
        if self.model_name == "tiny" and self.world == "closed":
            return word_tokenizer(closed_vocabulary(), closed_pattern())
        return load_tokenizer(BUNDLED_SMOLLM2)

    @cached_property
    def renderer(self) -> Renderer:
        return Renderer(self.tokenizer)

    @cached_property
    def context(self) -> ContextConfig:
        return ContextConfig(prompts="none" if self.world == "closed" else "compact")

    @property
    def rounds(self) -> int:
        return self.args.rounds if self.model_name == "tiny" else self.args.smollm2_rounds

    @property
    def tasks(self) -> int:
        quarters = [self.world == "open", self.model_name == "smollm2"].count(True)
        return max(1, self.args.tasks >> 2 * quarters)

    def model(self) -> PreTrainedModel:
        """A fresh one."""
        return tiny_llama(len(self.tokenizer)) if self.model_name == "tiny" else load_model(BUNDLED_SMOLLM2)

    def trajectories(self, count: int, objectives: int, max_turns: int) -> list[Trajectory]:
        """An oracle's, as the engine runs them: prompts, ids and masks are those of a rollout."""
        tasks, retriever = WORLDS[self.world](count, objectives)
        return asyncio.run(said_again(tasks, retriever, self, max_turns))


def subjects(args: Args) -> Iterator[Subject]:
    for model in args.models:
        for world in args.worlds:
            yield Subject(f"{model}_{world}", model, world, args)


def closed(count: int, objectives: int) -> tuple[list[Task], MemoryRetriever]:
    worlds = list(closed_worlds(0, count, objectives=objectives))
    return [world.task for world in worlds], MemoryRetriever(passage for world in worlds for passage in world.passages)


def opened(count: int, objectives: int) -> tuple[list[Task], MemoryRetriever]:
    world = OpenWorld(seed=0, passages=2000)
    return list(world.tasks(count, objectives=objectives)), MemoryRetriever(world.passages())


WORLDS: dict[WorldName, Callable[[int, int], tuple[list[Task], MemoryRetriever]]] = {"closed": closed, "open": opened}


async def said_again(
    tasks: Sequence[Task], retriever: MemoryRetriever, subject: Subject, max_turns: int
) -> list[Trajectory]:
    made = []
    for task in tasks:
        oracle = await Teacher(max_turns=max_turns).run(task, retriever)
        rollout = make_rollout(
            ScriptedPolicy([turn.text for turn in oracle.turns], renderer=subject.renderer),
            [SearchTool(retriever)],
            RolloutConfig(max_turns=max_turns + 1, max_prompt_tokens=10**6),
            subject.context,
        )
        trajectory = await rollout.one(task, rollout=0, seed=0)
        if trajectory.answer != oracle.answer:
            raise SystemExit(f"task {task.id}: the engine's trajectory is not the oracle's")
        made.append(trajectory)
    return made


# The update.


def measure_update(subject: Subject, args: Args) -> Figures:
    groups = rewarded(subject.trajectories(subject.tasks, objectives=2, max_turns=16))
    batch = make_batch(groups)
    model = subject.model()
    config = config_of(args.micro_batch_tokens, alpha=1.0)
    optimizer = make_optimizer(model, config.optimizer)
    schedule = make_schedule(optimizer, config.optimizer, 1000)
    tokens = sum(len(row.read_ids) for row in batch.rows)

    def ours() -> None:
        generator = torch.Generator().manual_seed(0)
        update(model, optimizer, schedule, batch, config, reference=None, generator=generator)

    rounds: list[dict[str, float]] = []
    for _ in range(subject.rounds):
        seconds = cpu_seconds(ours)
        plain = cpu_seconds(lambda: bare_loop(model, batch.rows, args.micro_batch_tokens, plain_loss))
        frugal = cpu_seconds(lambda: bare_loop(model, batch.rows, args.micro_batch_tokens, frugal_loss))
        rounds.append(
            {
                "tokens_per_second": tokens / seconds,
                "bare_tokens_per_second": tokens / plain,
                "frugal_bare_tokens_per_second": tokens / frugal,
                "over_bare": plain / seconds,
                "over_frugal_bare": frugal / seconds,
            }
        )
    lengths = [len(row.read_ids) for row in batch.rows]
    return {
        "rows": len(lengths),
        "mean_row_tokens": statistics.fmean(lengths),
        "response_share_of_tokens": sum(len(row.response_ids) for row in batch.rows) / tokens,
        **medians(rounds),
    }


def rewarded(trajectories: Sequence[Trajectory]) -> list[Group]:
    """Groups of four, with outcomes that differ. A group's are of several tasks: no two rows are the same."""

    def rewarded_one(index: int, trajectory: Trajectory) -> Trajectory:
        turns = tuple(replace(turn, memory_reward=math.sin(index + turn.index)) for turn in trajectory.turns)
        return replace(trajectory, turns=turns, reward=float(index % 2))

    made = [rewarded_one(index, trajectory) for index, trajectory in enumerate(trajectories)]
    return [Group(group[0].task, group) for group in batched(made, 4)]


def config_of(micro_batch_tokens: int, *, alpha: float) -> Config:
    return Config(
        advantage=AdvantageConfig(alpha=alpha),
        loss=LossConfig(kl_beta=0.0),
        optimizer=OptimizerConfig(learning_rate=1e-6, micro_batch_tokens=micro_batch_tokens),
    )


def batched(items: Sequence[T], size: int) -> Iterator[tuple[T, ...]]:
    for start in range(0, len(items), size):
        yield tuple(items[start : start + size])


Loss = Callable[[PreTrainedModel, torch.Tensor, torch.Tensor], torch.Tensor]
"""The mean loss of `ids` and `labels`, both `[row, token]`; the label of what is not trained on is -100."""


def bare_loop(model: PreTrainedModel, rows: Sequence[TokenRow], bucket_tokens: int, loss: Loss) -> None:
    """Forward and backward over all rows, those of equal length together."""
    by_length: dict[int, list[TokenRow]] = defaultdict(list)
    for row in rows:
        by_length[len(row.prompt_ids) + len(row.response_ids)].append(row)
    model.train()
    for length, equal in by_length.items():
        for bucket in batched(equal, max(1, bucket_tokens // length)):
            ids = torch.tensor([row.prompt_ids + row.response_ids for row in bucket])
            labels = torch.tensor([(-100,) * len(row.prompt_ids) + row.response_ids for row in bucket])
            loss(model, ids, labels).backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)
    model.eval()


def plain_loss(model: PreTrainedModel, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The model's own: logits of all tokens."""
    loss: torch.Tensor = model(input_ids=ids, labels=labels, use_cache=False).loss
    return loss


def frugal_loss(model: PreTrainedModel, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Logits of responses only."""
    hidden = backbone(model)(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    wanted = labels[:, 1:]
    head, _ = output_head(model)
    return cross_entropy(hidden[wanted >= 0] @ head.T, wanted[wanted >= 0])


# Scoring.


def measure_scoring(subject: Subject, args: Args) -> Figures:
    model = subject.model()
    probes = MemoryProbes(
        subject.renderer,
        MemoryConfig(baseline="prefix"),
        context=make_context(subject.context),
        system_prompt=make_system_prompt([SearchTool(WORLDS[subject.world](1, 1)[1])], subject.context),
    )
    figures: Figures = {}
    for turns in args.turns:
        asked = [turn for one in trajectories_of(subject, turns) for turn in probes.of_trajectory(one)]
        prefixes = requests_of(turn.baseline for turn in asked)
        kinds = {"prefixes": prefixes, "all_probes": [*prefixes, *requests_of(turn.memory for turn in asked)]}
        figures[f"{turns}_turns_mean_prefix_tokens"] = statistics.fmean(len(r.prompt_ids) for r in prefixes)
        rounds: list[dict[str, float]] = []
        for _ in range(subject.rounds):
            measured = {}
            for kind, requests in kinds.items():
                alone = cpu_seconds(partial(score_targets, model, requests, share=False))
                measured[f"{turns}_turns_{kind}_speedup"] = alone / cpu_seconds(partial(score_targets, model, requests))
            rounds.append(measured)
        figures |= medians(rounds)
    return figures


def trajectories_of(subject: Subject, turns: int) -> list[Trajectory]:
    """Trajectories of exactly so many turns: a search for each objective, and the answer."""
    count = subject.args.trajectories if subject.model_name == "tiny" else subject.args.smollm2_trajectories
    made = subject.trajectories(count, objectives=turns - 1, max_turns=turns)
    if any(len(trajectory.turns) != turns for trajectory in made):
        raise SystemExit(f"the oracle's trajectories have {[len(t.turns) for t in made]} turns instead of {turns}")
    return made


def requests_of(probes: Iterable[Probe | None]) -> list[ScoreRequest]:
    return [request for probe in probes if probe is not None for request in probe.requests]


# Memory.


def peaks(args: Args) -> Figures:
    """MiB above what the process held before, at each length; at once only where the table is small enough."""
    figures: Figures = {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, max_tasks_per_child=1, mp_context=spawn) as processes:
        for vocabulary in args.vocabularies:
            for tokens in args.peak_tokens:
                for kind in ("chunked", "at_once"):
                    if kind == "at_once" and tokens * vocabulary * 4 > args.unchunked_gib * 2**30:
                        continue
                    peak = processes.submit(peak_bytes, kind, tokens, vocabulary, args.peak_width, args.threads)
                    name = f"memory_{vocabulary}_words_{tokens}_tokens_{kind}_mib"
                    figures |= shown({name: peak.result() / 2**20})
    return figures


def peak_bytes(kind: str, tokens: int, vocabulary: int, width: int, threads: int) -> int:
    """What this process takes for the log-probs of `tokens` tokens and their gradient."""
    torch.set_num_threads(threads)
    hidden = torch.randn(tokens, width, requires_grad=True)
    head = torch.randn(vocabulary, width, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,))
    before = own_bytes("VmRSS")
    scores = hidden_logprobs(hidden, head, targets) if kind == "chunked" else token_logprobs(hidden @ head.T, targets)
    scores.logprobs.sum().backward()  # type: ignore[no-untyped-call]
    return own_bytes("VmHWM") - before


def own_bytes(field: str) -> int:
    """VmRSS, what this process holds now, or VmHWM, the most that it has held. (getrusage's counts the parent's.)"""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    [line] = [line for line in status.splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


# TRL.


def measure_trl(subject: Subject, args: Args) -> Figures:
    """Whole steps of GRPO: G responses to each prompt, then one update with them all in one micro-batch."""
    if args.trl_python is None:
        print("trl is skipped: name a Python that has TRL with --trl-python")
        return {}
    trajectories = subject.trajectories(args.trl_prompts, objectives=2, max_turns=16)
    prompts = [trajectory.turns[1].prompt_text for trajectory in trajectories]  # of turns that have found something
    theirs = trl_steps(subject, args, prompts)
    steps = our_steps(subject, args, [tuple(subject.tokenizer(prompt)["input_ids"]) for prompt in prompts])
    if (theirs["prompt_tokens"], theirs["response_tokens"]) != (steps.prompt_tokens, steps.response_tokens):
        raise SystemExit(f"the tokens differ: TRL has {theirs}, mempo {steps}")
    trl_step, trl_sampling = (median_warm(theirs[f"{what}_seconds"]) for what in ("step", "sampling"))
    step, sampling = median_warm(steps.step_seconds), median_warm(steps.sampling_seconds)
    return {
        "prompt_tokens": steps.prompt_tokens,
        "response_tokens": steps.response_tokens,
        "step_seconds": step,
        "trl_step_seconds": trl_step,
        "step_speedup": trl_step / step,
        "sampling_speedup": trl_sampling / sampling,
        "update_speedup": (trl_step - trl_sampling) / (step - sampling),
    }


@dataclass
class Steps:
    """Seconds of each step, and the tokens of one."""

    step_seconds: list[float]
    sampling_seconds: list[float]
    prompt_tokens: int
    response_tokens: int


def our_steps(subject: Subject, args: Args, prompts: Sequence[tuple[int, ...]]) -> Steps:
    """The trainer's own sampling loop and update; outcomes are made up, memories are not rewarded."""
    model = subject.model()
    config = config_of(10**9, alpha=0.0)
    optimizer = make_optimizer(model, config.optimizer)
    schedule = make_schedule(optimizer, config.optimizer, 1000)
    [example] = subject.trajectories(1, objectives=2, max_turns=16)
    tries = [prompt for prompt in prompts for _ in range(args.trl_group_size)]
    steps = Steps([], [], sum(map(len, tries)), len(tries) * args.trl_response_tokens)
    for step in range(subject.rounds):
        rows = [Row(prompt, args.trl_response_tokens, step * len(tries) + place) for place, prompt in enumerate(tries)]
        began = time.process_time()
        sampled = sample_rows(model, rows, NEVER)
        middle = time.process_time()
        made = [
            replace(example, turns=(turn_of(example.turns[0], *pair),), reward=float(place % 2))
            for place, pair in enumerate(zip(rows, sampled, strict=True))
        ]
        batch = make_batch([Group(example.task, group) for group in batched(made, args.trl_group_size)])
        update(model, optimizer, schedule, batch, config, reference=None, generator=torch.Generator().manual_seed(0))
        steps.sampling_seconds.append(middle - began)
        steps.step_seconds.append(time.process_time() - began)
    return steps


def turn_of(example: Turn, row: Row, sampled: Sampled) -> Turn:
    length = len(sampled.token_ids)
    return replace(
        example,
        prompt_ids=tuple(row.prompt_ids),
        response_ids=tuple(sampled.token_ids),
        logprobs=tuple(sampled.logprobs),
        response_mask=(1,) * length,
        mem_mask=(0,) * length,
    )


def trl_steps(subject: Subject, args: Args, prompts: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        subject.model().save_pretrained(folder)
        subject.tokenizer.save_pretrained(folder)
        asked = {
            "model": folder,
            "prompts": list(prompts),
            "group_size": args.trl_group_size,
            "response_tokens": args.trl_response_tokens,
            "steps": subject.rounds + 1,
            "learning_rate": 1e-6,
            "threads": args.threads,
        }
        script = Path(__file__).with_name("trl_step.py")
        command = [str(args.trl_python), str(script)]
        ended = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"TRL failed:\n{ended.stderr}")
    figures: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return figures


def median_warm(seconds: Sequence[float]) -> float:
    return statistics.median(seconds[1:] or seconds)


PARTS: dict[Part, Callable[[Subject, Args], Figures]] = {
    "update": measure_update,
    "scoring": measure_scoring,
    "trl": measure_trl,
}


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
