"""How far a rollout with a cache is from the policy it stands for, and weights that make up for it.

A cached pass takes keys and values from an earlier canvas, so a token is drawn from a neighbouring law. Replaying the
visited states without a cache gives its log-probability under the policy itself.
"""

import torch
from torch import Tensor

from unmask.models.policy import Policy
from unmask.probes import every_step
from unmask.ranks import ALONE, Ranks
from unmask.rows import Rows
from unmask.trace import Trace, selected
from unmask.update import answers


def replayed(policy: Policy, trace: Trace, rows: Rows, ranks: Ranks = ALONE) -> Tensor:
    """Log-probability of every token at the state it was drawn at, without a cache, (B, L); 0 where nothing was drawn.

    One pass for every row and step: as much as rolling out without a cache.
    """
    probes = every_step(trace, torch.Generator())
    logp_NL = answers(policy, probes, rows, ranks)
    return torch.zeros_like(trace.logp_BL).index_add(0, probes.trace_N, logp_NL.to(trace.logp_BL.dtype))


def random_share(trace: Trace, share: float, rng: torch.Generator) -> Trace:
    """A random share of the rows, one at least."""
    count = max(1, round(share * len(trace)))
    return selected(trace, torch.randperm(len(trace), generator=rng)[:count].to(trace.group_B.device))


def mismatch_metrics(trace: Trace, exact_BL: Tensor) -> dict[str, float]:
    """Mean and largest |log p_cached - log p_exact| over the tokens that were drawn."""
    apart = (trace.logp_BL - exact_BL).abs()[trace.filled_BL]
    return {"train/cache_mismatch": float(apart.mean()), "train/cache_mismatch_max": float(apart.max())}


def truncated_weights(trace: Trace, exact_BL: Tensor, limit: float) -> Tensor:
    """min(limit, p_exact / p_sampled) of every token, (B, L); 1 where nothing was drawn.

    With limit infinity the weighted sum over a step's tokens is unbiased for the policy; the limit bounds the variance.
    """
    return (exact_BL - trace.logp_BL).masked_fill(~trace.filled_BL, 0.0).exp().clamp(max=limit)
