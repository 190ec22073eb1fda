"""The training loop: one line a stage, no method names in it.

    prompts -> sample -> Trace -> (branch) -> reward -> advantage -> credit
            -> probes -> ask the old and the reference policy once
            -> for each inner update: ask the current policy -> objective -> backward -> step -> records
"""

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.batch import batch_metrics, collect, samples_of
from unmask.config import Config, rollout_shape
from unmask.evaluate import Decoding, Evaluation, evaluate
from unmask.law import Law
from unmask.models import Tiny, load_model
from unmask.parts import parts_of
from unmask.rollout import ORDERS, canvas
from unmask.run import Run
from unmask.tasks import Task
from unmask.update import update

EVAL_SEED = -1
"""Every evaluation draws the same noise, and no training batch has it: theirs have seeds from 0."""

Report = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True)
class Result:
    before: Evaluation
    after: Evaluation
    run: Run
    seconds: float


def train(config: Config, run_folder: Callable[[], Run], report: Report = lambda step, metrics: None) -> Result:
    """Train as configured. The folder is made once the model has been loaded, checked and evaluated."""
    if config.rollout.temperature == 0:
        raise ValueError("rollout.temperature: 0 is greedy, and every method here learns from samples; raise it")
    task, method = config.build_task(), config.build_method()
    decoding = decoding_of(config, task)
    policy = load_model(config.model, device=config.device)
    reference = copy.deepcopy(policy).requires_grad_(False) if method.needs_reference else None
    optimizer, schedule = optimizer_of(policy, config)
    rng = torch.Generator().manual_seed(config.seed)
    held_out = task.rows("test", config.eval.prompts, 0)
    canvas([policy.tokenizer.encode(task.prompt(row)) for row in held_out], decoding.length, policy, "cpu")
    start = time.perf_counter()
    report(0, {})

    def measure() -> Evaluation:
        return evaluate(policy, task, held_out, decoding, config.eval.samples, EVAL_SEED, config.device)

    def record(step: int, metrics: dict[str, float]) -> None:
        run.log(step, metrics)
        report(step, metrics)

    before = measure()
    run = run_folder()
    record(0, before.metrics())
    for step in range(1, config.updates + 1):
        clock = time.perf_counter()
        batch = collect(policy, task, method, config, decoding, step)
        rolled = time.perf_counter()
        earned = batch.rollouts, batch.reward_B, batch.branch_reward_B
        turns = parts_of(method, policy, reference, *earned, rng, config.inner, config.rows)
        metrics = [update(policy, optimizer, parts, config.rows, config.optimizer.max_norm) for parts in turns]
        lr = float(schedule.get_last_lr()[0])
        schedule.step()
        times = {"time/rollout": rolled - clock, "time/update": time.perf_counter() - rolled}
        record(step, {**batch_metrics(batch), **averaged(metrics), "train/lr": lr, **times})
        run.log_samples(step, samples_of(batch, config.group))
        if config.eval.every and step % config.eval.every == 0 and step < config.updates:
            record(step, measure().metrics())
        if config.save_every and step % config.save_every == 0:
            run.save(policy)
    after = measure()
    record(config.updates, after.metrics())
    run.save(policy)
    run.draw()
    return Result(before, after, run, time.perf_counter() - start)


def decoding_of(config: Config, task: Task) -> Decoding:
    rollout = config.rollout
    law = Law(rollout.temperature, rollout.top_k, rollout.top_p)
    return Decoding(*rollout_shape(config, task), law, ORDERS[rollout.order])


def optimizer_of(
    policy: Tiny, config: Config
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW and its schedule: warm-up, then constant, cosine or linear to zero."""
    settings = config.optimizer
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay
    )
    decay = {
        "constant": lambda done: 1.0,
        "linear": lambda done: 1.0 - done,
        "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    }[settings.schedule]

    def factor(step: int) -> float:
        if step < settings.warmup:
            return (step + 1) / settings.warmup
        return decay((step - settings.warmup) / max(1, config.updates - settings.warmup))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def averaged(metrics: list[dict[str, Tensor]]) -> dict[str, float]:
    """The mean of each metric over the inner updates."""
    names = dict.fromkeys(name for found in metrics for name in found)
    means = {name: [float(found[name]) for found in metrics if name in found] for name in names}
    return {f"train/{name}": sum(values) / len(values) for name, values in means.items()}
