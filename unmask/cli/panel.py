"""The live panel of `unmask train`, and canvases whose tokens have the colour of the step that filled them.

Completions go through `clean` and `Text`: nothing in them is read as markup or reaches the terminal as a control
character.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from rich.color import Color
from rich.console import Console, ConsoleOptions, RenderResult
from rich.panel import Panel as Frame
from rich.progress_bar import ProgressBar
from rich.style import Style
from rich.table import Table
from rich.text import Text

from unmask.models.tokenizer import SHOWN_LINE, SHOWN_MASK, UNKNOWN
from unmask.tasks.task import behaviour_shares, main_behaviours

if TYPE_CHECKING:
    from unmask.config import Config
    from unmask.core.policy import Tokenizer
    from unmask.core.trace import Trace
    from unmask.training.batch import Batch, Experiment

RECENT = 8
"""Updates whose median is the speed."""
CURVE = 48
"""Updates that a curve shows."""
LINES = 6
"""Of a sample, at most."""
STOPS = ((60, 130, 246), (190, 90, 200), (245, 120, 20))
"""The colours of the first steps, the middle ones and the last, distinct on dark and on light."""
BARS = "▁▂▃▄▅▆▇█"


def clean(text: str, keep: str = "") -> str:
    """The text without anything that moves a cursor, hides or reorders characters."""
    shown = (" " if c.isspace() else UNKNOWN for c in text)
    return "".join(c if c.isprintable() or c in keep else other for c, other in zip(text, shown, strict=True))


def step_style(step: int, steps: int) -> Style:
    """The colour of a token that `step` of `steps` filled."""
    place = step / max(1, steps - 1) * (len(STOPS) - 1)
    left = min(int(place), len(STOPS) - 2)
    mix = (round(a + (place - left) * (b - a)) for a, b in zip(STOPS[left], STOPS[left + 1], strict=True))
    return Style(color=Color.from_rgb(*mix))


class Completion(NamedTuple):
    """The text of each position, and the step that filled it; None if it is masked."""

    pieces: list[str]
    step: list[int | None]

    @property
    def steps(self) -> int:
        return 1 + max((step for step in self.step if step is not None), default=-1)


def completion_of(tokenizer: "Tokenizer", trace: "Trace", length: int, row: int = 0) -> Completion:
    ids, step = trace.tokens_BL[row, -length:].tolist(), trace.step_BL[row, -length:].tolist()
    filled = trace.filled_BL[row, -length:].tolist()
    pieces = [clean(tokenizer.show([token]).replace("\n", SHOWN_LINE)) for token in ids]
    return Completion(pieces, [s if f else None for s, f in zip(step, filled, strict=True)])


def canvas(completion: Completion, before: int | None = None) -> Text:
    """The completion before a step, or at the end; the newest tokens are bold."""
    text = Text(no_wrap=False, overflow="fold")
    for piece, step in zip(completion.pieces, completion.step, strict=True):
        if step is None or (before is not None and step >= before):
            text.append(SHOWN_MASK, Style(dim=True))
        else:
            newest = before is not None and step == before - 1
            text.append(piece, step_style(step, completion.steps) + Style(bold=newest, underline=newest))
    return text


def sparkline(values: Sequence[float], width: int) -> str:
    """The last values, one character each, scaled to their range; the lowest character for one that is not finite."""
    values = values[-width:] if width > 0 else []
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    places = ((value - low) / (high - low) if high > low else 0.0 for value in values)
    return "".join(BARS[round(place * (len(BARS) - 1)) if math.isfinite(place) else 0] for place in places)


def elapsed_and_left(elapsed: float, left: float | None) -> str:
    """The times of a run, e.g. `0:01:20, 0:03:00 left`."""
    spent, rest = (None if seconds is None else timedelta(seconds=round(seconds)) for seconds in (elapsed, left))
    return f"{spent}" if rest is None else f"{spent}, {rest} left"


@dataclass
class Panel:
    """What a run has reported so far, drawn at the current width of the terminal."""

    config: "Config"
    name: str
    clock: Callable[[], float] = time.monotonic
    step: int = 0
    curves: dict[str, list[float]] = field(default_factory=dict)
    evaluations: list[tuple[int, float, float]] = field(default_factory=list)
    """The update and the sampled and greedy solve rates of every evaluation."""
    warned: list[str] = field(default_factory=list)
    sample: tuple[str, Completion, float] | None = None
    """Prompt, completion and reward."""
    behaviours: dict[str, float] = field(default_factory=dict)
    """The share of the last update's completions that show each of the main behaviours."""
    largest: dict[str, float] = field(default_factory=dict)
    """The largest share that each behaviour of the task has had."""
    updates: list[float] = field(default_factory=list)
    """Seconds of the last updates, one by one."""
    evaluation: float = 0.0
    """Seconds of the last one."""
    rollout: float = 0.0
    """Seconds of the last update's rollouts."""

    def __post_init__(self) -> None:
        self.started = self.last = self.clock()

    def times(self) -> str:
        return elapsed_and_left(self.clock() - self.started, self.left())

    def report(self, step: int, metrics: dict[str, float], warnings: Sequence[str] = ()) -> None:
        now, self.step = self.clock(), step
        if "eval/solved_sampled" in metrics:
            self.evaluation = now - self.last
            self.evaluations.append((step, metrics["eval/solved_sampled"], metrics["eval/solved_greedy"]))
        elif "train/reward" in metrics:
            self.updates = [*self.updates, now - self.last][-RECENT:]
            self.rollout = metrics.get("time/rollout", 0.0)
            shares = behaviour_shares(metrics)
            self.largest = {name: max(share, self.largest.get(name, 0.0)) for name, share in shares.items()}
            _, self.behaviours = main_behaviours([self.largest, shares])
            for key in metrics.keys() & {"train/reward", "train/solved"}:
                self.curves[key] = [*self.curves.get(key, []), metrics[key]][-CURVE:]
        self.warned += [f"{warning}, update {step}" for warning in warnings]
        self.last = now

    def on_batch(self, experiment: "Experiment", batch: "Batch") -> None:
        """Show the first completion of a batch; an empty batch changes nothing."""
        if len(batch.trace):
            completion = completion_of(experiment.setup.policy.tokenizer, batch.trace, experiment.decoding.length)
            prompt = clean(" ".join(experiment.task.prompt(batch.rows[0]).split()))
            self.sample = prompt, completion, float(batch.reward_B[0])

    def phase(self) -> str:
        if not self.evaluations and not self.updates:
            return "starting"
        if self.evaluating():
            return "evaluating"
        return "training" if self.step < self.config.updates else "finished"

    def evaluating(self) -> bool:
        """Whether an evaluation comes next."""
        every, last = self.config.eval.every, self.config.updates
        due = self.step in (0, last) or (every > 0 and self.step % every == 0)
        return due and (not self.evaluations or self.evaluations[-1][0] != self.step)

    def left(self) -> float | None:
        """Seconds to the end, at the speed of the last updates and evaluations; None before the first update."""
        if not self.updates:
            return None
        every, last = self.config.eval.every, self.config.updates
        updates = last - self.step
        between = (last - 1) // every - self.step // every if every and updates else 0
        evaluations = between + (updates > 0) + self.evaluating()
        spent = self.clock() - self.last
        return max(0.0, updates * median(self.updates) + evaluations * self.evaluation - spent)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width - 4  # inside the frame
        grid = Table.grid(padding=(0, 1))
        grid.add_column(style="dim", no_wrap=True, min_width=10)
        grid.add_column(ratio=1, overflow="fold")
        for label, value in self._rows(max(1, width - 11)):
            grid.add_row(label, value)
        yield Frame(grid, title=Text(self.name), title_align="left", border_style="dim")

    def _rows(self, width: int) -> "list[tuple[str, Text | Table]]":
        rows: list[tuple[str, Text | Table]] = [(self.phase(), self._progress())]
        for key, label, form in (("train/reward", "reward", "{:.3f}"), ("train/solved", "solved", "{:.0%}")):
            if key in self.curves:
                value = form.format(self.curves[key][-1])
                rows.append((label, Text(f"{value:7}{sparkline(self.curves[key], min(CURVE, width - 7))}")))
        if self.behaviours:
            rows.append(("answers", Text("  ".join(f"{name} {share:.0%}" for name, share in self.behaviours.items()))))
        if self.evaluations:
            (_, *first), (step, sampled, greedy) = self.evaluations[0], self.evaluations[-1]
            text = f"sampled {sampled:.1%}  greedy {greedy:.1%}"
            since = f"  (update {step}; {first[0]:.1%} and {first[1]:.1%} before)" if step else ""
            rows.append(("held-out", Text(text + since)))
        if self.updates:
            rows.append(("speed", Text(self._speed())))
        if self.warned:
            more = f" (and {len(self.warned) - 1} before)" if len(self.warned) > 1 else ""
            rows.append(("warning", Text(self.warned[-1] + more, Style(color="yellow"))))
        if self.sample is not None:
            prompt, completion, reward = self.sample
            rows += self._sample(prompt, completion, reward, width)
        return rows

    def _progress(self) -> Table:
        line = Table.grid(padding=(0, 1), expand=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True)
        left = self.left()
        remaining = f"{timedelta(seconds=round(left))} left" if left is not None and self.phase() != "finished" else ""
        done = Text(f"{self.step}/{self.config.updates} {remaining}".rstrip())
        line.add_row(ProgressBar(self.config.updates, self.step), done)
        return line

    def _speed(self) -> str:
        pace = median(self.updates)
        text = f"{60 / pace:.3g} updates/min" if pace else ""
        rollouts = self.config.prompts * self.config.group
        return f"{text}  {rollouts / self.rollout:.3g} completions/s sampled" if self.rollout else text

    def _sample(self, prompt: str, completion: Completion, reward: float, width: int) -> list[tuple[str, Text | Table]]:
        prompt_text = Text(prompt)
        prompt_text.truncate(width, overflow="ellipsis")
        text = canvas(completion)
        text.truncate(LINES * width, overflow="ellipsis")
        scale = Text.assemble(f"reward {reward:.3g}, filled first ")
        for step in range(min(8, completion.steps)):
            scale.append("█", step_style(step, min(8, completion.steps)))
        return [("prompt", prompt_text), ("sample", text), ("", scale.append(" last"))]
