from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from transformers import LlamaForCausalLM

from mempo.core import FinishReason, ScoreRequest
from mempo.policy.sampling import Endings, Row, sample_rows
from mempo.policy.scoring import score_targets
from mempo.policy.tiny import tiny_llama

END = 1
VOCABULARY = 64


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(VOCABULARY, width=40, layers=2, heads=4)


def spelled(ids: Sequence[int]) -> str:
    """One letter a token: 2 is `C`, 3 is `D`, ..."""
    return "".join(chr(65 + id) for id in ids)


def endings(stop_ids: frozenset[int] = frozenset(range(VOCABULARY))) -> Endings:
    return Endings(frozenset({END}), spelled, lambda stop: stop_ids)


def random_rows(count: int, **settings: float) -> list[Row]:
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(3, 30, (count,), generator=generator).tolist()
    return [
        Row(torch.randint(2, VOCABULARY, (n,), generator=generator).tolist(), 20, seed=i, **settings)  # type: ignore[arg-type]
        for i, n in enumerate(lengths)
    ]


def test_a_rows_tokens_do_not_depend_on_its_neighbours_or_the_batch_size(model: LlamaForCausalLM) -> None:
    rows = random_rows(16)
    together = sample_rows(model, rows, endings())
    alone = [sample_rows(model, [row], endings())[0] for row in rows]
    backwards = sample_rows(model, rows[::-1], endings())[::-1]
    assert [row.token_ids for row in together] == [row.token_ids for row in alone]
    assert [row.token_ids for row in together] == [row.token_ids for row in backwards]


def test_a_shared_beginning_runs_once_and_changes_no_token(model: LlamaForCausalLM) -> None:
    system = [2 + i % 60 for i in range(48)]
    rows = [Row([*system, *row.prompt_ids], 20, seed=row.seed) for row in random_rows(12)]
    rows.append(Row(system, 20, seed=99))  # nothing but the beginning: one token of it stays its own
    seen: list[int] = []
    handle = model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    together = sample_rows(model, rows, endings())
    handle.remove()
    alone = [sample_rows(model, [row], endings())[0] for row in rows]
    assert [row.token_ids for row in together] == [row.token_ids for row in alone]
    for a, b in zip(together, alone, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
    # 47 shared tokens once, then each row's own, padded to the longest (29 + 1).
    assert seen[:2] == [47, len(rows) * max(len(row.prompt_ids) - 47 for row in rows)]


@pytest.mark.parametrize("shared", [0, 40])
def test_case_65_positions_count_a_rows_own_tokens_whatever_pads_stand_between(
    model: LlamaForCausalLM, shared: int
) -> None:
    """Prompts are padded on the right, so that what is sampled stands behind the pads, and still is what follows."""
    head = list(range(2, 2 + shared))
    rows = [Row([*head, 50, 51, 52], 2, seed=1), Row([*head, 60, 51, 52, 53, 54], 2, seed=2)]
    seen: list[tuple[list[list[int]], list[list[int]]]] = []
    handle = model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(
            (kwargs["position_ids"].tolist(), (kwargs["attention_mask"].tolist() if shared == 0 else []))
        ),
        with_kwargs=True,
    )
    sample_rows(model, rows, endings())
    handle.remove()
    prompts, first = seen[-2:]
    # A pad repeats its row's last position; the mask hides it.
    own = [[0, 1, 2, 2, 2], [0, 1, 2, 3, 4]]
    assert prompts[0] == [[shared + position for position in row] for row in own]
    assert first[0] == [[shared + 3], [shared + 5]]
    if shared == 0:
        assert prompts[1] == [[1, 1, 1, 0, 0], [1] * 5]
        assert first[1] == [[1, 1, 1, 0, 0, 1], [1] * 6]


def test_sampled_log_probs_are_those_of_the_scorer(model: LlamaForCausalLM) -> None:
    rows = random_rows(8)
    sampled = sample_rows(model, rows, endings())
    requests = [
        ScoreRequest(tuple(row.prompt_ids), tuple(out.token_ids)) for row, out in zip(rows, sampled, strict=True)
    ]
    for out, scored in zip(sampled, score_targets(model, requests), strict=True):
        assert out.logprobs == pytest.approx(scored, abs=1e-5)


