from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mempo.core import Objective, StopReason, Task, Trajectory, Turn
from mempo.rewards.mem1 import Mem1Turn, mem1_tokens, mem1_training_score, mem1_turns


def count_words(text: str) -> int:
    return len(text.split())


def turns_of(record: dict[str, Any]) -> list[Mem1Turn]:
    count = sum(1 for key in record if key[0] == "r")
    return [Mem1Turn(record[f"t{i}"], record[f"r{i}"], record.get(f"i{i}", "")) for i in range(count)]


@pytest.mark.data
def test_all_official_token_vectors_are_reproduced(shared_data: Path) -> None:
    lines = (shared_data / "vectors" / "mem1_tokens.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 24
    for vector in map(json.loads, lines):
        record = vector["record"]
        tokens = mem1_tokens(turns_of(record), count_words, right=bool(record["Exact_match"]))
        assert tokens == (
            vector["peak_compression"],
            vector["peak_non_compression"],
            vector["dependency_compression"],
            vector["dependency_non_compression"],
        )


@pytest.mark.data
def test_all_official_training_scores_are_reproduced(shared_data: Path) -> None:
    lines = (shared_data / "vectors" / "multi.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 180
    for vector in map(json.loads, lines):
        assert mem1_training_score(vector["answer_text"], vector["golds"]) == vector["mem1_train_em_sum"]


@pytest.mark.parametrize(
    ("answer", "golds", "points"),
    [
        ("Paris; 1969", ["Paris", "1969", "Mars"], 2),  # case 43: 0 in its evaluation
        ("Paris; 1969; Mars; Venus", ["Paris", "1969"], 2),  # case 45: 0 in its evaluation
        ("1969; Paris", ["Paris", "1969"], 0),
    ],
)
def test_cases_43_and_45_its_training_pays_what_its_evaluation_does_not(
    answer: str, golds: list[str], points: int
) -> None:
    assert mem1_training_score(answer, [[gold] for gold in golds]) == points


def test_a_turn_sees_the_one_before_or_all_before() -> None:
    turns = [Mem1Turn("t ", "t a ", "o o "), Mem1Turn("u ", "u b ", "p "), Mem1Turn("v ", "v c ", "")]
    tokens = mem1_tokens(turns, count_words, right=True)
    # Words a turn: spoken 3 (thought, thought again, action); with its information 5, 4, 3.
    # Peaks: 5 + 3 = 8 with memory; 5 + 4 + 3 = 12 without.
    # Dependency of a turn with context c: 1 * ((2c + 1) // 2) + 2 * ((2(c + 1) + 2) // 2) = c + 2(c + 2) = 3c + 4.
    # Contexts 0, 5, 4 -> 4 + 19 + 16 = 39; without memory 0, 5, 9 -> 4 + 19 + 31 = 54.
    assert tokens == (8, 12, 39, 54)


def test_our_turns_are_logged_with_everything_before_the_action_as_the_thought() -> None:
    search = '<mem>m</mem><think>t</think><tool_call>{"name": "search", "arguments": {"query": "q"}}</tool_call>'
    answer = "<mem>n</mem><think>u</think><answer>Paris</answer>"
    turns = (
        Turn(0, search, observation="found"),
        Turn(1, "<mem>cut", observation=None),
        Turn(2, answer, answer="Paris"),
    )
    trajectory = Trajectory(Task("t", (Objective("?", ("Paris",)),)), 0, turns, StopReason.ANSWERED, seed=0)
    assert mem1_turns(trajectory) == [
        ("<mem>m</mem><think>t</think>", search, "<information>found</information>"),
        ("<mem>cut", "<mem>cut", ""),
        ("<mem>n</mem><think>u</think>", answer, ""),
    ]
