"""GSM8K: what is read as the answer, in our protocol and in d1's, and the rows."""

import gzip
import json
import re
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from unmask.tasks.benchmarks import gsm8k
from unmask.tasks.support.answers import LONGEST, closing_braces, in_form, last_box, last_number, text_before_end

DATA = Path(__file__).parents[2] / "shared" / "data" / "gsm8k"
ROW = {"question": "How many?", "answer": "She has 1 + 1 = <<1+1=2>>2.\n#### 2"}


def row(answer: str) -> dict[str, str]:
    return {"question": "How many?", "answer": f"#### {answer}"}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("18", 18),
        ("$1,234.50", Fraction("1234.5")),
        ("\\$1{,}234", 1234),
        ("1\\,234", 1234),
        ("-3", -3),
        ("$-3$", -3),
        ("−7", -7),
        ("16-7", None),  # not worked out
        ("16 - 7", None),
        ("16 -7", None),
        ("5 apples - 3 pears", None),
        ("9 \\times 2", None),
        ("2(9)", None),
        ("\\sqrt{16}", None),
        ("x^2", None),
        ("3,4", None),
        ("10:30", None),
        ("5/6/2024", None),
        ("+5", 5),
        ("x = -5", -5),
        ("9 \\times 2 = 18 \\text{ dollars for 2}", 18),
        ("\\frac{3}{4}", Fraction(3, 4)),
        ("-\\frac{3}{4}", Fraction(-3, 4)),
        ("3/4", Fraction(3, 4)),
        ("12/4 = 3", 3),
        ("1/0", None),
        ("\\frac{1}{0}", None),
        ("\\frac12", Fraction(1, 2)),
        ("\\dfrac{1}2", Fraction(1, 2)),
        ("3\\frac{1}{2}", Fraction(7, 2)),
        ("3 1/2", Fraction(7, 2)),
        ("-3 1/2", Fraction(-7, 2)),
        ("1 000", 1000),
        ("1\u202f000 000", 1_000_000),
        ("1_000", 1000),
        ("1,2345", None),
        ("1.000,50", None),
        ("1e3", 1000),
        ("2.5e-1", Fraction(1, 4)),
        ("10^5", 100_000),
        ("2^{10}", 1024),
        ("2**10", 1024),
        ("9^{999}", None),
        ("0^{-1}", None),
        ("18 dollars (9*2)", 18),
        ("(18)", 18),
        ("**18**", 18),
        ("\\textbf{18}", 18),
        ("$18/hour", 18),
        ("20 eggs, of which 18", 18),
        (".5", Fraction(1, 2)),
        ("50\\%", 50),
        ("", None),
        ("none", None),
        ("\u0665", None),
        ("9" * 5000, None),
        ("nan", None),
    ],
)
def test_the_last_number_of_an_answer(text: str, number: object) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("completion", "gold", "solved"),
    [
        ("\\boxed{18}", "18", True),
        ("\\boxed{17} no, \\boxed{18}", "18", True),
        ("\\boxed{18} and \\boxed{}", "18", True),
        ("\\boxed{18} and \\boxed{17", "18", True),
        ("<answer>\nit is $18\n</answer>", "18", True),
        ("<answer>18", "18", True),
        ("\\boxed{1,000}", "1,000", True),
        ("\\boxed{1}", "1,000", False),
        ("\\boxed{-5}", "-5", True),
        ("\\boxed{5}", "-5", False),
        ("\\boxed{5}", "-5.0", False),
        ("\\boxed{\\text{eighteen}} <answer>18</answer>", "18", True),
        ("<answer>\\boxed{18</answer>", "18", True),
        ("<answer>boxed{18}</answer>", "18", True),
        ("<answer>\\boxed{16-7}</answer>", "7", False),
        ("<|endoftext|>\\boxed{18}", "18", False),  # after the end there is no answer
        ("The answer is 18.", "18", False),
        ("", "0", False),
        ("\\boxed{}", "0", False),
    ],
)
def test_our_grader(completion: str, gold: str, solved: bool) -> None:
    task = gsm8k.Gsm8k()
    assert task.solved(row(gold), completion) == solved
    assert task.reward(row(gold), completion) == float(solved)
    assert task.grade(row(gold), completion)[:2] == (float(solved), 1.0)


