"""How completions are made: the settings of a rollout, and rollouts of many prompts by them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unmask.core.order import Order, low_confidence
from unmask.core.policy import Policy
from unmask.core.schedule import Schedule, even
from unmask.core.shapes import NO_TOKEN
from unmask.core.token_sampling import TokenSampling
from unmask.core.trace import Trace
from unmask.rollout.cache import Cache
from unmask.rollout.sample import Rollouts, in_batches, sample
from unmask.util.micro_batch import MicroBatch


@dataclass(frozen=True)
class Decoding:
    """How completions are made, for training and evaluation alike: the arguments of `sample` that are not the rows'."""

    length: int
    steps: int
    block: int
    sampling: TokenSampling = TokenSampling()
    order: Order = low_confidence
    schedule: Schedule = even
    threshold: float | None = None
    cache: Cache | None = None
    attend_padding: bool = False
    stops: bool = True

    def greedy(self) -> "Decoding":
        return replace(self, sampling=replace(self.sampling, temperature=0.0))

    def sample(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        seed_B: Tensor,
        rows: MicroBatch,
        group_B: Tensor | None = None,
        **more: Any,
    ) -> Rollouts:
        """Roll out these prompts, at most `rows` at a time; `more` goes to `sample` as it is."""
        how = {f.name: getattr(self, f.name) for f in fields(self)}
        group_B = torch.arange(len(prompts), device=seed_B.device) if group_B is None else group_B
        return in_batches(partial(sample, policy, **how, **more), prompts, seed_B, group_B, rows)


def completions(policy: Policy, trace: Trace, length: int) -> list[str]:
    """The text that each trace wrote: up to its end token, or all of it where nothing ends a row."""
    read = policy.tokenizer.raw if trace.eos_id == NO_TOKEN else policy.tokenizer.decode
    return [read(ids) for ids in trace.tokens_BL[:, -length:].tolist()]


def complete(
    policy: Policy, prompts: Sequence[list[int]], decoding: Decoding, seed_B: Tensor, rows: MicroBatch | None = None
) -> Iterator[Trace]:
    """Traces of every prompt in order, at most `rows` at a time."""
    rows, start = rows or MicroBatch(512), 0
    while start < len(prompts):
        part = slice(start, start + rows.most)
        yield decoding.sample(policy, prompts[part], seed_B[part], rows).trace
        start = part.stop
