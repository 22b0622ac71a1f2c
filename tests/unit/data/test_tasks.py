from __future__ import annotations

import contextlib
import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mempo.core import ConfigError, DataError, Objective, Task
from mempo.data import TaskFormat, read_tasks, rows, stream_tasks, write_tasks
from mempo.data.check import check_task
from mempo.data.formats import render_verl
from mempo.rewards.answers import score_task

# Rows in the exact shape of the raw files, with invented content.
HOTPOT = {
    "_id": "5a7a06935542990198eaf050",
    "answer": "Chief of Protocol",
    "question": " What office did Ada Quill hold? ",
    "supporting_facts": [["Ada Quill", 0], ["Quill House", 2], ["Ada Quill", 1]],
    "context": [["Ada Quill", ["She was born.", " She served."]], ["Quill House", ["A house."]]],
    "type": "bridge",
    "level": "hard",
}
TWO_WIKI = {
    "_id": "8813f87c0bdd11eba7f7acde48001122",
    "type": "compositional",
    "question": "Who is the mother of the director of film Grey Lantern?",
    "context": [["Grey Lantern", ["A film."]]],
    "supporting_facts": [["Grey Lantern", 0], ["Odo Fen", 1]],
    "evidences": [["Grey Lantern", "director", "Odo Fen"], ["Odo Fen", "mother", "Mara Fen"]],
    "answer": "Mara Fen",
    "evidences_id": [["Q1", "director", "Q2"], ["Q2", "mother", "Q3"]],
    "answer_id": "Q3",
}
MUSIQUE = {
    "id": "2hop__1_2",
    "paragraphs": [
        {"idx": 0, "title": "Noise", "paragraph_text": "x", "is_supporting": False},
        {"idx": 1, "title": "Fell Band", "paragraph_text": "y", "is_supporting": True},
    ],
    "question": "Who is the spouse of the Green Lake performer?",
    "question_decomposition": [
        {"id": 1, "question": "Green Lake >> performer", "answer": "Steve Ochre", "paragraph_support_idx": 1},
        {"id": 2, "question": "#1 >> spouse", "answer": "Mia Ochre", "paragraph_support_idx": 1},
    ],
    "answer": "Mia Ochre",
    "answer_aliases": ["Mia O.", "Mia Ochre"],
    "answerable": True,
}
NQ = {"question": "when was the tin bridge opened", "answer": ["14 May 1911", "1911"]}
SEARCH_R1 = {"id": "test_7", "question": "who built it?", "golden_answers": ["Tin Co."], "metadata": {"pop": 3}}
VERL = {
    "data_source": "nq",
    "prompt": [{"role": "user", "content": "Think first.\nQuestion: who built it?; when was it opened?\n"}],
    "ability": "fact-reasoning",
    "reward_model": {"style": "rule", "ground_truth": {"target": [["Tin Co.", "Tin"], ["1911"]]}},
    "extra_info": {"split": "train", "index": 5},
}
ROWS: dict[str, dict[str, Any]] = {
    "hotpotqa": HOTPOT,
    "2wikimultihopqa": TWO_WIKI,
    "musique": MUSIQUE,
    "nq_open": NQ,
    "search_r1": SEARCH_R1,
    "verl": VERL,
}
TASKS = {
    "hotpotqa": Task(
        HOTPOT["_id"],  # type: ignore[arg-type]
        (Objective("What office did Ada Quill hold?", ("Chief of Protocol",), ("Ada Quill", "Quill House")),),
        "hotpotqa",
        {"type": "bridge", "level": "hard"},
    ),
    "2wikimultihopqa": Task(
        TWO_WIKI["_id"],  # type: ignore[arg-type]
        (Objective(TWO_WIKI["question"], ("Mara Fen",), ("Grey Lantern", "Odo Fen")),),  # type: ignore[arg-type]
        "2wikimultihopqa",
        {"type": "compositional", "evidences": TWO_WIKI["evidences"]},
    ),
    "musique": Task(
        "2hop__1_2",
        (Objective(MUSIQUE["question"], ("Mia Ochre", "Mia O."), ("Fell Band",)),),  # type: ignore[arg-type]
        "musique",
        {"hops": 2, "decomposition": [["Green Lake >> performer", "Steve Ochre"], ["#1 >> spouse", "Mia Ochre"]]},
    ),
    "nq_open": Task("raw:1", (Objective("when was the tin bridge opened", ("14 May 1911", "1911")),), "nq"),
    "search_r1": Task("test_7", (Objective("who built it?", ("Tin Co.",)),), "raw", {"metadata": {"pop": 3}}),
    "verl": Task(
        "nq:train:5",
        (Objective("who built it?", ("Tin Co.", "Tin")), Objective("when was it opened?", ("1911",))),
        "nq",
        {"ability": "fact-reasoning"},
    ),
}
OWN = {"id": "a", "question": "Who?", "answers": ["Ann"], "supporting_titles": ["T"], "source": "demo"}


