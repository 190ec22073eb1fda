r"""4 x 4 Sudoku in words: a puzzle of 16 digits, 0 for a hole; the answer is the whole grid.

Protocols:
    unmask     the grid of the last <answer> block or \boxed{...}, else the last word of 16 digits; solved by any grid
               that fits the clues; also reports the share of correct holes, in the nearest grid that fits
    d1         the share of correct holes, against the one listed solution; see docs/benchmarks.md; also reports the
               puzzles solved by any grid that fits the clues
    spg_3shot  three worked examples in the prompt, graded like d1
    agrpo      graded like unmask; the system turn asks for <think>
    short      the puzzle without rules or form, for a model that was fine-tuned on the form; graded like unmask
"""

import re
from collections.abc import Sequence
from typing import Literal

from unmask.tasks.puzzles.sudoku import CELLS, Sudoku, fitting_grids, grids, keeps_givens, split_grids, units_of_cell
from unmask.tasks.support import d1_rewards
from unmask.tasks.support.answers import bounded_text, last_answer, last_box, text_before_end
from unmask.tasks.support.protocol import (
    D1_DECODING,
    Protocol,
    Rewards,
    TextPuzzle,
    answer_form,
    tagged_completion,
    think_protocol,
)
from unmask.tasks.support.split import SPLITS
from unmask.tasks.task import About, Grade, Row, Weights

FIELDS = {"puzzle": str, "solution": str}
PUZZLE = re.compile(r"[0-4]{16}")
FRAME = re.compile(r"[\s|,+\-`\[\]*]")  # characters of a drawn grid
GRID = re.compile(r"(?<![0-9])[1-4]{16}(?![0-9])")

D1_ENDS = r"<\|eot_id\|>|<\|endoftext\|>"
D1_FENCED = re.compile(r"```([\d\s]+)```")
D1_ANSWER_ENDS = re.compile(D1_ENDS + "|</answer>")
D1_CLOSED = re.compile(r"(\d{16})\s*</answer>")
D1_WORD = re.compile(r"\b(\d{16})\b")


def with_dots(puzzle: str) -> str:
    """The puzzle in the embedded task's form."""
    return puzzle.replace("0", ".")


def answer(completion: str) -> str | None:
    text = text_before_end(completion)
    for content in (last_answer(text), last_box(text)):
        if content is not None and GRID.fullmatch(grid := FRAME.sub("", content)):
            return grid
    words = GRID.findall(text)
    return words[-1] if words else None


def grade(row: Row, completion: str) -> Grade:
    grid = answer(completion) or ""
    return Grade(float(grid in fitting(row)), 1.0, grid)


def fitting(row: Row) -> set[str]:
    """All grids that solve the puzzle."""
    bits, found = fitting_grids(with_dots(row["puzzle"])), set[str]()
    while bits:
        number = bits.bit_length() - 1
        found.add(grids()[number])
        bits ^= 1 << number
    return found


def _holes(row: Row) -> list[int]:
    return [cell for cell, given in enumerate(row["puzzle"]) if given == "0"]


def cells_grade(row: Row, completion: str) -> Grade:
    """The correct holes in the nearest grid that fits, also if the answer changes clues."""
    text = answer(completion) or ""
    holes = _holes(row) or range(CELLS)
    right = max(sum(text[cell : cell + 1] == grid[cell] for cell in holes) for grid in fitting(row))
    return Grade(float(right), float(len(holes)), text)


def cells_right(row: Row, completion: str) -> float:
    """The share of correct holes; 0 for an answer that changes a clue."""
    points, out_of, grid = cells_grade(row, completion)
    return points / out_of if keeps_givens(with_dots(row["puzzle"]), grid) else 0.0


def d1_answer(completion: str) -> str:
    """The text of the first of d1's five patterns that matches, without white space, padded with zeros or cut to 16."""
    for text in _d1_matches(bounded_text(completion)):
        if text.strip():
            return re.sub(r"\s", "", text).ljust(CELLS, "0")[:CELLS]
    return ""


def _d1_matches(text: str) -> Sequence[str]:
    _, tag, after = text.partition("<answer>")
    fenced, end = D1_FENCED.search(after), D1_ANSWER_ENDS.search(after) if tag else None
    behind = re.split(D1_ENDS, text.partition("</answer>")[2], maxsplit=1)[0]
    closed, word = D1_CLOSED.search(text), D1_WORD.search(text)
    return (
        fenced[1] if fenced else "",
        after[: end.start()] if end else "",
        behind,
        closed[1] if closed else "",
        word[1] if word else "",
    )


