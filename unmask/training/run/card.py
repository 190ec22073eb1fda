"""The model card of a checkpoint: README.md, with the metadata that the Hugging Face hub reads."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from unmask.config.options import option_defaults
from unmask.models.checkpoint import CARD, card_metadata
from unmask.tasks import TASKS
from unmask.util.versions import versions

HERE = "path/to/this/folder"
"""The place of the checkpoint in the commands of a card; `unmask push` replaces it by the name on the hub."""

LABELS = {
    "solved_sampled": "solve rate, sampled",
    "solved_greedy": "solve rate, greedy",
    "loss": "held-out loss",
}

ADAPTER = "a low-rank adapter, in PEFT's format"
MERGED = "a low-rank adapter, merged into the weights"
BODY = """\
# {name}

A masked diffusion language model, trained with unmask on {tasks}.

| | |
|---|---|
| base model | {base} |
| trained weights | {weights} |
| method | {training.method} |
| task | {tasks} |
| data | {training.data} |
| seed | {seed} |
| updates | {step} |

## Scores

On held-out problems, with 95 % intervals.

| task | score | before | after {evaluated} updates |
|---|---|---|---|
{scores}

## Load

```python
import unmask

policy = unmask.load_model("{here}")
```
{evaluation}
## Reproduce

Save this configuration as `{file}` and run it:

```sh
{training.command}
```

<details><summary>{file}</summary>

```yaml
{config}
```

</details>

## Versions

{versions}

## Citation

```bibtex
@software{{unmask,
  title = {{unmask: RL post-training of masked diffusion language models}},
  author = {{{{the unmask developers}}}},
  version = {{{version}}},
}}
```
{papers}"""


@dataclass(frozen=True)
class Training:
    """What a checkpoint was trained with."""

    command: str
    """The command that repeats it. It ends with the name of the configuration's file."""
    method: str
    tasks: Sequence[str]
    """Names of tasks, or of files."""
    graded_by: str
    """`--task` and overrides of the command that evaluates the checkpoint; empty if no task can grade its answers."""
    data: str
    base: str
    """The model that was trained, as the user named it."""
    tags: Sequence[str] = ()
    papers: Sequence[str] = ()
    """arXiv ids."""


@dataclass(frozen=True)
class CardFacts:
    name: str
    """Of the run."""
    base_model: str
    """The id of the base model on the hub; empty if unknown."""
    license: str
    """Of the base model; empty if unknown."""
    adapter: bool
    training: Training
    config: str
    """The YAML of the run's configuration."""
    seed: int
    step: int
    """Updates of these weights."""
    before: Mapping[str, float]
    after: Mapping[str, float] | None
    """The last evaluation; None if there is none yet."""
    evaluated: int
    """The updates of that evaluation."""


@dataclass(frozen=True)
class ScoreRow:
    task: str
    name: str
    key: str


def score_rows(facts: CardFacts) -> Iterator[ScoreRow]:
    """The scores of a card, by the names of metrics: eval/solved_greedy, or eval/TASK/solved_greedy of fine-tuning."""
    for key in facts.before:
        *middle, score = key.removeprefix("eval/").split("/", 1)
        if score in LABELS:
            yield ScoreRow(middle[0] if middle else facts.training.tasks[0], LABELS[score], key)


def model_card(facts: CardFacts) -> str:
    """README.md: YAML metadata, then Markdown."""
    metadata = yaml.safe_dump(_metadata(facts), sort_keys=False, allow_unicode=True)
    return f"---\n{metadata}---\n\n{_body(facts)}"


def _metadata(facts: CardFacts) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    if facts.base_model:
        metadata["base_model"] = facts.base_model
        metadata["base_model_relation"] = "adapter" if facts.adapter else "finetune"
    metadata["library_name"] = "peft" if facts.adapter else "transformers"
    if facts.license:
        metadata["license"] = facts.license
    metadata["pipeline_tag"] = "text-generation"
    kind = ["lora"] if facts.adapter else []
    metadata["tags"] = list(dict.fromkeys(["unmask", "masked-diffusion", *kind, *facts.training.tags]))
    results: dict[str, Any] = {}
    for row in score_rows(facts):
        if facts.after is not None and f"{row.key}_low" in facts.after:
            about = {"task": {"type": "text-generation"}, "dataset": {"name": row.task, "type": row.task}}
            metric = {"type": "accuracy", "name": row.name, "value": round(100 * facts.after[row.key], 2)}
            results.setdefault(row.task, {**about, "metrics": []})["metrics"].append(metric)
    if results:
        metadata["model-index"] = [{"name": facts.name, "results": list(results.values())}]
    return metadata


def _body(facts: CardFacts) -> str:
    training, installed, scores = facts.training, versions(), list[str]()
    for row in score_rows(facts):
        after = "not evaluated yet" if facts.after is None else _value(facts.after, row.key)
        scores.append(f"| {row.task} | {row.name} | {_value(facts.before, row.key)} | {after} |")
    evaluation = f"\n```sh\nunmask eval {HERE} {training.graded_by}\n```\n" if training.graded_by else ""
    links = ", ".join(f"[arXiv:{paper}](https://arxiv.org/abs/{paper})" for paper in training.papers)
    return BODY.format(
        name=facts.name,
        tasks=", ".join(training.tasks),
        base=training.base + (f" (from {facts.base_model})" if facts.base_model not in ("", training.base) else ""),
        weights=ADAPTER if facts.adapter else "all weights",
        training=training,
        seed=facts.seed,
        step=facts.step,
        evaluated=facts.evaluated,
        scores="\n".join(scores),
        here=HERE,
        evaluation=evaluation,
        file=training.command.split()[-1],
        config=facts.config.rstrip(),
        versions=", ".join(f"{name} {value}" for name, value in installed.items()),
        version=installed["unmask"],
        papers=f"\nPapers: {links}.\n" if links else "",
    )


def _value(metrics: Mapping[str, float], key: str) -> str:
    if key not in metrics:
        return ""
    if f"{key}_low" not in metrics:
        return f"{metrics[key]:.4f}"
    value, low, high = (100 * metrics[name] for name in (key, f"{key}_low", f"{key}_high"))
    return f"{value:.1f} % [{low:.1f}, {high:.1f}]"


def task_arguments(task: str, options: Mapping[str, Any]) -> str:
    """A task and its options as arguments of `unmask eval`. Your own task is named by its file, without its folder."""
    name = Path(options["file"]).name if task == "own" else task
    defaults = option_defaults(TASKS[task])
    rest = {key: value for key, value in options.items() if value != defaults[key] and (task, key) != ("own", "file")}
    overrides = [f"{task}.{key}={json.dumps(value, ensure_ascii=False)}" for key, value in rest.items()]
    return shlex.join(["--task", name, *overrides])


def arxiv_ids(text: str | None) -> list[str]:
    return re.findall(r"\b\d{4}\.\d{5}\b", text or "")


def merged_card(adapter: Path) -> str | None:
    """The card of a checkpoint into which this adapter is merged; None if the adapter has no card."""
    metadata = card_metadata(adapter)
    if not metadata:
        return None
    body = (adapter / CARD).read_text().split("\n---\n", 1)[1]
    metadata["library_name"] = "transformers"
    if "base_model_relation" in metadata:
        metadata["base_model_relation"] = "finetune"
    metadata["tags"] = [tag for tag in metadata.get("tags", []) if tag != "lora"]
    body = body.replace(ADAPTER, MERGED)
    return f"---\n{yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)}---\n{body}"
