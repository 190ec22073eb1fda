"""Every task with rows and completions: right, damaged and random ones. As a program it prints their outcomes.

python reward_cases.py [reversed]: the outcomes as JSON in the order of the cases, computed in this order or reversed.
"""

import json
import random
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from unmask import sandbox
from unmask.tasks import TASKS, Task
from unmask.tasks.task import Row

PIECES = [*'0123456789+-*/(){}[]":,.= \nabcx', "<reasoning>", "</reasoning>", "<answer>", "</answer>", "\n</answer>\n"]
PIECES += ["\\boxed{", "}", "Answer: B", "```python\n", "```", "return a + b", "true", "<|eot_id|>", "é", "²"]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in TASKS if name not in ("own", "reasoning_gym")),
    *((name, {"rewards": "d1", "protocol": "d1"}) for name in ("math500", "sudoku_text")),
    *((name, {"rewards": "d1", "protocol": "d1_train"}) for name in ("gsm8k", "countdown_text")),
    *((name, {"partial": 0.5}) for name in ("sudoku", "countdown", "countdown_text", "sudoku_text", "json_schema")),
    *(
        (name, {"weights": {"correctness": 1, "format": 0.2, "length": 0.1}})
        for name in ("gsm8k", "countdown_text", "sudoku_text", "json_schema", "multiple_choice")
    ),
    ("gsm8k", {"weights": {"correctness": -1, "format": 2}}),
]
SANDBOXED = ("humaneval", "mbpp", "code_mini")


def tasks() -> Iterator[tuple[str, Task, list[Row]]]:
    """(name and options, the task, its rows), without tasks whose requirements are not installed."""
    for name, options in VARIANTS:
        if name in SANDBOXED and sandbox.problem():
            continue
        if name == "math500" and not options and find_spec("sympy") is None:
            continue
        task = TASKS[name](**options)
        row = task.about.example
        yield f"{name} {options}", task, task.rows("test", 3, 0) if row is None else [row]


def completions(task: Task, row: Row, seed: int, random_ones: int = 8) -> list[str]:
    """A right one first, then damaged ones and random ones."""
    rng, right = random.Random(f"completions {seed}"), task.solution(row)
    cut = rng.randrange(len(right))
    damaged = [right[:cut], right[:cut] + "7" + right[cut + 1 :], f"{right} {right}", right + "!" * 300, "", " ", "7"]
    drawn = ["".join(rng.choices(PIECES, k=rng.randrange(40))) for _ in range(random_ones)]
    return [right, *damaged, *drawn]


def earned(backwards: bool) -> list[tuple[str, float, bool, dict[str, float]]]:
    cases = [
        (what, task, row, text)
        for what, task, rows in tasks()
        for place, row in enumerate(rows)
        for text in completions(task, row, place, 2 if task.name in SANDBOXED else 8)
    ]
    outcomes = [(what, *task.outcome(row, text)) for what, task, row, text in (cases[::-1] if backwards else cases)]
    return outcomes[::-1] if backwards else outcomes


if __name__ == "__main__":
    print(json.dumps(earned(sys.argv[1:] == ["reversed"])))