@pytest.mark.parametrize(
    ("completion", "gold", "solved"),
    [
        ("\\boxed{18} then \\boxed{17}", "18", True),  # the first box
        ("\\boxed{} \\boxed{...} \\boxed{x} \\boxed{18}", "18", True),  # with a number in it
        ("\\boxed{18 eggs of 20}", "18", True),  # of a box the first number,
        ("<answer>20 eggs, 18</answer>", "18", True),  # of a block the last
        ("\\boxed{1,000}", "1,000", False),  # a comma ends a number
        ("\\boxed{18\n}", "18", False),  # a box is on one line
        ("\\boxed{5}", "-5", False),  # a negative gold has no right answer
        ("\\boxed{-5}", "-5", False),
        ("\\boxed{1200.5}", "$1,200.50", True),
        ("\\boxed{1e1}", "10", True),
        ("The answer is 18.", "18", False),
        ("", "0", False),
    ],
)
def test_the_grader_of_d1(completion: str, gold: str, solved: bool) -> None:
    assert gsm8k.Gsm8k(protocol="d1").solved(row(gold), completion) == solved


def test_a_stored_gold_of_d1_may_be_null_or_negative() -> None:
    """d1's files have null for negative golds, and its parser compares a number with its sign."""
    d1 = gsm8k.Gsm8k(protocol="d1")
    for truth, points in ((None, (0, 0, 0)), (-5.0, (1, 0, 0)), (5, (0, 1, 0)), ("#### -5", (0, 0, 0))):
        row = d1.stored_row({"ground_truth": truth})
        assert tuple(d1.grade(row, text).points for text in ("\\boxed{-5}", "\\boxed{5}", "")) == points
    with pytest.raises(ValueError, match=r"ground_truth.*--protocol d1"):
        gsm8k.Gsm8k().stored_row({"ground_truth": None})


@pytest.mark.parametrize("protocol", gsm8k.PROTOCOLS)
@given(text=st.text() | st.text(alphabet="\\boxed{}<answr>/0123456789.,-$ \n#"))
def test_any_text_has_a_grade(protocol: str, text: str) -> None:
    task = gsm8k.Gsm8k(protocol=protocol)
    grade = task.grade(row("271828"), text)
    assert grade.points == 0 or "271828" in grade.answer
    assert task.reward(row("271828"), text) == grade.points


