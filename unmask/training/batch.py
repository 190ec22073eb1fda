"""A batch: rollouts of this step's prompts, their branches, and what they earned."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unmask.config.config import Config
from unmask.core.advantage import varied
from unmask.core.method import Method
from unmask.core.trace import Trace, concat_traces, select_traces
from unmask.rollout.decoding import Decoding, completions
from unmask.rollout.sample import Rollouts, row_seeds
from unmask.tasks import Task
from unmask.tasks.scoring import RewardFailure, score
from unmask.tasks.task import Row, prompt_ids
from unmask.training.setup import Setup

RESAMPLES = 4
"""How many further batches `idle_groups: resample` draws at most to replace groups without a signal."""


@dataclass(frozen=True)
class Batch:
    """Rollouts with their rewards, and the task row, the text and the verdict of each."""

    rollouts: Rollouts
    reward_B: Tensor
    rows: list[Row]
    texts: list[str]
    solved_B: Tensor
    branch_reward_B: Tensor | None
    reward: float
    """The mean over all that was sampled, also what is left out of training."""
    solved: float
    idle: int
    """Groups whose rewards were all alike."""
    groups: int
    parts: dict[str, float]
    """The mean of each part of the reward, over all that was sampled."""
    failures: list[RewardFailure]
    """Completions whose reward failed, branches included."""
    signs: dict[str, float]
    """What the rollouts look like, over all that was sampled (`signs_of`), and the prompts that were too long."""

    @property
    def trace(self) -> Trace:
        return self.rollouts.trace

    @property
    def branches(self) -> Trace | None:
        return self.rollouts.branches


class PromptTooLong(ValueError):
    """Too few prompts of an update leave room for a completion."""


@dataclass(frozen=True)
class Experiment:
    """Where batches come from. Every process rolls out its share of the rows and sees the whole batch."""

    setup: Setup
    task: Task
    method: Method
    config: Config
    decoding: Decoding


def collect(source: Experiment, step: int) -> Batch:
    """A batch of rewarded rollouts; groups without a signal are kept, left out or replaced, as configured."""
    config = source.config
    tries = 1 + RESAMPLES if config.idle_groups == "resample" else 1
    batches: list[Batch] = []
    for attempt in range(tries):
        batches.append(sample_and_score(source, step, attempt))
        if sum(batch.groups - batch.idle for batch in batches) >= config.prompts:
            break
    batch = batches[0] if len(batches) == 1 else merge_batches(batches)
    if config.idle_groups == "keep":
        return batch
    index = varied(batch.reward_B, batch.trace.group_B).nonzero().squeeze(1)[: config.prompts * config.group]
    chosen = [int(i) for i in index]
    return replace(
        batch,
        rollouts=Rollouts(select_traces(batch.trace, index), batch.branches),
        reward_B=batch.reward_B[index],
        rows=[batch.rows[i] for i in chosen],
        texts=[batch.texts[i] for i in chosen],
        solved_B=batch.solved_B[index],
    )


def sample_and_score(source: Experiment, step: int, attempt: int) -> Batch:
    """Sample a group for every prompt of this step and score it, branches included. No prompt is ever cut short: one
    that leaves no room for a completion is left out, and counted."""
    policy, device, ranks = source.setup.policy, source.setup.device, source.setup.ranks
    task, config, length = source.task, source.config, source.decoding.length
    number = (config.seed * 2**24 + step) * (1 + RESAMPLES) + attempt  # a longer run begins like a shorter one
    drawn = [(row, prompt_ids(policy, task, row)) for row in task.rows("train", config.prompts, number)]
    fitting = [(row, ids) for row, ids in drawn if len(ids) + length <= policy.max_length]
    rows = [row for row, _ in fitting for _ in range(config.group)]
    prompts = [ids for _, ids in fitting for _ in range(config.group)]
    if len(rows) < ranks.size:
        raise PromptTooLong(
            f"{len(drawn) - len(fitting)} of the {len(drawn)} prompts of update {step} are too long for the model's "
            f"limit of {policy.max_length} tokens with a completion of {length}: shorten them, or rollout.length"
        )
    mine = ranks.share(len(rows))
    trace, branches = source.decoding.sample(
        policy,
        prompts[mine.start : mine.stop],
        row_seeds(number, len(rows))[mine.start : mine.stop].to(device),
        source.setup.rollout_batch,
        group_B=torch.arange(mine.start, mine.stop, device=device) // config.group,
        **source.method.sampling,
    )

    width = max(len(prompt) for prompt in prompts) + length
    how = config.reward, ranks, device
    earned = score(task, rows[mine.start : mine.stop], completions(policy, trace, length), *how)
    branch_reward_B, failures = None, earned.failures
    if branches is not None:
        sources = [rows[mine.start + i] for i in branches.group_B.tolist()]
        fillings = score(task, sources, completions(policy, branches, length), *how)
        branch_reward_B, failures = fillings.reward_B, failures + fillings.failures
        branches = ranks.gather_trace(replace(branches, group_B=branches.group_B + mine.start), width)
    trace = ranks.gather_trace(trace, width)
    groups = len(trace.group_B.unique())
    live = len(trace.group_B[varied(earned.reward_B, trace.group_B)].unique())
    return Batch(
        Rollouts(trace, branches),
        earned.reward_B,
        rows,
        completions(policy, trace, length),
        earned.solved_B,
        branch_reward_B,
        reward=float(earned.reward_B.mean()),
        solved=float(earned.solved_B.double().mean()),
        idle=groups - live,
        groups=groups,
        parts={name: float(part_B.mean()) for name, part_B in earned.parts.items()},
        failures=failures,
        signs={"long_prompts": 1 - len(fitting) / len(drawn), **rollout_signs(trace)},
    )


def rollout_signs(trace: Trace) -> dict[str, float]:
    """What shows that rollouts go wrong: completions of end tokens alone (`empty`), end tokens among what the later
    half of the steps wrote (`late_ends`), and minus the log-probability of a completion (`nats`), near 0 where the
    policy always says the same."""
    ends_BL = trace.tokens_BL == trace.eos_id
    late_BL = trace.filled_BL & (trace.step_BL >= trace.steps / 2)
    found = {
        "empty": float((ends_BL | ~trace.filled_BL).all(-1).double().mean()),
        "nats": float(-(trace.logp_BL * trace.counted_BL).sum(-1).mean()),
    }
    return found | ({"late_ends": float(ends_BL[late_BL].double().mean())} if late_BL.any() else {})


def merge_batches(batches: list[Batch]) -> Batch:
    """Several batches as one, their groups and branch sources numbered apart."""
    groups = [sum(b.groups for b in batches[:i]) for i in range(len(batches))]
    sizes = [sum(len(b.trace) for b in batches[:i]) for i in range(len(batches))]
    traces = [replace(b.trace, group_B=b.trace.group_B + n) for b, n in zip(batches, groups, strict=True)]
    twigs = [
        replace(b.branches, group_B=b.branches.group_B + n)
        for b, n in zip(batches, sizes, strict=True)
        if b.branches is not None and len(b.branches)
    ]
    twig_rewards = [b.branch_reward_B for b in batches if b.branch_reward_B is not None]
    return Batch(
        rollouts=Rollouts(concat_traces(traces), concat_traces(twigs) if twigs else batches[0].branches),
        reward_B=torch.cat([b.reward_B for b in batches]),
        rows=[row for b in batches for row in b.rows],
        texts=[text for b in batches for text in b.texts],
        solved_B=torch.cat([b.solved_B for b in batches]),
        branch_reward_B=torch.cat(twig_rewards) if twig_rewards else None,
        reward=sum(b.reward for b in batches) / len(batches),
        solved=sum(b.solved for b in batches) / len(batches),
        idle=sum(b.idle for b in batches),
        groups=sum(b.groups for b in batches),
        parts={name: sum(b.parts[name] for b in batches) / len(batches) for name in batches[0].parts},
        failures=[failure for b in batches for failure in b.failures],
        signs={
            name: sum(b.signs[name] for b in batches) / len(batches)
            for name in batches[0].signs
            if all(name in b.signs for b in batches)
        },
    )


def batch_metrics(batch: Batch) -> dict[str, float]:
    """What the rollouts say, before anything is learnt from them."""
    found = {
        "train/reward": batch.reward,
        "train/solved": batch.solved,
        "train/idle_groups": batch.idle / batch.groups,
        "train/traces": float(len(batch.trace)),
        "train/reward_errors": float(len(batch.failures)),
        **{f"train/part/{name}": mean for name, mean in batch.parts.items()},
        **{f"train/{name}": value for name, value in batch.signs.items()},
    }
    if len(batch.trace):
        counted_BL = batch.trace.counted_BL
        found["train/sampled_logp"] = float(batch.trace.logp_BL[counted_BL].mean())
        found["train/tokens"] = float(counted_BL.sum() / len(batch.trace))
    if batch.branches is not None and batch.branch_reward_B is not None and len(batch.branches):
        found["train/branch_reward"] = float(batch.branch_reward_B.mean())
        told = varied(batch.branch_reward_B, batch.branches.group_B)
        found["train/branch_idle"] = 1.0 - float(told.double().mean())
    return found


def samples_of(batch: Batch, group: int) -> list[dict[str, object]]:
    """The first group of the batch, to read."""
    return [
        {"row": row, "completion": text, "reward": float(reward)}
        for row, text, reward in zip(batch.rows[:group], batch.texts, batch.reward_B, strict=False)
    ]
