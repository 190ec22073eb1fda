"""Methods against each other: every cell of a grid trained with every seed, at the same budget.

    from unmask.studies.compare.compare import compare
    found = compare(["diffu_grpo", "agrpo"], ["none", "daca"], out=Path("runs/first"), budget="forwards=1e5")

A cell's folder is named after its resolved configuration and holds result.json once it is finished: a grid that was
killed goes on where it was, a larger grid keeps what a smaller one has found, and folders of several machines can be
put together by copying them. compare_report.py turns the outcome into a table, curves and a sentence.
"""

import fcntl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unmask.config import Config
from unmask.config.defaults import device_of
from unmask.methods.own import label_of
from unmask.studies.compare.cells import (
    Budget,
    Cost,
    Settings,
    Variant,
    budget_of,
    cost_of,
    key_of,
    own_sections,
    reference_of,
    variants,
    write_json,
)
from unmask.studies.compare.pool import CellJob, Event, cores, run_jobs
from unmask.studies.compare.report import gather, publish

PILOT = 4
"""Updates of the short run that says how long an update takes; the first is not counted."""
SWEEP_SEEDS = (2**20, 2**20 + 1)
"""Seeds of the runs that choose a learning rate: no cell of the grid has them."""
POINTS = 4
"""Parts into which evaluations divide a run, where the configuration does not say."""


@dataclass(frozen=True)
class Standing:
    """How far a comparison is."""

    stage: str
    event: Event
    done: int
    """Runs of this stage that have ended, those of earlier calls included."""
    total: int
    share: float
    """Of this call's work, the stages to come included."""
    left: float
    """Seconds to go, about."""


Report = Callable[[Standing], None]


@dataclass(frozen=True)
class Plan:
    """A variant with what it is given."""

    variant: Variant
    cost: Cost
    updates: int
    rate: float | None = None
    """The learning rate that was chosen for its base; None: the configuration's."""


