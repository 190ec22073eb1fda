"""The draws of a step: at every position a token, its log-probability, the score of the position, and what is recorded.

It reads logits only, so it is compiled where the layers are: the vocabulary is then read twice instead of ten times,
and bf16 logits are cast to fp32 by the kernels that read them. The noise is compiled too: one kernel instead of 55.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from unmask.core.order import Order, StepLogits, low_confidence, sureness
from unmask.core.specs import Record
from unmask.core.token_sampling import (
    TokenSampling,
    draw_tokens,
    entropy,
    kept_ids,
    sampling_logprobs,
    token_logprobs,
    uniforms,
)


class DrawSettings(NamedTuple):
    mask_id: int
    sampling: TokenSampling
    order: Order
    record: Record
    by_threshold: bool
    """The positions are compared with a threshold."""


class Places(NamedTuple):
    """Where Q tokens are drawn."""

    uniform_Q: Tensor
    noise_Q: Tensor
    column_Q: Tensor


Draws = Callable[[Tensor, Places, DrawSettings], dict[str, Tensor]]
Uniforms = Callable[[Tensor, Tensor, Tensor | int, Tensor], Tensor]


def draws(logits_QV: Tensor, places: Places, settings: DrawSettings) -> dict[str, Tensor]:
    """`token`, `logp` and `score` of every position, `sure` if a threshold is compared with another score, and what
    `settings.record` asks for."""
    sampling, order = settings.sampling, settings.order
    plain_QV = token_logprobs(logits_QV, settings.mask_id)
    logq_QV, kept_QV = sampling_logprobs(plain_QV, sampling.untempered_if_greedy())
    if sampling.temperature:
        token_Q = draw_tokens(logq_QV, places.uniform_Q)
        logp_Q = logq_QV.gather(-1, token_Q[:, None]).squeeze(-1)
    else:
        token_Q = plain_QV.argmax(-1)
        logp_Q = torch.zeros_like(plain_QV[:, 0])
    logits = StepLogits(plain_QV, logq_QV, token_Q, places.noise_Q, places.column_Q)
    found = {"token": token_Q, "logp": logp_Q, "score": order(logits)}
    if settings.by_threshold and sureness(order) is not order:
        found["sure"] = sureness(order)(logits)
    if settings.record.entropy:
        found["entropy"] = entropy(logq_QV)
    if settings.record.confidence:
        found["confidence"] = low_confidence(logits)
    if kept_QV is not None:
        found["kept"] = kept_ids(kept_QV, sampling.most_kept)
    if settings.record.top:
        count = min(settings.record.top, plain_QV.shape[-1] - 1)
        found["step_top_logp"], found["step_top_id"] = plain_QV.topk(count)
    return found


@cache
def compiled_draws(backend: str = "inductor") -> Draws:
    """`draws`, compiled once for any number of positions."""
    compiled = torch.compile(draws, backend=backend)

    def run(logits_QV: Tensor, places: Places, settings: DrawSettings) -> dict[str, Tensor]:
        for tensor in (logits_QV, *places):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        with warnings.catch_warnings():  # the compiler tells its developers how it compiles a softmax
            warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")
            return compiled(logits_QV, places, settings)

    return run


@cache
def compiled_uniforms(backend: str = "inductor") -> Uniforms:
    """`uniforms`, compiled for any number of rows and positions. Integers: bit for bit the same."""
    return torch.compile(uniforms, backend=backend, dynamic=True)
