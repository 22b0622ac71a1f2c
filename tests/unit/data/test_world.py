"""The embedded world: same bytes for a seed, names that nobody bears, questions that the passages answer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tracemalloc
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mempo.core import ConfigError, DataError, Task, ToolCall
from mempo.core.files import read_jsonl
from mempo.data.check import check_task
from mempo.data.world import (
    FALLBACK_CHARACTERS,
    MAX_HOPS,
    ClosedWorld,
    OpenWorld,
    Split,
    closed_capacity,
    closed_pattern,
    closed_vocabulary,
    closed_worlds,
    facts_kept,
    facts_needed,
    read_plans,
    search_order,
    split_notes,
    split_words,
    states,
)
from mempo.data.world.closed import TAILS
from mempo.data.world.names import _CODAS, _ENDINGS, _ONSETS, JOINTS, invented_name, word_count
from mempo.text.passages import render_passages
from mempo.text.tags import render_turn, wrap_information

CLOSED_GOLDEN = "d97d7be32e6cf1f1"
OPEN_GOLDEN = "2a6893c320ebd15c"


CLOSED_DIGEST_CODE = """
import hashlib
from dataclasses import asdict
from mempo.core.files import render_json
from mempo.data.world import closed_worlds
worlds = [*closed_worlds(7, 20), *closed_worlds(7, 20, objectives=3, split="eval", shuffled=True)]
print(hashlib.sha256("\\n".join(render_json(asdict(world)) for world in worlds).encode()).hexdigest()[:16])
"""


OPEN_DIGEST_CODE = """
import hashlib
from dataclasses import asdict
from mempo.core.files import render_json
from mempo.data.world import OpenWorld
worlds = [OpenWorld(7, 120), OpenWorld(7, 120, "eval")]
rows = [row for world in worlds for row in (*world.passages(), *world.tasks(20, objectives=3, shuffled=True))]
print(hashlib.sha256("\\n".join(render_json(asdict(row)) for row in rows).encode()).hexdigest()[:16])
"""


def run_python(code: str, hash_seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout


def names_of(world: ClosedWorld) -> set[str]:
    return set(re.findall(r"[A-Z]\w+", " ".join(passage.text for passage in world.passages)))


# --- closed vocabulary ---


@pytest.mark.parametrize("hash_seed", ["0", "123"])
def test_the_closed_worlds_of_a_seed_have_the_same_bytes_whatever_python_hashes(hash_seed: str) -> None:
    assert run_python(CLOSED_DIGEST_CODE, hash_seed).strip() == CLOSED_GOLDEN


def test_a_world_is_the_same_whatever_is_made_around_it() -> None:
    assert list(closed_worlds(3, 2, start=5)) == list(closed_worlds(3, 10))[5:7]


def test_seeds_give_different_worlds() -> None:
    assert next(closed_worlds(1, 1)).passages[0].text != next(closed_worlds(2, 1)).passages[0].text


def test_about_200_words_and_none_twice() -> None:
    vocabulary = closed_vocabulary()
    assert 180 <= len(vocabulary) <= 220
    assert len(set(vocabulary)) == len(vocabulary)


def texts_of(world: ClosedWorld) -> list[str]:
    facts = [fact for plan in read_plans(world.task) for fact in plan.facts]
    memory = "; ".join(f"{fact.query} is {fact.value}" for fact in facts)
    return [
        world.task.question,
        wrap_information(render_passages(world.passages[:3])),
        render_turn("nothing", "next", call=ToolCall("search", {"query": facts[0].query})),
        render_turn(memory, "done", answer=f"unknown; {world.task.gold}"),
    ]


def test_every_text_of_the_mode_is_made_of_the_vocabulary_and_joins_to_itself() -> None:
    vocabulary = set(closed_vocabulary())
    for world in [*closed_worlds(0, 50, objectives=3), *closed_worlds(0, 50, split="eval")]:
        for text in texts_of(world):
            pieces = split_words(text)
            assert "".join(pieces) == text
            assert set(pieces) <= vocabulary


def test_a_turn_splits_into_few_fixed_pieces() -> None:
    call = ToolCall("search", {"query": "river of Tixzor"})
    assert split_words(render_turn("home of Baxgal is Tixzor", "next", call=call)) == [
        "<mem>", "home of ", "Bax", "gal", " is ", "Tix", "zor", "</mem>",
        "\n<think>", "next", "</think>\n",
        '<tool_call>{"name": "search", "arguments": {"query": "', "river of ", "Tix", "zor", '"}}</tool_call>',
    ]  # fmt: skip


@given(st.lists(st.sampled_from([*closed_vocabulary(), *FALLBACK_CHARACTERS, "é", "\n"])))
def test_splitting_loses_nothing_whatever_the_text(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert "".join(split_words(text)) == text


def test_the_pattern_prefers_the_longest_word() -> None:
    matches = [re.match(closed_pattern(), word) for word in closed_vocabulary()]
    assert [match and match[0] for match in matches] == list(closed_vocabulary())


def test_the_pattern_splits_the_same_way_in_tokenizers() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(closed_pattern()), "isolated")
    for world in closed_worlds(0, 20):
        for text in [*texts_of(world), "an error: é\n\n <mem>home of Baxgal"]:
            assert [piece for piece, _ in split.pre_tokenize_str(text)] == split_words(text)


def test_each_world_answers_its_own_questions_by_single_fact_passages() -> None:
    for world in closed_worlds(11, 200, objectives=2):
        texts = {passage.text for passage in world.passages}
        for objective, plan in zip(world.task.objectives, read_plans(world.task), strict=True):
            subject = plan.facts[0].title
            for fact in plan.facts:  # each fact hangs on the value of the one before
                assert fact.title == subject
                assert f"{fact.query} is {fact.value}" in texts
                subject = fact.value
            assert objective.answers == (plan.facts[-1].value,)
            relations = [fact.query.split(" of ")[0] for fact in plan.facts]
            assert objective.question == " of ".join([*reversed(relations), plan.facts[0].title]) + "?"


def test_each_entity_on_the_way_has_one_fact_more_than_needed() -> None:
    world = next(closed_worlds(5, 1, objectives=2, hops=(2,)))
    # 2 objectives x 2 entities x (needed + distractor).
    assert len(world.passages) == 8
    assert set(Counter(passage.title for passage in world.passages).values()) == {2}


def test_train_and_eval_share_no_name_but_all_tokens() -> None:
    train = set().union(*(names_of(world) for world in closed_worlds(0, 2000)))
    unseen = set().union(*(names_of(world) for world in closed_worlds(0, 500, split="eval")))
    assert not train & unseen
    assert {name[:3] for name in unseen} <= {name[:3] for name in train}
    assert {name[3:] for name in unseen} <= {name[3:] for name in train}


@pytest.mark.parametrize(("objectives", "split"), [(2, "train"), (8, "train"), (4, "eval")])
def test_no_two_worlds_of_a_full_corpus_tell_the_same_relation_of_the_same_entity(objectives: int, split: str) -> None:
    capacity = closed_capacity(objectives, split)  # type: ignore[arg-type]
    keys = [
        passage.text.split(" is ")[0]
        for world in closed_worlds(0, capacity, objectives=objectives, split=split)  # type: ignore[arg-type]
        for passage in world.passages
    ]
    assert len(set(keys)) == len(keys)


def test_more_worlds_than_names_are_refused_with_the_limit() -> None:
    with pytest.raises(ConfigError, match="names suffice for 7200 train worlds"):
        next(closed_worlds(0, 7201))


@pytest.mark.parametrize(("objectives", "hops"), [(0, (1,)), (1, ()), (1, (3,))])
def test_impossible_shapes_are_refused(objectives: int, hops: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="objectives >= 1 and hops"):
        next(closed_worlds(0, 1, objectives=objectives, hops=hops))


@pytest.mark.parametrize(("count", "objectives", "hops"), [(1, 0, (1,)), (1, 17, (1,)), (1, 1, (5,)), (-1, 1, (1,))])
def test_impossible_open_tasks_are_refused_before_the_first(count: int, objectives: int, hops: tuple[int, ...]) -> None:
    # More questions than a world has would be drawn for ever: 16 are always there, even of one block and one shape.
    world = OpenWorld(0, 50, "train")
    with pytest.raises(ConfigError):
        world.tasks(count, objectives=objectives, hops=hops)
    for length in range(1, MAX_HOPS + 1):
        assert len(list(world.tasks(5, objectives=16, hops=(length,)))) == 5


def test_a_negative_number_of_closed_worlds_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be at least 0, not -1"):
        closed_worlds(0, -1)


def test_shuffled_tasks_are_searched_in_each_order_about_equally_often() -> None:
    orders = Counter(search_order(world.task) for world in closed_worlds(0, 400, shuffled=True))
    # Binomial(400, 1/2): 140 to 260 is six standard deviations.
    assert set(orders) == {(0, 1), (1, 0)}
    assert 140 < orders[0, 1] < 260
    assert {search_order(world.task) for world in closed_worlds(0, 50)} == {(0, 1)}


def test_bm25_over_2000_worlds_finds_the_right_passage_first_and_a_distractor_second() -> None:
    bm25s = pytest.importorskip("bm25s")
    stemmer = pytest.importorskip("Stemmer").Stemmer("english")
    worlds = list(closed_worlds(1, 2000))
    passages = [passage for world in worlds for passage in world.passages]
    facts = [fact for world in worlds[::10] for plan in read_plans(world.task) for fact in plan.facts]

    def tokens(texts: list[str]) -> object:
        return bm25s.tokenize(texts, stopwords="en", stemmer=stemmer, show_progress=False)

    index = bm25s.BM25()
    index.index(tokens([f'"{passage.title}"\n{passage.text}' for passage in passages]), show_progress=False)
    found, _ = index.retrieve(tokens([fact.query for fact in facts]), k=2, show_progress=False)
    for fact, (first, second) in zip(facts, found, strict=True):
        assert states(passages[first].text, fact)
        assert passages[second].title == fact.title


# --- facts ---


def test_facts_needed_are_those_that_the_answers_are_read_from() -> None:
    task = next(closed_worlds(5, 1, objectives=2, hops=(2,))).task
    assert [fact.value for fact in facts_needed(task)] == [objective.answers[0] for objective in task.objectives]
    assert len(facts_needed(task, bridges=True)) == 4


def test_facts_kept_asks_for_all_words_of_a_fact_in_one_note() -> None:
    task = next(closed_worlds(5, 1, objectives=2, hops=(1,))).task
    first, second = (f"{fact.query} is {fact.value}" for fact in facts_needed(task))
    assert facts_kept(f"{first}; {second}", task) == 1.0
    assert facts_kept(f"nothing\n{second}", task) == 0.5
    assert facts_kept(None, task) == 0.0
    # The names change places: every word is there, no fact is.
    swapped = f"{facts_needed(task)[0].query} is {facts_needed(task)[1].value}"
    assert facts_kept(f"{swapped}; {first.replace(first.split(' is ')[1], second.split(' is ')[1])}", task) == 0.0


def test_a_task_without_a_plan_is_refused_by_name() -> None:
    with pytest.raises(DataError, match="'hotpot-1' is no world task"):
        read_plans(Task("hotpot-1", ()))


def test_notes_end_at_semicolons_and_lines() -> None:
    assert split_notes(" a ;b\nc;; ") == ["a", "b", "c"]


# --- the open world ---


def plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


@pytest.mark.parametrize("hash_seed", ["0", "123"])
def test_the_open_world_of_a_seed_has_the_same_bytes_whatever_python_hashes(hash_seed: str) -> None:
    assert run_python(OPEN_DIGEST_CODE, hash_seed).strip() == OPEN_GOLDEN


def test_passages_have_one_to_five_sentences_and_a_title_of_their_own() -> None:
    passages = list(OpenWorld(0, 5000).passages())
    assert len(passages) == 5000
    assert len({passage.title for passage in passages}) == len({passage.id for passage in passages}) == 5000
    sentences = Counter(len(re.findall(r"\.(?: |$)", passage.text)) for passage in passages)
    assert set(sentences) == {1, 2, 3, 4, 5}
    assert all(passage.title in passage.text for passage in passages)


def test_every_fact_of_a_plan_stands_in_one_sentence_of_its_passage() -> None:
    world = OpenWorld(3, 500)
    texts = {passage.title: passage.text for passage in world.passages()}
    for task in world.tasks(300, objectives=2):
        for objective, plan in zip(task.objectives, read_plans(task), strict=True):
            assert set(objective.supporting_titles) == {fact.title for fact in plan.facts}
            for fact in plan.facts:
                sentences = re.split(r"(?<=\.) ", texts[fact.title])
                assert any(states(f"{fact.title} {sentence}", fact) for sentence in sentences)


def test_chains_hang_together_and_the_question_names_only_their_beginning() -> None:
    world, lengths = OpenWorld(3, 500), Counter[int]()
    for task in world.tasks(400, objectives=1):
        [plan], [objective] = read_plans(task), task.objectives
        for facts in plan.chains:
            lengths[len(facts)] += 1
            assert facts[0].title in objective.question
            for fact, following in pairwise(facts):
                assert fact.value == following.title
                assert following.title not in objective.question.replace(facts[0].title, "")
        if len(plan.chains) == 1 and objective.answers[0] not in ("yes", "no"):
            assert objective.answers[0] == plan.facts[-1].value
            assert plain(objective.answers[0]) not in plain(objective.question)
    assert set(lengths) == {1, 2, 3, 4}


def test_comparisons_are_decided_by_the_values_of_the_plan() -> None:
    seen = 0
    for task in OpenWorld(3, 500).tasks(400, objectives=1):
        [plan], [objective] = read_plans(task), task.objectives
        if len(plan.chains) == 2 and objective.answers[0] not in ("yes", "no"):
            first, second = plan.deciding
            larger = "longer" in objective.question or "more inhabitants" in objective.question
            winner = max(plan.deciding, key=lambda fact: int(fact.value) * (1 if larger else -1))
            assert first.value != second.value
            assert objective.answers[0] == winner.title
            seen += 1
    assert seen > 40


def test_yes_and_no_are_both_asked_for_and_follow_from_the_plan() -> None:
    answers: Counter[str] = Counter()
    for task in OpenWorld(3, 500).tasks(600, objectives=1):
        [plan], [objective] = read_plans(task), task.objectives
        if objective.answers[0] not in ("yes", "no"):
            continue
        answers[objective.answers[0]] += 1
        values = [fact.value for fact in plan.deciding]
        agrees = len(set(values)) == 1 if len(values) == 2 else values[0] in objective.question
        assert objective.answers == (("yes",) if agrees else ("no",))
    # About a fifth of 600, nearly even: each is far above 25.
    assert min(answers["yes"], answers["no"]) > 25


def test_answers_have_aliases_that_name_the_same_thing() -> None:
    answers = [task.objectives[0].answers for task in OpenWorld(0, 500).tasks(200, objectives=1)]
    assert any(len(aliases) == 2 and aliases[0].split()[-1] == aliases[1] for aliases in answers)  # a last name
    assert any(len(aliases) == 2 and aliases[0] == aliases[1].replace(",", "") for aliases in answers)  # 12,400


def test_tasks_are_tasks_by_the_scorer_that_will_score_them() -> None:
    for task in OpenWorld(0, 500).tasks(100, objectives=4):
        assert len({objective.question for objective in task.objectives}) == 4
        assert not [finding for finding in check_task(task) if finding.fatal]


def test_train_and_eval_of_the_open_world_share_no_word_of_a_name() -> None:
    def invented(split: Split) -> set[str]:
        joints = "|".join(JOINTS[split])
        text = " ".join(f"{passage.title} {passage.text}" for passage in OpenWorld(0, 2000, split).passages())
        return {word for word in re.findall(r"\w+", text) if re.search(joints, word)}

    train, unseen = invented("train"), invented("eval")
    assert len(train) > 2000
    assert len(unseen) > 2000
    assert not train & unseen


@pytest.mark.parametrize("kind", ["person", "town", "region", "river", "company", "book", "school"])
def test_a_name_belongs_to_one_number_and_splits_have_the_names_of_their_joints(kind: str) -> None:
    numbers = [*range(3000), *range(word_count(kind) - 3000, word_count(kind))]
    for split in ("train", "eval"):
        names = {invented_name(5, split, kind, number) for number in numbers}
        assert len(names) == len(numbers)
        assert all(any(joint in word.lower() for joint in JOINTS[split]) for name in names for word in name.split())
    with pytest.raises(ConfigError, match="make a smaller world"):
        invented_name(5, "train", kind, word_count(kind))


def test_a_word_falls_into_its_parts_in_one_way_only() -> None:
    # The one place where two consonant parts meet is a coda before an onset.
    assert len({coda + onset for coda in _CODAS for onset in _ONSETS}) == len(_CODAS) * len(_ONSETS)
    # After the last onset stands the ending: those of all kinds differ as wholes.
    endings = [ending for kind in _ENDINGS.values() for ending in kind]
    assert len(set(endings)) == len(endings)


def test_a_world_is_streamed_in_the_memory_of_a_block() -> None:
    list(islice(OpenWorld(0, 10**6).passages(), 100))  # what is imported and cached once
    tracemalloc.start()
    try:
        for _ in islice(OpenWorld(0, 10**6).passages(), 5000):
            pass
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # 5000 passages are 2 MB of text objects; a block of 50 with its statements is about 0.1 MB.
    assert peak_bytes < 600_000


def test_a_task_and_a_passage_do_not_depend_on_how_many_are_made() -> None:
    small, large = OpenWorld(1, 200), OpenWorld(1, 330)
    assert list(small.passages()) == list(large.passages())[:200]
    assert list(large.tasks(3)) == list(large.tasks(9))[:3]


@pytest.mark.parametrize(("objectives", "hops"), [(0, (1,)), (1, ()), (1, (5,))])
def test_impossible_open_tasks_are_refused(objectives: int, hops: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="hops of 1 to 4"):
        next(OpenWorld(0, 50).tasks(1, objectives=objectives, hops=hops))


def test_less_than_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 50 passages"):
        OpenWorld(0, 49)


@pytest.mark.data
def test_no_real_title_holds_a_joint_so_none_is_a_name_of_a_world(shared_data: Path) -> None:
    titles = {
        row["title"].casefold()
        for file in ("corpus.jsonl", "corpus_extra.jsonl")
        for _, row in read_jsonl(shared_data / file)
    }
    joints = [*JOINTS["train"], *JOINTS["eval"], *(f"x{tail[0]}" for tail in TAILS)]
    assert not [title for title in titles if any(joint in title for joint in joints)]
    made = {passage.title.casefold() for passage in OpenWorld(0, 2000).passages()}
    made |= {passage.title.casefold() for world in closed_worlds(0, 500) for passage in world.passages}
    assert not made & titles
