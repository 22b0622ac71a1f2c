from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mempo.core import ConfigError, DataError, Objective, Task
from mempo.data import compose, interleave, read_tasks
from mempo.rewards.answers import score_task


def item(name: str, question: str = "", *answers: str, source: str = "demo") -> Task:
    return Task(name, (Objective(question or f"what is {name}", answers or (f"gold {name}",), (f"T{name}",)),), source)


def test_consecutive_items_are_joined_and_the_remainder_is_dropped() -> None:
    made = compose([item("a"), item("b", "Is it b? "), item("c"), item("d"), item("e")], 2)
    assert [task.question for task in made.tasks] == ["what is a?; Is it b?", "what is c?; what is d?"]
    assert [task.gold for task in made.tasks] == ["gold a; gold b", "gold c; gold d"]
    assert made.remainder == 1
    assert made.tasks[0].objectives[0].supporting_titles == ("Ta",)


def test_a_task_says_what_it_is_composed_of() -> None:
    [task] = compose([item("a", source="nq"), item("b", source="hotpotqa")], 2).tasks
    assert task.source == "nq + hotpotqa"
    assert task.meta == {"component_ids": ["a", "b"], "component_sources": ["nq", "hotpotqa"]}
    assert compose([item("a"), item("b")], 2, source="mine").tasks[0].source == "mine"


def test_all_tasks_of_a_mixed_composition_have_one_source_for_one_row_of_the_report() -> None:
    items = [item("a", source="nq"), item("b", source="nq"), item("c", source="hotpotqa"), item("d", source="nq")]
    assert {task.source for task in compose(items, 2).tasks} == {"nq + hotpotqa"}


def test_an_id_depends_on_the_questions_and_not_on_the_rest_of_the_file() -> None:
    [_, second] = compose([item("x"), item("y"), item("a"), item("b")], 2).tasks
    [alone] = compose([item("a"), item("b")], 2).tasks
    [swapped] = compose([item("b"), item("a")], 2).tasks
    assert second.id == alone.id != swapped.id
    assert alone.id.startswith("2obj-")
    assert "_" not in alone.id  # verl splits its keys at underscores


def test_a_question_is_not_asked_twice_whatever_its_case_blanks_and_mark() -> None:
    made = compose([item("a", "Who is  it"), item("b", "who is it?"), item("c"), item("d"), item("e")], 2)
    assert [task.meta["component_ids"] for task in made.tasks] == [["a", "c"], ["d", "e"]]
    assert [(left.id, left.reason) for left in made.left_out] == [("b", "the question is there already")]


def test_case_46_a_comma_never_separates_and_a_gold_with_a_separator_is_left_out() -> None:
    items = [
        item("comma", "", "Los Angeles, California"),
        item("wide", "", "巴黎；1969"),
        item("alias", "", "Paris; Texas", "Paris"),
        item("lines", "", "New\nYork"),
        item("plain", "", "1969"),
    ]
    made = compose(items, 2)
    assert [task.meta["component_ids"] for task in made.tasks] == [["comma", "alias"], ["lines", "plain"]]
    assert [(left.id, left.value) for left in made.left_out] == [
        ("wide", "巴黎；1969"),
        ("wide", "what is wide"),
        ("alias", "Paris; Texas"),
    ]
    assert made.tasks[0].objectives[1].answers == ("Paris",)
    for task in made.tasks:
        assert score_task(task.gold, task).em == 1.0
    assert score_task("Los Angeles, California；Paris", made.tasks[0]).em == 1.0


def test_alone_a_gold_with_a_separator_can_be_matched_and_stays() -> None:
    made = compose([item("a", "", "Paris; Texas")], 1)
    assert (len(made.tasks), made.left_out) == (1, ())
    assert score_task("Paris; Texas", made.tasks[0]).em == 1.0


def test_case_77_no_items_give_no_tasks_and_too_few_items_are_the_remainder() -> None:
    assert compose([], 4).tasks == ()
    made = compose([item("a"), item("b")], 4)
    assert (made.tasks, made.remainder) == ((), 2)


@pytest.mark.parametrize("objectives", [1, 16])
def test_one_and_sixteen_objectives_are_allowed(objectives: int) -> None:
    [task, *_] = compose([item(str(i)) for i in range(16)], objectives).tasks
    assert len(task.objectives) == objectives


@pytest.mark.parametrize("objectives", [0, 17, -1])
def test_objectives_out_of_range_are_refused(objectives: int) -> None:
    with pytest.raises(ConfigError, match=f"1 to 16, not {objectives}"):
        compose([], objectives)


def test_a_task_of_several_questions_cannot_be_composed_again() -> None:
    with pytest.raises(DataError, match="only single questions can be composed"):
        compose(compose([item("a"), item("b")], 2).tasks, 1)


def test_a_shuffle_depends_on_its_seed_alone() -> None:
    items = [item(str(i)) for i in range(40)]
    assert compose(items, 2, seed=1) == compose(list(items), 2, seed=1)
    assert compose(items, 2, seed=1).tasks != compose(items, 2, seed=2).tasks != compose(items, 2).tasks


def test_sources_are_interleaved_in_turn_and_none_is_lost() -> None:
    a, b, c = [item("a1"), item("a2"), item("a3")], [item("b1")], [item("c1"), item("c2")]
    assert [task.id for task in interleave(a, b, c)] == ["a1", "b1", "c1", "a2", "c2", "a3"]


@given(
    names=st.lists(st.integers(0, 60), max_size=40),
    objectives=st.integers(1, 16),
    seed=st.none() | st.integers(0, 2**32),
)
def test_each_question_is_asked_once_or_left_over(names: list[int], objectives: int, seed: int | None) -> None:
    made = compose([item(str(name)) for name in names], objectives, seed=seed)
    asked = [question.question for task in made.tasks for question in task.objectives]
    distinct = len(set(names))
    assert len(asked) == len(set(asked)) == distinct - distinct % objectives
    assert made.remainder == distinct % objectives
    assert len(made.left_out) == len(names) - distinct
    assert all(len(task.objectives) == objectives for task in made.tasks)
    assert all(score_task(task.gold, task).em == 1.0 for task in made.tasks)


@pytest.mark.data
def test_composing_the_components_of_the_real_files_gives_their_questions_and_answers(shared_data: Path) -> None:
    items = {
        task.id: task
        for name in ("hotpotqa", "2wikimultihopqa", "musique", "nq", "popqa", "bamboogle")
        for task in read_tasks(shared_data / "qa" / f"{name}.jsonl")
    }
    count = 0
    for path in sorted((shared_data / "qa" / "multi").glob("*.jsonl")):
        for task in read_tasks(path):
            components = [items[name] for name in task.meta["component_ids"]]
            [made] = compose(components, len(components)).tasks
            assert made.question == task.question
            assert made.gold == task.gold
            assert [o.answers for o in made.objectives] == [o.answers for o in task.objectives]
            count += 1
    assert count == 375  # 30+20+18+12+40+40+40+40+40+33+37+25 rows in the twelve files
