"""The description of a task, as data and as text. Nothing is fetched: the prompt is shown for an example."""

from collections.abc import Callable
from functools import partial
from typing import Any

from unmask.cli.methods import option_lines
from unmask.config.options import option_defaults
from unmask.evaluation.benchmark import prompt_hash
from unmask.tasks import TASKS, Task, own
from unmask.tasks.support.split import SPLITS
from unmask.tasks.task import Row

Factory = Callable[..., Task]
SEEN = 256  # generated rows of a split that are examined


def task_factory(name: str) -> Factory:
    """A task of the list, or of a Python file."""
    return partial(own.task, file=name) if name.endswith(".py") else TASKS[name]


def example(task: Task) -> Row | str:
    """A row for the prompt, or the reason why there is none."""
    if task.about.example is not None:
        return task.about.example
    try:
        return task.rows("test", 1, 0)[0]
    except ValueError as error:
        return str(error)


def description(name: str, factory: Factory) -> dict[str, Any]:
    """A task with its default options, as `unmask tasks --json` prints it."""
    task = factory()
    about, row = task.about, example(task)
    shown = {"missing": row} if isinstance(row, str) else {"text": task.prompt(row), "hash": prompt_hash(task, row)}
    low, high = task.reward_range or (None, None)
    return {
        "name": name,
        "summary": task.summary,
        "length": task.length,
        "source": about.source,
        "splits": {"sizes": dict(about.sizes), "apart": about.separation, **_facts(task)},
        "prompt": {"system": task.system, "prefill": task.prefill, **shown},
        "reward": {"low": low, "high": high, "parts": dict(task.weights)},
        "protocols": {name: _protocol_hash(factory, name) for name in about.protocols},
        "options": option_defaults(factory),
        "needs": list(about.needs),
    }


def _facts(task: Task) -> dict[str, Any]:
    """Counts over the first generated rows of each split."""
    if not task.facts([]):
        return {}
    rows = {split: task.rows(split, SEEN, 0) for split in SPLITS}
    return {"facts": {split: {"rows": SEEN, **task.facts(split_rows)} for split, split_rows in rows.items()}}


def _facts_text(split: str, facts: dict[str, int]) -> str:
    counts = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in facts.items() if name != "rows")
    return f"of the first {facts['rows']} generated for {split}: {counts}"


def _protocol_hash(factory: Factory, protocol: str) -> str:
    task = factory(protocol=protocol)
    row = example(task)
    assert not isinstance(row, str), "a task with protocols has an example"
    return prompt_hash(task, row)


def page(task: dict[str, Any]) -> str:
    """A description as text."""
    reward, prompt, sizes = task["reward"], task["prompt"], task["splits"]["sizes"]
    span = "any number" if reward["low"] is None else f"{reward['low']:g} to {reward['high']:g}"
    parts = " + ".join(f"{weight:g} x {name}" for name, weight in reward["parts"].items())
    counts = ", ".join(f"{count} {split}" for split, count in sizes.items())
    lines = {
        "source": task["source"],
        "splits": "; ".join(text for text in (counts, task["splits"]["apart"]) if text),
        "rows": "; ".join(_facts_text(split, facts) for split, facts in task["splits"].get("facts", {}).items()),
        "length": f"{task['length']} tokens, usually",
        "reward": f"{span}: {parts}" if parts else span,
        "protocols": ", ".join(f"{name} (prompt {digest})" for name, digest in task["protocols"].items()),
        "needs": "; ".join(task["needs"]),
    }
    text = [f"{task['name']}: {task['summary']}", ""] + [f"{key:10} {value}" for key, value in lines.items() if value]
    section = "own" if task["name"].endswith(".py") else task["name"]
    text += ["", *option_lines(section)]
    if "missing" in prompt:
        return "\n".join([*text, "", f"no prompt to show: {prompt['missing']}"])
    turns = [f"system: {prompt['system']}"] if prompt["system"] else []
    turns += [prompt["text"]]
    turns += [f"(the answer begins with {prompt['prefill']})"] if prompt["prefill"] else []
    shown = "\n".join(f"    {line}" for line in "\n".join(turns).splitlines())
    return "\n".join([*text, "", f"prompt of an example, {prompt['hash']}:", "", shown])
