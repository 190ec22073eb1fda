"""The training loop: one line a stage, no method names in it.

    prompts -> sample -> Trace -> (branch) -> reward -> advantage -> credit
            -> probes -> ask the old and the reference policy once
            -> for each inner update: ask the current policy -> objective -> backward -> step -> records
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unmask.batch import Batch, Source, batch_metrics, collect, samples_of
from unmask.config import Config
from unmask.evaluate import Evaluation, evaluate, prompt_ids
from unmask.masters import MasterAdamW
from unmask.mismatch import mismatch_metrics, random_share, replayed, truncated_weights
from unmask.models import Model
from unmask.models.lora import trainable
from unmask.parts import parts_of
from unmask.ranks import whole
from unmask.rollout import canvas
from unmask.run import Run
from unmask.setup import Setup, decoding_of, prepared
from unmask.update import update

EVAL_SEED = -1
"""Every evaluation draws the same noise, and no training batch has it: theirs have seeds from 0."""

Report = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True)
class Result:
    before: Evaluation
    after: Evaluation
    run: Run | None
    """None in a process that is not the first."""
    seconds: float


def train(config: Config, run_folder: Callable[[], Run], report: Report = lambda step, metrics: None) -> Result:
    """Train as configured. The folder is made once the model has been loaded, checked and evaluated.

    Under torchrun every process calls this; the first one writes the folder and reports.
    """
    if config.rollout.temperature == 0:
        raise ValueError("rollout.temperature: 0 is greedy, and every method here learns from samples; raise it")
    if config.rollout.guidance:
        raise ValueError("rollout.guidance: a guided rollout has no likelihood under the policy; train with 0")
    task, method = config.build_task(), config.build_method()
    decoding = decoding_of(config, task)
    with prepared(config, method.needs_reference) as setup:
        return _trained(config, setup, Source(setup, task, method, config, decoding), run_folder, report)


def _trained(config: Config, setup: Setup, source: Source, run_folder: Callable[[], Run], report: Report) -> Result:
    policy, ranks, task, decoding = setup.policy, setup.ranks, source.task, source.decoding
    optimizer, schedule = optimizer_of(policy, config)
    rng = torch.Generator().manual_seed(config.seed)
    held_out = task.rows("test", config.eval.prompts, 0)
    canvas([prompt_ids(policy, task, row) for row in held_out], decoding.length, policy, "cpu")
    start = time.perf_counter()
    if ranks.first:
        report(0, {})

    def measure() -> Evaluation:
        with whole(policy, ranks):
            rows = setup.rollout_rows
            return evaluate(
                policy, task, held_out, decoding, config.eval.samples, EVAL_SEED, setup.device, rows, ranks
            )

    def record(step: int, metrics: dict[str, float]) -> None:
        if run is not None:
            run.log(step, metrics)
            report(step, metrics)

    def save() -> None:
        with whole(policy, ranks):
            if run is not None:
                run.save(policy)
        ranks.wait()

    before = measure()
    run = run_folder() if ranks.first else None
    record(0, before.metrics())
    for step in range(1, config.updates + 1):
        clock = time.perf_counter()
        with whole(policy, ranks):
            batch = collect(source, step)
            apart, weight_BL = cache_check(source, batch, step)
        rolled = time.perf_counter()
        earned = batch.rollouts, batch.reward_B, batch.branch_reward_B
        rows = setup.update_rows
        turns = parts_of(
            source.method, policy, setup.reference, *earned, rng, config.inner, rows, ranks, weight_BL
        )
        metrics = [update(policy, optimizer, parts, rows, config.optimizer.max_norm, ranks) for parts in turns]
        lr = float(schedule.get_last_lr()[0])
        schedule.step()
        times = {"time/rollout": rolled - clock, "time/update": time.perf_counter() - rolled}
        memory = memory_metrics(setup)
        told = {**batch_metrics(batch, source.task), **apart, **averaged(metrics)}
        record(step, {**told, "train/lr": lr, **memory, **times})
        if run is not None:
            run.log_samples(step, samples_of(batch, config.group))
        if config.eval.every and step % config.eval.every == 0 and step < config.updates:
            record(step, measure().metrics())
        if config.save_every and step % config.save_every == 0:
            save()
    after = measure()
    record(config.updates, after.metrics())
    save()
    if run is not None:
        run.draw()
    return Result(before, after, run, time.perf_counter() - start)


def cache_check(source: Source, batch: Batch, step: int) -> tuple[dict[str, float], Tensor | None]:
    """What the cache has changed, measured on a share of the rows; and weights that correct for it, if configured."""
    rollout, policy, ranks = source.config.rollout, source.setup.policy, source.setup.ranks
    if rollout.cache == "none" or not len(batch.trace):
        return {}, None
    rows = source.setup.rollout_rows
    if rollout.correction:
        exact_BL = replayed(policy, batch.trace, rows, ranks)
        weight_BL = truncated_weights(batch.trace, exact_BL, rollout.correction)
        return mismatch_metrics(batch.trace, exact_BL), weight_BL
    if not rollout.mismatch:
        return {}, None
    rng = torch.Generator().manual_seed(source.config.seed * 2**24 + step)
    some = random_share(batch.trace, rollout.mismatch, rng)
    return mismatch_metrics(some, replayed(policy, some, rows, ranks)), None


def memory_metrics(setup: Setup) -> dict[str, float]:
    """Peak memory of the step on a GPU; and whether passes had to be made smaller."""
    found = {}
    if setup.device.startswith("cuda"):
        found["memory/peak_gib"] = torch.cuda.max_memory_allocated(setup.device) / 2**30
        torch.cuda.reset_peak_memory_stats(setup.device)
    for name, rows in (("rollout", setup.rollout_rows), ("update", setup.update_rows)):
        if rows.halved:
            found[f"memory/{name}_rows"] = float(rows.most)
    return found


def optimizer_of(
    policy: Model, config: Config
) -> tuple[torch.optim.Optimizer | MasterAdamW, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW and its schedule: warm-up, then constant, cosine or linear to zero."""
    settings, weights = config.optimizer, trainable(policy)
    options: dict[str, Any] = {
        "lr": settings.lr,
        "betas": settings.betas,
        "weight_decay": settings.weight_decay,
        "fused": weights[0].is_cuda,  # without temporaries as large as what is trained
    }
    half = any(weight.dtype in (torch.bfloat16, torch.float16) for weight in weights)
    optimizer = MasterAdamW(weights, **options) if half else torch.optim.AdamW(weights, **options)
    decay = {
        "constant": lambda done: 1.0,
        "linear": lambda done: 1.0 - done,
        "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    }[settings.schedule]

    def factor(step: int) -> float:
        if step < settings.warmup:
            return (step + 1) / settings.warmup
        return decay((step - settings.warmup) / max(1, config.updates - settings.warmup))

    stepped = optimizer.inner if isinstance(optimizer, MasterAdamW) else optimizer
    return optimizer, torch.optim.lr_scheduler.LambdaLR(stepped, factor)


def averaged(metrics: list[dict[str, Tensor]]) -> dict[str, float]:
    """The mean of each metric over the inner updates."""
    names = dict.fromkeys(name for found in metrics for name in found)
    means = {name: [float(found[name]) for found in metrics if name in found] for name in names}
    return {f"train/{name}": sum(values) / len(values) for name, values in means.items()}
