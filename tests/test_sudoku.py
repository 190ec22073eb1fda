"""The 4 x 4 Sudoku task, checked against definitions written a second time and plainly."""

import functools
import itertools
import json
from pathlib import Path

import pytest

from unmask.tasks import TASKS
from unmask.tasks.puzzles import sudoku
from unmask.tasks.support.split import split_rng

DATA = Path(__file__).parents[2] / "shared" / "data" / "sudoku4"


def plainly_valid(grid: str) -> bool:
    cells = [list(grid[4 * row : 4 * row + 4]) for row in range(4)]
    for k in range(4):
        box = [cells[2 * (k // 2) + i][2 * (k % 2) + j] for i in range(2) for j in range(2)]
        column = [cells[row][k] for row in range(4)]
        if any(sorted(unit) != list("1234") for unit in (cells[k], column, box)):
            return False
    return True


@functools.cache
def plainly_all_grids() -> list[str]:
    lines = ["".join(line) for line in itertools.permutations("1234")]
    return ["".join(grid) for grid in itertools.product(lines, repeat=4) if plainly_valid("".join(grid))]


def test_the_288_grids():
    assert list(sudoku.grids()) == sorted(plainly_all_grids())
    assert len(sudoku.grids()) == 288


def test_the_split_is_by_grid():
    train, test = set(sudoku.split_grids("train")), set(sudoku.split_grids("test"))
    assert (len(train), len(test)) == (200, 88)
    assert train | test == set(sudoku.grids())
    task = sudoku.Sudoku()
    assert {row["solution"] for row in task.rows("train", 3000, 0)} == train
    assert {row["solution"] for row in task.rows("test", 3000, 0)} == test


def test_the_split_never_moves():
    # Moving it would leak test grids into models that are already trained, such as the shipped one.
    assert sudoku.split_grids("test")[:2] == ("1243342123144132", "4213134221343421")


def test_rows_depend_on_nothing_but_their_arguments():
    task = sudoku.Sudoku()
    first = task.rows("train", 40, 7)
    assert sudoku.Sudoku().rows("train", 40, 7) == first
    assert task.rows("train", 15, 7) == first[:15]
    assert task.rows("train", 40, 8) != first
    with pytest.raises(ValueError, match="validation"):
        task.rows("validation", 1, 0)


@pytest.mark.parametrize("holes", [(1, 1), (9, 12), (12, 12)])
def test_rows_have_the_holes_asked_for_and_a_fitting_solution(holes):
    task = sudoku.Sudoku(holes=holes)
    counts = set()
    for row in task.rows("test", 300, 1):
        assert len(row["puzzle"]) == 16
        assert all(given in (".", digit) for given, digit in zip(row["puzzle"], row["solution"], strict=True))
        assert task.prompt(row) == row["puzzle"] + "="
        assert len(task.solution(row)) == task.length
        assert task.reward(row, task.solution(row)) == 1.0
        counts.add(row["puzzle"].count("."))
    assert counts == set(range(holes[0], holes[1] + 1))


def plain_solutions(puzzle: str) -> list[str]:
    return [
        grid
        for grid in plainly_all_grids()
        if all(given in (".", digit) for given, digit in zip(puzzle, grid, strict=True))
    ]


def test_unique_puzzles_have_one_solution():
    grids = plainly_all_grids()
    loose = sudoku.Sudoku(holes=(9, 12)).rows("train", 200, 0)
    strict = sudoku.Sudoku(holes=(9, 12), unique=True).rows("train", 200, 0)

    def count(puzzle: str) -> int:
        return sum(all(g in (".", d) for g, d in zip(puzzle, grid, strict=True)) for grid in grids)

    assert [sudoku.solution_count(row["puzzle"]) for row in loose] == [count(row["puzzle"]) for row in loose]
    assert max(count(row["puzzle"]) for row in loose) > 1
    assert {count(row["puzzle"]) for row in strict} == {1}


@pytest.mark.parametrize("unique", [False, True])
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_row_is_the_first_drawn_puzzle_that_only_grids_of_its_split_fit(split, unique):
    task, own = sudoku.Sudoku(holes=(7, 12), unique=unique), set(sudoku.split_grids(split))
    rng, rejected = split_rng("sudoku", split, 5), 0
    for row in task.rows(split, 40, 5):
        grid, count = rng.choice(sudoku.split_grids(split)), rng.randint(7, 12)
        while True:
            holes = rng.sample(range(16), count)
            puzzle = "".join("." if cell in holes else digit for cell, digit in enumerate(grid))
            fitting = plain_solutions(puzzle)
            if own.issuperset(fitting) and (not unique or len(fitting) == 1):
                break
            rejected += 1
        assert (row["puzzle"], row["solution"]) == (puzzle, grid)
    assert rejected > 10


def test_another_valid_grid_earns_the_reward_too():
    task = sudoku.Sudoku(partial=0.5)
    row = next(row for row in task.rows("train", 100, 0) if sudoku.solution_count(row["puzzle"]) > 1)
    other = next(grid for grid in plain_solutions(row["puzzle"]) if grid != row["solution"])
    assert task.reward(row, other) == 1.0
    assert task.solved(row, other)


def test_partial_reward_counts_units():
    row = {"puzzle": "1234............", "solution": "1234341221434321"}
    nearly = "1234341221434322"  # its last row, last column and last box are wrong
    assert sudoku.Sudoku(partial=0.6).reward(row, nearly) == pytest.approx(0.6 * 9 / 12)
    assert sudoku.Sudoku().reward(row, nearly) == 0.0
    assert not sudoku.Sudoku(partial=0.6).solved(row, nearly)


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "1234",
        "12343412214343211",  # too long
        "123434122143432x",
        "1234341221434325",  # no such digit
        "\u0661234341221434321",  # an Arabic one
        "2143341212344321",  # does not keep the givens
        "4321341212432134",  # a grid, but not of this puzzle
    ],
)
def test_wrong_forms_earn_nothing_even_with_partial_reward(completion):
    task = sudoku.Sudoku(partial=0.9)
    row = {"puzzle": "1234............", "solution": "1234341221434321"}
    assert task.reward(row, completion) == 0.0
    assert not task.solved(row, completion)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"holes": (0, 3)}, "holes"),
        ({"holes": (5, 4)}, "holes"),
        ({"holes": (5, 17)}, "holes"),
        ({"holes": (5,)}, "holes"),
        ({"holes": (9, 13), "unique": True}, "holes"),
        ({"partial": 1.0}, "partial"),
        ({"partial": -0.1}, "partial"),
    ],
)
def test_impossible_options_are_named(options, named):
    with pytest.raises(ValueError, match=named):
        TASKS["sudoku"](**options)


