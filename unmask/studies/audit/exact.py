"""The probability that the sampler writes a completion, summed over every order in which it can do so.

A state on the way to a completion o is the set of positions that are filled: their tokens are those of o. So

    alpha_0(nothing) = 1,    alpha_{t+1}(S) = sum over the S' = S without K of alpha_t(S') * P(step t commits K | S')
    log pi(o | q) = log alpha_T(everything)

K runs over the sets of the step's size. With q_j the distribution at position j, s_j(v) the score by which a draw v is
ranked there, C the masked positions of the block, and c the least (s_i(o_i), -i) over K (docs/estimators.md):

    P(K | S') = prod over K of q_i(o_i) * prod over C without K of  F_j(c),   F_j(c) = P((s_j(v), -j) < c),  v ~ q_j

for every order that ranks by the policy's output or by place (if the draw does not matter, F is 0 or 1), and
prod over K of q_i(o_i) / C(|C|, |K|) for the random one. Blocks follow one another: the end of one is a single state.

States whose alpha is below `tolerance` times the probability of the order that was actually taken, itself one of the
terms, are dropped. The error is at most the sum of their alphas, since what follows has at most probability one:
`slack`.

Everything is differentiable if gradients are enabled. A step's passes are recomputed in the backward pass, so memory
has the states and no activations.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from math import comb, log
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from unmask.core.order import Order, StepLogits, drawn_confidence, low_confidence, random
from unmask.core.policy import Policy
from unmask.core.token_sampling import sampling_logprobs, token_logprobs
from unmask.core.trace import Trace, select_traces
from unmask.rollout.decoding import Decoding
from unmask.util.micro_batch import MicroBatch

WIDEST = 40
"""Positions of a block: sets of them are numbered."""
MOST_SETS = 20_000
"""Sets a step may choose from."""
MOST_CELLS = 2**23
"""States times sets times positions in memory at a time."""

_BY_DRAW: dict[Order, Callable[[StepLogits], Tensor]] = {
    low_confidence: lambda logits: logits.plain_QV,
    drawn_confidence: lambda logits: logits.logq_QV,
}
"""Orders that rank a position by what was drawn there: the score of every token, (Q, V)."""


class OrderSum(NamedTuple):
    logp_B: Tensor
    """log pi(o | q) of every trace."""
    path_B: Tensor
    """The log-probability of the order that was actually taken, choice of positions included."""
    slack: float
    """The most by which any `logp_B` may be too low, in nats."""
    states: int
    """Masked states at which the policy was asked."""


class TooManyStates(Exception):
    """The sum needs more states than allowed."""


def can_sum_orders(decoding: Decoding) -> bool:
    """Whether the sum is possible: a fixed number of positions per step, few enough sets of them to list, and blocks
    that begin in the same column in every row and see the whole canvas."""
    if decoding.threshold is not None or decoding.block > WIDEST:
        return False
    if decoding.causal_block is not None or decoding.append:
        return False
    for sizes in decoding.schedule(decoding.length, decoding.steps, decoding.block):
        left = decoding.block
        for size in sizes:
            if comb(left, size) > MOST_SETS:
                return False
            left -= size
    return True


def sum_over_orders(
    policy: Policy,
    trace: Trace,
    decoding: Decoding,
    micro_batch: MicroBatch,
    most: float = torch.inf,
    tolerance: float = 1e-6,
) -> OrderSum:
    """log pi(o | q) of every trace; TooManyStates if the policy would be asked at more than `most` states."""
    path = _OrderWalk(policy, trace, decoding, micro_batch, most)
    with torch.no_grad():
        path_B, _ = path.walk(None)
    canvas_BL = torch.cat([trace.tokens_BL, trace.attended_BL.long()], 1)
    _, same_B = canvas_BL.unique(dim=0, return_inverse=True)  # traces that wrote the same have the same probability
    one_U = torch.zeros(int(same_B.max()) + 1, dtype=torch.long, device=same_B.device)
    one_U[same_B] = torch.arange(len(trace), device=same_B.device)
    best_U = path_B.new_zeros(len(one_U)).scatter_reduce(0, same_B, path_B, "amax", include_self=False)
    orders = _OrderWalk(policy, select_traces(trace, one_U), decoding, micro_batch, most - path.asked)
    logp_U, lost_U = orders.walk(best_U + log(tolerance))
    slack = float((torch.logaddexp(logp_U, lost_U) - logp_U).detach().max())
    return OrderSum(logp_U[same_B], path_B, slack, path.asked + orders.asked)


@dataclass(frozen=True)
class _Front:
    """States reached after a step, of all traces."""

    trace_F: Tensor
    filled_FW: Tensor
    """Which positions of the block."""
    logp_F: Tensor

    def only(self, kept_F: Tensor) -> "_Front":
        return _Front(self.trace_F[kept_F], self.filled_FW[kept_F], self.logp_F[kept_F])


class _OrderWalk:
    """From masks to given completions, step by step."""

    def __init__(self, policy: Policy, trace: Trace, decoding: Decoding, micro_batch: MicroBatch, most: float) -> None:
        self.policy, self.trace, self.decoding, self.micro_batch, self.most = policy, trace, decoding, micro_batch, most
        self.start = trace.tokens_BL.shape[1] - decoding.length
        self.asked = 0

    def walk(self, floor_B: Tensor | None) -> tuple[Tensor, Tensor]:
        """log alpha of the finished canvases and of all states dropped below the floor, (B,) each.

        Without a floor only the order that each trace took is followed.
        """
        trace, width = self.trace, self.decoding.block
        commits = self.decoding.schedule(self.decoding.length, self.decoding.steps, width)
        first_B = torch.arange(len(trace), device=trace.tokens_BL.device)
        blank = torch.zeros(len(trace), width, dtype=torch.bool, device=first_B.device)
        front = _Front(first_B, blank, torch.zeros_like(first_B, dtype=torch.float64))
        finished, lost, step = [front.only(first_B[:0])], [front.only(first_B[:0])], 0
        for number, sizes in enumerate(commits):
            first = self.start + number * width
            target_BW = trace.filled_BL[:, first : first + width]
            further_B = trace.filled_BL[:, first + width :].any(-1)
            front = replace(front, filled_FW=torch.zeros_like(front.filled_FW))
            for size in sizes:
                if size and len(front.trace_F):
                    front = self._step(front, number, size)
                    if floor_B is None:
                        own_BW = target_BW & (trace.step_BL[:, first : first + width] <= step)
                        front = front.only((front.filled_FW == own_BW[front.trace_F]).all(-1))
                    else:
                        low_F = front.logp_F < floor_B[front.trace_F]
                        lost.append(front.only(low_F))
                        front = front.only(~low_F)
                    whole_F = (front.filled_FW == target_BW[front.trace_F]).all(-1)
                    done_F = whole_F & ~further_B[front.trace_F]
                    finished.append(front.only(done_F))
                    token_FW = trace.tokens_BL[front.trace_F, first : first + width]
                    unbroken_FW = front.filled_FW.long().cumprod(-1).bool()
                    ended_F = (unbroken_FW & (token_FW == trace.eos_id)).any(-1)
                    front = front.only(~done_F & ~ended_F)
                step += 1
        return _trace_log_sums(finished, len(trace)), _trace_log_sums(lost, len(trace))

    def _step(self, front: _Front, number: int, size: int) -> _Front:
        """All states that a step can reach, equal ones merged."""
        first, width = self.start + number * self.decoding.block, self.decoding.block
        state_FL = self.trace.tokens_BL[front.trace_F].clone()
        state_FL[:, first + width :] = self.trace.mask_id
        state_FL[:, first : first + width].masked_fill_(~front.filled_FW, self.trace.mask_id)
        asked_FL = torch.cat([state_FL, self.trace.attended_BL[front.trace_F].long()], 1)
        _, number_F = asked_FL.unique(dim=0, return_inverse=True)  # siblings often share a state
        count = int(number_F.max()) + 1
        self.asked += count
        if self.asked > self.most:
            raise TooManyStates
        parts, left = [], int((~front.filled_FW[0]).sum())
        chunk = max(1, min(self.micro_batch.size, MOST_CELLS // (left * comb(left, size))))
        for start in range(0, count, chunk):
            index_G = ((number_F >= start) & (number_F < start + chunk)).nonzero().squeeze(1)
            some, state_GL, number_G = front.only(index_G), state_FL[index_G], number_F[index_G] - start
            step = partial(checkpoint, self._successors, use_reentrant=False, preserve_rng_state=False)
            parts.append(step(some, state_GL, number_G, first, size))
        trace_H, filled_HW, logp_H = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return _merge_equal(trace_H, filled_HW, logp_H)

    def _successors(
        self, front: _Front, state_FL: Tensor, number_F: Tensor, first: int, size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The states that a step reaches from some states, with their log-probabilities: one row for every set."""
        trace, left = self.trace, int((~front.filled_FW[0]).sum())
        place_FM = (~front.filled_FW).nonzero()[:, 1].view(-1, left)
        states = int(number_F.max()) + 1
        member_U = torch.zeros(states, dtype=torch.long, device=number_F.device)
        member_U[number_F] = torch.arange(len(number_F), device=number_F.device)
        column_UM = first + place_FM[member_U]
        offset_U1 = torch.arange(states, device=number_F.device)[:, None] * state_FL.shape[1]
        attended_UL = trace.attended_BL[front.trace_F[member_U]]
        logits_QV = self.policy(
            state_FL[member_U], None if attended_UL.all() else attended_UL, (offset_U1 + column_UM).flatten()
        )
        plain_QV = token_logprobs(logits_QV, trace.mask_id)
        logq_QV, _ = sampling_logprobs(plain_QV, trace.sampling)
        token_FM = trace.tokens_BL[front.trace_F[:, None], first + place_FM]
        row_FM = number_F[:, None] * left + torch.arange(left, device=number_F.device)
        logq_FM = logq_QV.double()[row_FM, token_FM]
        order, ways = self.decoding.order, comb(left, size)
        set_XK = torch.tensor(list(combinations(range(left), size)), device=number_F.device)
        if order is random:
            logp_FX = logq_FM[:, set_XK].sum(-1) - log(ways)
            chosen_FXK = place_FM[:, set_XK]
        else:
            column_Q, nothing_Q = column_UM.flatten(), torch.zeros(plain_QV.shape[0], device=plain_QV.device)
            logits = StepLogits(plain_QV.detach(), logq_QV.detach(), nothing_Q.long(), nothing_Q, column_Q)
            score_QV = _BY_DRAW[order](logits) if order in _BY_DRAW else order(logits)[:, None].expand_as(plain_QV)
            logp_FX, chosen_FXK = _set_logprobs(score_QV, logq_QV, row_FM, token_FM, logq_FM, place_FM, set_XK)
        logp_FX = front.logp_F[:, None] + logp_FX
        led_F, led_X = (logp_FX > -torch.inf).nonzero(as_tuple=True)
        filled_HW = front.filled_FW[led_F].scatter(1, chosen_FXK[led_F, led_X], True)
        return front.trace_F[led_F], filled_HW, logp_FX[led_F, led_X]


