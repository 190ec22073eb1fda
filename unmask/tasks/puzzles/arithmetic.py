"""Sums in several steps, one character a token; generated.

The prompt is a chain of + and - (" 7+12- 5="), the completion each step with its result (" 7+12=19;19- 5=14"). Numbers
are right-aligned, so every character has a fixed position; spaces in an answer do not matter. Only the last result
counts, unless steps earn partial credit. No intermediate result is negative.
The split is by the signed numbers in any order, so no test sum is a reordered training sum.
"""

import random
import re

from unmask.tasks.support.split import GeneratedTask, hashed_split
from unmask.tasks.task import About, Row, valid_partial

LONGEST = 200  # characters; far beyond any sensible answer
NUMBER = re.compile(r"-?[0-9]{1,6}")


def sum_steps(terms: list[int], total_width: int = 0, width: int = 0) -> list[str]:
    """The steps of a sum, padded to these widths: ["7+12=19", "19-5=14"] for [7, 12, -5]."""
    steps, total = [], terms[0]
    for term in terms[1:]:
        result = total + term
        steps.append(f"{total:>{total_width}}{'+-'[term < 0]}{abs(term):>{width}}={result:>{total_width}}")
        total = result
    return steps


def last_result(completion: str) -> int | None:
    """The number after the last equals sign, or the completion itself if it is a number."""
    if len(completion) > LONGEST:
        return None
    tail = completion.rpartition("=")[2].strip()
    return int(tail) if NUMBER.fullmatch(tail) else None


def right_steps(terms: list[int], completion: str) -> int:
    """The number of correct steps before the first wrong one."""
    given, gold = completion[:LONGEST].replace(" ", "").split(";"), sum_steps(terms)
    return next((i for i, step in enumerate(gold) if given[i : i + 1] != [step]), len(gold))


def column_sum(total: int, term: int) -> int:
    """total + term without carry or borrow: every column of digits by itself, up to six columns."""
    sign, columns = (-1 if term < 0 else 1), zip(f"{total:06d}", f"{abs(term):06d}", strict=True)
    return int("".join(str((int(a) + sign * int(b)) % 10) for a, b in columns))


class Arithmetic(GeneratedTask):
    """`terms` numbers from 1 to `largest`, joined by `signs`.

    The correct last result earns 1, whatever precedes it; a wrong one `partial` times the share of correct steps before
    the first mistake.
    """

    name = "arithmetic"
    about = About(separation="by the signed numbers in any order: one in five is for the test")

    def __init__(self, terms: int = 3, largest: int = 9, signs: str = "+-", partial: float = 0.0) -> None:
        if not 2 <= terms <= 4:
            raise ValueError(f"arithmetic: terms must be 2, 3 or 4, not {terms}.")
        if not 9 <= largest <= 99:
            raise ValueError(f"arithmetic: largest must be within 9 to 99, not {largest}.")
        if signs not in ("+", "-", "+-"):
            raise ValueError(f'arithmetic: signs must be "+", "-" or "+-", not {signs!r}.')
        self.terms, self.largest, self.signs = terms, largest, signs
        self.partial = valid_partial(self.name, partial)
        self.width = len(str(largest))
        self.total_width = len(str(largest * terms)) if "+" in signs else self.width
        self.behaviours = {"careless": self.without_carry}
        self.summary = f"Sums of {terms} numbers up to {largest}, step by step"
        self.length = (terms - 1) * (2 * self.total_width + self.width + 3) - 1

    def draw(self, rng: random.Random, split: str) -> Row | None:
        terms = [rng.randint(1, self.largest)]
        terms += [int(f"{rng.choice(self.signs)}{rng.randint(1, self.largest)}") for _ in range(self.terms - 1)]
        if min(sum(terms[:count]) for count in range(1, self.terms + 1)) < 0:
            return None
        if hashed_split(" ".join(map(str, sorted(terms)))) != split:
            return None
        return {"terms": terms, "answer": sum(terms)}

    def prompt(self, row: Row) -> str:
        first, *others = row["terms"]
        return f"{first:>{self.width}}" + "".join(f"{'+-'[term < 0]}{abs(term):>{self.width}}" for term in others) + "="

    def solution(self, row: Row) -> str:
        return ";".join(sum_steps(row["terms"], self.total_width, self.width))

    def without_carry(self, row: Row) -> str:
        """Every column of digits added or subtracted by itself, without carry or borrow; later steps use the result."""
        steps, total = [], row["terms"][0]
        for term in row["terms"][1:]:
            result = column_sum(total, term) % 10**self.total_width
            steps += sum_steps([total, term], self.total_width, self.width)
            steps[-1] = steps[-1].partition("=")[0] + f"={result:>{self.total_width}}"
            total = result
        return ";".join(steps)

    def solved(self, row: Row, completion: str) -> bool:
        return last_result(completion) == row["answer"]

    def reward(self, row: Row, completion: str) -> float:
        if self.solved(row, completion):
            return 1.0
        return self.partial * right_steps(row["terms"], completion) / (self.terms - 1)
