r"""GSM8K: grade-school word problems whose answer is a number.

Protocols:
    unmask    the number at the end of the last \boxed{...}, else of the last <answer> block; reads signs, thousands
              separators, fractions and powers; compared exactly with the number after ####, sign included
    d1        the first \boxed{...} with a number in it, else the first <answer> block; see docs/benchmarks.md
    d1_train  graded like d1; d1's training prompt: the form before the question, no box and no prefill
    agrpo     graded like unmask; the system turn asks for <think>; tested on GSM8K-Platinum
    justgrpo  like unmask, one token a step and one problem at a time
"""

import re
from collections.abc import Sequence
from fractions import Fraction

from unmask.tasks.support import d1_rewards
from unmask.tasks.support.answers import (
    as_float,
    bounded_text,
    first_answer,
    last_answer,
    last_box,
    last_number,
    text_before_end,
)
from unmask.tasks.support.data import hub_rows
from unmask.tasks.support.protocol import (
    D1_DECODING,
    JUSTGRPO_DECODING,
    Protocol,
    ProtocolTask,
    answer_form,
    boxed_prompt,
    d1_boxed_prompt,
    tagged_completion,
    think_protocol,
)
from unmask.tasks.task import About, Grade, Row

FIELDS = {"question": str, "answer": str}
HUB = "openai/gsm8k"
PLATINUM = "madrylab/gsm8k-platinum"  # the test split without its ambiguous and wrong rows
MARKS = re.compile(r"<<[^<>]*>>")  # calculator annotations in the published solutions
D1_GOLD = re.compile(r"####\s*\$?([0-9][0-9,]*(?:\.[0-9]+)?)")
D1_NUMBER = re.compile(r"-?\d+\.?\d*")
D1_BOX_ENDS = re.compile(r"[}\n]")


def gold(row: Row) -> Fraction | None:
    """The number after ####, with its sign."""
    return last_number(row["answer"].rpartition("####")[2])


def answer(completion: str) -> Fraction | None:
    text = text_before_end(completion)
    for content in (last_box(text), last_answer(text)):
        if content is not None and (number := last_number(content)) is not None:
            return number
    return None


def grade(row: Row, completion: str) -> Grade:
    return number_grade(answer(completion), gold(row))


def number_grade(number: Fraction | float | None, gold: Fraction | float | None) -> Grade:
    return Grade(float(number is not None and number == gold), 1.0, "" if number is None else str(number))


def d1_gold(row: Row) -> float | None:
    """The number after ####; None for a negative one, to which d1 takes no answer as equal."""
    if "stored_gold" in row:
        return row["stored_gold"]
    number = D1_GOLD.search(row["answer"])
    return float(number[1].replace(",", "")) if number else None


def d1_boxes(text: str) -> list[str]:
    r"""The content of each \boxed{...}: up to the first closing brace, on one line."""
    boxes, place, end = [], text.find("\\boxed{"), -1
    while place >= 0:
        place += len("\\boxed{")
        if end < place:  # else this box ends at the same place as the last
            match = D1_BOX_ENDS.search(text, place)
            end = match.start() if match else len(text)
        if text[end : end + 1] == "}":
            boxes.append(text[place:end])
            place = end
        place = text.find("\\boxed{", place)
    return boxes


def d1_answer(completion: str) -> float | None:
    text = bounded_text(completion)
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
    return number_grade(d1_answer(completion), d1_gold(row))


def prompt(row: Row) -> str:
    return boxed_prompt(row["question"], "the number alone")


# Reconstructed from a description of d1's, not copied: its hash differs from d1's.
D1_FORM = "Respond in the following format:\n" + answer_form("...", "...")

PROTOCOLS = {
    "unmask": Protocol(prompt, grade),
    "d1": Protocol(lambda row: d1_boxed_prompt(row["question"]), d1_grade, decoding=D1_DECODING),
    "d1_train": Protocol(lambda row: f"{D1_FORM}\n\n{row['question']}", d1_grade, prefill="", decoding=D1_DECODING),
    "agrpo": think_protocol(
        lambda row: row["question"],
        grade,
        "Solve the problem you are given.",
        "\\boxed{the number alone}",
        sets={"test": lambda: hub_rows(PLATINUM, "main", "test")},
    ),
    "justgrpo": Protocol(prompt, grade, decoding=JUSTGRPO_DECODING),
}


class Gsm8k(ProtocolTask):
    """GSM8K from the hub, or from JSONL files with `question` and `answer` (ends with "#### number").

    The reward is 1 for the right number; `weights` makes it one of several parts, `rewards` selects d1's parts.
    """

    name = "gsm8k"
    summary = "GSM8K: grade-school word problems (openai/gsm8k, or a file)"
    about = About(
        source=f"the hub: {HUB} (agrpo tests on {PLATINUM}); or JSONL files with question and answer",
        sizes={"train": 7473, "test": 1319},
        separation="as published; a training row with the question of a test row is left out",
        example={
            "question": "Tom has 3 boxes of 4 pens each. He gives 5 pens away. How many pens does he have left?",
            "answer": "Tom had 3*4=<<3*4=12>>12 pens.\nHe has 12-5=<<12-5=7>>7 left.\n#### 7",
        },
        protocols=tuple(PROTOCOLS),
        needs=("unmask[data], for the hub",),
    )
    protocols = PROTOCOLS
    d1_parts = d1_rewards.GSM8K
    row_fields = FIELDS

    def default_rows(self, split: str) -> Sequence[Row]:
        return hub_rows(HUB, "main", split)

    def parse_row(self, row: Row) -> Row:
        if "####" not in row["answer"] or gold(row) is None:
            raise ValueError('the "answer" has no "####" with a number after it')
        return row

    def key(self, row: Row) -> str:
        return row["question"]

    def stored_row(self, line: Row) -> Row:
        """A row, or a line with `ground_truth`: a number, a text that ends with one, or d1's null."""
        if "ground_truth" not in line and isinstance(line.get("answer"), str):
            return self.parse_row(line)
        truth = line["ground_truth"]
        if truth is None and self.rules.grade is d1_grade:
            return {"answer": "####", "stored_gold": None}
        if isinstance(truth, bool) or not isinstance(truth, int | float | str):
            hint = "; null, d1's gold of a negative number, needs --protocol d1" if truth is None else ""
            raise ValueError(f'"ground_truth" must be a number or a string{hint}')
        row = self.parse_row({"answer": truth if "####" in str(truth) else f"#### {truth}"})
        return row if isinstance(truth, str) else {**row, "stored_gold": truth}

    def tagged_solution(self, row: Row) -> str:
        steps, _, number = row["answer"].rpartition("####")
        number = number.strip()
        answer = number if self.rewards == "d1" else f"\\boxed{{{number}}}"
        return tagged_completion(MARKS.sub("", steps).strip() or number, answer)
