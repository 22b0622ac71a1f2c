from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mempo.core import ConfigError, Objective, Task
from mempo.rewards import MODES, Mode, contains_answer, score_answer, score_task, split_answers


def close(expected: Any) -> Any:
    """Equal but for the last bits of a float."""
    return pytest.approx(expected, rel=0, abs=1e-12)


def make_task(*golds: str | list[str]) -> Task:
    return Task("t", tuple(Objective("?", (g,) if isinstance(g, str) else tuple(g)) for g in golds))


def ems(answer: str | None, task: Task, mode: Mode = "qa") -> list[float]:
    return [score.em for score in score_task(answer, task, mode).per_objective]


def read_vectors(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "vectors" / name).read_text(encoding="utf-8").splitlines()]


# The official scripts' outputs. Equality is exact: the same operations in the same order.


@pytest.mark.data
def test_all_official_single_answer_vectors_are_reproduced(shared_data: Path) -> None:
    vectors = read_vectors(shared_data, "scorers.jsonl")
    assert len(vectors) == 384
    for vector in vectors:
        prediction, golds = vector["pred"], vector["golds"]
        task = make_task(golds)
        score = {mode: score_task(prediction, task, mode) for mode in MODES}
        ours = {
            "hotpot_em": score["hotpot"].em,
            "hotpot_f1": score["hotpot"].f1,
            "wiki2_f1": score["hotpot"].f1,
            "musique_em": score["musique"].em,
            "musique_f1": score["musique"].f1,
            "searchr1_em": score["hotpot"].em,
            "searchr1_subem": contains_answer(prediction, golds),
            "mem1_eval_em": score["mem1"].em,
            "mem1_eval_f1": score["mem1"].f1,
        }
        assert ours == vector["scores"], (prediction, golds)


@pytest.mark.data
def test_all_official_multi_objective_vectors_are_reproduced(shared_data: Path) -> None:
    vectors = read_vectors(shared_data, "multi.jsonl")
    assert len(vectors) == 180
    for vector in vectors:
        score = score_task(vector["answer_text"], make_task(*vector["golds"]), "mem1")
        assert sum(objective.em for objective in score.per_objective) == vector["mem1_eval_em_sum"]
        assert sum(objective.f1 for objective in score.per_objective) == vector["mem1_eval_f1_sum"]


@pytest.mark.data
def test_qa_equals_hotpot_on_every_official_vector_that_leaves_something(shared_data: Path) -> None:
    different = Counter[str]()
    for vector in read_vectors(shared_data, "scorers.jsonl"):
        if score_answer(vector["pred"], vector["golds"]) != score_answer(vector["pred"], vector["golds"], "hotpot"):
            different[vector["pred"]] += 1
    # "the" against "a" (a false match there, none here) and "A" against "A" (no F1 there).
    assert different == {"the": 1, "A": 1}


# Cases of single answers: (prediction, gold, EM, F1).

CASE_35 = [
    ("unknown", "no", 0, 0),
    ("Yes, both are American", "yes", 0, 0),
    ("no", "No Doubt", 0, 0),
    ("Yes.", "yes", 1, 1),
]


@pytest.mark.parametrize(("prediction", "gold", "em", "f1"), CASE_35)
@pytest.mark.parametrize("mode", ["qa", "hotpot", "unicode", "chars"])
def test_case_35_yes_and_no_are_all_or_nothing(prediction: str, gold: str, em: float, f1: float, mode: Mode) -> None:
    assert score_answer(prediction, [gold], mode) == (em, f1)


@pytest.mark.parametrize("mode", ["mem1", "musique"])
def test_case_35_without_the_rule_words_overlap(mode: Mode) -> None:
    # "yes both are american" against "yes": P 1/4, R 1, F1 0.4; "no" against "no doubt": P 1, R 1/2, F1 2/3.
    scores = [score_answer(prediction, [gold], mode).f1 for prediction, gold, _, _ in CASE_35]
    assert scores == close([0, 0.4, 2 / 3, 1])


@pytest.mark.parametrize("mode", ["qa", "mem1", "unicode", "chars"])
@pytest.mark.parametrize(
    ("prediction", "gold", "right"), [("A", "A", 1), ("B", "A", 0), ("", "A", 0), ("The The", "The The", 1)]
)
def test_case_36_an_answer_of_articles_alone_can_be_right(prediction: str, gold: str, right: int, mode: Mode) -> None:
    assert score_answer(prediction, [gold], mode) == (right, right)


