"""What fine-tuning is taught: prompts and completions from a JSONL file, or a task's own rows with their solutions.

A line of a file is {"prompt": ..., "completion": ...}, with a "system" if there is one; or {"messages": [...]}, at
most a system's turn, then a user's, then an assistant's. Of a task the training split is taught and the test split is
measured on, which no training row is in; of a file a part is held out.
"""

import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from unmask.core.policy import Policy
from unmask.sft.packing import Example, rounded, width_of
from unmask.tasks import TASKS, Row, Task
from unmask.tasks.support.data import read_rows
from unmask.util.strict_model import Strict

ENDINGS = (".jsonl", ".jsonl.gz", ".json")


class SftSource(Strict):
    task: str | None = None
    """A task by name; or else"""
    file: str | None = None
    """a JSONL file."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Of the task."""
    rows: int | None = Field(None, ge=1, lt=2**32)
    """Examples at most; as many as the configuration says of all if not given."""
    canvas: int | None = Field(None, ge=1, lt=2**17)
    """Positions of a completion, end tokens included; of the longest completion if not given. Longer ones have more."""

    @model_validator(mode="after")
    def one_source(self) -> "SftSource":
        if (self.task is None) == (self.file is None):
            raise ValueError("name either a task or a file")
        if self.file is not None and self.options:
            raise ValueError("options are a task's")
        return self

    @property
    def name(self) -> str:
        return self.task or Path(str(self.file)).name.partition(".")[0]


def _spelled(value: Any) -> Any:
    """A name alone: of a file if it ends like one, else of a task."""
    return {"file" if value.endswith(ENDINGS) else "task": value} if isinstance(value, str) else value


def _listed(value: Any) -> Any:
    return [_spelled(each) for each in ([value] if isinstance(value, str | dict) else value)]


Lessons = Annotated[tuple[SftSource, ...], BeforeValidator(_listed), Field(min_length=1)]


@dataclass(frozen=True)
class SftData:
    """A lesson as examples of a policy's tokens."""

    name: str
    examples: list[Example]
    held_out: list[Example]
    canvas: int
    """Positions in which every completion can be written."""
    task: Task | None
    """None: of a file, whose answers nothing can judge."""


def checked_lessons(lessons: Sequence[SftSource]) -> None:
    """ValueError for what can be known to be wrong before a model is loaded."""
    names = [lesson.name for lesson in lessons]
    if len(set(names)) < len(names):
        raise ValueError(f"data: {next(name for name in names if names.count(name) > 1)} is there twice")
    for lesson in lessons:
        if lesson.file is not None:
            read_rows(lesson.file, {}, shaped)
        else:
            task = built(lesson)
            for split in ("train", "test"):
                task.rows(split, 1, 0)


def built(lesson: SftSource) -> Task:
    if lesson.task not in TASKS:
        raise ValueError(f"data: there is no task {lesson.task!r}, and no file of that name; unmask tasks lists them")
    try:
        return TASKS[lesson.task](**lesson.options)
    except TypeError as error:
        raise ValueError(f"data: {lesson.task}: {error}") from None


def load_sft_data(lesson: SftSource, policy: Policy, seed: int, rows: int, held_out: int) -> SftData:
    """The examples of a lesson; `held_out` of a file, at most a tenth of it, are not among those to learn from."""
    most = lesson.rows or rows
    task = built(lesson) if lesson.task is not None else None
    if task is not None:
        asked = task.rows("train", most, seed), task.rows("test", held_out, 0)
        learnt, kept = ([_of_task(policy, task, row) for row in rows] for rows in asked)
    else:
        learnt, kept = _of_file(policy, lesson, seed, most, held_out)
    if any(policy.mask_id in ids for pair in (*learnt, *kept) for ids in pair):
        raise ValueError(f"{lesson.name}: a text holds the MASK token, which nothing can be asked about; leave it out")
    room = policy.max_length
    fits, rest = ([p for p in pairs if width_of(Example(*p, 1), room) is not None] for pairs in (learnt, kept))
    if not fits:
        raise ValueError(f"{lesson.name}: no example fits into the {room} tokens that this model takes")
    if dropped := len(learnt) - len(fits):
        told = f"{dropped:,} of {len(learnt):,} examples are left out"
        warnings.warn(f"{lesson.name}: {told}, longer than the {room} tokens of this model", stacklevel=2)
    longest = 1 + max(len(completion) for _, completion in fits)
    canvas = lesson.canvas or rounded(longest)
    if canvas < longest:
        told = f"canvas: {canvas} positions are too few for completions of up to {longest}; {longest} are decoded"
        warnings.warn(f"{lesson.name}: {told}", stacklevel=2)
    examples, held = ([Example(*pair, canvas) for pair in pairs] for pairs in (fits, rest))
    return SftData(lesson.name, examples, held, max(canvas, longest), task)


Pair = tuple[list[int], list[int]]


def _of_task(policy: Policy, task: Task, row: Row) -> Pair:
    return task.prompt_ids(policy.tokenizer, row), policy.tokenizer.encode(task.solution(row))


def _of_file(policy: Policy, lesson: SftSource, seed: int, most: int, held_out: int) -> tuple[list[Pair], list[Pair]]:
    rows = read_rows(str(lesson.file), {}, shaped)
    rng = random.Random(f"unmask lesson {lesson.name} {seed}")
    rng.shuffle(rows)
    apart = min(held_out, len(rows) // 10)
    asked = rows[apart : apart + most], rows[:apart]
    encode, prompt = policy.tokenizer.encode, policy.tokenizer.prompt
    learnt, kept = (
        [(prompt(row["prompt"], row["system"]), encode(row["completion"])) for row in part] for part in asked
    )
    return learnt, kept


def shaped(row: Row) -> Row:
    """prompt, system and completion of a line, whichever way it says them."""
    if "messages" in row:
        row = _from_messages(row["messages"])
    for field in ("prompt", "completion"):
        if not isinstance(row.get(field), str):
            raise ValueError(f'there is no text {field!r}; a line has "prompt" and "completion", or "messages"')
    if not isinstance(row.get("system", ""), str):
        raise ValueError("'system' is not a text")
    return {"prompt": row["prompt"], "completion": row["completion"], "system": row.get("system", "")}


def _from_messages(messages: Any) -> Row:
    turns = messages if isinstance(messages, list) else []
    said = [(turn.get("role"), turn.get("content")) for turn in turns if isinstance(turn, dict)]
    match said if len(said) == len(turns) else []:
        case [("user", prompt), ("assistant", completion)]:
            return {"prompt": prompt, "completion": completion}
        case [("system", system), ("user", prompt), ("assistant", completion)]:
            return {"prompt": prompt, "completion": completion, "system": system}
    raise ValueError("'messages' must be a user's turn and an assistant's, after a system's if there is one")
