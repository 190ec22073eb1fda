"""DACA-GRPO (arXiv 2605.16342): Stratified Masking Likelihood and Denoising Progress Scores, for any base.

We have only the abstract, and no code. It says: SML "partitions token positions into strata so that each token is
predicted with most of the sequence as context"; DPS "extract per-token importance weights from intermediate
predictions at no additional forward cost". The formulas below are this project's reading of that.

SML replaces the base's likelihood estimator:

    the canvas is partitioned into K strata S_1 .. S_K
    l_i = anchor * log p(o_i | q, all of o masked) + (1 - anchor) * log p(o_i | q, o without S_k),   i in S_k

DPS replaces the base's uniform credit, with what the rollout's own forwards predicted:

    delta_t = mean over the still masked i of [ b_{t+1}(i) - b_t(i) ]      progress made by step t
              likelihood  b_t(i) = log p(o_i | s_t)        agreement   b_t(i) = 1{argmax p(. | s_t, i) = o_i}
              confidence  b_t(i) = max_v p(v | s_t, i)     (own progress: b at i's own step minus at the first)
    z_t = (delta_t - mean) / std over the scope;  0 where undefined: the last step of a block
    w_i = clip(1 + strength * z_{step of i}, 0.2, 5), then mean one over the counted tokens of the trace

On a sequence-level base the weight is in the exponent, on wd1 and SPG inside the likelihood: our choice. AGRPO is
defined by the states it asks at, which SML would replace: on it `daca` means DPS only and `sml` is an error.

The defaults: with most of the sequence visible nearly every token is certain, so a negative advantage pushes on
near-certain tokens at states the sampler never visits, and plain SML with both signs collapses. So by default negative
advantages count nothing. Half of the weight is on the fully masked state, where a rollout begins: without it DACA loses
points in some seeds of a language model (docs/methods/daca.md). `negative` scales the negative advantages;
`exact_negative` adds them at visited states, where the likelihood is exact, as AGRPO's term on the tokens that the base
counts:

    loss = base with SML and max(A, 0) + negative * min(A, 0)   +   exact_negative * AGRPO with min(A, 0)

The KL to the reference is taken on SML's likelihood too, so its weight is an option of the plug-in and replaces the
base's. 0.1.0 and 0.2.0 used both signs (negative = 1), an anchor of 0.5 and a KL of at least 0.05 to stay stable.

SML is exact when the tokens are independent given the prompt. If the policy's conditionals come from one joint
distribution, L strata overestimate log-likelihoods on average and mean field underestimates them: sum_i H(x_i | x_-i)
<= H(x) <= sum_i H(x_i). For other numbers of strata, or if the conditionals do not agree, either sign can occur
(tests/test_bias.py). With negative = 1, one stratum with anchor 0 reduces to diffu_grpo without prompt masking, and L
strata to the pseudo-likelihood (leave one out); strength 0 reduces to the base; all bit for bit. DPS depends on what
was drawn: it is a shaped credit, and the update is not the gradient of an objective.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from unmask.core.advantage import EPSILON, Advantage, group_sum
from unmask.core.credit import check_uniform_credit, shuffled_steps, step_sums
from unmask.core.method import Method, Term, check_functions, check_range, each_inner_step
from unmask.core.shapes import GIVEN
from unmask.core.specs import Record
from unmask.core.strata import STRATA, Layout, random_strata, stratified
from unmask.core.trace import Trace
from unmask.methods.agrpo import agrpo
from unmask.methods.positive import positive

# Denoising Progress Scores


class Beliefs(NamedTuple):
    """What the rollout predicted at each step for the W positions of the block it was filling."""

    final_TBW: Tensor
    """Log-probability of the token finally written; that of the k-th recorded token if it was not in the top k."""
    agreed_TBW: Tensor
    """1 if the likeliest token is the one finally written."""
    top_TBW: Tensor
    """The largest probability."""
    masked_TBW: Tensor
    """Positions still masked, in rows still live, that were filled in the end."""
    first_BK: Tensor
    """The column at which each of K blocks was recorded."""
    block_T: Tensor
    """The block of each step."""


def beliefs(trace: Trace) -> Beliefs:
    """The recorded top-k predictions, looked up at the tokens finally written."""
    if "step_top_id" not in trace.seen:
        raise ValueError("DPS reads the predictions of the rollout: sample with request=method.request")
    id_TBWK, logp_TBWK = trace.seen["step_top_id"], trace.seen["step_top_logp"]
    width = id_TBWK.shape[2]
    length = int((trace.block_BL[0] != GIVEN).sum())
    # A block-causal model has one block more: a prompt can end inside a block.
    blocks = length // width if trace.causal_block is None else (length + width - 2) // width + 1
    block_T = torch.arange(trace.steps, device=id_TBWK.device) * blocks // trace.steps
    block_BCK = trace.block_BL[:, -length:, None] < torch.arange(blocks, device=block_T.device)
    first_BK = trace.tokens_BL.shape[1] - length + block_BCK.sum(1).clamp(max=length - width)
    column_TBW = first_BK.T[block_T][..., None] + torch.arange(width, device=id_TBWK.device)
    row_B1 = torch.arange(len(trace), device=id_TBWK.device)[:, None]
    token_TBW, filled_TBW = trace.tokens_BL[row_B1, column_TBW], trace.filled_BL[row_B1, column_TBW]
    written_TBWK = id_TBWK == token_TBW[..., None]
    logp_TBW = logp_TBWK.masked_fill(~written_TBWK, -torch.inf).max(-1).values
    return Beliefs(
        final_TBW=torch.where(written_TBWK.any(-1), logp_TBW, logp_TBWK[..., -1]),
        agreed_TBW=written_TBWK[..., 0].to(logp_TBWK.dtype),
        top_TBW=logp_TBWK[..., 0].exp(),
        masked_TBW=(id_TBWK[..., 0] >= 0) & filled_TBW,
        first_BK=first_BK,
        block_T=block_T,
    )


class StepProgress(NamedTuple):
    """A score for every canvas position, (B, L), and at which positions it is defined."""

    score_BL: Tensor
    defined_BL: Tensor


Variant = Callable[[Trace], StepProgress]


def _step_progress(trace: Trace, belief_TBW: Tensor, seen: Beliefs) -> StepProgress:
    """delta_t of the step that filled each position."""
    same_T = seen.block_T[1:] == seen.block_T[:-1]
    rest_TBW = seen.masked_TBW[1:] & seen.masked_TBW[:-1] & same_T[:, None, None]
    count_TB = rest_TBW.sum(-1)
    gain_TBW = (belief_TBW[1:] - belief_TBW[:-1]).masked_fill(~rest_TBW, 0.0)
    delta_TB = gain_TBW.sum(-1) / count_TB.clamp(min=1)
    step_BL = torch.where(trace.filled_BL, trace.step_BL, trace.steps - 1)
    blank_B1 = delta_TB.new_zeros(1, delta_TB.shape[1])  # the last step of all: undefined
    score_BL = torch.cat([delta_TB, blank_B1]).T.gather(1, step_BL)
    defined_BL = torch.cat([count_TB > 0, blank_B1 > 0]).T.gather(1, step_BL)
    return StepProgress(score_BL, defined_BL & trace.filled_BL)


def likelihood_progress(trace: Trace) -> StepProgress:
    """How much a step raised the log-probability of what will be written at the remaining positions (the default)."""
    seen = beliefs(trace)
    return _step_progress(trace, seen.final_TBW, seen)


def agreement_progress(trace: Trace) -> StepProgress:
    """How much a step raised the share of the remaining positions that predict what will be written."""
    seen = beliefs(trace)
    return _step_progress(trace, seen.agreed_TBW, seen)


def confidence_progress(trace: Trace) -> StepProgress:
    """How much a step raised the largest probability at the remaining positions, right or wrong."""
    seen = beliefs(trace)
    return _step_progress(trace, seen.top_TBW, seen)


def own_progress(trace: Trace) -> StepProgress:
    """How much likelier a token was when written than at the first step of its block."""
    seen = beliefs(trace)
    step_BL = torch.where(trace.filled_BL, trace.step_BL, 0)
    block_BL = torch.where(trace.filled_BL, trace.block_BL, 0)
    first_BL = block_BL * (trace.steps // seen.first_BK.shape[1])
    place_L = torch.arange(step_BL.shape[1], device=step_BL.device)
    place_BL = torch.where(trace.filled_BL, place_L - seen.first_BK.gather(1, block_BL), 0)
    row_B1 = torch.arange(len(trace), device=step_BL.device)[:, None]
    score_BL = seen.final_TBW[step_BL, row_B1, place_BL] - seen.final_TBW[first_BL, row_B1, place_BL]
    return StepProgress(score_BL.masked_fill(~trace.filled_BL, 0.0), trace.filled_BL)


VARIANTS: dict[str, Variant] = {
    "likelihood": likelihood_progress,
    "agreement": agreement_progress,
    "confidence": confidence_progress,
    "own": own_progress,
}

Scope = Callable[[Trace], Tensor]
"""Which traces a score is standardised over: equal numbers are one scope, (B,)."""


def rollout_scope(trace: Trace) -> Tensor:
    """Each trace by itself."""
    return torch.arange(len(trace), device=trace.group_B.device)


def group_scope(trace: Trace) -> Tensor:
    """All traces of a group."""
    return trace.group_B


def batch_scope(trace: Trace) -> Tensor:
    """The whole batch."""
    return torch.zeros_like(trace.group_B)


SCOPES: dict[str, Scope] = {"rollout": rollout_scope, "group": group_scope, "batch": batch_scope}


def standardised(progress: StepProgress, trace: Trace, scope: Scope) -> Tensor:
    """z of each position's score; every (trace, step) with a defined score has weight one."""
    score_BL, defined_BL = progress
    step_BL = torch.where(trace.filled_BL, trace.step_BL, 0)
    size_BT = step_sums(torch.ones_like(trace.logp_BL), trace)
    weight_BL = defined_BL / size_BT.gather(1, step_BL).clamp(min=1)
    scope_B = scope(trace)
    count_B = group_sum(weight_BL.sum(-1), scope_B).clamp(min=1e-12)
    mean_B = group_sum((weight_BL * score_BL).sum(-1), scope_B) / count_B
    centred_BL = (score_BL - mean_B[:, None]) * defined_BL
    variance_B = group_sum((weight_BL * centred_BL**2).sum(-1), scope_B) / count_B
    return centred_BL / (variance_B.sqrt() + EPSILON)[:, None]


