"""What `mempo export` writes, served by a real vLLM: the same policy as the trained one in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.vllm.conftest import MEASURED, vllm_server

from mempo.cli.main import main
from mempo.config import load_config
from mempo.core import GenerationRequest, Message, ScoreRequest
from mempo.policy.local import LocalPolicy
from mempo.policy.openai import OpenAIPolicy
from mempo.train.assembly import make_policy
from mempo.train.checkpoint import find_checkpoint, load_weights

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3600)]

FP32_GAP = 0.01
"""Both sides compute in fp32, in another order of sums."""

MODELS = {
    # vLLM takes heads of 32, 64, 80, ... on a CPU; the presets' tiny heads of 16 are too small for it.
    "tiny": ["--model.tiny.width", "64", "--model.tiny.heads", "2"],
    "lora": ["--model.path", "bundled:smollm2", "--model.lora.rank", "4"],
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few trajectories in the world's own short texts."""
    folder = tmp_path_factory.mktemp("teacher")
    world = ["--mode", "closed", "--tasks", "4", "--objectives", "2", "--split", "train"]
    assert main(["data", "world", *world, "--out", str(folder / "world")]) == 0
    files = [str(folder / "world" / "tasks_train.jsonl"), "--corpus", str(folder / "world" / "corpus.jsonl")]
    assert main(["data", "teach", *files, "--top-k", "1", "--max-turns", "6", "--out", str(folder / "t.jsonl")]) == 0
    return folder / "t.jsonl"


def trained(options: list[str]) -> LocalPolicy:
    """The policy of a run's newest checkpoint, as training goes on with it: an adapter is not merged."""
    config = load_config("tiny", options)
    policy = make_policy(config)
    load_weights(policy.model, find_checkpoint(Path(config.run_dir) / "sft")[0])
    return policy


@pytest.mark.parametrize("kind", MODELS)
async def test_a_served_export_samples_and_scores_as_the_policy_that_was_trained(
    kind: str, teacher: Path, tmp_path: Path, servers_bin: Path
) -> None:
    options = [*MODELS[kind], "--run-dir", str(tmp_path / "run"), "--sft.epochs", "4"]
    options += ["--sft.optimizer.learning-rate", "3e-3", "--sft.optimizer.warmup-steps", "0"]
    assert main(["sft", "tiny", *options, "--sft.files", str(teacher), "--sft.batch-tokens", "500"]) == 0
    out = tmp_path / "exported"
    assert main(["export", str(tmp_path / "run" / "sft"), "--out", str(out)]) == 0

    local, untrained = trained(options), make_policy(load_config("tiny", options))
    messages = (Message("system", ""), Message("user", "home of Baxgal?"))
    request = GenerationRequest(messages, max_tokens=32, seed=0, temperature=0.0)
    own = await local.generate(request)
    score = ScoreRequest(own.prompt_ids, own.token_ids)
    with vllm_server(servers_bin, out, log=tmp_path / f"vllm-{kind}.log", context_tokens=512) as server:
        # The first request compiles the sampler: for minutes on a busy machine.
        policy = OpenAIPolicy(
            server.url,
            out.name,
            mode="tokens",
            renderer=local.renderer,
            timeout_seconds=1200.0,
            deadline_seconds=1200.0,
        )
        served = await policy.generate(request)
        [scored] = await policy.score([score])
        await policy.aclose()

    assert (served.prompt_ids, served.token_ids) == (own.prompt_ids, own.token_ids)
    gap = max(abs(a - b) for theirs in (served.logprobs, scored) for a, b in zip(theirs, own.logprobs, strict=True))
    [before] = untrained.score_now([score])
    moved = max(abs(a - b) for a, b in zip(before, own.logprobs, strict=True))
    MEASURED.append(f"export of {kind}: gap {gap:.1e} nats a token at most, {moved:.2f} from the untrained policy")
    assert gap < FP32_GAP
    assert moved > 10 * FP32_GAP, "nothing was trained: the base model would pass too"
