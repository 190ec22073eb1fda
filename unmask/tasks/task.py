"""The base class of a task: its rows, the prompt of a row, and the reward of a completion."""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from unmask.models.tokenizer import prompt_all
from unmask.util.turns import Turns

if TYPE_CHECKING:  # imports torch, which a process that only calls rewards does not need
    from unmask.core.policy import Tokenizer

Row = dict[str, Any]
Weights = dict[str, Any] | None
"""The weights of a reward's parts in a configuration; a part without one has its default weight."""


class Grade(NamedTuple):
    """Points of a completion; the score of a set is the sum of points over the sum of `out_of`."""

    points: float
    out_of: float
    answer: str = ""
    """The text that was read as the answer."""


class Outcome(NamedTuple):
    reward: float
    solved: bool
    parts: dict[str, float]
    """The parts of the reward, without weights; empty if it has no parts."""
    behaviour: str = "other"
    """What `Task.behaviour` says of the completion."""


class RewardPart(NamedTuple):
    value: Callable[[Row, str], float]
    weight: float
    """The default weight."""
    low: float = 0.0
    high: float = 1.0


@dataclass(frozen=True)
class About:
    """A description of a task that does not read its rows."""

    source: str = "generated"
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Rows of each split, if the number is known; a generator has no end."""
    separation: str = "no problem of one split is in the other"
    """How the splits are separated."""
    example: Row | None = None
    """A row to show the prompt with if no data can be read; None: the first generated row."""
    protocols: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    """What else must be installed."""


@dataclass(frozen=True)
class ProtocolDecoding:
    """How a protocol decodes: greedily, the most confident tokens first, in blocks. The defaults are common to the
    papers."""

    steps: Callable[[int], int] = lambda length: max(1, length // 2)
    """The number of steps for a length."""
    block: int = 32
    batch: Callable[[int], int] | None = None
    """Problems in a batch at a length; None: as many as fit, because no answer depends on it."""
    attend_padding: bool = False
    """The model attends to the padding of shorter prompts, so an answer depends on its batch."""
    stops: bool = True
    """An answer ends at its end token. If false, all blocks are decoded and graded with their special tokens."""


FIELD_DECODING = ProtocolDecoding()


class Task:
    """A task defines five pure methods:

    rows(split, n, seed)      n rows of "train" or "test"; the same arguments give the same rows, a larger n only adds
                              rows at the end, and no test problem is a training problem
    prompt(row)               the text that the model is given
    solution(row)             one correct completion
    reward(row, completion)   within `reward_range`; never raises
    solved(row, completion)   whether the completion is any correct answer, not only the one in the row

    The options of a task are the keyword arguments of its constructor.
    """

    name: str
    summary: str
    length: int
    """Characters of the longest completion: the size of the canvas for a character tokenizer."""
    text: bool = False
    """In natural language, for models with a word tokenizer. `length` is then a usual size, not a minimum."""
    fixed: bool = False
    """Whether the test rows are a finite set, not generated on demand."""
    prefill: str = ""
    """The beginning of every answer; given to the model, not part of the completion."""
    system: str = ""
    """The system turn before the prompt."""
    board: bool = False
    """Whether an answer is a Sudoku with the givens of the row's `puzzle`: the viewer draws a board."""
    protocol: str = "unmask"
    """The name of prompt, grader and decoding together."""
    decoding: ProtocolDecoding = FIELD_DECODING
    about: About = About()
    reward_parts: Mapping[str, RewardPart] = {}
    weights: Mapping[str, float] = {}
    """The weight of each part of the reward; empty if it has no parts."""
    reward_range: tuple[float, float] | None = (0.0, 1.0)
    """The smallest and the largest reward; None: unknown."""
    other_scores: Mapping[str, Callable[[Row, str], Grade]] = {}
    """Other grades of the same completions by name, reported next to the protocol's."""
    behaviours: Mapping[str, Callable[[Row], str]] = {}
    """Typical wrong answers by name, each a function of the row alone. `unmask pretrain`, `sft` and `adapt` can teach
    them, and metrics count them."""
    runs_user_code: bool = False
    """Whether the reward is a user's program, called in a separate process with a time limit."""

    def rows(self, split: str, n: int, seed: int) -> list[Row]:
        raise NotImplementedError

    def prompt(self, row: Row) -> str:
        raise NotImplementedError

    def solution(self, row: Row) -> str:
        raise NotImplementedError

    def solved(self, row: Row, completion: str) -> bool:
        raise NotImplementedError

    def reward(self, row: Row, completion: str) -> float:
        """By default the weighted sum of `reward_parts`."""
        weights = {name: weight for name, weight in self.weights.items() if weight}
        return weighted_sum({name: self.reward_parts[name].value(row, completion) for name in weights}, weights)

    def parts(self, row: Row, completion: str) -> dict[str, float]:
        """The value of each part of the reward, without its weight."""
        return {name: part.value(row, completion) for name, part in self.reward_parts.items()}

    def outcome(self, row: Row, completion: str) -> Outcome:
        """ValueError if the reward or a part is not a finite number."""
        solved = bool(self.solved(row, completion))
        if not self.weights:
            return Outcome(finite("the reward", self.reward(row, completion)), solved, {})
        parts = {name: finite(name, value) for name, value in self.parts(row, completion).items()}
        return Outcome(weighted_sum(parts, self.weights), solved, parts)

    def outcome_in_process(self, row: Row, completion: str, seconds: float) -> Outcome:
        """`outcome`; a task that runs a user's code does it in a process that is killed after `seconds`."""
        return self.outcome(row, completion)

    @property
    def behaviour_names(self) -> tuple[str, ...]:
        """What `behaviour` can return; empty if the task names no behaviours."""
        return ("careful", *self.behaviours, "other") if self.behaviours else ()

    def behaviour(self, row: Row, completion: str, solved: bool) -> str:
        """What a completion shows: "careful" if it is solved, else the behaviour whose answer it is, else "other"."""
        names = (name for name, answer in self.behaviours.items() if completion == answer(row))
        return "careful" if solved else next(names, "other")

    def behaviour_solves(self, row: Row, answer: str) -> bool:
        """Whether the answer of a behaviour solves the row all the same."""
        return self.solved(row, answer)

    def grade(self, row: Row, completion: str) -> Grade:
        """The protocol's grade; by default one point if the completion is solved."""
        return Grade(float(self.solved(row, completion)), 1.0)

    def verdict(self, row: Row, completion: str) -> str | None:
        """The grader's explanation of a grade, in one line."""
        return None

    def prepare(self, rows: Sequence[Row], completions: Sequence[str]) -> None:
        """Compute the slow part of many rewards in parallel; by default there is none."""

    def facts(self, rows: Sequence[Row]) -> dict[str, int]:
        """Counts that describe a set of rows, reported next to its score."""
        return {}

    def stored_row(self, line: Row) -> Row:
        """The row of a line of stored generations: by default the line itself."""
        self.prompt(line)  # fails if a field is missing, which would make every answer wrong
        return dict(line)

    def turns(self, row: Row) -> str | Turns:
        """The prompt as the model gets it: the turns of a conversation, or the text of one user turn."""
        return self.prompt(row)

    def prompt_ids(self, tokenizer: "Tokenizer", row: Row) -> list[int]:
        """The tokens of the system turn, the prompt, and the beginning of the answer."""
        return self.all_prompt_ids(tokenizer, [row])[0]

    def all_prompt_ids(self, tokenizer: "Tokenizer", rows: Sequence[Row]) -> list[list[int]]:
        """`prompt_ids` of every row."""
        prompts = prompt_all(tokenizer, [(self.turns(row), self.system) for row in rows])
        prefill = tokenizer.encode(self.prefill) if self.prefill else []
        return [ids + prefill for ids in prompts]

    def set_reward_parts(self, parts: Mapping[str, RewardPart], weights: Weights = None, where: str = "") -> None:
        """Make the reward the weighted sum of these parts. An error begins with `where` or the task's name."""
        defaults = {name: part.weight for name, part in parts.items()}
        self.reward_parts, self.weights = parts, part_weights(where or self.name, weights or {}, defaults)
        ends = [sorted((self.weights[name] * part.low, self.weights[name] * part.high)) for name, part in parts.items()]
        low, high = (math.fsum(column) for column in zip(*ends, strict=True))
        self.reward_range = (low, high)

    def variant(self, **changes: Any) -> Self:
        """A copy with other attributes, or with functions as methods."""
        task = copy(self)
        vars(task).update(changes)
        return task