def progress_credit(
    trace: Trace,
    strength: float = 0.1,
    variant: Variant = likelihood_progress,
    scope: Scope = group_scope,
    smallest: float = 0.2,
    largest: float = 5.0,
    shuffled: bool = False,
) -> Tensor:
    """DPS: w = clip(1 + strength * z, smallest, largest), mean one over the counted tokens of each trace."""
    z_BL = standardised(variant(trace), trace, scope)
    if shuffled:
        z_BL = shuffled_steps(z_BL, trace)
    weight_BL = (1 + strength * z_BL).clamp(smallest, largest)
    counted_BL = trace.counted_BL.to(weight_BL.dtype)
    mean_B1 = (weight_BL * counted_BL).sum(-1, keepdim=True) / counted_BL.sum(-1, keepdim=True).clamp(min=1)
    return weight_BL / torch.where(mean_B1 > 0, mean_B1, 1.0)


# Plug-ins

ANCHOR = 0.5
"""The default share of the fully masked view."""


def negative_part(reward_B: Tensor, group_B: Tensor, advantage: Advantage) -> Tensor:
    """min(A, 0)."""
    return advantage(reward_B, group_B).clamp(max=0)


def sml(
    base: Method,
    strata: int = STRATA,
    layout: Layout = random_strata,
    anchor: float = ANCHOR,
    kl: float = 0.0,
    negative: float = 0.0,
    exact_negative: float = 0.0,
) -> Method:
    """Score each token with most of the sequence as context, in answers above the group's baseline."""
    check_range(0, inf, kl=kl, exact_negative=exact_negative)
    check_functions(layout=layout)
    if base.trajectory:
        instead = f"use --with dps (or daca, which means DPS alone on {base.name})"
        instead = instead if base.values is None else "leave out sml"
        instead += ", or leave out raft.states" if base.name.partition("+")[0] == "raft" else ""
        raise ValueError(f"{base.name} is defined by the states it asks at, which SML would replace: {instead}")
    right_B, group_B = torch.tensor([1.0, 0.0]), torch.zeros(2, dtype=torch.long)
    if (negative or exact_negative) and not negative_part(right_B, group_B, base.advantage).any():
        raise ValueError(
            f"{base.name} has no negative advantages, so negative and exact_negative would do nothing: leave them out, "
            "or take another base, e.g. --method diffu_grpo"
        )
    estimator = partial(stratified, strata=strata, layout=layout, anchor=anchor)
    method = replace(base, probe=each_inner_step(estimator), kl=kl)
    method = method if negative == 1 else positive(method, negative)
    if exact_negative:
        exact = agrpo()
        term = Term(
            probe=exact.probe,
            advantage=partial(negative_part, advantage=base.advantage),
            objective=exact.objective,
            weight=exact_negative,
            skip_zero_advantage=exact.skip_zero_advantage,
            label="negative_",
        )
        method = replace(method, further=(*base.further, term))
    return replace(method, name=f"{base.name}+sml")


