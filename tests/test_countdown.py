"""The Countdown task: its problems, and a scorer that must be exact and must not be fooled."""

import itertools
import json
import random
import time
from fractions import Fraction
from pathlib import Path

import pytest

from unmask.tasks import TASKS
from unmask.tasks.puzzles import countdown
from unmask.tasks.support.split import hashed_split

DATA = Path(__file__).parents[2] / "shared" / "data" / "countdown"
ROW = {"numbers": [8, 3, 3, 8], "target": 24, "solution": "8/(3-8/3)"}


def test_rows_depend_on_nothing_but_their_arguments():
    task = countdown.Countdown()
    first = task.rows("train", 40, 7)
    assert countdown.Countdown().rows("train", 40, 7) == first
    assert task.rows("train", 15, 7) == first[:15]
    assert task.rows("train", 40, 8) != first
    with pytest.raises(ValueError, match="validation"):
        task.rows("validation", 1, 0)


def test_the_split_is_by_number_set_whatever_the_options():
    def sets(split: str) -> set[tuple[int, ...]]:
        tasks = [
            countdown.Countdown(),
            countdown.Countdown(largest=30, target_largest=50),
            countdown.Countdown(numbers=4),
        ]
        return {tuple(sorted(row["numbers"])) for task in tasks for row in task.rows(split, 300, 3)}

    train, test = sets("train"), sets("test")
    assert train.isdisjoint(test)
    assert 0.15 < len(test) / (len(train) + len(test)) < 0.5
    assert countdown.numbers_key([3, 1, 2]) == countdown.numbers_key([1, 2, 3])


def test_the_split_never_moves():
    # Moving it would leak test numbers into models that are already trained, such as the shipped one.
    sets = itertools.combinations_with_replacement(range(1, 10), 3)
    assert [numbers for numbers in sets if hashed_split(countdown.numbers_key(list(numbers))) == "test"][:3] == [
        (1, 1, 4),
        (1, 2, 2),
        (1, 4, 4),
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"numbers": 2},
        {"numbers": 4},
        {"numbers": 4, "signs": "+-*/"},
        {"numbers": 5},
        {"numbers": 6, "signs": "+-*/"},
        {"signs": "+*"},
        {"largest": 9, "target_largest": 10},
        {"largest": 100, "target_largest": 100},
    ],
)
def test_every_row_is_solvable_and_fits(options):
    task = countdown.Countdown(**options)
    rows = task.rows("train", 200, 0) + task.rows("test", 200, 0)
    for row in rows:
        assert 1 <= row["target"] <= options.get("target_largest", 1000)
        assert len(row["numbers"]) == options.get("numbers", 3)
        assert all(1 <= number <= options.get("largest", 100) for number in row["numbers"])
        assert len(task.solution(row)) <= task.length
        assert task.reward(row, task.solution(row)) == 1.0
        assert task.solved(row, task.solution(row))
    assert len({len(task.prompt(row)) for row in rows}) == 1
    assert len({row["target"] for row in rows}) > 5


def test_signs_bound_the_problems_not_the_answers():
    task = countdown.Countdown(signs="+-")
    rows = task.rows("train", 500, 0)
    assert {sign for row in rows for sign in row["solution"] if not sign.isdigit()} == {"+", "-"}
    assert task.length == 8
    assert countdown.Countdown(signs="+-*/").length == 10
    assert task.reward({"numbers": [2, 2, 5], "target": 9, "solution": "2+2+5"}, "2*2+5") == 1.0


def test_the_prompt():
    row = {"numbers": [3, 12, 7], "target": 8, "solution": "3+12-7"}
    assert countdown.Countdown(largest=20, target_largest=99).prompt(row) == " 3,12, 7> 8="


