"""Countdown and Sudoku in words: graders of both protocols, rewards, rows."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from unmask.tasks.benchmarks import text_countdown, text_sudoku
from unmask.tasks.puzzles import sudoku
from unmask.tasks.puzzles.countdown import numbers_key
from unmask.tasks.support.answers import LONGEST
from unmask.tasks.support.split import hashed_split

DATA = Path(__file__).parents[2] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="needs the shared data folder beside the checkout")

NUMBERS = {"numbers": [22, 52, 37], "target": 7}
GRID = "1234341221434321"
PUZZLE = {"puzzle": "1234000000000000", "solution": GRID}
OTHER = "1234432121433412"  # fits the clues as well


@pytest.mark.parametrize(
    ("completion", "solved"),
    [
        ("\\boxed{37 - 52 + 22}", True),
        ("\\boxed{37 - 52 + 22 = 7}", True),
        ("\\boxed{37 - 52 + 22 = 8}", True),  # what the expression is worth counts, not what is said of it
        ("\\boxed{1} \\boxed{22 + (37-52)}", True),
        ("<answer>\n$22 + 37 - 52$\n</answer>", True),
        ("\\boxed{22 − 52 + 37}", True),
        ("\\boxed{\\left(22 + 37\\right) - 52}", True),
        ("37 - 52 + 22", False),  # no box, no tags
        ("\\boxed{7}", False),
        ("\\boxed{22 + 37 - 52 + 0}", False),
        ("\\boxed{22 * 37 - 52}", False),
        ("\\boxed{22 + 37 - 52}" + "<|eot_id|>", True),
        ("<|eot_id|>\\boxed{22 + 37 - 52}", False),
        ("\\boxed{__import__('os')}", False),
        ("", False),
    ],
)
def test_our_countdown(completion: str, solved: bool) -> None:
    task = text_countdown.CountdownText()
    assert task.solved(NUMBERS, completion) == solved
    assert task.reward(NUMBERS, completion) == float(solved)


def test_countdown_is_exact_and_reads_latex() -> None:
    row = {"numbers": [1, 3, 3], "target": 1}
    task = text_countdown.CountdownText(partial=0.1)
    assert task.solved(row, "\\boxed{\\frac{1}{3} \\times 3}")
    assert task.solved({"numbers": [2, 4, 8, 3], "target": 4}, "\\boxed{\\dfrac{\\frac{8}{4}}{2} + 3}")
    assert task.solved({"numbers": [12, 4, 2], "target": 6}, "\\boxed{12 \\div 4 \\cdot 2}")
    assert task.reward(row, "\\boxed{1 + 3 + 3}") == 0.1
    assert task.reward(row, "\\boxed{1 + 3}") == 0.0
    assert task.reward(row, "\\boxed{1 / (3 - 3)}") == 0.0


@pytest.mark.parametrize(
    ("completion", "numbers", "target", "solved"),
    [
        ("\\boxed{37 - 52 + 22}", [22, 52, 37], 7, True),
        ("so 37 - 52 + 22 = 7, done", [22, 52, 37], 7, True),  # the first equation of a text without a box
        ("<answer>37 - 52 + 22</answer>", [22, 52, 37], 7, False),  # whose <answer> is never looked at
        ("\\boxed{} <answer>37 - 52 + 22</answer>", [22, 52, 37], 7, False),  # an empty box is an answer
        ("\\boxed{} 37 - 52 + 22 = 7", [22, 52, 37], 7, False),
        ("\\boxed{ <answer>37 - 52 + 22</answer>", [22, 52, 37], 7, True),  # the block counts if the box is open
        ("\\boxed{ so 37 - 52 + 22 = 7", [22, 52, 37], 7, True),
        ("\\boxed 37 - 52 + 22$ and \\boxed{1}", [22, 52, 37], 7, True),  # a space: up to the dollar sign
        ("\\boxed{(37 - 52\n + 22)}", [22, 52, 37], 7, True),  # Python allows a new line in parentheses
        ("\\boxed{37 - 52\n + 22}", [22, 52, 37], 7, False),
        ("\\boxed{37\t-\t52 + 22\n}", [22, 52, 37], 7, True),
        ("\\boxed{37 - 52 + 22 = 7}", [22, 52, 37], 7, True),
        ("\\boxed{\\frac{4}{2} + 1}", [4, 2, 1], 3, False),
        ("\\boxed{2 ** 3 // 1}", [2, 3, 1], 8, True),  # Python's, not the game's
        ("\\boxed{1.5 + 2}", [1, 5, 2], 3, False),
        ("\\boxed{1.5 * 2}", [1, 5, 2], 3, True),  # 1.5 counts as a 1 and a 5
        ("\\boxed{-1 + 5 - 2}", [1, 5, 2], 2, True),
        ("\\boxed{1/3*3}", [1, 3, 3], 1, True),
        ("\\boxed{99**98**97}", [99, 98, 97], 1, False),
        ("\\boxed{1/(2-2)}", [1, 2, 2], 1, False),
        ("\\boxed{5(1)+2}", [5, 1, 2], 7, False),
        ("\\boxed{01 + 2 + 3}", [1, 2, 3], 6, False),
        ("", [1, 2, 3], 6, False),
    ],
)
def test_the_countdown_of_d1(completion: str, numbers: list[int], target: int, solved: bool) -> None:
    assert (
        text_countdown.CountdownText(protocol="d1").solved({"numbers": numbers, "target": target}, completion) == solved
    )


@pytest.mark.parametrize(
    ("completion", "solved"),
    [
        (f"<answer>\n{GRID}\n</answer>", True),
        (f"<answer>{OTHER}</answer>", True),
        (f"\\boxed{{{GRID}}}", True),
        (f"the grid is {GRID}.", True),
        (f"first {OTHER}, no: {GRID}.", True),
        ("<answer>\n1234\n3412\n2143\n4321\n</answer>", True),
        ("<answer>|1|2|3|4|\n|3|4|1|2|\n|2|1|4|3|\n|4|3|2|1|</answer>", True),
        ("<answer>4321341221431234</answer>", False),  # a grid, but of other clues
        ("<answer>1234341221434322</answer>", False),
        (f"<answer>{GRID}1</answer>", False),
        ("", False),
        ("<answer></answer>", False),
    ],
)
def test_our_sudoku(completion: str, solved: bool) -> None:
    task = text_sudoku.SudokuText()
    assert task.solved(PUZZLE, completion) == solved
    assert task.reward(PUZZLE, completion) == float(solved)
    assert task.grade(PUZZLE, completion)[:2] == (float(solved), 1.0)


def test_partial_credit_is_for_right_cells_of_the_nearest_grid() -> None:
    task = text_sudoku.SudokuText(partial=0.5)
    assert task.reward(PUZZLE, "<answer>1234432121433411</answer>") == pytest.approx(0.5 * 11 / 12)
    assert task.reward(PUZZLE, "<answer>1234341221434322</answer>") == pytest.approx(0.5 * 11 / 12)
    assert task.reward(PUZZLE, "<answer>4234341221434321</answer>") == 0.0  # changes a clue
    assert task.reward(PUZZLE, f"<answer>{OTHER}</answer>") == 1.0


@pytest.mark.parametrize(
    ("completion", "points"),
    [
        (f"<answer>{GRID}</answer>", 12),
        (f"<answer>{OTHER}</answer>", 4),  # solves the puzzle, but is not the solution that is listed
        ("<answer>1234 3412</answer>", 4),  # filled with zeros
        (f"<answer>{GRID}99</answer>", 12),  # cut
        (f"<answer>\n```\n1234\n3412 2143 4321\n```\n</answer>{OTHER}", 12),
        (f"</answer>{GRID}<|eot_id|>", 12),
        (f"{GRID}\n</answer>", 12),
        (f"grid {GRID}.", 12),
        (f"grid {OTHER} {GRID}.", 4),
        (f"<answer>In sixteen digits, this is it: {GRID}</answer>", 0),
        ("", 0),
    ],
)
def test_the_sudoku_of_d1(completion: str, points: int) -> None:
    for protocol in ("d1", "spg_3shot"):
        assert text_sudoku.SudokuText(protocol=protocol).grade(PUZZLE, completion)[:2] == (points, 12)


ODD = st.text() | st.text(alphabet="\\boxedfrac{}<answer>/()0123456789.+-*= `\n")


@given(text=ODD)
@pytest.mark.parametrize("protocol", text_countdown.PROTOCOLS)
def test_any_text_is_a_countdown_answer_of_no_worth(protocol: str, text: str) -> None:
    task = text_countdown.CountdownText(protocol=protocol)
    row = {"numbers": [97, 89, 83], "target": 101}
    for completion in (text, f"\\boxed{{{text}}}", f"<answer>{text}</answer>"):
        assert task.reward(row, completion) == 0.0


@given(text=ODD)
@pytest.mark.parametrize("protocol", text_sudoku.PROTOCOLS)
def test_any_text_is_a_sudoku_answer_of_no_worth(protocol: str, text: str) -> None:
    task = text_sudoku.SudokuText(protocol=protocol)
    for completion in (text, f"\\boxed{{{text}}}", f"<answer>{text}</answer>"):
        assert task.reward(PUZZLE, completion) == 0.0
        points, out_of, _ = task.grade(PUZZLE, completion)
        assert 0 <= points <= out_of


@pytest.mark.parametrize("task", ["countdown", "sudoku"])
@pytest.mark.parametrize(
    "piece",
    ["\\boxed{", "(", "-", "<answer>", "</answer>", "9**", "1+", " ", "1", "```", "``` ", "\\frac{", "=", "1 = "],
)
def test_a_hostile_text_costs_little(task: str, piece: str) -> None:
    kind, row = (text_countdown.CountdownText, NUMBERS) if task == "countdown" else (text_sudoku.SudokuText, PUZZLE)
    text = piece * (100_000 // len(piece))
    start = time.perf_counter()
    for protocol in kind.protocols:
        for completion in (text, "\\boxed{" + text[: LONGEST - 50] + "}", "<answer>" + text, "\\boxed{" + text[:150]):
            assert kind(protocol=protocol).reward(row, completion) == 0.0
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("numbers", [3, 4, 5, 6])
def test_countdown_with_so_many_numbers(numbers: int) -> None:
    task = text_countdown.CountdownText(numbers=numbers)
    for split in ("train", "test"):
        for row in task.rows(split, 20, 1):
            assert len(row["numbers"]) == numbers and hashed_split(numbers_key(row["numbers"])) == split
            assert task.reward(row, task.solution(row)) == 1.0 and 1 <= row["target"] <= 100


def test_all_grids_that_fit_a_puzzle_are_found() -> None:
    for clues in (0, 4, 7, 16):
        puzzle = GRID[:clues].ljust(16, "0")
        plain = {grid for grid in sudoku.grids() if grid.startswith(GRID[:clues])}
        assert text_sudoku.fitting({"puzzle": puzzle}) == plain
    assert len(plain) == 1


def test_puzzles_and_cells_are_scored_side_by_side() -> None:
    near = OTHER[:-1] + "1"  # its last cell wrong
    own, d1 = text_sudoku.SudokuText(), text_sudoku.SudokuText(protocol="d1")
    cells, puzzles = own.other_scores["cells"], d1.other_scores["puzzles"]
    for text, solved, nearest, listed in ((GRID, 1, 12, 12), (OTHER, 1, 12, 4), (near, 0, 11, 5), ("4" * 16, 0, 3, 3)):
        completion = f"<answer>{text}</answer>"
        assert own.grade(PUZZLE, completion)[:2] == puzzles(PUZZLE, completion)[:2] == (solved, 1)
        assert cells(PUZZLE, completion)[:2] == (nearest, 12)
        assert d1.grade(PUZZLE, completion)[:2] == (listed, 12)
    assert cells({"puzzle": GRID, "solution": GRID}, GRID)[:2] == (16, 16)  # no holes
    assert cells(PUZZLE, "")[:2] == (0, 12) and text_sudoku.cells_right(PUZZLE, "4" * 16) == 0  # no clue is kept
    assert own.facts([PUZZLE, {"puzzle": GRID}, PUZZLE]) == {"several_solutions": 2}
    assert own.facts(own.rows("train", 50, 0)) == {"several_solutions": 0}


@needs_data
@pytest.mark.parametrize(("name", "count", "several"), [("d1_test", 500, 124), ("spg_test", 256, 0)])
def test_how_many_published_puzzles_have_several_solutions(name: str, count: int, several: int) -> None:
    task = text_sudoku.SudokuText(test_data=str(DATA / "sudoku4" / f"{name}.jsonl"))
    rows = task.rows("test", 1000, 0)
    assert len(rows) == count and task.facts(rows) == {"several_solutions": several}


@pytest.mark.parametrize("kind", [text_countdown.CountdownText, text_sudoku.SudokuText])
def test_generated_rows_are_solvable_repeatable_and_apart(kind) -> None:
    for protocol in (name for name, rules in kind.protocols.items() if not rules.sets):
        task = kind(protocol=protocol)
        splits = {split: task.rows(split, 40, 3) for split in ("train", "test")}
        for split, rows in splits.items():
            assert task.rows(split, 15, 3) == rows[:15]
            for row in rows:
                assert task.reward(row, task.solution(row)) == 1.0
                assert task.split_of(row) == split
        assert set(map(task.prompt, splits["train"])).isdisjoint(map(task.prompt, splits["test"]))


def test_the_form_earns_its_share() -> None:
    countdown = {**NUMBERS, "solution": "22+37-52"}
    for kind, row in ((text_countdown.CountdownText, countdown), (text_sudoku.SudokuText, PUZZLE)):
        task = kind(weights={"correctness": 0.75, "format": 0.25})
        assert task.reward(row, task.solution(row)) == 1.0
        assert task.reward(row, "why</reasoning><answer>?</answer>") == 0.25
        assert task.reward(row, "why</reasoning><answer></answer>") == task.reward(row, "") == 0.0


def test_questions_are_those_of_d1() -> None:
    assert text_countdown.CountdownText(protocol="d1").prompt(NUMBERS).endswith("\n\nNumbers: [22, 52, 37]\nTarget: 7")
    question = "\n\nSolve the following Sudoku puzzle: 1234000000000000\n"
    assert text_sudoku.SudokuText(protocol="d1").prompt(PUZZLE).endswith(question)
    shown = text_sudoku.SudokuText(protocol="spg_3shot").prompt(PUZZLE)
    assert shown.endswith(question)
    assert shown.count("Solve the following Sudoku puzzle:") == 4
    for puzzle, grid in text_sudoku.SHOTS:
        assert text_sudoku.SudokuText().parse_row({"puzzle": puzzle, "solution": grid})
        assert sudoku.solution_count(text_sudoku.with_dots(puzzle)) == 1
        assert grid in sudoku.split_grids("train")  # no answer of the test is shown


@needs_data
def test_no_worked_example_answers_a_published_test_puzzle() -> None:
    for name in ("d1_test", "spg_test"):
        rows = text_sudoku.SudokuText(test_data=str(DATA / "sudoku4" / f"{name}.jsonl")).rows("test", 500, 0)
        assert not {grid for _, grid in text_sudoku.SHOTS} & {grid for row in rows for grid in text_sudoku.fitting(row)}


def solving(row: dict) -> set[str]:
    """All grids that keep the givens, one by one."""
    pairs = ((grid, zip(row["puzzle"], grid, strict=True)) for grid in sudoku.grids())
    return {grid for grid, cells in pairs if all(given in ("0", digit) for given, digit in cells)}


def test_every_grid_that_answers_a_test_puzzle_is_held_out(tmp_path: Path) -> None:
    """Also where it is not the one that is listed, of the test puzzle or of the one to train on."""
    fits = solving(PUZZLE)
    assert {GRID, OTHER} < fits == text_sudoku.fitting(PUZZLE)
    (tmp_path / "test.jsonl").write_text(json.dumps(PUZZLE))
    trained = text_sudoku.SudokuText(test_data=str(tmp_path / "test.jsonl"), unique=False).rows("train", 400, 0)
    assert len(trained) == 400 and not fits & {grid for row in trained for grid in solving(row)}
    assert fits & set(sudoku.split_grids("train"))  # which generated rows would else have
    free = next(grid for grid in sudoku.grids() if grid not in fits)
    listed = [(GRID, GRID), (OTHER, OTHER), (free, free), ("0" * 16, free)]  # the last is solved by OTHER too
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"puzzle": p, "solution": g}) + "\n" for p, g in listed))
    task = text_sudoku.SudokuText(data=str(tmp_path / "train.jsonl"), test_data=str(tmp_path / "test.jsonl"))
    assert {row["puzzle"] for row in task.rows("train", 5, 0)} == {free}


@pytest.mark.parametrize(
    ("kind", "rows", "message"),
    [
        (text_countdown.CountdownText, [{"numbers": [1], "target": 1}], "numbers"),
        (text_countdown.CountdownText, [{"numbers": [1, 2, "3"], "target": 1}], "numbers"),
        (text_countdown.CountdownText, [{"numbers": [1, 2, 3]}], "target"),
        (text_countdown.CountdownText, [{"numbers": [1, 2, 3], "target": True}], "target"),
        (text_sudoku.SudokuText, [{"puzzle": "1234", "solution": GRID}], "puzzle"),
        (text_sudoku.SudokuText, [{"puzzle": "4" + "0" * 15, "solution": GRID}], "puzzle"),
        (text_sudoku.SudokuText, [{"puzzle": "0" * 16, "solution": "1" * 16}], "puzzle"),
    ],
)
def test_bad_rows_are_named(kind, rows: list[dict], message: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=message):
        kind(data=str(file)).rows("train", 1, 0)


def test_impossible_options_are_named() -> None:
    for kind in (text_countdown.CountdownText, text_sudoku.SudokuText):
        for options in ({"protocol": "wd1"}, {"partial": 1.0}, {"data": "/none.jsonl"}):
            with pytest.raises(ValueError, match=next(iter(options))):
                kind(**options)
    with pytest.raises(ValueError, match="numbers"):
        text_countdown.CountdownText(numbers=7)


@needs_data
def test_published_puzzles_are_solved_by_their_solutions() -> None:
    for name in ("d1_cd3_test", "dream_cd4"):
        task = text_countdown.CountdownText(test_data=str(DATA / "countdown" / f"{name}.jsonl"))
        rows = task.rows("test", 1000, 0)
        assert all(task.reward(row, task.solution(row)) == 1.0 for row in rows)
        assert all(text_countdown.CountdownText(protocol="d1").solved(row, task.solution(row)) for row in rows)
    for name in ("d1_test", "spg_test"):
        task = text_sudoku.SudokuText(test_data=str(DATA / "sudoku4" / f"{name}.jsonl"), protocol="d1")
        rows = task.rows("test", 1000, 0)
        assert all(task.grade(row, task.solution(row))[:2] == (row["n_empty"], row["n_empty"]) for row in rows)


@needs_data
def test_training_rows_share_nothing_with_a_test_file() -> None:
    test_data = str(DATA / "countdown" / "d1_cd3_test.jsonl")
    for data in ("", str(DATA / "countdown" / "gen_cd3_train.jsonl")):
        task = text_countdown.CountdownText(data=data, test_data=test_data)
        tested = {tuple(sorted(row["numbers"])) for row in task.rows("test", 256, 0)}
        assert not tested & {tuple(sorted(row["numbers"])) for row in task.rows("train", 2000, 0)}
    for name, left in (("d1_test", 23), ("spg_test", 136)):
        task = text_sudoku.SudokuText(test_data=str(DATA / "sudoku4" / f"{name}.jsonl"))
        tested = {grid for row in task.rows("test", 500, 0) for grid in solving(row)}
        trained = task.rows("train", 300, 0)
        assert len(trained) == 300 and not tested & {row["solution"] for row in trained}
        assert len(set(sudoku.split_grids("train")) - tested) == left


@needs_data
def test_one_file_serves_both_splits() -> None:
    task = text_countdown.CountdownText(data=str(DATA / "countdown" / "gen_cd3_val.jsonl"))
    assert {hashed_split(numbers_key(row["numbers"])) for row in task.rows("test", 500, 0)} == {"test"}
    assert {hashed_split(numbers_key(row["numbers"])) for row in task.rows("train", 500, 0)} == {"train"}
    task = text_sudoku.SudokuText(data=str(DATA / "sudoku4" / "d1_test.jsonl"))
    for split in ("train", "test"):
        assert {row["solution"] for row in task.rows(split, 300, 0)} <= set(sudoku.split_grids(split))
