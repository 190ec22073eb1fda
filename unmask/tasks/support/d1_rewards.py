r"""The rewards that d1 (dllm-reasoning/d1, arXiv:2504.12216) trains with, errors included: `gsm8k.rewards=d1`.

They are parts with weights, so `gsm8k.weights={integer: 0}` drops one; a part for which d1 pays 2 or 0.5 is 0 or 1 with
that weight. The errors, all kept:

    gsm8k     xml_count subtracts 0.001 for each character after the answer, twice, and for the whole text if no newline
              follows the last tag; a text that ends with the last tag earns 0.001 too much. In soft_format and
              strict_format a dot does not match a newline: only reasoning of one line counts, and no text earns both.
              integer is Python's isdigit: false for "-5", true for "²". A text without tags is itself the answer.
    math500   the test for \boxed is never true, because of a wrong escape: the format earns 0.75 with <answer> in the
              text and 0.25 without
    countdown any <answer> earns 0.1
    sudoku    cells are compared with the one listed solution; digits before the grid shift it

The published runs used this form; a later version of d1's code lets the dot match a newline.
"""

import re
from collections.abc import Callable

from unmask.tasks.support.answers import ENDS, LONGEST
from unmask.tasks.support.d1_answers import box, equal
from unmask.tasks.task import RewardPart, Row

TRAILING = 0.001  # a character
SOFT = re.compile(r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>")
STRICT = re.compile(r"<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n$")
CELLS = 16
LONGEST_EXPRESSION = 200  # characters; a longer one has other numbers than the given


def plain_text(text: str) -> str:
    """The text that d1's rewards see: without special tokens, bounded."""
    return ENDS.sub("", text[:LONGEST])


def xml_count(text: str) -> float:
    """An eighth for each of the four tags that occurs exactly once, minus the penalty for trailing text."""
    count = 0.125 * (text.count("<reasoning>\n") == 1) + 0.125 * (text.count("\n</reasoning>\n") == 1)
    if text.count("\n<answer>\n") == 1:
        count += 0.125 - TRAILING * len(text.rpartition("\n</answer>\n")[2])
    if text.count("\n</answer>") == 1:
        count += 0.125 - TRAILING * (len(text.rpartition("\n</answer>")[2]) - 1)
    return count


def answer_text(text: str) -> str:
    """The text between the last <answer> and the next </answer>; a missing tag is the text's begin or end."""
    return text.rpartition("<answer>")[2].partition("</answer>")[0].strip()


def last_block(text: str) -> str | None:
    """The content of the last closed <answer> block, searched from the left."""
    block, place = None, text.find("<answer>")
    while place >= 0 and (end := text.find("</answer>", place)) >= 0:
        block, place = text[place + len("<answer>") : end].strip(), text.find("<answer>", end)
    return block


def expression_score(text: str, numbers: list[int], target: int, value: Callable[[str], complex | None]) -> float:
    """0 without an <answer>, 1 for one with the given numbers and the target's value, else 0.1."""
    block = last_block(text)
    if block is None:
        return 0.0
    if len(block) > LONGEST_EXPRESSION or sorted(map(int, re.findall(r"\d+", block))) != sorted(numbers):
        return 0.1
    result = value(block)
    return 1.0 if result is not None and abs(result - target) < 1e-5 else 0.1


def cells_right(text: str, puzzle: str, solution: str) -> float:
    """The share of empty cells that equal the solution's, by the digits of the last <answer>."""
    digits = "".join(character for character in last_block(text) or "" if character.isdigit())
    empty = [cell for cell, given in enumerate(puzzle) if given == "0"]
    if not digits or not empty:
        return 0.0
    grid = digits.ljust(CELLS, "0")[:CELLS]
    return sum(grid[cell] == solution[cell] for cell in empty) / len(empty)


def part(value: Callable[[Row, str], float], weight: float, low: float = 0.0, high: float = 1.0) -> RewardPart:
    return RewardPart(lambda row, text: float(value(row, plain_text(text))), weight, low, high)


GSM8K = {
    "correctness": part(lambda row, text: answer_text(text) == row["answer"].split("####")[1].strip(), 2.0),
    "integer": part(lambda row, text: answer_text(text).isdigit(), 0.5),
    "soft_format": part(lambda row, text: SOFT.match(text) is not None, 0.5),
    "strict_format": part(lambda row, text: STRICT.match(text) is not None, 0.5),
    "xml_count": part(lambda row, text: xml_count(text), 1.0, -2 * TRAILING * LONGEST, 0.5 + TRAILING),
}

SUDOKU = {"cells": part(lambda row, text: cells_right(text, row["puzzle"], row["solution"]), 1.0)}


MATH = {
    "correctness": part(
        lambda row, text: equal(text if (content := box(text)) is None else content, row["answer"]), 2.0
    ),
    "format": part(lambda row, text: 0.75 if "<answer>" in text else 0.25, 1.0, 0.25, 0.75),
}


def countdown_parts(value: Callable[[str], complex | None]) -> dict[str, RewardPart]:
    """`value` evaluates an expression in Python's arithmetic."""
    return {"answer": part(lambda row, text: expression_score(text, row["numbers"], row["target"], value), 1.0)}