def d1_grade(row: Row, completion: str) -> Grade:
    """Points are the correct holes; the score of a set pools them."""
    text, holes = d1_answer(completion), _holes(row)
    right = sum(text[cell] == row["solution"][cell] for cell in holes) if text else 0
    return Grade(float(right), float(len(holes)), text)


def d1_puzzle_grade(row: Row, completion: str) -> Grade:
    """Whether d1's answer is a grid that fits the clues, the listed one or another."""
    text = d1_answer(completion)
    return Grade(float(text in fitting(row)), 1.0, text)


RULES = (
    "Fill the 4 x 4 Sudoku: each row, each column and each 2 x 2 box holds 1, 2, 3 and 4 once. The puzzle is 16 "
    "digits, row by row, with 0 for an empty cell; the answer is all 16 digits of the grid."
)


def prompt(row: Row) -> str:
    form = answer_form("the 16 digits")
    return f"{RULES}\n\nPuzzle: {row['puzzle']}\n\nWrite your answer in exactly this form:\n{form}"


def d1_question(row: Row) -> str:
    return f"Solve the following Sudoku puzzle: {row['puzzle']}\n"


# Reconstructed from a description of d1's prompt, not copied: its hash differs from d1's.
D1_INSTRUCTIONS = (
    "Please solve the following 4x4 Sudoku puzzle. The puzzle is provided as a 16-character string reading "
    "left-to-right, top-to-bottom, where '0' represents empty cells.\n\n"
    "Rules:\n- Fill empty cells with digits 1-4\n- Each row must contain digits 1-4 exactly once\n"
    "- Each column must contain digits 1-4 exactly once\n- Each 2x2 box must contain digits 1-4 exactly once\n\n"
    "Important: Your solution must be a COMPLETE 16-character string with only the digits 1-4, representing your "
    "final solved grid.\n\nRespond in this exact format:\n"
    + answer_form("[16-character solution string]", "Your step-by-step solving process")
)

# Our examples: we know that SPG shows three, but not which. Their grids solve no puzzle of d1's test file, SPG's, or
# our test split.
SHOTS = (
    ("0341040002130120", "2341143242133124"),
    ("3100003010230300", "3142423114232314"),
    ("0002013400010400", "4312213432411423"),
)


def _shot(puzzle: str, grid: str) -> str:
    """A puzzle with its answer: row by row, the missing digits and the filled row."""
    lines = []
    for start in range(0, CELLS, 4):
        given, filled = puzzle[start : start + 4], grid[start : start + 4]
        missing = ", ".join(digit for digit in "1234" if digit not in given) or "nothing"
        lines.append(f"Row {start // 4 + 1} is {given} and misses {missing}: {filled}.")
    return d1_question({"puzzle": puzzle}) + answer_form(grid, "\n".join(lines))


D1_SHOTS = "\n\n".join(_shot(puzzle, grid) for puzzle, grid in SHOTS)


PROTOCOLS = {
    "unmask": Protocol(prompt, grade),
    "d1": Protocol(lambda row: f"{D1_INSTRUCTIONS}\n\n{d1_question(row)}", d1_grade, decoding=D1_DECODING),
    "spg_3shot": Protocol(
        lambda row: f"{D1_INSTRUCTIONS}\n\n{D1_SHOTS}\n\n{d1_question(row)}", d1_grade, decoding=D1_DECODING
    ),
    "agrpo": think_protocol(lambda row: f"Puzzle: {row['puzzle']}", grade, RULES, "the 16 digits"),
    "short": Protocol(lambda row: f"Sudoku: {row['puzzle']}", grade),
}


def row_by_row(puzzle: str, grid: str) -> list[str]:
    """Short, because many tokenizers make a token of every digit."""
    return [f"{puzzle[start : start + 4]} to {grid[start : start + 4]}" for start in range(0, CELLS, 4)]