def _set_logprobs(
    score_QV: Tensor,
    logq_QV: Tensor,
    row_FM: Tensor,
    token_FM: Tensor,
    logq_FM: Tensor,
    place_FM: Tensor,
    set_XK: Tensor,
) -> tuple[Tensor, Tensor]:
    """log P(K) of every set of positions, (F, X), and the sets, (F, X, K); all other draws rank below them."""
    score_FM = score_QV[row_FM, token_FM]
    rank_FM = score_FM.sort(dim=-1, descending=True, stable=True).indices  # ties to the left
    score_FM, logq_FM, place_FM, row_FM = (x.gather(1, rank_FM) for x in (score_FM, logq_FM, place_FM, row_FM))
    rising_QV, at_QV = score_QV.sort(-1)
    mass_QV = logq_QV.double().exp().gather(-1, at_QV).cumsum(-1)
    mass_QV = torch.cat([torch.zeros_like(mass_QV[:, :1]), mass_QV], -1).clamp(max=1.0)

    # F of position j (last) under the draw of position i (middle) as the least of the kept
    bound_FMM = score_FM[:, :, None].expand(-1, -1, score_FM.shape[1]).transpose(1, 2).contiguous()
    rising_FMV = rising_QV[row_FM].contiguous()
    below, upto = (torch.searchsorted(rising_FMV, bound_FMM, right=right) for right in (False, True))
    right_of_FMM = place_FM[:, :, None] > place_FM[:, None, :]
    under_FMM = _log(mass_QV[row_FM].gather(-1, torch.where(right_of_FMM, upto, below))).transpose(1, 2)

    kept_XM = torch.zeros(len(set_XK), score_FM.shape[1], dtype=torch.bool, device=set_XK.device)
    kept_XM.scatter_(1, set_XK, True)
    passed_FX = under_FMM[:, set_XK[:, -1]].masked_fill(kept_XM, 0.0).sum(-1)
    return logq_FM[:, set_XK].sum(-1) + passed_FX, place_FM[:, set_XK]


