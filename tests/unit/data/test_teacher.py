"""The teacher: right where it has no flaw, wrong in the doses that were asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mempo.core import ConfigError, Objective, Passage, StopReason, Task, Trajectory
from mempo.core.files import read_jsonl
from mempo.data.tasks import read_tasks
from mempo.data.teacher import Flaws, Teacher, TeacherState
from mempo.data.world import (
    OpenWorld,
    closed_vocabulary,
    closed_worlds,
    facts_kept,
    facts_needed,
    split_notes,
    split_words,
    states,
)
from mempo.rewards.answers import score_task
from mempo.text.passages import render_passages
from mempo.text.tags import parse


def content_words(text: str) -> frozenset[str]:
    return frozenset(text.lower().split()) - {"of", "is", "a", "the"}


class WordRetriever:
    """Ranks passages by the number of the query's words in their texts and titles: enough for a few small worlds."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._passages = [(content_words(p.text), content_words(p.title), p) for p in passages]

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        return [self._find(content_words(query), top_k) for query in queries]

    def _find(self, wanted: frozenset[str], top_k: int) -> list[Passage]:
        score = {p.id: len(wanted & text) + len(wanted & title) for text, title, p in self._passages}
        ranked = sorted((p for *_, p in self._passages), key=lambda p: -score[p.id])
        return [passage for passage in ranked[:top_k] if score[passage.id]]


async def play(flaws: Flaws, count: int = 150, *, objectives: int = 2, seed: int = 0) -> list[Trajectory]:
    teacher, trajectories = Teacher(flaws), []
    for world in closed_worlds(1, count, objectives=objectives):
        trajectories.append(await teacher.run(world.task, WordRetriever(world.passages), seed=seed, top_k=2))
    return trajectories


def exact(trajectories: Sequence[Trajectory]) -> float:
    """The share of trajectories with every answer right."""
    scores = [score_task(trajectory.answer, trajectory.task).em for trajectory in trajectories]
    return sum(score == 1 for score in scores) / len(scores)


FLAWS = [
    Flaws(forget=0.3),
    Flaws(habit=0.7),
    Flaws(distractor=0.5),
    Flaws(repeat=0.3),
    Flaws(stop_early=0.3),
    Flaws(forget=0.3, search_again=True),
    Flaws(forget=0.1, habit=0.5, habit_notes=2, distractor=0.3, repeat=0.2, stop_early=0.1, search_again=True),
]


# --- without a flaw ---


@pytest.mark.parametrize("objectives", [1, 2, 5])
async def test_a_flawless_teacher_answers_every_closed_task(objectives: int) -> None:
    trajectories = await play(Flaws(), objectives=objectives)
    assert exact(trajectories) == 1.0
    assert all(facts_kept(trajectory.turns[-1].memory, trajectory.task) == 1.0 for trajectory in trajectories)
    # One search a fact, and the turn that answers.
    assert [len(trajectory.turns) for trajectory in trajectories] == [
        len(facts_needed(trajectory.task, bridges=True)) + 1 for trajectory in trajectories
    ]


async def test_it_searches_in_the_order_of_the_task_and_answers_in_the_order_of_the_questions() -> None:
    seen = set()
    for world in closed_worlds(3, 30, hops=(1,), shuffled=True):
        trajectory = await Teacher().run(world.task, WordRetriever(world.passages), top_k=2)
        assert trajectory.answer == world.task.gold
        needed = [fact.query for fact in facts_needed(world.task)]
        calls = [turn.call.arguments["query"] for turn in trajectory.turns if turn.call is not None]
        assert calls == [needed[index] for index in world.task.meta["order"]]
        seen.add(tuple(world.task.meta["order"]))
    assert seen == {(0, 1), (1, 0)}


async def test_a_flawless_teacher_answers_open_tasks_of_every_shape() -> None:
    retrieval = pytest.importorskip("mempo.retrieval.memory")
    world = OpenWorld(0, 1000)
    retriever = retrieval.MemoryRetriever(world.passages())
    trajectories = [await Teacher().run(task, retriever) for task in world.tasks(200, objectives=2)]
    assert exact(trajectories) >= 0.98
    assert all(trajectory.well_formed for trajectory in trajectories)
    lengths = [facts_kept(t.turns[-1].memory, t.task, bridges=True) for t in trajectories]
    assert sum(lengths) / len(lengths) >= 0.98


# --- every trajectory, flawed or not ---


