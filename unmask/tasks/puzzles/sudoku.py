"""Sudoku on a 4 x 4 board, generated.

A puzzle is 16 characters, row by row, "." for a hole; the prompt is the puzzle and "=", the completion the
whole grid in 16 digits. All 288 grids are known, which makes two things exact: the number of solutions of a puzzle,
and the split. It is by grid, and every grid that fits a puzzle is of the puzzle's own split: no answer that is right
in the test is ever right in training.
"""

import random
from collections.abc import Sequence
from functools import cache

from unmask.tasks.support.split import split_rng
from unmask.tasks.task import About, Row, Task, checked_partial

DIGITS = "1234"
CELLS = 16
FEWEST_CLUES = 4  # three givens leave many grids open, of both splits
TRAIN_GRIDS = 200

UNITS: tuple[tuple[int, ...], ...] = (
    *(tuple(range(4 * row, 4 * row + 4)) for row in range(4)),
    *(tuple(range(column, CELLS, 4)) for column in range(4)),
    *(tuple(corner + step for step in (0, 1, 4, 5)) for corner in (0, 2, 8, 10)),
)


@cache
def grids() -> tuple[str, ...]:
    """All 288 valid grids, in ascending order."""
    partial = [""]
    for cell in range(CELLS):
        mates = [other for unit in UNITS if cell in unit for other in unit if other < cell]
        partial = [grid + digit for grid in partial for digit in DIGITS if all(grid[mate] != digit for mate in mates)]
    return tuple(partial)


@cache
def split_grids(split: str) -> tuple[str, ...]:
    """The grids of one split: 200 for "train", the other 88 for "test", the same for ever."""
    shuffled = list(grids())
    random.Random("unmask sudoku: the split of the 288 grids").shuffle(shuffled)
    return tuple(shuffled[:TRAIN_GRIDS] if split == "train" else shuffled[TRAIN_GRIDS:])


@cache
def _grids_with() -> dict[tuple[int, str], int]:
    """For each (cell, digit) the set of grids that have it, one bit per grid."""
    return {
        (cell, digit): sum(1 << number for number, grid in enumerate(grids()) if grid[cell] == digit)
        for cell in range(CELLS)
        for digit in DIGITS
    }


@cache
def _grids_of(split: str) -> int:
    """The grids of one split, one bit per grid."""
    return sum(1 << grids().index(grid) for grid in split_grids(split))


def fitting_grids(puzzle: str) -> int:
    """The grids that keep a puzzle's givens, one bit per grid."""
    fitting = (1 << len(grids())) - 1
    for cell, given in enumerate(puzzle):
        if given != ".":
            fitting &= _grids_with()[cell, given]
    return fitting


def solution_count(puzzle: str) -> int:
    return fitting_grids(puzzle).bit_count()


def valid_units(grid: str) -> int:
    """How many of the 12 rows, columns and boxes of a full grid hold each digit once."""
    return sum(len({grid[cell] for cell in unit}) == 4 for unit in UNITS)


def answers(puzzle: str, completion: str) -> bool:
    """Whether the completion has the form of an answer: 16 digits that keep every given."""
    return (
        len(completion) == CELLS
        and all(digit in DIGITS for digit in completion)
        and all(given in (".", digit) for given, digit in zip(puzzle, completion, strict=True))
    )


def task(holes: Sequence[int] = (9, 12), unique: bool = False, partial: float = 0.0) -> Task:
    """Puzzles with holes[0] to holes[1] holes; unique keeps only those with one solution.

    Any valid grid that keeps the givens earns 1, also where it is not the grid the puzzle was made from.
    Other answers that keep the givens earn `partial` times the share of valid rows, columns and boxes.
    """
    if len(holes) != 2 or not 1 <= holes[0] <= holes[1] <= CELLS - FEWEST_CLUES:
        raise ValueError(f"sudoku: holes must be two numbers, fewest and most, in 1 to 12, not {list(holes)}.")
    fewest, most = holes
    partial = checked_partial("sudoku", partial)

    def puzzle(rng: random.Random, grid: str, foreign: int) -> str:
        """A puzzle of this grid that no foreign grid fits."""
        count = rng.randint(fewest, most)
        while True:
            emptied = set(rng.sample(range(CELLS), count))
            text = "".join("." if cell in emptied else digit for cell, digit in enumerate(grid))
            fitting = fitting_grids(text)
            if not fitting & foreign and (not unique or fitting.bit_count() == 1):
                return text

    def rows(split: str, n: int, seed: int) -> list[Row]:
        rng = split_rng("sudoku", split, seed)
        foreign = _grids_of("test" if split == "train" else "train")
        chosen = (rng.choice(split_grids(split)) for _ in range(n))
        return [
            {"id": f"sudoku-{split}-{seed}-{number}", "puzzle": puzzle(rng, grid, foreign), "solution": grid}
            for number, grid in enumerate(chosen)
        ]

    def solved(row: Row, completion: str) -> bool:
        return answers(row["puzzle"], completion) and valid_units(completion) == len(UNITS)

    def reward(row: Row, completion: str) -> float:
        if not answers(row["puzzle"], completion):
            return 0.0
        valid = valid_units(completion)
        return 1.0 if valid == len(UNITS) else partial * valid / len(UNITS)

    return Task(
        name="sudoku",
        summary=f"4 x 4 Sudoku with {fewest} to {most} holes" + (", one solution each" if unique else ""),
        length=CELLS,
        rows=rows,
        prompt=lambda row: row["puzzle"] + "=",
        solution=lambda row: row["solution"],
        reward=reward,
        solved=solved,
        about=About(apart="by grid: 200 of the 288 grids are for training, 88 for the test"),
        board=True,
    )
