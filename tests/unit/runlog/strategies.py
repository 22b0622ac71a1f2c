"""Any trajectory that the records can hold, and a plain one."""

from __future__ import annotations

from hypothesis import strategies as st

from mempo.core import (
    ErrorRecord,
    FinishReason,
    Objective,
    Passage,
    StopReason,
    Task,
    ToolCall,
    Trajectory,
    Turn,
    Usage,
)
from mempo.runlog import RunInfo

# Halves of surrogate pairs, NUL, line ends and other planes are all in here.
texts = st.text(st.characters(codec=None), max_size=12)
optional_texts = st.none() | texts
ids = st.lists(st.integers(0, 300_000), max_size=6).map(tuple)
masks = st.lists(st.integers(0, 1), max_size=6).map(tuple)
# NaN differs from itself, so a round trip with it is tested by its representation (`comparable`).
floats = st.floats(allow_nan=True, allow_infinity=True)
seconds = st.floats(0, 1e6)
jsons = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | floats | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
passages = st.builds(Passage, texts, texts, texts, st.none() | floats)
tasks = st.builds(
    Task,
    texts,
    st.lists(
        st.builds(Objective, texts, st.lists(texts, max_size=2).map(tuple), st.lists(texts, max_size=2).map(tuple)),
        max_size=2,
    ).map(tuple),
    texts,
    st.dictionaries(texts, jsons, max_size=3),
)
turns = st.builds(
    Turn,
    index=st.integers(0, 20),
    text=texts,
    prompt_text=texts,
    prompt_ids=ids,
    response_ids=ids,
    logprobs=st.lists(floats, max_size=6).map(tuple),
    response_mask=masks,
    mem_mask=masks,
    memory=optional_texts,
    thought=optional_texts,
    call=st.none() | st.builds(ToolCall, texts, st.dictionaries(texts, jsons, max_size=2)),
    answer=optional_texts,
    problems=st.lists(texts, max_size=2).map(tuple),
    observation=optional_texts,
    observation_truncated=st.booleans(),
    passages=st.lists(passages, max_size=2).map(tuple),
    finish=st.sampled_from(FinishReason),
    usage=st.builds(Usage, st.integers(0, 10**9), st.integers(0, 10**9), st.booleans()),
    generate_seconds=seconds,
    tool_seconds=seconds,
    memory_probability=st.none() | floats,
    baseline=st.none() | floats,
    memory_reward=st.none() | floats,
)
trajectories = st.builds(
    Trajectory,
    task=tasks,
    rollout=st.integers(0, 64),
    turns=st.lists(turns, max_size=3).map(tuple),
    stop=st.sampled_from(StopReason),
    seed=st.integers(0, 2**63 - 1),
    errors=st.lists(
        st.builds(
            ErrorRecord,
            st.sampled_from(["policy", "tool", "environment", "scoring"]),
            texts,
            texts,
            st.none() | st.integers(0, 20),
        ),
        max_size=2,
    ).map(tuple),
    reward=st.none() | floats,
    scores=st.dictionaries(texts, floats, max_size=3),
    seconds=seconds,
    policy_step=st.none() | st.integers(0, 10**6),
)


def a_trajectory(turn_count: int = 2, tokens: int = 8, rollout: int = 0) -> Trajectory:
    """A trajectory with so many turns of so many prompt and response tokens."""
    task = Task("t", (Objective("Who?", ("Ada",), ("Ada Lovelace",)),), "world", {"hops": 2})
    made = tuple(
        Turn(
            index,
            "<mem>m</mem>",
            prompt_ids=tuple(range(tokens)),
            response_ids=tuple(range(tokens)),
            logprobs=tuple(-0.123456789 - place / 7 for place in range(tokens)),
            response_mask=(1,) * tokens,
            mem_mask=(1, *(0,) * (tokens - 1)),
            memory="m",
            usage=Usage(tokens, tokens),
        )
        for index in range(turn_count)
    )
    return Trajectory(task, rollout, made, StopReason.ANSWERED, seed=7, reward=1.0, scores={"em": 1.0})


def run_info(**changes: object) -> RunInfo:
    """Where a run comes from, without looking."""
    values: dict[str, object] = {
        "started": "2026-01-02T03:04:05.678Z",
        "command": ("mempo", "train", "x.toml"),
        "config": {"seed": 0, "advantage.alpha": 0.3},
        "given": {"advantage.alpha": "command line"},
        "seeds": {"run": 0},
        "prompts_hash": "abc",
        "packages": {"mempo": "0.1.0"},
        "python": "3.11.0",
        "platform": "Linux",
        "git_revision": None,
    }
    return RunInfo(**(values | changes))  # type: ignore[arg-type]
