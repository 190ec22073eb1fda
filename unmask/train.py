"""The training loop: one line a stage, no method names in it.

    prompts -> sample -> Trace -> (branch) -> reward -> advantage -> credit
            -> probes -> ask the old and the reference policy once
            -> for each inner update: ask the current policy -> objective -> backward -> step -> records
"""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unmask.batch import Batch, Source, TooLong, batch_metrics, collect, samples_of
from unmask.broken import Broken, keep, sampled_logp
from unmask.config import Config, read_config
from unmask.evaluate import Evaluation, evaluate, prompt_ids
from unmask.interrupt import Paused
from unmask.judge import Failure, RewardError
from unmask.masters import MasterAdamW
from unmask.meter import Meter, metered
from unmask.mismatch import mismatch_metrics, random_share, replayed, scorer_gap, truncated_weights
from unmask.models import Model
from unmask.models.lora import trainable
from unmask.parts import parts_of
from unmask.progress import Best, Progress, Skips, ending, keeps_best, progress_of
from unmask.ranks import Ranks, whole
from unmask.rollout import canvas
from unmask.rows import Rows
from unmask.run import BEST, FINISHED, LAST, Run, made_by, read_metrics
from unmask.setup import Setup, decoding_of, prepared
from unmask.shapes import Metrics
from unmask.state import Optimizer, State, newest, restore, tensors_of, write
from unmask.update import NotFinite, Part, update
from unmask.watch import REACH, Update, updates_of, watched

EVAL_SEED = -1
"""Every evaluation draws the same noise, and no training batch has it: theirs have seeds from 0."""

Report = Callable[[int, dict[str, float]], None]
Stop = Callable[[], bool]


@dataclass(frozen=True)
class Result:
    before: Evaluation
    after: Evaluation
    run: Run | None
    """None in a process that is not the first."""
    seconds: float
    ended: str = ""
    """Why it ended before its last update: then with the weights of its best evaluation, which is `after`."""


def train(
    config: Config,
    run_folder: Callable[[], Run],
    report: Report = lambda step, metrics: None,
    state: State | None = None,
    stop: Stop = lambda: False,
) -> Result:
    """Train as configured. The folder is made once the model has been loaded, checked and evaluated.

    With a `state` (see `resume`) training goes on from there. Once `stop` says so, the update is finished, its state is
    kept, and Paused is raised. Under torchrun every process calls this; the first one writes the folder and reports.
    """
    if config.rollout.temperature == 0:
        raise ValueError("rollout.temperature: 0 is greedy, and every method here learns from samples; raise it")
    if config.rollout.guidance:
        raise ValueError("rollout.guidance: a guided rollout has no likelihood under the policy; train with 0")
    task, method = config.build_task(), config.build_method()
    decoding = decoding_of(config, task)
    task.rows("train", 1, 0)  # a task with nothing to train on says so now, and not after a model is loaded and asked
    with prepared(config, method.needs_reference) as setup:
        meter, source = Meter(), Source(setup, task, method, config, decoding)
        with metered(meter):
            return _trained(config, setup, source, meter, run_folder, report, state, stop)


def resume(folder: Path, report: Report = lambda step, metrics: None, stop: Stop = lambda: False) -> Result:
    """Go on with a run that was cut off, from the last state it has kept, or from the beginning if it has kept none.

    The end is the one it would have had: the same log but for times, and the same weights (bit for bit on a CPU).
    """
    if not (folder / "config.yaml").is_file():
        raise ValueError(f"{folder} is no run folder: there is no config.yaml in it")
    if (folder / FINISHED).is_file():
        raise ValueError(f"{folder} is finished: there is nothing to go on with")
    state, passed_over = newest(folder / "state")
    if state is None and (passed_over or (folder / LAST).exists()):
        why = passed_over[0] if passed_over else "it has weights, and no state to go on from"
        raise ValueError(f"{folder} cannot be gone on with: {why}; its weights can be trained further with --model")
    for told in passed_over:
        warnings.warn(f"{told}: going on from an earlier one", stacklevel=2)
    if state is not None:
        was, now = state.facts["made_by"], made_by(folder)
        if was["config.yaml"] != now["config.yaml"]:
            raise ValueError(f"{folder / 'config.yaml'} has changed since the state was kept: put it back as it was")
        for what in now:
            if was.get(what) != now[what]:
                told = f"{what} was {was.get(what)} and is {now[what]}: what follows may be rounded differently"
                warnings.warn(told, stacklevel=2)
    lengths = state.facts["lengths"] if state is not None else {}
    return train(read_config(folder / "config.yaml"), lambda: Run.reopened(folder, lengths), report, state, stop)