def behaviour_shares(metrics: Mapping[str, float]) -> dict[str, float]:
    """The shares of a batch's behaviours, by name."""
    prefix = "train/behaviour/"
    return {key.removeprefix(prefix): share for key, share in metrics.items() if key.startswith(prefix)}


def main_behaviours(measured: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """The shares of careful answers, of each wrong behaviour that has 10 % in one of the measurements, and of all other
    answers. Empty if no wrong behaviour has: then they say no more than the solve rate."""
    names = dict.fromkeys(name for shares in measured for name, share in shares.items() if share >= 0.1)
    wrong = [name for name in names if name not in ("careful", "other")]
    if not wrong:
        return [{} for _ in measured]
    chosen = [{name: shares[name] for name in ("careful", *wrong)} if shares else {} for shares in measured]
    return [{**shares, "other": 1 - sum(shares.values())} if shares else {} for shares in chosen]


def part_weights(where: str, weights: Mapping[str, Any], defaults: Mapping[str, float]) -> dict[str, float]:
    """The weights of all parts: those given, else the defaults."""
    known = f"the parts of the reward are {', '.join(defaults)}"
    for name, weight in weights.items():
        if name not in defaults:
            raise ValueError(f"{where}: unknown weight {name!r}; {known}")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ValueError(f"{where}: the weight of {name} must be a number, not {weight!r}; {known}")
    result = {name: float(weights.get(name, default)) for name, default in defaults.items()}
    if not any(result.values()):
        raise ValueError(f"{where}: every weight is 0, so every reward is 0; {known}")
    return result


def weighted_sum(parts: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Exact up to one rounding: weights of 0.7, 0.2 and 0.1 give 1, not the number before it."""
    return math.fsum(weight * parts[name] for name, weight in weights.items())


def finite(name: str, value: Any) -> float:
    """A number of any library as a float; ValueError for anything else, also for a string of digits."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} returned {value!r}, not a finite number")
    return number


def valid_partial(task: str, partial: float) -> float:
    """The option `partial` of a task, which is below the reward of a solution."""
    if not 0.0 <= partial < 1.0:
        raise ValueError(f"{task}: partial must be at least 0 and below 1 (a solution earns 1), not {partial}.")
    return float(partial)
