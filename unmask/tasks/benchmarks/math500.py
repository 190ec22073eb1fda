r"""MATH500: competition problems whose answer is a formula.

Protocols:
    unmask    the last \boxed{...} that is not empty, else the last <answer> block; equal to the gold answer in form and
              value (extra `math`, in a separate process with a time limit)
    d1        the last \boxed{...}, else the whole text; equal after normalisation; see docs/benchmarks.md
    agrpo     graded like unmask; the system turn asks for <think>; trained on MATH's levels 1 to 4
    justgrpo  like unmask, one token a step and one problem at a time
"""

from collections.abc import Sequence

from unmask.tasks.support import d1_answers, d1_rewards, verifier
from unmask.tasks.support.answers import bounded_text, last_answer, last_box, text_before_end
from unmask.tasks.support.data import hub_rows
from unmask.tasks.support.protocol import (
    D1_DECODING,
    JUSTGRPO_DECODING,
    Protocol,
    ProtocolTask,
    boxed_prompt,
    d1_boxed_prompt,
    tagged_completion,
    think_protocol,
)
from unmask.tasks.task import About, Grade, Row

FIELDS = {"problem": str}
HUB = {"train": ("ankner/math-500", "train"), "test": ("HuggingFaceH4/MATH-500", "test")}
MATH = "qwedsacf/competition_math"  # all 12,500 problems; the authors' own set is no longer on the hub
EASIER = ("Level 1", "Level 2", "Level 3", "Level 4")


def d1_answer(completion: str) -> str | None:
    return d1_answers.math_answer(bounded_text(completion))


def d1_grade(row: Row, completion: str) -> Grade:
    text = d1_answer(completion)
    return Grade(float(text is not None and d1_answers.equal(text, row["answer"])), 1.0, text or "")


def answer(completion: str) -> str | None:
    text = text_before_end(completion)
    return last_box(text) or last_answer(text)


def grade(row: Row, completion: str) -> Grade:
    text = answer(completion)
    right = text is not None and (text == row["answer"] or verifier.equal(row["answer"], text))
    return Grade(float(right), 1.0, text or "")


def prompt(row: Row) -> str:
    return boxed_prompt(row["problem"], "the answer alone")


PROTOCOLS = {
    "unmask": Protocol(prompt, grade),
    "d1": Protocol(lambda row: d1_boxed_prompt(row["problem"], stray='"'), d1_grade, decoding=D1_DECODING),
    "agrpo": think_protocol(
        lambda row: row["problem"],
        grade,
        "Solve the problem you are given.",
        "\\boxed{the answer alone}",
        sets={"train": lambda: [row for row in hub_rows(MATH, None, "train") if row["level"] in EASIER]},
    ),
    "justgrpo": Protocol(prompt, grade, decoding=JUSTGRPO_DECODING),
}


class Math500(ProtocolTask):
    """MATH500 from the hub, or from JSONL files with `problem` and `answer` (or a `solution` with a box).

    The reward is 1 for an answer equal to the gold; `weights` makes it one of several parts, `rewards` selects d1's.
    """

    name = "math500"
    summary = "MATH500: competition problems (HuggingFaceH4/MATH-500, or a file)"
    about = About(
        source=f"the hub: {HUB['test'][0]} to test on, {HUB['train'][0]} to train on (agrpo: {MATH}); or JSONL files "
        "with problem and answer, or a solution with a box",
        sizes={"test": 500},
        separation="as published; a training row with the problem of a test row is left out",
        example={"problem": "What is $\\frac{1}{2}+\\frac{1}{3}$?", "answer": "\\frac{5}{6}"},
        protocols=tuple(PROTOCOLS),
        needs=("unmask[data], for the hub", "unmask[math], for all protocols but d1"),
    )
    protocols = PROTOCOLS
    d1_parts = d1_rewards.MATH
    row_fields = FIELDS

    def rows(self, split: str, n: int, seed: int) -> list[Row]:
        if self.rules.grade is grade:
            verifier.check_installed()  # now, not in the middle of a run
        return super().rows(split, n, seed)

    def default_rows(self, split: str) -> Sequence[Row]:
        name, hub_split = HUB[split]
        return hub_rows(name, None, hub_split)

    def parse_row(self, row: Row) -> Row:
        """A row with its `answer`, else with the last box of its `solution` as the answer."""
        solution = row.get("solution") or ""
        answer = row.get("answer") or (last_box(solution) if isinstance(solution, str) else None)
        if not isinstance(answer, str) or not isinstance(solution, str):
            raise ValueError('there is neither an "answer" nor a "solution" with a \\boxed{...}')
        return {**row, "answer": answer}

    def key(self, row: Row) -> str:
        return row["problem"]

    def stored_row(self, line: Row) -> Row:
        """A row, or a line with `ground_truth`."""
        if "ground_truth" not in line and ("answer" in line or "solution" in line):
            return self.parse_row(line)
        if not isinstance(line["ground_truth"], str):
            raise ValueError('"ground_truth" must be a string')
        return {"answer": line["ground_truth"]}

    def tagged_solution(self, row: Row) -> str:
        return tagged_completion(row.get("solution") or row["answer"], f"\\boxed{{{row['answer']}}}")

    def prepare(self, rows: Sequence[Row], completions: Sequence[str]) -> None:
        """Compare the answers in parallel."""
        if self.rules.grade is not grade:
            return
        pairs = [(row["answer"], answer(completion)) for row, completion in zip(rows, completions, strict=True)]
        verifier.compare((gold, text) for gold, text in pairs if text is not None and text != gold)
