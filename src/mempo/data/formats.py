"""What each format of the field calls its fields, and the task that a row of it means.

| format           | where from                      | id                       | gold answers                  |
|------------------|---------------------------------|--------------------------|-------------------------------|
| mempo            | `write_tasks`                   | `id`                     | `answers`, lists for K > 1    |
| hotpotqa         | raw distractor or fullwiki      | `_id`                    | `answer`                      |
| 2wikimultihopqa  | raw                             | `_id`                    | `answer`                      |
| musique          | raw                             | `id`                     | `answer`, `answer_aliases`    |
| nq_open          | raw                             | file's name and line     | `answer` (a list)             |
| search_r1        | Search-R1, FlashRAG             | `id`, or name and line   | `golden_answers`              |
| verl             | MEM1, Search-R1, `write_tasks`  | `extra_info`             | `reward_model.ground_truth`   |

Questions of raw datasets are stripped of blanks around them; contexts are left out (they belong in
a corpus); what else a row says of its question goes to `Task.meta`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import zip_longest
from pathlib import Path

from mempo.core import DataError, Json, Objective, Task
from mempo.core.files import parse_json, render_json
from mempo.data.rows import Row


class TaskFormat(StrEnum):
    """How a row of a task file is written."""

    MEMPO = "mempo"
    HOTPOTQA = "hotpotqa"
    TWO_WIKI = "2wikimultihopqa"
    MUSIQUE = "musique"
    NQ_OPEN = "nq_open"
    SEARCH_R1 = "search_r1"
    VERL = "verl"


def detect_format(row: Row) -> TaskFormat:
    """Which format has the fields of this row. Raises DataError that names the known ones."""
    fields = row.fields
    if "reward_model" in fields:
        return TaskFormat.VERL
    if "golden_answers" in fields:
        return TaskFormat.SEARCH_R1
    if "answers" in fields:
        return TaskFormat.MEMPO
    if "paragraphs" in fields or "question_decomposition" in fields:
        return TaskFormat.MUSIQUE
    if "evidences" in fields:
        return TaskFormat.TWO_WIKI
    if "supporting_facts" in fields or "_id" in fields:
        return TaskFormat.HOTPOTQA
    if isinstance(fields.get("answer"), list):
        return TaskFormat.NQ_OPEN
    known = ", ".join(TaskFormat)
    raise row.error(f"the fields are of no known format ({known}); give the format", value=sorted(fields))


def parse_task(row: Row, format: TaskFormat) -> Task:
    """The task that a row means. Raises DataError with its place; values are not judged here."""
    return _PARSERS[format](row)


def render_task(task: Task) -> dict[str, Json]:
    """A task as a row of our own JSON lines; `parse_task` gives it back unchanged.

    >>> render_task(Task("t", (Objective("Who?", ("A", "B")),), source="demo"))
    {'id': 't', 'question': 'Who?', 'answers': ['A', 'B'], 'supporting_titles': [], 'source': 'demo'}
    """
    if not task.objectives:
        raise DataError("a task without a question cannot be written", field="id", value=task.id)
    row: dict[str, Json]
    if len(task.objectives) == 1:
        [objective] = task.objectives
        row = {
            "id": task.id,
            "question": objective.question,
            "answers": list(objective.answers),
            "supporting_titles": list(objective.supporting_titles),
        }
    else:
        row = {
            "id": task.id,
            "n": len(task.objectives),
            "question": task.question,
            "questions": [objective.question for objective in task.objectives],
            "answers": [list(objective.answers) for objective in task.objectives],
            "supporting_titles": [list(objective.supporting_titles) for objective in task.objectives],
        }
    return row | {"source": task.source} | ({"meta": dict(task.meta)} if task.meta else {})


def render_verl(task: Task, index: int) -> dict[str, Json]:
    """A task as a row for verl: MEM1's columns, and in `extra_info` what they cannot say."""
    return {
        "data_source": task.source,
        "prompt": [{"role": "user", "content": task.question}],
        "ability": "fact-reasoning",
        "reward_model": {
            "style": "rule",
            "ground_truth": {"target": [list(objective.answers) for objective in task.objectives]},
        },
        "extra_info": {
            "index": index,
            "id": task.id,
            "questions": [objective.question for objective in task.objectives],
            "supporting_titles": [list(objective.supporting_titles) for objective in task.objectives],
            # Rows of one parquet column have one shape; what differs from task to task travels as text.
            "meta": render_json(dict(task.meta)),
        },
    }


