"""Answers of OpenAI-compatible servers, for `StubServer`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.services.stubs import Reply, Request, json_reply

Answer = Callable[[Request], Reply]

CHAT, COMPLETIONS, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"
PROBE_PROMPT = [0, 0]
NOT_A_COMPLETION_MODEL = json_reply({"error": {"message": "This is a chat model"}}, 404)


def chat_reply(text: str | None, finish: str = "stop", **message: Any) -> Reply:
    usage = {"prompt_tokens": 20, "completion_tokens": 5}
    choice = {"message": {"role": "assistant", "content": text, **message}, "finish_reason": finish}
    return json_reply({"choices": [choice], "usage": usage})


def ids_reply(ids: Sequence[int], logprobs: Sequence[float | None], finish: str = "stop", **choice: Any) -> Reply:
    """vLLM's answer to a prompt of token ids; the prompt has no usage, so that it must be counted."""
    filled = {"text": "", "token_ids": list(ids), "logprobs": {"token_logprobs": list(logprobs)}, **choice}
    return json_reply({"choices": [{**filled, "finish_reason": finish}]})


def scores_reply(rows: Sequence[dict[str, Any] | None] | None) -> Reply:
    return json_reply({"choices": [{"text": "x", "finish_reason": "length", "prompt_logprobs": rows}]})


def refuse(request: Request) -> Reply:
    raise AssertionError(f"nobody should ask for {request.path}")


def hosted(chat: Answer) -> Answer:
    """A service with chat completions alone."""

    def answer(request: Request) -> Reply:
        if request.path == MODELS:
            return json_reply({"object": "list", "data": [{"id": "m", "object": "model"}]})
        return chat(request) if request.path == CHAT else NOT_A_COMPLETION_MODEL

    return answer


def vllm(completion: Answer = refuse, chat: Answer = refuse, *, context_tokens: int = 4096) -> Answer:
    """A server with vLLM's extensions."""

    def answer(request: Request) -> Reply:
        if request.path == MODELS:
            return json_reply({"data": [{"id": "m", "owned_by": "vllm", "max_model_len": context_tokens}]})
        if request.path == CHAT:
            return chat(request)
        if request.json["prompt"] == PROBE_PROMPT:
            return ids_reply([7], [-0.5], "length", prompt_logprobs=[None, {"0": {"logprob": -1.0}}])
        return completion(request)

    return answer
