"""Concrete parts from command-line options: what `mempo run`, `mempo rollout` and others have in common."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mempo.config import ContextConfig, RetrieverConfig, RolloutConfig
from mempo.core import ConfigError, MissingExtraError, Policy, RetrievalError, Retriever, Tool
from mempo.env import SearchTool
from mempo.retrieval.client import HttpRetriever
from mempo.rollout import check_room


@dataclass(frozen=True)
class PolicyArgs:
    """Who answers: a model in this process, one behind a server, or a script."""

    model: str = "bundled:smollm2"
    """A folder, a hub name, `bundled:smollm2` or `bundled:forgetful`; with --base-url what the server calls it."""
    adapter: Path | None = None
    """Folder of a peft adapter of --model."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights in memory."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, or `auto`: a GPU where there is one."""
    base_url: str | None = None
    """Address of an OpenAI-compatible server, e.g. http://127.0.0.1:8080/v1."""
    server_mode: Literal["chat", "tokens"] = "chat"
    """How to talk to it: `tokens` sends and gets exact token ids (vLLM) and needs --tokenizer."""
    tokenizer: str | None = None
    """Folder or hub name of the server's tokenizer; without it lengths are estimates."""
    api_key_env: str = "OPENAI_API_KEY"
    """Name of the environment variable that holds the server's key."""
    script: Path | None = None
    """A JSON list of texts that are said turn by turn instead: to try tools and retrievers without a model."""


@dataclass(frozen=True)
class ToolArgs:
    """What the agent can use."""

    retriever: str | None = None
    """Address of a retriever server; http://127.0.0.1:8000 where nothing else is named."""
    index: Path | None = None
    """Search an index of `mempo index build` in this process instead."""
    corpus: Path | None = None
    """Search a small corpus file in this process instead, indexed in memory."""
    top_k: int = 3
    """Passages shown for a search."""
    mcp: tuple[str, ...] = ()
    """Command lines of Model Context Protocol servers whose tools the agent gets; search is then only
    there where a retriever is named."""


def make_policy(args: PolicyArgs, rollout: RolloutConfig, context: ContextConfig) -> Policy:
    """The policy that the options name, loaded. Raises ConfigError where it cannot be had."""
    if args.script is not None:
        from mempo.policy.scripted import ScriptedPolicy

        return ScriptedPolicy(read_script(args.script), context_tokens=rollout.max_model_tokens)
    if args.base_url is not None:
        return _server_policy(args, args.base_url, rollout, context)
    try:
        from mempo.policy.local import LocalPolicy
        from mempo.policy.models import resolve_device
    except ImportError as error:
        raise MissingExtraError(error.name or "torch", extra="train") from error
    policy = LocalPolicy.load(
        args.model,
        dtype=args.dtype,
        device=resolve_device(args.device),
        adapter=None if args.adapter is None else str(args.adapter),
        layout=context.layout,
        context_tokens=rollout.max_model_tokens,
        min_response_tokens=rollout.min_response_tokens,
    )
    check_room(rollout, policy.context_tokens, policy.name, option="--{}")
    return policy


def read_script(path: Path) -> list[str]:
    """The texts of a scripted policy. Raises ConfigError for a file that is no JSON list of texts."""
    try:
        script = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} (--script) cannot be read as JSON: {error}") from error
    if not isinstance(script, list) or not all(isinstance(text, str) for text in script):
        raise ConfigError(f"{path} (--script) must be a JSON list of texts, one for each turn")
    return script


async def check_policy(policy: Policy, rollout: RolloutConfig) -> None:
    """Ask a server who it is before the first call. Raises PolicyError or ConfigError, to fail early."""
    from mempo.policy.openai import OpenAIPolicy

    if isinstance(policy, OpenAIPolicy):
        await policy.abilities()
        check_room(rollout, policy.context_tokens, policy.name, option="--{}")


@asynccontextmanager
async def open_tools(args: ToolArgs) -> AsyncIterator[list[Tool]]:
    """The tools that the options name, reachable until the block ends.

    Raises ConfigError where options contradict each other or something does not answer.
    """
    tools: list[Tool] = []
    async with AsyncExitStack() as stack:
        if (retriever := await _open_retriever(args, stack)) is not None:
            tools.append(SearchTool(retriever, args.top_k))
        for command in args.mcp:
            from mempo.env.mcp import mcp_tools

            tools += await stack.enter_async_context(mcp_tools(command))
        yield tools


def make_http_retriever(config: RetrieverConfig) -> HttpRetriever:
    """The client of the server that the settings name."""
    return HttpRetriever(
        config.url,
        expect_name=config.name,
        expect_corpus_hash=config.corpus_hash,
        timeout_seconds=config.deadline_seconds,
        deadline_seconds=config.deadline_seconds,
        retries=config.retries,
    )


async def _open_retriever(args: ToolArgs, stack: AsyncExitStack) -> Retriever | None:
    named = [name for name in ("retriever", "index", "corpus") if getattr(args, name) is not None]
    if len(named) > 1:
        raise ConfigError(f"give one of {', '.join(f'--{name}' for name in named)}, not several")
    try:
        if args.index is not None:
            from mempo.retrieval.index import open_index

            index = open_index(args.index)
            stack.callback(index.close)
            return index
        if args.corpus is not None:
            from mempo.retrieval.corpus import read_passages
            from mempo.retrieval.memory import MemoryRetriever

            return MemoryRetriever(read_passages([args.corpus]))
    except ImportError as error:
        raise MissingExtraError(error.name or "bm25s", extra="serve") from error
    if args.retriever is None and args.mcp:
        return None
    config = RetrieverConfig() if args.retriever is None else RetrieverConfig(url=args.retriever)
    retriever = make_http_retriever(config)
    stack.push_async_callback(retriever.aclose)
    try:
        await retriever.search(["test"], 1)
    except RetrievalError as error:
        raise ConfigError(
            f"no retriever answers: {error}. Start one with `mempo serve-retriever`, or name another with"
            " --retriever URL, --index DIR or --corpus FILE"
        ) from error
    return retriever


def _server_policy(args: PolicyArgs, base_url: str, rollout: RolloutConfig, context: ContextConfig) -> Policy:
    from mempo.policy.openai import OpenAIPolicy

    renderer = None
    if args.tokenizer is not None:
        try:
            from mempo.policy.models import load_tokenizer
        except ImportError as error:
            raise MissingExtraError(error.name or "transformers", extra="train") from error
        from mempo.text.render import Renderer

        renderer = Renderer(load_tokenizer(args.tokenizer), context.layout)
    return OpenAIPolicy(
        base_url,
        args.model,
        mode=args.server_mode,
        renderer=renderer,
        layout=context.layout,
        api_key_env=args.api_key_env,
        context_tokens=rollout.max_model_tokens,
        min_response_tokens=rollout.min_response_tokens,
        concurrency=rollout.concurrency,
        deadline_seconds=rollout.deadline_seconds,
    )
