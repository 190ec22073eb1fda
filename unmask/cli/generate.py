"""unmask generate"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unmask.cli.arguments import Overrides, RunOrModel, TaskOption
from unmask.cli.sample import decoding_settings, sample_traces

if TYPE_CHECKING:
    from unmask.core.trace import Trace
    from unmask.models import Model


def generate(
    run_or_model: RunOrModel,
    prompts: Annotated[
        Path,
        typer.Argument(metavar="FILE", help='JSONL, one object with a "prompt" per line, a text or a list of turns.'),
    ],
    overrides: Overrides = None,
    task: TaskOption = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write. Default: standard output.")] = None,
    traces: Annotated[bool, typer.Option("--traces", help="Add token ids, their steps and log-probabilities.")] = False,
    greedy: Annotated[bool, typer.Option(help="Take the likeliest token at every position.")] = False,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, max=2**32, help="Seed of the first line; line i has seed + i.")
    ] = 0,
) -> None:
    """Complete every prompt of a file; each line is returned with its "completion"."""
    from unmask.tasks.support.data import read_rows
    from unmask.util.files import check_output

    rows = read_rows(prompts, {"prompt": (str, list)}, _with_turns)
    check_output(out)
    decoding, policy, device, micro_batch = decoding_settings(run_or_model, overrides or [], greedy, task)
    numbers = [seed + i for i in range(len(rows))]
    batches = sample_traces(policy, [row["prompt"] for row in rows], decoding, numbers, device, micro_batch)
    entries = [entry for trace in batches for entry in _entries(policy, trace, decoding.length, traces)]
    lines = [
        json.dumps({**row, **entry, "seed": number}) for row, entry, number in zip(rows, entries, numbers, strict=True)
    ]
    if out is None:
        typer.echo("\n".join(lines))
    else:
        out.write_text("".join(line + "\n" for line in lines))
        typer.echo(f"{len(lines)} completion{'s' * (len(lines) > 1)} in {out}")


def _with_turns(row: dict[str, Any]) -> dict[str, Any]:
    from unmask.util.turns import checked_turns

    try:
        return row if isinstance(row["prompt"], str) else {**row, "prompt": checked_turns(row["prompt"])}
    except ValueError as error:
        raise ValueError(f"the prompt {error}") from None


def _entries(policy: "Model", trace: "Trace", length: int, whole: bool) -> Iterator[dict[str, Any]]:
    """The completion of every rollout; with `whole` also its tokens, steps and log-probabilities."""
    for i in range(len(trace)):
        ids, logp = trace.tokens_BL[i, -length:].tolist(), trace.logp_BL[i, -length:].tolist()
        entry: dict[str, Any] = {"completion": policy.tokenizer.decode(ids)}
        if whole:
            filled, step = trace.filled_BL[i, -length:].tolist(), trace.step_BL[i, -length:].tolist()
            steps = [s if f else None for s, f in zip(step, filled, strict=True)]
            entry["trace"] = {"tokens": ids, "step": steps, "logp": logp}
        yield entry
