"""The choice of positions: which draws a step would have kept instead, and the probability that there was none
(docs/estimators.md).
"""

import torch
from torch import Tensor

from unmask.core.answers import FLOOR
from unmask.core.order import low_confidence, score_threshold
from unmask.core.shapes import GIVEN
from unmask.core.token_sampling import kept_tokens, restricted_logprobs, tempered_logprobs, token_logprobs
from unmask.core.trace import Trace


def cut(score_NL: Tensor, column_NL: Tensor, trace: Trace) -> tuple[Tensor, Tensor]:
    """What a draw must rank below to be passed over, (N,): a score, and the column at which an equal score ranks level.

    score_NL    scores of the kept draws, inf elsewhere; a row is a step

    It is the lexicographic minimum of (score, -column) over the kept draws. By threshold it is the threshold, which
    ranks below every draw that reaches it, unless the step kept the surest draws because too few did.
    """
    least_N = score_NL.min(-1).values
    place_N = torch.where(score_NL == least_N[:, None], column_NL, GIVEN).max(-1).values
    if trace.threshold is not None:
        level = score_threshold(low_confidence, trace.threshold)
        more_N = (score_NL < torch.inf).sum(-1) > trace.min_per_step  # all reached the threshold when they were drawn
        reached_N = (least_N >= level) | more_N | (trace.order == "left_to_right")
        place_N = place_N.masked_fill(reached_N, torch.iinfo(place_N.dtype).max)
        least_N = least_N.masked_fill(reached_N, level)
    return least_N, place_N


def outranking(score_QV: Tensor, least_Q: Tensor, level_Q: Tensor) -> Tensor:
    """The tokens whose draw a step would have kept. `level_Q`: also those whose score is equal to the cut's."""
    return (score_QV > least_Q[:, None]) | ((score_QV == least_Q[:, None]) & level_Q[:, None])


def log_mass_below(logits_QV: Tensor, trace: Trace, least_Q: Tensor, level_Q: Tensor) -> tuple[Tensor]:
    """log F_j(c): the mass of the draws that rank below the cut; FLOOR if there is none."""
    plain_QV = token_logprobs(logits_QV, trace.mask_id)
    return _log_mass(plain_QV, trace, ~outranking(plain_QV.detach(), least_Q, level_Q))


def log_mass_outside(logits_QV: Tensor, trace: Trace, count_Q: Tensor) -> tuple[Tensor]:
    """log F_j(c) if the `count_Q` likeliest tokens of a position outrank the cut: that many, also among equal ones."""
    plain_QV = token_logprobs(logits_QV, trace.mask_id)
    most = int(count_Q.max()) if len(count_Q) else 0
    first_QK = plain_QV.detach().topk(most).indices
    below_QK = torch.arange(most, device=count_Q.device) >= count_Q[:, None]
    return _log_mass(plain_QV, trace, torch.ones_like(plain_QV, dtype=torch.bool).scatter(-1, first_QK, below_QK))


def _log_mass(plain_QV: Tensor, trace: Trace, below_QV: Tensor) -> tuple[Tensor]:
    logq_QV = tempered_logprobs(plain_QV, trace.sampling.temperature)
    if trace.sampling.truncated:
        logq_QV = restricted_logprobs(logq_QV, kept_tokens(logq_QV.detach(), trace.sampling))
    below_QV = below_QV & (logq_QV.detach() > -torch.inf)
    possible_Q = below_QV.any(-1)
    logq_QV = torch.where(below_QV, logq_QV, -torch.inf)
    safe_QV = torch.where(possible_Q[:, None], logq_QV, 0.0)  # an empty sum would poison the gradient
    return (torch.where(possible_Q, safe_QV.logsumexp(-1), FLOOR),)
