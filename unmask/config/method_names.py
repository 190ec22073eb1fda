"""Methods by name: base, plug-ins and their options in one text, e.g. `agrpo:draws=2` or `diffu_grpo+sml:strata=8`.

A piece is a name and its options, `name:key=value:key=value`; pieces are joined by +, the base first. A function in a
file is `FILE.py:NAME:key=value`, and its label is its name.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from unmask.config.options import CHOICES, option_defaults
from unmask.core.words import is_own, label_of, piece_of, section_of
from unmask.methods import BASES, PLUGINS
from unmask.methods.own import own_method, takes_base
from unmask.util.parsing import suggestion

BASE = "diffu_grpo"
"""The base of plug-ins that are named without one."""


@dataclass(frozen=True)
class MethodSpec:
    """A base method and its plug-ins, each with the options it is given."""

    base: str
    plugins: tuple[str, ...] = ()
    names_base: bool = True
    """False: the label has the plug-ins only."""

    @property
    def pieces(self) -> tuple[str, ...]:
        return (self.base, *self.plugins)

    @property
    def label(self) -> str:
        return "+".join(map(label_of, self.pieces if self.names_base else self.plugins))

    @property
    def words(self) -> list[str]:
        """The names as a configuration has them: `agrpo`, `FILE.py:NAME`."""
        return [piece_of(piece)[0] for piece in self.pieces]

    @property
    def sections(self) -> list[str]:
        """The names of the sections of their options."""
        return [section_of(word) for word in self.words]

    def overrides(self, options_only: bool = False) -> Iterator[str]:
        """The options as overrides: `section.key=value` for options of the function, `key=value` for others. With
        `options_only` all are taken for options of the function."""
        for number, piece in enumerate(self.pieces):
            word, changes = piece_of(piece)
            factory = own_method("with" if number else "method", word, CHOICES) or {**BASES, **PLUGINS}.get(word)
            options = {} if factory is None else option_defaults(factory)
            for change in changes:
                own = options_only or change.partition("=")[0] in options
                yield f"{section_of(word)}.{change}" if own else change


def method_spec(text: str) -> MethodSpec:
    """Parse one method; a plug-in alone gets the base BASE. Options are checked when the method is built."""
    pieces = tuple(piece.strip() for piece in text.split("+"))
    words = [piece_of(piece)[0] for piece in pieces]
    for word in words:
        if word not in BASES and word not in PLUGINS and not is_own(word):
            place = f" in {text!r}" if word != text else ""
            raise ValueError(f"methods: there is no {word!r}{place}; {suggestion(word, [*BASES, *PLUGINS])}")
    alone = words[0] in PLUGINS or takes_base(words[0])
    spec = MethodSpec(BASE, pieces, names_base=False) if alone else MethodSpec(pieces[0], pieces[1:])
    if wrong := [word for word in spec.words[1:] if word in BASES]:
        raise ValueError(f"methods: {text!r} has two bases; {wrong[0]} must come first or be removed")
    if wrong := [change for change in spec.overrides(options_only=True) if "=" not in change]:
        raise ValueError(f"methods: {wrong[0]!r} in {text!r} is not of the form key=value")
    return spec


def method_specs(text: str) -> list[MethodSpec]:
    """Parse a list with commas."""
    specs = [method_spec(word) for word in text.split(",") if word.strip()]
    if not specs:
        raise ValueError("methods: name at least one, e.g. diffu_grpo,agrpo:draws=2")
    if len({spec.label for spec in specs}) < len(specs):
        raise ValueError("methods: one is named twice")
    return specs


def every_estimator(length: int, steps: int, choice: bool) -> list[MethodSpec]:
    """The bases with their defaults; AGRPO's ways to draw steps, and all steps; strata; DACA with its defaults. vine's
    estimator is AGRPO's; fork needs rollouts of its own.

    `choice`: the choice of positions can be scored, so the exact trajectory is one more.
    """
    words = [name for name in BASES if name not in ("agrpo", "vine", "fork")]
    words += [f"sml:strata={k}:anchor=0" for k in (1, 2, 4, 8) if k <= length]
    words += ["daca"] if length >= 4 else []
    draws = [k for k in (1, 2, 4) if k < steps]
    words += [f"agrpo:draws={k}:spread=false" for k in draws]
    words += [f"agrpo:draws={k}" for k in draws if k > 1]
    words += [f"agrpo:draws={k}:steps=entropy" for k in draws if k > 1]
    words += [f"agrpo:draws={steps}"]
    words += [f"agrpo:draws={k}:choice=true" for k in (*draws[1:], steps) if choice]
    return [method_spec(word) for word in words]


def split_overrides(overrides: Iterable[str], specs: Iterable[MethodSpec]) -> tuple[list[str], list[str]]:
    """Overrides of the run and of the methods; ValueError for options of a method that is not among the specs."""
    used = {section for spec in specs for section in spec.sections}
    general, special = list[str](), list[str]()
    for override in overrides:
        section = override.partition("=")[0].partition(".")[0]
        if section in {*BASES, *PLUGINS} - used:
            raise ValueError(f"{section}: has options, but is not among the methods")
        (special if section in used else general).append(override)
    return general, special
