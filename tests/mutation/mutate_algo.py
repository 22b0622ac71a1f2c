"""Does every operator and constant of `mempo.algo` matter to a test?

    python tests/mutation/mutate_algo.py                      all mutants, a few seconds of a core each
    python tests/mutation/mutate_algo.py --module memory      those of one file
    python tests/mutation/mutate_algo.py --sample 20          a few, others after each commit
    python tests/mutation/mutate_algo.py --sample 20 --seed 7 the same ones again

Each mutant is one small change to one file (`+` for `-`, `<` for `<=`, 2 for 1, any for all, ...). It
lives in a copy of the package, so that runs do not disturb each other, and ends in one of four ways:

- killed: a test in `tests/unit/algo` fails;
- timed out: its tests took many times the processor time of the unchanged code. That is a change that
  anybody would notice, an endless loop for instance, so it does not count as a survivor;
- survived: all tests pass. Survivors are printed;
- undecided: nothing was learned about it, since its tests used neither up their processor time nor ended
  within a generous wait (a machine that is busy with something else), or the system ended them.

The exit status is 1 if a survivor is not in EQUIVALENT, and 2 if no mutant was tried to the end or the
tests fail on the unchanged code.
"""

from __future__ import annotations

import argparse
import ast
import copy
import datetime
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]

Verdict = Literal["killed", "timed out", "survived", "undecided"]

UNCHANGED_PROCESSOR_SECONDS = 300
"""Limit of the first run, over the unchanged code; those of mutants follow from what it took."""
WALL_PER_PROCESSOR_SECOND = 20
"""How long is waited for a second of processor time, so that a busy machine decides nothing."""

EQUIVALENT: dict[str, str] = {
    "groups.py:deviations: 1 -> 2": "a group of one lies at its own lowest value, so its mean is 0 over anything",
    "groups.py:deviations: 1 -> 0": "0 / 0 in a group without counted rows, which no counted row reads",
    "groups.py:deviations: 0 -> -1": "the only dimension is also the last",
    "groups.py:deviations: 0 -> -1 #3": "the only dimension is also the last",
    "groups.py:group_std: 0 -> -1": "the only dimension is also the last",
    "kl.py:kl_penalty: 'k3' -> 'mutant'": "whatever is neither k1 nor k2 is k3",
    "logprobs.py:hidden_logprobs: 1024 -> 1025": "the size of a chunk changes memory, not values",
    "logprobs.py:hidden_logprobs: 1024 -> 1023": "the size of a chunk changes memory, not values",
    "logprobs.py:hidden_logprobs: False -> True #3": "nothing random is recomputed",
    "logprobs.py:hidden_logprobs: True -> False": "both were split alike",
    "losses.py:policy_loss: 0 -> 1 #3": "multiplied by a weight of 0",
    "losses.py:policy_loss: 0 -> -1 #3": "multiplied by a weight of 0",
    "losses.py:_ratio: 0 -> 1": "both callers mask the result again",
    "losses.py:_ratio: 0 -> -1": "both callers mask the result again",
    "memory.py:answer_value: 1 -> 2": "one more objective, without tokens, does not count",
    "memory.py:answer_value: 1 -> 2 #2": "without entries there are no rows, or none has a gold token",
    "memory.py:answer_value: 1 -> 0 #2": "without entries there are no rows, or none has a gold token",
    "memory.py:answer_value: 1 -> 0 #6": "0 / 0 for an objective without tokens, which is not read",
    "weights.py:token_weights: 0 -> -1": "the only dimension is also the last",
}
"""Mutants that change no value, each with the reason."""

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
NAMES = {"any": "all", "all": "any", "minimum": "maximum", "amin": "amax", "exp": "expm1", "expm1": "exp"}


@dataclass(frozen=True)
class Mutant:
    name: str
    """`file:function: before -> after`."""
    file: str
    source: str


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every mutant of one file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    seen: Counter[str] = Counter()
    for place, (function, node) in enumerate(_sites(tree)):
        for change in range(_changes(node)):
            mutated = copy.deepcopy(tree)
            target = list(_sites(mutated))[place][1]
            before = ast.unparse(node)
            _change(target, change)
            name = f"{path.name}:{function}: {before} -> {ast.unparse(target)}"
            name = " ".join(name.split())
            seen[name] += 1
            suffix = f" #{seen[name]}" if seen[name] > 1 else ""
            yield Mutant(name + suffix, path.name, ast.unparse(ast.fix_missing_locations(mutated)))


