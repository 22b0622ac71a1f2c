"""The experiment on the memory advantage: its controls, its statistics, and a small run of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
from benchmarks.learning import ARMS, GRPO, REGIMES, Args, Cell, Result

from benchmarks import learning
from mempo.config import load_config
from mempo.core import Group, Objective, StopReason, Task, Trajectory, Turn
from mempo.core.files import render_json

TASK = Task("t", (Objective("Who?", ("Homer",)),))


def result(seed: int, exact: Sequence[float], arm: str = GRPO, format: float = 1.0, updates: int = 20) -> Result:
    """A run that was evaluated every ten updates; `format` is that of the last evaluation."""
    evaluations = [{"updates": 10.0 * i, "exact": value, "format": 1.0} for i, value in enumerate(exact)]
    evaluations[-1]["format"] = format
    return Result(Cell(arm, "k2-g8", seed, updates, 10, 5, ()), None, {}, evaluations)


def test_shuffling_permutes_the_rewards_of_a_group_and_leaves_all_else() -> None:
    rewards: list[list[float | None]] = [[0.1, None, 0.2], [0.3, 0.4, 0.5], [None, 0.6, 0.7]]
    turns = [tuple(Turn(i, f"{i}", memory_reward=reward) for i, reward in enumerate(row)) for row in rewards]
    group = Group(TASK, tuple(Trajectory(TASK, i, row, StopReason.ANSWERED, 0) for i, row in enumerate(turns)))

    mixed = learning.shuffled(group, seed=0)

    found = [[turn.memory_reward for turn in trajectory.turns] for trajectory in mixed.trajectories]
    paid = [reward for row in found for reward in row if reward is not None]
    assert sorted(paid) == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    assert paid != sorted(paid)
    assert [[reward is None for reward in row] for row in found] == [[r is None for r in row] for row in rewards]
    back = [
        replace(t, turns=tuple(replace(turn, memory_reward=r) for turn, r in zip(t.turns, row, strict=True)))
        for t, row in zip(mixed.trajectories, rewards, strict=True)
    ]
    assert tuple(back) == group.trajectories
    assert learning.shuffled(group, seed=0) == mixed


def test_shuffling_by_turn_leaves_every_reward_at_a_turn_of_its_index() -> None:
    rewards = [[index + rollout / 10 for index in range(3)] for rollout in range(8)]
    turns = [tuple(Turn(i, f"{i}", memory_reward=reward) for i, reward in enumerate(row)) for row in rewards]
    group = Group(TASK, tuple(Trajectory(TASK, i, row, StopReason.ANSWERED, 0) for i, row in enumerate(turns)))
    found = [[turn.memory_reward or 0.0 for turn in t.turns] for t in learning.shuffled(group, 0, True).trajectories]
    for column in range(3):
        assert sorted(row[column] for row in found) == [row[column] for row in rewards]
    assert found != rewards
    assert len({round(row[1] - row[0], 5) for row in found}) > 1  # not whole trajectories: each index by itself


def test_the_area_is_the_mean_height_of_the_curve() -> None:
    # Ten updates at (0 + 0.4) / 2 and ten at (0.4 + 0.8) / 2.
    assert result(0, [0.0, 0.4, 0.8]).area == pytest.approx((0.2 + 0.6) / 2)


@pytest.mark.parametrize(
    ("run", "collapsed"),
    [
        (result(0, [0.3, 0.2, 0.3]), False),  # it came back
        (result(0, [0.3, 0.4, 0.2]), True),
        (result(0, [0.3, 0.4, 0.5], format=0.89), True),
        (result(0, [0.3, 0.4, 0.5], updates=30), True),  # it broke off before update 30
    ],
)
def test_a_run_collapsed_where_it_ended_below_its_start_lost_format_or_broke_off(run: Result, collapsed: bool) -> None:
    assert run.collapsed is collapsed


def test_differences_are_taken_between_runs_of_one_seed() -> None:
    base = [result(0, [0.1, 0.2]), result(1, [0.1, 0.6]), result(2, [0.1, 0.9])]
    arm = [result(1, [0.1, 0.7]), result(0, [0.1, 0.3]), result(2, [0.1, 1.0]), result(3, [0.1, 0.0])]
    found = learning.difference(arm, base, lambda r: r.end["exact"])
    assert found is not None
    # All pairs differ by 0.1, though the runs themselves lie far apart: no spread is left. Seed 3 has no pair.
    assert [found.mean, *found.interval] == pytest.approx([0.1, 0.1, 0.1])
    assert learning.difference(arm[:2], base, lambda r: r.end["exact"]) is None  # two pairs say too little


def test_intervals_of_a_few_seeds_are_as_wide_as_students_t_makes_them() -> None:
    base = [result(seed, [0.0, 0.0]) for seed in range(3)]
    arm = [result(seed, [0.0, value]) for seed, value in enumerate((0.1, 0.2, 0.3))]
    found = learning.difference(arm, base, lambda r: r.end["exact"])
    assert found is not None
    # Mean .2, deviation .1: 4.303 (t of two degrees of freedom at 97.5 %) times .1 / sqrt(3) to either side.
    assert [found.mean, *found.interval] == pytest.approx([0.2, 0.2 - 0.24841, 0.2 + 0.24841], abs=1e-5)


def test_the_summary_counts_regimes_where_an_arm_is_better_and_where_it_may_be_worse(
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = [result(seed, [0.1, 0.2, 0.5]) for seed in (0, 1, 2)]
    better = [result(seed, [0.1, 0.2, 0.6], "prefix-1") for seed in (0, 1, 2)]
    even = [result(seed, [0.1, 0.2, 0.49], "turn-1") for seed in (0, 1, 2)]  # within 0.03
    worse = [result(seed, [0.1, 0.2, 0.45], "none-1") for seed in (0, 1, 2)]
    collapsed = [result(seed, [0.1, 0.2, 0.5], "none-0.3", format=0.5) for seed in (0, 1, 2)]
    learning.print_summary([*base, *better, *even, *worse, *collapsed])
    ends = {line.split(" | ")[0][2:]: line.split(" | ")[-2:] for line in capsys.readouterr().out.splitlines()[5:]}
    assert {arm: [int(cell.strip(" |")) for cell in cells] for arm, cells in ends.items()} == {
        "prefix-1": [1, 0],
        "turn-1": [0, 0],
        "none-1": [0, 1],
        "none-0.3": [0, 1],
    }


def test_seeds_of_the_first_four_arms_are_run_together() -> None:
    cells = learning.plan(Args(Path("results.jsonl"), arms=tuple(ARMS)[:5], seeds=(0, 1)))
    order = [(cell.seed, cell.arm) for cell in cells]
    first, fifth = tuple(ARMS)[:4], tuple(ARMS)[4]
    assert order == [(seed, arm) for seed in (0, 1) for arm in first] + [(0, fifth), (1, fifth)]


def test_an_arm_that_is_not_known_is_named() -> None:
    with pytest.raises(SystemExit, match="unknown arm 'gppo'; known are grpo"):
        learning.plan(Args(Path("results.jsonl"), arms=("gppo",)))


def test_every_arm_and_every_regime_is_a_valid_config() -> None:
    arms = learning.plan(Args(Path("results.jsonl"), seeds=(3,)))
    regimes = learning.plan(Args(Path("results.jsonl"), arms=("visible-kl-1",), regimes=tuple(REGIMES), seeds=(3,)))
    assert {cell.arm for cell in arms if learning.settings(cell).advantage.alpha == 0} == {
        GRPO,
        "grpo-hot",
        "grpo-replay",
    }
    assert {learning.settings(cell).rollout.group_size for cell in regimes} == {4, 8}


def test_runs_of_other_settings_or_weights_than_the_names_stand_for_now_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    args = Args(out, arms=(GRPO,), seeds=(0,))
    cell = learning.plan(args)[0]
    now = learning.recipe(cell)
    out.write_text(render_json(asdict(replace(result(0, [0.1, 0.2]), cell=cell, recipe=now))) + "\n")
    learning.main(args)  # it is there
    out.write_text(out.read_text().replace(now, "another"))
    with pytest.raises(SystemExit, match=r"1 runs of .*grpo in k2-g8, had other settings or other starting weights"):
        learning.main(args)
    assert learning.recipe(replace(cell, overrides=())) != now
    assert learning.recipe(replace(cell, regime="k2-hops")) != now


def test_the_guarded_preset_is_the_arm_that_was_measured() -> None:
    measured = learning.settings(learning.plan(Args(Path("results.jsonl"), arms=("fade-strict-1",), seeds=(0,)))[0])
    guarded = load_config("guarded")
    assert (guarded.advantage, guarded.memory) == (measured.advantage, measured.memory)


@pytest.mark.slow
def test_a_worker_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import multiprocessing, os, time\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "from benchmarks.learning import end_with_parent\n"
        "if __name__ == '__main__':\n"
        "    pool = ProcessPoolExecutor(1, multiprocessing.get_context('spawn'), end_with_parent)\n"
        "    print(pool.submit(os.getpid).result(), flush=True)\n"
        "    pool.submit(time.sleep, 600).result()\n"
    )
    root = Path(__file__).parents[2]
    parent = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(root)}
    )
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    for _ in range(600):
        if not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.1)
    else:
        pytest.fail(f"the worker {worker} still runs")
    parent.stdout.close()


def test_a_small_experiment_is_paired_and_goes_on_where_it_was_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, plot = tmp_path / "results.jsonl", tmp_path / "curves.png"
    args = Args(out, arms=(GRPO, "prefix-0.3"), seeds=(0,), updates=2, eval_every=1, eval_tasks=6, plot=plot)
    learning.main(args)
    grpo, mempo = learning.read_results(out).values()
    # The arms part at the first update: before it, all is the same.
    assert grpo.start == mempo.start
    assert [run["updates"] for run in grpo.evaluations] == [0, 1, 2]
    assert grpo.curves["reward"][0] == mempo.curves["reward"][0]
    assert "memory/probability" not in grpo.curves
    assert grpo.end["memory_probability"] != mempo.end["memory_probability"]
    assert 0 < plot.stat().st_size < 100_000
    assert "| prefix-0.3 | 1 |" in capsys.readouterr().out

    whole = out.read_bytes()
    learning.main(args)  # nothing is left to do
    assert out.read_bytes() == whole

    out.write_bytes(whole[:-100])  # killed while it wrote the second run
    learning.main(args)
    again = learning.read_results(out)
    assert same(again[grpo.cell]) == same(grpo)
    assert same(again[mempo.cell]) == same(mempo)


def same(run: Result) -> Result:
    """All of a run but its times."""
    curves = {key: values for key, values in run.curves.items() if not key.startswith("seconds/")}
    return replace(run, curves=curves, seconds=0.0, commit=None)


def test_right_tasks_are_also_counted_by_how_many_searches_they_take() -> None:
    def found(titles: Sequence[int], exact: float) -> Trajectory:
        objectives = tuple(
            Objective("Who?", ("Homer",), tuple(f"{number}-{place}" for place in range(count)))
            for number, count in enumerate(titles)
        )
        return Trajectory(Task("t", objectives), 0, (), StopReason.ANSWERED, 0, scores={"exact": exact})

    counted = learning.exact_by_searches([found([1, 2], 1.0), found([2, 1], 0.0), found([1, 1], 1.0)])
    assert counted == {"exact/2": 1.0, "exact/3": 0.5}


def test_the_table_of_searches_leaves_out_runs_that_did_not_count_them(capsys: pytest.CaptureFixture[str]) -> None:
    old, new = result(0, [0.1, 0.2]), result(1, [0.1, 0.2])
    new = replace(new, evaluations=[{**evaluation, "exact/2": 0.5, "exact/3": 0.25} for evaluation in new.evaluations])
    learning.print_searches([old, new])
    lines = capsys.readouterr().out.splitlines()
    assert lines[3:] == ["| arm | seeds | 2 | 3 |", "| --- | --: | --: | --: |", "| grpo | 1 | 0.50 | 0.25 |"]


def test_the_table_of_searches_takes_what_there_is_where_the_tasks_of_a_seed_lack_a_number(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = [result(seed, [0.1, 0.2]) for seed in (0, 1)]
    counts = [{"exact/3": 0.25}, {"exact/2": 0.5, "exact/3": 0.75}]
    learning.print_searches(
        [
            replace(run, evaluations=[{**e, **own} for e in run.evaluations])
            for run, own in zip(runs, counts, strict=True)
        ]
    )
    assert "| grpo | 2 | 0.50 | 0.50 |" in capsys.readouterr().out.splitlines()