def test_case_36_hotpot_keeps_the_official_quirk() -> None:
    assert score_answer("", ["A"], "hotpot") == (1, 0)  # the empty answer matches
    assert score_answer("A", ["A"], "hotpot") == (1, 0)  # the right one has no F1


def test_case_36_articles_count_in_mem1_alone() -> None:
    assert score_answer("the Beatles", ["Beatles"]) == (1, 1)
    assert score_answer("the Beatles", ["Beatles"], "mem1") == close((0, 2 / 3))


@pytest.mark.parametrize("prediction", ["", " ", "P", "the"])
@pytest.mark.parametrize("mode", MODES)
def test_case_37_parts_of_the_answer_and_empty_answers_score_nothing(prediction: str, mode: Mode) -> None:
    if mode == "chars":  # a letter is a unit there, so "P" has an overlap by design; it is no exact match
        assert score_answer(prediction, ["Paris"], mode).em == 0
    else:
        assert score_answer(prediction, ["Paris"], mode) == (0, 0)


CASE_38 = [
    ("1,000", "1000"),
    ("(3.14)", "3.14"),
    ("3.14", "314"),
    ("1.0", "1"),
    ("twenty one", "Twenty-one"),
    ("12 May 1998", "May 12, 1998"),
]


@pytest.mark.parametrize("mode", ["qa", "hotpot", "musique"])
def test_case_38_numbers_and_dates_score_as_officially(mode: Mode) -> None:
    scores = [score_answer(prediction, [gold], mode) for prediction, gold in CASE_38]
    assert [score.em for score in scores] == [1, 1, 1, 0, 0, 0]  # the third is the official false positive
    assert [score.f1 for score in scores] == [1, 1, 1, 0, 0, 1]


def test_case_38_mem1_mode_turns_punctuation_into_blanks() -> None:
    scores = [score_answer(prediction, [gold], "mem1") for prediction, gold in CASE_38]
    assert [score.em for score in scores] == [0, 1, 0, 0, 1, 0]
    assert [score.f1 for score in scores] == close([0, 1, 0, 2 / 3, 1, 1])


def test_case_39_characters_are_the_words_of_scripts_without_blanks() -> None:
    assert score_answer("北京市", ["北京"]) == (0, 0)  # one word each
    assert score_answer("北京市", ["北京"], "chars") == close((0, 0.8))  # P 2/3, R 1


@pytest.mark.parametrize("mode", MODES)
def test_case_40_letters_of_other_scripts_are_not_deleted(mode: Mode) -> None:
    assert score_answer("I cannot answer", ["天气"], mode) == (0, 0)
    assert score_answer("nal", ["Ünal"], mode).em == 0
    if mode != "chars":
        assert score_answer("nal", ["Ünal"], mode).f1 == 0


def test_case_42_repetition_and_hedging_cost_precision() -> None:
    pairs = [("Paris " * 4, "Paris"), ("Paris or Lyon or London", "Paris"), ("Los Angeles, California", "Los Angeles")]
    # P 1/4, R 1 -> 0.4; P 1/5, R 1 -> 1/3; P 2/3, R 1 -> 0.8
    assert [score_answer(p, [g]).f1 for p, g in pairs] == close([0.4, 1 / 3, 0.8])
    # Sets: {paris} -> 1.0; {paris, or, lyon, london} P 1/4 -> 0.4; 0.8
    assert [score_answer(p, [g], "mem1").f1 for p, g in pairs] == close([1.0, 0.4, 0.8])


# Cases of several objectives.

THREE = make_task("Paris", "1969", "Mars")
TWO = make_task("Paris", "1969")


def test_case_43_a_missing_answer_scores_nothing_and_the_count_is_wrong() -> None:
    score = score_task("Paris; 1969", THREE)
    assert [s.em for s in score.per_objective] == [1, 1, 0]
    assert (score.em, score.count_ok) == close((2 / 3, False))
    assert not score.exact
    assert ems("Paris; 1969", THREE, "mem1") == [0, 0, 0]


def test_case_44_an_empty_answer_keeps_its_place() -> None:
    score = score_task("Paris; ; Mars", THREE)
    assert [s.em for s in score.per_objective] == [1, 0, 1]
    assert (score.em, score.count_ok) == close((2 / 3, True))
    assert sum(ems("Paris; ; Mars", THREE, "mem1")) == 2.0


