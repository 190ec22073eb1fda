"""A batch: rollouts of this step's prompts, their branches and completions of their states, and all rewards."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from unmask.config import Config
from unmask.config.defaults import device_of
from unmask.config.keys import with_resolved
from unmask.core.advantage import rewards_differ
from unmask.core.method import Method
from unmask.core.trace import Trace, concat_traces, select_traces, until_eos
from unmask.distributed.sharding import unsharded
from unmask.models.lora import has_adapter, merged_adapter
from unmask.rollout.cache import cache_name
from unmask.rollout.decoding import Decoding
from unmask.rollout.sample import Rollouts, completions, row_seeds, sample
from unmask.rollout.step_values import continue_steps, with_state_values
from unmask.tasks import Task
from unmask.tasks.scoring import RewardFailure, Scores, score
from unmask.tasks.task import Row
from unmask.training.loss_terms import ScoredRollouts
from unmask.training.mismatch import (
    mismatch_metrics,
    random_share,
    replay_logprobs,
    sampled_logp,
    scorer_gap,
    truncated_weights,
)
from unmask.training.setup import Setup
from unmask.training.update import BrokenUpdate, NotFinite
from unmask.util.metering import count_passes

RESAMPLES = 4
"""How many further batches `idle_groups: resample` draws at most to replace groups without a signal."""


@dataclass(frozen=True, kw_only=True)
class Batch(ScoredRollouts):
    """Rollouts with their rewards, and the task row, the text and the verdict of each. Means are over everything that
    was sampled, also over groups that are left out of training."""

    rows: list[Row]
    texts: list[str]
    solved_B: Tensor
    reward: float
    solved: float
    idle: int
    """Groups with identical rewards."""
    groups: int
    behaviours: dict[str, float]
    """The share of all sampled completions that show each behaviour of the task."""
    parts: dict[str, float]
    """The mean of each part of the reward."""
    failures: list[RewardFailure]
    """Completions whose reward failed, branches and completions of states included."""
    stats: dict[str, float]
    """`rollout_stats`, and the share of prompts that were too long."""
    mismatch: dict[str, float] = field(default_factory=dict)
    """The difference between the sampler's and the scorer's log-probabilities (`measure_mismatch`)."""

    @property
    def broken(self) -> BrokenUpdate | None:
        """Rollouts whose own log-probabilities are not finite: nothing can be learned from them."""
        for trace in self.rollouts:
            if trace is not None and not trace.logp_BL.isfinite().all():
                error = NotFinite("a sampled log-probability", {"sampled_logp": sampled_logp(trace)})
                return BrokenUpdate(0, [], error)
        return None


class PromptTooLong(ValueError):
    """Too few prompts of an update leave room for a completion."""


@dataclass(frozen=True)
class Experiment:
    """Models, task, method and settings. Every process rolls out its share of a batch and sees the whole batch."""

    setup: Setup
    task: Task
    method: Method
    config: Config
    decoding: Decoding

    def settings(self) -> dict[str, Any]:
        """The configuration with the values that were decided for keys without one."""
        setup, decoding = self.setup, self.decoding
        decided = {
            "full": not has_adapter(setup.policy),
            "device": device_of(self.config),
            "micro_batch_size": setup.update_batch.size,
            "rollout.length": decoding.length,
            "rollout.steps": decoding.steps if decoding.threshold is None else None,
            "rollout.block": decoding.block,
            "rollout.cache": cache_name(decoding.cache),
            "rollout.micro_batch_size": setup.rollout_batch.size,
        }
        return with_resolved(self.config.dump(), decided, setup.policy.fingerprint)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Inside it the policy is as rollouts use it: its adapter merged, its layers in fp8, as configured. Layers in
        fp8 have the adapter in their copies, so only the others are merged."""
        setup, merge = self.setup, self.config.rollout.merge_adapter
        with setup.fp8.used(merge) if setup.fp8 is not None else nullcontext():
            with merged_adapter(setup.policy) if merge and has_adapter(setup.policy) else nullcontext():
                yield

    @property
    def approximate(self) -> bool:
        """Whether rollouts come from another network than the one that is trained: with a cache or in fp8."""
        return self.config.rollout.cache not in ("none", "auto") or self.setup.fp8 is not None


def collect(experiment: Experiment, step: int) -> Batch:
    """Rollouts with rewards. `idle_groups` decides whether groups with identical rewards stay, go or are replaced."""
    with unsharded(experiment.setup.policy, experiment.setup.ranks):
        with experiment.sampling():
            batch = _collect(experiment, step)
        return measure_mismatch(experiment, batch, step)


def _collect(experiment: Experiment, step: int) -> Batch:
    config = experiment.config
    tries = 1 + RESAMPLES if config.idle_groups == "resample" else 1
    batches: list[Batch] = []
    for attempt in range(tries):
        batches.append(sample_and_score(experiment, step, attempt))
        if sum(batch.groups - batch.idle for batch in batches) >= config.prompts:
            break
    batch = batches[0] if len(batches) == 1 else merge_batches(batches)
    if config.idle_groups == "keep":
        return batch
    index = rewards_differ(batch.reward_B, batch.trace.group_B).nonzero().squeeze(1)[: config.prompts * config.group]
    chosen = [int(i) for i in index]
    return replace(
        batch,
        rollouts=Rollouts(select_traces(batch.trace, index), batch.branches),
        reward_B=batch.reward_B[index],
        rows=[batch.rows[i] for i in chosen],
        texts=[batch.texts[i] for i in chosen],
        solved_B=batch.solved_B[index],
    )


