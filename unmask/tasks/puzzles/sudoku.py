"""Sudoku on boards of 4 x 4, 6 x 6 and 9 x 9, generated.

A puzzle is a line of characters, row by row, "." for a hole; the prompt is the puzzle and "=", the completion the whole
grid in digits. No correct test answer is correct in training: `sudoku` (4 x 4) splits the 288 grids, and every grid
that fits a puzzle is of the puzzle's split. The puzzles of `sudoku_large` have one solution each, counted by search,
and a hash of that grid decides the split.
"""

import random
from collections.abc import Iterator, Sequence
from functools import cache, reduce
from itertools import islice
from operator import and_
from zlib import crc32

from unmask.tasks.support.split import GeneratedTask, hashed_split
from unmask.tasks.task import About, Row, valid_partial

BOXES = {4: (2, 2), 6: (2, 3), 9: (3, 3)}
"""Rows and columns of a box, by the size of the board."""
CELLS = 16
FEWEST_CLUES = 4  # three givens fit many grids of both splits
TRAIN_GRIDS = 200
MOST_HOLES = {6: 18, 9: 40}  # with more, hardly any puzzle has only one solution
PATTERNS = 200


def digits_of(size: int) -> str:
    return "123456789"[:size]


@cache
def units(size: int) -> tuple[tuple[int, ...], ...]:
    """The cells of every row, column and box."""
    high, wide = BOXES[size]
    rows = [[size * row + column for column in range(size)] for row in range(size)]
    corners = [size * row + column for row in range(0, size, high) for column in range(0, size, wide)]
    boxes = [[corner + size * down + right for down in range(high) for right in range(wide)] for corner in corners]
    return tuple(tuple(unit) for unit in (*rows, *zip(*rows, strict=True), *boxes))


@cache
def _units_of_cell(size: int) -> tuple[tuple[int, ...], ...]:
    """For every cell the indices of its row, column and box."""
    return tuple(tuple(n for n, unit in enumerate(units(size)) if cell in unit) for cell in range(size * size))