def cell_by_cell(puzzle: str, grid: str) -> list[str]:
    """For every hole the digits of its row, column and box so far, and the digit of the grid. The next hole is the one
    that sees most different digits, the first among equals."""
    cells, lines = list(puzzle), list[str]()

    def seen(hole: int) -> list[str]:
        """The digits of its row, of its column and of its box."""
        return ["".join(sorted(cells[cell] for cell in unit if cells[cell] != "0")) for unit in units_of_cell(4)[hole]]

    while "0" in cells:
        holes = [cell for cell, digit in enumerate(cells) if digit == "0"]
        hole = max(holes, key=lambda hole: len(set("".join(seen(hole)))))
        row, column, box = (digits or "none" for digits in seen(hole))
        cells[hole] = grid[hole]
        name = f"r{hole // 4 + 1}c{hole % 4 + 1}"
        lines.append(f"{name}: row {row}, column {column}, box {box}, so {grid[hole]}")
    return lines


Reasoning = Literal["rows", "cells"]
REASONING = {"rows": row_by_row, "cells": cell_by_cell}


class SudokuText(TextPuzzle):
    """Generated puzzles with holes[0] to holes[1] holes, or JSONL files with `puzzle` and `solution`.

    `reasoning` is that of worked solutions: row by row, or cell by cell, which is about three times as long.
    The reward is 1 for a solution, else `partial` times the share of correct holes; `weights` makes it one of several
    parts, `rewards` selects d1's.
    """

    name = "sudoku_text"
    summary = "4 x 4 Sudoku in words, generated or from a file"
    about = About(
        source="generated; or JSONL files with puzzle and solution",
        separation="by solution grid: 200 of the 288 grids are for training, 88 for the test",
        example={"puzzle": "1040040300204031", "solution": "1342241331244231"},
        protocols=tuple(PROTOCOLS),
    )
    board = True
    protocols = PROTOCOLS
    d1_parts = d1_rewards.SUDOKU
    row_fields = FIELDS

    def __init__(
        self,
        data: str = "",
        test_data: str = "",
        protocol: str = "unmask",
        holes: Sequence[int] = (7, 12),
        unique: bool = True,
        partial: float = 0.0,
        rewards: Rewards = "unmask",
        weights: Weights = None,
        reasoning: Reasoning = "rows",
    ) -> None:
        super().__init__(data, test_data, protocol, partial, rewards, weights)
        self.worked = REASONING[reasoning]
        self.set_generator(Sudoku(holes=holes, unique=unique))
        self.other_scores = {"cells": cells_grade} if self.rules.grade is grade else {"puzzles": d1_puzzle_grade}

    def generated_rows(self, split: str, n: int, seed: int) -> list[Row]:
        rows = super().generated_rows(split, n, seed)
        return [{**row, "puzzle": row["puzzle"].replace(".", "0")} for row in rows]

    def generator_row(self, row: Row) -> Row:
        return {**row, "puzzle": with_dots(row["puzzle"])}

    def parse_row(self, row: Row) -> Row:
        puzzle, grid = row["puzzle"].replace(".", "0"), row["solution"]
        if not PUZZLE.fullmatch(puzzle) or grid not in grids() or not keeps_givens(with_dots(puzzle), grid):
            raise ValueError(f"{puzzle!r} is not a puzzle of 16 digits 0 to 4 that the grid {grid!r} solves")
        return {**row, "puzzle": puzzle}

    def keys(self, row: Row) -> set[str]:
        return fitting(row)

    def split_of(self, row: Row) -> str | None:
        """The split of all grids that fit the puzzle; None if grids of both splits do."""
        return next((split for split in SPLITS if fitting(row) <= set(split_grids(split))), None)

    def stored_row(self, line: Row) -> Row:
        """A line with `puzzle`, or a puzzle in its `question`; the grid is the `ground_truth` or the `solution`."""
        if "ground_truth" not in line and "solution" in line:
            line = {**line, "ground_truth": line["solution"]}
        if "puzzle" not in line:
            puzzle = PUZZLE.search(line["question"])
            if puzzle is None:
                raise ValueError('there is no "puzzle", and the "question" has no puzzle of 16 digits')
            line = {**line, "puzzle": puzzle.group()}
        if not isinstance(line["puzzle"], str) or not isinstance(line["ground_truth"], str):
            raise ValueError('"puzzle" and "ground_truth" must be strings of 16 digits')
        return self.parse_row({"puzzle": line["puzzle"], "solution": line["ground_truth"]})

    def credit(self, row: Row, completion: str) -> float:
        return self.partial * cells_right(row, completion)

    def tagged_solution(self, row: Row) -> str:
        return tagged_completion("\n".join(self.worked(row["puzzle"], row["solution"])), row["solution"])

    def facts(self, rows: Sequence[Row]) -> dict[str, int]:
        return {"several_solutions": sum(len(fitting(row)) > 1 for row in rows)}