def plainly_reachable(numbers: tuple[int, ...]) -> set[int]:
    """All whole values of (a.b).c and a.(b.c), whole on the way, by Python's own arithmetic."""

    def joined(xs: set[int], ys: set[int]) -> set[int]:
        values = {value for x in xs for y in ys for value in (x + y, x - y, x * y)}
        return values | {x // y for x in xs for y in ys if y and x % y == 0}

    values: set[int] = set()
    for a, b, c in itertools.permutations([{number} for number in numbers]):
        values |= joined(joined(a, b), c) | joined(a, joined(b, c))
    return values


@pytest.mark.parametrize("numbers", [(1, 2, 3), (4, 4, 4), (5, 7, 20), (2, 6, 12)])
def test_reachable_finds_everything_and_says_how(numbers):
    ways = countdown.reachable(numbers)
    assert set(ways) == plainly_reachable(numbers)
    for value, text in ways.items():
        result = countdown.expression(text)
        assert result is not None
        assert result[0] == value
        assert sorted(result[1]) == list(numbers)


def test_a_random_way_is_one_of_all_and_all_are_found():
    ways = [countdown.draw_way(random.Random(i), [2, 7, 12], "+-*/") for i in range(3000)]
    assert {value for value, _ in ways} == set(countdown.reachable((2, 7, 12)))
    for value, text in ways:
        result, used = countdown.expression(text)
        assert result == value and sorted(used) == [2, 7, 12]


def test_six_numbers_are_drawn_in_no_time_or_refused():
    start = time.perf_counter()
    assert (
        len(countdown.Countdown(numbers=6, largest=100, target_largest=100, signs="+-*/").rows("test", 100, 0)) == 100
    )
    with pytest.raises(ValueError, match="raise target_largest"):
        countdown.Countdown(numbers=6, largest=100, target_largest=10, signs="+").rows("test", 1, 0)
    assert time.perf_counter() - start < 10  # listing all that six numbers reach takes a second for each


def test_solutions_carry_no_needless_parentheses():
    assert countdown.reachable((2, 3, 4))[24] == "2*3*4"
    assert countdown.reachable((2, 3, 4))[10] == "2*3+4"
    assert countdown.reachable((2, 3, 7))[20] == "(3+7)*2"
    assert countdown.reachable((2, 5, 9))[2] == "9-2-5"
    assert countdown.reachable((2, 4, 8))[1] == "2*4/8"


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("1/3+1/3+1/3", Fraction(1), [1, 3, 1, 3, 1, 3]),
        ("8/(3-8/3)", Fraction(24), [8, 3, 8, 3]),
        ("1/49*49", Fraction(1), [1, 49, 49]),  # 0.9999999999999999 in floating point
        ("2-3*4", Fraction(-10), [2, 3, 4]),
        ("8/4/2", Fraction(1), [8, 4, 2]),
        ("8-4-2", Fraction(2), [8, 4, 2]),
        (" ( 1 + 2 ) * 3 ", Fraction(9), [1, 2, 3]),
        ("((((7))))", Fraction(7), [7]),
        ("0", Fraction(0), [0]),
        ("10-0", Fraction(10), [10, 0]),
    ],
)
def test_expressions_are_exact(text, value, numbers):
    assert countdown.expression(text) == (value, numbers)


HOSTILE = [
    "",
    " ",
    "x",
    "8*3*",
    "8 3",
    "8(3)",
    "()",
    "(8,3)",
    "8+(3",
    "2**3",
    "8//3",
    "8%3",
    "8^3",
    "-8+3",
    "+8",
    "8--3",
    "~8",
    "8-+3",
    "1_0",
    "08+3",
    "00",
    "0x10",
    "8.0+3",
    "8e3",
    "8j",
    "True+8",
    "'8'*3",
    "8==8",
    "8 if 3 else 8",
    "[8][0]",
    "lambda:8",
    "__import__('os').system('true')",
    "\u0668+3",  # an Arabic eight
    "\uff18+3",  # a full-width eight
    "8\u00d73",
    "8+3#",
    "8+\n3",
    "8+3\n",
    "\t8+3",
    "8+3\x00",
    "8/0",
    "8/(3-3)",
    "9" * 5000,
    "9**9**9**9",
    "(" * 5000 + "8" + ")" * 5000,
    "1+" * 5000 + "1",
    "1+" * 50 + "1",  # short enough, but deeper than any answer
    "8+3" + " " * 300 + "+8",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_is_refused_quickly_and_quietly(text, recwarn):
    start = time.perf_counter()
    assert countdown.expression(text) is None
    task = countdown.Countdown(numbers=4, partial=0.5)
    assert task.reward(ROW, text) == 0.0
    assert not task.solved(ROW, text)
    assert time.perf_counter() - start < 0.5
    assert not recwarn.list


def test_each_number_exactly_once():
    task = countdown.Countdown(numbers=4, partial=0.25)
    assert task.reward(ROW, "8/(3-8/3)") == 1.0
    assert task.reward(ROW, "3*8+(8-3)*0") == 0.0
    assert task.reward(ROW, "8*3") == 0.0  # the right value with too few
    assert task.reward(ROW, "8+8+8") == 0.0  # the right value with others
    assert task.reward(ROW, "3*8*3/3+8-8") == 0.0  # the right value with too many
    assert task.reward(ROW, "83-38") == 0.0  # the right digits
    assert task.reward(ROW, "8+3+8+3") == 0.25
    assert not task.solved(ROW, "8+3+8+3")
    assert countdown.Countdown(numbers=4).reward(ROW, "8+3+8+3") == 0.0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"numbers": 1}, "numbers"),
        ({"numbers": 7}, "numbers"),
        ({"largest": 8}, "largest"),
        ({"largest": 101}, "largest"),
        ({"target_largest": 0}, "target_largest"),
        ({"target_largest": 1001}, "target_largest"),
        ({"signs": "-*"}, "signs"),
        ({"signs": "+^"}, "signs"),
        ({"signs": ""}, "signs"),
        ({"partial": 1}, "partial"),
    ],
)
def test_impossible_options_are_named(options, named):
    with pytest.raises(ValueError, match=named):
        TASKS["countdown"](**options)


@pytest.mark.skipif(not DATA.is_dir(), reason="needs the shared data folder beside the checkout")
@pytest.mark.parametrize(("name", "numbers"), [("d1_cd3_test", 3), ("dream_cd4", 4)])
def test_published_solutions_score_one(name, numbers):
    task = countdown.Countdown(numbers=numbers, largest=100, target_largest=100)
    rows = [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]
    assert len(rows) >= 256
    for row in rows:
        assert task.reward(row, row["solution"]) == 1.0
        assert task.reward({**row, "target": row["target"] + 1}, row["solution"]) == 0.0