def _trained(
    config: Config,
    setup: Setup,
    source: Source,
    meter: Meter,
    run_folder: Callable[[], Run],
    report: Report,
    state: State | None,
    stop: Stop,
) -> Result:
    policy, ranks, task, decoding = setup.policy, setup.ranks, source.task, source.decoding
    optimizer, rate = optimizer_of(policy, config)
    rng = torch.Generator().manual_seed(config.seed)
    held_out = task.rows("test", config.eval.prompts, 0)
    canvas([prompt_ids(policy, task, row) for row in held_out], decoding.length, policy, "cpu")
    run: Run | None = None
    first, spent, history = 1, 0.0, list[Update]()
    start = time.perf_counter()
    if ranks.first:
        report(0, {})

    def measure(step: int) -> Evaluation:
        # What is measured is no part of what it costs to learn.
        with kept(step, step), whole(policy, ranks), metered(None):
            how = setup.device, setup.rollout_rows, ranks, config.reward
            return evaluate(policy, task, held_out, decoding, config.eval.samples, EVAL_SEED, *how)

    def record(step: int, metrics: dict[str, float], failures: Sequence[Failure] = ()) -> None:
        if run is not None:
            run.log(step, metrics)
            run.log_errors(step, failures)
            report(step, metrics)

    def save(step: int) -> None:
        """The state after `step` to go on from, and the weights for others to use."""
        tensors = tensors_of(policy, optimizer, rng, wanted=ranks.first)
        if run is not None:
            rows = [[each.most, each.halved] for each in (setup.rollout_rows, setup.update_rows)]
            facts = {**so_far.data(), "forwards": spent, "rows": rows, "made_by": made_by(run.folder)}
            write(run.folder / "state", step, tensors, {**facts, "lengths": run.lengths()})
        with whole(policy, ranks):
            if run is not None:
                run.save(policy)
        ranks.wait()

    def save_best() -> None:
        if keeps_best(config.eval):
            with whole(policy, ranks):
                if run is not None:
                    run.save(policy, BEST)

    def looked(step: int) -> Evaluation:
        """Evaluate after an update. The best weights so far are kept if configured, and with them the state."""
        found = measure(step)
        record(step, found.metrics(), found.failures)
        so_far.looked, so_far.best = step, so_far.best.after(step, found)
        if so_far.best.step == step and keeps_best(config.eval):
            save_best()
            if step < config.updates:
                save(step)
        return found

    def ended(step: int) -> str:
        """Evaluate between updates, where that is due and has not been done; why the run ends there, if it does."""
        due = config.eval.every and step % config.eval.every == 0 and so_far.looked < step < config.updates
        if not due:
            return ""
        found = looked(step)
        return ending(so_far.best, step, found, config.eval)

    def finish(after: Evaluation, why: str = "") -> Result:
        """The end; before the last update, with the best weights."""
        if run is not None:
            if why:
                run.take_best()
            best = {"best": so_far.best.step} if keeps_best(config.eval) else {}
            run.finish(so_far.before.metrics(), after.metrics(), **best, **({"ended": why} if why else {}))
            run.draw()
        return Result(so_far.before, after, run, time.perf_counter() - start, why)

    @contextmanager
    def kept(step: int, done: int) -> Iterator[None]:
        """Problems or a reward that stop the run in a step cost nothing that has been learnt in those that are done."""
        try:
            yield
        except (RewardError, TooLong) as error:
            if done:
                save(done)
            if run is not None and isinstance(error, RewardError):
                run.log_errors(step, error.failures)
            raise

    if state is None:
        before = measure(0)
        so_far = Progress(before, Best(0, before), 0, Skips())
        run = run_folder() if ranks.first else None
        record(0, before.metrics(), before.failures)
        save_best()
    else:
        restore(policy, optimizer, rng, state.tensors)
        run = run_folder() if ranks.first else None
        history = updates_of(read_metrics(run.folder)) if run is not None else []
        so_far, first = progress_of(state.facts), state.step + 1
        spent = state.facts["forwards"]
        meter.forwards = spent if ranks.first else 0.0
        for rows, kept_rows in zip((setup.rollout_rows, setup.update_rows), state.facts["rows"], strict=True):
            rows.most, rows.halved = kept_rows
        if why := ended(state.step):
            return finish(so_far.best.found, why)
    for step in range(first, config.updates + 1):
        clock = time.perf_counter()
        with kept(step, step - 1), whole(policy, ranks):
            batch = collect(source, step)
            apart, weight_BL = cache_check(source, batch, step)
        rolled = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        metrics, broken = list[Metrics](), unsound(batch)
        if broken is None:
            earned, rows = (batch.rollouts, batch.reward_B, batch.branch_reward_B), setup.update_rows
            turns = parts_of(
                source.method, policy, setup.reference, *earned, rng, config.inner, rows, ranks, weight_BL
            )
            metrics, broken = learnt(policy, optimizer, turns, rows, config.optimizer.max_norm, ranks)
        times = {"time/rollout": rolled - clock, "time/update": time.perf_counter() - rolled}
        spent = meter.total(ranks, setup.device)
        costs = {"cost/forwards": spent, **memory_metrics(setup)}
        so_far.skips = so_far.skips.after(broken is not None)
        told = {**batch_metrics(batch), **apart, **averaged(metrics), "train/skipped": float(so_far.skips.total)}
        told = told if broken is None else {key: value for key, value in told.items() if math.isfinite(value)}
        counts, begun = watched([*history, told])
        record(step, {**told, "train/lr": rate(step), **costs, **times, **counts}, batch.failures)
        history = [*history, {**told, **counts}][-REACH:]
        if run is not None:
            run.log_samples(step, samples_of(batch, config.group))
            run.log_warnings(step, begun)
        if broken is not None and so_far.skips.in_a_row >= config.optimizer.patience:
            tensors = tensors_of(policy, optimizer, rng, wanted=ranks.first)
            where = keep(run.folder, step, batch, broken, tensors) if run is not None else "the run folder"
            save(step)
            raise ValueError(
                f"{so_far.skips.in_a_row} updates in a row were skipped, the last because {broken.error}. "
                f"It is in {where}; unmask.replay does it again"
            )
        stopping = ranks.any(stop() or (run is not None and run.wished_to_stop()), setup.device)
        if stopping or step == config.updates or (config.save_every and step % config.save_every == 0):
            save(step)
        if stopping:
            raise Paused(None if run is None else run.folder, step)
        if why := ended(step):
            return finish(so_far.best.found, why)
    return finish(looked(config.updates))


