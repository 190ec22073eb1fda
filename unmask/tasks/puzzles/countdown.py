"""Countdown: reach a target with + - * / and parentheses, using every given number exactly once.

The prompt is the numbers and the target, right-aligned (" 3, 7,12>22="), so all prompts have one length; the completion
is an expression. Problems are generated and solvable. The split is by the set of numbers (order and target do not
matter), so test numbers never occur together in training.

The answer is untrusted: `expression` admits only integers, the four operations and parentheses, bounds length and
depth, and computes in exact fractions. Python never evaluates it.
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

from unmask.tasks.support.split import GeneratedTask, hashed_split
from unmask.tasks.task import About, Row, valid_partial

LONGEST = 200  # characters; far beyond any sensible answer; also bounds every number
DEEPEST = 30
LISTED = 4  # numbers for which all reachable values are listed; for six that takes seconds a problem

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
    """The value of an expression and its numbers; None if it is not admitted or divides by zero."""
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


def points(row: Row, text: str, partial: float) -> float:
    """1 for an expression of the row's numbers with the target's value, `partial` for one with another value."""
    result = expression(text)
    if result is None or Counter(result[1]) != Counter(row["numbers"]):
        return 0.0
    return 1.0 if result[0] == row["target"] else partial


def numbers_key(numbers: list[int]) -> str:
    """The numbers in any order."""
    return ",".join(map(str, sorted(numbers)))


# An expression: its text and the priority of its last operation (0 for + and -, 1 for * and /, 2 for a number), which
# decides whether it needs parentheses.
Term = tuple[str, int]


@lru_cache(maxsize=4096)
def reachable(numbers: tuple[int, ...], signs: str = SIGNS) -> dict[int, str]:
    """Every value that the sorted numbers reach with these signs, all results whole -> its shortest expression."""
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
    for left, right in _divisions(numbers):
        for (x, x_priority), x_text in _terms(left, signs).items():
            for (y, y_priority), y_text in _terms(right, signs).items():
                for value, (text, priority) in _results(signs, x, (x_text, x_priority), y, (y_text, y_priority)):
                    terms[value, priority] = _shorter(terms.get((value, priority), text), text)
    return terms


def _divisions(numbers: tuple[int, ...]) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """All ways to divide the numbers into a left and a right operand."""
    places = range(len(numbers))
    return {
        (
            tuple(numbers[place] for place in places if place in left),
            tuple(numbers[place] for place in places if place not in left),
        )
        for size in range(1, len(numbers))
        for left in map(set, combinations(places, size))
    }


def _results(signs: str, x: int, left: Term, y: int, right: Term) -> list[tuple[int, Term]]:
    """The results of the operations; only - and / need parentheses around a right operand of equal priority."""
    results = []
    if "+" in signs:
        results.append((x + y, _text(left, "+", right, 0, 0)))
    if "-" in signs:
        results.append((x - y, _text(left, "-", right, 0, 1)))
    if "*" in signs:
        results.append((x * y, _text(left, "*", right, 1, 1)))
    if "/" in signs and y != 0 and x % y == 0:
        results.append((x // y, _text(left, "/", right, 1, 2)))
    return results


def _text(left: Term, sign: str, right: Term, left_needs: int, right_needs: int) -> Term:
    """left sign right, with parentheses around an operand whose priority is too low for its side."""
    texts = [
        text if priority >= needs else f"({text})"
        for (text, priority), needs in ((left, left_needs), (right, right_needs))
    ]
    return texts[0] + sign + texts[1], left_needs


def draw_way(rng: random.Random, numbers: list[int], signs: str) -> tuple[int, str]:
    """A value and its expression: the numbers joined in random pairs by random signs, all results whole."""
    terms: list[tuple[int, Term]] = [(number, (str(number), 2)) for number in numbers]
    while len(terms) > 1:
        (x, left), (y, right) = (terms.pop(rng.randrange(len(terms))) for _ in range(2))
        terms.append(rng.choice(_results(signs, x, left, y, right)))
    value, (text, _) = terms[0]
    return value, text


class Countdown(GeneratedTask):
    """`numbers` numbers from 1 to `largest`, and a target up to `target_largest` that they reach with `signs`.

    The embedded model is trained on the defaults; signs="+-*/" is the full game. An answer may always use all four
    signs. An expression with the right numbers and value earns 1, with the right numbers only `partial`.
    """

    name = "countdown"
    about = About(separation="by the set of numbers: one in five is for the test")

    def __init__(
        self, numbers: int = 3, largest: int = 20, target_largest: int = 99, signs: str = "+-", partial: float = 0.0
    ) -> None:
        if not 2 <= numbers <= 6:
            raise ValueError(f"countdown: numbers must be within 2 to 6, not {numbers}.")
        if not 9 <= largest <= 100:
            raise ValueError(f"countdown: largest must be within 9 to 100, not {largest}.")
        if not 10 <= target_largest <= 1000:
            raise ValueError(f"countdown: target_largest must be within 10 to 1000, not {target_largest}.")
        if "+" not in signs or not set(signs) <= set(SIGNS):
            raise ValueError(f'countdown: signs must be "+" and any others of "+-*/", not {signs!r}.')
        self.numbers, self.largest, self.target_largest, self.signs = numbers, largest, target_largest, signs
        self.partial = valid_partial(self.name, partial)
        self.summary = f"Countdown with {numbers} numbers up to {largest} and a target up to {target_largest}"
        self.behaviours = {"careless": lambda row: "+".join(map(str, row["numbers"]))}
        self.scarcity = (
            f"{numbers} numbers up to {largest} hardly ever reach a target up to {target_largest} with {signs}; "
            "lower largest, or raise target_largest"
        )
        # at most around every step but the last; the shortest chain of + and - needs none
        parentheses = numbers - 2 if set(signs) & set("*/") or numbers > LISTED else 0
        self.length = numbers * len(str(largest)) + (numbers - 1) + 2 * parentheses

    def draw(self, rng: random.Random, split: str) -> Row | None:
        numbers = [rng.randint(1, self.largest) for _ in range(self.numbers)]
        if hashed_split(numbers_key(numbers)) != split:
            return None
        if self.numbers > LISTED:
            target, solution = draw_way(rng, numbers, self.signs)
        else:
            ways = reachable(tuple(sorted(numbers)), self.signs)
            targets = sorted(value for value in ways if 1 <= value <= self.target_largest)
            target = rng.choice(targets) if targets else 0
            solution = ways.get(target, "")
        if not 1 <= target <= self.target_largest:
            return None
        return {"numbers": numbers, "target": target, "solution": solution}

    def prompt(self, row: Row) -> str:
        numbers = ",".join(f"{number:>{len(str(self.largest))}}" for number in row["numbers"])
        return f"{numbers}>{row['target']:>{len(str(self.target_largest))}}="

    def solution(self, row: Row) -> str:
        return row["solution"]

    def solved(self, row: Row, completion: str) -> bool:
        return points(row, completion, 0.0) == 1.0

    def reward(self, row: Row, completion: str) -> float:
        return points(row, completion, self.partial)
