"""The policy behind a server: what it sends, what it keeps, and how it fails."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from tests.fixtures.tokenizers import family
from tests.services.openai_stub import (
    CHAT,
    COMPLETIONS,
    MODELS,
    PROBE_PROMPT,
    chat_reply,
    hosted,
    ids_reply,
    scores_reply,
    vllm,
)
from tests.services.stubs import Reply, Request, StubServer, in_turn, json_reply

from mempo.core import (
    ConfigError,
    ContextOverflowError,
    FinishReason,
    GenerationRequest,
    Message,
    Policy,
    PolicyError,
    ScoreRequest,
    ScoringUnavailableError,
    Usage,
)
from mempo.policy.openai import Abilities, OpenAIPolicy
from mempo.text.masks import span_mask
from mempo.text.render import Renderer
from mempo.text.tags import STOP_STRINGS, parse

RENDERER = Renderer(family("qwen25"))
MESSAGES = (Message("system", "S"), Message("user", "Capital of France?"))
KEY = "sk-a-very-secret-key"
TOO_LONG = "This model's maximum context length is 4096 tokens. However, your prompt contains 4097 input tokens"
OVERFLOW = json_reply({"error": {"message": TOO_LONG}}, 400)

Make = Callable[..., OpenAIPolicy]


@pytest.fixture
async def policy(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    """Makes policies with short limits and closes them."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    made: list[OpenAIPolicy] = []

    def make(url: str, **options: Any) -> OpenAIPolicy:
        limits = {"timeout_seconds": 10.0, "deadline_seconds": 20.0, "retries": 2, "backoff_seconds": 0.01}
        made.append(OpenAIPolicy(url, "m", **{**limits, **options}))
        return made[-1]

    yield make
    for one in made:
        await one.aclose()


def ask(**options: Any) -> GenerationRequest:
    return GenerationRequest(**{"messages": MESSAGES, "max_tokens": 50, "seed": 3, "stop": STOP_STRINGS, **options})


def control(text: str) -> int:
    [token_id] = RENDERER.tokenizer.encode(text, add_special_tokens=False)
    return token_id


def test_it_is_a_policy() -> None:
    policy: Policy = OpenAIPolicy("http://127.0.0.1:1", "m")
    assert isinstance(policy, Policy)
    assert policy.name == "m"


# --- chat ---------------------------------------------------------------------------------------


async def test_a_hosted_service_is_sent_standard_fields_only(policy: Make) -> None:
    with StubServer(hosted(lambda _: chat_reply("<answer>Paris</answer>"))) as server:
        generation = await policy(server.url).generate(ask(temperature=0.5, top_p=0.9))
    assert server.bodies(CHAT) == [
        {
            "model": "m",
            "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Capital of France?"}],
            "max_tokens": 50,
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": 3,
            "stop": ["</tool_call>", "</answer>"],
        }
    ]
    assert generation.text == "<answer>Paris</answer>"
    assert generation.finish is FinishReason.STOP
    assert generation.usage == Usage(20, 5)
    assert (generation.prompt_ids, generation.token_ids, generation.logprobs, generation.offsets) == ((), (), (), ())
    assert "Capital of France?" in generation.prompt_text


async def test_vllm_is_told_all_that_it_would_take_from_the_models_generation_config(policy: Make) -> None:
    with StubServer(vllm(chat=lambda _: chat_reply("x"))) as server:
        await policy(server.url).generate(ask(top_k=7))
        await policy(server.url).generate(ask())
    first, second = server.bodies(CHAT)
    told = {"min_p": 0.0, "repetition_penalty": 1.0, "include_stop_str_in_output": True}
    assert first.items() >= {**told, "top_k": 7}.items()
    assert second.items() >= {**told, "top_k": -1}.items()


async def test_the_layout_is_the_renderers_or_the_given_one(policy: Make) -> None:
    turns = (*MESSAGES, Message("assistant", "A"), Message("user", "I"))
    single = [{"role": "system", "content": "S"}, {"role": "user", "content": "Capital of France?\n\nA\n\nI"}]
    with StubServer(hosted(lambda _: chat_reply("x"))) as server:
        await policy(server.url, layout="single_message").generate(ask(messages=turns))
        renderer = Renderer(family("qwen25"), "single_message")
        await policy(server.url, renderer=renderer).generate(ask(messages=turns))
        await policy(server.url).generate(ask(messages=turns))
    bodies = server.bodies(CHAT)
    assert [body["messages"] for body in bodies[:2]] == [single, single]
    assert [message["role"] for message in bodies[2]["messages"]] == ["system", "user", "assistant", "user"]


