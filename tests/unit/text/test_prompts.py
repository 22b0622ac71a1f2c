"""The words that policies are told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mempo.core import ConfigError, Json, Observation
from mempo.text import prompts
from mempo.text.prompts import PROMPTS, Notices, notices, prompts_hash, system_prompt, tool_schemas
from mempo.text.tags import parse


@dataclass
class Search:
    name: str = "search"
    description: str = "Search Wikipedia."
    parameters: Mapping[str, Json] = field(
        default_factory=lambda: {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
    )

    async def call(self, arguments: Mapping[str, Json]) -> Observation:
        raise NotImplementedError


SCHEMA = (
    '{"type": "function", "function": {"name": "search", "description": "Search Wikipedia.", "parameters": '
    '{"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}}}'
)


@pytest.mark.parametrize("name", ["memory", "react", "compact"])
@pytest.mark.parametrize("objectives", [1, 2, 16])
def test_a_system_prompt_lists_the_tools_and_leaves_no_placeholder(name: str, objectives: int) -> None:
    text = system_prompt([Search()], objectives, name)
    assert text.count(SCHEMA) == 1
    assert "$" not in text
    assert "\n\n\n" not in text
    assert len(text.split()) < 200  # few words: small models read them too


def test_the_number_of_questions_and_the_form_of_their_answers_are_told() -> None:
    assert "There are 3 questions" in system_prompt([], 3)
    assert "<answer>answer 1; answer 2; answer 3</answer>" in system_prompt([], 3)
    assert "questions, separated" not in system_prompt([], 1)


def test_tools_that_the_chat_template_lists_are_not_listed_twice() -> None:
    assert "Tools:" in system_prompt([Search()], 1)
    assert "Tools:" not in system_prompt([], 1)
    assert tool_schemas([Search()])[0]["function"]["name"] == "search"


def test_the_example_of_a_turn_is_itself_well_formed() -> None:
    example = system_prompt([], 1).split("Example of one turn:\n")[1]
    assert parse(example, {"search": dict(Search().parameters)}).problems == ()


def test_only_the_baseline_knows_no_memory() -> None:
    assert "mem" not in system_prompt([Search()], 2, "react").lower()
    assert notices("react").no_memory == ""
    assert notices("memory").no_memory != ""


def test_no_instructions_means_no_word_at_all() -> None:
    assert system_prompt([Search()], 2, "none") == ""
    assert notices("none") == Notices("", "")


def test_a_file_replaces_the_prompts(tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text(
        "== system ==\nFind $answers with\n$tools costs $$5\n== tools ==\n[$schemas]\n"
        "== many questions ==\n$objectives answers\n== last turn ==\nEnd.\n"
    )
    assert system_prompt([Search()], 2, file) == f"Find 2 answers with\n[{SCHEMA}] costs $5"
    assert system_prompt([], 1, str(file)) == "Find  with\n costs $5"
    assert notices(file) == Notices(last_turn="End.", no_memory="")


def test_the_hash_names_the_words() -> None:
    hashes = {prompts_hash(name) for name in PROMPTS}
    assert len(hashes) == len(PROMPTS)
    assert prompts_hash("memory") == prompts_hash()
    assert all(len(digits) == 12 for digits in hashes)


def test_the_hash_changes_with_a_word(tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text("== system ==\nAnswer.")
    before = prompts_hash(file)
    file.write_text("== system ==\nAnswer!")
    assert prompts_hash(file) != before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Answer.", "expected sections"),
        ("== tools ==\nx", "'system' among them"),
        ("== system ==\na\n== system ==\nb", "each once"),
        ("== system ==\na\n== sistem ==\nb", "unknown: sistem"),
        ("== system ==\n$questions", r"bad placeholder \('questions'\); known here: \$tools, \$answers"),
        ("== system ==\ncosts $5", "bad placeholder"),
    ],
)
def test_a_file_that_is_not_a_set_of_prompts_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "own.txt"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        system_prompt([], 1, file)


def test_an_unknown_set_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'memry': neither one of memory, react, compact, none nor a readable"):
        system_prompt([], 1, "memry")


def test_no_objectives_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one objective, not 0"):
        system_prompt([], 0)


def test_every_text_file_is_a_known_set() -> None:
    folder = Path(prompts.__file__).parent / "prompt_texts"
    assert sorted(file.stem for file in folder.iterdir()) == sorted(PROMPTS)
