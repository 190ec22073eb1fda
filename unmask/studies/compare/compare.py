"""Compare methods: train every cell of a grid with every seed, at the same budget.

    from unmask.studies.compare.compare import Comparison, compare
    plan = Comparison(["diffu_grpo", "agrpo"], ["none", "daca"], budget="forwards=1e5")
    results = compare(plan, Path("runs/first"))

A cell's folder is named after its resolved configuration and has result.json once it is finished. So a killed
comparison resumes, a larger grid reuses the cells of a smaller one, and folders of several machines are merged by
copying. report.py makes a table, curves and a conclusion of the results.
"""

import fcntl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unmask.config import Config
from unmask.config.defaults import device_of
from unmask.config.method_names import MethodSpec
from unmask.core.words import label_of
from unmask.studies.compare.budget import Budget, budget_of
from unmask.studies.compare.cells import (
    CellCost,
    SharedSettings,
    cost_of,
    key_of,
    method_grid,
    own_sections,
    reference_of,
    write_json,
)
from unmask.studies.compare.pool import CellJob, JobEvent, cores, run_jobs
from unmask.studies.compare.report import gather, publish

PILOT = 4
"""Updates of the short run that measures the time of an update; the first is not counted."""
SWEEP_SEEDS = (2**20, 2**20 + 1)
"""Seeds of the runs that choose a learning rate. No cell of the grid uses them."""
MAX_UPDATE_FACTOR = 100
"""Times the planned updates that a run at a budget of forward passes may have: it stops when they are spent."""
POINTS = 4
"""Evaluations during and after a run if eval.every is not set."""


@dataclass(frozen=True)
class Comparison:
    """What is compared: every method with every set of plug-ins, with every seed, at the same budget."""

    methods: Sequence[str]
    """agrpo, agrpo:draws=2, my.py:halves, ..."""
    plugins: Sequence[str] = ("none",)
    """Sets of plug-ins: none, daca, daca+dispo, daca:strata=8, ..."""
    seeds: int = 5
    budget: str | None = None
    """updates=N, forwards=N or seconds=S for every cell. Default: the configuration's updates."""
    rates: Sequence[float] = ()
    """Learning rates to choose from, for each line of the grid, on validation problems."""
    settings: SharedSettings = field(default_factory=SharedSettings)


@dataclass(frozen=True)
class ComparisonProgress:
    stage: str
    event: JobEvent
    done: int
    """Runs of this stage that have ended, earlier calls included."""
    total: int
    share: float
    """The share of this call's work that is done, later stages included."""
    left: float
    """Estimated seconds left."""


@dataclass(frozen=True)
class CellPlan:
    """A method with its cost, its updates and its learning rate."""

    spec: MethodSpec
    cost: CellCost
    updates: int
    """At a budget of forward passes: the fewest, if no rollout ends early."""
    forwards: float | None = None
    """The budget of forward passes."""
    rate: float | None = None
    """The learning rate chosen for it; None: the configuration's."""


