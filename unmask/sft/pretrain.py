"""Pre-training of the embedded model with the masked diffusion loss, on solutions of which some are wrong.

The wrong solutions leave room for reinforcement learning: the model knows the format of an answer and is often wrong.
Everything is drawn from the seed, so on one machine the same configuration gives the same weights, bit for bit.
"""

import json
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError
from torch import Tensor

from unmask.config.keys import with_current_keys
from unmask.core.policy import Policy
from unmask.models.tiny import CharacterTokenizer, Tiny, TinyShape, save, tiny_policy
from unmask.sft.behaviours import Share, Shares, answer_of, drawn_behaviour, mixture_rows
from unmask.tasks import TASKS, Row, Task
from unmask.util.parsing import parse_yaml

FIELD = re.compile(r"(\w+):([nsb])=(\w+)")  # of a request of json_mini
RENAMED = {"lessons": "mixture"}  # keys that had another name in 0.1
RECORD = "pretrain.json"  # the configuration, saved with the weights
REDRAWN = "redrawn.json"  # rows of each task that were redrawn because a wrong behaviour was right


class PretrainTask(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    task: str
    """The task (unmask tasks)."""
    options: dict[str, Any] = {}
    """Options of the task."""
    batch: PositiveInt
    """Rows of the task in every batch."""
    wrong: Share = 0.0
    """Share of the answers that are corrupted."""
    noise: Share = 0.0
    """Probability that a place of a corrupted answer is redrawn."""
    behaviours: Shares = {}
    """Share of the answers that each of these behaviours of the task gives."""


class PretrainConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    seed: int
    """Seed of the first weights, the rows and the masks."""
    threads: PositiveInt
    """Threads of torch. They change the result: sums over threads round differently."""
    steps: PositiveInt
    """Optimiser steps."""
    learning_rate: PositiveFloat
    """The largest learning rate of AdamW; a cosine lowers it to 0."""
    warmup: PositiveInt
    """Steps over which the learning rate rises from 0."""
    weight_decay: float = Field(ge=0)
    """Weight decay of AdamW."""
    shape: TinyShape
    """The size of the model."""
    mixture: list[PretrainTask] = Field(min_length=1)
    """The tasks that every batch mixes."""


def read_pretrain_config(path: str | Path) -> PretrainConfig:
    if not Path(path).is_file():
        raise ValueError(f"There is no file {path}; the embedded model has recipe:pretrain_tiny.")
    try:
        data = parse_yaml(Path(path).read_text(), str(path))
        return PretrainConfig.model_validate(with_current_keys(data, RENAMED) if isinstance(data, dict) else data)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text: {error}") from error
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, detail['loc'])) or 'the file'}: {detail['msg']}" for detail in error.errors()
        )
        raise ValueError(f"{path} cannot be used: {problems}.") from error


def redrawn(text: str, choices: Iterable[str], noise: float, rng: random.Random) -> str:
    """The text with each character redrawn from its choices with probability `noise`; without choices it stays."""
    return "".join(
        rng.choice(drawn) if drawn and rng.random() < noise else character
        for character, drawn in zip(text, choices, strict=True)
    )


def wrong_sudoku(row: Row, solution: str, noise: float, rng: random.Random) -> str:
    """Holes are refilled at random; the givens stay."""
    digits = "".join(sorted(set(solution)))
    return redrawn(solution, (digits if given == "." else "" for given in row["puzzle"]), noise, rng)


def wrong_countdown(row: Row, solution: str, noise: float, rng: random.Random) -> str:
    """Signs are redrawn; the numbers and parentheses stay."""
    return redrawn(solution, ("+-*/" if character in "+-*/" else "" for character in solution), noise, rng)


def wrong_arithmetic(row: Row, solution: str, noise: float, rng: random.Random) -> str:
    """Results are off by one or ten; later steps start from the wrong result.

    A result that is too long or below zero becomes the nearest valid one.
    """
    steps, total = [], row["terms"][0]
    for step, term in zip(solution.split(";"), row["terms"][1:], strict=True):
        terms, _, result = step.partition("=")
        width = len(result)
        off = rng.choice((-10, -1, 1, 10)) if rng.random() < noise else 0
        wrong = min(max(total + term + off, 0), 10**width - 1)
        steps.append(f"{total:>{width}}{terms[width:]}={wrong:>{width}}")
        total = wrong
    return ";".join(steps)


def wrong_json_mini(row: Row, solution: str, noise: float, rng: random.Random) -> str:
    """Values are copied from the request, with quotes if they need none and without if they need some."""
    fields = []
    for key, kind, value in FIELD.findall(row["request"]):
        if rng.random() < noise:
            fields.append(f'"{key}":{value}' if kind == "s" else f'"{key}":"{value}"')
        else:
            fields.append(f'"{key}":{json.dumps(row["reference"][key])}')
    return "{" + ",".join(fields) + "}"


def wrong_code_mini(row: Row, solution: str, noise: float, rng: random.Random) -> str:
    """Digits, + and - are redrawn; the form stays."""
    choices = {**dict.fromkeys("123456789", "123456789"), **dict.fromkeys("+-", "+-")}
    return redrawn(solution, (choices.get(character, "") for character in solution), noise, rng)


