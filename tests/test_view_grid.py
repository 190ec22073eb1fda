"""The cells of a Sudoku are where the grader read them."""

from unmask.tasks import TASKS
from unmask.training.run.sudoku_board import NOWHERE, board_line, cell_positions

GRID = "1234341221434321"
ROW = {"puzzle": "1000000000000001", "solution": GRID}


def test_the_cells_of_a_board_in_words_are_where_the_grader_read_it() -> None:
    task = TASKS["sudoku_text"]()
    drawn = f"{GRID[:4]} {GRID[4:8]}\n{GRID[8:12]} | {GRID[12:]}"
    text = f"It is {GRID[::-1]}, no:</reasoning>\n<answer>\n{drawn}\n</answer>"
    for before in ("", "1 ", "Row 4: 12"):  # digits that are not the board's
        near_it = f"<answer>{before}</answer>{before}\n{GRID}"
        positions = cell_positions(task, ROW, list(near_it), near_it)
        assert positions == list(range(len(near_it) - 16, len(near_it)))
    cells = cell_positions(task, ROW, list(text), text)
    assert cells is not None and "".join(text[cell] for cell in cells) == GRID and cells[0] > text.index("<answer>")
    tokens = [*text[: cells[0]], text[cells[0] : cells[1] + 1], *text[cells[1] + 1 :]]  # two digits in one token
    assert "".join(tokens) == text and cell_positions(task, ROW, tokens, text) is None
    assert cell_positions(task, ROW, list("none"), "none") == NOWHERE
    assert cell_positions(TASKS["countdown"](), ROW, list(text), text) is None


def test_a_board_has_the_cells_that_all_rollouts_share() -> None:
    puzzle = [1, *[0] * 14, 1]
    here, there = list(range(16)), list(range(1, 17))
    assert board_line(ROW, [here, here]) == {"size": 4, "puzzle": puzzle, "cells": here}
    assert board_line({"puzzle": "1..............1"}, [here, there]) == {"size": 4, "puzzle": puzzle, "cells": NOWHERE}
    assert board_line(ROW, [here, None]) is None
