"""The starts, tasks and lines of the study of a real language model: see language.py."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

STARTS = Path(__file__).parent / "starts"
RATES = (3e-5, 6e-5, 1.2e-4)
LINES: dict[str, str] = {
    "diffu_grpo": "diffu_grpo",
    "diffu_grpo+daca": "diffu_grpo+daca",
    "diffu_grpo+dispo": "diffu_grpo+dispo",
    "agrpo": "agrpo",
    "raft, SML": "raft:states=sml",
    "raft, uniform": "raft:states=uniform",
    "diffu_grpo+daca, anchor": "diffu_grpo+daca:anchor=0.5",
}
"""The last line runs only with --lines: DACA with an anchor, a possible remedy."""
LOW, HIGH = 0.15, 0.45
"""The greedy solve rate of a planted start is to be between these."""


@dataclass(frozen=True)
class Ask:
    """One evaluation of a model. It is pickled."""

    name: str
    task: str
    options: dict[str, Any]
    length: int
    steps: int
    block: int
    problems: int
    samples: int
    cache: str = "none"
    fp8: bool = False
    threshold: float | None = None
    temperature: float = 1.0
    template: str = ""
    """Other words around the prompt."""
    values: int = 0
    """Completions of each state, in each half; 0: no values."""


SHORT = {"protocol": "short"}
CELLS = {"protocol": "short", "reasoning": "cells", "holes": [7, 9]}
SUDOKU = Ask("sudoku_text", "sudoku_text", SHORT, 80, 20, 80, 64, 8)
"""One block: in blocks of 16 the careful adaptation solved 22 % of the Sudokus instead of 55."""
COUNTDOWN = Ask("countdown_text", "countdown_text", SHORT, 48, 24, 48, 64, 8)
WORDS = Ask("word_problems", "word_problems", {}, 64, 32, 64, 64, 8)
LONG = Ask("sudoku_text", "sudoku_text", CELLS, 256, 64, 256, 64, 4)


@dataclass(frozen=True)
class Adaptation:
    """A start: the configuration of `unmask adapt`, and what its checkpoints are asked."""

    file: str
    share: float
    """Of careless answers."""
    asks: tuple[Ask, ...]


ADAPTATIONS = {
    "planted": Adaptation("smollm2_two.yaml", 0.4, (SUDOKU, COUNTDOWN, WORDS)),
    "careful": Adaptation("smollm2_two.yaml", 0.0, (SUDOKU, COUNTDOWN, WORDS)),
    "long": Adaptation("smollm2_long.yaml", 0.2, (LONG,)),
}


@dataclass(frozen=True)
class World:
    """A task from a start."""

    start: str
    """A key of ADAPTATIONS."""
    ask: Ask
    """The task and its decoding."""
    lines: tuple[str, ...] = tuple(LINES)[:-1]
    seeds: int = 5
    forwards: float = 6e4
    more: tuple[str, ...] = ()


BEST = ("raft, uniform", "agrpo")
WORLDS = {
    "sudoku": World("planted", SUDOKU),
    "countdown": World("planted", COUNTDOWN, (*BEST, "diffu_grpo"), 3),
    "unplanted": World("careful", SUDOKU, (*BEST, "diffu_grpo"), 3),
    "lora": World("planted", SUDOKU, ("raft, uniform",), 3, more=("full=false", "lora.rank=32")),
    "long": World("long", LONG, BEST, 3, 1.2e5),
}
LORA_RATE = 3e-4
