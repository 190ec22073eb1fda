"""Word problems like GSM8K's, from templates: two or three steps of arithmetic in a story.

Prompts, form and graders are GSM8K's (`gsm8k.py`), so a model that is trained here can be evaluated there. The
split is by the story and its numbers: no test problem is a training problem with another name.

The behaviour `careless` writes the same steps and forgets every carry: 12 * 7 = 74, 58 + 26 = 74, 32 - 17 = 25. A step
continues from the wrong result before it, and a division drops the remainder.
"""

import random
import re
from collections.abc import Callable
from typing import NamedTuple

from unmask.tasks.benchmarks.gsm8k import PROTOCOLS, Gsm8k
from unmask.tasks.puzzles.arithmetic import column_sum
from unmask.tasks.support.split import GeneratedTask, hashed_split
from unmask.tasks.task import About, Row

NAMES = ("Ada", "Ben", "Cleo", "Dana", "Emil", "Fatima", "Goran", "Hana", "Ivan", "Jun", "Kofi", "Lena", "Mara", "Nils")
THINGS = ("apples", "books", "cards", "coins", "eggs", "marbles", "pens", "plums", "shells", "stamps", "tickets")


class Story(NamedTuple):
    """A problem, its steps and its answer; `numbers` identify it."""

    question: str
    steps: tuple[str, ...]
    answer: int
    numbers: tuple[int, ...]


def shared(name: str, thing: str, rng: random.Random) -> Story:
    boxes, each, given = rng.randint(2, 9), rng.randint(3, 12), rng.randint(1, 20)
    given = min(given, boxes * each - 1)
    had = boxes * each
    return Story(
        f"{name} has {boxes} boxes of {each} {thing} each and gives {given} {thing} away. How many {thing} are left?",
        (f"{boxes} * {each} = {had}", f"{had} - {given} = {had - given}"),
        had - given,
        (boxes, each, given),
    )


def saved(name: str, thing: str, rng: random.Random) -> Story:
    first, more, days = rng.randint(5, 60), rng.randint(2, 15), rng.randint(2, 9)
    grown = more * days
    return Story(
        f"{name} starts with {first} {thing} and finds {more} more every day. "
        f"How many {thing} are there after {days} days?",
        (f"{more} * {days} = {grown}", f"{first} + {grown} = {first + grown}"),
        first + grown,
        (first, more, days),
    )


def bought(name: str, thing: str, rng: random.Random) -> Story:
    count, price, extra = rng.randint(2, 9), rng.randint(2, 12), rng.randint(1, 15)
    cost = count * price + extra
    paid = -(-(cost + rng.randint(1, 20)) // 10) * 10
    return Story(
        f"{name} buys {count} {thing} for ${price} each and a bag for ${extra}, and pays with ${paid}. "
        "How much money comes back, in dollars?",
        (
            f"{count} * {price} = {count * price}",
            f"{count * price} + {extra} = {cost}",
            f"{paid} - {cost} = {paid - cost}",
        ),
        paid - cost,
        (count, price, extra, paid),
    )


def divided(name: str, thing: str, rng: random.Random) -> Story:
    friends, each, own = rng.randint(2, 9), rng.randint(2, 12), rng.randint(1, 20)
    parted = friends * each
    return Story(
        f"{name} has {parted + own} {thing}, keeps {own} and shares the rest equally among {friends} friends. "
        f"How many {thing} does each friend get?",
        (f"{parted + own} - {own} = {parted}", f"{parted} / {friends} = {each}"),
        each,
        (parted + own, own, friends),
    )


# the split depends on the names of these functions
STORIES: tuple[Callable[[str, str, random.Random], Story], ...] = (shared, saved, bought, divided)


STEP = re.compile(r"([0-9]+) ([-+*/]) ([0-9]+) = ([0-9]+)")


def careless_result(left: int, sign: str, right: int) -> int:
    if sign in "+-":
        return column_sum(left, int(f"{sign}{right}"))
    if sign == "/":
        return left // right
    factor, digits = min(left, right), str(max(left, right))
    return int(str(int(digits[0]) * factor) + "".join(str(int(digit) * factor % 10) for digit in digits[1:]))


def careless_answer(answer: str) -> str:
    """The steps of an answer without carries, and their last result."""
    steps, right_before, before = list[str](), -1, -1
    for left, sign, right, result in STEP.findall(answer):
        a, b = int(left), int(right)
        if a == right_before:
            a = before
        elif b == right_before:
            b = before
        right_before, before = int(result), careless_result(a, sign, b)
        steps.append(f"{a} {sign} {b} = {before}")
    return "\n".join((*steps, f"#### {before}"))


class WordProblems(GeneratedTask, Gsm8k):
    """Generated word problems with the prompts and graders of GSM8K. The reward is 1 for the right number."""

    name = "word_problems"
    summary = "Word problems of two or three steps, generated, in GSM8K's form"
    fixed = False
    about = About(
        source="generated from templates",
        separation="by the story and its numbers: one problem in five is for the test",
        protocols=tuple(PROTOCOLS),
    )

    def __init__(self, protocol: str = "unmask") -> None:
        super().__init__(protocol=protocol)
        self.behaviours = {"careless": lambda row: self.solution({**row, "answer": careless_answer(row["answer"])})}

    def draw(self, rng: random.Random, split: str) -> Row | None:
        kind = rng.choice(STORIES)
        story = kind(rng.choice(NAMES), rng.choice(THINGS), rng)
        if hashed_split(" ".join(map(str, (kind.__name__, *story.numbers)))) != split:
            return None
        return {"question": story.question, "answer": "\n".join((*story.steps, f"#### {story.answer}"))}
