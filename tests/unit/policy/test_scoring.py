from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from mempo.config import MemoryConfig
from mempo.core import Group, Message, Objective, ScoreRequest, StopReason, Task, Trajectory, Turn
from mempo.policy.local import LocalPolicy
from mempo.policy.models import hidden_states, projection
from mempo.policy.sampling import Endings, Row, sample_rows
from mempo.policy.scoring import PASS_TOKENS, can_share, plan_trees, score_targets
from mempo.policy.tiny import tiny_llama, tiny_policy
from mempo.rewards.memory import MemoryProbes
from mempo.text.context import ContextPolicy
from mempo.text.render import Renderer
from mempo.train.credit import with_memory_rewards

VOCABULARY = 64
MODEL = tiny_llama(VOCABULARY, width=40, layers=2, heads=4)
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 40,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


@torch.inference_mode()
def naive(model: PreTrainedModel, request: ScoreRequest) -> list[float]:
    """One forward pass over the whole sequence, all logits, no sharing and no padding."""
    ids = torch.tensor([request.prompt_ids + request.target_ids])
    logprobs = torch.log_softmax(model(ids).logits[0].float(), -1)
    start = len(request.prompt_ids)
    return [float(logprobs[start + i - 1, token]) for i, token in enumerate(request.target_ids)]


def trajectory_requests(seed: int, turns: int) -> list[ScoreRequest]:
    """As the prefix baseline asks: ever longer heads of one trunk, each with the same target."""
    rng = random.Random(seed)
    trunk = [rng.randrange(2, VOCABULARY) for _ in range(turns * 40)]
    return [ScoreRequest((*trunk[: t * 40 + 40], 3, 4), (5, 6, 7)) for t in range(turns)]


def test_scores_equal_the_naive_ones_with_and_without_sharing() -> None:
    requests = [*trajectory_requests(0, 6), *trajectory_requests(1, 4), ScoreRequest((9,), (8, 8))]
    expected = [naive(MODEL, request) for request in requests]
    for share in (True, False):
        for batch_tokens in (1, 500, 100_000):
            scored = score_targets(MODEL, requests, share=share, batch_tokens=batch_tokens)
            for row, right in zip(scored, expected, strict=True):
                assert row == pytest.approx(right, abs=1e-5)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([(), tuple(range(2, 40)), tuple(range(2, 60))]),
            st.lists(st.integers(2, 9), min_size=1, max_size=50),
            st.lists(st.integers(2, 9), max_size=4),
        ),
        max_size=8,
    )
)
def test_any_mixture_of_shared_prefixes_gives_the_naive_scores(
    parts: list[tuple[tuple[int, ...], list[int], list[int]]],
) -> None:
    requests = [ScoreRequest((*head, *prompt), tuple(target)) for head, prompt, target in parts]
    for request, row in zip(requests, score_targets(MODEL, requests), strict=True):
        assert row == pytest.approx(naive(MODEL, request), abs=1e-5)


def test_a_prefix_is_run_once_however_many_requests_share_it() -> None:
    requests = trajectory_requests(0, 8)
    [trunk] = plan_trees(requests)
    # The trunk's 8 * 40 tokens, and for each request its own 2 + 2: the third target token is not read.
    assert sum(len(node.own_ids) for node in trunk.family()) == 8 * 40 + 8 * 4
    assert sum(len(request.prompt_ids) + 2 for request in requests) == sum(t * 40 for t in range(1, 9)) + 8 * 4


def test_branches_run_deepest_first_in_passes_of_limited_size() -> None:
    [trunk] = plan_trees(trajectory_requests(0, 60))
    passes = trunk.passes()
    assert [node for nodes in passes for node in nodes] == sorted(trunk.branches, key=lambda node: -node.shared)
    assert len(passes) == 2
    assert all(sum(len(node.own_ids) for node in nodes) <= PASS_TOKENS for nodes in passes)


def test_a_branch_of_a_branch_runs_with_it_and_gives_the_naive_scores() -> None:
    question, memory = tuple(range(2, 42)), (*range(2, 34), 50)
    trunk = ScoreRequest((*question, *range(60, 1, -1), 3), (4,))
    aliases = [ScoreRequest((*question, *memory, 7), target) for target in ((5,), (5, 6, 8), (9, 9))]
    [root] = plan_trees([trunk, *aliases])
    [branch] = root.branches
    # All that the others read, but for a target token, the longest alias reads too.
    assert [(node.shared, node.own_ids) for node in branch.branches] == [(74, (9,)), (74, ())]
    requests = [*aliases, trunk]
    for request, row in zip(requests, score_targets(MODEL, requests), strict=True):
        assert row == pytest.approx(naive(MODEL, request), abs=1e-5)