def sample_and_score(experiment: Experiment, step: int, attempt: int) -> Batch:
    """Sample a group for every prompt of this step and score it, branches and completions of its states included.

    A prompt that leaves no room for a completion is left out and counted; prompts are never truncated.
    """
    setup, task, config, length = experiment.setup, experiment.task, experiment.config, experiment.decoding.length
    policy, device, ranks = setup.policy, setup.device, setup.ranks
    number = (config.seed * 2**24 + step) * (1 + RESAMPLES) + attempt  # a longer run begins like a shorter one
    candidates = [(row, task.prompt_ids(policy.tokenizer, row)) for row in task.rows("train", config.prompts, number)]
    fitting = [(row, ids) for row, ids in candidates if len(ids) + length <= policy.max_length]
    rows = [row for row, _ in fitting for _ in range(config.group)]
    prompts = [ids for _, ids in fitting for _ in range(config.group)]
    if len(rows) < ranks.size:
        raise PromptTooLong(
            f"{len(candidates) - len(fitting)} of the {len(candidates)} prompts of update {step} are too long for the "
            f"model's limit of {policy.max_length} tokens with a completion of {length}: shorten the prompts or lower "
            "rollout.length"
        )
    mine = ranks.share(len(rows))
    trace, branches = sample(
        policy,
        prompts[mine.start : mine.stop],
        row_seeds(number, len(rows))[mine.start : mine.stop].to(device),
        experiment.decoding,
        group_B=torch.arange(mine.start, mine.stop, device=device) // config.group,
        request=experiment.method.request,
        micro_batch=setup.rollout_batch,
    )

    width = max(len(prompt) for prompt in prompts) + length
    texts = completions(policy, trace, length)
    scores = score(task, rows[mine.start : mine.stop], texts, config.reward, ranks, device)
    branch_reward_B, failures = None, scores.failures
    if branches is not None:
        branches, branch_scores = _score_more(experiment, branches, rows, mine.start, width)
        branch_reward_B, failures = branch_scores.reward_B, failures + branch_scores.failures
    continued = None
    if (values := experiment.method.values) is not None:
        own_seed_B = row_seeds(-1 - number, len(rows))[mine.start : mine.stop].to(device)
        trace, continued = continue_steps(policy, trace, own_seed_B, values, experiment.decoding, setup.rollout_batch)
        continued, value_scores = _score_more(experiment, continued, rows, mine.start, width, once=True)
        failures = failures + value_scores.failures
    trace = ranks.gather_trace(trace, width)
    if continued is not None:
        trace = with_state_values(trace, continued, scores.reward_B, value_scores.reward_B)
    groups = len(trace.group_B.unique())
    live = len(trace.group_B[rewards_differ(scores.reward_B, trace.group_B)].unique())
    return Batch(
        rollouts=Rollouts(trace, branches),
        reward_B=scores.reward_B,
        branch_reward_B=branch_reward_B,
        rows=rows,
        texts=completions(policy, trace, length),
        solved_B=scores.solved_B,
        reward=float(scores.reward_B.mean()),
        solved=float(scores.solved_B.double().mean()),
        idle=groups - live,
        groups=groups,
        behaviours={name: float(shown_B.mean()) for name, shown_B in scores.behaviours.items()},
        parts={name: float(part_B.mean()) for name, part_B in scores.parts.items()},
        failures=failures,
        stats={"long_prompts": 1 - len(fitting) / len(candidates), **rollout_stats(trace)},
    )


def _score_more(
    experiment: Experiment, traces: Trace, rows: list[Row], start: int, width: int, once: bool = False
) -> tuple[Trace, Scores]:
    """Score traces that began in the rollouts of this process, the first of which is rollout `start` of the batch; the
    traces and scores of all processes, with the rollout of the batch as group. `once` as in `score`."""
    setup, config, group_B = experiment.setup, experiment.config, traces.group_B + start
    texts = completions(setup.policy, traces, experiment.decoding.length)
    sources = [rows[i] for i in group_B.tolist()]
    scores = score(experiment.task, sources, texts, config.reward, setup.ranks, setup.device, once)
    return setup.ranks.gather_trace(replace(traces, group_B=group_B), width), scores


