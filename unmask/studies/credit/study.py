"""The credit audit: rollouts of a model, the values of their states, and every credit rule against them."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unmask.config import Config
from unmask.core.advantage import group_mean
from unmask.core.method import uniform_credit
from unmask.core.options import RewardConfig
from unmask.core.policy import Policy
from unmask.core.specs import Record
from unmask.core.steps import STEP_DISTRIBUTIONS, uniform_steps
from unmask.core.trace import Trace, all_tokens, select_traces
from unmask.methods import diffu_grpo
from unmask.rollout.continuation import check_uncached
from unmask.rollout.sample import completions
from unmask.studies.audit.audit import OnProgress
from unmask.studies.credit.figures import (
    bootstrap_groups,
    committing_step,
    corrected_correlation,
    correlation_gain,
    correlation_sums,
    decisive_steps,
    mean_over_groups,
    rank_share,
    ratio,
    reliability,
    sums_by_group,
    variance_left,
    weight_at,
)
from unmask.studies.credit.rules import CreditFunction, StepCredit, built_in_rules, valued, weighted
from unmask.studies.credit.values import (
    Score,
    StateValues,
    ValueSettings,
    one_shot_values,
    state_values,
)
from unmask.tasks.scoring import Scores, score
from unmask.tasks.task import Row, Task, main_behaviours
from unmask.training.batch import Batch, Experiment, collect
from unmask.training.run.recorder import MOST, TraceRecorder
from unmask.training.run.records import short_number
from unmask.training.setup import decoding_of, set_up
from unmask.util.statistics import Interval
from unmask.util.trace_lines import TraceLine

TOP = 32
"""Predictions of each step that the rollouts record, as for DPS."""
DRAWS = 32
"""Completions of each state in each half, by default."""


class RuleFigures(NamedTuple):
    name: str
    forwards: float
    """Forward passes for each rollout, beyond those of the rollout."""
    correlation: Interval | None
    gain: Interval | None
    """The correlation minus that of uniform credit, paired."""
    auroc: Interval | None
    commit_weight: Interval | None
    """The weight of the committing step over the mean weight of its rollout."""
    commit_rank: Interval | None
    """The share of the other steps with a smaller weight than the committing step."""


class CreditAudit(NamedTuple):
    rules: list[RuleFigures]
    step_variances: dict[str, Interval | None]
    """The variance that a distribution over steps leaves, relative to the uniform one."""
    reliability: Interval | None
    forwards: float
    """Forward passes of the values, for each rollout."""
    rollouts: int
    written: int
    """(rollout, step) pairs at which something was written."""
    decisive: int
    """The pairs that are decisive by both halves."""
    scored: int
    """Rollouts with a decisive step and another one: those that the AUROC is over."""
    change_T: list[float]
    """The root of the mean squared true difference of each step."""
    committed: list[int]
    """How many rollouts commit before any step, after step 1, 2, ...; empty if no wrong behaviour is shown."""


def task_score(policy: Policy, task: Task, rows: Sequence[Row], length: int, how: RewardConfig | None = None) -> Score:
    """Scores completions of rollouts of these rows; equal completions of a row are scored once."""

    def score_completions(trace: Trace, source_B: Tensor) -> Scores:
        sources = [rows[source] for source in source_B.tolist()]
        return score(task, sources, completions(policy, trace, length), how, once=True)

    return score_completions


def audit_credit(trace: Trace, reward_B: Tensor, values: StateValues, credits: Sequence[StepCredit]) -> CreditAudit:
    """Every rule against the values of the states of these rollouts."""
    group_B, wrote_BT, change_HBT = trace.group_B, uniform_steps(trace) > 0, values.change_HBT
    steps, commits_B = decisive_steps(change_HBT, wrote_BT), None
    final_N = values.shown_BTN[:, -1].mean(0).tolist()
    if any(main_behaviours([dict(zip(values.behaviours, final_N, strict=True))])):
        commits_B = committing_step(values)
    uniform = weighted("uniform", uniform_credit, trace, group_mean(reward_B, group_B))
    uniform_GK = correlation_sums(uniform.gradient_BT, change_HBT, wrote_BT, group_B)
    rules = []
    for credit in credits:
        sum_GK = correlation_sums(credit.gradient_BT, change_HBT, wrote_BT, group_B)
        auroc_B = rank_share(credit.weight_BT.abs(), steps.decisive_BT, steps.other_BT)
        share, rank = None, None
        if commits_B is not None:
            share, rank = (mean_over_groups(each_B, group_B) for each_B in weight_at(commits_B, credit, wrote_BT))
        correlation = bootstrap_groups(sum_GK, corrected_correlation)
        gain = bootstrap_groups(torch.cat([sum_GK, uniform_GK], -1), correlation_gain)
        auroc = mean_over_groups(auroc_B, group_B)
        rules.append(RuleFigures(credit.name, credit.forwards, correlation, gain, auroc, share, rank))
    square_T = (change_HBT.prod(0) * wrote_BT).sum(0) / wrote_BT.sum(0).clamp(min=1)
    places = [] if commits_B is None else [int((commits_B == step).sum()) for step in range(-1, trace.steps)]
    return CreditAudit(
        rules=rules,
        step_variances=_step_variances(trace, change_HBT, wrote_BT),
        reliability=bootstrap_groups(uniform_GK, reliability),
        forwards=values.forwards,
        rollouts=len(trace),
        written=int(wrote_BT.sum()),
        decisive=int(steps.decisive_BT.sum()),
        scored=int(steps.scored_B.sum()),
        change_T=square_T.clamp(min=0).sqrt().tolist(),
        committed=places,
    )


def _step_variances(trace: Trace, change_HBT: Tensor, wrote_BT: Tensor) -> dict[str, Interval | None]:
    left = {name: variance_left(steps(trace), change_HBT, wrote_BT) for name, steps in STEP_DISTRIBUTIONS.items()}
    return {
        name: bootstrap_groups(sums_by_group(torch.stack([left_B, left["uniform"]], -1), trace.group_B), ratio)
        for name, left_B in left.items()
    }


class MeasuredCredit(NamedTuple):
    audit: CreditAudit
    settings: dict[str, Any]
    """The configuration with the values that were decided."""
    draws: int
    reward: float
    """The mean of the rollouts."""
    seconds: float
    lines: list[TraceLine]
    """The rollouts with the values of their states, in the format of traces.jsonl."""


def measure_credit(
    config: Config, own: Mapping[str, CreditFunction], draws: int, on_progress: OnProgress = lambda stage, share: None
) -> MeasuredCredit:
    """Sample `prompts` x `group` rollouts of a configuration's model and judge all rules on them, yours (`own`) too."""
    started, task = time.monotonic(), config.build_task()
    decoding = decoding_of(config, task)
    check_uncached(decoding)
    if not decoding.sampling.temperature:
        raise ValueError("rollout.temperature: at 0 every state has one completion, and no step changes its value")
    method = replace(diffu_grpo(), record=Record(TOP, entropy=True), counted=all_tokens)
    with set_up(config, needs_reference=False) as setup:
        setup = replace(setup, fp8=None)
        experiment = Experiment(setup, task, method, config, decoding.for_policy(setup.policy))
        on_progress("rollouts", 0.0)
        batch = collect(experiment, 0)
        trace, policy = batch.trace, setup.policy
        if not len(trace):
            raise ValueError("the rewards of every group are identical, so no problem is left; leave out idle_groups")
        host, reward_B = on_host(trace), batch.reward_B.cpu()
        advantage_B = group_mean(reward_B, host.group_B)
        known, mine = (
            [weighted(name, rule, host, advantage_B) for name, rule in rules.items()]
            for rules in (built_in_rules(), own)
        )
        judge = task_score(policy, task, batch.rows, decoding.length, config.reward)
        settings = ValueSettings(decoding, setup.rollout_batch, draws, config.seed, partial(on_progress, "values"))
        values = state_values(policy, trace, judge, settings)
        _check_varies(values)
        on_progress("one-shot values", 0.0)
        one_shot_BT, forwards = one_shot_values(policy, trace, judge, settings)
        credits = [*known, valued("dispo", one_shot_BT, host, forwards), *mine]
        audit = audit_credit(host, reward_B, values, credits)
        lines, seconds = _lines(experiment, batch, values), time.monotonic() - started
        return MeasuredCredit(audit, experiment.settings(), draws, batch.reward, seconds, lines)


