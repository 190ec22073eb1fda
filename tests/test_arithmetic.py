"""Sums written out, checked by reading prompts and solutions a second time."""

import re

import pytest
from hypothesis import given, settings, strategies as st

from unmask.tasks.puzzles import arithmetic

STEP = re.compile(r"(\d+)([+-])(\d+)=(\d+)")


def numbers_of(prompt: str) -> list[int]:
    assert prompt.endswith("=")
    return [int(text) for text in re.findall(r"[+-]?\d+", prompt[:-1].replace(" ", ""))]


@pytest.mark.parametrize("terms", [2, 3, 4])
@pytest.mark.parametrize("largest", [9, 20, 99])
@pytest.mark.parametrize("signs", ["+", "-", "+-"])
def test_rows_are_asked_and_solved_rightly(terms: int, largest: int, signs: str):
    task = arithmetic.Arithmetic(terms=terms, largest=largest, signs=signs)
    assert task.length <= 32
    prompts = []
    for row in task.rows("train", 200, 1):
        prompt, solution = task.prompt(row), task.solution(row)
        numbers, total = numbers_of(prompt), 0
        steps = [STEP.fullmatch(step) for step in solution.replace(" ", "").split(";")]
        assert len(numbers) == terms and len(steps) == terms - 1
        for place, step in enumerate(steps):
            assert step is not None
            total = total if place else numbers[0]
            assert int(step[1]) == total and int(step[2] + step[3]) == numbers[place + 1]
            total += numbers[place + 1]
            assert int(step[4]) == total >= 0
        assert total == sum(numbers) and len(solution) == task.length
        assert task.reward(row, solution) == 1.0 == task.reward(row, str(total)) and task.solved(row, solution)
        prompts.append(prompt)
    assert len({len(prompt) for prompt in prompts}) == 1


def test_solutions_are_aligned():
    assert arithmetic.Arithmetic().solution({"terms": [7, 9, -5]}) == " 7+9=16;16-5=11"
    assert arithmetic.Arithmetic(largest=20).solution({"terms": [7, 12, -5]}) == " 7+12=19;19- 5=14"
    assert (
        arithmetic.Arithmetic(terms=4, largest=99).solution({"terms": [99, 99, 99, 9]})
        == " 99+99=198;198+99=297;297+ 9=306"
    )


def test_rows_depend_on_nothing_but_their_arguments_and_the_splits_are_apart():
    task = arithmetic.Arithmetic()
    first = task.rows("train", 40, 7)
    assert arithmetic.Arithmetic().rows("train", 40, 7) == first and task.rows("train", 15, 7) == first[:15]
    assert task.rows("train", 40, 8) != first
    problems = {
        split: {tuple(sorted(row["terms"])) for seed in range(3) for row in task.rows(split, 3000, seed)}
        for split in ("train", "test")
    }
    assert not problems["train"] & problems["test"]
    with pytest.raises(ValueError, match="validation"):
        task.rows("validation", 1, 0)


def test_the_split_never_moves():
    # Moving it would leak test problems into models that are already trained.
    rows = arithmetic.Arithmetic(largest=20).rows("test", 3, 0)
    assert [row["terms"] for row in rows] == [[11, -6, 11], [16, 4, -16], [15, 14, -5]]


@pytest.mark.parametrize(
    ("completion", "earned"),
    [
        ("7+12=19;19-5=14", 1.0),
        (" 7+12=19;19- 5=14", 1.0),
        ("14", 1.0),
        ("7+12=20;20-5=14", 1.0),  # only the last result counts
        ("7+12=19;19-5=15", 0.6 / 2),
        ("7+12=19", 0.6 / 2),
        ("7+12=20;20-5=15", 0.0),
        ("19-5=13;7+12=19", 0.0),
        ("7+12=19;19-5=14;", 0.6),  # nothing after the last semicolon
        ("7+12=19;19-5=\u0661\u0664", 0.6 / 2),
        ("=", 0.0),
        ("", 0.0),
        ("14" + " " * 300, 0.0),
    ],
)
def test_rewards(completion: str, earned: float):
    row = {"terms": [7, 12, -5], "answer": 14}
    task = arithmetic.Arithmetic(terms=3, partial=0.6)
    assert task.reward(row, completion) == pytest.approx(earned)
    assert task.solved(row, completion) == (earned == 1.0)
    assert arithmetic.Arithmetic(terms=3).reward(row, completion) == (1.0 if earned == 1.0 else 0.0)


@settings(max_examples=200)
@given(st.text() | st.text(alphabet="0123456789+-=; ", max_size=200))
def test_arbitrary_text_never_raises(text: str):
    row = {"terms": [7, 12, -5], "answer": 14}
    earned = arithmetic.Arithmetic(terms=3, partial=0.6).reward(row, text)
    ends_right = re.fullmatch(r"(?s:.*=)?\s*0*14\s*", text) is not None
    assert earned == 0.0 or ends_right or text.replace(" ", "").startswith("7+12=19")


@pytest.mark.parametrize(
    "options", [{"terms": 1}, {"terms": 5}, {"largest": 8}, {"largest": 100}, {"signs": "*"}, {"partial": 1.0}]
)
def test_impossible_options_are_named(options: dict[str, object]):
    with pytest.raises(ValueError, match=next(iter(options))):
        arithmetic.Arithmetic(**options)