def measure_mismatch(experiment: Experiment, batch: Batch, step: int) -> Batch:
    """Add the mismatch metrics. With a cache or fp8: the effect on log-probabilities, measured on a share of the rows,
    and importance weights if configured. Otherwise: the gap between sampler and scorer, which should be rounding."""
    rollout, setup = experiment.config.rollout, experiment.setup
    if not len(batch.trace):
        return batch
    rng = torch.Generator().manual_seed(experiment.config.seed * 2**24 + step)
    if not experiment.approximate and rollout.mismatch:
        with count_passes(None, setup.policy):
            gap = scorer_gap(setup.policy, batch.trace, rng, setup.ranks)
        return replace(batch, mismatch={"train/scorer_gap": gap})
    if rollout.correction:
        exact_BL = replay_logprobs(setup.policy, batch.trace, setup.rollout_batch, setup.ranks)
        weight_BL = truncated_weights(batch.trace, exact_BL, rollout.correction)
        return replace(batch, mismatch=mismatch_metrics(batch.trace, exact_BL), weight_BL=weight_BL)
    if not rollout.mismatch:
        return batch
    some = random_share(batch.trace, rollout.mismatch, rng)
    exact_BL = replay_logprobs(setup.policy, some, setup.rollout_batch, setup.ranks)
    return replace(batch, mismatch=mismatch_metrics(some, exact_BL))


def rollout_stats(trace: Trace) -> dict[str, float]:
    """Signs of bad rollouts: the share of completions with only end tokens (`empty`), the tokens up to the first end
    token, whatever the method counts (`length`), the share of end tokens in the later half of the steps (`late_eos`),
    and the negative log-likelihood of a completion (`nll`), near 0 for a policy that always writes the same text."""
    ends_BL = trace.tokens_BL == trace.eos_id
    late_BL = trace.filled_BL & (trace.step_BL >= trace.steps / 2)
    stats = {
        "empty": float((ends_BL | ~trace.filled_BL).all(-1).double().mean()),
        "length": float(until_eos(trace).sum() / len(trace)),
        "nll": float(-(trace.logp_BL * trace.counted_BL).sum(-1).mean()),
    }
    return stats | ({"late_eos": float(ends_BL[late_BL].double().mean())} if late_BL.any() else {})


def merge_batches(batches: list[Batch]) -> Batch:
    """Several batches as one, with distinct numbers for their groups and branch sources."""
    groups = [sum(b.groups for b in batches[:i]) for i in range(len(batches))]
    sizes = [sum(len(b.trace) for b in batches[:i]) for i in range(len(batches))]
    traces = [replace(b.trace, group_B=b.trace.group_B + n) for b, n in zip(batches, groups, strict=True)]
    branches = [
        replace(b.branches, group_B=b.branches.group_B + n)
        for b, n in zip(batches, sizes, strict=True)
        if b.branches is not None and len(b.branches)
    ]
    branch_rewards = [b.branch_reward_B for b in batches if b.branch_reward_B is not None]
    return Batch(
        rollouts=Rollouts(concat_traces(traces), concat_traces(branches) if branches else batches[0].branches),
        reward_B=torch.cat([b.reward_B for b in batches]),
        rows=[row for b in batches for row in b.rows],
        texts=[text for b in batches for text in b.texts],
        solved_B=torch.cat([b.solved_B for b in batches]),
        branch_reward_B=torch.cat(branch_rewards) if branch_rewards else None,
        reward=sum(b.reward for b in batches) / len(batches),
        solved=sum(b.solved for b in batches) / len(batches),
        idle=sum(b.idle for b in batches),
        groups=sum(b.groups for b in batches),
        behaviours={name: sum(b.behaviours[name] for b in batches) / len(batches) for name in batches[0].behaviours},
        parts={name: sum(b.parts[name] for b in batches) / len(batches) for name in batches[0].parts},
        failures=[failure for b in batches for failure in b.failures],
        stats={
            name: sum(b.stats[name] for b in batches) / len(batches)
            for name in batches[0].stats
            if all(name in b.stats for b in batches)
        },
    )


def batch_metrics(batch: Batch) -> dict[str, float]:
    metrics = {
        "train/reward": batch.reward,
        "train/solved": batch.solved,
        "train/idle_groups": batch.idle / batch.groups,
        "train/traces": float(len(batch.trace)),
        "train/reward_errors": float(len(batch.failures)),
        **{f"train/reward/{name}": mean for name, mean in batch.parts.items()},
        **{f"train/behaviour/{name}": share for name, share in batch.behaviours.items()},
        **{f"train/{name}": value for name, value in batch.stats.items()},
    }
    if len(batch.trace):
        counted_BL = batch.trace.counted_BL
        metrics["train/sampled_logp"] = float(batch.trace.logp_BL[counted_BL].mean())
        metrics["train/tokens"] = float(counted_BL.sum() / len(batch.trace))
    if batch.branches is not None and batch.branch_reward_B is not None and len(batch.branches):
        metrics["train/branch_reward"] = float(batch.branch_reward_B.mean())
        live_B = rewards_differ(batch.branch_reward_B, batch.branches.group_B)
        metrics["train/branch_idle"] = 1.0 - float(live_B.double().mean())
    return metrics


def samples_of(batch: Batch, group: int) -> list[dict[str, Any]]:
    """The first group of the batch, for samples.jsonl."""
    first = zip(batch.rows[:group], batch.texts, batch.reward_B, strict=False)
    return [{"row": row, "completion": text, "reward": float(reward)} for row, text, reward in first]