@pytest.mark.skipif(not DATA.is_dir(), reason="needs the shared data folder beside the checkout")
@pytest.mark.parametrize("name", ["d1_test", "spg_test", "gen_val"])
def test_published_puzzles_score_as_they_should(name):
    task = sudoku.Sudoku()
    rows = [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]
    assert len(rows) >= 100
    for row in rows:
        puzzle = {"puzzle": row["puzzle"].replace("0", "."), "solution": row["solution"]}
        assert sudoku.solution_count(puzzle["puzzle"]) == row["n_solutions"]
        assert task.reward(puzzle, row["solution"]) == 1.0


@pytest.mark.parametrize("holes", [(9, 12), (12, 12)])
def test_no_grid_that_solves_a_test_puzzle_solves_a_training_puzzle(holes):
    task = sudoku.Sudoku(holes=holes)
    own = {split: set(sudoku.split_grids(split)) for split in ("train", "test")}
    for split in ("train", "test"):
        for row in task.rows(split, 300, 5):
            keeps = [all(a in (".", b) for a, b in zip(row["puzzle"], grid, strict=True)) for grid in sudoku.grids()]
            fitting = {grid for grid, fits in zip(sudoku.grids(), keeps, strict=True) if fits}
            assert row["solution"] in fitting and fitting <= own[split]
