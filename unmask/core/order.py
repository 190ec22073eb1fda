"""Which masked positions a step commits: an order scores them; the largest come first, ties to the left."""

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class StepLogits(NamedTuple):
    """What an order sees at a step: the policy's distributions at Q masked positions of several rows."""

    plain_QV: Tensor
    """Log-probabilities at temperature 1."""
    logq_QV: Tensor
    """Log-probabilities tempered and truncated: what the tokens are drawn from; greedy: those at temperature 1."""
    token_Q: Tensor
    """A token drawn at every position."""
    noise_Q: Tensor
    """A uniform for every position, independent of the draws."""
    column_Q: Tensor
    """The column on the canvas."""


Order = Callable[[StepLogits], Tensor]
"""Scores, (Q,)."""


def random(logits: StepLogits) -> Tensor:
    """Positions in uniformly random order, independent of the policy."""
    return logits.noise_Q


def left_to_right(logits: StepLogits) -> Tensor:
    """The leftmost masked position of the block first."""
    return -logits.column_Q.float()


def surest_position(logits: StepLogits) -> Tensor:
    """Positions of largest maximal probability first, independent of the draws."""
    return logits.plain_QV.max(-1).values


def low_confidence(logits: StepLogits) -> Tensor:
    """The field's default ("low-confidence remasking"): draw everywhere, keep the draws of largest probability.

    A kept token is then not distributed as the policy's own tokens at its position: see probes.visited.
    """
    return logits.plain_QV.gather(-1, logits.token_Q[:, None]).squeeze(-1)


def drawn_confidence(logits: StepLogits) -> Tensor:
    """low_confidence by the distribution that was drawn from, temperature and cuts included (Dream's maskgit_plus)."""
    return logits.logq_QV.gather(-1, logits.token_Q[:, None]).squeeze(-1)


def margin(logits: StepLogits) -> Tensor:
    """Positions where the likeliest token leads the second by most (Dream's topk_margin)."""
    first_QK = logits.logq_QV.topk(2).values.exp()
    return first_QK[:, 0] - first_QK[:, 1]


def negative_entropy(logits: StepLogits) -> Tensor:
    """Positions of least entropy first (Dream's entropy, whose logarithm has 1e-10 added)."""
    probability_QV = logits.logq_QV.exp()
    return (probability_QV * (probability_QV + 1e-10).log()).sum(-1)


ORDERS: dict[str, Order] = {
    "random": random,
    "left_to_right": left_to_right,
    "surest_position": surest_position,
    "low_confidence": low_confidence,
    "drawn_confidence": drawn_confidence,
    "margin": margin,
    "negative_entropy": negative_entropy,
}


def order_name(order: Order) -> str:
    """The name of an order of ORDERS; "custom" for your own function."""
    return next((name for name, known in ORDERS.items() if known is order), "custom")


def sureness(order: Order) -> Order:
    """The score that a threshold is compared with: the order's own, and that of low_confidence for left_to_right."""
    return low_confidence if order is left_to_right else order


_LEVELS: dict[Order, Callable[[float], float]] = {
    left_to_right: math.log,
    surest_position: math.log,
    low_confidence: math.log,
    drawn_confidence: math.log,
    margin: float,
    negative_entropy: float,
}


def score_threshold(order: Order, threshold: float) -> float:
    """A threshold on the scale of the score that it is compared with (`sureness`).

    It is a probability for left_to_right and the orders by probability, a difference of probabilities for margin, and
    minus an entropy in nats for negative_entropy.
    """
    if order not in _LEVELS:
        raise ValueError(f"threshold decoding needs left_to_right or an order by confidence, not {order.__name__}")
    low, high = (-math.inf, 0.0) if order is negative_entropy else (0.0, 1.0)
    if not low < threshold <= high:
        raise ValueError(f"threshold={threshold} must lie above {low:g} and be at most {high:g} for {order.__name__}")
    return _LEVELS[order](threshold)
