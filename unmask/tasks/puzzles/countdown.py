"""Countdown: reach a target with + - * / and parentheses, using every given number exactly once.

The prompt is the numbers and the target, right-aligned (" 3, 7,12>22="), so that all prompts have one length;
the completion is an expression. Problems are generated and every one is solvable. The split is by the set of
numbers (order and target do not matter), so test numbers were never seen together in training.

What the model writes is untrusted: `expression` admits integers, the four operations and parentheses, nothing
else, is bounded in length and depth, and works in exact fractions. Nothing is ever evaluated by Python.
"""

import ast
import operator
import random
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from itertools import combinations

from unmask.tasks.support.split import hashed_split, split_rng
from unmask.tasks.task import About, Row, Task, checked_partial

LONGEST = 200  # characters; far beyond any sensible answer, and it bounds the size of every number
DEEPEST = 30
LISTED = 4  # numbers of which all reachable values are listed; of six it takes seconds for each problem
TRIES = 20_000  # draws for a problem, on average, before there are said to be too few

SIGNS = "+-*/"
OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
ALPHABET = re.compile(r"[0-9+\-*/() ]+")
LEADING_ZERO = re.compile(r"(?<![0-9])0[0-9]")


def expression(text: str) -> tuple[Fraction, list[int]] | None:
    """The value of an expression and the numbers in it; None where it is not admitted or divides by zero."""
    if len(text) > LONGEST or not ALPHABET.fullmatch(text) or LEADING_ZERO.search(text):
        return None
    used: list[int] = []
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body, used, DEEPEST)
    except (SyntaxError, ZeroDivisionError):
        return None
    return None if value is None else (value, used)


def _value(node: ast.expr, used: list[int], depth: int) -> Fraction | None:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp) or type(node.op) not in OPERATIONS or depth == 0:
        return None
    left = _value(node.left, used, depth - 1)
    right = _value(node.right, used, depth - 1)
    return None if left is None or right is None else OPERATIONS[type(node.op)](left, right)


def in_test(numbers: list[int]) -> bool:
    """Whether this set of numbers is of the test split: a stable hash, whatever the options of the task."""
    return hashed_split(",".join(map(str, sorted(numbers)))) == "test"


# An expression being built: its text and the priority of its last operation (0 for + and -, 1 for * and /,
# 2 for a number), which decides where it needs parentheses.
Term = tuple[str, int]


@lru_cache(maxsize=4096)
def reachable(numbers: tuple[int, ...], signs: str = SIGNS) -> dict[int, str]:
    """Every value the sorted numbers reach by these signs, whole on the way -> its shortest expression."""
    ways: dict[int, str] = {}
    for (value, _), text in _terms(numbers, signs).items():
        ways[value] = _shorter(ways.get(value, text), text)
    return ways


def _shorter(a: str, b: str) -> str:
    return min(a, b, key=lambda text: (len(text), text))


@lru_cache(maxsize=16384)
def _terms(numbers: tuple[int, ...], signs: str) -> dict[tuple[int, int], str]:
    """The shortest expression for every (value, priority)."""
    if len(numbers) == 1:
        return {(numbers[0], 2): str(numbers[0])}
    terms: dict[tuple[int, int], str] = {}
    for left, right in _partings(numbers):
        for (x, x_priority), x_text in _terms(left, signs).items():
            for (y, y_priority), y_text in _terms(right, signs).items():
                for value, (text, priority) in _joined(signs, x, (x_text, x_priority), y, (y_text, y_priority)):
                    terms[value, priority] = _shorter(terms.get((value, priority), text), text)
    return terms


def _partings(numbers: tuple[int, ...]) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """All ways to part the numbers into a left and a right operand."""
    places = range(len(numbers))
    return {
        (
            tuple(numbers[place] for place in places if place in left),
            tuple(numbers[place] for place in places if place not in left),
        )
        for size in range(1, len(numbers))
        for left in map(set, combinations(places, size))
    }


