"""The starts, tasks and lines of the study of a real language model: see language.py."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STARTS = Path(__file__).parent / "starts"
RATES = (3e-5, 6e-5, 1.2e-4)
LINES: dict[str, str] = {
    "diffu_grpo": "diffu_grpo",
    "diffu_grpo+daca": "diffu_grpo+daca",
    "diffu_grpo+dispo": "diffu_grpo+dispo",
    "agrpo": "agrpo",
    "raft, SML": "raft",
    "raft, uniform": "raft:states=uniform",
}
FORM_LINES: dict[str, str] = {"agrpo, KL": "agrpo:kl=0.01", "agrpo+keep_correct": "agrpo+keep_correct"}
"""Remedies for a lost form of the answer, beside agrpo's line of the first world."""
LOW, HIGH = 0.15, 0.45
"""A planted start: the bounds of greedy decoding."""


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
LONG = Ask("sudoku_text", "sudoku_text", CELLS, 256, 64, 256, 64, 8)


@dataclass(frozen=True)
class Adaptation:
    """A start: the configuration of `unmask adapt`, and what its checkpoints are asked."""

    file: str
    share: float
    """Of careless answers."""
    asks: tuple[Ask, ...]


ADAPTATIONS = {
    "two_40": Adaptation("smollm2_two.yaml", 0.4, (SUDOKU, COUNTDOWN, WORDS)),
    "careful": Adaptation("smollm2_two.yaml", 0.0, (SUDOKU, COUNTDOWN, WORDS)),
    "long": Adaptation("smollm2_long.yaml", 0.4, (LONG,)),
}
PARTS = {"planted": ("two_40",), "careful": ("careful",), "long": ("long",)}
"""The adaptations from whose checkpoints each start is chosen."""


@dataclass(frozen=True)
class World:
    """A task from a start."""

    start: str
    """A key of PARTS."""
    ask: Ask
    """The task and its decoding."""
    lines: dict[str, str] = field(default_factory=lambda: LINES)
    seeds: int = 5
    forwards: float = 6e4
    more: tuple[str, ...] = ()


FORM_REWARD = "sudoku_text.weights={correctness: 0.8, format: 0.2}"
BEST = {name: LINES[name] for name in ("raft, uniform", "agrpo")}
WORLDS = {
    "sudoku": World("planted", SUDOKU),
    "countdown": World("planted", COUNTDOWN, BEST | {"diffu_grpo": "diffu_grpo"}, 3),
    "unplanted": World("careful", SUDOKU, BEST | {"diffu_grpo": "diffu_grpo"}, 3),
    "lora": World("planted", SUDOKU, {"raft, uniform": LINES["raft, uniform"]}, 3, more=("full=false", "lora.rank=32")),
    "form": World("planted", SUDOKU, FORM_LINES, 3),
    "form reward": World("planted", SUDOKU, {"agrpo": LINES["agrpo"]}, 3, more=(FORM_REWARD,)),
    "long": World("long", LONG, BEST, 3, 1.2e5),
}
LORA_RATE = 3e-4
