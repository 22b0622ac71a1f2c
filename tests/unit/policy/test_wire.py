"""What servers answer, in all the shapes that were seen."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mempo.core import FinishReason, PolicyError, ScoreRequest, ScoringUnavailableError, Usage
from mempo.policy import wire

REQUEST = ScoreRequest(prompt_ids=(5, 6), target_ids=(7, 8))


def scores(*rows: Any) -> dict[str, Any]:
    return {"choices": [{"prompt_logprobs": list(rows)}]}


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": 4000, "completion_tokens": 50, "prompt_tokens_details": {"cached_tokens": 3800}},
        {
            "input_tokens": 200,
            "cache_read_input_tokens": 3800,
            "cache_creation_input_tokens": 0,
            "output_tokens": 50,
        },
        {
            "input_tokens": 100,
            "cache_read_input_tokens": None,
            "cache_creation_input_tokens": 3900,
            "output_tokens": 50,
        },
    ],
)
def test_case_60_cached_tokens_count_in_both_styles(usage: dict[str, Any]) -> None:
    assert wire.parse_usage({"usage": usage}) == Usage(4000, 50)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"usage": None},
        {"usage": {}},
        {"usage": {"prompt_tokens": 0, "completion_tokens": 0}},
        {"usage": {"prompt_tokens": 9}},
        {"usage": {"prompt_tokens": "9", "completion_tokens": 1}},
    ],
)
def test_case_60_a_usage_that_does_not_say_is_none_never_zero(body: dict[str, Any]) -> None:
    assert wire.parse_usage(body) is None


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        # Case 11's own text, and the same from a server that left the stop string in.
        ("<mem>m</mem><search>capital of France", "<mem>m</mem><search>capital of France</search>"),
        ("<mem>m</mem><search>capital</search>", "<mem>m</mem><search>capital</search>"),
        # A thought that mentions a tag is not what was cut: the last opened one is.
        ("<think>not <search> yet</think><answer>Rome", "<think>not <search> yet</think><answer>Rome</answer>"),
        # Nothing open: the model ended by itself.
        ("I do not know.", "I do not know."),
        ("", ""),
    ],
)
def test_case_11_a_cut_stop_string_is_restored(text: str, whole: str) -> None:
    assert wire.restore_stop(text, ("</search>", "</answer>")) == whole


def test_stop_strings_that_close_nothing_are_not_restored() -> None:
    assert wire.restore_stop("a END b", ("END", "\n")) == "a END b"


def test_case_27_the_gold_token_is_looked_up_by_its_id_not_taken_first() -> None:
    # "Lyon" (id 9) has p = 0.9 and comes first; the gold "Paris" (id 7) has 0.05.
    lyon, paris = math.log(0.9), math.log(0.05)
    row = {"9": {"logprob": lyon, "rank": 1}, "7": {"logprob": paris, "rank": 4}}
    values = wire.target_logprobs(scores(None, {"6": {"logprob": 0.0}}, row, {"8": {"logprob": -0.5}}), REQUEST)
    assert values == (paris, -0.5)
    assert math.exp(values[0]) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ((None, None, None, {"8": {"logprob": -1.0}}), "positions 2 of 4"),
        ((None, None, None, None), "positions 2, 3 of 4"),
        ((None, None, {"9": {"logprob": -1.0}}, {"8": {"logprob": -1.0}}), "positions 2 of 4"),
        ((None, None, {"7": {"logprob": None}}, {"8": {"logprob": -1.0}}), "positions 2 of 4"),
        ((None, None, {"7": {"logprob": -1.0}}, {"8": {"logprob": float("nan")}}), "positions 3 of 4 are not finite"),
        ((None, None, {"7": {"logprob": -math.inf}}, {"8": {"logprob": 0.0}}), "positions 2 of 4 are not finite"),
        ((None, None, {"7": {"logprob": -1.0}}), "3 instead of 4 positions"),
    ],
)
def test_case_26_missing_values_are_errors_that_name_the_positions(rows: tuple[Any, ...], named: str) -> None:
    with pytest.raises(PolicyError, match=named):
        wire.target_logprobs(scores(*rows), REQUEST)


def test_case_26_missing_values_before_the_target_do_not_matter() -> None:
    rows = (None, None, {"7": {"logprob": -1.0}}, {"8": {"logprob": -2.0}})
    assert wire.target_logprobs(scores(*rows), REQUEST) == (-1.0, -2.0)


def test_an_answer_without_prompt_logprobs_is_scoring_that_is_not_available() -> None:
    with pytest.raises(ScoringUnavailableError, match="no prompt_logprobs"):
        wire.target_logprobs({"choices": [{"text": "x"}]}, REQUEST)


@pytest.mark.parametrize("body", [None, [], {}, {"choices": []}, {"choices": ["x"]}, {"choices": [{"text": "x"}]}])
def test_answers_of_another_shape_are_value_errors_which_are_retried(body: Any) -> None:
    for parse in (wire.parse_chat, wire.parse_completion):
        with pytest.raises(ValueError, match="holds no"):
            parse(body)


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"message": {"content": "x", "tool_calls": [{}]}, "finish_reason": "stop"}, "without a tool-call parser"),
        ({"message": {"content": "x"}, "finish_reason": "tool_calls"}, "without a tool-call parser"),
        ({"message": {"content": None, "reasoning": "r"}, "finish_reason": "stop"}, "without a reasoning parser"),
        ({"message": {"content": None}, "finish_reason": "stop"}, "without text"),
        ({"message": {"content": "x"}, "finish_reason": "content_filter"}, "'content_filter'"),
        ({"message": {"content": "x"}}, "finish_reason None"),
    ],
)
def test_a_text_that_is_not_whole_is_an_error_that_says_why(choice: dict[str, Any], reason: str) -> None:
    with pytest.raises(PolicyError, match=reason):
        wire.parse_chat({"choices": [choice]})


@pytest.mark.parametrize(
    ("logprobs", "reason"),
    [
        ([-0.1, -0.2], "3 token ids but 2"),  # case 13: an end token was added to the ids
        (None, "3 token ids but 0"),
        ([-0.1, None, -0.2], "positions 1"),
        ([-0.1, -0.2, -math.inf], "positions 2"),
    ],
)
def test_case_13_ids_without_their_log_probs_are_errors(logprobs: list[float | None] | None, reason: str) -> None:
    choice = {"token_ids": [1, 2, 3], "logprobs": logprobs and {"token_logprobs": logprobs}, "finish_reason": "stop"}
    with pytest.raises(PolicyError, match=reason):
        wire.parse_completion({"choices": [choice]})


def test_the_token_that_ended_a_generation_is_told_from_a_stop_string() -> None:
    choice = {"token_ids": [1], "logprobs": {"token_logprobs": [-1]}, "finish_reason": "stop"}
    assert wire.parse_completion({"choices": [{**choice, "stop_reason": 1}]}).end_id == 1
    assert wire.parse_completion({"choices": [{**choice, "stop_reason": "</answer>"}]}).end_id is None
    assert wire.parse_completion({"choices": [{**choice, "finish_reason": "length"}]}).finish is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("status", "body", "overflow"),
    [
        # vLLM, OpenAI, llama.cpp, SGLang, Anthropic.
        (400, "This model's maximum context length is 4096 tokens. However, your prompt contains", True),
        (400, '{"error": {"code": "context_length_exceeded"}}', True),
        (400, "the request exceeds the available context size", True),
        (400, "The input (5000 tokens) is longer than the model's context length (4096 tokens)", True),
        (400, "prompt is too long: 250000 tokens > 200000 maximum", True),
        (413, "Input exceeds the context window", True),
        (400, "stop: string is too long", False),
        (500, "maximum context length", False),
        (None, "maximum context length", False),
    ],
)
def test_refusals_that_mean_the_context_are_told_from_others(status: int | None, body: str, overflow: bool) -> None:
    assert wire.is_context_overflow(status, body) is overflow


def test_the_context_is_read_from_the_card_of_the_model_alone() -> None:
    cards = {"data": [{"id": "other", "max_model_len": 1}, {"id": "m", "max_model_len": 2}, {"id": "plain"}]}
    assert [wire.context_of(cards, name) for name in ("m", "plain", "absent")] == [2, None, None]
    assert [wire.context_of(body, "m") for body in (None, {}, {"data": None}, {"data": ["m"]})] == [None] * 4
