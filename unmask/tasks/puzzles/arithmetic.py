"""Sums of several steps, written out, one character a token; generated.

The prompt is a chain of + and - (" 7+12- 5="), the completion each step with its result (" 7+12=19;19- 5=14"). Numbers
are right-aligned, so that every character has its place; in an answer spaces do not matter. Only the last result
counts, unless steps earn partial credit. No result on the way is negative.
The split is by the signed numbers of a problem in any order, so that no test sum is a training sum turned round.
"""

import re

from unmask.tasks.support.split import in_test, split_rng
from unmask.tasks.task import About, Row, Task, checked_partial

LONGEST = 200  # characters; far beyond any sensible answer
NUMBER = re.compile(r"-?[0-9]{1,6}")


def written_out(terms: list[int], total_width: int = 0, width: int = 0) -> list[str]:
    """The steps of a sum, their numbers filled up to these widths: ["7+12=19", "19-5=14"] for [7, 12, -5]."""
    steps, total = [], terms[0]
    for term in terms[1:]:
        result = total + term
        steps.append(f"{total:>{total_width}}{'+-'[term < 0]}{abs(term):>{width}}={result:>{total_width}}")
        total = result
    return steps


def last_result(completion: str) -> int | None:
    """The number after the last equals sign, or the completion itself where it is a number."""
    if len(completion) > LONGEST:
        return None
    tail = completion.rpartition("=")[2].strip()
    return int(tail) if NUMBER.fullmatch(tail) else None


def right_steps(terms: list[int], completion: str) -> int:
    """How many steps are right before the first that is not."""
    written = completion[:LONGEST].replace(" ", "").split(";")
    wanted = written_out(terms)
    return next((i for i, step in enumerate(wanted) if written[i : i + 1] != [step]), len(wanted))


def task(terms: int = 3, largest: int = 9, signs: str = "+-", partial: float = 0.0) -> Task:
    """`terms` numbers from 1 to `largest`, joined by `signs`.

    The right last result earns 1, whatever is before it; a wrong one `partial` times the share of steps that are right
    before the first mistake.
    """
    if not 2 <= terms <= 4:
        raise ValueError(f"arithmetic: terms must be 2, 3 or 4, not {terms}.")
    if not 9 <= largest <= 99:
        raise ValueError(f"arithmetic: largest must be within 9 to 99, not {largest}.")
    if signs not in ("+", "-", "+-"):
        raise ValueError(f'arithmetic: signs must be "+", "-" or "+-", not {signs!r}.')
    partial = checked_partial("arithmetic", partial)
    width = len(str(largest))
    total_width = len(str(largest * terms)) if "+" in signs else width

    def rows(split: str, n: int, seed: int) -> list[Row]:
        rng = split_rng("arithmetic", split, seed)
        found: list[Row] = []
        while len(found) < n:
            drawn = [rng.randint(1, largest)]
            drawn += [int(f"{rng.choice(signs)}{rng.randint(1, largest)}") for _ in range(terms - 1)]
            if min(sum(drawn[:count]) for count in range(1, terms + 1)) < 0:
                continue
            if in_test(" ".join(map(str, sorted(drawn)))) == (split == "test"):
                found.append({"id": f"arithmetic-{split}-{seed}-{len(found)}", "terms": drawn, "answer": sum(drawn)})
        return found

    def prompt(row: Row) -> str:
        first, *others = row["terms"]
        return f"{first:>{width}}" + "".join(f"{'+-'[term < 0]}{abs(term):>{width}}" for term in others) + "="

    def reward(row: Row, completion: str) -> float:
        if last_result(completion) == row["answer"]:
            return 1.0
        return partial * right_steps(row["terms"], completion) / (terms - 1)

    return Task(
        name="arithmetic",
        summary=f"Sums of {terms} numbers up to {largest}, step by step",
        length=(terms - 1) * (2 * total_width + width + 3) - 1,
        rows=rows,
        prompt=prompt,
        solution=lambda row: ";".join(written_out(row["terms"], total_width, width)),
        reward=reward,
        solved=lambda row, completion: last_result(completion) == row["answer"],
        about=About(apart="by the signed numbers in any order: one in five is for the test"),
    )
