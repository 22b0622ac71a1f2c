"""A rollout engine from its parts and settings: the one place where they are fitted together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from mempo.config import ContextConfig, RolloutConfig
from mempo.core import ConfigError, Policy, Task, Tool
from mempo.env.environment import ToolEnvironment
from mempo.rollout.engine import Rollout, RolloutHooks
from mempo.text.context import ContextPolicy
from mempo.text.prompts import notices, system_prompt
from mempo.text.tags import wrap_information


def make_rollout(
    policy: Policy,
    tools: Sequence[Tool],
    rollout: RolloutConfig | None = None,
    context: ContextConfig | None = None,
    *,
    hooks: RolloutHooks | None = None,
) -> Rollout:
    """The engine that training, evaluation and inference use."""
    rollout, context = rollout or RolloutConfig(), context or ContextConfig()
    environment = ToolEnvironment(
        tools,
        cut=policy.cut_tokens,
        count=policy.count_tokens,
        max_observation_tokens=rollout.max_observation_tokens,
        wrapper=wrap_information,
    )
    return Rollout(
        policy,
        environment,
        make_context(context),
        rollout,
        system_prompt=make_system_prompt(tools, context),
        hooks=hooks,
    )


def check_room(rollout: RolloutConfig, context_tokens: int | None, model: str, *, option: str = "--rollout.{}") -> None:
    """Raise a ConfigError where a model's context, if it is known, cannot hold the longest prompt and response.

    It says which lengths would fit; `option` is how the command line that was used names a setting.
    """
    prompt, response = rollout.max_prompt_tokens, rollout.max_response_tokens
    if context_tokens is None or prompt + response <= context_tokens:
        return
    # In the same proportions, and the observation below the prompt that has to hold it.
    less_response = max(rollout.min_response_tokens, response * context_tokens // (prompt + response))
    less_prompt = context_tokens - less_response
    observation = min(rollout.max_observation_tokens, less_prompt * rollout.max_observation_tokens // prompt)
    fitting = {"prompt": less_prompt, "response": less_response, "observation": min(observation, less_prompt - 1)}
    names = {part: option.format(f"max-{part}-tokens") for part in fitting}
    raise ConfigError(
        f"{names['prompt']} {prompt} + {names['response']} {response} = {prompt + response}, but the context of "
        f"{model} is {context_tokens} tokens. These lengths fit: "
        + " ".join(f"{names[part]} {tokens}" for part, tokens in fitting.items())
    )


def make_context(context: ContextConfig) -> ContextPolicy:
    """What a turn sees, as the settings name it."""
    return ContextPolicy(
        context.policy,
        turns=context.last_turns,
        history_tokens=context.history_tokens,
        thoughts=context.thoughts,
        notices=notices(context.prompts),
    )


def make_system_prompt(tools: Sequence[Tool], context: ContextConfig) -> Callable[[Task], str]:
    """The system prompt of a task: the same for all tasks of as many objectives."""
    prompt = functools.cache(lambda objectives: system_prompt(tools, objectives, context.prompts))
    return lambda task: prompt(len(task.objectives))
