"""A batch: rollouts of this step's prompts, their branches, and what they earned."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unmask.advantage import varied
from unmask.config import Config
from unmask.evaluate import Decoding, completions, judged, prompt_ids
from unmask.method import Method
from unmask.rollout import Rollouts, row_seeds
from unmask.setup import Setup
from unmask.tasks import Task
from unmask.tasks.own import OwnTask, part_means
from unmask.tasks.task import Row
from unmask.trace import Trace, joined, selected

RESAMPLES = 4
"""How many further batches `idle_groups: resample` draws at most to replace groups without a signal."""


@dataclass(frozen=True)
class Batch:
    """Rollouts with their rewards, and the task row and the text of each."""

    rollouts: Rollouts
    reward_B: Tensor
    rows: list[Row]
    texts: list[str]
    branch_reward_B: Tensor | None
    reward: float
    """The mean over all that was sampled, also what is left out of training."""
    solved: float
    idle: int
    """Groups whose rewards were all alike."""
    groups: int

    @property
    def trace(self) -> Trace:
        return self.rollouts.trace

    @property
    def branches(self) -> Trace | None:
        return self.rollouts.branches


@dataclass(frozen=True)
class Source:
    """Where batches come from. Every process rolls out its share of the rows and sees the whole batch."""

    setup: Setup
    task: Task
    method: Method
    config: Config
    decoding: Decoding


def collect(source: Source, step: int) -> Batch:
    """A batch of rewarded rollouts; groups without a signal are kept, left out or replaced, as configured."""
    config = source.config
    tries = 1 + RESAMPLES if config.idle_groups == "resample" else 1
    batches: list[Batch] = []
    for attempt in range(tries):
        batches.append(rewarded(source, step, attempt))
        if sum(batch.groups - batch.idle for batch in batches) >= config.prompts:
            break
    batch = batches[0] if len(batches) == 1 else merged(batches)
    if config.idle_groups == "keep":
        return batch
    index = varied(batch.reward_B, batch.trace.group_B).nonzero().squeeze(1)[: config.prompts * config.group]
    chosen = [int(i) for i in index]
    return replace(
        batch,
        rollouts=Rollouts(selected(batch.trace, index), batch.branches),
        reward_B=batch.reward_B[index],
        rows=[batch.rows[i] for i in chosen],
        texts=[batch.texts[i] for i in chosen],
    )


def rewarded(source: Source, step: int, attempt: int) -> Batch:
    """Sample a group for every prompt of this step and score it, branches included."""
    policy, device, ranks = source.setup.policy, source.setup.device, source.setup.ranks
    task, config, length = source.task, source.config, source.decoding.length
    number = (config.seed * 2**24 + step) * (1 + RESAMPLES) + attempt  # a longer run begins like a shorter one
    rows = [row for row in task.rows("train", config.prompts, number) for _ in range(config.group)]
    prompts = [prompt_ids(policy, task, row) for row in rows]
    mine = ranks.share(len(rows))
    trace, branches = source.decoding.sample(
        policy,
        prompts[mine.start : mine.stop],
        row_seeds(number, len(rows))[mine.start : mine.stop].to(device),
        source.setup.rollout_rows,
        group_B=torch.arange(mine.start, mine.stop, device=device) // config.group,
        **source.method.sampling,
    )

    width = max(len(prompt) for prompt in prompts) + length
    reward_B, solved_B = judged(task, rows[mine.start : mine.stop], completions(policy, trace, length))
    reward_B, solved_B = ranks.gathered(reward_B.to(device)), ranks.gathered(solved_B.to(device))
    branch_reward_B = None
    if branches is not None:
        sources = [rows[mine.start + i] for i in branches.group_B.tolist()]
        branch_reward_B = judged(task, sources, completions(policy, branches, length))[0]
        branch_reward_B = ranks.gathered(branch_reward_B.to(device))
        branches = ranks.gathered_trace(replace(branches, group_B=branches.group_B + mine.start), width)
    trace = ranks.gathered_trace(trace, width)
    groups = len(trace.group_B.unique())
    live = len(trace.group_B[varied(reward_B, trace.group_B)].unique())
    return Batch(
        Rollouts(trace, branches),
        reward_B,
        rows,
        completions(policy, trace, length),
        branch_reward_B,
        reward=float(reward_B.mean()),
        solved=float(solved_B.double().mean()),
        idle=groups - live,
        groups=groups,
    )


def merged(batches: list[Batch]) -> Batch:
    """Several batches as one, their groups and branch sources numbered apart."""
    groups = [sum(b.groups for b in batches[:i]) for i in range(len(batches))]
    sizes = [sum(len(b.trace) for b in batches[:i]) for i in range(len(batches))]
    traces = [
        replace(b.trace, group_B=b.trace.group_B + n) for b, n in zip(batches, groups, strict=True)
    ]
    twigs = [
        replace(b.branches, group_B=b.branches.group_B + n)
        for b, n in zip(batches, sizes, strict=True)
        if b.branches is not None and len(b.branches)
    ]
    twig_rewards = [b.branch_reward_B for b in batches if b.branch_reward_B is not None]
    return Batch(
        rollouts=Rollouts(joined(traces), joined(twigs) if twigs else batches[0].branches),
        reward_B=torch.cat([b.reward_B for b in batches]),
        rows=[row for b in batches for row in b.rows],
        texts=[text for b in batches for text in b.texts],
        branch_reward_B=torch.cat(twig_rewards) if twig_rewards else None,
        reward=sum(b.reward for b in batches) / len(batches),
        solved=sum(b.solved for b in batches) / len(batches),
        idle=sum(b.idle for b in batches),
        groups=sum(b.groups for b in batches),
    )


def batch_metrics(batch: Batch, task: Task) -> dict[str, float]:
    """What the rollouts say, before anything is learnt from them."""
    found = {
        "train/reward": batch.reward,
        "train/solved": batch.solved,
        "train/idle_groups": batch.idle / batch.groups,
        "train/traces": float(len(batch.trace)),
    }
    if len(batch.trace):
        counted_BL = batch.trace.counted_BL
        found["train/sampled_logp"] = float(batch.trace.logp_BL[counted_BL].mean())
        found["train/tokens"] = float(counted_BL.sum() / len(batch.trace))
    if isinstance(task, OwnTask) and batch.texts:
        found |= {f"train/part/{name}": mean for name, mean in part_means(task, batch.rows, batch.texts).items()}
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
