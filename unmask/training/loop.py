"""The training loop: one line a stage, no method names in it.

prompts -> sample -> Trace -> (branch) -> reward -> advantage -> credit
        -> probes -> ask the old and the reference policy once
        -> for each inner update: ask the current policy -> objective -> backward -> step -> records
"""

import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unmask.config.config import Config, read_config
from unmask.config.sections import Scheduled
from unmask.core.shapes import Metrics
from unmask.distributed.processes import Ranks
from unmask.distributed.sharding import unsharded
from unmask.evaluation.evaluate import Evaluation
from unmask.models import Model
from unmask.models.lora import trainable_parameters
from unmask.training.batch import Batch, Experiment, collect
from unmask.training.loss_terms import loss_terms
from unmask.training.mismatch import mismatch_metrics, random_share, replayed, scorer_gap, truncated_weights
from unmask.training.optim import MasterAdamW
from unmask.training.run.broken import BrokenUpdate, sampled_logp
from unmask.training.run.folder import FINISHED, LAST, RunFolder, lock_run, lock_when_made, provenance
from unmask.training.run.state import Optimizer, State, newest
from unmask.training.run.trackers import tracking
from unmask.training.run.training_run import Look, Report, Stop, TrainingResult, TrainingRun
from unmask.training.setup import Setup, decoding_of, set_up
from unmask.training.update import Hear, LossTerm, NotFinite, update
from unmask.util.metering import Meter, count_passes
from unmask.util.micro_batch import MicroBatch


def train(
    config: Config,
    run_folder: Callable[[], RunFolder],
    report: Report = lambda step, metrics: None,
    stop: Stop = lambda: False,
    look: Look = lambda source, batch: None,
    before: Evaluation | None = None,
) -> TrainingResult:
    """Train as configured. The folder is made once the model has been loaded, checked and evaluated.

    `before` is that evaluation, where another run has made it already.

    Once `stop` says so, the update is finished, its state is kept, and Paused is raised. Under torchrun every process
    calls this; the first one writes the folder and reports.
    """
    with lock_when_made(run_folder) as made:
        return _begun(config, made, report, before, stop, look)


def _begun(
    config: Config,
    run_folder: Callable[[], RunFolder],
    report: Report,
    start: State | Evaluation | None,
    stop: Stop,
    look: Look,
) -> TrainingResult:
    """Everything that can be checked is, then the model is loaded and trained, from a state on if that is the start."""
    if config.rollout.temperature == 0:
        raise ValueError("rollout.temperature: 0 is greedy, and every method here learns from samples; raise it")
    if config.rollout.guidance:
        raise ValueError("rollout.guidance: a guided rollout has no likelihood under the policy; train with 0")
    task, method = config.build_task(), config.build_method()
    decoding = decoding_of(config, task)
    task.rows("train", 1, 0)  # a task with nothing to train on says so now, and not after a model is loaded and asked
    listening = tracking(config, run_folder, report, resumed=isinstance(start, State))
    with listening as (run_folder, report), set_up(config, method.needs_reference) as setup:
        meter, source = Meter(), Experiment(setup, task, method, config, decoding)
        with count_passes(meter):
            return _trained(source, meter, run_folder, report, start, stop, look)


def resume(
    folder: Path,
    report: Report = lambda step, metrics: None,
    stop: Stop = lambda: False,
    look: Look = lambda source, batch: None,
) -> TrainingResult:
    """Go on with a run that was cut off, from the last state it has kept, or from the beginning if it has kept none.

    The end is the one it would have had: the same log but for times, and the same weights (bit for bit on a CPU).
    """
    if not (folder / "config.yaml").is_file():
        raise ValueError(f"{folder} is no run folder: there is no config.yaml in it")
    with lock_run(folder):
        config = read_config(folder / "config.yaml")  # first, so that the user's own files are known as they are now
        state = last_state(folder)
        lengths = state.facts["lengths"] if state is not None else {}
        return _begun(config, lambda: RunFolder.reopened(folder, lengths), report, state, stop, look)


def last_state(folder: Path, config: str = "config.yaml") -> State | None:
    """What to go on from; ValueError where that would not end as the run would have."""
    if (folder / FINISHED).is_file():
        raise ValueError(f"{folder} is finished: there is nothing to go on with")
    state, passed_over = newest(folder / "state")
    if state is None and (passed_over or (folder / LAST).exists()):
        why = passed_over[0] if passed_over else "it has weights, and no state to go on from"
        raise ValueError(f"{folder} cannot be gone on with: {why}; its weights can be trained further with --model")
    for told in passed_over:
        warnings.warn(f"{told}: going on from an earlier one", stacklevel=3)
    if state is not None:
        was, now = state.facts["made_by"], provenance(folder, config)
        if was[config] != now[config]:
            raise ValueError(f"{folder / config} has changed since the state was kept: put it back as it was")
        for what in now:
            if was.get(what, now[what]) != now[what]:
                told = f"{what} was {was[what]} and is {now[what]}: what follows may be rounded differently"
                if what.endswith(".py"):
                    told = f"{what} has changed since the state was kept: what follows is by the file as it is now"
                warnings.warn(told, stacklevel=3)
    return state


