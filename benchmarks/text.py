"""Throughput of parsing and scoring, as ratios to straightforward versions of the official scripts.

    python benchmarks/text.py                 # needs the recorded runs at ../shared/data or $MEMPO_DATA
    python benchmarks/text.py --repeats 50 --json

Both sides do the same work on the same recorded turns and answers, and their results are compared
before anything is timed. A ratio above 1 means that mempo is faster. Each repetition times both sides,
one right after the other; the figures are medians over the repetitions. Nothing is random.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import re
import statistics
import string
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tyro

from mempo import __version__
from mempo.rewards import Mode, answers, score_answer
from mempo.text.tags import parse


@dataclass(frozen=True)
class Args:
    data: Path = Path(os.environ.get("MEMPO_DATA", "../shared/data"))
    """Folder that holds `trajectories/`."""
    repeats: int = 20
    """Repetitions of each measurement."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class Result:
    """One comparison; ratio = mempo's throughput / the straightforward version's."""

    name: str
    items: int
    mempo_per_second: float
    plain_per_second: float
    ratio: float
    ratio_min: float
    ratio_max: float


Pair = tuple[str, list[str]]
"""An answer and the gold aliases."""


# The recorded runs.


def read_rows(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise SystemExit(
            f"{path}: {error.strerror}. Recorded runs of Search-R1 and WebDancer are not part of this repository: "
            "name the folder that holds trajectories/ with --data or $MEMPO_DATA"
        ) from None


REPLY = re.compile(r"\n*<information>Doc 1\(.*?</information>\n*|\nMy previous action is invalid\..*?\n", re.DOTALL)
SEARCH = re.compile(r"<search>(.*?)</search>", re.DOTALL)


def recorded_turns(folder: Path) -> list[str]:
    """The policy's own texts, each with a memory, and with Search-R1's searches written as tool calls."""
    turns = [
        SEARCH.sub(
            lambda m: f"<tool_call>{json.dumps({'name': 'search', 'arguments': {'query': m[1]}})}</tool_call>", text
        )
        for run in read_rows(folder / "searchr1_wiki18.jsonl")
        for text in REPLY.split(run["response"])
        if text.strip()
    ]
    for run in read_rows(folder / "webdancer_tool_call.jsonl"):
        turns += [message["content"] for message in run["messages"] if message["role"] == "assistant"]
    return [f"<mem>what is known so far</mem>\n{turn}" for turn in turns]


def recorded_answers(folder: Path) -> list[Pair]:
    pairs = [
        (run["recorded"]["pred"] or "", run["golden_answers"]) for run in read_rows(folder / "searchr1_wiki18.jsonl")
    ]
    for run in read_rows(folder / "webdancer_tool_call.jsonl"):
        pairs.append((run["oracle"]["final_answer"] or "", run["answer"][0]))
    return pairs


# The straightforward versions: what the official scripts do, with patterns and loops.


def plain_normalise(text: str) -> str:
    exclude = set(string.punctuation)
    bare = "".join(character for character in text.lower() if character not in exclude)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def plain_f1(prediction: str, gold: str) -> float:
    predicted, wanted = plain_normalise(prediction), plain_normalise(gold)
    if predicted != wanted and (predicted in ("yes", "no", "noanswer") or wanted in ("yes", "no", "noanswer")):
        return 0.0
    words, gold_words = predicted.split(), wanted.split()
    same = sum((Counter(words) & Counter(gold_words)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(words), same / len(gold_words)
    return 2 * precision * recall / (precision + recall)


def plain_hotpot(prediction: str, golds: Sequence[str]) -> tuple[float, float]:
    em = max(float(plain_normalise(prediction) == plain_normalise(gold)) for gold in golds)
    return em, max(plain_f1(prediction, gold) for gold in golds)


def plain_mem1_words(text: str) -> str:
    text = text.lower()
    for mark in string.punctuation:
        text = text.replace(mark, " ")
    return re.sub(r"\s+", " ", text).strip()


def plain_mem1(prediction: str, golds: Sequence[str]) -> tuple[float, float]:
    em = f1 = 0.0
    for gold in golds:
        predicted, wanted = plain_mem1_words(prediction), plain_mem1_words(gold)
        em = max(em, float(predicted == wanted))
        words, gold_words = set(predicted.split()), set(wanted.split())
        same = len(words & gold_words)
        if same:
            precision, recall = same / len(words), same / len(gold_words)
            f1 = max(f1, 2 * precision * recall / (precision + recall))
    return em, f1


PlainTurn = tuple[bool, str | None, Any]
"""Whether the format is right, the answer, the call."""


TAGS = ("mem", "think", "tool_call", "answer")
FOLLOWS = {
    ("start", "<mem>"): "in mem",
    ("in mem", "</mem>"): "after mem",
    ("after mem", "<think>"): "in think",
    ("in think", "</think>"): "after think",
    ("after think", "<tool_call>"): "in tool_call",
    ("after think", "<answer>"): "in answer",
    ("in tool_call", "</tool_call>"): "end",
    ("in answer", "</answer>"): "end",
}


def plain_format(text: str) -> bool:
    """Balanced tags, then a walk over the pieces between tags, ended by the first fault: Search-R1's way."""
    for tag in TAGS:
        if len(re.findall(f"<{tag}>", text)) != len(re.findall(f"</{tag}>", text)):
            return False
    state = "start"
    for piece in re.split(r"(</?(?:mem|think|tool_call|answer)>)", text):
        if re.match(r"</?(?:mem|think|tool_call|answer)>", piece):
            if (state, piece) not in FOLLOWS:
                return False
            state = FOLLOWS[state, piece]
        elif piece.strip() and not state.startswith("in "):
            return False
    return state == "end"


def plain_parse(text: str) -> PlainTurn:
    outside = re.sub(r"<(mem|think)>.*?</\1>", "", text, flags=re.DOTALL)
    action = re.search(r"<(tool_call|answer)>(.*?)</\1>", outside, re.DOTALL)
    if action is None:
        return False, None, None
    if action[1] == "answer":
        return plain_format(text), action[2].strip(), None
    try:
        call = json.loads(action[2])
        return plain_format(text), None, (call["name"], call["arguments"])
    except (ValueError, KeyError, TypeError):
        return False, None, None


def mempo_parse(text: str) -> PlainTurn:
    turn = parse(text)
    return turn.well_formed, turn.answer, None if turn.call is None else (turn.call.name, turn.call.arguments)


# Measurement.


def seconds(function: Callable[[], object], before: Callable[[], object]) -> float:
    before()
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def compare(
    name: str,
    items: int,
    ours: Callable[[], object],
    plain: Callable[[], object],
    repeats: int,
    before: Callable[[], object] = gc.collect,
) -> Result:
    """Time both sides `repeats` times, alternating; `before` runs untimed ahead of each."""
    times = [(seconds(ours, before), seconds(plain, before)) for _ in range(repeats + 1)][1:]  # the first warms up
    ratios = [slow / fast for fast, slow in times]
    return Result(
        name=name,
        items=items,
        mempo_per_second=items / statistics.median(fast for fast, _ in times),
        plain_per_second=items / statistics.median(slow for _, slow in times),
        ratio=statistics.median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
    )


def score_all(
    score: Callable[[str, list[str]], tuple[float, float]], pairs: Sequence[Pair]
) -> list[tuple[float, float]]:
    return [score(prediction, golds) for prediction, golds in pairs]


def check_equal(ours: Sequence[object], plain: Sequence[object], what: str) -> None:
    different = sum(one != other for one, other in zip(ours, plain, strict=True))
    if different:
        raise SystemExit(f"{what}: {different} of {len(ours)} results differ, so there is nothing to compare")


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    folder = args.data / "trajectories"
    turns, pairs = recorded_turns(folder), recorded_answers(folder)
    answered = [pair for pair in pairs if pair[0] and ";" not in pair[0]]

    check_equal([mempo_parse(turn) for turn in turns], [plain_parse(turn) for turn in turns], "parsing")
    results = [
        compare(
            "parse",
            len(turns),
            lambda: [mempo_parse(turn) for turn in turns],
            lambda: [plain_parse(turn) for turn in turns],
            args.repeats,
        )
    ]
    modes: tuple[tuple[Mode, Callable[[str, Sequence[str]], tuple[float, float]]], ...] = (
        ("hotpot", plain_hotpot),
        ("mem1", plain_mem1),
    )
    for mode, plain in modes:
        ours_now = partial(score_all, partial(score_answer, mode=mode), answered)
        plain_now = partial(score_all, plain, answered)
        check_equal(ours_now(), plain_now(), mode)
        for label, before in (("nothing cached", answers._cached_normal.cache_clear), ("seen before", gc.collect)):
            results.append(compare(f"score {mode}, {label}", len(answered), ours_now, plain_now, args.repeats, before))
    report(results, args)


def report(results: Sequence[Result], args: Args) -> None:
    versions = {"mempo": __version__, "python": platform.python_version(), "machine": platform.machine()}
    command = " ".join(["python", *sys.argv])
    if args.json:
        rows = [asdict(result) for result in results]
        print(json.dumps({"command": command, "versions": versions, "seeds": [], "results": rows}, indent=2))
        return
    print(f"$ {command}\n{', '.join(f'{name} {version}' for name, version in versions.items())}; no seeds\n")
    print(f"{'':<28}{'items':>7}{'mempo/s':>11}{'plain/s':>11}{'ratio':>8}   (smallest, largest)")
    for row in results:
        speeds = f"{row.mempo_per_second:>11,.0f}{row.plain_per_second:>11,.0f}{row.ratio:>8.2f}"
        print(f"{row.name:<28}{row.items:>7}{speeds}   ({row.ratio_min:.2f}, {row.ratio_max:.2f})")


if __name__ == "__main__":
    main()
