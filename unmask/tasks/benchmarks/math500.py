r"""MATH500: competition problems whose answer is a formula.

Protocols:
    unmask    the last \boxed{...} that is not empty, else the last <answer> block; equal to the gold answer after
              normalisation, as words, or by math-verify (extra `math`, in a separate process with a time limit)
    d1        the last \boxed{...}, else the whole text; equal after normalisation; see docs/benchmarks.md
    agrpo     graded like unmask; the system turn asks for <think>; trained on MATH's levels 1 to 4
    justgrpo  like unmask, one token a step and one problem at a time
"""

import re
from collections.abc import Sequence

from unmask.tasks.support import d1_rewards, verifier
from unmask.tasks.support.answers import bounded_text, d1_box, last_answer, last_box, text_before_end
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
WORD = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s?\{([^{}]*)\}")

# Replaced in this order. Two backslashes are a new line of a matrix, which d1's normalisation makes one backslash.
PLAINER = (
    ("\n", ""),
    ("\\!", ""),
    ("\\\\", "\\"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    ("\\left", ""),
    ("\\right", ""),
    ("^{\\circ}", ""),
    ("^\\circ", ""),
    ("\\$", ""),
)


def normal(text: str) -> str:
    r"""An answer in the normal form of Hendrycks' MATH: \tfrac12 is \frac{1}{2}, and so is 0.5."""
    for old, new in PLAINER:
        text = text.replace(old, new)
    head, _, tail = text.partition("\\text{ ")
    if "\\text{ " not in tail:  # units, written once, after the number
        text = head
    text = text.replace("\\%", "").replace("%", "").replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = "0" + text
    sides = text.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:  # x = 5
        text = sides[1]
    text = braced_roots(text).replace(" ", "")
    text = braced_fractions(text)
    if text == "0.5":
        text = "\\frac{1}{2}"
    return fraction(text)


def braced_roots(text: str) -> str:
    r"""\sqrt3 -> \sqrt{3}."""
    head, *rest = text.split("\\sqrt")
    return head + "".join("\\sqrt" + (part if part[:1] in ("", "{") else f"{{{part[0]}}}{part[1:]}") for part in rest)


def braced_fractions(text: str) -> str:
    r"""\frac12 -> \frac{1}{2}, \frac1{72} -> \frac{1}{72}; a text with an incomplete fraction stays the same."""
    head, *rest = text.split("\\frac")
    whole_text = head
    for part in rest:
        if part.startswith("{"):
            whole_text += "\\frac" + part
        elif len(part) < 2:
            return text
        elif part[1] == "{":
            whole_text += f"\\frac{{{part[0]}}}{part[1:]}"
        else:
            whole_text += f"\\frac{{{part[0]}}}{{{part[1]}}}{part[2:]}"
    return whole_text


def fraction(text: str) -> str:
    r"""9/19 -> \frac{9}{19}, for whole numbers only."""
    sides = re.fullmatch(r"(0|-?[1-9][0-9]{0,98})/(0|-?[1-9][0-9]{0,98})", text)
    return f"\\frac{{{sides[1]}}}{{{sides[2]}}}" if sides else text


def d1_answer(completion: str) -> str | None:
    return d1_box(bounded_text(completion))


def d1_grade(row: Row, completion: str) -> Grade:
    text = d1_answer(completion)
    right = text is not None and normal(text) == normal(row["answer"])
    return Grade(float(right), 1.0, text or "")


def words(text: str) -> str:
    r"""\text{(C)} -> c; for answers that are words, which math-verify reads as products of letters."""
    return re.sub(r"[\s().$\\]", "", WORD.sub(r"\1", text)).lower()


def alike(gold: str, answer: str) -> bool:
    """Whether they are equal as texts, without mathematics."""
    return normal(gold) == normal(answer) or (words(gold).isalpha() and words(gold) == words(answer))


def equivalent(gold: str, answer: str) -> bool:
    return alike(gold, answer) or verifier.equal(gold, answer)


def answer(completion: str) -> str | None:
    text = text_before_end(completion)
    return last_box(text) or last_answer(text)


def grade(row: Row, completion: str) -> Grade:
    text = answer(completion)
    return Grade(float(text is not None and equivalent(row["answer"], text)), 1.0, text or "")


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
    d1_parts = d1_rewards.math_parts(normal)
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
        """Compare in parallel the answers that differ as texts."""
        if self.rules.grade is not grade:
            return
        pairs = [(row["answer"], answer(completion)) for row, completion in zip(rows, completions, strict=True)]
        verifier.compare((gold, text) for gold, text in pairs if text is not None and not alike(gold, text))