async def test_case_11_a_stop_string_that_the_server_cut_is_restored_for_parsing(policy: Make) -> None:
    cut = '<mem>m</mem><think>t</think><tool_call>{"name": "search", "arguments": {"query": "capital of France"}}'
    with StubServer(hosted(lambda _: chat_reply(cut))) as server:
        generation = await policy(server.url).generate(ask())
    parsed = parse(generation.text)
    assert parsed.call is not None
    assert parsed.call.arguments == {"query": "capital of France"}
    assert parsed.well_formed
    assert generation.token_ids == ()  # nothing that could be trained on


async def test_case_55_a_text_cut_by_its_limit_gets_no_closing_tag(policy: Make) -> None:
    with StubServer(hosted(lambda _: chat_reply("<mem>m</mem><answer>Par", "length"))) as server:
        generation = await policy(server.url).generate(ask())
    assert generation.finish is FinishReason.LENGTH
    assert parse(generation.text).answer is None


async def test_case_14_end_tokens_of_earlier_turns_are_not_sent_twice(policy: Make) -> None:
    turns = (*MESSAGES, Message("assistant", "A<|im_end|>"), Message("user", "I"))
    with StubServer(hosted(lambda _: chat_reply("x"))) as server:
        await policy(server.url, renderer=RENDERER).generate(ask(messages=turns))
    [body] = server.bodies(CHAT)
    assert body["messages"][2]["content"] == "A"


async def test_extra_fields_are_added_and_none_leaves_one_out(policy: Make) -> None:
    extra = {"max_tokens": None, "max_completion_tokens": 9, "reasoning_effort": "low"}
    with StubServer(hosted(lambda _: chat_reply("x"))) as server:
        await policy(server.url, extra=extra).generate(ask())
    [body] = server.bodies(CHAT)
    assert "max_tokens" not in body
    assert (body["max_completion_tokens"], body["reasoning_effort"]) == (9, "low")


async def test_top_k_where_the_server_has_none_is_an_error_not_ignored(policy: Make) -> None:
    with StubServer(hosted(lambda _: chat_reply("x"))) as server, pytest.raises(ConfigError, match="has no top_k"):
        await policy(server.url).generate(ask(top_k=5))


# --- token ids ----------------------------------------------------------------------------------


async def test_case_05_sampled_ids_are_kept_though_their_text_encodes_otherwise(policy: Make) -> None:
    ids = tuple(i for character in "<answer>Paris</answer>" for i in RENDERER.encode(character))
    assert RENDERER.drifted(ids)
    logprobs = tuple(-0.01 * i for i in range(len(ids)))
    with StubServer(vllm(lambda _: ids_reply(ids, logprobs, stop_reason="</answer>"))) as server:
        generation = await policy(server.url, mode="tokens", renderer=RENDERER).generate(ask())
    assert (generation.token_ids, generation.logprobs) == (ids, logprobs)
    assert generation.text == "<answer>Paris</answer>"
    assert len(generation.offsets) == len(ids)
    assert generation.prompt_ids == RENDERER.prompt_ids(MESSAGES)
    body = server.bodies(COMPLETIONS)[-1]
    assert body["prompt"] == list(generation.prompt_ids)
    told = {"return_token_ids": True, "logprobs": 0, "skip_special_tokens": False, "include_stop_str_in_output": True}
    assert body.items() >= told.items()


async def test_case_12_what_was_sampled_behind_the_tag_stays_in_the_ids(policy: Make) -> None:
    ids = RENDERER.encode("<answer>Paris</answer") + RENDERER.encode(">.\n")
    with StubServer(vllm(lambda _: ids_reply(ids, [-1.0] * len(ids)))) as server:
        generation = await policy(server.url, mode="tokens", renderer=RENDERER).generate(ask())
    parsed = parse(generation.text)
    assert parsed.action_end is not None
    assert generation.text[: parsed.action_end] == "<answer>Paris</answer>"
    assert generation.token_ids == ids
    assert len(generation.logprobs) == len(ids)


