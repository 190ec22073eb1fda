"""The sources of fine-tuning data: a JSONL file with prompts and completions, or a task. Imports no torch.

A line of a file is {"prompt": ..., "completion": ...}, with an optional "system"; or {"messages": [...]}: a
conversation whose last turn, the assistant's, is the completion. A task trains on its training split and is evaluated
on its test split, which share no row. A part of a file is held out.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from unmask.config.keys import with_current_keys
from unmask.sft.behaviours import Shares, mixture_rows
from unmask.tasks import TASKS, Row, Task
from unmask.tasks.support.data import read_rows
from unmask.util.strict_model import Strict
from unmask.util.turns import checked_turns

ENDINGS = (".jsonl", ".jsonl.gz", ".json")


class SftSource(Strict):
    task: str | None = None
    """A task by name. Give this or `file`."""
    file: str | None = None
    """A JSONL file."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the task."""
    behaviours: Shares | None = None
    """Share of the answers that each of these behaviours of the task gives; if not given, the configuration's."""
    max_examples: int | None = Field(None, ge=1, lt=2**32)
    """Largest number of training examples; the configuration's `max_examples` if not given."""
    canvas: int | None = Field(None, ge=1, lt=2**17)
    """Positions of a completion, end tokens included; if not given, enough for the longest. Longer ones get more."""

    @model_validator(mode="after")
    def one_source(self) -> "SftSource":
        if (self.task is None) == (self.file is None):
            raise ValueError("give either a task or a file")
        if self.file is not None and self.options:
            raise ValueError("a file has no options; only a task has")
        if self.file is not None and self.behaviours:
            raise ValueError("a file has no behaviours; only a task has")
        return self

    @property
    def name(self) -> str:
        return self.task or Path(str(self.file)).name.partition(".")[0]

    def shares(self, default: Mapping[str, float]) -> Mapping[str, float]:
        """The shares of its behaviours; `default` is the configuration's."""
        return default if self.behaviours is None and self.task is not None else self.behaviours or {}


def _source_keys(value: Any) -> Any:
    """A string is a file if it has the ending of one, else a task."""
    if isinstance(value, str):
        return {"file" if value.endswith(ENDINGS) else "task": value}
    return with_current_keys(value, {"rows": "max_examples"}) if isinstance(value, dict) else value


def _source_list(value: Any) -> Any:
    return [_source_keys(each) for each in ([value] if isinstance(value, str | dict) else value)]


Sources = Annotated[tuple[SftSource, ...], BeforeValidator(_source_list), Field(min_length=1)]


def check_sources(sources: Sequence[SftSource], behaviours: Mapping[str, float]) -> None:
    """ValueError for mistakes that can be found before a model is loaded."""
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        raise ValueError(f"data: {next(name for name in names if names.count(name) > 1)} is given twice")
    if behaviours and not any(source.task for source in sources):
        raise ValueError("behaviours: only tasks have behaviours, and data names no task; leave it out")
    for source in sources:
        if source.file is not None:
            read_rows(source.file, {}, sft_row)
        else:
            task = task_of(source)
            mixture_rows(task, source.shares(behaviours), 1, 0)
            task.rows("test", 1, 0)


def task_of(source: SftSource) -> Task:
    if source.task not in TASKS:
        raise ValueError(f"data: there is no task and no file {source.task!r}; unmask tasks lists the tasks")
    try:
        return TASKS[source.task](**source.options)
    except TypeError as error:
        raise ValueError(f"data: {source.task}: {error}") from None


def sft_row(row: Row) -> Row:
    """Prompt, system and completion of a line in either form."""
    if "messages" in row:
        row = _from_messages(row["messages"])
    prompt, completion, system = row.get("prompt"), row.get("completion"), row.get("system", "")
    for field, kinds, value in (("prompt", str | list, prompt), ("completion", str, completion)):
        if not isinstance(value, kinds):
            raise ValueError(f'{field!r} is missing or not text; a line has "prompt" and "completion", or "messages"')
    if not isinstance(system, str):
        raise ValueError("'system' is not text")
    try:
        prompt = prompt if isinstance(prompt, str) else checked_turns(prompt)
    except ValueError as error:
        raise ValueError(f"the prompt {error}") from None
    return {"prompt": prompt, "completion": completion, "system": system}


def _from_messages(messages: Any) -> Row:
    match messages:
        case [_, *_, {"role": "assistant", "content": completion}]:
            return {"prompt": messages[:-1], "completion": completion}
    raise ValueError("'messages' must be a list of turns of which the last is the assistant's")
