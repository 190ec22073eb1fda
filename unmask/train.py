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

from unmask.batch import Batch, batch_metrics, collect, samples_of
from unmask.config import Config, rollout_shape
from unmask.evaluate import Decoding, Evaluation, evaluate
from unmask.law import Law
from unmask.method import Method
from unmask.models import Tiny, load_model
from unmask.objective import reward_divergence
from unmask.probes import Probes, ask, one_shot
from unmask.rollout import ORDERS, canvas
from unmask.run import Run
from unmask.tasks import Task
from unmask.update import Part, update

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
    """Train as configured. The folder is made once the model is loaded and everything has been checked."""
    task, method = config.build_task(), config.build_method()
    decoding = decoding_of(config, task)
    policy = load_model(config.model, device=config.device)
    reference = copy.deepcopy(policy).requires_grad_(False) if method.needs_reference else None
    optimizer, schedule = optimizer_of(policy, config)
    rng = torch.Generator().manual_seed(config.seed)
    held_out = task.rows("test", config.eval.prompts, 0)
    canvas([policy.tokenizer.encode(task.prompt(row)) for row in held_out], decoding.length, policy, "cpu")
    run, start = run_folder(), time.perf_counter()

    def measure(step: int) -> Evaluation:
        found = evaluate(policy, task, held_out, decoding, config.eval.samples, EVAL_SEED, config.device)
        run.log(step, found.metrics())
        report(step, found.metrics())
        return found

    before = after = measure(0)
    for step in range(1, config.updates + 1):
        clock = time.perf_counter()
        batch = collect(policy, task, method, config, decoding, step)
        rolled = time.perf_counter()
        turns = parts_of(policy, reference, method, batch, rng, config)
        metrics = [update(policy, optimizer, parts, config.rows, config.optimizer.max_norm) for parts in turns]
        lr = float(schedule.get_last_lr()[0])
        schedule.step()
        times = {"time/rollout": rolled - clock, "time/update": time.perf_counter() - rolled}
        record = {**batch_metrics(batch), **averaged(metrics), "train/lr": lr, **times}
        run.log(step, record)
        run.log_samples(step, samples_of(batch, config.group))
        report(step, record)
        if config.eval.every and step % config.eval.every == 0 and step < config.updates:
            measure(step)
        if config.save_every and step % config.save_every == 0:
            run.save(policy)
    after = measure(config.updates)
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


def parts_of(
    policy: Tiny,
    reference: Tiny | None,
    method: Method,
    batch: Batch,
    rng: torch.Generator,
    config: Config,
) -> list[list[Part]]:
    """The terms of the loss for every inner update, all questions drawn and the old policy asked up front."""

    @torch.no_grad()
    def answers(asked: Tiny | None, probes: Probes) -> Tensor | None:
        return None if asked is None else ask(asked, probes, config.rows)

    turns: list[list[Part]] = [[] for _ in range(config.inner)]
    if len(batch.trace):
        probes = method.probe(batch.trace, rng, config.inner)
        later = config.inner > 1 and method.compares  # on the first turn the answer itself is the old one
        old = [answers(policy, p) if (turn and later) or method.reward_kl else None for turn, p in enumerate(probes)]
        known = [answers(reference, p) if method.kl or method.reward_kl else None for p in probes]
        reward_B = batch.reward_B
        if method.reward_kl and old[0] is not None and known[0] is not None:
            reward_B = reward_B - method.reward_kl * reward_divergence(old[0], known[0], probes[0]).to(reward_B)
        advantage_B, credit_BL = method.advantage(reward_B, batch.trace.group_B), method.credit(batch.trace)
        for turn in range(config.inner):
            turns[turn].append(
                Part(
                    probes[turn],
                    advantage_B,
                    credit_BL,
                    method.objective,
                    old[turn],
                    known[turn] if method.kl else None,
                    method.kl,
                    method.divergence,
                )
            )
    if method.branch and batch.branches is not None and len(batch.branches):
        assert batch.branch_reward_B is not None
        probes_now = one_shot(batch.branches)
        part = Part(
            probes_now,
            method.branch.advantage(batch.branch_reward_B, batch.branches.group_B),
            torch.ones_like(batch.branches.logp_BL),
            method.branch.objective,
            answers(policy, probes_now) if config.inner > 1 else None,
            answers(reference, probes_now) if method.branch.kl else None,
            method.branch.kl,
            method.branch.divergence,
            method.branch.weight,
            label="branch_",
        )
        for parts in turns:
            parts.append(part)
    return turns


def averaged(metrics: list[dict[str, Tensor]]) -> dict[str, float]:
    """The mean of each metric over the inner updates."""
    names = dict.fromkeys(name for found in metrics for name in found)
    means = {name: [float(found[name]) for found in metrics if name in found] for name in names}
    return {f"train/{name}": sum(values) / len(values) for name, values in means.items()}
