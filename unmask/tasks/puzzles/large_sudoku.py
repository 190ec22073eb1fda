"""Sudoku on a 6 x 6 or a 9 x 9 board, generated; as `sudoku`, which has 4 x 4 and knows all its grids.

A puzzle is a line of characters, row by row, "." for a hole; the prompt is the puzzle and "=", the completion the
whole grid in digits. Every puzzle has one solution, counted by search, and a hash of that grid says which split it is
of: no answer that is right in the test is ever right in training.
"""

import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice

from unmask.tasks.support.split import hashed_split, split_rng
from unmask.tasks.task import About, Row, Task, checked_partial

BOXES = {4: (2, 2), 6: (2, 3), 9: (3, 3)}
"""Rows and columns of a box, by the size of the board."""
PATTERNS = 200


@cache
def units(size: int) -> tuple[tuple[int, ...], ...]:
    """The cells of every row, column and box."""
    high, wide = BOXES[size]
    rows = [[size * row + column for column in range(size)] for row in range(size)]
    corners = [size * row + column for row in range(0, size, high) for column in range(0, size, wide)]
    boxes = [[corner + size * down + right for down in range(high) for right in range(wide)] for corner in corners]
    return tuple(tuple(unit) for unit in (*rows, *zip(*rows, strict=True), *boxes))


@cache
def _homes(size: int) -> tuple[tuple[int, ...], ...]:
    """For every cell the numbers of its row, column and box."""
    return tuple(tuple(n for n, unit in enumerate(units(size)) if cell in unit) for cell in range(size * size))


def solutions(size: int, puzzle: str, rng: random.Random | None = None) -> Iterator[str]:
    """The grids that keep a puzzle's givens, by search; with an rng in an order by chance."""
    homes, grid = _homes(size), list(puzzle)
    free = [(1 << size) - 1] * len(units(size))  # the digits that a unit does not have yet, one bit each
    for cell, given in enumerate(puzzle):
        if given != ".":
            for unit in homes[cell]:
                free[unit] &= ~(1 << int(given) - 1)

    def left(cell: int) -> int:
        row, column, box = homes[cell]
        return free[row] & free[column] & free[box]

    def filled(holes: list[int]) -> Iterator[str]:
        if not holes:
            yield "".join(grid)
            return
        cell = min(holes, key=lambda hole: left(hole).bit_count())
        rest, digits = [hole for hole in holes if hole != cell], [d for d in range(size) if left(cell) >> d & 1]
        for digit in rng.sample(digits, len(digits)) if rng else digits:
            grid[cell] = str(digit + 1)
            for unit in homes[cell]:
                free[unit] ^= 1 << digit
            yield from filled(rest)
            for unit in homes[cell]:
                free[unit] ^= 1 << digit

    yield from filled([cell for cell, given in enumerate(puzzle) if given == "."])


@cache
def _patterns(size: int) -> tuple[str, ...]:
    """Grids found by chance, of which others are made; always the same ones."""
    rng = random.Random(f"unmask sudoku_large {size}")
    return tuple(next(solutions(size, "." * size * size, rng)) for _ in range(PATTERNS))


def drawn_grid(size: int, rng: random.Random) -> str:
    """A pattern, its digits renamed, its rows and columns shuffled within their bands, and the bands."""
    high, wide = BOXES[size]

    def shuffled(bands: int, within: int) -> list[int]:
        order = [(band, line) for band in rng.sample(range(bands), bands) for line in rng.sample(range(within), within)]
        return [band * within + line for band, line in order]

    pattern, names = rng.choice(_patterns(size)), rng.sample("123456789"[:size], size)
    rows, columns = shuffled(size // high, high), shuffled(size // wide, wide)
    return "".join(names[int(pattern[size * row + column]) - 1] for row in rows for column in columns)


def task(size: int = 6, holes: Sequence[int] = (10, 16), partial: float = 0.0) -> Task:
    """Puzzles of size x size with holes[0] to holes[1] holes and one solution each.

    The solution earns 1; other answers that keep the givens earn `partial` times the share of valid rows, columns and
    boxes.
    """
    if size not in (6, 9):
        raise ValueError(f"sudoku_large: size is 6 or 9, not {size}; 4 x 4 is the task sudoku")
    most = {6: 18, 9: 40}[size]  # with more, hardly any puzzle has one solution
    if len(holes) != 2 or not 1 <= holes[0] <= holes[1] <= most:
        raise ValueError(f"sudoku_large: holes must be two numbers, fewest and most, in 1 to {most}, not {list(holes)}")
    partial = checked_partial("sudoku_large", partial)
    digits = "123456789"[:size]

    def made(rng: random.Random, split: str) -> Row:
        """Drawn until it is of the split and has one solution."""
        while True:
            grid = drawn_grid(size, rng)
            if hashed_split(grid) != split:
                continue
            emptied = set(rng.sample(range(size * size), rng.randint(*holes)))
            puzzle = "".join("." if cell in emptied else digit for cell, digit in enumerate(grid))
            if len(list(islice(solutions(size, puzzle), 2))) == 1:
                return {"puzzle": puzzle, "solution": grid}

    def rows(split: str, n: int, seed: int) -> list[Row]:
        rng = split_rng(f"sudoku_large {size}", split, seed)
        return [{"id": f"sudoku_large-{size}-{split}-{seed}-{number}", **made(rng, split)} for number in range(n)]

    def reward(row: Row, completion: str) -> float:
        if completion == row["solution"]:
            return 1.0
        kept = len(completion) == size * size and all(
            digit in digits and given in (".", digit) for given, digit in zip(row["puzzle"], completion, strict=True)
        )
        if not kept:
            return 0.0
        valid = sum(len({completion[cell] for cell in unit}) == size for unit in units(size))
        return partial * valid / len(units(size))

    return Task(
        name="sudoku_large",
        summary=f"{size} x {size} Sudoku with {holes[0]} to {holes[1]} holes, one solution each",
        length=size * size,
        rows=rows,
        prompt=lambda row: row["puzzle"] + "=",
        solution=lambda row: row["solution"],
        reward=reward,
        solved=lambda row, completion: completion == row["solution"],
        about=About(apart="by a hash of the one grid that solves a puzzle"),
        board=True,
    )