def test_a_cache_is_never_cut_by_nothing_which_some_releases_take_for_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crop = DynamicCache.crop

    def checked_crop(cache: DynamicCache, size: int) -> None:
        assert size < 0
        crop(cache, size)

    monkeypatch.setattr(DynamicCache, "crop", checked_crop)
    # Targets that differ in their last token only: their branch shares all that the trunk read.
    requests = [ScoreRequest(tuple(range(2, 42)), (5, last)) for last in (6, 7)]
    requests.append(ScoreRequest((*range(2, 40), 3), (4,)))  # and this one runs with it
    for request, row in zip(requests, score_targets(MODEL, requests), strict=True):
        assert row == pytest.approx(naive(MODEL, request), abs=1e-5)


def test_a_request_that_adds_more_than_it_shares_is_a_trunk() -> None:
    head = tuple(range(2, 42))
    requests = [ScoreRequest((*head, *(token,) * 50), (7,)) for token in (3, 4)]
    assert [trunk.branches for trunk in plan_trees(requests)] == [[], []]


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(sliding_window=8, **SIZES),
        Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=1, **SIZES),
    ],
    ids=["mistral", "qwen2"],
)
def test_models_with_a_sliding_window_run_each_request_on_its_own(config: PreTrainedConfig) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    assert can_share(MODEL)
    assert not can_share(model)
    requests = trajectory_requests(0, 3)
    for request, row in zip(requests, score_targets(model, requests), strict=True):
        assert row == pytest.approx(naive(model, request), abs=1e-5)


def test_case_64_micro_batches_of_one_and_of_eight_agree() -> None:
    requests = trajectory_requests(3, 8)
    ones = score_targets(MODEL, requests, batch_tokens=1, share=False)
    eights = score_targets(MODEL, requests, batch_tokens=10**6, share=False)
    assert max(abs(a - b) for x, y in zip(ones, eights, strict=True) for a, b in zip(x, y, strict=True)) < 1e-5


def test_case_27_the_gold_answer_is_valued_and_not_the_policys_own() -> None:
    """From the trajectory to R^M with a real model, which would itself say Lyon."""
    policy = tiny_policy(["Lyon", "Paris", "<mem>", "</mem>", "\n", "<answer>", "</answer>", "Capital?"])
    task = Task("t", (Objective("Capital?", ("Paris",)),))
    turn = Turn(0, "<mem>Paris</mem>\n<answer>Lyon</answer>", memory="Paris", answer="Lyon")
    trajectory = Trajectory(task, 0, (turn,), StopReason.ANSWERED, seed=0)
    config = MemoryConfig(baseline="none")
    probes = MemoryProbes(policy.renderer, config, context=ContextPolicy(), system_prompt=lambda task: "")
    [asked] = probes.of_trajectory(trajectory)
    assert asked.memory is not None
    [request] = asked.memory.requests
    say(policy, request.prompt_ids, {"Lyon": 0.9, "Paris": 0.05})

    lyon, paris = policy.renderer.encode("Lyon"), policy.renderer.encode("Paris")
    endings = Endings(frozenset(), lambda ids: "", lambda stop: frozenset())
    [own] = sample_rows(policy.model, [Row(request.prompt_ids, 1, seed=0, temperature=0.0)], endings)
    assert tuple(own.token_ids) == tuple(lyon)
    assert math.exp(own.logprobs[0]) == pytest.approx(0.9, rel=1e-4)
    assert request.target_ids == tuple(paris)
    [group] = with_memory_rewards([Group(task, (trajectory,))], probes, policy.score_now, config)
    assert group.trajectories[0].turns[0].memory_reward == pytest.approx(0.05, rel=1e-4)


@torch.no_grad()
def say(policy: LocalPolicy, prompt_ids: tuple[int, ...], words: dict[str, float]) -> None:
    """Let a model give words these probabilities behind a prompt, by a vocabulary projection of its own."""
    ids = torch.tensor([prompt_ids])
    hidden = hidden_states(policy.model, ids, None, torch.arange(len(prompt_ids))[None])[0, -1]
    head = policy.model.get_output_embeddings()
    rest = (1 - sum(words.values())) / (head.weight.shape[0] - len(words))
    logits = torch.full((head.weight.shape[0],), math.log(rest))
    for word, probability in words.items():
        [id_] = policy.renderer.encode(word)
        logits[id_] = math.log(probability)
    head.weight = torch.nn.Parameter(torch.outer(logits, hidden) / hidden.square().sum())  # no longer the embeddings