async def test_case_13_and_14_an_end_token_is_sampled_but_is_no_text(policy: Make) -> None:
    memory = RENDERER.encode("<mem>m</mem>")
    ids = (*memory, control("<|im_end|>"))
    with StubServer(vllm(lambda _: ids_reply(ids, [-1.0] * len(ids)))) as server:
        generation = await policy(server.url, mode="tokens", renderer=RENDERER).generate(ask())
    assert generation.text == "<mem>m</mem>"
    assert generation.token_ids == ids
    span = parse(generation.text).memory_span
    assert span_mask(generation.offsets, span)[-1] == 0
    turn = Message("assistant", generation.text, generation.token_ids)
    prompt = RENDERER.prompt_ids((*MESSAGES, turn, Message("user", "I")))
    # One each for the system, the question, the turn and its information.
    assert prompt.count(control("<|im_end|>")) == 4


async def test_an_end_token_that_only_the_server_knows_is_no_text(policy: Make) -> None:
    end = control("<|endoftext|>")
    ids = (*RENDERER.encode("ab"), end)
    with StubServer(vllm(lambda _: ids_reply(ids, [-1.0] * len(ids), stop_reason=end))) as server:
        generation = await policy(server.url, mode="tokens", renderer=RENDERER).generate(ask())
    assert generation.text == "ab"


@pytest.mark.parametrize(("temperature", "kept"), [(1.0, True), (0.0, True), (0.7, False)])
async def test_log_probs_of_another_temperature_are_absent_not_wrong(
    policy: Make, temperature: float, kept: bool
) -> None:
    with StubServer(vllm(lambda _: ids_reply([5], [-1.0]))) as server:
        generation = await policy(server.url, mode="tokens", renderer=RENDERER).generate(ask(temperature=temperature))
    assert generation.token_ids == (5,)
    assert generation.logprobs == ((-1.0,) if kept else ())


# --- abilities ----------------------------------------------------------------------------------


async def test_the_server_is_asked_once_for_all_calls(policy: Make) -> None:
    with StubServer(vllm(chat=lambda _: chat_reply("x"))) as server:
        one = policy(server.url)
        before = one.context_tokens
        await asyncio.gather(*(one.generate(ask()) for _ in range(8)))
    assert (before, one.context_tokens) == (None, 4096)
    assert await one.abilities() == Abilities(True, True, 4096)
    assert [request.path for request in server.requests].count(MODELS) == 1
    assert [body["prompt"] for body in server.bodies(COMPLETIONS)] == [PROBE_PROMPT]


async def test_given_abilities_are_believed(policy: Make) -> None:
    with StubServer(hosted(lambda _: chat_reply("x"))) as server:
        await policy(server.url, abilities=Abilities(False, False)).generate(ask())
    assert [request.path for request in server.requests] == [CHAT]


@pytest.mark.parametrize("status", [404, 500])
async def test_a_server_without_a_list_of_models_is_asked_what_it_can_do_all_the_same(
    policy: Make, status: int
) -> None:
    served = vllm()
    with StubServer(lambda request: Reply(status) if request.path == MODELS else served(request)) as server:
        assert await policy(server.url).abilities() == Abilities(True, True, None)


async def test_mode_tokens_on_a_server_without_them_is_an_error_that_says_why(policy: Make) -> None:
    with StubServer(hosted(lambda _: chat_reply("x"))) as server:
        one = policy(server.url, mode="tokens", renderer=RENDERER)
        with pytest.raises(ConfigError, match=r"use mode 'chat' \(.*This is a chat model"):
            await one.generate(ask())


async def test_a_server_that_ignores_what_it_does_not_know_is_seen_by_its_answer(policy: Make) -> None:
    plain = json_reply({"choices": [{"text": "x", "finish_reason": "length"}]})
    with StubServer(lambda request: json_reply({}) if request.path == MODELS else plain) as server:
        found = await policy(server.url).abilities()
    assert (found.token_ids, found.prompt_logprobs) == (False, False)
    assert "no token_ids" in found.reason


@pytest.mark.parametrize("status", [401, 403, 503])
async def test_a_server_that_refuses_or_is_ill_is_an_error_not_a_poor_server(policy: Make, status: int) -> None:
    served = hosted(lambda _: chat_reply("x"))
    with StubServer(lambda request: served(request) if request.path == MODELS else Reply(status)) as server:
        one = policy(server.url, retries=0)
        with pytest.raises(PolicyError, match=f"cannot find out.*{status}"):
            await one.generate(ask())
        # And it is asked again the next time.
        with pytest.raises(PolicyError, match="cannot find out"):
            await one.generate(ask())
    assert len(server.bodies(COMPLETIONS)) == 2


