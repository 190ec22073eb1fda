"""The positions of Sudoku cells in a completion: the viewer draws the board as it fills."""

import re
from collections.abc import Sequence
from math import isqrt
from typing import Any

from unmask.tasks import Task
from unmask.tasks.puzzles.sudoku import CELLS
from unmask.tasks.task import Row

OUTSIDE = -1
"""The position of a cell that is not in the completion."""
NOWHERE = [OUTSIDE] * CELLS
# Sixteen digits with up to eight other characters between them, from any start. The task's grader decides which of the
# matches is the board.
BOARD = re.compile(r"(?=([1-4](?:[^0-9]{0,8}[1-4]){15}))")


def cell_positions(task: Task, row: Row, tokens: Sequence[str], text: str) -> list[int] | None:
    """The position of each cell in a completion of these tokens, whose text is `text`; None if it is not a Sudoku or
    the board does not have one token per cell."""
    if not task.board:
        return None
    if not task.text:
        return list(range(task.length)) if all(len(token) == 1 for token in tokens[: task.length]) else None
    board, place_of = task.grade(row, text).answer, [place for place, token in enumerate(tokens) for _ in token]
    if len(board) != CELLS:
        return NOWHERE
    for match in reversed(list(BOARD.finditer("".join(tokens)))):
        digits = [match.start() + at for at, character in enumerate(match[1]) if character.isdigit()]
        if "".join(match.string[at] for at in digits) == board:
            cells = [place_of[at] for at in digits]
            return cells if len(set(cells)) == CELLS else None
    return NOWHERE


def board_line(row: Row, cells: Sequence[list[int] | None]) -> dict[str, Any] | None:
    """The puzzle, and the positions of its cells if they are the same in all rollouts; None without a board."""
    if any(each is None for each in cells):
        return None
    shared = cells[0] if all(each == cells[0] for each in cells) else NOWHERE
    puzzle = [int(clue) if clue.isdigit() else 0 for clue in row["puzzle"]]
    return {"size": isqrt(len(puzzle)), "puzzle": puzzle, "cells": shared}
