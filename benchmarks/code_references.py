"""Every reference program of HumanEval and MBPP through the sandbox, mutants of them, which should fail, and the speed.

python benchmarks/code_references.py ../shared/data --mutants 60
"""

import argparse
import ast
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

from unmask.sandbox import ProgramJob, run_many
from unmask.sandbox.tests import parse
from unmask.tasks.benchmarks import humaneval, mbpp
from unmask.tasks.support.programs import ProgramRunner
from unmask.tasks.task import Row

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


def mutated(code: str, rng: random.Random) -> str | None:
    """The program with one constant or operator changed; None where it has neither."""
    tree = parse(code)
    places: list[Callable[[], None]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            places.append(lambda node=node: setattr(node, "value", node.value + 1))
        elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in OPERATORS:
            places.append(lambda node=node: setattr(node, "op", OPERATORS[type(node.op)]()))
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
            places.append(lambda node=node: node.ops.__setitem__(0, OPERATORS[type(node.ops[0])]()))  # type: ignore[misc]  # a list's method, called for its effect
    if not places:
        return None
    rng.choice(places)()
    return ast.unparse(tree)


def reference(row: Row) -> str:
    return row["code"] if "code" in row else row["prompt"] + row["canonical_solution"]


def examine(title: str, rows: list[Row], bench: ProgramRunner, mutants: int) -> None:
    start = time.perf_counter()
    verdicts = bench.verdicts(rows, [reference(row) for row in rows])
    spent = time.perf_counter() - start
    right = sum(all(verdict.passed for verdict in each) for each in verdicts)
    print(f"{title}: {right} of {len(rows)} references pass, {len(rows) / spent:.1f} programs a second")
    for row, each in zip(rows, verdicts, strict=True):
        for verdict in each:
            if not verdict.passed:
                print(f"  {row['task_id']}: {verdict.reason}")
    rng = random.Random(0)
    drawn = [(row, mutated(reference(row), rng)) for row in rng.sample(rows, len(rows))]
    chosen = [(row, code) for row, code in drawn if code is not None][:mutants]
    found = bench.verdicts([row for row, _ in chosen], [code for _, code in chosen])
    alive = [(row, code) for (row, code), each in zip(chosen, found, strict=True) if all(v.passed for v in each)]
    print(f"{title}: {len(chosen) - len(alive)} of {len(chosen)} mutants fail; passing: ", end="")
    print(", ".join(str(row["task_id"]) for row, _ in alive))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--mutants", type=int, default=60)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds of a test; generous, on a busy machine")
    args = parser.parse_args()
    jobs = [
        ProgramJob(f"def f(x): return x + {i}", [f"assert f({k}) == {i + k}" for k in range(3)]) for i in range(100)
    ]
    start = time.perf_counter()
    run_many(jobs)
    print(f"trivial programs: {len(jobs) / (time.perf_counter() - start):.1f} a second")
    for title, path, task in (
        ("HumanEval", "humaneval/humaneval.jsonl", humaneval),
        ("MBPP", "mbpp/mbpp.jsonl", mbpp),
        ("MBPP sanitized", "mbpp/sanitized_mbpp.jsonl", mbpp),
    ):
        rows = [json.loads(line) for line in (args.data / path).read_text().splitlines()]
        bench = ProgramRunner(lambda row, program, task=task: task.program_job(row, program, args.timeout))
        examine(title, rows, bench, args.mutants)


if __name__ == "__main__":
    main()