# --- lengths ------------------------------------------------------------------------------------


async def test_case_56_max_tokens_is_cut_to_what_the_context_leaves(policy: Make) -> None:
    prompt = len(RENDERER.prompt_ids(MESSAGES))
    served = vllm(lambda _: ids_reply([5], [-1.0]), lambda _: chat_reply("x"), context_tokens=prompt + 20)
    with StubServer(served) as server:
        await policy(server.url, mode="tokens", renderer=RENDERER).generate(ask())
        await policy(server.url, renderer=RENDERER).generate(ask())
        await policy(server.url, renderer=RENDERER, context_tokens=prompt + 4).generate(ask())
    assert server.bodies(COMPLETIONS)[1]["max_tokens"] == 20
    assert [body["max_tokens"] for body in server.bodies(CHAT)] == [20, 4]


async def test_case_56_without_a_tokenizer_the_estimate_cuts_but_never_refuses(policy: Make) -> None:
    # "S" and "Capital of France?" have 1 + 18 characters: an estimate of 1 + 5 tokens.
    with StubServer(hosted(lambda _: chat_reply("x"))) as server:
        for context in (50, 6, 3):
            await policy(server.url, context_tokens=context).generate(ask())
    assert [body["max_tokens"] for body in server.bodies(CHAT)] == [44, 1, 1]


async def test_case_55_a_prompt_that_leaves_too_little_is_never_sent(policy: Make) -> None:
    prompt = len(RENDERER.prompt_ids(MESSAGES))
    with StubServer(vllm(context_tokens=prompt + 15)) as server:
        one = policy(server.url, mode="tokens", renderer=RENDERER, min_response_tokens=16)
        with pytest.raises(ContextOverflowError, match="15 are left"):
            await one.generate(ask())
        with pytest.raises(ContextOverflowError, match="more than the limit 5"):
            await one.generate(ask(max_prompt_tokens=5))


async def test_without_a_tokenizer_the_servers_count_decides_on_the_prompt_limit(policy: Make) -> None:
    with StubServer(hosted(lambda _: chat_reply("x"))) as server:  # its usage says 20
        await policy(server.url).generate(ask(max_prompt_tokens=20))
        with pytest.raises(ContextOverflowError, match="20 tokens, more than the limit 19"):
            await policy(server.url).generate(ask(max_prompt_tokens=19))


async def test_case_60_a_missing_usage_is_counted_and_flagged(policy: Make) -> None:
    silent = json_reply({"choices": [{"message": {"content": "<answer>Paris</answer>"}, "finish_reason": "stop"}]})
    prompt, text = len(RENDERER.prompt_ids(MESSAGES)), len(RENDERER.encode("<answer>Paris</answer>"))
    with StubServer(vllm(lambda _: ids_reply([5, 6], [-1.0, -1.0]), lambda _: silent)) as server:
        exact = await policy(server.url, mode="tokens", renderer=RENDERER).generate(ask())
        counted = await policy(server.url, renderer=RENDERER).generate(ask())
        guessed = await policy(server.url).generate(ask())
    assert exact.usage == Usage(prompt, 2, estimated=True)
    assert counted.usage == Usage(prompt, text, estimated=True)
    assert guessed.usage == Usage(6, 6, estimated=True)  # 1 + 18 and 22 characters


def test_lengths_are_exact_with_a_renderer_and_estimates_without() -> None:
    exact, guess = (OpenAIPolicy("http://127.0.0.1:1", "m", renderer=renderer) for renderer in (RENDERER, None))
    text = "the capital of France"
    assert (exact.counts_are_estimates, guess.counts_are_estimates) == (False, True)
    assert exact.count_tokens(text) == len(RENDERER.encode(text))
    assert guess.count_tokens(text) == 6  # 21 characters
    assert guess.cut_tokens(text, 2) == "the capi"
    assert exact.count_tokens(exact.cut_tokens(text, 2)) <= 2


# --- scores -------------------------------------------------------------------------------------


