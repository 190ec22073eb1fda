"""Accuracy on held-out problems: sampled, greedy, pass@k, each with a 95 % interval."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unmask.commits import Schedule, even
from unmask.engine import Cache
from unmask.law import Law
from unmask.models.policy import Policy
from unmask.order import Order, low_confidence
from unmask.ranks import ALONE, Ranks
from unmask.rollout import Rollouts, in_batches, row_seeds, sample
from unmask.rows import Rows
from unmask.tasks import Task
from unmask.tasks.task import Row
from unmask.trace import Trace

Z_95 = 1.959963984540054


class Share(NamedTuple):
    """A share of problems with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.value:.1f} % [{100 * self.low:.1f}, {100 * self.high:.1f}]"


def wilson(hits: int, total: int) -> Share:
    """A share of independent trials with Wilson's interval."""
    p, z2 = hits / total, Z_95**2
    centre = (p + z2 / (2 * total)) / (1 + z2 / total)
    half = Z_95 / (1 + z2 / total) * math.sqrt(p * (1 - p) / total + z2 / (4 * total**2))
    return Share(p, centre - half, centre + half)


def mean_share(value_P: Tensor) -> Share:
    """The mean of per-problem scores in [0, 1], problems being the independent units: normal interval.

    Where all scores are alike the normal interval is empty and says nothing; Wilson's stands in.
    """
    count, mean = len(value_P), float(value_P.double().mean())
    spread = float(value_P.double().std()) if count > 1 else 0.0
    if spread == 0:
        low, high = wilson(round(mean * count), count)[1:]
        return Share(mean, min(low, mean), max(high, mean))
    half = Z_95 * spread / math.sqrt(count)
    return Share(mean, max(0.0, mean - half), min(1.0, mean + half))


def pass_at(k: int, hits_P: Tensor, samples: int) -> Tensor:
    """The unbiased estimate of P(at least one of k is right) for each problem: 1 - C(n - c, k) / C(n, k)."""
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples a problem, there are {samples}")
    total = math.comb(samples, k)
    return torch.tensor([1 - math.comb(samples - int(c), k) / total for c in hits_P], dtype=torch.float64)


@dataclass(frozen=True)
class Decoding:
    """How completions are made, for training and evaluation alike: the arguments of `sample` that are not the rows'."""

    length: int
    steps: int
    block: int
    law: Law = Law()
    order: Order = low_confidence
    schedule: Schedule = even
    threshold: float | None = None
    cache: Cache | None = None

    def greedy(self) -> "Decoding":
        return replace(self, law=replace(self.law, temperature=0.0))

    def sample(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        seed_B: Tensor,
        rows: Rows,
        group_B: Tensor | None = None,
        **more: Any,
    ) -> Rollouts:
        """Roll out these prompts, at most `rows` at a time; `more` goes to `sample` as it is."""
        how = {f.name: getattr(self, f.name) for f in fields(self)}
        group_B = torch.arange(len(prompts), device=seed_B.device) if group_B is None else group_B
        return in_batches(partial(sample, policy, **how, **more), prompts, seed_B, group_B, rows)


def prompt_ids(policy: Policy, task: Task, row: Row) -> list[int]:
    """What the model is given for a row: the prompt as a user's turn, and what every answer begins with."""
    ids = policy.tokenizer.prompt(task.prompt(row))
    return ids + policy.tokenizer.encode(task.prefill) if task.prefill else ids


def completions(policy: Policy, trace: Trace, length: int) -> list[str]:
    """The text that each trace wrote."""
    return [policy.tokenizer.decode(ids) for ids in trace.tokens_BL[:, -length:].tolist()]


def complete(
    policy: Policy, prompts: Sequence[list[int]], decoding: Decoding, seed_B: Tensor, rows: Rows | None = None
) -> Iterator[Trace]:
    """Traces of every prompt in order, at most `rows` at a time."""
    rows, start = rows or Rows(512), 0
    while start < len(prompts):
        part = slice(start, start + rows.most)
        yield decoding.sample(policy, prompts[part], seed_B[part], rows).trace
        start = part.stop


def judged(task: Task, rows: Sequence[Row], texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Reward and verdict of every completion, (B,) each; a reward that raises or is no finite number is an error."""
    values, verdicts = [], []
    if task.ahead is not None:
        task.ahead(list(rows), list(texts))
    for row, text in zip(rows, texts, strict=True):
        try:
            value, verdict = float(task.reward(row, text)), bool(task.solved(row, text))
        except Exception as error:  # a task may be a user's own: name it, with the completion it failed on
            raise ValueError(
                f"the reward of task {task.name!r} raised {type(error).__name__}: {error} (completion {text!r})"
            ) from error
        if not math.isfinite(value):
            raise ValueError(f"the reward of task {task.name!r} is {value} for completion {text!r}: must be finite")
        values.append(value)
        verdicts.append(verdict)
    return torch.tensor(values, dtype=torch.float64), torch.tensor(verdicts, dtype=torch.bool)


@dataclass(frozen=True)
class Evaluation:
    sampled: Share
    greedy: Share
    passes: dict[int, Share]
    """pass@k for k = 1, 2, 4, ... up to the number of samples; pass@1 is `sampled`."""
    reward: float
    """Mean reward of the sampled completions."""
    problems: int
    samples: int

    def metrics(self) -> dict[str, float]:
        passes = {f"eval/pass@{k}": share.value for k, share in self.passes.items() if k > 1}
        return {
            "eval/solved_sampled": self.sampled.value,
            "eval/solved_sampled_low": self.sampled.low,
            "eval/solved_sampled_high": self.sampled.high,
            "eval/solved_greedy": self.greedy.value,
            "eval/solved_greedy_low": self.greedy.low,
            "eval/solved_greedy_high": self.greedy.high,
            "eval/reward": self.reward,
            **passes,
        }


def evaluate(
    policy: Policy,
    task: Task,
    rows: Sequence[Row],
    decoding: Decoding,
    samples: int = 4,
    seed: int = 0,
    device: torch.device | str = "cpu",
    batch: Rows | None = None,
    ranks: Ranks = ALONE,
) -> Evaluation:
    """Solve held-out problems `samples` times at the sampling law and once greedily, every process its share."""
    if not rows:
        raise ValueError("there are no problems to evaluate on")

    def answers(asked: Sequence[Row], how: Decoding) -> tuple[Tensor, Tensor]:
        mine = ranks.share(len(asked))
        asked, seed_B = asked[mine.start : mine.stop], row_seeds(seed, len(asked))[mine.start : mine.stop]
        prompts = [prompt_ids(policy, task, row) for row in asked]
        traces = complete(policy, prompts, how, seed_B.to(device), batch)
        texts = [text for trace in traces for text in completions(policy, trace, how.length)]
        reward_B, solved_B = judged(task, asked, texts)
        return ranks.gathered(reward_B.to(device)).cpu(), ranks.gathered(solved_B.to(device)).cpu()

    reward_B, solved_B = answers([row for row in rows for _ in range(samples)], decoding)
    _, greedy_P = answers(rows, decoding.greedy())
    hits_P = solved_B.view(len(rows), samples).sum(-1)
    ks = [2**i for i in range(samples.bit_length()) if 2**i <= samples]
    passes = {k: mean_share(pass_at(k, hits_P, samples)) for k in ks}
    return Evaluation(
        sampled=passes[1],
        greedy=wilson(int(greedy_P.sum()), len(rows)),
        passes=passes,
        reward=float(reward_B.mean()),
        problems=len(rows),
        samples=samples,
    )
