"""How tiny models start."""

from __future__ import annotations

import torch

from mempo.policy.tiny import tiny_llama


def test_a_mimetic_start_has_equal_orthogonal_queries_and_keys_and_an_output_that_undoes_the_value() -> None:
    model = tiny_llama(9, width=20, layers=2, heads=5, seed=3, mimetic=True)

    for layer in model.model.layers:
        attention = layer.self_attn
        query, value = attention.q_proj.weight, attention.v_proj.weight
        torch.testing.assert_close(attention.k_proj.weight, query)
        # Orthogonal times 0.7: the rows' products are 0.7^2 on the diagonal and 0 elsewhere; likewise 0.5^2.
        torch.testing.assert_close(query @ query.T, 0.49 * torch.eye(20))
        torch.testing.assert_close(attention.o_proj.weight @ value, 0.25 * torch.eye(20))


def test_a_start_depends_on_its_seed_and_on_nothing_else() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = tiny_llama(9, width=20, layers=1, seed=1, mimetic=True)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    second, other = (tiny_llama(9, width=20, layers=1, seed=seed, mimetic=True) for seed in (1, 2))

    for mine, same, different in zip(first.parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, same)
        assert mine.ndim == 1 or not torch.equal(mine, different)
    layer = first.model.layers[0].self_attn
    plain = tiny_llama(9, width=20, layers=1, seed=1).model.layers[0].self_attn
    assert not torch.equal(layer.q_proj.weight, plain.q_proj.weight)
