r"""GSM8K: grade-school word problems whose answer is a number.

Protocols:
    unmask  the number that the last \boxed{...} ends with, else the last <answer> block; signs, thousands separators,
            fractions and powers understood; compared exactly with the number after ####, sign included
    d1      the first \boxed{...} with a number in it, else the first <answer> block; see docs/benchmarks.md
    d1_train  graded as d1; what d1 trains with: the form alone, before the question, no box and no prefill
    agrpo   graded as unmask; <think> asked for by a system's turn, tested on GSM8K-Platinum
    justgrpo  as unmask, one token a step and one problem at a time
"""

import re
from dataclasses import replace
from fractions import Fraction

from unmask.tasks.support import d1_rewards
from unmask.tasks.support.answers import as_float, first_answer, last_answer, last_boxed, last_number, spoken, whole
from unmask.tasks.support.boxed import boxed_prompt, d1_boxed_prompt
from unmask.tasks.support.composite import Rewards, Weights
from unmask.tasks.support.data import hub_rows
from unmask.tasks.support.manner import D1, JUSTGRPO
from unmask.tasks.support.protocol import SKELETON, Protocol, check_d1_rewards, chosen, text_task, thinking, written_out
from unmask.tasks.support.sources import Shape, set_rows
from unmask.tasks.support.split import hashed_split
from unmask.tasks.task import About, Grade, Row, Task

HUB = "openai/gsm8k"
PLATINUM = "madrylab/gsm8k-platinum"  # the test split without its ambiguous and wrong rows
MARKS = re.compile(r"<<[^<>]*>>")  # the calculator's, in the published solutions
D1_NUMBER = re.compile(r"-?\d+\.?\d*")
D1_BOX_ENDS = re.compile(r"[}\n]")


def gold(row: Row) -> Fraction | None:
    """The number after ####, with its sign."""
    return last_number(row["answer"].rpartition("####")[2])


def answer(completion: str) -> Fraction | None:
    text = spoken(completion)
    for found in (last_boxed(text), last_answer(text)):
        if found is not None and (number := last_number(found)) is not None:
            return number
    return None


def grade(row: Row, completion: str) -> Grade:
    found = answer(completion)
    return Grade(float(found is not None and found == gold(row)), 1.0, "" if found is None else str(found))


def d1_gold(row: Row) -> float | None:
    """The first number after ####, as d1 reads it: without a minus sign."""
    text = row["answer"].partition("####")[2].replace("$", "").replace(",", "")
    found = re.search(r"\d+\.?\d*", text)
    return float(found.group()) if found else None


def d1_boxes(text: str) -> list[str]:
    r"""What is in each \boxed{...}: up to the first closing brace, and on one line."""
    found, place, end = [], text.find("\\boxed{"), -1
    while place >= 0:
        place += len("\\boxed{")
        if end < place:  # else the boxes opened so far end at the same place, which is not looked for again
            match = D1_BOX_ENDS.search(text, place)
            end = match.start() if match else len(text)
        if text[end : end + 1] == "}":
            found.append(text[place:end])
            place = end
        place = text.find("\\boxed{", place)
    return found


def d1_answer(completion: str) -> float | None:
    text = whole(completion)
    for content in d1_boxes(text):
        content = content.strip()
        if content.strip("."):
            if (number := as_float(content)) is not None:
                return number
            if numbers := D1_NUMBER.findall(content):
                return float(numbers[0])
    content = first_answer(text) or ""
    if (number := as_float(content)) is not None:
        return number
    numbers = D1_NUMBER.findall(content)
    return float(numbers[-1]) if numbers else None


def d1_grade(row: Row, completion: str) -> Grade:
    found = d1_answer(completion)
    return Grade(float(found is not None and found == d1_gold(row)), 1.0, "" if found is None else str(found))


def prompt(row: Row) -> str:
    return boxed_prompt(row["question"], "the number alone")


# Reconstructed from a description of d1's, not copied: its hash differs from d1's.
D1_FORM = "Respond in the following format:\n" + SKELETON.format(reasoning="...", answer="...")

PROTOCOLS = {
    "unmask": Protocol(prompt, grade),
    "d1": Protocol(lambda row: d1_boxed_prompt(row["question"]), d1_grade, manner=D1),
    "d1_train": Protocol(lambda row: f"{D1_FORM}\n\n{row['question']}", d1_grade, prefill="", manner=D1),
    "agrpo": replace(
        thinking(lambda row: row["question"], grade, "Solve the problem you are given.", "\\boxed{the number alone}"),
        sets={"test": lambda: hub_rows(PLATINUM, "main", "test")},
    ),
    "justgrpo": Protocol(prompt, grade, manner=JUSTGRPO),
}


def shaped(row: Row) -> Row:
    if "####" not in row["answer"] or gold(row) is None:
        raise ValueError('the "answer" has no "####" with a number after it')
    return row


SHAPE = Shape(
    wanted={"question": str, "answer": str},
    row=shaped,
    key=lambda row: row["question"],
    split=lambda row: hashed_split(row["question"]),
)


def stored_row(line: Row) -> Row:
    """The row that a stored generation answers: a row, or a `ground_truth`, a number or a text that ends with one."""
    if "ground_truth" not in line and isinstance(line.get("answer"), str):
        return shaped(line)
    truth = line["ground_truth"]
    if isinstance(truth, bool) or not isinstance(truth, int | float | str):
        raise ValueError('"ground_truth" must be a number or a text')
    return shaped({"answer": truth if "####" in str(truth) else f"#### {truth}"})


def solution(row: Row, form: str = "\\boxed{{{}}}") -> str:
    steps, _, number = row["answer"].rpartition("####")
    return written_out(MARKS.sub("", steps).strip() or number.strip(), form.format(number.strip()))


ABOUT = About(
    source=f"the hub: {HUB} (agrpo tests on {PLATINUM}); or JSONL files with question and answer",
    sizes={"train": 7473, "test": 1319},
    apart="as published; a training row with the question of a test row is left out",
    example={
        "question": "Tom has 3 boxes of 4 pens each. He gives 5 pens away. How many pens does he have left?",
        "answer": "Tom had 3*4=<<3*4=12>>12 pens.\nHe has 12-5=<<12-5=7>>7 left.\n#### 7",
    },
    protocols=tuple(PROTOCOLS),
    needs=("unmask[data], for the hub",),
)


def task(
    data: str = "",
    test_data: str = "",
    protocol: str = "unmask",
    rewards: Rewards = "unmask",
    weights: Weights = None,
) -> Task:
    """GSM8K from the hub, or from JSONL files with `question` and `answer` (ends with "#### number").

    The reward is 1 for the right number; `weights` makes it one of several parts, `rewards` takes d1's parts.
    """
    rules = chosen(PROTOCOLS, protocol)
    check_d1_rewards("gsm8k", rewards, rules)
    hub = rules.source(lambda split: hub_rows(HUB, "main", split))
    return text_task(
        name="gsm8k",
        summary="GSM8K: grade-school word problems (openai/gsm8k, or a file)",
        rows=set_rows("gsm8k", data, test_data, SHAPE, hub),
        solution=(lambda row: solution(row, "{}")) if rewards == "d1" else solution,
        protocol=rules,
        about=ABOUT,
        weights=weights,
        parts=d1_rewards.GSM8K if rewards == "d1" else None,
        stored=stored_row,
    )
