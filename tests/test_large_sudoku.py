import random
from itertools import islice

import pytest

from unmask.tasks import TASKS
from unmask.tasks.puzzles import sudoku as small
from unmask.tasks.puzzles.sudoku import BOXES, draw_grid, solutions, units
from unmask.tasks.support.split import hashed_split


def test_the_search_finds_the_solutions_that_the_list_of_all_4_x_4_grids_gives():
    assert sorted(solutions(4, "." * 16)) == list(small.grids())
    for row in small.Sudoku().rows("train", 20, 0):
        assert len(list(solutions(4, row["puzzle"]))) == small.solution_count(row["puzzle"])


@pytest.mark.parametrize("size", [4, 6, 9])
def test_every_unit_of_a_drawn_grid_holds_each_digit_once(size):
    high, wide = BOXES[size]
    assert len(units(size)) == 3 * size and high * wide == size
    for seed in range(20):
        grid = draw_grid(size, random.Random(seed))
        assert all(sorted(grid[cell] for cell in unit) == sorted("123456789"[:size]) for unit in units(size))
        assert list(islice(solutions(size, grid), 2)) == [grid]


def test_drawn_grids_are_hardly_ever_the_same():
    rng = random.Random(0)
    assert len({draw_grid(6, rng) for _ in range(300)}) > 290


@pytest.mark.parametrize(("size", "holes"), [(6, (10, 16)), (9, (10, 20))])
def test_rows_have_one_solution_and_their_grid_says_the_split(size, holes):
    task = TASKS["sudoku_large"](size=size, holes=holes)
    for split in ("train", "test"):
        rows = task.rows(split, 12, 3)
        assert task.rows(split, 5, 3) == rows[:5]
        for row in rows:
            assert list(islice(solutions(size, row["puzzle"]), 2)) == [row["solution"]]
            assert hashed_split(row["solution"]) == split and holes[0] <= row["puzzle"].count(".") <= holes[1]


def test_rewards():
    task = TASKS["sudoku_large"](partial=0.5)
    row = task.rows("test", 1, 0)[0]
    right, hole = row["solution"], row["puzzle"].index(".")
    wrong = right[:hole] + str(int(right[hole]) % 6 + 1) + right[hole + 1 :]
    given = next(cell for cell, text in enumerate(row["puzzle"]) if text != ".")
    lost = right[:given] + str(int(right[given]) % 6 + 1) + right[given + 1 :]
    assert [task.reward(row, text) for text in (right, lost, right[:-1], "x" * 36)] == [1.0, 0.0, 0.0, 0.0]
    assert task.reward(row, wrong) == pytest.approx(0.5 * 15 / 18)  # its row, column and box
    assert task.solved(row, right) and not task.solved(row, wrong)


@pytest.mark.parametrize("options", [{"size": 4}, {"size": 8}, {"holes": (0, 3)}, {"holes": (9, 19)}, {"partial": 1.0}])
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match="sudoku_large"):
        TASKS["sudoku_large"](**options)
