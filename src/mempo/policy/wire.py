"""What OpenAI-compatible servers are asked and what they answer: plain functions over JSON.

Fields beyond OpenAI's are vLLM's: prompts as token ids, `return_token_ids`, `prompt_logprobs`,
`include_stop_str_in_output` and `top_k`, `min_p`, `repetition_penalty`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mempo.core import (
    FinishReason,
    GenerationRequest,
    Json,
    PolicyError,
    ScoreRequest,
    ScoringUnavailableError,
    Usage,
)

_OVERFLOW = re.compile(
    r"context_length_exceeded|context (length|size|window)|maximum model length|prompt is too long", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice of a server, as it came."""

    text: str
    finish: FinishReason
    usage: Usage | None
    """None where the server does not say."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    end_id: int | None = None
    """The token that ended the generation, where the server names one."""


# --- requests -----------------------------------------------------------------------------------


def sampling_fields(request: GenerationRequest, max_tokens: int, *, vllm_fields: bool) -> dict[str, Json]:
    """How to sample. All is said that vLLM would otherwise take from the model's generation config."""
    fields: dict[str, Json] = {
        "max_tokens": max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "seed": request.seed,
    }
    if request.stop:
        fields["stop"] = list(request.stop)
    if vllm_fields:
        fields |= {
            "top_k": request.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "include_stop_str_in_output": True,
        }
    return fields


def token_fields(prompt_ids: Sequence[int]) -> dict[str, Json]:
    """A prompt as ids, and the wish for the sampled ids with their log-probabilities."""
    return {
        "prompt": list(prompt_ids),
        "return_token_ids": True,
        "logprobs": 0,  # of the sampled token alone
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }


def score_fields(request: ScoreRequest) -> dict[str, Json]:
    """A prompt whose own tokens' log-probabilities are wanted; one token must be generated for it."""
    return {
        "prompt": [*request.prompt_ids, *request.target_ids],
        "prompt_logprobs": 0,  # of the true tokens alone
        "max_tokens": 1,
        "temperature": 0.0,
    }


PROBE_FIELDS: Mapping[str, Json] = {**token_fields((0, 0)), **score_fields(ScoreRequest((0,), (0,)))}
"""Asks for everything at once, with ids that every vocabulary has."""


# --- answers ------------------------------------------------------------------------------------