class Study:
    """A comparison under way: what it is about, and the clock."""

    def __init__(self, settings: Settings, out: Path, workers: int, keep: bool, report: Report) -> None:
        self.settings, self.out, self.workers, self.keep, self.report = settings, out, workers, keep, report
        self.begun, self.worked = time.monotonic(), 0.0

    def config(self, plan: Plan, *more: str) -> Config:
        """The configuration of a planned variant; evaluated along the way, also where nothing says how often."""
        rate = [] if plan.rate is None else [f"optimizer.lr={plan.rate!r}"]
        config = self.settings.config(plan.variant, f"updates={plan.updates}", *rate, *more)
        if "every" in config.eval.model_fields_set:
            return config
        every = f"eval.every={-(plan.updates // -POINTS)}"
        return self.settings.config(plan.variant, f"updates={plan.updates}", *rate, every, *more)

    def job(self, kind: str, plan: Plan, seed: int, *more: str) -> CellJob:
        config = self.config(plan, f"seed={seed}", *more)
        data, label = config.dump(), plan.variant.label
        evaluations = 2 + ((config.updates - 1) // config.eval.every if config.eval.every else 0)
        name = "".join(c if c.isalnum() or c in "+-_=." else "-" for c in label)
        weight = config.updates * plan.cost.update + evaluations * plan.cost.evaluation
        return CellJob(label, seed, self.out / kind / f"{name}-seed{seed}-{key_of(data)}", data, weight)

    def run(self, stage: str, jobs: Sequence[CellJob], later: float, after: Callable[[], None] = lambda: None) -> None:
        """Train what is not finished; `later`: the work of stages to come; `after` is called when a run has ended."""
        wanted = [job for job in jobs if not job.finished]
        ahead = sum(job.weight for job in wanted) + later
        done, shares = len(jobs) - len(wanted), dict[Path, float]()
        for event in run_jobs(wanted, self.workers, self.keep):
            step = (event.share - shares.get(event.job.folder, 0.0)) * event.job.weight
            shares[event.job.folder] = event.share
            self.worked, ahead = self.worked + step, max(0.0, ahead - step)
            done += event.share == 1.0
            left = (time.monotonic() - self.begun) * ahead / max(self.worked, 1e-9)
            share = self.worked / max(self.worked + ahead, 1e-9)
            self.report(Standing(stage, event, done, len(jobs), share, left))
            if event.share == 1.0:
                after()


def compare(
    methods: Sequence[str],
    plugins: Sequence[str] = ("none",),
    *,
    out: Path,
    seeds: int = 5,
    budget: str | None = None,
    rates: Sequence[float] = (),
    settings: Settings | None = None,
    jobs: int | None = None,
    keep: bool = False,
    report: Report = lambda standing: None,
) -> dict[str, Any]:
    """Train the grid and write results.json, table.md and curves.png; returns what results.json holds.

    methods   agrpo, agrpo:draws=2, my.py:halves, ...      plugins   none, daca, daca+dispo, daca:strata=8, ...
    budget    updates=N, forwards=N or seconds=S for every cell; the configuration's updates if not given
    rates     learning rates, of which the best for each method on its own is chosen on validation problems
    jobs      runs side by side: as many as there are cores, on a GPU one, if not given
    keep      keep every run folder whole, the trained model included
    """
    grid, limit = variants(methods, plugins), None if budget is None else budget_of(budget)
    settings = replace(settings or Settings(), own=own_sections(grid))
    _check(grid, settings, seeds, rates, limit)
    bases = list(dict.fromkeys(Variant(variant.base) for variant in grid)) if rates else []
    configs = {variant: settings.config(variant) for variant in dict.fromkeys([*grid, *bases])}
    if jobs is None:
        jobs = 1 if device_of(configs[grid[0]]).startswith("cuda") else cores()
    elif jobs < 1:
        raise ValueError(f"--jobs: {jobs} runs at a time are none; give 1 or more")
    with _alone(out):
        study = Study(settings, out, jobs, keep, report)
        plans, lost = _planned(study, configs, limit)
        later = sum(study.job("cells", plans[variant], 0).weight * seeds for variant in grid if variant in plans)
        chosen = _chosen_rates(study, [plans[base] for base in bases if base in plans], rates, later)
        for variant in [variant for variant in plans if variant.base in chosen]:
            plans[variant] = replace(plans[variant], rate=chosen[variant.base]["chosen"])
            if error := chosen[variant.base]["error"]:
                lost[variant] = error
        cells = {
            (variant, seed): study.job("cells", plans[variant], seed)
            for seed in range(seeds)
            for variant in grid
            if variant not in lost
        }
        rows = []
        for variant in grid:
            mine = {seed: job for (owner, seed), job in cells.items() if owner == variant}
            errors = {seed: lost[variant] for seed in range(seeds)} if variant in lost else {}
            rows.append(_row(variant, reference_of(variant, grid), plans.get(variant), mine, errors))
        first, counts = configs[grid[0]], {configs[variant].updates for variant in grid}
        given = str(Budget("updates", first.updates)) if len(counts) == 1 else "the updates of its row"
        results = {
            "task": first.task,
            "budget": given if limit is None else str(limit),
            "seeds": seeds,
            "problems": len(first.build_task().rows("test", first.eval.prompts, 0)),  # a set may have fewer
            "rates": {label_of(base): found for base, found in chosen.items()},
            "cells": rows,
        }

        def keep_up() -> None:
            write_json(out / "results.json", gather(out, results))

        keep_up()
        study.run("cells", list(cells.values()), 0.0, keep_up)
        return publish(out, gather(out, results))


def _check(
    grid: Sequence[Variant], settings: Settings, seeds: int, rates: Sequence[float], limit: Budget | None
) -> None:
    if seeds < 1:
        raise ValueError(f"--seeds: {seeds} runs of a cell are none; give 1 or more")
    settings.check(grid)
    given = {text.partition("=")[0] for text in (*settings.overrides, *(o for v in grid for o in v.overrides()))}
    if limit is not None and "updates" in given:
        raise ValueError("updates: the budget says how many; leave out updates= or --budget")
    if rates and "optimizer.lr" in given:
        raise ValueError("optimizer.lr: --lr chooses it; leave out one of them")
    if not all(rate > 0 for rate in rates) or len(set(rates)) < len(rates):
        raise ValueError("--lr: learning rates are numbers above 0, each once, such as 5e-5,1e-4,2e-4")


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """The folder, for this process only."""
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not (out / "cells").is_dir()):
        raise ValueError(f"{out} is not the folder of a comparison; choose another --out")
    (out / "cells").mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another comparison is at work in {out}; wait for it, or choose another --out") from None
        yield