_OWN_FIELDS = frozenset(("id", "n", "question", "questions", "answers", "supporting_titles", "source", "meta"))


def _parse_mempo(row: Row) -> Task:
    several = row.get("questions") is not None
    questions = row.texts("questions") if several else (row.text("question"),)
    answers = row.text_lists("answers") if several else (row.texts("answers"),)
    titles = row.text_lists("supporting_titles") if several else (row.texts("supporting_titles"),)
    task = Task(
        row.text("id"), _objectives(row, questions, answers, titles), row.optional_text("source"), _own_meta(row)
    )
    if several and row.get("question") not in (None, task.question):
        raise row.error(
            "differs from its `questions` joined, which is what would be asked", "question", row.get("question")
        )
    if row.get("n") not in (None, len(questions)):
        raise row.error(f"is not the number of questions, {len(questions)}", "n", row.get("n"))
    return task


def _own_meta(row: Row) -> dict[str, Json]:
    """`meta` and the fields that we do not know, which are kept there."""
    given = row.get("meta")
    if given is not None and not isinstance(given, Mapping):
        raise row.error("must be an object", "meta", given)
    meta = dict(given or {})
    for name, value in row.fields.items():
        if name in _OWN_FIELDS:
            continue
        if name in meta and meta[name] != value:
            raise row.error("stands in the row and, with another value, in its `meta`", name, value)
        meta[name] = value
    return meta


def _parse_hotpot(row: Row) -> Task:
    return _multi_hop(row, "hotpotqa")


def _parse_two_wiki(row: Row) -> Task:
    return _multi_hop(row, "2wikimultihopqa")


def _multi_hop(row: Row, source: str) -> Task:
    facts = row.get("supporting_facts") or []
    if not isinstance(facts, list) or not all(
        isinstance(fact, list) and fact and isinstance(fact[0], str) for fact in facts
    ):
        raise row.error("must be a list of [title, sentence]", "supporting_facts", facts)
    objective = Objective(row.text("question").strip(), (row.text("answer"),), _distinct(fact[0] for fact in facts))
    return Task(row.text("_id"), (objective,), source, _kept(row, "type", "level", "evidences"))


def _parse_musique(row: Row) -> Task:
    if row.get("answerable") is False:
        raise row.error("a question without an answer is no task; a lenient reader leaves it out", "answerable", False)
    paragraphs, steps = row.get("paragraphs") or [], row.get("question_decomposition") or []
    found = _objects(row, "paragraphs", paragraphs, title=str, is_supporting=bool)
    titles = _distinct(paragraph["title"] for paragraph in found if paragraph["is_supporting"])
    answers = _distinct((row.text("answer"), *row.texts("answer_aliases")))
    meta: dict[str, Json] = {}
    if steps:
        found = _objects(row, "question_decomposition", steps, question=str, answer=str)
        pairs = [[step["question"], step["answer"]] for step in found]
        meta = {"hops": len(pairs), "decomposition": pairs}
    return Task(row.text("id"), (Objective(row.text("question").strip(), answers, titles),), "musique", meta)


def _parse_nq_open(row: Row) -> Task:
    return Task(_place_id(row), (Objective(row.text("question").strip(), row.texts("answer")),), "nq")


def _parse_search_r1(row: Row) -> Task:
    objective = Objective(row.text("question").strip(), row.texts("golden_answers"))
    task_id = row.optional_text("id") or _place_id(row)
    source = row.optional_text("data_source", default=_stem(row))
    return Task(task_id, (objective,), source, _kept(row, "metadata"))


