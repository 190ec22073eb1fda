r"""Multiple choice: a question with lettered options, graded by the chosen letter.

Rows come from a JSONL file with `question`, `options` and `answer`, a letter or a number from 0. The names of
HellaSwag (`ctx`, `endings`, `label`) and CommonsenseQA (`question`, `choices`, `answerKey`) are accepted too.

The letter is searched in the last \boxed{...}, else in the last <answer> block, else in the whole text up to its end
token: after "answer:", "answer is" or "the correct option is"; else it is the whole text ("B", "(b)") or the beginning
of one line ("B. Paris"). The last of several "answer is" counts; several options at once ("A or B", a list) choose
none. Other text is not an answer: the "A" of "A dog barks" is not a choice.
"""

import re
import string
from collections.abc import Sequence
from typing import Any

from unmask.tasks.support.answers import LETTERED, last_answer, last_box, text_before_end
from unmask.tasks.support.protocol import TextTask
from unmask.tasks.task import About, Grade, Row, Weights

NAMES = (("question", "ctx"), ("options", "endings", "choices"), ("answer", "label", "answerKey"))

# Several letters choose none. The capitals of "A dog", "A's" and "I think" are not choices.
OTHER = r"\s{0,3}(?:,|/|&|or\b|and\b){1,2}\s{0,3}(?:or\b|and\b)?\s{0,3}(?:option\s)?\(?(?!I\s[a-z])[A-Z](?![\w'’])"
CAPITAL = r"[A-Z](?![\w'’])(?<!A(?=\s[a-z])(?!\s(?:because|since|as|is|or|and|so|for)\b))"
# In prose the letter must be a capital: "the answer is a dog" chooses nothing. In brackets, and after a colon at the
# end of a line, it may be small.
CHOICE = re.compile(
    r"(?P<lead>\b(?i:answer|(?:correct|right|best)\s{1,3}(?:option|choice))(?:\s{1,3}is\b\s{0,3}:?|\s{0,3}:))[\s*:]{0,5}"
    rf"(?:option\s{{1,3}})?(?:\(([A-Za-z])\)|({CAPITAL})|(?P<small>[a-z])(?=[.)*]{{0,3}}\s{{0,9}}(?:\n|\Z)))"
    rf"(?P<other>{OTHER})?"
)
BETWEEN = ("or", "and", "option")  # words that may join letters
FORM = re.compile(r"\s{0,9}Answer: [A-Z]\s{0,9}")  # the form that the prompt asks for
LISTED = re.compile(rf"^[ \t]{{0,9}}\(?([A-Z])[.):](?!{OTHER})(?:[ \t]|$)", re.MULTILINE)


def letter(completion: str, count: int) -> str | None:
    """The letter that a completion chooses among `count` options; None if it chooses none of them."""
    text = text_before_end(completion)
    for part in (last_box(text), last_answer(text), text):
        if part is not None and (named := letters(LETTERED.sub(r"\1", part))):
            return min(named) if len(named) == 1 and named <= set(string.ascii_uppercase[:count]) else None
    return None


def letters(text: str) -> set[str]:
    """The letters that a text chooses: one, several, or none."""
    choices = [match for match in CHOICE.finditer(text) if not match["small"] or ":" in match["lead"]]
    if choices:
        last = choices[-1]
        return {(last[2] or last[3] or last["small"]).upper(), *re.findall(r"\b[A-Z]\b", last["other"] or "")}
    words = re.findall(r"\w+", text)
    alone = {word.upper() for word in words if len(word) == 1 and word in string.ascii_letters}
    if all(word.upper() in alone or word.lower() in BETWEEN for word in words):
        return alone
    return set(LISTED.findall(text))


def _field(row: Row, names: tuple[str, ...]) -> Any:
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise ValueError(f"there is no {names[0]!r} (nor {' or '.join(map(repr, names[1:]))})")


def _letter(answer: Any, labels: list[Any], count: int) -> str:
    """The letter of the right option, given by its label, its letter, or its number from 0 (also as a string)."""
    letters = string.ascii_uppercase[:count]
    if answer in labels and labels.index(answer) < count:
        return letters[labels.index(answer)]
    text = str(answer).strip().upper()
    if isinstance(answer, int | str) and not isinstance(answer, bool):
        if len(text) == 1 and text in letters:
            return text
        if text.isdecimal() and text.isascii() and len(text) < 3 and int(text) < count:
            return letters[int(text)]
    raise ValueError(f"the answer {answer!r} is not one of the {count} options")


class MultipleChoice(TextTask):
    """Questions with options from a JSONL file; 1 for the right letter, else 0; `weights` weighs the parts."""

    name = "multiple_choice"
    summary = "Questions with lettered options, from a file"
    length = 64
    about = About(
        source="JSONL files with question, options and answer",
        separation="by a hash of the question, one in five for the test, unless a row names its split",
        example={"question": "What is the capital of France?", "options": ["London", "Paris", "Rome"], "answer": "B"},
    )
    names_split = True

    def __init__(self, data: str = "", test_data: str = "", weights: Weights = None) -> None:
        super().__init__(data, test_data)
        self.set_reward_parts(self.standard_parts(), weights)

    def published_rows(self, split: str) -> Sequence[Row]:
        raise ValueError("multiple_choice: give a file of questions: multiple_choice.data=FILE.jsonl")

    def parse_row(self, row: Row) -> Row:
        question, options, answer = (_field(row, names) for names in NAMES)
        labels: list[Any] = []
        if isinstance(options, dict) and isinstance(options.get("label"), list):  # CommonsenseQA's form on the hub
            labels, options = options["label"], options.get("text")
        elif isinstance(options, dict):
            labels, options = list(options), list(options.values())
        if not isinstance(question, str) or not isinstance(options, list) or any(type(o) is not str for o in options):
            raise ValueError("the question must be a string and the options a list of strings")
        if not 2 <= len(options) <= 26:
            raise ValueError(f"there are {len(options)} options, not 2 to 26")
        result: Row = {key: row[key] for key in ("id", "split") if key in row}
        return {**result, "question": question, "options": options, "answer": _letter(answer, labels, len(options))}

    def key(self, row: Row) -> str:
        return row["question"]

    def prompt(self, row: Row) -> str:
        options = [f"{string.ascii_uppercase[place]}. {option}" for place, option in enumerate(row["options"])]
        instruction = 'Answer with the letter of the right option, as in "Answer: A".'
        return "\n\n".join((row["question"], "\n".join(options), instruction))

    def solution(self, row: Row) -> str:
        return f"Answer: {row['answer']}"

    def grade(self, row: Row, completion: str) -> Grade:
        choice = letter(completion, len(row["options"]))
        return Grade(float(choice == row["answer"]), 1.0, choice or "")

    def in_form(self, completion: str) -> bool:
        return FORM.fullmatch(text_before_end(completion)) is not None