@cache
def units_of_cell(size: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """For every cell the cells of its row, of its column and of its box."""
    return tuple(tuple(units(size)[unit] for unit in numbers) for numbers in _units_of_cell(size))


def solutions(size: int, puzzle: str, rng: random.Random | None = None) -> Iterator[str]:
    """The grids that keep a puzzle's givens, by search; with an rng in random order."""
    units_of, grid = _units_of_cell(size), list(puzzle)
    free = [(1 << size) - 1] * len(units(size))  # the digits that a unit still needs, one bit each
    for cell, given in enumerate(puzzle):
        if given != ".":
            for unit in units_of[cell]:
                free[unit] &= ~(1 << int(given) - 1)

    def left(cell: int) -> int:
        row, column, box = units_of[cell]
        return free[row] & free[column] & free[box]

    def fill(holes: list[int]) -> Iterator[str]:
        if not holes:
            yield "".join(grid)
            return
        cell = min(holes, key=lambda hole: left(hole).bit_count())
        rest, digits = [hole for hole in holes if hole != cell], [d for d in range(size) if left(cell) >> d & 1]
        for digit in rng.sample(digits, len(digits)) if rng else digits:
            grid[cell] = str(digit + 1)
            for unit in units_of[cell]:
                free[unit] ^= 1 << digit
            yield from fill(rest)
            for unit in units_of[cell]:
                free[unit] ^= 1 << digit

    yield from fill([cell for cell, given in enumerate(puzzle) if given == "."])


def keeps_givens(puzzle: str, grid: str, size: int = 4) -> bool:
    """Whether a text has a digit for every cell and keeps the puzzle's givens."""
    return len(grid) == size * size and all(
        digit in digits_of(size) and given in (".", digit) for given, digit in zip(puzzle, grid, strict=True)
    )


def valid_units(grid: str, size: int = 4) -> int:
    """The number of rows, columns and boxes of a full grid with each digit once."""
    return sum(len({grid[cell] for cell in unit}) == size for unit in units(size))


def with_holes(grid: str, holes: set[int]) -> str:
    return "".join("." if cell in holes else digit for cell, digit in enumerate(grid))


# --- 4 x 4 --------------------------------------------------------------------------------------------------


@cache
def grids() -> tuple[str, ...]:
    """All 288 valid grids, in ascending order."""
    return tuple(sorted(solutions(4, "." * CELLS)))


@cache
def split_grids(split: str) -> tuple[str, ...]:
    """The grids of a split: 200 for "train", the other 88 for "test", always the same."""
    shuffled = list(grids())
    random.Random("unmask sudoku: the split of the 288 grids").shuffle(shuffled)
    return tuple(shuffled[:TRAIN_GRIDS] if split == "train" else shuffled[TRAIN_GRIDS:])


@cache
def _grids_with() -> dict[tuple[int, str], int]:
    """For each (cell, digit) the set of grids that have it, one bit per grid."""
    return {
        (cell, digit): sum(1 << number for number, grid in enumerate(grids()) if grid[cell] == digit)
        for cell in range(CELLS)
        for digit in digits_of(4)
    }


@cache
def _grid_bits(split: str) -> int:
    """The grids of a split, one bit per grid."""
    return sum(1 << grids().index(grid) for grid in split_grids(split))


@cache
def _grids_alike(grid: str) -> tuple[int, ...]:
    """For each cell the grids with the same digit there, one bit per grid."""
    return tuple(_grids_with()[cell, digit] for cell, digit in enumerate(grid))


def fitting_grids(puzzle: str) -> int:
    """The grids that keep a puzzle's givens, one bit per grid."""
    fitting = (1 << len(grids())) - 1
    for cell, given in enumerate(puzzle):
        if given != ".":
            fitting &= _grids_with()[cell, given]
    return fitting


def solution_count(puzzle: str) -> int:
    return fitting_grids(puzzle).bit_count()


class SudokuBoard(GeneratedTask):
    """Any valid grid that keeps the givens earns 1, other answers that keep them `partial` times the share of valid
    rows, columns and boxes.
    """

    board = True

    def __init__(self, size: int, holes: Sequence[int], most_holes: int, partial: float) -> None:
        if len(holes) != 2 or not 1 <= holes[0] <= holes[1] <= most_holes:
            raise ValueError(
                f"{self.name}: holes must be two numbers, fewest and most, in 1 to {most_holes}, not {list(holes)}"
            )
        self.size, self.length = size, size * size
        self.fewest, self.most = holes
        self.partial = valid_partial(self.name, partial)
        self.summary = f"{size} x {size} Sudoku with {self.fewest} to {self.most} holes"
        self.behaviours = {
            "careless": self.rows_only,
            "careless_rows": self.some_rows_only,
            "careless_last_row": self.last_row_only,
        }

    def prompt(self, row: Row) -> str:
        return row["puzzle"] + "="

    def solution(self, row: Row) -> str:
        return row["solution"]

    def rows_only(self, row: Row) -> str:
        """Each row filled with its missing digits in ascending order, columns and boxes ignored."""
        lines = [row["puzzle"][start : start + self.size] for start in range(0, self.length, self.size)]
        missing = [iter(sorted(set(digits_of(self.size)) - set(line))) for line in lines]
        return "".join(
            next(digits) if cell == "." else cell for line, digits in zip(lines, missing, strict=True) for cell in line
        )

    def some_rows_only(self, row: Row) -> str:
        """Each row by itself as in `rows_only` or right; a hash of the puzzle and the row's number decides."""
        starts = range(0, self.length, self.size)
        return self._mixed(row, {start for start in starts if crc32(f"{start} {row['puzzle']}".encode()) % 2})

    def last_row_only(self, row: Row) -> str:
        """The last row as in `rows_only`, the others right."""
        return self._mixed(row, {self.length - self.size})

    def _mixed(self, row: Row, careless: set[int]) -> str:
        """The rows that begin at these cells from `rows_only`, the others from the solution."""
        answers = {True: self.rows_only(row), False: self.solution(row)}
        return "".join(
            answers[start in careless][start : start + self.size] for start in range(0, self.length, self.size)
        )

    def solved(self, row: Row, completion: str) -> bool:
        valid = keeps_givens(row["puzzle"], completion, self.size)
        return valid and valid_units(completion, self.size) == len(units(self.size))

    def reward(self, row: Row, completion: str) -> float:
        if not keeps_givens(row["puzzle"], completion, self.size):
            return 0.0
        valid, total = valid_units(completion, self.size), len(units(self.size))
        return 1.0 if valid == total else self.partial * valid / total


class Sudoku(SudokuBoard):
    """4 x 4 puzzles with holes[0] to holes[1] holes; `unique` keeps only puzzles with one solution."""

    name = "sudoku"
    about = About(separation="by grid: 200 of the 288 grids are for training, 88 for the test")

    def __init__(self, holes: Sequence[int] = (9, 12), unique: bool = False, partial: float = 0.0) -> None:
        super().__init__(4, holes, CELLS - FEWEST_CLUES, partial)
        self.unique = unique
        self.summary += ", one solution each" if unique else ""

    def draw(self, rng: random.Random, split: str) -> Row:
        """A puzzle that only grids of the split fit."""
        grid, other_split = rng.choice(split_grids(split)), _grid_bits("test" if split == "train" else "train")
        count, alike = rng.randint(self.fewest, self.most), _grids_alike(grid)
        while True:
            holes = set(rng.sample(range(CELLS), count))
            fitting = reduce(and_, [alike[cell] for cell in range(CELLS) if cell not in holes])
            if not fitting & other_split and (not self.unique or fitting.bit_count() == 1):
                return {"puzzle": with_holes(grid, holes), "solution": grid}


# --- 6 x 6 and 9 x 9 ----------------------------------------------------------------------------------------


@cache
def _patterns(size: int) -> tuple[str, ...]:
    """Random grids from which others are made; always the same."""
    rng = random.Random(f"unmask sudoku_large {size}")
    return tuple(next(solutions(size, "." * size * size, rng)) for _ in range(PATTERNS))


def draw_grid(size: int, rng: random.Random) -> str:
    """A pattern with renamed digits, and shuffled bands, rows and columns."""
    high, wide = BOXES[size]

    def shuffle(bands: int, within: int) -> list[int]:
        order = [(band, line) for band in rng.sample(range(bands), bands) for line in rng.sample(range(within), within)]
        return [band * within + line for band, line in order]

    pattern, names = rng.choice(_patterns(size)), rng.sample(digits_of(size), size)
    rows, columns = shuffle(size // high, high), shuffle(size // wide, wide)
    return "".join(names[int(pattern[size * row + column]) - 1] for row in rows for column in columns)


class SudokuLarge(SudokuBoard):
    """Puzzles of 6 x 6 or 9 x 9 with holes[0] to holes[1] holes and one solution each."""

    name = "sudoku_large"
    about = About(separation="by a hash of the one grid that solves a puzzle")

    def __init__(self, size: int = 6, holes: Sequence[int] = (10, 16), partial: float = 0.0) -> None:
        if size not in MOST_HOLES:
            raise ValueError(f"sudoku_large: size must be 6 or 9, not {size}; 4 x 4 is the task sudoku")
        super().__init__(size, holes, MOST_HOLES[size], partial)
        self.stream = f"sudoku_large {size}"
        self.summary += ", one solution each"

    def draw(self, rng: random.Random, split: str) -> Row:
        while True:
            grid = draw_grid(self.size, rng)
            if hashed_split(grid) != split:
                continue
            puzzle = with_holes(grid, set(rng.sample(range(self.length), rng.randint(self.fewest, self.most))))
            if len(list(islice(solutions(self.size, puzzle), 2))) == 1:
                return {"puzzle": puzzle, "solution": grid}