def _trained(
    source: Experiment,
    meter: Meter,
    run_folder: Callable[[], RunFolder],
    report: Report,
    start: State | Evaluation | None,
    stop: Stop,
    look: Look,
) -> TrainingResult:
    config, setup, method = source.config, source.setup, source.method
    policy, ranks, rows = setup.policy, setup.ranks, setup.update_batch
    optimizer, rate = optimizer_of(policy, config)
    rng = torch.Generator().manual_seed(config.seed)
    keeper = TrainingRun(source, optimizer, rng, meter, report, stop, look)
    step = keeper.begin(run_folder, start)
    while not keeper.over(step):
        step, clock = step + 1, time.perf_counter()
        with keeper.safe(step, done=step - 1), unsharded(policy, ranks):
            batch = collect(source, step)
            apart, weight_BL = cache_check(source, batch, step)
        rolled = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        metrics, broken = list[Metrics](), unsound(batch)
        if broken is None:
            earned = batch.rollouts, batch.reward_B, batch.branch_reward_B
            turns = loss_terms(method, policy, setup.reference, *earned, rng, config.inner, rows, ranks, weight_BL)
            how = config.optimizer.max_norm, ranks, keeper.recorder.heard
            metrics, broken = learnt(policy, optimizer, turns, rows, *how)
        times = {"time/rollout": rolled - clock, "time/update": time.perf_counter() - rolled}
        rest = {"train/lr": rate(step), **memory_metrics(setup), **times}
        keeper.took(step, batch, {**apart, **averaged(metrics)}, rest, broken)
    return keeper.finish()


def unsound(batch: Batch) -> BrokenUpdate | None:
    """Rollouts whose own log-probabilities are not finite: nothing can be learnt from them."""
    for trace in batch.rollouts:
        if trace is not None and not trace.logp_BL.isfinite().all():
            return BrokenUpdate(0, [], NotFinite("a sampled log-probability", {"sampled_logp": sampled_logp(trace)}))
    return None


def learnt(
    policy: Model,
    optimizer: Optimizer,
    turns: list[list[LossTerm]],
    rows: MicroBatch,
    max_norm: float,
    ranks: Ranks,
    hear: Hear,
) -> tuple[list[Metrics], BrokenUpdate | None]:
    """One optimiser step a turn. One that is not finite is not made, nor are those after it; those before it stand.

    `hear` is told what the policy said before the first.
    """
    done = list[Metrics]()
    for turn, parts in enumerate(turns):
        try:
            done.append(update(policy, optimizer, parts, rows, max_norm, ranks, None if turn else hear))
        except NotFinite as error:
            return done, BrokenUpdate(turn, parts, error)
    return done, None


def cache_check(source: Experiment, batch: Batch, step: int) -> tuple[dict[str, float], Tensor | None]:
    """What the cache has changed, measured on a share of the rows; and weights that correct for it, if configured.

    Without a cache, how far sampler and scorer are apart on a few states: rounding, or something is wrong.
    """
    rollout, policy, ranks = source.config.rollout, source.setup.policy, source.setup.ranks
    if not len(batch.trace):
        return {}, None
    rng = torch.Generator().manual_seed(source.config.seed * 2**24 + step)
    if rollout.cache == "none" and rollout.mismatch:
        with count_passes(None):
            return {"train/scorer_gap": scorer_gap(policy, batch.trace, rng, ranks)}, None
    rows = source.setup.rollout_batch
    if rollout.correction:
        exact_BL = replayed(policy, batch.trace, rows, ranks)
        weight_BL = truncated_weights(batch.trace, exact_BL, rollout.correction)
        return mismatch_metrics(batch.trace, exact_BL), weight_BL
    if not rollout.mismatch:
        return {}, None
    some = random_share(batch.trace, rollout.mismatch, rng)
    return mismatch_metrics(some, replayed(policy, some, rows, ranks)), None


def memory_metrics(setup: Setup) -> dict[str, float]:
    """Peak memory of the step on a GPU; and whether passes had to be made smaller."""
    found = {}
    if setup.device.startswith("cuda"):
        found["memory/peak_gib"] = torch.cuda.max_memory_allocated(setup.device) / 2**30
        torch.cuda.reset_peak_memory_stats(setup.device)
    for name, rows in (("rollout", setup.rollout_batch), ("update", setup.update_batch)):
        if rows.halved:
            found[f"memory/{name}_rows"] = float(rows.most)
    return found


def optimizer_of(policy: Model, config: Scheduled) -> tuple[Optimizer, Callable[[int], float]]:
    """AdamW, and the learning rate of each update from 1: warm-up, then constant, cosine or linear to zero."""
    settings, weights = config.optimizer, trainable_parameters(policy)
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

    def rate(step: int) -> float:
        if step <= settings.warmup:
            return settings.lr * (step / settings.warmup)
        return settings.lr * decay((step - 1 - settings.warmup) / max(1, config.updates - settings.warmup))

    return optimizer, rate


def averaged(metrics: list[dict[str, Tensor]]) -> dict[str, float]:
    """The mean of each metric over the inner updates."""
    names = dict.fromkeys(name for found in metrics for name in found)
    means = {name: [float(found[name]) for found in metrics if name in found] for name in names}
    return {f"train/{name}": sum(values) / len(values) for name, values in means.items()}