def unsound(batch: Batch) -> Broken | None:
    """Rollouts whose own log-probabilities are not finite: nothing can be learnt from them."""
    for trace in batch.rollouts:
        if trace is not None and not trace.logp_BL.isfinite().all():
            return Broken(0, [], NotFinite("a sampled log-probability", {"sampled_logp": sampled_logp(trace)}))
    return None


def learnt(
    policy: Model, optimizer: Optimizer, turns: list[list[Part]], rows: Rows, max_norm: float, ranks: Ranks
) -> tuple[list[Metrics], Broken | None]:
    """One optimiser step a turn. One that is not finite is not made, nor are those after it; those before it stand."""
    done = list[Metrics]()
    for turn, parts in enumerate(turns):
        try:
            done.append(update(policy, optimizer, parts, rows, max_norm, ranks))
        except NotFinite as error:
            return done, Broken(turn, parts, error)
    return done, None


def cache_check(source: Source, batch: Batch, step: int) -> tuple[dict[str, float], Tensor | None]:
    """What the cache has changed, measured on a share of the rows; and weights that correct for it, if configured.

    Without a cache, how far sampler and scorer are apart on a few states: rounding, or something is wrong.
    """
    rollout, policy, ranks = source.config.rollout, source.setup.policy, source.setup.ranks
    if not len(batch.trace):
        return {}, None
    rng = torch.Generator().manual_seed(source.config.seed * 2**24 + step)
    if rollout.cache == "none" and rollout.mismatch:
        with metered(None):
            return {"train/scorer_gap": scorer_gap(policy, batch.trace, rng, ranks)}, None
    rows = source.setup.rollout_rows
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
    for name, rows in (("rollout", setup.rollout_rows), ("update", setup.update_rows)):
        if rows.halved:
            found[f"memory/{name}_rows"] = float(rows.most)
    return found


def optimizer_of(policy: Model, config: Config) -> tuple[Optimizer, Callable[[int], float]]:
    """AdamW, and the learning rate of each update from 1: warm-up, then constant, cosine or linear to zero."""
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
