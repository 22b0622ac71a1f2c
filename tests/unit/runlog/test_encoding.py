"""What is written is standard JSON, and reads back as it was."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from typing import NoReturn

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.runlog.strategies import a_trajectory, jsons, texts, trajectories

from mempo.core import Trajectory
from mempo.runlog import AnyRecord, EventRecord, MetricsRecord, TrajectoryRecord
from mempo.runlog.encoding import parse_record, render_record


def refuse(name: str) -> NoReturn:
    raise AssertionError(f"{name} is not JSON")


def assert_same(record: AnyRecord, back: AnyRecord) -> None:
    # repr tells types (True from 1, 1.0 from 1), -0.0 and NaN, which equality does not.
    assert repr(back) == repr(record)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trajectory=trajectories)
def test_any_trajectory_survives_the_way_to_a_line_and_back(trajectory: Trajectory) -> None:
    record = TrajectoryRecord(trajectory=trajectory, step=3, split="eval")
    line = render_record(record)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert_same(record, parse_record(line))
    json.loads(line, parse_constant=refuse)


@settings(max_examples=100, deadline=None)
@given(values=st.dictionaries(texts, st.floats(), max_size=5), details=st.dictionaries(texts, jsons, max_size=3))
def test_any_metrics_and_event_survive(values: dict[str, float], details: dict[str, object]) -> None:
    for record in (MetricsRecord(step=1, values=values), EventRecord(kind="warning", message="m", details=details)):
        assert_same(record, parse_record(render_record(record)))


def test_a_trajectory_without_nan_reads_back_equal() -> None:
    trajectory = a_trajectory()
    back = parse_record(render_record(TrajectoryRecord(trajectory=trajectory)))
    assert isinstance(back, TrajectoryRecord)
    assert back.trajectory == trajectory
    assert type(back.trajectory.turns[0].response_ids) is tuple


def test_a_metric_that_is_not_a_number_is_visible_in_the_line_and_comes_back() -> None:
    record = MetricsRecord(step=2, values={"loss": math.nan, "kl": math.inf, "ratio": -math.inf, "reward": 0.5})
    plain = json.loads(render_record(record), parse_constant=refuse)
    assert plain["values"] == {"loss": None, "kl": None, "ratio": None, "reward": 0.5}
    assert plain["nonfinite"] == [[["values", "loss"], "nan"], [["values", "kl"], "inf"], [["values", "ratio"], "-inf"]]
    back = parse_record(render_record(record))
    assert isinstance(back, MetricsRecord)
    assert math.isnan(back.values["loss"])
    assert (back.values["kl"], back.values["ratio"], back.values["reward"]) == (math.inf, -math.inf, 0.5)


def test_a_reward_that_is_not_a_number_is_told_from_one_that_was_not_computed() -> None:
    for reward, shown in ((None, "None"), (math.nan, "nan")):
        back = parse_record(render_record(TrajectoryRecord(trajectory=replace(a_trajectory(), reward=reward))))
        assert isinstance(back, TrajectoryRecord)
        assert repr(back.trajectory.reward) == shown


def test_half_a_surrogate_pair_is_kept_exactly_even_beside_nan() -> None:
    turn = replace(a_trajectory().turns[0], text="a\ud83d", answer="\udc00", logprobs=(math.nan,))
    record = TrajectoryRecord(trajectory=replace(a_trajectory(), turns=(turn,)))
    line = render_record(record)
    assert rb'"a\ud83d"' in line
    assert_same(record, parse_record(line))


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"[]\n",
        b"null\n",
        b"\x00\x00\x00\x00\n",
        b'{"type":"metrics","step":1,"values":{"a":',
        b'{"type":"unheard_of"}\n',
        b'{"step":1,"values":{}}\n',
        b'{"type":"metrics","step":"1","values":{}}\n',
        b'{"type":"metrics","step":1,"values":{"a":null}}\n',
        b'{"type":"metrics","step":1,"values":{},"nonfinite":[[["values","a","b"],"nan"]]}\n',
        b'{"type":"metrics","step":1,"values":{},"nonfinite":[[[],"nan"]]}\n',
        b'{"type":"metrics","step":1,"values":{"a":1},"nonfinite":[[["values","a"],"many"]]}\n',
        b'{"type":"event","kind":"' + b"\xff" * 9 + b'"}\n',
        b"[" * 100_000 + b"\n",
    ],
)
def test_a_line_that_is_no_record_is_a_value_error(line: bytes) -> None:
    with pytest.raises(ValueError):
        parse_record(line)


def test_no_cut_of_a_line_is_taken_for_a_record() -> None:
    turn = replace(a_trajectory().turns[0], logprobs=(math.nan, -1.5))
    line = render_record(TrajectoryRecord(trajectory=replace(a_trajectory(), turns=(turn,))))
    for end in random.Random(0).sample(range(len(line) - 1), 200):
        with pytest.raises(ValueError):
            parse_record(line[:end])