@dataclass
class ComparisonRun:
    """A comparison in progress."""

    settings: SharedSettings
    out: Path
    workers: int
    keep: bool
    on_progress: Callable[[ComparisonProgress], None]
    started: float = field(default_factory=lambda: time.monotonic())
    work_done: float = 0.0

    def config(self, plan: CellPlan, *more: str) -> Config:
        """The configuration of a plan. Without eval.every it is evaluated POINTS times."""
        rate = [] if plan.rate is None else [f"optimizer.lr={plan.rate!r}"]
        budget = [f"updates={plan.updates}"]
        if plan.forwards is not None:
            budget = [f"updates={MAX_UPDATE_FACTOR * plan.updates}", f"max_forwards={plan.forwards!r}"]
        overrides = [*budget, *rate, *more]
        config = self.settings.config(plan.spec, *overrides)
        if "every" in config.eval.model_fields_set:
            return config
        return self.settings.config(plan.spec, *overrides, f"eval.every={-(plan.updates // -POINTS)}")

    def job(self, kind: str, plan: CellPlan, seed: int, *more: str) -> CellJob:
        config = self.config(plan, f"seed={seed}", *more)
        data, label = config.dump(), plan.spec.label
        evaluations = 2 + ((plan.updates - 1) // config.eval.every if config.eval.every else 0)
        name = "".join(c if c.isalnum() or c in "+-_=." else "-" for c in label)
        weight = plan.updates * plan.cost.update + evaluations * plan.cost.evaluation
        return CellJob(label, seed, self.out / kind / f"{name}-seed{seed}-{key_of(data)}", data, weight)

    def run(self, stage: str, jobs: Sequence[CellJob], later: float, after: Callable[[], None] = lambda: None) -> None:
        """Train the unfinished jobs and call `after` after each. `later` is the work of later stages."""
        open_jobs = [job for job in jobs if "curve" not in job.result()]
        ahead = sum(job.weight for job in open_jobs) + later
        done, shares = len(jobs) - len(open_jobs), dict[Path, float]()
        for event in run_jobs(open_jobs, self.workers, self.keep):
            step = (event.share - shares.get(event.job.folder, 0.0)) * event.job.weight
            shares[event.job.folder] = event.share
            self.work_done, ahead = self.work_done + step, max(0.0, ahead - step)
            done += event.share == 1.0
            left = (time.monotonic() - self.started) * ahead / max(self.work_done, 1e-9)
            share = self.work_done / max(self.work_done + ahead, 1e-9)
            self.on_progress(ComparisonProgress(stage, event, done, len(jobs), share, left))
            if event.share == 1.0:
                after()


def compare(
    comparison: Comparison,
    out: Path,
    jobs: int | None = None,
    keep: bool = False,
    on_progress: Callable[[ComparisonProgress], None] = lambda progress: None,
) -> dict[str, Any]:
    """Train the grid, write results.json, table.md and curves.png, and return the content of results.json.

    jobs   runs at the same time. Default: one per core, one on a GPU
    keep   keep every run folder with the trained model
    """
    grid, seeds = method_grid(comparison.methods, comparison.plugins), range(comparison.seeds)
    limit = None if comparison.budget is None else budget_of(comparison.budget)
    settings = replace(comparison.settings, own=own_sections(grid))
    _check(grid, settings, comparison)
    configs = {spec: settings.config(spec) for spec in grid}
    if jobs is None:
        jobs = 1 if device_of(configs[grid[0]]).startswith("cuda") else cores()
    elif jobs < 1:
        raise ValueError(f"--jobs: {jobs} is too few; give 1 or more")
    with _lock(out):
        run = ComparisonRun(settings, out, jobs, keep, on_progress)
        plans, failed = _plans(run, configs, limit)
        later = sum(run.job("cells", plans[spec], 0).weight * len(seeds) for spec in grid if spec in plans)
        chosen = _choose_rates(run, list(plans.values()), comparison.rates, later) if comparison.rates else {}
        for spec, choice in chosen.items():
            plans[spec] = replace(plans[spec], rate=choice["chosen"])
            if choice["error"]:
                failed[spec] = choice["error"]
        cells = {
            (spec, seed): run.job("cells", plans[spec], seed) for seed in seeds for spec in grid if spec not in failed
        }
        rows = []
        for spec in grid:
            own_jobs = {seed: job for (owner, seed), job in cells.items() if owner == spec}
            errors = {seed: failed[spec] for seed in seeds} if spec in failed else {}
            rows.append(_row(spec, reference_of(spec, grid), plans.get(spec), own_jobs, errors))
        first, counts = configs[grid[0]], {configs[spec].updates for spec in grid}
        updates = str(Budget("updates", first.updates)) if len(counts) == 1 else "the updates of its row"
        results = {
            "task": first.task,
            "budget": updates if limit is None else str(limit),
            "seeds": len(seeds),
            "problems": len(first.build_task().rows("test", first.eval.prompts, 0)),  # the test split may have fewer
            "rates": {spec.label: choice for spec, choice in chosen.items()},
            "cells": rows,
        }

        def write_results() -> None:
            write_json(out / "results.json", gather(out, results))

        write_results()
        run.run("cells", list(cells.values()), 0.0, write_results)
        return publish(out, gather(out, results))


def _check(grid: Sequence[MethodSpec], settings: SharedSettings, comparison: Comparison) -> None:
    if comparison.seeds < 1:
        raise ValueError(f"--seeds: {comparison.seeds} is too few; give 1 or more")
    settings.check(grid)
    keys = {text.partition("=")[0] for text in (*settings.overrides, *(o for spec in grid for o in spec.overrides()))}
    if comparison.budget is not None and "updates" in keys:
        raise ValueError("updates: --budget sets the number of updates; leave out updates= or --budget")
    if (rates := comparison.rates) and "optimizer.lr" in keys:
        raise ValueError("optimizer.lr: --lr chooses it; leave out optimizer.lr= or --lr")
    if not all(rate > 0 for rate in rates) or len(set(rates)) < len(rates):
        raise ValueError("--lr: give different learning rates above 0, such as 5e-5,1e-4,2e-4")


@contextmanager
def _lock(out: Path) -> Iterator[None]:
    """Lock the folder for this process."""
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not (out / "cells").is_dir()):
        raise ValueError(f"{out} is not the folder of a comparison; choose another --out")
    (out / "cells").mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another comparison is running in {out}; wait for it, or choose another --out") from None
        yield