def _joined(signs: str, x: int, left: Term, y: int, right: Term) -> list[tuple[int, Term]]:
    """The results of the operations; only - and / mind an operand of their own priority on the right."""
    joined = []
    if "+" in signs:
        joined.append((x + y, _text(left, "+", right, 0, 0)))
    if "-" in signs:
        joined.append((x - y, _text(left, "-", right, 0, 1)))
    if "*" in signs:
        joined.append((x * y, _text(left, "*", right, 1, 1)))
    if "/" in signs and y != 0 and x % y == 0:
        joined.append((x // y, _text(left, "/", right, 1, 2)))
    return joined


def _text(left: Term, sign: str, right: Term, left_needs: int, right_needs: int) -> Term:
    """left sign right, with parentheses around an operand whose priority is below what its side needs."""
    texts = [
        text if priority >= needs else f"({text})"
        for (text, priority), needs in ((left, left_needs), (right, right_needs))
    ]
    return texts[0] + sign + texts[1], left_needs


def way(rng: random.Random, numbers: list[int], signs: str) -> tuple[int, str]:
    """A value that the numbers reach, whole on the way, and its expression: joined two by two, by signs at random."""
    terms: list[tuple[int, Term]] = [(number, (str(number), 2)) for number in numbers]
    while len(terms) > 1:
        (x, left), (y, right) = (terms.pop(rng.randrange(len(terms))) for _ in range(2))
        terms.append(rng.choice(_joined(signs, x, left, y, right)))
    value, (text, _) = terms[0]
    return value, text


def task(
    numbers: int = 3, largest: int = 20, target_largest: int = 99, signs: str = "+-", partial: float = 0.0
) -> Task:
    """`numbers` numbers from 1 to `largest`, a target up to `target_largest` that `signs` suffice to reach.

    The defaults are what the embedded model has learnt; signs="+-*/" is the full game. An answer may use all
    four signs in any case. An expression with the right numbers and the right value earns 1, with the right
    numbers alone `partial`.
    """
    if not 2 <= numbers <= 6:
        raise ValueError(f"countdown: numbers must be within 2 to 6, not {numbers}.")
    if not 9 <= largest <= 100:
        raise ValueError(f"countdown: largest must be within 9 to 100, not {largest}.")
    if not 10 <= target_largest <= 1000:
        raise ValueError(f"countdown: target_largest must be within 10 to 1000, not {target_largest}.")
    if "+" not in signs or not set(signs) <= set(SIGNS):
        raise ValueError(f'countdown: signs must be "+" and any others of "+-*/", not {signs!r}.')
    partial = checked_partial("countdown", partial)
    width, target_width = len(str(largest)), len(str(target_largest))
    # at most around every step but the last; the shortest chain of + and - needs none
    parentheses = numbers - 2 if set(signs) & set("*/") or numbers > LISTED else 0

    def drawn_way(rng: random.Random, drawn: list[int]) -> tuple[int, str] | None:
        """A target and its expression: of all that the numbers reach or, where these are too many, of one way."""
        if numbers > LISTED:
            target, text = way(rng, drawn, signs)
            return (target, text) if 1 <= target <= target_largest else None
        ways = reachable(tuple(sorted(drawn)), signs)
        targets = sorted(value for value in ways if 1 <= value <= target_largest)
        target = rng.choice(targets) if targets else 0
        return (target, ways[target]) if targets else None

    def rows(split: str, n: int, seed: int) -> list[Row]:
        rng, found, tries = split_rng("countdown", split, seed), list[Row](), 0
        while len(found) < n:
            tries += 1
            if numbers > LISTED and tries > TRIES * (len(found) + 1):
                raise ValueError(
                    f"countdown: {numbers} numbers up to {largest} hardly ever reach a target up to {target_largest} "
                    f"by {signs}; lower largest, or raise target_largest"
                )
            drawn = [rng.randint(1, largest) for _ in range(numbers)]
            if in_test(drawn) != (split == "test") or (made := drawn_way(rng, drawn)) is None:
                continue
            name = f"countdown-{split}-{seed}-{len(found)}"
            found.append({"id": name, "numbers": drawn, "target": made[0], "solution": made[1]})
        return found

    def prompt(row: Row) -> str:
        numbers_text = ",".join(f"{number:>{width}}" for number in row["numbers"])
        return f"{numbers_text}>{row['target']:>{target_width}}="

    def reward(row: Row, completion: str) -> float:
        found = expression(completion)
        if found is None or Counter(found[1]) != Counter(row["numbers"]):
            return 0.0
        return 1.0 if found[0] == row["target"] else partial

    return Task(
        name="countdown",
        summary=f"Countdown with {numbers} numbers up to {largest} and a target up to {target_largest}",
        length=numbers * width + (numbers - 1) + 2 * parentheses,
        rows=rows,
        prompt=prompt,
        solution=lambda row: row["solution"],
        reward=reward,
        solved=lambda row, completion: reward(row, completion) == 1.0,
        about=About(apart="by the set of numbers: one in five is for the test"),
    )