async def test_case_24_and_27_each_gold_token_is_asked_for_and_read_by_its_id(policy: Make) -> None:
    request = RENDERER.score_request(MESSAGES, "<mem>m</mem><answer>", "Paris; 1969")
    assert request.target_ids
    assert RENDERER.decode(request.target_ids) == "Paris; 1969"

    def complete(sent: Request) -> Reply:
        rows: list[dict[str, Any] | None] = [None]
        rows += [{"999999": {"logprob": -0.1}, str(i): {"logprob": -i / 1000}} for i in sent.json["prompt"][1:]]
        return scores_reply(rows)

    with StubServer(vllm(complete)) as server:
        [first, second] = await policy(server.url).score([request, ScoreRequest((4, 5), (6,))])
    assert first == tuple(-i / 1000 for i in request.target_ids)
    assert second == (-0.006,)
    body = next(body for body in server.bodies(COMPLETIONS) if body["prompt"] == [4, 5, 6])
    assert (body["max_tokens"], body["prompt_logprobs"]) == (1, 0)


async def test_case_26_values_missing_from_a_cached_answer_are_an_error(policy: Make) -> None:
    request = ScoreRequest(tuple(range(100, 130)), (30, 31, 32, 33))
    row = [{str(i): {"logprob": -1.0}} for i in (*request.prompt_ids, *request.target_ids)]
    whole: list[dict[str, Any] | None] = [None, *row[1:]]
    cached: list[dict[str, Any] | None] = [None] * 32 + list(row[32:])
    with StubServer(vllm(in_turn(scores_reply(whole), scores_reply(cached)))) as server:
        one = policy(server.url)
        assert await one.score([request]) == [(-1.0,) * 4]
        with pytest.raises(PolicyError, match="positions 30, 31 of 34"):
            await one.score([request])


async def test_a_server_without_prompt_log_probs_cannot_score(policy: Make) -> None:
    with StubServer(hosted(lambda _: chat_reply("x"))) as server:
        with pytest.raises(ScoringUnavailableError, match="gives no log-probabilities"):
            await policy(server.url).score([ScoreRequest((1,), (2,))])
        assert server.bodies(CHAT) == []


async def test_a_score_that_does_not_fit_is_never_sent(policy: Make) -> None:
    with StubServer(vllm(context_tokens=4)) as server, pytest.raises(ContextOverflowError, match="have 4 tokens"):
        await policy(server.url).score([ScoreRequest((1, 2, 3), (4,))])


# --- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [Reply(429), Reply(500), Reply(503), Reply(200, b""), json_reply({"choices": []})])
async def test_passing_faults_are_retried(policy: Make, fault: Reply) -> None:
    with StubServer(hosted(in_turn(fault, chat_reply("<answer>A</answer>")))) as server:
        one = policy(server.url, abilities=Abilities(False, False))
        assert (await one.generate(ask())).text == "<answer>A</answer>"
    assert one.counters == {"requests": 2, "retries": 1, "failures": 0}


async def test_a_prompt_that_the_server_finds_too_long_is_an_overflow_and_not_retried(policy: Make) -> None:
    served = StubServer(hosted(lambda _: OVERFLOW))
    with served as server, pytest.raises(ContextOverflowError, match="maximum context length is 4096"):
        await policy(server.url).generate(ask())
    assert len(server.bodies(CHAT)) == 1


@pytest.mark.parametrize("status", [400, 401, 404, 422])
async def test_other_refusals_are_errors_and_not_retried(policy: Make, status: int) -> None:
    served = StubServer(hosted(lambda _: json_reply({"error": "no such thing"}, status)))
    with served as server, pytest.raises(PolicyError, match="no such thing") as caught:
        await policy(server.url).generate(ask())
    assert not isinstance(caught.value, ContextOverflowError)
    assert len(server.bodies(CHAT)) == 1


async def test_a_server_that_is_not_there_is_an_error_within_the_deadline(policy: Make) -> None:
    with StubServer(hosted(lambda _: chat_reply("x"))) as server:
        url = server.url
    with pytest.raises(PolicyError, match=r"3 attempts.*ConnectError"):
        await policy(url).generate(ask())


