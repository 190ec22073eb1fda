"""Accuracy on held-out problems: sampled, greedy, pass@k, each with a 95 % interval."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unmask.core.options import RewardConfig
from unmask.core.policy import Policy
from unmask.core.trace import Trace, concat_traces
from unmask.distributed.processes import ALONE, Ranks
from unmask.rollout.decoding import Decoding
from unmask.rollout.sample import completions, row_seeds, sample_in_turn
from unmask.tasks import Task
from unmask.tasks.scoring import RewardFailure, Scores, score
from unmask.tasks.task import Row
from unmask.util.micro_batch import MicroBatch
from unmask.util.statistics import Proportion, mean_proportion, wilson_interval

TRACED_PROBLEMS = 3
"""`on_samples` gets this number of problems: the first ones, so they are the same every time."""

OnSamples = Callable[[Trace, Scores], None]
"""Called with some traces and the scores of all samples; those of the traces come first."""


class Completions(NamedTuple):
    texts: list[str]
    """Of this process."""
    scores: Scores
    """Of all processes."""


def pass_at_k(k: int, hits_P: Tensor, samples: int) -> Tensor:
    """The unbiased estimate of P(at least one of k is right) for each problem: 1 - C(n - c, k) / C(n, k)."""
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples a problem, there are {samples}")
    total = math.comb(samples, k)
    return torch.tensor([1 - math.comb(samples - int(c), k) / total for c in hits_P], dtype=torch.float64)


def pass_shares(hits_P: Tensor, samples: int) -> dict[int, Proportion]:
    """pass@k for k = 1, 2, 4, ... up to the number of samples."""
    ks = [2**i for i in range(samples.bit_length()) if 2**i <= samples]
    return {k: mean_proportion(pass_at_k(k, hits_P, samples).tolist()) for k in ks}


def mixed_at_k(k: int, hits_P: Tensor, samples: int) -> Tensor:
    """The unbiased estimate of P(some of k are right and some are wrong) for each problem."""
    return pass_at_k(k, hits_P, samples) + pass_at_k(k, samples - hits_P, samples) - 1


@dataclass(frozen=True)
class Evaluation:
    sampled: Proportion
    greedy: Proportion
    passes: dict[int, Proportion]
    """pass@k for k = 1, 2, 4, ... up to the number of samples; pass@1 is `sampled`."""
    reward: float
    """Mean reward of the sampled completions."""
    problems: int
    samples: int
    failures: tuple[RewardFailure, ...] = ()
    """Completions, sampled or greedy, whose reward failed: they count as wrong."""
    mixed: Proportion | None = None
    """The share of problems for which some of k samples are right and some are wrong, with the largest k of `passes`;
    None for one sample. Only these problems give a group of k rollouts a gradient."""

    behaviours: dict[str, float] = field(default_factory=dict)
    """The share of the sampled completions that show each behaviour of the task; empty if it names none."""

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
            "eval/reward_errors": float(len(self.failures)),
            **passes,
            **({} if self.mixed is None else {"eval/mixed": self.mixed.value}),
            **{f"eval/behaviour/{name}": share for name, share in self.behaviours.items()},
        }

    def data(self) -> dict[str, Any]:
        """For JSON; without failures, which have their own file."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "failures"}


def evaluation_of(data: Mapping[str, Any]) -> Evaluation:
    """The inverse of `Evaluation.data`, without failures."""
    shares = {name: Proportion(*data[name]) for name in ("sampled", "greedy", "mixed") if data.get(name)}
    passes = {int(k): Proportion(*share) for k, share in data["passes"].items()}
    return Evaluation(**{**data, **shares, "passes": passes, "failures": ()})


def evaluation_from(sampled: Scores, greedy: Scores, samples: int) -> Evaluation:
    """The evaluation of the scores of `samples` completions a problem and of the greedy ones."""
    problems = len(greedy.solved_B)
    hits_P = sampled.solved_B.cpu().view(problems, samples).sum(-1)
    passes = pass_shares(hits_P, samples)
    mixed_P = mixed_at_k(max(passes), hits_P, samples)
    return Evaluation(
        sampled=passes[1],
        greedy=wilson_interval(int(greedy.solved_B.sum()), problems),
        passes=passes,
        reward=float(sampled.reward_B.mean()),
        problems=problems,
        samples=samples,
        failures=(*sampled.failures, *greedy.failures),
        mixed=mean_proportion(mixed_P.tolist()) if samples > 1 else None,
        behaviours={name: float(shown_B.mean()) for name, shown_B in sampled.behaviours.items()},
    )


@dataclass(frozen=True)
class Evaluator:
    """Solves problems of a task with a policy; every process solves its share of them."""

    policy: Policy
    task: Task
    decoding: Decoding
    samples: int = 4
    """Sampled completions of each problem, in addition to the greedy one."""
    seed: int = 0
    device: torch.device | str = "cpu"
    micro_batch: MicroBatch | None = None
    ranks: Ranks = ALONE
    reward: RewardConfig | None = None

    def evaluate(self, rows: Sequence[Row], on_samples: OnSamples | None = None) -> Evaluation:
        """Solve held-out problems, sampled and greedily. Only the first process passes `on_samples`."""
        sampled, greedy = self.solve(rows, on_samples)
        return evaluation_from(sampled.scores, greedy.scores, self.samples)

    def solve(self, rows: Sequence[Row], on_samples: OnSamples | None = None) -> tuple[Completions, Completions]:
        """The sampled completions, those of one problem next to each other, and the greedy ones."""
        if not rows:
            raise ValueError("there are no problems to evaluate on")
        shown = 0 if on_samples is None else TRACED_PROBLEMS * self.samples
        sampled, traces = self._solve([row for row in rows for _ in range(self.samples)], self.decoding, shown)
        if on_samples is not None and traces:
            on_samples(concat_traces(traces), sampled.scores)
        greedy, _ = self._solve(rows, self.decoding.greedy())
        return sampled, greedy

    def _solve(self, rows: Sequence[Row], decoding: Decoding, shown: int = 0) -> tuple[Completions, list[Trace]]:
        """The completions, and this process's first traces: the batches with the first `shown` rows."""
        mine = self.ranks.share(len(rows))
        rows, seed_B = rows[mine.start : mine.stop], row_seeds(self.seed, len(rows))[mine.start : mine.stop]
        prompts = [self.task.prompt_ids(self.policy.tokenizer, row) for row in rows]
        texts, traces = list[str](), list[Trace]()
        for trace in sample_in_turn(self.policy, prompts, seed_B.to(self.device), decoding, self.micro_batch):
            if not bool(trace.logp_BL.isfinite().all()):
                raise ValueError(
                    "the model's log-probabilities are not finite: its weights are damaged, perhaps by too large a "
                    "learning rate; go back to an earlier checkpoint and lower optimizer.lr"
                )
            if len(texts) < shown:
                traces.append(trace)
            texts += completions(self.policy, trace, decoding.length)
        return Completions(texts, score(self.task, rows, texts, self.reward, self.ranks, self.device)), traces
