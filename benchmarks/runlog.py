"""How fast run logs are written and read, and in how much memory.

    python benchmarks/runlog.py --megabytes 64 1024

Writes a log of trajectories of realistic size (8 turns of 2,500 prompt and 250 response tokens) to
a temporary folder, reads it in a process of its own, and prints the peak of that process's memory,
the interpreter included.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mempo.core import Objective, Passage, StopReason, Task, ToolCall, Trajectory, Turn, Usage
from mempo.runlog import RunLogWriter, collect_run_info, read_runlog


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        print(json.dumps(read(args.read)))
        return
    print(f"{'log MB':>7} {'records':>8} {'write MB/s':>11} {'read MB/s':>10} {'reader peak MB':>15}")
    for megabytes in args.megabytes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "run.jsonl")
            seconds = write(path, megabytes * 1_000_000)
            size = path.stat().st_size / 1e6
            command = [sys.executable, __file__, "--read", str(path)]
            measured = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        rates = f"{size / seconds:11.0f} {size / measured['seconds']:10.0f}"
        print(f"{size:7.0f} {measured['records']:8d} {rates} {measured['peak_megabytes']:15.0f}", flush=True)


def write(path: Path, size_bytes: int) -> float:
    """Seconds to write a log of about this size."""
    made = [a_trajectory(random.Random(seed)) for seed in range(8)]
    started = time.perf_counter()
    with RunLogWriter.create(path, collect_run_info(made[0].task, seeds={})) as log:
        step = 0
        while path.stat().st_size < size_bytes:
            step += 1
            for trajectory in made:
                log.write_trajectory(trajectory, step=step)
            log.write_metrics(step, {"reward": 0.5})
    return time.perf_counter() - started


def read(path: Path) -> dict[str, float]:
    """Go through all records."""
    started = time.perf_counter()
    records = sum(1 for _ in read_runlog(path).current())
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"records": records, "seconds": seconds, "peak_megabytes": peak}


def a_trajectory(draw: random.Random) -> Trajectory:
    prompt_tokens, response_tokens = 2500, 250
    turns = tuple(
        Turn(
            index=index,
            text="word " * response_tokens,
            prompt_text="word " * prompt_tokens,
            prompt_ids=tuple(draw.randrange(150_000) for _ in range(prompt_tokens)),
            response_ids=tuple(draw.randrange(150_000) for _ in range(response_tokens)),
            logprobs=tuple(-draw.expovariate(2.0) for _ in range(response_tokens)),
            response_mask=(1,) * response_tokens,
            mem_mask=(1,) * 80 + (0,) * (response_tokens - 80),
            memory="word " * 80,
            call=ToolCall("search", {"query": "who wrote it"}),
            observation="word " * 400,
            passages=tuple(Passage(str(place), "Title", "word " * 100, 1.5) for place in range(3)),
            usage=Usage(prompt_tokens, response_tokens),
        )
        for index in range(8)
    )
    task = Task("t", (Objective("Who wrote it?", ("Ada",)),))
    return Trajectory(task, 0, turns, StopReason.ANSWERED, seed=1, reward=1.0, scores={"em": 1.0})


if __name__ == "__main__":
    main()
