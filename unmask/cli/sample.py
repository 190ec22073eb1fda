"""unmask sample; and what it shares with unmask generate"""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unmask.cli.arguments import Overrides, RunOrModel, TaskOption, load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from unmask.models import Model
    from unmask.rollout.decoding import Decoding
    from unmask.util.micro_batch import MicroBatch
    from unmask.util.turns import Turns


def sample(
    run_or_model: RunOrModel,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt as the model reads it, e.g. one of the task.")
    ] = None,
    overrides: Overrides = None,
    task: TaskOption = None,
    steps: Annotated[bool, typer.Option("--steps", help="Show the denoising; outside a terminal as lines.")] = False,
    speed: Annotated[float, typer.Option(metavar="N", min=0.1, max=1000, help="Steps a second, of --steps.")] = 8,
    greedy: Annotated[bool, typer.Option(help="Take the likeliest token at every position.")] = False,
    seed: Annotated[int, typer.Option(metavar="N", min=0, max=2**32, help="Seed of the noise.")] = 0,
) -> None:
    """Complete one prompt."""
    if prompt is None:
        raise ValueError(
            "PROMPT is missing: write it after the model, as in unmask sample tiny 12+30= --task arithmetic; "
            "unmask tasks NAME shows a prompt of a task"
        )
    decoding, policy, device, micro_batch = decoding_settings(run_or_model, overrides or [], greedy, task)
    from unmask.cli.display import canvases, live, play
    from unmask.cli.panel import clean, completion_of

    (trace,) = sample_traces(policy, [prompt], decoding, [seed], device, micro_batch)
    completion = completion_of(policy.tokenizer, trace, decoding.length)
    if steps and live():
        play(completion, speed)
    elif steps:
        for line in canvases(completion):
            typer.echo(line)
    text = policy.tokenizer.decode(trace.tokens_BL[0, -decoding.length :].tolist())
    print(clean(text, keep="\n\t") if sys.stdout.isatty() else text)  # a file or a pipe gets it unchanged


def decoding_settings(
    run_or_model: str, overrides: list[str], greedy: bool, task: str | None
) -> "tuple[Decoding, Model, str, MicroBatch]":
    config, policy = load(run_or_model, overrides, task)

    from unmask.config.defaults import device_of
    from unmask.training.setup import decoding_of, micro_batches

    decoding = decoding_of(config, config.build_task())
    batch, _ = micro_batches(config, policy)
    return (decoding.greedy() if greedy else decoding), policy, device_of(config), batch


def sample_traces(
    policy: "Model",
    prompts: "Sequence[str | Turns]",
    decoding: "Decoding",
    seeds: list[int],
    device: str,
    micro_batch: "MicroBatch",
) -> Any:
    import torch

    from unmask.rollout.sample import sample_in_turn

    ids = [policy.tokenizer.prompt(prompt) for prompt in prompts]
    return sample_in_turn(policy, ids, torch.tensor(seeds, device=device), decoding, micro_batch)
