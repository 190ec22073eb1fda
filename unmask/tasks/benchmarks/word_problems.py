"""Word problems in the manner of GSM8K, made from templates: two or three steps of arithmetic, told as a story.

Prompts, form and graders are GSM8K's (`gsm8k.py`), so a model that has learnt the form here can be asked there. The
split is by the story and its numbers: no test problem is a training problem with another name in it.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from unmask.tasks.benchmarks import gsm8k
from unmask.tasks.support.split import in_test, split_rng
from unmask.tasks.task import About, Row, Task

NAMES = ("Ada", "Ben", "Cleo", "Dana", "Emil", "Fatima", "Goran", "Hana", "Ivan", "Jun", "Kofi", "Lena", "Mara", "Nils")
THINGS = ("apples", "books", "cards", "coins", "eggs", "marbles", "pens", "plums", "shells", "stamps", "tickets")


class Told(NamedTuple):
    """A problem, its steps, and what makes it the problem it is."""

    question: str
    steps: tuple[str, ...]
    answer: int
    numbers: tuple[int, ...]


def shared(name: str, thing: str, rng: random.Random) -> Told:
    boxes, each, given = rng.randint(2, 9), rng.randint(3, 12), rng.randint(1, 20)
    given = min(given, boxes * each - 1)
    had = boxes * each
    return Told(
        f"{name} has {boxes} boxes of {each} {thing} each and gives {given} {thing} away. How many {thing} are left?",
        (f"{boxes} * {each} = {had}", f"{had} - {given} = {had - given}"),
        had - given,
        (boxes, each, given),
    )


def saved(name: str, thing: str, rng: random.Random) -> Told:
    first, more, days = rng.randint(5, 60), rng.randint(2, 15), rng.randint(2, 9)
    grown = more * days
    return Told(
        f"{name} starts with {first} {thing} and finds {more} more every day. "
        f"How many {thing} are there after {days} days?",
        (f"{more} * {days} = {grown}", f"{first} + {grown} = {first + grown}"),
        first + grown,
        (first, more, days),
    )


def bought(name: str, thing: str, rng: random.Random) -> Told:
    count, price, extra = rng.randint(2, 9), rng.randint(2, 12), rng.randint(1, 15)
    cost = count * price + extra
    paid = -(-(cost + rng.randint(1, 20)) // 10) * 10
    return Told(
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


def divided(name: str, thing: str, rng: random.Random) -> Told:
    friends, each, own = rng.randint(2, 9), rng.randint(2, 12), rng.randint(1, 20)
    parted = friends * each
    return Told(
        f"{name} has {parted + own} {thing}, keeps {own} and shares the rest equally among {friends} friends. "
        f"How many {thing} does each friend get?",
        (f"{parted + own} - {own} = {parted}", f"{parted} / {friends} = {each}"),
        each,
        (parted + own, own, friends),
    )


STORIES: tuple[Callable[[str, str, random.Random], Told], ...] = (shared, saved, bought, divided)


def drawn(rng: random.Random) -> tuple[str, Told]:
    """The story's name and a problem."""
    story = rng.choice(STORIES)
    return story.__name__, story(rng.choice(NAMES), rng.choice(THINGS), rng)


def key(story: str, numbers: tuple[int, ...]) -> str:
    return f"{story} {' '.join(map(str, numbers))}"


def rows(split: str, n: int, seed: int) -> list[Row]:
    rng, found = split_rng("word_problems", split, seed), list[Row]()
    while len(found) < n:
        story, told = drawn(rng)
        if in_test(key(story, told.numbers)) == (split == "test"):
            answer = "\n".join((*told.steps, f"#### {told.answer}"))
            name = f"word_problems-{split}-{seed}-{len(found)}"
            found.append({"id": name, "question": told.question, "answer": answer})
    return found


ABOUT = About(
    source="generated from templates",
    apart="by the story and its numbers: one problem in five is for the test",
    protocols=tuple(gsm8k.PROTOCOLS),
)


def task(protocol: str = "unmask") -> Task:
    """Generated word problems, asked and graded as GSM8K is. The reward is 1 for the right number."""
    found = gsm8k.task(protocol=protocol)
    summary = "Word problems of two or three steps, generated, in GSM8K's form"
    return replace(found, name="word_problems", summary=summary, rows=rows, about=ABOUT, fixed=False)
