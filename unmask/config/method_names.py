"""Methods in one word: base, options and plug-ins, e.g. `agrpo:draws=2` or `diffu_grpo+sml:strata=8:anchor=0`.

A piece is a name and its options, `name:key=value:key=value`; pieces are joined by +, the base first. A plug-in alone
stands on diffu_grpo. A function in a file is `FILE.py:NAME:key=value`, and is called by its name.
"""

from collections.abc import Iterable
from typing import NamedTuple

from unmask.methods import BASES, PLUGINS
from unmask.methods.own import is_own, label_of, piece_of, section_of, takes_base

BASE = "diffu_grpo"


class Candidate(NamedTuple):
    name: str
    method: str
    plugins: list[str]
    overrides: list[str]
    """Its options as `section.key=value`."""

    @property
    def uses(self) -> set[str]:
        return {section_of(word) for word in (self.method, *self.plugins)}


def candidate(text: str) -> Candidate:
    """Read one word; ValueError says what is wrong with it. Options are checked where the method is built."""
    words, overrides = list[str](), list[str]()
    pieces = [piece.strip() for piece in text.split("+")]
    for word, options in map(piece_of, pieces):
        if word not in BASES and word not in PLUGINS and not is_own(word):
            raise ValueError(f"methods: there is no {word!r} in {text!r}; known: {', '.join([*BASES, *PLUGINS])}")
        for option in options:
            if "=" not in option:
                raise ValueError(f"methods: {option!r} in {text!r} is not of the form key=value")
            overrides.append(f"{section_of(word)}.{option}")
        words.append(word)
    base = BASE if words[0] in PLUGINS or takes_base(words[0]) else words.pop(0)
    if wrong := [word for word in words if word in BASES]:
        raise ValueError(f"methods: {text!r} has two bases; {wrong[0]} must come first or go")
    return Candidate("+".join(map(label_of, pieces)), base, words, overrides)


def candidates(text: str) -> list[Candidate]:
    """A list with commas."""
    found = [candidate(word) for word in text.split(",") if word.strip()]
    if not found:
        raise ValueError("methods: name at least one, e.g. diffu_grpo,agrpo:draws=2")
    if len({one.name for one in found}) < len(found):
        raise ValueError("methods: one is named twice")
    return found


def every_estimator(length: int, steps: int, choice: bool) -> list[Candidate]:
    """The bases as they are; AGRPO's ways to draw steps, and all of them; strata; DACA as it ships.

    `choice`: the choice of positions can be scored, so the exact trajectory is one more.
    """
    words = [name for name in BASES if name != "agrpo"]
    words += [f"sml:strata={k}:anchor=0" for k in (1, 2, 4, 8) if k <= length]
    words += ["daca"] if length >= 4 else []
    draws = [k for k in (1, 2, 4) if k < steps]
    words += [f"agrpo:draws={k}:spread=false" for k in draws]
    words += [f"agrpo:draws={k}" for k in draws if k > 1]
    words += [f"agrpo:draws={k}:steps=entropy" for k in draws if k > 1]
    words += [f"agrpo:draws={steps}"]
    words += [f"agrpo:draws={k}:choice=true" for k in (*draws[1:], steps) if choice]
    return [candidate(word) for word in words]


def split_overrides(overrides: Iterable[str], chosen: Iterable[Candidate]) -> tuple[list[str], list[str]]:
    """Overrides of the run, and those of methods; ValueError for options of a method that is not among the chosen."""
    used = set().union(*(one.uses for one in chosen))
    general, special = list[str](), list[str]()
    for override in overrides:
        section = override.partition("=")[0].partition(".")[0]
        if section in {*BASES, *PLUGINS} - used:
            raise ValueError(f"{section}: has options, but is not among the methods")
        (special if section in used else general).append(override)
    return general, special