@pytest.mark.parametrize("protocol", gsm8k.PROTOCOLS)
@pytest.mark.parametrize(
    "piece",
    [
        "\\boxed{",
        "{",
        "}",
        "<answer>",
        "\\boxed{1",
        "9",
        "1,",
        "-",
        "\\frac{1}{",
        "\\text{",
        " ",
        "1/",
        ".",
        " (",
        "1 ",
        "1 000 ",
        "**",
        "1^",
        "1e",
        "(",
    ],
)
def test_a_hostile_text_costs_little(protocol: str, piece: str) -> None:
    task, text = gsm8k.Gsm8k(protocol=protocol), piece * (100_000 // len(piece))
    start = time.process_time()
    for completion in (text, "\\boxed{" + text[: LONGEST - 50] + "}", "<answer>" + text):
        assert task.reward(row("271828"), completion) == 0.0
    assert time.process_time() - start < 2


@given(st.text(alphabet="{}ab\\"))
def test_braces_are_matched_as_counting_matches_them(text: str) -> None:
    def counted(start: int) -> int | None:
        depth = 0
        for place in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return place
        return None

    plain = {start: counted(start) for start, sign in enumerate(text) if sign == "{"}
    assert closing_braces(text) == {start: end for start, end in plain.items() if end is not None}


@given(st.lists(st.sampled_from(["\\boxed{", "{", "}", "\n", "7", "x"])).map("".join))
def test_the_boxes_of_d1_are_those_of_one_pattern(text: str) -> None:
    assert gsm8k.d1_boxes(text) == re.findall(r"\\boxed\{(.*?)\}", text)


def test_pieces_of_a_text() -> None:
    assert last_box("\\boxed{\\frac{1}{2}} \\boxed{ }") == "\\frac{1}{2}"
    assert text_before_end("said<|eot_id|>not said") == "said"
    assert in_form("<reasoning>a</reasoning><answer>b</answer>")
    assert not in_form("<answer>b</answer><reasoning>a</reasoning>")
    assert not in_form("<reasoning>a</reasoning><answer>b</answer><answer>")
    assert not in_form("<reasoning>a</reasoning><answer> \n</answer>")  # a form with nothing in it is none
    assert not in_form("<reasoning> </reasoning><answer>b</answer>")


def test_the_form_earns_its_share_only_where_asked() -> None:
    formed, bare = gsm8k.Gsm8k().solution(ROW), "\\boxed{2}"
    wrong = formed.replace("2}", "3}")
    assert [gsm8k.Gsm8k().reward(ROW, text) for text in (formed, bare, wrong)] == [1, 1, 0]
    shared = gsm8k.Gsm8k(weights={"correctness": 0.8, "format": 0.2})
    assert [shared.reward(ROW, text) for text in (formed, bare, wrong, "")] == pytest.approx([1, 0.8, 0.2, 0])


def test_prompts_ask_the_question_and_show_the_form() -> None:
    for protocol in gsm8k.PROTOCOLS:
        task = gsm8k.Gsm8k(protocol=protocol)
        text, tag = task.system + task.prompt(ROW), gsm8k.PROTOCOLS[protocol].tag
        assert "How many?" in text and f"<{tag}>\n" in text and ("\\boxed{" in text) == (protocol != "d1_train")
        assert task.prefill == ("" if task.system or protocol == "d1_train" else "<reasoning>") and task.text
    assert gsm8k.Gsm8k(protocol="d1").prompt(ROW).endswith("\n</answer>\n\nHow many?")


def test_unknown_names_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unmask, d1"):
        gsm8k.Gsm8k(protocol="wd1")
    with pytest.raises(ValueError, match="no data file"):
        gsm8k.Gsm8k(data=str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match="correctness, format, length"):
        gsm8k.Gsm8k(weights={"form": 1.0})
    (tmp_path / "bad.jsonl").write_text(json.dumps(ROW) + "\n" + json.dumps({"question": "?", "answer": "5"}) + "\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl line 2: .*####"):
        gsm8k.Gsm8k(data=str(tmp_path / "bad.jsonl")).rows("train", 1, 0)


def test_one_file_is_for_both_splits_and_two_files_are_separate(tmp_path: Path) -> None:
    rows = [{"question": f"question {i}", "answer": f"#### {i}"} for i in range(200)]
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    one.write_text("".join(json.dumps(row) + "\n" for row in rows))
    other.write_text("".join(json.dumps(row) + "\n" for row in rows[:50]))
    task = gsm8k.Gsm8k(data=str(one))
    train, test = ({row["question"] for row in task.rows(split, 200, 0)} for split in ("train", "test"))
    assert train | test == {row["question"] for row in rows} and not train & test
    assert 20 <= len(test) <= 60
    task = gsm8k.Gsm8k(data=str(one), test_data=str(other))
    assert task.rows("test", 99, 0) == rows[:50]
    assert {row["question"] for row in task.rows("train", 150, 3)} == {row["question"] for row in rows[50:]}


@pytest.mark.skipif(not DATA.is_dir(), reason="needs the shared data folder beside the checkout")
def test_every_published_solution_is_solved() -> None:
    rows = [json.loads(line) for line in (DATA / "test.jsonl").read_text().splitlines()]
    with gzip.open(DATA / "train.jsonl.gz", "rt") as file:
        rows += [json.loads(line) for line in file]
    assert len(rows) == 8792
    own, d1 = gsm8k.Gsm8k(), gsm8k.Gsm8k(protocol="d1")
    lost = 0
    for row in rows:
        assert gsm8k.gold(row) == int(row["final_answer"])
        assert own.reward(row, own.solution(row)) == 1.0
        lost += not d1.solved(row, d1.solution(row))
    negative_or_with_comma = [r for r in rows if set(",-") & set(r["answer"].rpartition("####")[2])]
    assert lost == len(negative_or_with_comma)


@pytest.mark.skipif(not DATA.is_dir(), reason="needs the shared data folder beside the checkout")
def test_the_published_files_are_the_splits() -> None:
    task = gsm8k.Gsm8k(data=str(DATA / "train.jsonl.gz"), test_data=str(DATA / "test.jsonl"))
    assert len(task.rows("test", 5000, 0)) == 1319
    assert len({row["id"] for row in task.rows("train", 7473, 0)}) == 7473