def on_host(trace: Trace) -> Trace:
    tensors = {f.name: getattr(trace, f.name).cpu() for f in fields(trace) if f.name.endswith(("_B", "_BL"))}
    return replace(trace, **tensors, seen={name: value.cpu() for name, value in trace.seen.items()})


def _check_varies(values: StateValues) -> None:
    low, high = float(values.value_HBT.min()), float(values.value_HBT.max())
    if high - low < 1e-9:
        raise ValueError(
            f"the reward never varies: all rollouts and all completions of their states earn {low:g}, so no step has "
            "any credit; take a model that solves some problems and not all, other problems, or a higher "
            "rollout.temperature"
        )


def _lines(experiment: Experiment, batch: Batch, values: StateValues) -> list[TraceLine]:
    """The groups of the batch for the viewer, each rollout with V(s_0) .. V(s_T)."""
    recorder, lines = TraceRecorder(experiment), []
    scores = Scores(batch.reward_B, batch.solved_B, {}, batch.failures)
    mean_BT = values.value_HBT.mean(0)
    for number, group in enumerate(batch.trace.group_B.unique()):
        index = (batch.trace.group_B == group).nonzero().squeeze(1)[:MOST]
        some = select_traces(batch.trace, index)
        line = recorder.group_line("train", 0, number, batch.rows[int(index[0])], some, scores, index)
        for rollout, row in zip(line["rollouts"], index.tolist(), strict=True):
            rollout["values"] = [short_number(value) for value in mean_BT[row].tolist()]
        lines.append(line)
    return lines
