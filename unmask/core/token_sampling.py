"""The distribution a token is drawn from: logits, tempered, truncated, normalised; and drawing from it.

Sampling and scoring share this file, so a token is scored by the distribution it was sampled from.
"""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

IN_PARTS = 4096
"""From this size of a vocabulary on, a token is drawn in two stages."""


@dataclass(frozen=True)
class TokenSampling:
    """softmax(logits / temperature), cut to the `top_k` likeliest tokens and to the smallest set of mass
    `top_p`. Temperature 0 is the point mass on the likeliest token. `top_k` 0 and `top_p` 1 cut nothing.

    `guidance` w is classifier-free: the logits are uncond + (w + 1) (cond - uncond), uncond with the prompt masked."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    guidance: float = 0.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature must be 0 (greedy) or more, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (no cut) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.guidance < 0:
            raise ValueError(f"guidance must be 0 (none) or more, got {self.guidance}")

    def untempered_if_greedy(self) -> "TokenSampling":
        """The same, with temperature 1 if it is greedy."""
        return self if self.temperature else replace(self, temperature=1.0)

    @property
    def truncated(self) -> bool:
        return self.top_k > 0 or self.top_p < 1

    @property
    def most_kept(self) -> int:
        """How many tokens a truncation keeps at most; 0 if that depends on the probabilities."""
        return self.top_k if self.top_p == 1 else 0


def wide_logits(logits_QV: Tensor) -> Tensor:
    """The same logits in at least fp32."""
    return logits_QV if logits_QV.dtype == torch.float64 else logits_QV.float()


def token_logprobs(logits_QV: Tensor, mask_id: int) -> Tensor:
    """Log-probabilities at temperature 1, in at least fp32. MASK is not a word: it has probability zero."""
    banned_V = torch.arange(logits_QV.shape[-1], device=logits_QV.device) == mask_id
    return torch.where(banned_V, -torch.inf, wide_logits(logits_QV)).log_softmax(-1)


def tempered_logprobs(plain_QV: Tensor, temperature: float) -> Tensor:
    """Log-probabilities at `temperature`, from those at temperature 1."""
    if temperature == 1:
        return plain_QV
    if temperature == 0:
        point_QV = torch.full_like(plain_QV, -torch.inf)
        return point_QV.scatter(-1, plain_QV.argmax(-1, keepdim=True), 0.0)
    return (plain_QV / temperature).log_softmax(-1)


def kept_tokens(logq_QV: Tensor, sampling: TokenSampling) -> Tensor:
    """Which tokens the truncation keeps, (Q, V) booleans; the likeliest token is always among them."""
    sorted_QV, order_QV = logq_QV.sort(dim=-1, descending=True, stable=True)
    before_QV = sorted_QV.exp().cumsum(-1) - sorted_QV.exp()
    kept_QV = before_QV < (sampling.top_p if sampling.top_p < 1 else torch.inf)  # rounding can bring `before` to 1
    if sampling.top_k:
        kept_QV[..., sampling.top_k :].fill_(False)  # an assignment would wait for the device
    kept_QV &= sorted_QV > -torch.inf
    return torch.zeros_like(kept_QV).scatter(-1, order_QV, kept_QV)


def restricted_logprobs(logq_QV: Tensor, kept_QV: Tensor) -> Tensor:
    """Log-probabilities given that the token is one of those kept."""
    return logq_QV.masked_fill(~kept_QV, -torch.inf).log_softmax(-1)


def sampling_logprobs(plain_QV: Tensor, sampling: TokenSampling) -> tuple[Tensor, Tensor | None]:
    """The log-probabilities to draw from, and which tokens a truncation kept (None if nothing is cut)."""
    logq_QV = tempered_logprobs(plain_QV, sampling.temperature)
    if not sampling.truncated:
        return logq_QV, None
    kept_QV = kept_tokens(logq_QV, sampling)
    return restricted_logprobs(logq_QV, kept_QV), kept_QV


def kept_ids(kept_QV: Tensor, most: int = 0) -> Tensor:
    """The kept tokens as ids, (Q, K), filled up with -1. K is the largest number kept in a row, or `most` if it is
    given, which saves waiting for the device."""
    widest = min(most, kept_QV.shape[-1]) or (int(kept_QV.sum(-1).max()) if kept_QV.numel() else 0)
    kept_QK, id_QK = kept_QV.to(torch.uint8).topk(widest)
    return id_QK.masked_fill(kept_QK == 0, -1)


def pad_ids(id_QK: Tensor, width: int) -> Tensor:
    """The last dimension filled up with -1 to `width`, so that kept ids of several steps fit together; vectors stay."""
    return F.pad(id_QK, (0, width - id_QK.shape[-1]), value=-1) if id_QK.dim() > 1 else id_QK


def entropy(logq_QV: Tensor) -> Tensor:
    """The entropy of each distribution in nats."""
    return -(logq_QV.exp() * logq_QV.masked_fill(logq_QV == -torch.inf, 0.0)).sum(-1)


def draw_tokens(logq_QV: Tensor, uniform_Q: Tensor) -> Tensor:
    """One token a row by inverse CDF: the first whose cumulative probability exceeds the uniform.

    With a large vocabulary first a part of it, then a token of the part: cumulative sums over long rows are slow on a
    GPU.
    """
    probability_QV, uniform_Q1 = logq_QV.exp(), uniform_Q.to(logq_QV.dtype)[..., None]
    vocabulary = logq_QV.shape[-1]
    if vocabulary < IN_PARTS:
        return _inverse_cdf(probability_QV, uniform_Q1)[0].squeeze(-1)
    size = math.isqrt(vocabulary)
    whole = vocabulary // size * size
    sums_QA = probability_QV[..., :whole].unflatten(-1, (-1, size)).sum(-1)
    sums_QA = torch.cat([sums_QA, probability_QV[..., whole:].sum(-1, keepdim=True)], dim=-1)
    part_Q1, uniform_Q1 = _inverse_cdf(sums_QA, uniform_Q1)
    token_QS = part_Q1 * size + torch.arange(size, device=part_Q1.device)
    some_QS = probability_QV.gather(-1, token_QS.clamp(max=vocabulary - 1)) * (token_QS < vocabulary)
    return (part_Q1 * size + _inverse_cdf(some_QS, uniform_Q1)[0]).squeeze(-1)


def _inverse_cdf(mass_QV: Tensor, uniform_Q1: Tensor) -> tuple[Tensor, Tensor]:
    """The first place whose cumulative mass exceeds this share of the total, and the share of its mass below it."""
    cumulative_QV = mass_QV.cumsum(-1)
    level_Q1 = uniform_Q1 * cumulative_QV[..., -1:]
    place_Q1 = torch.searchsorted(cumulative_QV, level_Q1, right=True)
    # Rounding can lift the level to the total; then take the largest mass.
    place_Q1 = torch.where(place_Q1 < mass_QV.shape[-1], place_Q1, mass_QV.argmax(-1, keepdim=True))
    mass_Q1 = mass_QV.gather(-1, place_Q1)
    return place_Q1, (level_Q1 - cumulative_QV.gather(-1, place_Q1) + mass_Q1).clamp(min=0) / mass_Q1


_GOLDEN, _MIX_1, _MIX_2 = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def splitmix64(x: Tensor) -> Tensor:
    """splitmix64, a scrambling bijection of 64-bit integers. int64 wraps as needed; masks make the shifts logical."""
    x = x + _GOLDEN
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _MIX_2
    return x ^ ((x >> 31) & (2**33 - 1))


def uniforms(seed: Tensor, *counters: Tensor | int) -> Tensor:
    """Uniforms in [0, 1) that are a pure function of a row's seed and counters (step, position, ...), broadcast.

    There is no generator state, so a row's noise cannot depend on its batch or rank. They have 24 bits: fp32
    represents every value, and none rounds to 1.
    """
    key = splitmix64(seed)
    for counter in counters:
        key = splitmix64(key ^ counter)
    return ((key >> 40) & (2**24 - 1)).to(torch.float32) / 2**24