@pytest.mark.parametrize(
    ("context", "gold", "merges"),
    [
        ("hello wor", "ld", ["w o", "wo r", "l d", "wor ld"]),
        ('">', "Paris", ["P a", "Pa r", "Par i", "Pari s", '" >', '"> Paris']),
    ],
)
def test_case_24_a_gold_answer_that_the_tokenizer_would_join_to_its_context_has_a_finite_score(
    context: str, gold: str, merges: list[str]
) -> None:
    # Encoded together and cut behind the context's tokens, nothing of the gold answer would be left.
    pairs = [(left, right) for left, right in (merge.split() for merge in merges)]
    pieces = [*sorted({*context, *gold}), *(left + right for left, right in pairs)]
    core = Tokenizer(models.BPE({piece: id for id, piece in enumerate(pieces)}, pairs))
    core.decoder = decoders.Fuse()
    renderer = Renderer(PreTrainedTokenizerFast(tokenizer_object=core))
    assert len(renderer.encode(context + gold)) == len(renderer.encode(context))
    request = renderer.score_request([Message("user", context[0])], context, gold)
    policy = LocalPolicy(tiny_llama(len(pieces), width=8, layers=1, heads=1), renderer)
    [[score]] = policy.score_now([request])
    assert renderer.decode(request.target_ids) == gold
    assert math.isfinite(score)
    assert score < 0
    assert [score] == pytest.approx(naive(policy.model, request), abs=1e-5)


@pytest.mark.parametrize("pads", [0, 1, 3, 8])
@pytest.mark.parametrize("side", ["left", "right"])
def test_case_65_pads_on_either_side_change_no_hidden_state(pads: int, side: str) -> None:
    """The positions of a left-padded row begin at its first token: 0, 0, 0, 1, 2 behind the mask 0, 0, 1, 1, 1.

    Nothing of ours pads on the left, which is there for samplers whose rows all end in the last column: ours reads
    each row's last state where the row ends. So sampler, scorer and trainer pad on the right, where a row begins at
    position 0 anyway and causal attention needs no mask. The model must bear both.
    """
    row, left = [5, 6, 7], side == "left"
    mask = [0] * pads + [1] * 3 if left else [1] * 3 + [0] * pads
    ids = [0] * pads + row if left else row + [0] * pads
    positions = [0] * pads + [0, 1, 2] if left else [0, 1, 2] + [0] * pads
    padded = hidden_states(MODEL, *(torch.tensor([values]) for values in (ids, mask, positions)))
    plain = hidden_states(MODEL, torch.tensor([row]), None, torch.arange(3)[None])
    assert torch.allclose(padded[:, pads if left else 0 :][:, :3], plain, atol=1e-5)


def test_case_65_pads_change_no_log_prob() -> None:
    short, long = ScoreRequest((5, 6), (7, 8, 9)), ScoreRequest(tuple(range(2, 60)), (7,))
    alone = score_targets(MODEL, [short])
    padded = score_targets(MODEL, [short, long], share=False)
    assert padded[0] == pytest.approx(alone[0], abs=1e-4)


def test_case_63_logits_are_fp32_even_of_bfloat16_weights() -> None:
    model = tiny_llama(2, width=4, heads=1, layers=1).bfloat16()
    with torch.no_grad():
        # 9.9375 and 0.03125 are bfloat16 numbers, their sum 9.96875 is not: it would round to 10.
        model.get_output_embeddings().weight.copy_(torch.tensor([[10.0, 0, 0, 0], [9.9375, 0.03125, 0, 0]]))
    logits = projection(model)(torch.ones(1, 4, dtype=torch.bfloat16))
    assert logits.tolist() == [[10.0, 9.96875]]


def test_an_empty_target_has_no_scores_and_an_empty_prompt_is_an_error() -> None:
    assert score_targets(MODEL, [ScoreRequest((5,), ())]) == [()]
    with pytest.raises(ValueError, match="request 0 has an empty prompt"):
        score_targets(MODEL, [ScoreRequest((), (5,))])


def test_no_requests_give_no_scores() -> None:
    assert score_targets(MODEL, []) == []
