"""The mismatch between a rollout with a cache or in fp8 and the policy, and importance weights that correct for it.

A cached pass takes keys and values from an earlier canvas, and fp8 rounds weights and activations, so a token is drawn
from a slightly different distribution. Replaying the visited states without either gives its log-probability under the
policy.
"""

from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from unmask.core.policy import CachingPolicy, Policy
from unmask.core.probes import every_step, visited
from unmask.core.trace import Trace, select_traces
from unmask.distributed.processes import ALONE, Ranks
from unmask.training.update import logprobs
from unmask.util.micro_batch import MicroBatch

CHECKED = 8
"""Traces of a batch whose sampled log-probabilities are compared with the scorer's."""


def replay_logprobs(policy: Policy, trace: Trace, micro_batch: MicroBatch, ranks: Ranks = ALONE) -> Tensor:
    """Log-probability of every token at the state it was drawn at, without a cache, (B, L); 0 where nothing was drawn.

    One pass for every row and step: as much as rolling out without a cache.
    """
    ranks, pieces = replace(ranks, sharded=False), []  # the weights are unsharded here
    some = max(1, 2**22 // (trace.steps * trace.tokens_BL.shape[1]))
    for index_B in torch.arange(len(trace), device=trace.group_B.device).split(some):
        part = select_traces(trace, index_B)
        probes = every_step(part, torch.Generator())
        with policy.rollout() if isinstance(policy, CachingPolicy) else nullcontext():  # like the sampler
            logp_NL = logprobs(policy, probes, micro_batch, ranks)
        pieces.append(torch.zeros_like(part.logp_BL).index_add(0, probes.trace_N, logp_NL.to(part.logp_BL.dtype)))
    return torch.cat(pieces)


def sampled_logp(trace: Trace) -> float:
    """The mean of the sampler's log-probabilities over all sampled tokens."""
    return float(trace.logp_BL[trace.filled_BL].mean())


def random_share(trace: Trace, share: float, rng: torch.Generator) -> Trace:
    """A random share of the traces, at least one."""
    count = max(1, round(share * len(trace)))
    return select_traces(trace, torch.randperm(len(trace), generator=rng)[:count].to(trace.group_B.device))


def scorer_gap(policy: Policy, trace: Trace, rng: torch.Generator, ranks: Ranks = ALONE) -> float:
    """Mean |log p_scored - log p_sampled| at one visited state of a few traces. It is rounding if sampler and scorer
    are the same policy. The loss of the first inner step cannot show a gap: its ratio is exactly 1."""
    some = random_share(trace, min(1.0, CHECKED / len(trace)), rng)
    place_B1 = torch.multinomial(some.filled_BL.double().cpu(), 1, generator=rng).to(some.step_BL.device)
    step_B1 = some.step_BL.gather(1, place_B1)
    probes = visited(some, step_B1, torch.ones_like(step_B1, dtype=torch.float64))
    scored_NL = logprobs(policy, probes, MicroBatch(CHECKED), replace(ranks, sharded=False))
    apart_NL = (scored_NL - some.logp_BL[probes.trace_N].to(scored_NL.dtype)).abs()
    return float(apart_NL[probes.asked_NL].mean())


def mismatch_metrics(trace: Trace, exact_BL: Tensor) -> dict[str, float]:
    """Mean and largest |log p_sampled - log p_exact| over the sampled tokens."""
    apart = (trace.logp_BL - exact_BL).abs()[trace.filled_BL]
    return {"train/cache_mismatch": float(apart.mean()), "train/cache_mismatch_max": float(apart.max())}


def truncated_weights(trace: Trace, exact_BL: Tensor, limit: float) -> Tensor:
    """min(limit, p_exact / p_sampled) of every token, (B, L); 1 where nothing was drawn.

    Each weight corrects the draw of its token given the state; later states still come from the sampler. So the
    bias shrinks but does not vanish (from 50 % to 1.4 % in a world of two positions), as with other truncated
    token-level importance sampling. The product over a trace would be unbiased, with unbounded variance.
    """
    return (exact_BL - trace.logp_BL).masked_fill(~trace.filled_BL, 0.0).exp().clamp(max=limit)