def _planned(
    study: Study, configs: dict[Variant, Config], limit: Budget | None
) -> tuple[dict[Variant, Plan], dict[Variant, str]]:
    """How many updates every variant has: known beforehand, because the learning-rate schedule runs over them.

    And the error of those that did not get through their pilot, which have no plan.
    """
    plans = {variant: Plan(variant, cost_of(config), config.updates) for variant, config in configs.items()}
    if limit is None:
        return plans, {}
    spent, lost = {variant: 1.0 for variant in plans}, dict[Variant, str]()
    if limit.kind == "forwards":
        spent = {variant: plan.cost.update for variant, plan in plans.items()}
    elif limit.kind == "seconds":
        spent, lost = _timed(study, plans)
    for variant, one in spent.items():
        if limit.amount < one:
            raise ValueError(f"--budget: one update of {variant.label} takes {one:,.1f} {limit.kind}; give more")
    return {v: replace(plans[v], updates=int(limit.amount // one)) for v, one in spent.items()}, lost


def _timed(study: Study, plans: dict[Variant, Plan]) -> tuple[dict[Variant, float], dict[Variant, str]]:
    """Seconds of an update of every variant, by a short run of each, side by side as the cells will be."""
    short = ("optimizer.warmup=0", "eval.every=0", "eval.prompts=1", "eval.samples=1")
    jobs = {variant: study.job("pilots", replace(plan, updates=PILOT), 0, *short) for variant, plan in plans.items()}
    study.run("timing", list(jobs.values()), 0.0)
    results = {variant: job.result() for variant, job in jobs.items()}
    lost = {variant: result["error"] for variant, result in results.items() if "error" in result}
    return {v: result["seconds_per_update"] for v, result in results.items() if v not in lost}, lost


def _chosen_rates(study: Study, bases: Sequence[Plan], rates: Sequence[float], later: float) -> dict[str, Any]:
    """For each method alone the learning rate that solves most validation problems; plug-ins take their base's."""
    jobs = {
        (base.variant.base, rate): [
            study.job("rates", replace(base, rate=rate), seed, "eval.split=validation", "eval.every=0")
            for seed in SWEEP_SEEDS
        ]
        for rate in rates
        for base in bases
    }
    study.run("learning rates", [job for some in jobs.values() for job in some], later)
    found: dict[str, Any] = {}
    for base in (plan.variant.base for plan in bases):
        tried = {rate: [job.result() for job in jobs[base, rate]] for rate in rates}
        errors = [result["error"] for results in tried.values() for result in results if "error" in result]
        solved = {
            rate: [result["curve"][-1]["sampled"] for result in results]
            for rate, results in tried.items()
            if not any("error" in result for result in results)
        }
        # of equals the smallest rate, which moves the least
        best = max(solved, key=lambda rate: (sum(solved[rate]), -rate)) if solved else None
        found[base] = {
            "chosen": best,
            "solved": {f"{rate:g}": values for rate, values in solved.items()},
            "error": f"no learning rate went through: {errors[0]}" if best is None else "",
        }
    return found


def _row(
    variant: Variant, against: Variant | None, plan: Plan | None, jobs: dict[int, CellJob], lost: dict[int, str]
) -> dict[str, Any]:
    """A variant, and where the outcome of its seeds will be; no plan: it was given up before it had one."""
    return {
        "label": variant.label,
        "base": label_of(variant.base),
        "against": None if against is None else against.label,
        "planned_updates": None if plan is None else plan.updates,
        "planned_forwards": None if plan is None else plan.updates * plan.cost.update,
        "rate": None if plan is None else plan.rate,
        "config": next((job.config for job in jobs.values()), None),
        "folders": {str(seed): f"{job.folder.parent.name}/{job.folder.name}" for seed, job in jobs.items()},
        "runs": {},
        "failed": {str(seed): error for seed, error in lost.items()},
    }