def _sites(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """The nodes of function bodies and of module constants; no docstrings, annotations or messages."""
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef):
            body: list[ast.AST] = [*statement.args.defaults, *(d for d in statement.args.kw_defaults if d)]
            for node in (*body, *statement.body):
                yield from ((statement.name, found) for found in _nodes(node))
        elif isinstance(statement, ast.Assign) and not isinstance(statement.value, ast.Subscript | ast.List):
            yield from (("", found) for found in _nodes(statement.value))


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "args") and isinstance(node, ast.FunctionDef | ast.AnnAssign):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _nodes(child)


def _changes(node: ast.AST) -> int:
    """How many mutants a node gives."""
    match node:
        case ast.Constant(value=bool()):
            return 1
        case ast.Constant(value=int()):
            return 2
        case ast.Constant(value=float() | str()):
            return 1
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in OPERATORS:
            return 1
        case ast.Compare(ops=[op]) if type(op) in OPERATORS:
            return 1
        case ast.UnaryOp() | ast.IfExp():
            return 1
        case ast.Attribute(attr=name) if name in NAMES:
            return 1
        case _:
            return 0


def _change(node: ast.AST, change: int) -> None:
    match node:
        case ast.Constant(value=bool(value)):
            node.value = not value
        case ast.Constant(value=int(value)):
            node.value = value + (1 if change == 0 else -1)
        case ast.Constant(value=float(value)):
            node.value = value * 2
        case ast.Constant(value=str(value)):
            node.value = NAMES.get(value, "mutant")
        case ast.BinOp() | ast.BoolOp():
            node.op = OPERATORS[type(node.op)]()  # type: ignore[assignment]
        case ast.Compare():
            node.ops = [OPERATORS[type(node.ops[0])]()]  # type: ignore[list-item]
        case ast.UnaryOp(op=ast.USub()):
            node.op = ast.UAdd()
        case ast.UnaryOp():
            node.operand = ast.UnaryOp(node.op, node.operand)  # not not x is x
        case ast.IfExp():
            node.body, node.orelse = node.orelse, node.body
        case ast.Attribute(attr=name):
            node.attr = NAMES[name]


def try_mutant(mutant: Mutant | None, snapshot: Path, processor_seconds: int) -> tuple[Verdict, float]:
    """Run the tests in a fork of this process, over a copy of the snapshot; None is the unchanged code.

    Returns the verdict and the processor seconds that were used.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        shutil.copytree(snapshot, folder, dirs_exist_ok=True)
        first = []
        if mutant is not None:
            (folder / "src" / "mempo" / "algo" / mutant.file).write_text(mutant.source, encoding="utf-8")
            first = [str(path) for path in folder.glob(f"tests/test_{Path(mutant.file).stem}.py")]
        child = os.fork()
        if child == 0:
            _limit(processor_seconds)
            _run_tests(folder, first)
        _, status, used = os.wait4(child, 0)
        return verdict_of(os.waitstatus_to_exitcode(status)), used.ru_utime + used.ru_stime


def verdict_of(exit_code: int) -> Verdict:
    """What the end of a child says about its mutant; negative codes are signals."""
    if exit_code == 0:
        return "survived"
    if exit_code == -signal.SIGXCPU:
        return "timed out"
    if exit_code in (-signal.SIGALRM, -signal.SIGKILL, -signal.SIGTERM):  # SIGKILL: the machine was out of memory
        return "undecided"
    return "killed"


def _limit(processor_seconds: int) -> None:
    """Processor time decides; the alarm only ends what waits for ever."""
    resource.setrlimit(resource.RLIMIT_CPU, (processor_seconds, processor_seconds + 5))
    signal.alarm(processor_seconds * WALL_PER_PROCESSOR_SECOND)


def _take_snapshot(folder: Path) -> None:
    """Copy the package and the tests once, so that edits meanwhile do not disturb the run."""
    without = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "mempo", folder / "src" / "mempo", ignore=without)
    shutil.copytree(ROOT / "tests" / "unit" / "algo", folder / "tests", ignore=without)
    (folder / "pytest.ini").write_text("[pytest]\n")


def _run_tests(folder: Path, first: Sequence[str]) -> None:
    """The life of a forked child: it ends with pytest's exit status, or by a signal."""
    import pytest

    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    sys.path.insert(0, str(folder / "src"))
    sys.dont_write_bytecode = True
    rest = sorted(str(path) for path in folder.glob("tests/test_*.py") if str(path) not in first)
    # Other plugins take longer to load than the tests to run.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    plugins = ["-p", "jaxtyping._pytest_plugin", "-p", "no:cacheprovider"]
    options = ["-x", "-q", "--assert=plain", "--import-mode=importlib", *plugins]
    hook = "--jaxtyping-packages=mempo.algo,beartype.beartype"
    os._exit(pytest.main([*options, hook, *first, *rest]))


