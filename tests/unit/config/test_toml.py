"""A config is written as TOML and read back equal; the docs list every key."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mempo.config import (
    AdvantageConfig,
    Config,
    LogConfig,
    ModelConfig,
    RolloutConfig,
    TaskConfig,
    key_docs,
    key_types,
    load_config,
    render_reference,
    render_toml,
)

# TOML holds every character but surrogates; no setting may hold NUL, and a leading "." makes one of a model's name.
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
floats = st.floats(0, 1e30, exclude_min=True)
configs = st.builds(
    Config,
    run_dir=texts.map(lambda text: f"r{text}"),
    seed=st.integers(0, 2**63 - 1),
    model=st.builds(ModelConfig, path=texts.map(lambda text: f"m{text}"), device=texts),
    tasks=st.builds(TaskConfig, files=st.lists(texts.map(lambda text: f"/{text.strip('/.')}x")).map(tuple)),
    rollout=st.builds(RolloutConfig, max_model_tokens=st.none() | st.integers(5120, 2**40), temperature=floats),
    advantage=st.builds(
        AdvantageConfig,
        alpha=floats,
        std_floor=floats,
        gates=st.permutations(["mixed_groups", "right_trajectories", "skip_first_turn"]).map(tuple),
    ),
    log=st.builds(LogConfig, progress=st.booleans(), wandb=st.sampled_from(["off", "offline", "online"])),
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=configs, comments=st.booleans())
def test_any_config_survives_the_way_through_toml(tmp_path: Path, config: Config, comments: bool) -> None:
    # Paths are put into their shortest form on reading; the strategy makes some that are not.
    text = render_toml(config, comments=comments)
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8", newline="")
    once = load_config(path)
    assert _without_files(once) == _without_files(config)
    path.write_text(render_toml(once), encoding="utf-8", newline="")
    assert load_config(path) == once


def _without_files(config: Config) -> Mapping[str, Any]:
    table = tomllib.loads(render_toml(config))
    del table["tasks"]["files"]
    return table


def test_comments_tell_where_values_came_from_and_show_keys_without_a_value() -> None:
    lines = render_toml(load_config("tiny", ["--seed", "7"]), comments=True).splitlines()
    assert "seed = 7  # command line" in lines
    assert "group_size = 4  # preset tiny" in lines
    assert "top_p = 1.0  # default" in lines
    assert "# corpus_hash is not set" in lines


def test_every_setting_has_a_docstring() -> None:
    assert {key for key, doc in key_docs(Config).items() if not doc} == set()
    assert list(key_docs(Config)) == list(key_types(Config))


def test_the_page_on_settings_holds_the_table_of_all_keys(repository: Path) -> None:
    page = (repository / "docs/config.md").read_text(encoding="utf-8")
    # After a change: replace the tables with the output of `mempo config keys`.
    assert render_reference(Config) in page