def write_rows(path: Path, *found: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", list(ROWS))
@pytest.mark.parametrize("holder", ["lines", "array", "gz"])
def test_each_raw_format_is_told_from_its_content_and_read(tmp_path: Path, name: str, holder: str) -> None:
    line = json.dumps(ROWS[name])
    path = tmp_path / ("raw.jsonl.gz" if holder == "gz" else "raw.json")
    content = f"[{line}]" if holder == "array" else line + "\n"
    path.write_bytes(gzip.compress(content.encode()) if holder == "gz" else content.encode())
    found = read_tasks(path)
    expected = TASKS[name]
    if holder == "array" and name == "nq_open":  # the place in an array counts from 0
        expected = replace(expected, id="raw:0")
    assert (found.format, list(found)) == (name, [expected])
    assert read_tasks(path, TaskFormat(name)).tasks == found.tasks


def test_verl_parquet_as_mem1_writes_it_is_read(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([VERL]), tmp_path / "train.parquet")
    found = read_tasks(tmp_path / "train.parquet")
    assert (found.format, found.tasks, found.lines) == ("verl", (TASKS["verl"],), (1,))


@pytest.mark.parametrize(
    ("target", "answers"), [("42", ("42",)), (["42", "forty-two"], ("42", "forty-two")), ([["42"]], ("42",))]
)
def test_a_verl_target_may_be_a_text_a_list_of_aliases_or_a_list_of_lists(
    tmp_path: Path, target: object, answers: tuple[str, ...]
) -> None:
    row = VERL | {"question": "How many?", "reward_model": {"style": "rule", "ground_truth": {"target": target}}}
    [task] = read_tasks(write_rows(tmp_path / "a.jsonl", row))
    assert task.objectives == (Objective("How many?", answers),)


def test_a_verl_question_that_does_not_split_into_as_many_as_the_golds_is_an_error(tmp_path: Path) -> None:
    row = VERL | {"prompt": [{"role": "user", "content": "Question: only one?"}]}
    with pytest.raises(DataError, match="holds 1 questions for 2 gold answers"):
        read_tasks(write_rows(tmp_path / "a.jsonl", row))


def test_a_semicolon_inside_a_verl_question_does_not_split_it(tmp_path: Path) -> None:
    row = VERL | {"question": "who built it; and why?; when?"}
    [task] = read_tasks(write_rows(tmp_path / "a.jsonl", row))
    assert [objective.question for objective in task.objectives] == ["who built it; and why?", "when?"]


def test_fields_that_we_do_not_know_are_kept_in_meta(tmp_path: Path) -> None:
    row = OWN | {"gold_kind": "annotated", "meta": {"hops": 2}}
    [task] = read_tasks(write_rows(tmp_path / "a.jsonl", row))
    assert task.meta == {"hops": 2, "gold_kind": "annotated"}
    with pytest.raises(DataError, match="with another value, in its `meta`"):
        read_tasks(write_rows(tmp_path / "b.jsonl", OWN | {"hops": 3, "meta": {"hops": 2}}))


MULTI = {
    "id": "m", "n": 2, "question": "who?; Where?", "questions": ["who", "Where?"],
    "answers": [["Ann"], ["Rome", "Roma"]], "supporting_titles": [["A"], []], "source": "demo",
    "component_ids": ["a", "b"],
}  # fmt: skip


def test_a_row_of_several_questions_is_one_task(tmp_path: Path) -> None:
    [task] = read_tasks(write_rows(tmp_path / "a.jsonl", MULTI))
    assert task == Task(
        "m",
        (Objective("who", ("Ann",), ("A",)), Objective("Where?", ("Rome", "Roma"))),
        "demo",
        {"component_ids": ["a", "b"]},
    )


@pytest.mark.parametrize(
    ("row", "field", "message"),
    [
        (OWN | {"answers": []}, "answers", "no gold answer"),
        (OWN | {"answers": ["Ann", " "]}, "answers", "a gold answer is empty"),
        (OWN | {"answers": "Ann"}, "answers", "must be a list of strings"),
        (OWN | {"answers": [7]}, "answers", "must be a list of strings"),
        (OWN | {"answers": [""]}, "answers", "scored against itself it is not 1"),
        (OWN | {"question": " "}, "question", "the question is empty"),
        (OWN | {"question": None}, "question", "is missing"),
        (OWN | {"id": 7}, "id", "must be a string"),
        (OWN | {"id": ""}, "id", "is empty"),
        (OWN | {"meta": [1]}, "meta", "must be an object"),
        (MULTI | {"answers": [["Ann"]]}, "answers", "2 questions have 1 lists of answers"),
        (MULTI | {"answers": [["Ann"], []]}, "answers[1]", "no gold answer"),
        (MULTI | {"answers": [["Ann"], ["Rome; Italy", "Rome"]]}, "answers[1]", "can never be matched"),
        (MULTI | {"supporting_titles": [["A"]]}, "supporting_titles", "2 questions have 1 lists of titles"),
        (MULTI | {"question": "Who else?"}, "question", "differs from its `questions`"),
        (MULTI | {"n": 3}, "n", "is not the number of questions, 2"),
        (MUSIQUE | {"answerable": False}, "answerable", "no task"),
        (MUSIQUE | {"paragraphs": [{"title": "x"}]}, "paragraphs", "objects with title .str. and is_supporting"),
        (MUSIQUE | {"paragraphs": [{"title": [], "is_supporting": True}]}, "paragraphs", "objects with title .str."),
        (HOTPOT | {"supporting_facts": [[1, 2]]}, "supporting_facts", r"list of \[title, sentence\]"),
        ({k: v for k, v in HOTPOT.items() if k != "answer"}, "answer", "is missing"),
    ],
)
def test_a_bad_row_names_file_line_field_and_value_and_lenient_lists_it(
    tmp_path: Path, row: dict[str, Any], field: str, message: str
) -> None:
    good = dict(row_of_kind(row), **{"_id" if "_id" in row else "id": "good"})
    path = write_rows(tmp_path / "a.jsonl", good, row)
    with pytest.raises(DataError, match=message) as caught:
        read_tasks(path)
    assert (caught.value.file, caught.value.line, caught.value.field) == (str(path), 2, field)
    found = read_tasks(path, lenient=True)
    assert [task.id for task in found] == ["good"]
    assert [(error.line, error.field) for error in found.skipped] == [(2, field)]


def row_of_kind(row: dict[str, Any]) -> dict[str, Any]:
    return MULTI if "questions" in row else MUSIQUE if "paragraphs" in row else HOTPOT if "_id" in row else OWN


def test_the_second_row_with_an_id_names_the_first(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", OWN, OWN | {"id": "b"}, OWN)
    with pytest.raises(DataError, match="line 3, field 'id': stands already in line 1"):
        read_tasks(path)
    assert [task.id for task in read_tasks(path, lenient=True)] == ["a", "b"]


def test_a_separator_in_one_of_several_aliases_is_a_warning_with_its_line(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "a.jsonl", OWN | {"answers": ["Ann; Bea"]}, MULTI | {"answers": [["Ann"], ["Rome", "Rome；Roma"]]}
    )
    found = read_tasks(path)
    assert [(w.line, w.field, w.value) for w in found.warnings] == [
        (1, "answers", "Ann; Bea"),
        (2, "answers[1]", "Rome；Roma"),
    ]
    assert "left out of compositions" in found.warnings[0].message
    assert "can never be matched" in found.warnings[1].message


def test_unknown_fields_name_the_known_formats(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no known format .*hotpotqa.*give the format"):
        read_tasks(write_rows(tmp_path / "a.jsonl", {"x": 1}))


def test_case_51_lenient_reads_two_tasks_and_counts_the_broken_one(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", OWN, OWN | {"id": "b"}, OWN | {"id": "c"})
    first, second, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second.replace(b"Ann", b"\xf4\x28") + third)
    # The broken byte stands where `Ann` stood in the second line.
    byte = len(first) + second.index(b"Ann")
    with pytest.raises(DataError, match=f"line 2: not UTF-8 at byte {byte} of the file"):
        read_tasks(path)
    found = read_tasks(path, lenient=True)
    assert ([task.id for task in found], len(found.skipped)) == (["a", "c"], 1)


def test_case_51_a_broken_byte_in_an_array_is_named_by_line_and_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "CHUNK_BYTES", 7)  # `巴` is cut by a chunk's end somewhere
    path = tmp_path / "a.json"
    path.write_bytes('[\n{"_id": "巴黎巴黎"},\n{"_id": "'.encode() + b"\xe5\xb7\x28" + b'"}]')
    byte = path.read_bytes().index(b"\xe5\xb7\x28")
    with pytest.raises(DataError, match=f"line 3: not UTF-8 at byte {byte} of the file"):
        list(rows.read_rows(path))


def test_case_77_a_file_without_rows_holds_no_tasks(tmp_path: Path) -> None:
    for content in ("", "\n \r\n", "[]", " [ ]\n"):
        path = tmp_path / "a.json"
        path.write_text(content, encoding="utf-8")
        found = read_tasks(path)
        assert (len(found), found.format) == (0, None)
    for name in ("a.jsonl", "a.parquet"):
        assert write_tasks(tmp_path / name, []) == 0
        assert read_tasks(tmp_path / name).tasks == ()


def test_case_78_a_path_with_blanks_works_and_a_missing_file_says_how_to_make_it(tmp_path: Path) -> None:
    folder = tmp_path / "two words é"
    folder.mkdir()
    assert len(read_tasks(write_rows(folder / "my tasks.jsonl", OWN))) == 1
    with pytest.raises(DataError, match=r"none\.jsonl: no such task file; write one with `mempo data convert`"):
        read_tasks(folder / "none.jsonl")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"a": 1}, {"a": ', r"line 1, field '\[1\]': not JSON, or the file is cut"),
        ('[{"a": 1}\n', "line 2: expected ',' of a JSON array, found the end of the file"),
        ('[{"a": 1} {"a": 2}]', "expected ',' of a JSON array, found '{'"),
        ('[{"a": 1}, 7]', r"field '\[1\]': each item of the array must be a JSON object"),
        ('[{"a": 1}]\n[]', "line 2: text follows the end of the array"),
        ('[{"a": NaN}]', "NaN is not JSON"),
    ],
)
def test_a_broken_array_is_an_error_with_its_place(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        list(rows.read_rows(path))


def test_an_item_of_an_array_is_named_by_line_and_index(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[\n" + json.dumps(HOTPOT) + ",\n" + json.dumps(HOTPOT) + "\n]", encoding="utf-8")
    with pytest.raises(DataError, match=r"line 3, field '\[1\]\._id'|line 3, field '\[1\]\.id'"):
        read_tasks(path)


@given(
    st.lists(
        st.dictionaries(st.sampled_from(("a", "é", "\n")), st.text(st.characters(exclude_categories=["Cs"]))),
        max_size=5,
    ),
    st.integers(1, 9),
    st.sampled_from((None, 1)),
    st.booleans(),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_an_array_reads_the_same_whatever_the_size_of_the_chunks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    items: list[dict[str, str]],
    size: int,
    indent: int | None,
    escaped: bool,
) -> None:
    path = tmp_path / "a.json"
    text = json.dumps(items, indent=indent, ensure_ascii=escaped)
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    with monkeypatch.context() as patch:
        patch.setattr(rows, "CHUNK_BYTES", size)
        found = list(rows.read_rows(path))
    assert [row.fields for row in found] == items
    # With an indent each item starts on the line of its brace; empty objects are written `{}`.
    starts = [number for number, line in enumerate(text.split("\n"), 1) if line.startswith(" {")]
    assert [row.line for row in found] == (starts if indent else [1] * len(items))


def test_a_long_array_is_not_held_in_memory(tmp_path: Path) -> None:
    import tracemalloc

    path = tmp_path / "a.json"
    item = json.dumps(HOTPOT | {"context": [["T", ["word " * 2_000]]]})  # 10 kB
    path.write_text("[" + ", ".join([item] * 2_000) + "]", encoding="utf-8")  # 20 MB
    tracemalloc.start()
    count = sum(1 for _ in rows.read_rows(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 2_000
    # A window of 1 MiB, doubled while an item is cut by its end: text, chunk and their join.
    assert peak < 8 << 20


def test_tasks_are_streamed_before_a_fault_further_down_is_met(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", OWN, OWN)
    tasks = stream_tasks(path)
    assert next(tasks)[1].id == "a"
    with pytest.raises(DataError):
        next(tasks)


def test_a_verl_file_must_be_named_parquet_and_a_task_must_ask_something(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"must end in \.parquet"):
        write_tasks(tmp_path / "a.jsonl", [], "verl")
    with pytest.raises(DataError, match="without a question"):
        write_tasks(tmp_path / "a.jsonl", [Task("t", ())])
    assert list(tmp_path.iterdir()) == []


def test_a_broken_parquet_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_tasks(path, [TASKS["verl"]])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="broken or cut"):
        read_tasks(path)


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
visible = words.filter(lambda text: bool(text.strip()))
# A gold answer that the scorer can match: it holds a letter or digit that normalisation keeps.
golds = words.map(lambda text: f"x{text}".replace(";", ",").replace("；", ","))
objectives = st.builds(
    Objective, visible, st.lists(golds, min_size=1, max_size=3).map(tuple), st.lists(words, max_size=2).map(tuple)
)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
metas = st.dictionaries(names, st.none() | st.integers() | st.lists(words, max_size=2), max_size=2)
tasks_strategy = st.lists(
    st.builds(Task, names, st.lists(objectives, min_size=1, max_size=4).map(tuple), words, metas),
    max_size=4,
    unique_by=lambda task: task.id,
)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
@given(tasks=tasks_strategy)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
def test_tasks_come_back_as_they_were_written(tmp_path: Path, name: str, tasks: list[Task]) -> None:
    assert write_tasks(tmp_path / name, tasks) == len(tasks)
    assert list(read_tasks(tmp_path / name)) == tasks


any_golds = st.text(st.sampled_from("ab ;；\n,.?é"), max_size=5)
any_objectives = st.builds(Objective, st.just("q"), st.lists(any_golds, max_size=3).map(tuple))


@given(st.lists(any_objectives, min_size=1, max_size=3).map(tuple))
def test_a_task_without_a_fatal_finding_scores_1_when_answered_with_its_gold(found: tuple[Objective, ...]) -> None:
    task = Task("t", found)
    if not any(finding.fatal for finding in check_task(task)):
        score = score_task(task.gold, task)
        assert (score.em, score.f1, score.count_ok) == (1.0, 1.0, True)


@given(st.lists(any_objectives.filter(lambda o: bool(o.answers)), min_size=1, max_size=3).map(tuple))
def test_a_task_whose_gold_does_not_score_1_has_a_fatal_finding(found: tuple[Objective, ...]) -> None:
    task = Task("t", found)
    score = score_task(task.gold, task)
    if score.em < 1 or not score.count_ok:
        assert any(finding.fatal for finding in check_task(task))


@pytest.mark.data
def test_the_real_files_hold_no_fault(shared_data: Path) -> None:
    expected = {"hotpotqa": 198, "2wikimultihopqa": 109, "musique": 133, "nq": 492, "popqa": 257, "bamboogle": 83}
    for name, count in expected.items():
        found = read_tasks(shared_data / "qa" / f"{name}.jsonl")
        assert (len(found), found.warnings) == (count, ())


@pytest.mark.data
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_real_tasks_of_several_questions_come_back_as_they_were(shared_data: Path, tmp_path: Path, name: str) -> None:
    for path in sorted((shared_data / "qa" / "multi").glob("*.jsonl")):
        tasks = read_tasks(path).tasks
        write_tasks(tmp_path / name, tasks)
        assert read_tasks(tmp_path / name).tasks == tasks


def test_reading_needs_pyarrow_only_for_parquet_and_says_which_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    path = tmp_path / "a.parquet"
    write_tasks(path, [TASKS["verl"]])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[data\]'"):
        read_tasks(path)
    assert len(read_tasks(write_rows(tmp_path / "a.jsonl", OWN))) == 1


def test_an_unknown_format_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown task format 'squad'; known: mempo, hotpotqa"):
        read_tasks(write_rows(tmp_path / "a.jsonl", OWN), "squad")


scrap = st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3)
junk = st.recursive(
    scrap, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2), max_leaves=4
)


@given(data=st.data(), name=st.sampled_from([*ROWS, "own", "multi", "ours"]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
def test_whatever_stands_in_a_field_the_row_is_a_task_or_a_data_error(
    tmp_path: Path, data: st.DataObject, name: str
) -> None:
    known = {"own": OWN, "multi": MULTI, "ours": render_verl(TASKS["verl"], 0), **ROWS}
    row: dict[str, Any] = json.loads(json.dumps(known[name]))
    here = row
    while True:  # go down to some field, and put anything there
        key = data.draw(st.sampled_from(sorted(here)))
        value = here[key]
        below = value[0] if isinstance(value, list) and value else value
        if not isinstance(below, dict) or data.draw(st.booleans()):
            break
        here = below
    here[key] = data.draw(junk)
    format = {"own": "mempo", "multi": "mempo", "ours": "verl"}.get(name, name)
    path = write_rows(tmp_path / "a.jsonl", row)
    found = read_tasks(path, format, lenient=True)
    assert len(found) + len(found.skipped) == 1
    write_tasks(tmp_path / "b.jsonl", found)
    assert read_tasks(tmp_path / "b.jsonl").tasks == found.tasks


@given(
    st.binary(max_size=60)
    | st.binary(max_size=60).map(lambda tail: b"\x1f\x8b" + tail)
    | st.binary(max_size=60).map(lambda tail: b"[" + tail)
    | st.binary().map(lambda t: b"PAR1" + t)
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_bytes_are_a_task_file_or_a_data_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    with contextlib.suppress(DataError):  # any other error fails
        assert read_tasks(path).tasks == ()


def test_the_rows_in_the_documentation_are_read(repository: Path, tmp_path: Path) -> None:
    text = (repository / "docs" / "data.md").read_text(encoding="utf-8")
    found = [json.loads(block) for block in re.findall(r"^    (\{\"id\".*?\})\n\n", text, re.MULTILINE | re.DOTALL)]
    tasks = read_tasks(write_rows(tmp_path / "a.jsonl", *found)).tasks
    assert [len(task.objectives) for task in tasks] == [1, 2]


def test_a_file_of_broken_lines_alone_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{\n}\n", encoding="utf-8")
    found = read_tasks(path, lenient=True)
    assert (len(found), [error.line for error in found.skipped]) == (0, [1, 2])


def test_a_row_that_is_left_out_gives_no_warning(tmp_path: Path) -> None:
    row = MULTI | {"answers": [["Ann", "Ann; Bea"], [""]]}
    found = read_tasks(write_rows(tmp_path / "a.jsonl", row), lenient=True)
    assert ([error.field for error in found.skipped], found.warnings) == (["answers[1]"], ())


@pytest.mark.parametrize("content", ["[" + json.dumps(HOTPOT) + "]", json.dumps(OWN) + "\n"])
def test_a_cut_gzip_stream_is_an_error_wherever_it_is_cut(tmp_path: Path, content: str) -> None:
    whole = gzip.compress(content.encode())
    for length in range(2, len(whole)):
        (tmp_path / "a.gz").write_bytes(whole[:length])
        with pytest.raises(DataError, match="gzip stream is broken or cut"):
            read_tasks(tmp_path / "a.gz", lenient=True)