def _preload() -> None:
    """Import once what every child needs; of mempo itself nothing."""
    import beartype
    import hypothesis
    import jaxtyping
    import pytest
    import torch
    import torch.distributed.tensor  # torch.testing wants it
    import torch.utils.checkpoint

    assert all((beartype, jaxtyping, pytest))
    assert not any(name.partition(".")[0] == "mempo" for name in sys.modules)
    torch.set_num_threads(1)
    # A failing example is enough; a small one is not needed.
    quick = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile("mutation", phases=quick, database=None, derandomize=True)
    hypothesis.settings.load_profile("mutation")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Mutate mempo.algo and look for survivors.")
    parser.add_argument("--module", help="only this file, e.g. memory")
    parser.add_argument("--sample", type=int, help="only so many mutants")
    parser.add_argument("--only", help="only the mutant of this name")
    parser.add_argument("--seed", type=int, help="of the sample; without it, one that follows from the commit")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no mutant after trying for so long")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    options = parser.parse_args(argv)

    if options.seed is None:
        options.seed = _seed_of_today()
    with tempfile.TemporaryDirectory(prefix="snapshot-") as name:
        snapshot = Path(name)
        _take_snapshot(snapshot)
        mutants = _chosen(snapshot / "src" / "mempo" / "algo", options)
        if options.list:
            print("\n".join(mutant.name for mutant in mutants))
            return 0
        if options.sample is not None:
            print(f"a sample: --sample {options.sample} --seed {options.seed} draws it again", flush=True)
        _preload()
        verdict, used = try_mutant(None, snapshot, UNCHANGED_PROCESSOR_SECONDS)
        if verdict != "survived":
            print(f"the tests do not pass on the unchanged code ({verdict}): mend them first")
            return 2
        start = time.monotonic()  # what came before is not the mutants' time
        limit = processor_limit(used)
        verdicts = _verdicts(mutants, snapshot, options.workers, limit, start + options.seconds)
    survivors = [name for name, verdict in verdicts if verdict == "survived"]
    unexpected = [name for name in survivors if name not in EQUIVALENT]
    count = Counter(verdict for _, verdict in verdicts)
    tried = len(verdicts) - count["undecided"]
    print(
        f"{tried} of {len(mutants)} mutants tried in {time.monotonic() - start:.0f} s, {limit} processor seconds each "
        f"at most: {count['killed']} killed, {count['timed out']} timed out, "
        f"{len(survivors) - len(unexpected)} equivalent, {len(unexpected)} survived, {count['undecided']} undecided"
    )
    if unexpected:
        return 1
    return 0 if tried else 2


def processor_limit(unchanged_seconds: float) -> int:
    """Many times what the unchanged code needs: a mutant that fails an example may well be slower."""
    return 20 + round(5 * unchanged_seconds)


def _seed_of_today() -> int:
    """The commit, so that each has a sample of its own and its checks can be repeated; without git, the date."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return datetime.datetime.now(datetime.UTC).date().toordinal()
    return int(commit[:8], 16)


def _chosen(folder: Path, options: argparse.Namespace) -> list[Mutant]:
    paths = sorted(folder.glob(f"{options.module or '*'}.py"))
    mutants = [mutant for path in paths if path.name != "__init__.py" for mutant in mutants_of(path)]
    if options.only is not None:
        return [mutant for mutant in mutants if mutant.name == options.only]
    if options.sample is not None:
        return random.Random(options.seed).sample(mutants, min(options.sample, len(mutants)))
    return mutants


def _verdicts(
    mutants: Sequence[Mutant], snapshot: Path, workers: int, processor_seconds: int, deadline: float
) -> list[tuple[str, Verdict]]:
    """Name and verdict of each mutant that was begun before the deadline.

    Each worker is a fork that takes every n-th mutant and writes a line for each to a pipe.
    """
    pipes = []
    for worker in range(workers):
        read, write = os.pipe()
        if os.fork() == 0:
            os.close(read)
            with os.fdopen(write, "w", encoding="utf-8") as out:
                for mutant in mutants[worker::workers]:
                    if time.monotonic() < deadline:
                        verdict, _ = try_mutant(mutant, snapshot, processor_seconds)
                        print(f"{verdict}\t{mutant.name}", file=out, flush=True)
                        if verdict != "killed":  # at once, for those who watch
                            known = verdict == "survived" and mutant.name in EQUIVALENT
                            print("equivalent" if known else verdict.upper(), mutant.name, flush=True)
            os._exit(0)
        os.close(write)
        pipes.append(read)
    lines: list[str] = []
    for read in pipes:
        with os.fdopen(read, encoding="utf-8") as verdicts:
            lines += verdicts.read().splitlines()
    for _ in range(workers):
        os.wait()
    pairs = (line.split("\t", 1) for line in lines)
    return [(name, verdict) for verdict, name in pairs]  # type: ignore[misc]


if __name__ == "__main__":
    sys.exit(main())
