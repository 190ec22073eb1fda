r"""Multiple choice: a question with lettered options, graded by the letter that is chosen.

Rows come from a JSONL file with `question`, `options` and `answer`, a letter or a number from 0. The names of
HellaSwag (`ctx`, `endings`, `label`) and CommonsenseQA (`question`, `choices`, `answerKey`) are understood too.

A letter is looked for in \boxed{B}; then in <answer>B</answer>; then after "answer:" or "answer is"; then as all there
is ("B", "(b)") or as what one line begins with ("B. Paris"). Of several in words the last counts; a list of several
options chooses none. Other text is no answer: the "A" of "A dog barks" is none.
"""

import re
import string
from typing import Any

from unmask.tasks.sources import Shape, hashed_split, set_rows
from unmask.tasks.task import Grade, Row, Task

LONGEST = 20_000
NAMES = (("question", "ctx"), ("options", "endings", "choices"), ("answer", "label", "answerKey"))

BOXED = re.compile(r"\\boxed\{(?:\\text\{)?\(?([A-Za-z])\)?\}")
TAGGED = re.compile(r"<answer>\s{0,9}\(?([A-Za-z])[.)]?(?:\s[^<]{0,400})?</answer>", re.IGNORECASE)
# In prose the letter must be a capital: "the answer is a dog" chooses nothing. With a colon or in brackets it need not.
TOLD = re.compile(
    r"\b[Aa][Nn][Ss][Ww][Ee][Rr](?:\s{1,3}is\b|\s{0,3}:)[\s*:]{0,5}(?:option\s{1,3})?(?:\(([A-Za-z])\)|([A-Z])(?![\w'’]))"
)
ALONE = re.compile(r"\W{0,9}([A-Za-z])\W{0,9}")
LISTED = re.compile(r"^[ \t]{0,9}\(?([A-Z])[.):](?:[ \t]|$)", re.MULTILINE)


def letter(completion: str, count: int) -> str | None:
    """The letter that a completion chooses of so many options; None where it chooses none of them."""
    text = completion[:LONGEST]
    for pattern in (BOXED, TAGGED, TOLD):
        if said := pattern.findall(text):
            last = "".join(said[-1]).upper()
            return last if last in string.ascii_uppercase[:count] else None
    whole = ALONE.fullmatch(text.strip())
    listed = {whole[1].upper()} if whole else set(LISTED.findall(text))
    return min(listed) if len(listed) == 1 and listed <= set(string.ascii_uppercase[:count]) else None


def _named(row: Row, names: tuple[str, ...]) -> Any:
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise ValueError(f"there is no {names[0]!r} (nor {' or '.join(map(repr, names[1:]))})")


def _row(row: Row) -> Row:
    question, options, answer = (_named(row, names) for names in NAMES)
    labels: list[Any] = []
    if isinstance(options, dict) and isinstance(options.get("label"), list):  # as CommonsenseQA has it on the hub
        labels, options = options["label"], options.get("text")
    elif isinstance(options, dict):
        labels, options = list(options), list(options.values())
    if not isinstance(question, str) or not isinstance(options, list) or not all(isinstance(o, str) for o in options):
        raise ValueError("the question must be a text and the options a list of texts")
    if not 2 <= len(options) <= 26:
        raise ValueError(f"there are {len(options)} options, not 2 to 26")
    kept: Row = {key: row[key] for key in ("id", "split") if key in row}
    return {**kept, "question": question, "options": options, "answer": _place(answer, labels, len(options))}


def _place(answer: Any, labels: list[Any], count: int) -> str:
    """The letter of the right option: by its label, its letter, or its number from 0, also where that is a text."""
    letters = string.ascii_uppercase[:count]
    if answer in labels and labels.index(answer) < count:
        return letters[labels.index(answer)]
    text = str(answer).strip().upper()
    if isinstance(answer, int | str) and not isinstance(answer, bool):
        if len(text) == 1 and text in letters:
            return text
        if text.isdecimal() and text.isascii() and len(text) < 3 and int(text) < count:
            return letters[int(text)]
    raise ValueError(f"the answer {answer!r} is none of the {count} options")


def _no_file(split: str) -> list[Row]:
    raise ValueError("multiple_choice: give a file of questions: multiple_choice.data=FILE.jsonl")


SHAPE = Shape(
    wanted={},
    row=_row,
    key=lambda row: row["question"],
    split=lambda row: row.get("split") or hashed_split(row["question"]),
)


def task(data: str = "", test_data: str = "") -> Task:
    """Questions with options from a JSONL file; 1 for the right letter, else 0."""

    def prompt(row: Row) -> str:
        listed = [f"{string.ascii_uppercase[place]}. {option}" for place, option in enumerate(row["options"])]
        wanted = 'Answer with the letter of the right option, as in "Answer: A".'
        return "\n\n".join((row["question"], "\n".join(listed), wanted))

    def grade(row: Row, completion: str) -> Grade:
        chosen = letter(completion, len(row["options"]))
        return Grade(float(chosen == row["answer"]), 1.0, chosen or "")

    return Task(
        name="multiple_choice",
        summary="Questions with lettered options, from a file",
        length=64,
        rows=set_rows("multiple_choice", data, test_data, SHAPE, _no_file),
        prompt=prompt,
        solution=lambda row: f"Answer: {row['answer']}",
        reward=lambda row, completion: grade(row, completion).points,
        solved=lambda row, completion: grade(row, completion).points == 1.0,
        text=True,
        grade=grade,
    )