def dps(
    base: Method,
    strength: float = 0.1,
    variant: Variant = likelihood_progress,
    scope: Scope = group_scope,
    smallest: float = 0.2,
    largest: float = 5.0,
    shuffled: bool = False,
    top: int = 32,
) -> Method:
    """Weight tokens by the progress of their step, from the rollout's own predictions."""
    check_range(0, inf, strength=strength, largest=largest)
    check_range(0, 1, smallest=smallest)
    check_functions(variant=variant, scope=scope)
    check_uniform_credit(base, "DPS")
    if top < 1:
        raise ValueError(f"top={top} must be at least 1: DPS reads the recorded predictions")
    if shuffled and variant is own_progress:
        raise ValueError("shuffled permutes the scores of steps, and variant=own has one for each token")
    credit = partial(
        progress_credit,
        strength=strength,
        variant=variant,
        scope=scope,
        smallest=smallest,
        largest=largest,
        shuffled=shuffled,
    )
    return replace(base, name=f"{base.name}+dps", credit=credit, record=base.record | Record(top=top))


def daca(
    base: Method,
    strata: int = STRATA,
    layout: Layout = random_strata,
    anchor: float = ANCHOR,
    kl: float = 0.0,
    negative: float = 0.0,
    exact_negative: float = 0.0,
    strength: float = 0.1,
    variant: Variant = likelihood_progress,
    scope: Scope = group_scope,
    smallest: float = 0.2,
    largest: float = 5.0,
    shuffled: bool = False,
    top: int = 32,
) -> Method:
    """SML and DPS together: tokens scored in context and weighted by progress. On a base that is defined by its states,
    such as AGRPO, DPS alone."""
    check_uniform_credit(base, "DPS")
    if base.trajectory:
        # An anchor of 0 was the default for a while, so run folders state it.
        if (strata, layout, anchor or ANCHOR, kl, negative, exact_negative) != (STRATA, random_strata, ANCHOR, 0, 0, 0):
            raise ValueError(
                f"on {base.name} daca is DPS alone: strata, layout, anchor, kl, negative and exact_negative have no "
                "place there"
            )
        scored = base
    else:
        scored = sml(base, strata, layout, anchor, kl, negative, exact_negative)
    credited = dps(scored, strength, variant, scope, smallest, largest, shuffled, top)
    return replace(credited, name=f"{base.name}+daca")
