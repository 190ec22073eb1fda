"""Multiple choice: which letter a text chooses, and the shapes of rows."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from unmask.tasks.benchmarks import multiple_choice
from unmask.tasks.benchmarks.multiple_choice import letter


@pytest.mark.parametrize(
    ("completion", "chosen"),
    [
        ("B", "B"),
        (" b \n", "B"),
        ("(C).", "C"),
        ("**D**", "D"),
        ("B. Paris", "B"),
        ("B) Paris", "B"),
        ("Let me think.\nC: because it is green", "C"),
        ("Answer: B", "B"),
        ("answer: (b)", "B"),
        ("ANSWER: **C**", "C"),
        ("The answer is C.", "C"),
        ("The answer is option D", "D"),
        ("The answer is (d).", "D"),
        ("Answer: A. No, the answer is B.", "B"),  # of several the last
        (r"Answer: A, or \boxed{C}", "C"),
        (r"\boxed{\text{B}}", "B"),
        ("<reasoning>Answer: A</reasoning><answer>B</answer>", "B"),
        ("<answer>\nC. green\n</answer>", "C"),
        ("", None),
        ("A dog barks.", None),
        ("The answer is a dog.", None),
        ("The answer is A's.", None),
        ("The answer is Apple", None),
        ("Answer: E", None),  # there are four
        ("Z", None),
        ("A. red\nB. blue\nC. green\nD. grey", None),  # the options said back
        ("AB", None),
        ("I think B", None),
        ("\u0412", None),  # Cyrillic
        ("answer: a", "A"),
        ("answer: a dog", None),
        ("the answer is a", None),
        ("The correct option is B.", "B"),
        ("Best choice: C", "C"),
        ("The answer is A because it is red.", "A"),
        ("Answer: A dog barks", None),
        ("<answer>A dog barks</answer>", None),
        ("Answer: A, B", None),  # several at once are no choice
        ("Answer: A or B", None),
        ("Answer: (A) or (B)", None),
        ("(A) or (B)", None),
        ("(A) or (B), who knows?", None),
        ("A, B, or C", None),
        (r"Answer: A \boxed{A, B}", None),
        ("Answer: B, because A is red", "B"),
        ("Answer: B, I think", "B"),
        (r"Answer: B, that is \boxed{Paris}", "B"),
        ("Answer: B<|eot_id|>Answer: A", "B"),  # nothing counts after the end
    ],
)
def test_the_letter_that_is_chosen(completion: str, chosen: str | None):
    assert letter(completion, 4) == chosen


@settings(max_examples=300, deadline=None)
@given(st.text() | st.text(alphabet="ABCDabcd ansewri:().\n\\box{}<>/*", max_size=60))
def test_arbitrary_text_chooses_one_of_the_options_or_none(text: str):
    assert letter(text, 3) in ("A", "B", "C", None)


@pytest.mark.parametrize(
    "piece", ["answer is ", "<answer> ", "\\boxed{", "(", "answer:::", " \t", "A", "Answer: * * ", "A, ", "A or "]
)
def test_long_texts_take_no_time(piece: str):
    import time

    start = time.perf_counter()
    letter(piece * (40_000 // len(piece)), 4)
    assert time.perf_counter() - start < 0.5


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("row", "options", "answer"),
    [
        ({"question": "q", "options": ["x", "y"], "answer": "B"}, ["x", "y"], "B"),
        ({"question": "q", "options": ["x", "y"], "answer": "b"}, ["x", "y"], "B"),
        ({"question": "q", "options": ["x", "y"], "answer": 0}, ["x", "y"], "A"),
        ({"question": "q", "options": {"A": "x", "B": "y"}, "answer": "B"}, ["x", "y"], "B"),
        ({"ctx": "q", "endings": ["x", "y", "z"], "label": "2"}, ["x", "y", "z"], "C"),
        ({"question": "q", "choices": {"label": ["A", "B"], "text": ["x", "y"]}, "answerKey": "B"}, ["x", "y"], "B"),
        ({"question": "q", "choices": {"label": ["1", "2"], "text": ["x", "y"]}, "answerKey": "1"}, ["x", "y"], "A"),
    ],
)
def test_the_shapes_of_rows(tmp_path: Path, row: dict[str, Any], options: list[str], answer: str):
    task = multiple_choice.MultipleChoice(
        data=written(
            tmp_path / "train.jsonl", [{**row, **{key: "other" for key in ("question", "ctx") if key in row}}]
        ),
        test_data=written(tmp_path / "test.jsonl", [row]),
    )
    (parsed,) = task.rows("test", 5, 0)
    assert (parsed["question"], parsed["options"], parsed["answer"]) == ("q", options, answer)
    assert "A. x\nB. y" in task.prompt(parsed) and task.prompt(parsed).startswith("q\n\n")
    assert task.reward(parsed, task.solution(parsed)) == 1.0 and task.solved(parsed, answer)
    assert task.grade(parsed, f"Answer: {answer}") == (1.0, 1.0, answer)
    assert task.reward(parsed, "") == 0.0 and task.grade(parsed, "no idea") == (0.0, 1.0, "")


def test_one_file_is_split_by_question(tmp_path: Path):
    rows = [{"question": f"q{i}", "options": ["x", "y"], "answer": i % 2} for i in range(100)]
    task = multiple_choice.MultipleChoice(data=written(tmp_path / "rows.jsonl", rows + rows))
    test = {row["question"] for row in task.rows("test", 500, 0)}
    train = {row["question"] for row in task.rows("train", 500, 0)}
    assert not test & train and test | train == {row["question"] for row in rows} and 10 <= len(test) <= 30


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"options": ["x", "y"], "answer": "B"}, "line 1.*'question'"),
        ({"question": "q", "options": ["x"], "answer": "A"}, "1 options"),
        ({"question": "q", "options": ["x", 3], "answer": "A"}, "options"),
        ({"question": "q", "options": ["x", "y"], "answer": "C"}, "'C'.* 2 options"),
        ({"question": "q", "options": ["x", "y"], "answer": 2}, "answer 2 .*2 options"),
        ({"question": "q", "options": ["x", "y"], "answer": True}, "True .*2 options"),
        ({"ctx": "q", "endings": ["x", "y"], "label": ""}, "''.* 2 options"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, row: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        multiple_choice.MultipleChoice(data=written(tmp_path / "rows.jsonl", [row])).rows("train", 1, 0)


def test_a_file_is_needed():
    with pytest.raises(ValueError, match=r"multiple_choice\.data="):
        multiple_choice.MultipleChoice().rows("test", 1, 0)
    with pytest.raises(ValueError, match=r"none\.jsonl"):
        multiple_choice.MultipleChoice(data="none.jsonl")
