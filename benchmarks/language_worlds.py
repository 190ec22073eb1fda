"""The starts, tasks and lines of the study of a real language model: see language.py."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from language_study import Study

STARTS = Path(__file__).parent / "starts"
RATES = (3e-5, 6e-5, 1.2e-4)
TABLE: dict[str, str] = {
    "diffu_grpo": "diffu_grpo",
    "diffu_grpo+daca": "diffu_grpo+daca",
    "diffu_grpo+dispo": "diffu_grpo+dispo",
    "diffu_grpo+surprise": "diffu_grpo+surprise",
    "agrpo": "agrpo",
    "raft, uniform": "raft:states=uniform",
}
LINES = TABLE | {
    "raft, SML": "raft:states=sml",
    "diffu_grpo+daca, no anchor": "diffu_grpo+daca:anchor=0",
    "agrpo, KL": "agrpo:kl=0.01",
    "agrpo+keep_correct": "agrpo+keep_correct",
}
"""TABLE, and lines that run only with --lines: SML without a fully masked view, and remedies for agrpo."""
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
    order: str = "low_confidence"
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
LONG = Ask("sudoku_text", "sudoku_text", CELLS, 256, 128, 256, 64, 4)
"""Two positions a step, as in the papers. In 64 steps the start solved 9 % greedy, in 128 it solves 25."""


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
    lines: tuple[str, ...] = tuple(TABLE)
    seeds: int = 5
    forwards: float = 6e4
    more: tuple[str, ...] = ()


BEST = ("diffu_grpo+daca", "raft, uniform")
OTHERS = ("agrpo", "diffu_grpo")
SMALL_BATCHES = ("micro_batch_size=16", "rollout.micro_batch_size=32")
"""Completions of 256 positions need more memory."""
FORMAT_REWARD = "sudoku_text.weights={correctness: 0.8, format: 0.2}"
WORLDS = {
    "sudoku": World("planted", SUDOKU),
    "countdown": World("planted", COUNTDOWN, (*BEST, *OTHERS), 3),
    "unplanted": World("careful", SUDOKU, (*BEST, *OTHERS), 3),
    "surest": World("planted", SUDOKU, (*BEST, *OTHERS), 3, more=("rollout.order=surest_position",)),
    "random": World("planted", SUDOKU, (*BEST, *OTHERS), 3, more=("rollout.order=random",)),
    "threshold_0.9": World("planted", SUDOKU, (*BEST, "agrpo"), 3, more=("rollout.threshold=0.9",)),
    "threshold_0.6": World("planted", SUDOKU, (*BEST, "agrpo"), 3, more=("rollout.threshold=0.6",)),
    "lora": World("planted", SUDOKU, BEST, 3, more=("full=false", "lora.rank=32")),
    "long": World("long", LONG, BEST, 3, 2.4e5, more=SMALL_BATCHES),
    "long_form": World("long", LONG, BEST, 2, 2.4e5, more=(*SMALL_BATCHES, FORMAT_REWARD)),
    "long_blocks": World("long", replace(LONG, block=32), BEST, 2, 2.4e5, more=SMALL_BATCHES),
}
"""`surest` and `random` have another order (docs/studies/orders.md), `threshold_*` a threshold (thresholds.md). `after`
decodes all models in low_confidence, with the usual steps and with thresholds."""
LORA_RATE = 3e-4


def other_asks(study: "Study", name: str) -> list[Ask]:
    """Of a start: the other tasks; and the first in twice the steps, at higher temperatures and in other orders."""
    first, *others = map(study.sized, ADAPTATIONS[name].asks)
    twice = replace(first, name=f"{first.name}, twice the steps", steps=2 * first.steps)
    hot = [replace(first, name=f"{first.name}, temperature {value:g}", temperature=value) for value in (1.5, 2.0)]
    orders = [replace(first, name=f"{first.name}, {order}", order=order) for order in ("surest_position", "random")]
    return [*others, *([] if study.toy else [twice, *hot]), *orders]


def after_asks(study: "Study", world: World, ceiling: bool = False) -> list[Ask]:
    """Of a trained model; those of --asks, if given."""
    ask = study.sized(world.ask)
    ask = replace(ask, name="usual", samples=ask.samples if study.toy else 2, problems=2 if study.toy else 128)
    asks = [ask]
    if not study.toy:
        asks += [replace(ask, name="twice the steps", steps=2 * ask.steps)]
        asks += [replace(ask, name=f"1/{share} of the steps", steps=ask.steps // share) for share in (2, 4)]
    asks += [replace(ask, name=f"threshold {bound}", threshold=bound) for bound in (0.9, 0.6)]
    asks += [replace(ask, name="cache of the prompt", cache="dual"), replace(ask, name="fp8", fp8=True)]
    asks += [replace(ask, name=f"order: {order}", order=order) for order in ("surest_position", "random")]
    wordings = {
        "polite": "Please solve this for me. Thank you!\n\n{own_prompt}",
        "repeated": "{own_prompt}\n{own_prompt}",
    }
    asks += [replace(ask, name=f"wording: {name}", template=text) for name, text in wordings.items()]
    asks += [
        replace(ask, name="wording: long prompt", options={k: v for k, v in ask.options.items() if k != "protocol"})
    ]
    others = (each for each in (SUDOKU, COUNTDOWN, WORDS) if each.task != ask.task and world.start != "long")
    asks += [replace(study.sized(each), name=f"task: {each.task}", samples=ask.samples, problems=ask.problems)
             for each in others]  # fmt: skip
    if not ceiling:
        asks += [replace(ask, name="values", values=1 if study.toy else 4, problems=2 if study.toy else 32)]
    chosen = study.given.asks
    if unknown := set(chosen or ()) - {ask.name for ask in asks} - {"values"}:
        raise SystemExit(f"--asks: there is no {', '.join(sorted(unknown))}; known: {', '.join(a.name for a in asks)}")
    return [ask for ask in asks if not chosen or ask.name in chosen]