@pytest.mark.parametrize("flaws", [Flaws(), *FLAWS], ids=str)
async def test_every_turn_is_well_formed_and_of_the_closed_vocabulary(flaws: Flaws) -> None:
    vocabulary = set(closed_vocabulary())
    for trajectory in await play(flaws, 60):
        assert trajectory.stop is StopReason.ANSWERED
        assert trajectory.turns[-1].answer is not None
        for turn in trajectory.turns:
            parsed = parse(turn.text)
            assert parsed.well_formed
            assert (turn.memory, turn.thought, turn.call, turn.answer) == (
                parsed.memory,
                parsed.thought,
                parsed.call,
                parsed.answer,
            )
            assert set(split_words(turn.text)) <= vocabulary
            if turn.observation is not None:
                assert turn.observation == render_passages(turn.passages)
                assert set(split_words(turn.observation)) <= vocabulary


@pytest.mark.parametrize("flaws", [Flaws(), *FLAWS], ids=str)
async def test_what_is_noted_stands_in_the_last_memory_or_the_last_passages(flaws: Flaws) -> None:
    for trajectory in await play(flaws, 60):
        known: set[str] = set()
        for turn in trajectory.turns:
            notes = set(split_notes(turn.memory or "")) - {"nothing"}
            assert notes <= known
            known = notes | {passage.text for passage in turn.passages}


@pytest.mark.parametrize("flaws", [Flaws(), *FLAWS], ids=str)
async def test_an_answer_is_right_exactly_where_the_last_memory_states_its_fact(flaws: Flaws) -> None:
    for trajectory in await play(flaws, 60):
        notes = split_notes(trajectory.turns[-1].memory or "")
        expected = [
            fact.value if any(states(note, fact) for note in notes) else "unknown"
            for fact in facts_needed(trajectory.task)
        ]
        assert trajectory.answer == "; ".join(expected)


async def test_a_seed_gives_one_trajectory_and_another_seed_another() -> None:
    flaws = Flaws(forget=0.3, distractor=0.3)
    first, same, other = [await play(flaws, 20, seed=seed) for seed in (0, 0, 1)]
    assert first == same
    assert [t.turns for t in first] != [t.turns for t in other]


# --- flaws ---


async def test_dropping_the_oldest_by_habit_leaves_the_last_answer_and_loses_the_first() -> None:
    for trajectory in await play(Flaws(habit=1.0), 60):
        # With probability 1 no memory holds more than one fact: the one that was found last.
        assert all(len(split_notes(turn.memory or "")) == 1 for turn in trajectory.turns)
        assert trajectory.answer == f"unknown; {trajectory.task.objectives[-1].answers[0]}"


async def test_the_habit_has_its_probability() -> None:
    # Tasks of two one-hop questions: one memory of two facts, which loses the older with probability .7.
    teacher, right = Teacher(Flaws(habit=0.7)), 0
    for world in closed_worlds(1, 600, hops=(1,)):
        trajectory = await teacher.run(world.task, WordRetriever(world.passages), top_k=2)
        right += trajectory.answer == world.task.gold
    # Binomial(600, .3): mean 180, standard deviation 11.2; five of them on each side.
    assert 124 < right < 236


async def test_forgetting_at_random_loses_answers_and_searching_again_finds_most() -> None:
    lossy, patient = exact(await play(Flaws(forget=0.2))), exact(await play(Flaws(forget=0.2, search_again=True)))
    assert lossy < 0.6 < 0.8 < patient


async def test_a_distractor_is_noted_and_harms_no_answer() -> None:
    trajectories = await play(Flaws(distractor=0.5))
    needed = [facts_needed(trajectory.task, bridges=True) for trajectory in trajectories]
    unneeded = [
        note
        for trajectory, facts in zip(trajectories, needed, strict=True)
        for note in split_notes(trajectory.turns[-1].memory or "")
        if not any(states(note, fact) for fact in facts)
    ]
    assert len(unneeded) > len(trajectories) / 2
    assert exact(trajectories) == 1.0


async def test_a_repeated_search_costs_a_turn_and_no_answer() -> None:
    plain, repeating = await play(Flaws()), await play(Flaws(repeat=0.3))
    assert exact(repeating) == 1.0
    assert sum(len(t.turns) for t in repeating) > sum(len(t.turns) for t in plain)
    queries = [[turn.call.arguments["query"] for turn in t.turns if turn.call] for t in repeating]
    assert any(a == b for calls in queries for a, b in pairwise(calls))


