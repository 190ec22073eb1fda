"""What a policy answers at the positions it is asked about, from hidden states: piece by piece, so that logits never
exist for all positions.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from unmask.core.policy import PIECE, Policy
from unmask.core.token_sampling import tempered_logprobs, token_logprobs
from unmask.core.trace import Trace

FLOOR = -1e4
"""The least log-probability: that of a token, or a choice of positions, which is impossible under the asked policy. It
has no gradient, the ratio of two of them is 1, and nothing becomes NaN."""


def in_pieces(
    policy: Policy,
    answer: Callable[..., tuple[Tensor, ...]],
    trace: Trace,
    hidden_QD: Tensor,
    about_Q: tuple[Tensor | None, ...],
    heads: int = 1,
) -> list[Tensor]:
    """answer(logits, trace, ...) over pieces, (Q,) each: the logits of all heads fit, and a backward pass recomputes
    them."""
    size = max(1, PIECE // (heads * policy.vocabulary))

    def piece(start: int) -> tuple[Tensor, ...]:
        part = slice(start, start + size)
        about = [value if value is None else value[part] for value in about_Q]

        def of_hidden(hidden_PD: Tensor) -> tuple[Tensor, ...]:
            return answer(policy.head(hidden_PD), trace, *about)

        if len(hidden_QD) <= size or not torch.is_grad_enabled():
            return of_hidden(hidden_QD[part])
        return checkpoint(of_hidden, hidden_QD[part], use_reentrant=False)

    pieces = [piece(start) for start in range(0, max(1, len(hidden_QD)), size)]
    return [torch.cat(answers) for answers in zip(*pieces, strict=True)]


def asked_logprobs(
    logits_QV: Tensor,
    trace: Trace,
    token_Q: Tensor,
    kept_QK: Tensor | None,
    taught_QD: Tensor | None,
    teacher: Policy | None,
) -> tuple[Tensor, ...]:
    """The log-probability of each token at temperature 1, and by the distribution it was sampled from; with a teacher,
    the cross-entropy too."""
    plain_QV = token_logprobs(logits_QV, trace.mask_id)
    logq_QV = tempered_logprobs(plain_QV, trace.sampling.temperature)
    logp_Q, plain_Q = (logp_QV.gather(-1, token_Q[:, None]).squeeze(-1) for logp_QV in (logq_QV, plain_QV))
    if kept_QK is not None:
        logq_QK = logq_QV.gather(-1, kept_QK.clamp(min=0)).masked_fill(kept_QK < 0, -torch.inf)
        possible_Q = (logq_QK > -torch.inf).any(-1)
        safe_QK = torch.where(possible_Q[:, None], logq_QK, 0.0)  # an empty sum would poison the gradient
        logp_Q = torch.where(possible_Q, logp_Q - safe_QK.logsumexp(-1), FLOOR)
    if teacher is None or taught_QD is None:
        return plain_Q, logp_Q.clamp(min=FLOOR)
    with torch.no_grad():
        taught_QV = token_logprobs(teacher.head(taught_QD), trace.mask_id)
        taught_QV = tempered_logprobs(taught_QV, trace.sampling.temperature).exp()
    return plain_Q, logp_Q.clamp(min=FLOOR), -(taught_QV * logq_QV.clamp(min=FLOOR)).sum(-1)