def _parse_verl(row: Row) -> Task:
    source = row.optional_text("data_source")
    answers = _verl_answers(row)
    if row.get("extra_info.questions") is not None:  # written by `render_verl`
        questions, titles = row.texts("extra_info.questions"), row.text_lists("extra_info.supporting_titles")
        try:
            meta = parse_json(row.optional_text("extra_info.meta", default="{}"))
        except ValueError as error:
            raise row.error(f"not JSON: {error}", "extra_info.meta", row.get("extra_info.meta")) from error
        if not isinstance(meta, dict):
            raise row.error("must be a JSON object", "extra_info.meta", meta)
        return Task(row.text("extra_info.id"), _objectives(row, questions, answers, titles), source, meta)
    questions = _split_questions(row, _verl_question(row), len(answers))
    split, index = row.get("extra_info.split"), row.get("extra_info.index")
    task_id = f"{source}:{split}:{index}" if split is not None and index is not None else _place_id(row)
    return Task(task_id, _objectives(row, questions, answers, ()), source, _kept(row, "ability"))


def _verl_answers(row: Row) -> tuple[tuple[str, ...], ...]:
    """One tuple of aliases a question. A text is one alias; a list of texts the aliases of one question."""
    field = "reward_model.ground_truth"
    truth = row.get(field)
    if isinstance(truth, Mapping):
        field, truth = f"{field}.target", truth.get("target")
    if isinstance(truth, str):
        return ((truth,),)
    if isinstance(truth, list) and truth and all(isinstance(item, str) for item in truth):
        return (row.texts(field),)
    if truth is None:
        raise row.error("is missing", field)
    return row.text_lists(field)


def _verl_question(row: Row) -> str:
    """The question column, or what follows the last `Question:` of the last user message, or all of it."""
    for field in ("question", "extra_info.question"):
        if row.get(field) is not None:
            return row.text(field).strip()
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        said = [
            message.get("content")
            for message in prompt
            if isinstance(message, Mapping) and message.get("role") == "user"
        ]
        if said and isinstance(said[-1], str):
            return str(said[-1]).rpartition("Question:")[2].strip()
    raise row.error("holds no user message to take the question from", "prompt", prompt)


def _split_questions(row: Row, question: str, count: int) -> tuple[str, ...]:
    """Undo the joining, which ends each question with `?` and puts `; ` between them."""
    questions = re.split(r"(?<=\?); ", question) if count > 1 else [question]
    if len(questions) != count:
        raise row.error(f"holds {len(questions)} questions for {count} gold answers", "prompt", question)
    return tuple(questions)


def _objectives(
    row: Row, questions: Sequence[str], answers: Sequence[tuple[str, ...]], titles: Sequence[tuple[str, ...]]
) -> tuple[Objective, ...]:
    if len(answers) != len(questions):
        raise row.error(f"{len(questions)} questions have {len(answers)} lists of answers", "answers", answers)
    if titles and len(titles) != len(questions):
        raise row.error(f"{len(questions)} questions have {len(titles)} lists of titles", "supporting_titles", titles)
    parts = zip_longest(questions, answers, titles, fillvalue=())
    return tuple(Objective(str(question), tuple(golds), tuple(found)) for question, golds, found in parts)


def _objects(row: Row, field: str, value: Json, **types: type) -> list[Mapping[str, Json]]:
    """A list of objects that have all these fields, each of its type."""
    if isinstance(value, list) and all(
        isinstance(item, Mapping) and all(isinstance(item.get(name), kind) for name, kind in types.items())
        for item in value
    ):
        return value
    wanted = " and ".join(f"{name} ({kind.__name__})" for name, kind in types.items())
    raise row.error(f"must be a list of objects with {wanted}", field, value)


def _kept(row: Row, *fields: str) -> dict[str, Json]:
    return {field: row.get(field) for field in fields if row.get(field) is not None}


def _distinct(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))


def _stem(row: Row) -> str:
    """`NQ-open.dev` of `data/NQ-open.dev.jsonl.gz`."""
    return Path(Path(row.file).name.removesuffix(".gz")).stem


def _place_id(row: Row) -> str:
    return f"{_stem(row)}:{row.place.strip('[].') or row.line}"


_PARSERS: dict[TaskFormat, Callable[[Row], Task]] = {
    TaskFormat.MEMPO: _parse_mempo,
    TaskFormat.HOTPOTQA: _parse_hotpot,
    TaskFormat.TWO_WIKI: _parse_two_wiki,
    TaskFormat.MUSIQUE: _parse_musique,
    TaskFormat.NQ_OPEN: _parse_nq_open,
    TaskFormat.SEARCH_R1: _parse_search_r1,
    TaskFormat.VERL: _parse_verl,
}