def first_choice(body: Json) -> dict[str, Any]:
    """The only choice of an answer. Raises ValueError where there is none."""
    choices = body.get("choices") if isinstance(body, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise ValueError("it holds no choices")
    return choices[0]


def parse_chat(body: Json) -> Answer:
    """Raises ValueError for an answer of another shape, PolicyError where the text is not whole."""
    choice = first_choice(body)
    message = choice.get("message")
    if not isinstance(message, dict):
        raise ValueError("its choice holds no message")
    if message.get("tool_calls") or choice.get("finish_reason") == "tool_calls":
        raise PolicyError(
            "the server took a tool call out of the text; mempo reads calls itself: "
            "start the server without a tool-call parser"
        )
    text = message.get("content")
    if not isinstance(text, str):
        hint = ": start it without a reasoning parser" if _has_reasoning(message) else ""
        raise PolicyError(f"the server answered without text (content is {text!r}){hint}")
    return Answer(text, _finish(choice), parse_usage(body))


def parse_completion(body: Json) -> Answer:
    """The answer to a prompt of token ids. Raises ValueError where it has another shape or lacks the ids."""
    choice = first_choice(body)
    token_ids = choice.get("token_ids")
    if not isinstance(token_ids, list) or not all(isinstance(token_id, int) for token_id in token_ids):
        raise ValueError("its choice holds no token_ids")
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
    if len(logprobs) != len(token_ids):
        raise PolicyError(f"the server returned {len(token_ids)} token ids but {len(logprobs)} log-probabilities")
    wrong = [position for position, value in enumerate(logprobs) if not _is_finite(value)]
    if wrong:
        raise PolicyError(f"the log-probabilities of the sampled tokens at {_listed(wrong)} are missing or not finite")
    stop = choice.get("stop_reason")
    return Answer(
        text=str(choice.get("text", "")),
        finish=_finish(choice),
        usage=parse_usage(body),
        token_ids=tuple(token_ids),
        logprobs=tuple(map(float, logprobs)),
        end_id=stop if isinstance(stop, int) else None,
    )


def parse_usage(body: Mapping[str, Json]) -> Usage | None:
    """Prompt and completion tokens, cached ones included; None where the server does not say.

    OpenAI's `prompt_tokens` hold the cached tokens. Anthropic's `input_tokens` do not: there they
    are counted apart.

    >>> parse_usage({"usage": {"prompt_tokens": 4000, "completion_tokens": 50,
    ...                        "prompt_tokens_details": {"cached_tokens": 3800}}})
    Usage(prompt_tokens=4000, completion_tokens=50, estimated=False)
    >>> parse_usage({"usage": {"input_tokens": 200, "cache_read_input_tokens": 3800, "output_tokens": 50}})
    Usage(prompt_tokens=4000, completion_tokens=50, estimated=False)
    """
    usage = body.get("usage")
    if not isinstance(usage, dict):
        return None
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if prompt is None:
        apart = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        prompt, completion = sum(usage.get(name) or 0 for name in apart), usage.get("output_tokens")
    # No call has an empty prompt: a zero is a server that does not count.
    if not isinstance(prompt, int) or not isinstance(completion, int) or prompt < 1:
        return None
    return Usage(prompt, completion)


def restore_stop(text: str, stop: Sequence[str]) -> str:
    """The text with the closing tag that the server cut off, where it cut one off.

    The cut tag is the one whose opening tag comes last and is not closed. A text without such a
    tag ended by itself.

    >>> restore_stop("<mem>m</mem><search>capital of France", ["</search>", "</answer>"])
    '<mem>m</mem><search>capital of France</search>'
    >>> restore_stop("I do not know.", ["</search>", "</answer>"])
    'I do not know.'
    """
    opened = [(text.rfind(tag.replace("</", "<", 1)), tag) for tag in stop if tag.startswith("</")]
    start, tag = max(opened, default=(-1, ""))
    return text if start < 0 or tag in text[start:] else text + tag


def target_logprobs(body: Json, request: ScoreRequest) -> tuple[float, ...]:
    """The log-probability of each target token, looked up by its id.

    `prompt_logprobs` has an entry for each token of prompt and target: None, or a mapping from ids
    as strings to their values, in which the true token need not come first.
    Raises PolicyError, naming the positions, where a value is missing or not finite: a missing one
    read as 0 would be a probability of 1.
    """
    rows = first_choice(body).get("prompt_logprobs")
    if rows is None:
        raise ScoringUnavailableError("the server returned no prompt_logprobs")
    start, length = len(request.prompt_ids), len(request.prompt_ids) + len(request.target_ids)
    if not isinstance(rows, list) or len(rows) != length:
        got = len(rows) if isinstance(rows, list) else repr(rows)
        raise PolicyError(f"the server returned prompt_logprobs of {got} instead of {length} positions")
    values = [_logprob(row, token_id) for row, token_id in zip(rows[start:], request.target_ids, strict=True)]
    missing = [start + offset for offset, value in enumerate(values) if value is None]
    if missing:
        raise PolicyError(
            f"the server returned no log-probability for the target tokens at {_listed(missing)} of {length} "
            "(from 0); does it take them from a cache? Turn its prefix caching off"
        )
    wrong = [start + offset for offset, value in enumerate(values) if not _is_finite(value)]
    if wrong:
        raise PolicyError(f"the log-probabilities of the target tokens at {_listed(wrong)} of {length} are not finite")
    return tuple(float(value) for value in values if value is not None)


def context_of(body: Json, model: str) -> int | None:
    """The model's context as the server's list of models tells it (vLLM: `max_model_len`)."""
    models = body.get("data") if isinstance(body, dict) else None
    for card in models if isinstance(models, list) else []:
        if isinstance(card, dict) and card.get("id") == model and isinstance(card.get("max_model_len"), int):
            return int(card["max_model_len"])
    return None


def is_context_overflow(status: int | None, body: str) -> bool:
    """Whether a refusal says that the prompt, with the tokens asked for, does not fit.

    >>> is_context_overflow(400, "This model's maximum context length is 4096 tokens. However, you requested ...")
    True
    >>> is_context_overflow(400, "unknown field 'seed'")
    False
    """
    return status in (400, 413, 422) and _OVERFLOW.search(body) is not None


def _finish(choice: Mapping[str, Any]) -> FinishReason:
    reason = choice.get("finish_reason")
    if reason not in ("stop", "length"):
        raise PolicyError(f"the server ended the generation with finish_reason {reason!r}, not 'stop' or 'length'")
    return FinishReason(reason)


def _has_reasoning(message: Mapping[str, Any]) -> bool:
    return bool(message.get("reasoning_content") or message.get("reasoning"))


def _logprob(row: Json, token_id: int) -> Json:
    entry = row.get(str(token_id)) if isinstance(row, dict) else None
    return entry.get("logprob") if isinstance(entry, dict) else entry


def _is_finite(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _listed(positions: Sequence[int]) -> str:
    shown = ", ".join(map(str, positions[:10]))
    return f"positions {shown}{', ...' if len(positions) > 10 else ''}"
