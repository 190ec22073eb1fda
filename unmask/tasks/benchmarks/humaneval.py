"""HumanEval (arXiv:2107.03374): complete a Python function from its signature and docstring.

A row is {prompt, entry_point, canonical_solution, test}; `test` defines check(candidate). Each of its assertions is a
test with a verdict, except `assert True`. Helpers of a test come from the reference, not from the program: else a
program could define its own `encode_cyclic` or `poly` (problems 32, 38 and 50), and three assertions of problem 33
would compare the candidate with itself.
"""

import ast
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Literal

from unmask.sandbox import ProgramJob
from unmask.sandbox.tests import free_names, parse, too_deep
from unmask.tasks.support.data import hub_rows
from unmask.tasks.support.programs import (
    STOP,
    ProgramProtocol,
    ProgramTask,
    defines,
    fenced_block,
    first_turn,
    program_of,
    with_seed,
)
from unmask.tasks.support.protocol import JUSTGRPO_DECODING
from unmask.tasks.support.split import hashed_split
from unmask.tasks.task import About, Row, Weights

FIELDS = {"prompt": str, "entry_point": str, "canonical_solution": str, "test": str}
HUB = "openai/openai_humaneval"
CANDIDATE = "candidate"


def program_job(row: Row, program: str, timeout: float) -> ProgramJob:
    names = {CANDIDATE: row["entry_point"]}
    setup, tests = check_tests(row["test"])
    if set(free_names(setup, tests)) - {CANDIDATE}:  # helpers, from the reference
        setup = f"{row['prompt']}{row['canonical_solution']}\n{setup}"
    return ProgramJob(program, tests, names, with_seed(setup, tests), timeout)


@cache
def check_tests(source: str) -> tuple[str, tuple[str, ...]]:
    """(set-up, tests) of a text that defines check(candidate): every assertion, after the other statements before
    it."""
    module = parse(source)
    checks = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    if not checks or [argument.arg for argument in checks[-1].args.args] != [CANDIDATE]:
        raise ValueError("its test does not define check(candidate)")
    before: list[ast.stmt] = []
    tests = []
    for statement in checks[-1].body:
        asserted = [node.test for node in ast.walk(statement) if isinstance(node, ast.Assert)]
        if not asserted:
            before.append(statement)
        elif not all(isinstance(test, ast.Constant) for test in asserted):
            tests.append("\n".join(map(ast.unparse, [*before, statement])))
    if not tests:
        raise ValueError("its check asserts nothing")
    setup = [ast.unparse(node) for node in module.body if node not in checks]
    return "\n".join(setup), tuple(tests)


def _program(row: Row, completion: str) -> str:
    """The whole function after the prompt's imports and helpers, which an answer need not repeat; or only its body."""
    name, text = row["entry_point"], first_turn(completion)
    block = fenced_block(text, name)
    if block is None and not defines(text, name):
        return _continued_program(row, completion)
    program = block if block is not None else program_of(completion, name)
    preamble = row["prompt"][: row["prompt"].rindex(f"def {name}")]
    return f"{preamble}\n{program}" if defines(program, name) else _with_body(row, program)


def _continued_program(row: Row, completion: str) -> str:
    return _with_body(row, STOP.split(first_turn(completion), maxsplit=1)[0])


def _with_body(row: Row, body: str) -> str:
    """The function with this body; empty if the text is not a body, since the prompt alone is a function that returns
    None, which some tests expect."""
    first = next((line for line in body.splitlines() if line.strip()), "")
    return row["prompt"] + body if first.startswith((" ", "\t")) else ""


PROTOCOLS = {
    "unmask": ProgramProtocol(
        prompt=lambda row: (
            "Complete the following Python function. Answer with the whole function in one block of code.\n\n"
            f"```python\n{row['prompt'].rstrip()}\n```"
        ),
        program=_program,
        solution=lambda row: f"```python\n{row['prompt']}{row['canonical_solution'].rstrip()}\n```",
    ),
    # as in the paper, for models that continue a text
    "continuation": ProgramProtocol(
        prompt=lambda row: row["prompt"],
        program=_continued_program,
        solution=lambda row: row["canonical_solution"],
    ),
}
PROTOCOLS["justgrpo"] = replace(PROTOCOLS["unmask"], decoding=JUSTGRPO_DECODING)

ABOUT = About(
    source=f"the hub: {HUB}; or JSONL files in the shape of the published one",
    example={
        "prompt": 'def add(a, b):\n    """Add two numbers.\n    >>> add(1, 2)\n    3\n    """\n',
        "entry_point": "add",
        "canonical_solution": "    return a + b\n",
        "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(-1, 1) == 0\n",
    },
    protocols=tuple(PROTOCOLS),
    needs=("unmask[data], for the hub", "the sandbox (unmask doctor)"),
)
PUBLISHED = "all problems are for the test, as published; rows of a file by a hash of the prompt, one in five"
HASHED = "by a hash of the prompt, one in five for the test: the score is of these only, and is not HumanEval's"


class HumanEval(ProgramTask):
    """Functions to complete, run in the sandbox. `timeout` is the seconds of a test; `partial` rewards the share of
    passed tests; `weights` weighs the parts of the reward. The published rows are for the test: to train, give rows
    with the same fields as `data`, or use four in five of the published ones with `split=hashed`."""

    name = "humaneval"
    summary = "HumanEval: complete a Python function; graded by its tests in the sandbox"
    length = 512
    protocols = PROTOCOLS
    job = staticmethod(program_job)
    row_fields = FIELDS

    def __init__(
        self,
        data: str = "",
        test_data: str = "",
        protocol: str = "unmask",
        split: Literal["published", "hashed"] = "published",
        partial: bool = False,
        timeout: float = 5.0,
        weights: Weights = None,
    ) -> None:
        super().__init__(data, test_data, protocol, partial, timeout, weights)
        self.split = split
        published = split == "published"
        self.about = replace(
            ABOUT,
            sizes={"train": 0, "test": 164} if published else {"train": 124, "test": 40},
            separation=PUBLISHED if published else HASHED,
        )

    def parse_row(self, row: Row) -> Row:
        try:
            check_tests(row["test"])
        except RecursionError:
            raise too_deep(row["test"]) from None
        name = row["entry_point"]
        if not name.isidentifier() or f"def {name}" not in row["prompt"] or not defines(row["prompt"], name):
            raise ValueError(f"its prompt does not begin the function {row['entry_point']}")
        return row

    def key(self, row: Row) -> str:
        return row["prompt"]

    def published_rows(self, split: str) -> Sequence[Row]:
        if self.split == "hashed":
            return [row for row in hub_rows(HUB, None, "test") if hashed_split(row["prompt"]) == split]
        if split == "train":
            raise ValueError(
                "humaneval: all 164 problems are for the test; train on mbpp, give your own rows as humaneval.data, "
                "or train on four in five of them with humaneval.split=hashed; the score is then not HumanEval's"
            )
        return hub_rows(HUB, None, "test")