async def test_stopping_early_answers_the_rest_with_unknown() -> None:
    trajectories = await play(Flaws(stop_early=1.0), 40)
    assert all(len(trajectory.turns) == 2 for trajectory in trajectories)
    assert all((trajectory.answer or "").endswith("unknown") for trajectory in trajectories)


async def test_the_last_turn_that_is_allowed_answers() -> None:
    world = next(closed_worlds(1, 1, objectives=4))
    trajectory = await Teacher(max_turns=2).run(world.task, WordRetriever(world.passages), top_k=2)
    assert len(trajectory.turns) == 2
    assert (trajectory.answer or "").count("unknown") >= 3


@pytest.mark.parametrize("wrong", [{"forget": 1.5}, {"habit": -0.1}, {"habit_notes": -1}])
def test_flaws_that_are_no_probabilities_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"flaw {next(iter(wrong))} is"):
        Flaws(**wrong)  # type: ignore[arg-type]


# --- tasks with supporting titles ---

PAGES = [
    Passage("1", "Ada Film", "Ada Film is a 1999 film; it was directed by Bob Roe. It won a prize."),
    Passage("2", "Bob Roe", "Bob Roe (born in St. Louis, Missouri) directs films. He lives in Rome."),
    Passage("3", "St. Louis", "St. Louis is a city in Missouri."),
    Passage("4", "Eve Film", "Eve Film is a 2003 film."),
]


async def search_pages(objective: Objective) -> Trajectory:
    return await Teacher().run(Task("t", (objective,)), WordRetriever(PAGES), top_k=1)


async def test_a_bridge_question_is_answered_from_the_note_on_its_second_title() -> None:
    titles = ("Bob Roe", "Ada Film")
    trajectory = await search_pages(
        Objective("Where was the director of the 1999 Ada Film born?", ("St. Louis, Missouri",), titles)
    )
    assert trajectory.answer == "St. Louis, Missouri"
    # The page that the question names comes first, although it is the second title; the semicolon,
    # which separates notes, is a comma in one.
    assert split_notes(trajectory.turns[1].memory or "") == [
        "Ada Film: Ada Film is a 1999 film, it was directed by Bob Roe"
    ]


async def test_a_comparison_needs_notes_on_all_its_titles() -> None:
    question = "Which film is older, Ada Film or Eve Film?"
    both = await search_pages(Objective(question, ("Ada Film",), ("Ada Film", "Eve Film")))
    assert both.answer == "Ada Film"
    missing = await search_pages(Objective(question, ("Ada Film",), ("Ada Film", "Zed Film")))
    assert missing.answer == "unknown"


async def test_without_titles_any_passage_that_holds_the_answer_will_do() -> None:
    assert (await search_pages(Objective("in which state is St. Louis", ("Missouri",)))).answer == "Missouri"
    assert (await search_pages(Objective("who directs", ("Nobody Else",)))).answer == "unknown"


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.sampled_from(["a", ".", ";", " ", "\n", "<mem>", "</answer>", "</tool_call>"])).map("".join),
    st.text(alphabet=st.sampled_from("ab;. "), min_size=1).filter(str.strip),
)
def test_notes_survive_whatever_a_page_holds(text: str, title: str) -> None:
    state = TeacherState(Task("t", (Objective("a?", ("zzz",), (title,)),)), seed=0)
    text, after = Teacher(Flaws(distractor=1.0)).next_turn(state, [Passage("1", title, f"x{text}")])
    parsed = parse(text)
    assert parsed.well_formed
    assert split_notes(parsed.memory or "") == (list(after.notes) or ["nothing"])


@pytest.mark.data
@pytest.mark.slow
async def test_real_questions_are_answered_through_their_supporting_titles(shared_data: Path) -> None:
    retrieval = pytest.importorskip("mempo.retrieval.memory")
    rows = read_jsonl(shared_data / "corpus.jsonl")
    retriever = retrieval.MemoryRetriever(Passage(row["id"], row["title"], row["text"]) for _, row in rows)
    shares = {}
    for name in ("hotpotqa", "2wikimultihopqa", "musique"):
        tasks = read_tasks(shared_data / "qa" / f"{name}.jsonl")
        shares[name] = exact([await Teacher().run(task, retriever) for task in tasks])
    assert shares["hotpotqa"] >= 0.95, json.dumps(shares)
    assert shares["2wikimultihopqa"] >= 0.95
    assert shares["musique"] >= 0.80