def _plans(
    run: ComparisonRun, configs: dict[MethodSpec, Config], limit: Budget | None
) -> tuple[dict[MethodSpec, CellPlan], dict[MethodSpec, str]]:
    """The plan of every method, and the errors of methods whose pilot failed, which have no plan.

    At a budget of seconds the number of updates is fixed before the run, because the learning-rate schedule depends on
    it. At a budget of forward passes the run stops when they are spent, and the schedule follows them.
    """
    plans = {spec: CellPlan(spec, cost_of(config), config.updates) for spec, config in configs.items()}
    if limit is None:
        return plans, {}
    costs, failed = {spec: 1.0 for spec in plans}, dict[MethodSpec, str]()
    if limit.kind == "forwards":
        costs = {spec: plan.cost.update for spec, plan in plans.items()}
    elif limit.kind == "seconds":
        costs, failed = _time_updates(run, plans)
    for spec, cost in costs.items():
        if limit.amount < cost:
            raise ValueError(f"--budget: one update of {spec.label} takes {cost:,.1f} {limit.kind}; give more")
    forwards = limit.amount if limit.kind == "forwards" else None
    for spec, cost in costs.items():
        if (warmup := configs[spec].optimizer.warmup) > limit.amount // cost:
            raise ValueError(f"optimizer.warmup: {warmup} is more than the updates of {spec.label} in this budget")
    plans = {
        spec: replace(plans[spec], updates=int(limit.amount // cost), forwards=forwards) for spec, cost in costs.items()
    }
    return plans, failed


def _time_updates(
    run: ComparisonRun, plans: dict[MethodSpec, CellPlan]
) -> tuple[dict[MethodSpec, float], dict[MethodSpec, str]]:
    """Seconds of an update of every method, measured by a short run of each, as many at a time as the cells."""
    short = ["optimizer.warmup=0", "eval.every=0", "eval.prompts=1", "eval.samples=1"]
    jobs = {spec: run.job("pilots", replace(plan, updates=PILOT), 0, *short) for spec, plan in plans.items()}
    run.run("timing", list(jobs.values()), 0.0)
    results = {spec: job.result() for spec, job in jobs.items()}
    failed = {spec: result["error"] for spec, result in results.items() if "error" in result}
    return {spec: result["seconds_per_update"] for spec, result in results.items() if spec not in failed}, failed


def _choose_rates(
    run: ComparisonRun, plans: Sequence[CellPlan], rates: Sequence[float], later: float
) -> dict[MethodSpec, Any]:
    """The learning rate that solves most validation problems, for each line of the grid."""
    jobs = {
        (plan.spec, rate): [
            run.job("rates", replace(plan, rate=rate), seed, "eval.split=validation", "eval.every=0")
            for seed in SWEEP_SEEDS
        ]
        for rate in rates
        for plan in plans
    }
    run.run("learning rates", [job for some in jobs.values() for job in some], later)
    choices: dict[MethodSpec, Any] = {}
    for spec in (plan.spec for plan in plans):
        tried = {rate: [job.result() for job in jobs[spec, rate]] for rate in rates}
        errors = [result["error"] for results in tried.values() for result in results if "error" in result]
        solved = {
            rate: [result["curve"][-1]["sampled"] for result in results]
            for rate, results in tried.items()
            if not any("error" in result for result in results)
        }
        # the smallest among equals
        best = max(solved, key=lambda rate: (sum(solved[rate]), -rate)) if solved else None
        choices[spec] = {
            "chosen": best,
            "solved": {f"{rate:g}": values for rate, values in solved.items()},
            "error": f"every learning rate failed: {errors[0]}" if best is None else "",
        }
    return choices


def _row(
    spec: MethodSpec,
    against: MethodSpec | None,
    plan: CellPlan | None,
    jobs: dict[int, CellJob],
    errors: dict[int, str],
) -> dict[str, Any]:
    """A method in results.json, with the folders of its seeds. No plan means that its pilot failed."""
    return {
        "label": spec.label,
        "base": label_of(spec.base),
        "against": None if against is None else against.label,
        "planned_updates": None if plan is None else plan.updates,
        "planned_forwards": None if plan is None else plan.forwards or plan.updates * plan.cost.update,
        "rate": None if plan is None else plan.rate,
        "config": next((job.config for job in jobs.values()), None),
        "folders": {str(seed): f"{job.folder.parent.name}/{job.folder.name}" for seed, job in jobs.items()},
        "runs": {},
        "failed": {str(seed): error for seed, error in errors.items()},
    }