def test_case_45_answers_are_compared_place_by_place() -> None:
    surplus = score_task("Paris; 1969; Mars; Venus", TWO)
    assert ([s.em for s in surplus.per_objective], surplus.count_ok) == ([1, 1], False)
    assert ems("1969; Paris", TWO) == [0, 0]
    assert ems("Paris; 1969; Mars; Venus", TWO, "mem1") == [0, 0]
    assert ems("1969; Paris", TWO, "mem1") == [0, 0]


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "mem1"])
def test_case_46_commas_never_split_and_full_width_semicolons_do(mode: Mode) -> None:
    assert ems("Los Angeles, California; 1969", make_task("Los Angeles, California", "1969"), mode) == [1, 1]
    assert ems("巴黎；1969", make_task("巴黎", "1969"), mode) == [1, 1]
    assert ems("巴黎\n1969", make_task("巴黎", "1969"), mode) == [1, 1]


def test_case_46_mem1_knows_the_ascii_semicolon_alone() -> None:
    task = make_task("巴黎", "1969")
    assert ems("巴黎；1969", task, "mem1") == [0, 0]
    assert ems("巴黎\n1969", task, "mem1") == [0, 0]
    assert ems("巴黎;1969", task, "mem1") == [1, 1]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", [""]),
        ("a;", ["a", ""]),  # a last separator opens one more place
        (";a", ["", "a"]),
        ("a\n\n b \n", ["a", "b"]),
        ("a;\nb\nc", ["a", "b\nc"]),  # beside a separator, a line end is white space
        ("a；b;c", ["a", "b", "c"]),
    ],
)
def test_where_answers_are_split(text: str, parts: list[str]) -> None:
    assert split_answers(text) == parts


def test_one_question_takes_the_whole_text_as_its_answer() -> None:
    score = score_task("Paris; Lyon", make_task("Paris"))
    assert (score.em, score.f1, score.count_ok) == close((0, 2 / 3, True))
    assert score_task("1; 2", make_task("1; 2")).em == 1
    assert score_task("Paris; Lyon", make_task("Paris"), "mem1").f1 == 0  # splits, and two are not one


def test_no_answer_is_wrong_and_of_the_wrong_count() -> None:
    for mode in MODES:
        score = score_task(None, TWO, mode)
        assert (score.per_objective, score.em, score.f1, score.count_ok) == (((0.0, 0.0),) * 2, 0, 0, False)


def test_each_measure_takes_its_own_best_alias() -> None:
    assert score_answer("New York City", ["NYC", "New York", "City of Light"]) == close((0, 0.8))
    assert score_answer("NYC", ["New York", "NYC"]) == (1, 1)


def test_an_unknown_mode_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'sqaud'; known: qa, hotpot"):
        score_answer("a", ["b"], "sqaud")  # type: ignore[arg-type]


def test_substring_match_pays_for_naming_everything() -> None:
    assert contains_answer("Paris, Lyon, Rome or Milan", ["Rome"])
    assert not contains_answer("Paris", ["Rome"])


ANSWERS = st.text(alphabet=st.sampled_from("ab the.é天1;-\n"), max_size=20)


@given(ANSWERS, ANSWERS, st.sampled_from(MODES))
def test_scores_are_symmetric_in_range_and_em_implies_f1(one: str, other: str, mode: Mode) -> None:
    score = score_answer(one, [other], mode)
    assert score.em in (0.0, 1.0)
    assert 0.0 <= score.f1 <= 1.0
    assert score == close(tuple(score_answer(other, [one], mode)))
    if mode in ("qa", "unicode", "chars") and score.em:
        assert score.f1 == 1.0


@given(ANSWERS.filter(str.strip), st.sampled_from(["qa", "unicode", "chars"]))
def test_gold_scored_against_itself_is_right(gold: str, mode: Mode) -> None:
    task = make_task(gold)
    assert score_task(task.gold, task, mode).exact


@given(st.lists(ANSWERS, min_size=1, max_size=3), ANSWERS)
def test_more_aliases_never_score_less(aliases: list[str], prediction: str) -> None:
    some, more = score_answer(prediction, aliases[:1]), score_answer(prediction, aliases)
    assert more.em >= some.em
    assert more.f1 >= some.f1


@given(ANSWERS)
def test_long_answers_score_like_short_ones(text: str) -> None:
    # Beyond the cache's limit: 300 blanks change nothing in any normal form.
    assert score_answer(text + " " * 300, ["the a1"]) == score_answer(text, ["the a1"])