def test_temperature_0_takes_the_most_probable_token(model: LlamaForCausalLM) -> None:
    [row] = random_rows(1, temperature=0.0)
    [sampled] = sample_rows(model, [row], endings())
    ids = list(row.prompt_ids)
    for token in sampled.token_ids:
        assert int(model(torch.tensor([ids])).logits[0, -1].argmax()) == token
        ids.append(token)


def test_sampling_follows_the_models_probabilities(model: LlamaForCausalLM) -> None:
    prompt = (5, 6, 7)
    rows = [Row(prompt, 1, seed=seed) for seed in range(4000)]
    drawn = torch.tensor([out.token_ids[0] for out in sample_rows(model, rows, endings())])
    expected = torch.softmax(model(torch.tensor([prompt])).logits[0, -1], -1)
    found = torch.bincount(drawn, minlength=VOCABULARY) / len(rows)
    # Standard error of a frequency is at most sqrt(p / n); five of them leave one false alarm in 10^4 runs.
    assert ((found - expected).abs() <= 5 * (expected / len(rows)).sqrt() + 1e-9).all()


def test_top_k_and_top_p_keep_the_most_probable_tokens_only(model: LlamaForCausalLM) -> None:
    prompt = (5, 6, 7)
    probabilities, order = torch.softmax(model(torch.tensor([prompt])).logits[0, -1], -1).sort(descending=True)
    nucleus = int((probabilities.cumsum(0) - probabilities < 0.3).sum())
    by_k = sample_rows(model, [Row(prompt, 1, seed=seed, top_k=3) for seed in range(200)], endings())
    by_p = sample_rows(model, [Row(prompt, 1, seed=seed, top_p=0.3) for seed in range(200)], endings())
    assert {out.token_ids[0] for out in by_k} == set(order[:3].tolist())
    assert {out.token_ids[0] for out in by_p} <= set(order[:nucleus].tolist())


def test_a_row_ends_at_an_end_token_a_stop_string_or_its_limit(model: LlamaForCausalLM) -> None:
    for out, row in zip(sample_rows(model, random_rows(32), endings()), random_rows(32), strict=True):
        if out.finish is FinishReason.STOP:
            assert out.token_ids[-1] == END
        assert END not in out.token_ids[:-1]
        assert len(out.token_ids) <= row.max_tokens
        assert (out.finish is FinishReason.LENGTH) == (END not in out.token_ids)


def test_a_stop_string_over_several_tokens_ends_the_row_after_its_last(model: LlamaForCausalLM) -> None:
    [row] = random_rows(1)
    [free] = sample_rows(model, [row], endings(frozenset()))
    wanted = spelled(free.token_ids[3:5])
    [stopped] = sample_rows(model, [Row(row.prompt_ids, 20, seed=row.seed, stop=(wanted,))], endings())
    assert stopped.token_ids == free.token_ids[:5]
    assert stopped.finish is FinishReason.STOP


def test_case_15_each_of_several_end_tokens_finishes_a_row(model: LlamaForCausalLM) -> None:
    # Nearly every token ends a row here, so all rows finish at once, none at its limit.
    ends = Endings(frozenset(range(VOCABULARY)), spelled, lambda stop: frozenset())
    for out in sample_rows(model, random_rows(4), ends):
        assert (len(out.token_ids), out.finish) == (1, FinishReason.STOP)


def test_a_cancelled_row_has_no_finish(model: LlamaForCausalLM) -> None:
    [out] = sample_rows(model, random_rows(1), endings(), cancelled=lambda: True)
    assert (out.token_ids, out.finish) == ([], None)


def test_logits_that_are_not_finite_are_an_error(model: LlamaForCausalLM) -> None:
    broken = tiny_llama(VOCABULARY, width=40, layers=2, heads=4)
    with torch.no_grad():
        broken.get_output_embeddings().weight[3] = float("nan")
    with pytest.raises(FloatingPointError, match="not finite"):
        sample_rows(broken, random_rows(2), endings())
