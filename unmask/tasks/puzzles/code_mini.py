"""Small code: a Python expression from inputs and outputs, one character a token; generated.

The prompt is three inputs with their outputs ("0:  1 2:  5 3:  7>"), the completion an expression in x ("2*x+1"). The
functions are polynomials a*x*x+b*x+c with small whole coefficients, which three points determine. An expression is
tested at the inputs of the prompt and at others; any expression with the right values is correct.

The answer runs in the sandbox only, and only if it is short, has an x, and consists of x, digits, spaces and
+ - * / % ( ); anything else earns 0.
The split is by the function's values: no way to write a test function is in the training rows.
"""

import random
import re
from collections.abc import Sequence
from itertools import product

from unmask.sandbox import ProgramJob
from unmask.tasks.support.programs import ProgramRunner, require_sandbox
from unmask.tasks.support.split import SPLITS, GeneratedTask, hashed_split
from unmask.tasks.task import About, Row, valid_partial

INPUTS = range(13)  # at which an expression is tested
SHOWN = 3  # examples in a prompt: enough to determine a quadratic; 0 is always one of them
SHOWN_FROM = INPUTS[:5]  # the inputs of examples
LONGEST = 40  # characters of an expression
ALPHABET = re.compile(r"[x0-9 +\-*/%()]+")
TIMEOUT = 2.0  # seconds for a value; most take microseconds, 9**9**9 takes longer

Polynomial = tuple[int, int, int]


def expression_of(function: Polynomial) -> str:
    """The polynomial as an expression: "2*x*x-x+3" for (2, -1, 3)."""
    text = ""
    for factor, power in zip(function, ("x*x", "x", ""), strict=True):
        parts = [str(abs(factor))] * (abs(factor) != 1 or not power) + [power] * bool(power)
        text += "+-"[factor < 0] + "*".join(parts) if factor else ""
    return text.removeprefix("+")


def values(function: Polynomial) -> list[int]:
    """The polynomial's values at all inputs."""
    a, b, c = function
    return [a * x * x + b * x + c for x in INPUTS]


def wrong_constant(row: Row) -> str:
    """The right expression but for its constant, which has the wrong sign."""
    first, second, third = row["values"][:3]
    a = (third - 2 * second + first) // 2
    return expression_of((a, second - first - a, -first))


def admitted(completion: str) -> bool:
    """Whether it is run. No function is constant, so an expression without x is wrong."""
    return len(completion) <= LONGEST and ALPHABET.fullmatch(completion) is not None and "x" in completion


def program_job(row: Row, completion: str) -> ProgramJob:
    """The expression as a lambda, which admits expressions only, with a test for every input."""
    tests = tuple(f"assert f({x}) == {value}" for x, value in zip(INPUTS, row["values"], strict=True))
    return ProgramJob(f"f = lambda x: {completion.strip()}", tests, {"f": "f"}, timeout=TIMEOUT)


class CodeMini(GeneratedTask):
    """Polynomials with x*x up to `squares` times, and other coefficients from -`largest` to `largest`.

    An expression that is correct at all inputs earns 1, another `partial` times its share of correct values.
    """

    name = "code_mini"
    summary = f"A Python expression from {SHOWN} inputs and outputs"
    about = About(
        separation="by the function's values: one in five is for the test", needs=("the sandbox (unmask doctor)",)
    )

    def __init__(self, squares: int = 0, largest: int = 9, partial: float = 0.0) -> None:
        if not 0 <= squares <= 3:
            raise ValueError(f"code_mini: squares must be within 0 to 3, not {squares}.")
        if not 3 <= largest <= 9:
            raise ValueError(f"code_mini: largest must be within 3 to 9, not {largest}.")
        self.partial = valid_partial(self.name, partial)
        others = range(-largest, largest + 1)
        functions = [f for f in product(range(squares + 1), others, others) if f[:2] != (0, 0)]
        self.width = max(len(str(value)) for f in functions for value in values(f)[: len(SHOWN_FROM)])
        self.length = max(len(expression_of(f)) for f in functions)
        self.functions: dict[str, list[Polynomial]] = {split: [] for split in SPLITS}
        for function in functions:
            self.functions[hashed_split(" ".join(map(str, values(function))))].append(function)
        self.behaviours = {"careless": wrong_constant}
        self.runner = ProgramRunner(program_job)

    def rows(self, split: str, n: int, seed: int) -> list[Row]:
        require_sandbox(self.name)
        return super().rows(split, n, seed)

    def draw(self, rng: random.Random, split: str) -> Row:
        function = rng.choice(self.functions[split])
        shown = [0, *sorted(rng.sample(SHOWN_FROM[1:], SHOWN - 1))]
        return {"shown": shown, "values": values(function), "solution": expression_of(function)}

    def prompt(self, row: Row) -> str:
        return " ".join(f"{x}:{row['values'][x]:>{self.width}}" for x in row["shown"]) + ">"

    def solution(self, row: Row) -> str:
        return row["solution"]

    def solved(self, row: Row, completion: str) -> bool:
        return self.right_share(row, completion) == 1.0

    def reward(self, row: Row, completion: str) -> float:
        return 1.0 if self.solved(row, completion) else self.partial * self.right_share(row, completion)

    def right_share(self, row: Row, completion: str) -> float:
        """The share of inputs at which the expression is correct."""
        if not admitted(completion):
            return 0.0
        passed, total = self.runner.passed(row, completion)
        return passed / total

    def behaviour_solves(self, row: Row, answer: str) -> bool:
        return answer == row["solution"]  # without the sandbox: two of our polynomials are equal if their texts are

    def verdict(self, row: Row, completion: str) -> str:
        return self.runner.summary(row, completion) if admitted(completion) else "not run: not a short expression in x"

    def prepare(self, rows: Sequence[Row], completions: Sequence[str]) -> None:
        pairs = [(row, text) for row, text in zip(rows, completions, strict=True) if admitted(text)]
        self.runner.verdicts([row for row, _ in pairs], [text for _, text in pairs])
