"""Models of a few hundred thousand parameters, for tests, teaching and the demo.

The tokenizer holds whole words and, for texts from outside, single characters; it has no chat
template, so prompts are plain text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaAttention

from mempo.policy.local import LocalPolicy
from mempo.text.render import Renderer

PAD, END, UNKNOWN = "<pad>", "<end>", "<unknown>"


def word_tokenizer(words: Sequence[str], pattern: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are `words`, found as `pattern` splits a text, by default the longest first.

    The pieces joined are the text again; characters that no word covers are the unknown token.

    >>> tokenizer = word_tokenizer(["home of ", "Bax", "gal", "?"])
    >>> tokenizer.decode(tokenizer.encode("home of Baxgal?"))
    'home of Baxgal?'
    """
    if pattern is None:
        longest_first = sorted(words, key=lambda word: (-len(word), word))
        pattern = "|".join([*(re.escape(word).replace(r"\ ", " ") for word in longest_first), r"[\s\S]"])
    vocabulary = {word: index for index, word in enumerate([PAD, END, UNKNOWN, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )


def tiny_llama(
    vocabulary: int,
    *,
    width: int = 80,
    layers: int = 3,
    heads: int = 5,
    context_tokens: int = 2048,
    seed: int = 0,
    mimetic: bool = False,
) -> LlamaForCausalLM:
    """A Llama with random weights that depend on nothing but the arguments; embeddings are tied.

    `mimetic` starts attention as trained models end up (arXiv 2305.09828): equal tokens attend to each
    other, and what is attended to is passed on as it is. Copying is then learned in about half the steps.
    """
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 8 * 8,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=context_tokens,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
        if mimetic:
            for layer in model.model.layers:
                _make_mimetic(layer.self_attn)
        return model


@torch.no_grad()
def _make_mimetic(attention: LlamaAttention) -> None:
    """Query and key equal and orthogonal, output the transpose of value; the scales are from trials."""
    width = attention.q_proj.in_features
    rotation, value = (torch.linalg.qr(torch.randn(width, width))[0] for _ in range(2))
    attention.q_proj.weight.copy_(0.7 * rotation)
    attention.k_proj.weight.copy_(0.7 * rotation)
    attention.v_proj.weight.copy_(0.5 * value)
    attention.o_proj.weight.copy_(0.5 * value.T)


def tiny_policy(words: Sequence[str], *, seed: int = 0, **model: Any) -> LocalPolicy:
    """A policy with random weights over a small vocabulary.

    >>> tiny_policy(["yes", "no"]).count_tokens("yesno")
    2
    """
    tokenizer = word_tokenizer(words)
    return LocalPolicy(tiny_llama(len(tokenizer), seed=seed, **model), Renderer(tokenizer), name="tiny")
