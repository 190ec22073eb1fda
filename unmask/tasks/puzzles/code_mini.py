"""Code in small: a Python expression from inputs and outputs, one character a token; generated.

The prompt is three inputs with their outputs ("0:  1 2:  5 3:  7>"), the completion an expression in x ("2*x+1"). The
functions are polynomials with small whole coefficients, a*x*x+b*x+c, which three points determine. An expression is
judged at the inputs of the prompt and at others, so that an answer which fits the examples alone is wrong; and any
expression with the right values is right, not only ours.

What the model writes is run in the sandbox and nowhere else. It gets there only if it is short, has an x, and is made
of x, digits, spaces and + - * / % ( ) alone; anything else earns 0 without being run.
The split is by the function, that is by its values: whichever way a test function is written, training has not seen it.
"""

import re
from itertools import product

from unmask.sandbox import ProgramJob
from unmask.tasks.support.programs import ProgramRunner, refusing
from unmask.tasks.support.split import in_test, split_rng
from unmask.tasks.task import About, Row, Task, checked_partial

INPUTS = range(13)  # where an expression is tried
SHOWN = 3  # examples in a prompt: as many as determine a square; 0 is always among them
SHOWN_FROM = INPUTS[:5]  # the inputs that examples are at
LONGEST = 40  # characters that are run
ALPHABET = re.compile(r"[x0-9 +\-*/%()]+")
TIMEOUT = 2.0  # seconds for a value, which takes microseconds; 9**9**9 takes longer

Polynomial = tuple[int, int, int]


def written(function: Polynomial) -> str:
    """The polynomial as an expression: "2*x*x-x+3" for (2, -1, 3)."""
    text = ""
    for factor, power in zip(function, ("x*x", "x", ""), strict=True):
        parts = [str(abs(factor))] * (abs(factor) != 1 or not power) + [power] * bool(power)
        text += "+-"[factor < 0] + "*".join(parts) if factor else ""
    return text.removeprefix("+")


def values(function: Polynomial) -> list[int]:
    """What the polynomial gives at all inputs."""
    a, b, c = function
    return [a * x * x + b * x + c for x in INPUTS]


def admitted(completion: str) -> bool:
    """Whether it is run at all. No function is constant, so that an expression without x is wrong."""
    return len(completion) <= LONGEST and ALPHABET.fullmatch(completion) is not None and "x" in completion


def tests(row: Row, completion: str) -> ProgramJob:
    """The expression as a function, with a test for every input; a lambda, so that it must be whole by itself."""
    wanted = tuple(f"assert f({x}) == {value}" for x, value in zip(INPUTS, row["values"], strict=True))
    return ProgramJob(f"f = lambda x: {completion.strip()}", wanted, {"f": "f"}, timeout=TIMEOUT)


def task(squares: int = 0, largest: int = 9, partial: float = 0.0) -> Task:
    """Polynomials with up to `squares` times x*x, and other coefficients from -`largest` to `largest`.

    An expression with the right value at all inputs earns 1, another one `partial` times its share of right values.
    """
    if not 0 <= squares <= 3:
        raise ValueError(f"code_mini: squares must be within 0 to 3, not {squares}.")
    if not 3 <= largest <= 9:
        raise ValueError(f"code_mini: largest must be within 3 to 9, not {largest}.")
    partial = checked_partial("code_mini", partial)
    others = range(-largest, largest + 1)
    functions = [f for f in product(range(squares + 1), others, others) if f[:2] != (0, 0)]
    width = max(len(str(value)) for f in functions for value in values(f)[: len(SHOWN_FROM)])
    bench = ProgramRunner(tests)

    def rows(split: str, n: int, seed: int) -> list[Row]:
        rng = split_rng("code_mini", split, seed)
        kept = [f for f in functions if in_test(" ".join(map(str, values(f)))) == (split == "test")]
        found: list[Row] = []
        for number in range(n):
            function = rng.choice(kept)
            shown = [0, *sorted(rng.sample(SHOWN_FROM[1:], SHOWN - 1))]
            name = f"code_mini-{split}-{seed}-{number}"
            found.append({"id": name, "shown": shown, "values": values(function), "solution": written(function)})
        return found

    def prompt(row: Row) -> str:
        return " ".join(f"{x}:{row['values'][x]:>{width}}" for x in row["shown"]) + ">"

    def ahead(rows: list[Row], completions: list[str]) -> None:
        judged = [(row, text) for row, text in zip(rows, completions, strict=True) if admitted(text)]
        bench.verdicts([row for row, _ in judged], [text for _, text in judged])

    def right(row: Row, completion: str) -> float:
        """The share of inputs at which the expression is right."""
        if not admitted(completion):
            return 0.0
        passed, total = bench.share(row, completion)
        return passed / total

    def solved(row: Row, completion: str) -> bool:
        return right(row, completion) == 1.0

    def verdict(row: Row, completion: str) -> str:
        return bench.told(row, completion) if admitted(completion) else "not run: no short expression in x"

    return Task(
        name="code_mini",
        summary=f"A Python expression from {SHOWN} inputs and outputs",
        length=max(len(written(f)) for f in functions),
        rows=refusing(rows, "code_mini"),
        prompt=prompt,
        solution=lambda row: row["solution"],
        reward=lambda row, completion: 1.0 if solved(row, completion) else partial * right(row, completion),
        solved=solved,
        verdict=verdict,
        ahead=ahead,
        about=About(
            apart="by the function's values: one in five is for the test", needs=("the sandbox (unmask doctor)",)
        ),
    )