@pytest.mark.parametrize(
    "reply",
    [Reply(stall_seconds=3600), Reply(200, b" " * 10_000, trickle_seconds=0.05)],
    ids=["silent", "endless"],
)
async def test_an_answer_that_never_ends_meets_the_deadline(policy: Make, reply: Reply) -> None:
    with StubServer(hosted(lambda _: reply)) as server:
        one = policy(server.url, abilities=Abilities(False, False), timeout_seconds=0.3, deadline_seconds=0.7)
        started = time.monotonic()
        with pytest.raises(PolicyError, match="no answer within"):
            await one.generate(ask())
        assert time.monotonic() - started < 5


async def test_no_more_calls_run_at_once_than_allowed_and_waiting_costs_no_deadline(policy: Make) -> None:
    lock, running, most = threading.Lock(), 0, 0

    def slow(_: Request) -> Reply:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.2)
        with lock:
            running -= 1
        return chat_reply("x")

    with StubServer(hosted(slow)) as server:
        # 30 calls, three at once, 0.2 s each: the last ones wait 1.8 s for their place, and with the wait
        # counted, a deadline of 1.9 s would end them.
        one = policy(server.url, concurrency=3, deadline_seconds=1.9, retries=0, abilities=Abilities(False, False))
        generations = await asyncio.gather(*(one.generate(ask()) for _ in range(30)))
    assert most == 3
    assert all(generation.seconds < 1.9 for generation in generations)


async def test_one_failing_score_stops_the_others(policy: Make) -> None:
    def complete(request: Request) -> Reply:
        return Reply(400, b"no") if request.json["prompt"][0] == 9 else scores_reply([None])

    with StubServer(vllm(complete)) as server, pytest.raises(PolicyError):
        await policy(server.url, concurrency=1).score([ScoreRequest((9,), (2,)), *[ScoreRequest((1,), (2,))] * 20])
    assert len(server.bodies(COMPLETIONS)) <= 3  # the question, the failing one, and one that was on its way


def test_a_policy_can_be_used_from_one_event_loop_after_the_other() -> None:
    async def once(one: OpenAIPolicy) -> str:
        try:
            return (await one.generate(ask())).text
        finally:
            await one.aclose()

    with StubServer(hosted(lambda _: chat_reply("x"))) as server:
        one = OpenAIPolicy(server.url, "m")
        assert [asyncio.run(once(one)) for _ in range(2)] == ["x", "x"]


# --- keys, addresses, options -------------------------------------------------------------------


async def test_the_key_is_sent_and_shown_nowhere(
    policy: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("MY_KEY", f"{KEY}\n")
    # Some services repeat the key that they refuse, here across the place where long answers are cut.
    echo = "x" * 280 + f"Incorrect API key: {KEY}"
    with StubServer(hosted(lambda request: json_reply({"error": echo}, 401))) as server:
        one = policy(server.url, api_key_env="MY_KEY")
        with pytest.raises(PolicyError, match="401") as caught:
            await one.generate(ask())
    assert server.requests[-1].headers["authorization"] == f"Bearer {KEY}"
    shown = [str(caught.value), str(caught.value.__cause__), repr(one), caplog.text]
    assert not any(KEY[:8] in text for text in shown)
    assert "status 401" in shown[0]


async def test_without_a_key_none_is_sent(policy: Make) -> None:
    with StubServer(hosted(lambda _: chat_reply("x"))) as server:
        await policy(server.url).generate(ask())
    assert all("authorization" not in request.headers for request in server.requests)


@pytest.mark.parametrize("key", ["sk-a b", "sk-a\nsk-b", "sk-é"])
def test_a_broken_key_is_refused_without_showing_it(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(ConfigError, match="OPENAI_API_KEY holds characters") as caught:
        OpenAIPolicy("http://127.0.0.1:1", "m")
    assert "sk-" not in str(caught.value)


async def test_case_54_a_server_on_this_machine_is_reached_without_the_proxy(
    policy: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "all_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with StubServer(hosted(lambda _: chat_reply("x"))) as server:
        assert (await policy(f"{server.url}/v1/").generate(ask())).text == "x"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mode": "text"}, "known: chat, tokens"),
        ({"mode": "tokens"}, "needs a renderer"),
        ({"renderer": RENDERER, "layout": "single_message"}, "the renderer's is 'conversation'"),
        ({"concurrency": 0}, "at least 1"),
        ({"timeout_seconds": 0}, "must be positive"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        OpenAIPolicy("http://127.0.0.1:1", "m", **options)


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a"):
        OpenAIPolicy("127.0.0.1:8000", "m")