WRONG: dict[str, Callable[[Row, str, float, random.Random], str]] = {
    "sudoku": wrong_sudoku,
    "sudoku_large": wrong_sudoku,
    "countdown": wrong_countdown,
    "arithmetic": wrong_arithmetic,
    "json_mini": wrong_json_mini,
    "code_mini": wrong_code_mini,
}
"""The solution of a row made wrong, by task: each place changes with probability `noise`."""


def mixture_tokens(part: PretrainTask, task: Task, rows: list[Row], rng: random.Random) -> tuple[Tensor, Tensor]:
    """Prompts (B, P) and completions (B, C), some of them wrong, with EOS up to the task's length."""
    tokenizer = CharacterTokenizer()
    prompts, completions = [], []
    for row in rows:
        answer = answer_of(task, row, drawn_behaviour(part.behaviours, rng))
        corrupted = rng.random() < part.wrong
        completion = tokenizer.encode(WRONG[part.task](row, answer, part.noise, rng) if corrupted else answer)
        prompts.append(tokenizer.encode(task.prompt(row)))
        completions.append(completion + [Tiny.eos_id] * (task.length - len(completion)))
    return torch.tensor(prompts), torch.tensor(completions)


def masked_positions(rows: int, length: int, rng: torch.Generator) -> Tensor:
    """(B, C) bool: a random set of 1 to C positions in each row, all sizes equally likely, stratified."""
    stratum_B = (torch.arange(rows) + torch.rand((), generator=rng)) / rows
    count_B = 1 + (stratum_B * length).long().clamp(max=length - 1)
    rank_BC = torch.rand(rows, length, generator=rng).argsort(dim=1).argsort(dim=1)
    return rank_BC < count_B[:, None]


def diffusion_loss(policy: Policy, prompt_BP: Tensor, completion_BC: Tensor, masked_BC: Tensor) -> Tensor:
    """The negative evidence bound per token: cross-entropy averaged over a row's masked positions, then rows.

    With the number of masked positions uniform on 1..C this average is the 1/t weighting of the masked diffusion loss,
    where t is the masked share.
    """
    tokens_BL = torch.cat([prompt_BP, completion_BC.masked_fill(masked_BC, policy.mask_id)], dim=1)
    asked_BL = torch.cat([torch.zeros_like(prompt_BP, dtype=torch.bool), masked_BC], dim=1)
    at_Q = asked_BL.flatten().nonzero().squeeze(1)
    logits_QV = policy(tokens_BL, torch.ones_like(tokens_BL, dtype=torch.bool), at_Q)
    loss_Q = torch.nn.functional.cross_entropy(logits_QV, completion_BC[masked_BC], reduction="none")
    count_B1 = masked_BC.sum(dim=1, keepdim=True).to(loss_Q.dtype)
    weight_Q = count_B1.reciprocal().expand_as(masked_BC)[masked_BC]
    return (loss_Q * weight_Q).sum() / len(completion_BC)


def cosine(step: int, steps: int, warmup: int) -> float:
    """The fraction of the peak learning rate: linear warm-up, then half a cosine to zero."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def pretrain(
    config: PretrainConfig,
    out: str | Path,
    progress: Callable[[int, dict[str, float]], None] | None = None,
    device: str = "cpu",
) -> Tiny:
    """Train a model and write it, with the configuration, into the folder.

    progress(step, metrics) is called after every step; metrics has the loss of each task.
    """
    for part in config.mixture:
        if part.task not in WRONG:
            raise ValueError(f"mixture: {part.task!r} is not a task of pre-training; give {', '.join(WRONG)}")
    rng = random.Random(f"unmask pretrain {config.seed}")
    masking = torch.Generator().manual_seed(config.seed)
    policy = tiny_policy(config.shape, config.seed).to(device)

    redrawn_rows = dict[str, int]()
    data: list[tuple[str, tuple[Tensor, ...], tuple[Tensor, ...]]] = []
    for part in config.mixture:
        task = TASKS[part.task](**part.options)
        rows, redrawn_rows[part.task] = mixture_rows(task, part.behaviours, config.steps * part.batch, config.seed)
        prompt_NP, completion_NC = mixture_tokens(part, task, rows, rng)
        data.append((part.task, prompt_NP.split(part.batch), completion_NC.split(part.batch)))

    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(step, config.steps, config.warmup))
    with threads(config.threads):
        policy.train()
        for step in range(config.steps):
            metrics: dict[str, float] = {}
            for name, prompts, completions in data:
                rows_in_batch, length = completions[step].shape
                masked_BC = masked_positions(rows_in_batch, length, masking)
                prompt_BP, completion_BC = prompts[step].to(device), completions[step].to(device)
                loss = diffusion_loss(policy, prompt_BP, completion_BC, masked_BC.to(device))
                loss.backward()
                metrics[f"loss/{name}"] = loss.item()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if progress is not None:
                progress(step, metrics)
        policy.eval()

    save(policy, out)
    (Path(out) / RECORD).write_text(config.model_dump_json(indent=2) + "\n")
    (Path(out) / REDRAWN).write_text(json.dumps(redrawn_rows) + "\n")
    return policy