def _merge_equal(trace_H: Tensor, filled_HW: Tensor, logp_H: Tensor) -> _Front:
    """Equal states of equal traces as one, their probabilities added."""
    bit_W = 2 ** torch.arange(filled_HW.shape[1], device=trace_H.device)
    code_H = trace_H * 2 ** filled_HW.shape[1] + (filled_HW * bit_W).sum(-1)
    code_F, index_H = code_H.unique(return_inverse=True)
    logp_F = _log_sums(logp_H, index_H, len(code_F))
    bits_F = code_F % 2 ** filled_HW.shape[1]
    return _Front(code_F // 2 ** filled_HW.shape[1], (bits_F[:, None] & bit_W) > 0, logp_F)


def _trace_log_sums(fronts: list[_Front], count: int) -> Tensor:
    """log of the sum, trace by trace, (count,)."""
    logp_H, trace_H = (torch.cat(parts) for parts in zip(*((f.logp_F, f.trace_F) for f in fronts), strict=True))
    return _log_sums(logp_H, trace_H, count)


def _log(x: Tensor) -> Tensor:
    """log, with gradient 0 where it is -inf."""
    return torch.where(x > 0, x, 1.0).log().masked_fill(x <= 0, -torch.inf)


def _log_sums(logp_H: Tensor, index_H: Tensor, count: int) -> Tensor:
    """log of the sum of exp over equal indices, (count,); -inf for an empty sum."""
    most = torch.full((count,), -torch.inf, dtype=logp_H.dtype, device=logp_H.device)
    most = most.scatter_reduce(0, index_H, logp_H.detach(), "amax")
    level = torch.where(most > -torch.inf, most, 0.0)
    return _log(torch.zeros_like(most).index_add(0, index_H, (logp_H - level[index_H]).exp())) + level
