"""The masked diffusion loss of LLaDA (2502.09992), on completions alone.

    L = E_{t ~ U(0,1]} E_{mask ~ Bernoulli(t)} [ 1 / (t C) sum over masked i of -log p(x_i | x with the masked hidden) ]

per token of a completion of C. Its expectation is the any-order evidence bound: the mean over all orders of the
negative log-likelihood of the completion written in that order, one token at a time, divided by C.

A block-causal model sees a masked block after the finished text before it: one pass over two streams, the masked row
and the clean one (BD3LM 2503.09573, SDAR). The bound is then over the orders that finish one block after the other.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from unmask.core.policy import PIECE, BlockCausalPolicy, Policy
from unmask.core.token_sampling import token_logprobs
from unmask.sft.packing import PackedBatch

QUARTERS = 4


class NoisedBatch(NamedTuple):
    """A batch with a part of its completions masked, and the original tokens."""

    states_BW: Tensor
    masked_BW: Tensor
    tokens_BW: Tensor
    ratio_B: Tensor
    """The probability with which each token of the completion was masked."""
    length_B: Tensor
    """Positions of the completion."""
    causal_block: int | None = None
    """The block length of a block-causal model, which is trained in two streams."""

    def rows(self, part: slice) -> "NoisedBatch":
        return self._replace(**{name: each[part] for name, each in self._asdict().items() if name != "causal_block"})

    def pieces(self, rows: int) -> Iterator["NoisedBatch"]:
        for start in range(0, len(self.ratio_B), rows):
            yield self.rows(slice(start, start + rows))

    @property
    def weight_BW(self) -> Tensor:
        """1 / (t C) at every position of a row."""
        return (1 / (self.ratio_B * self.length_B))[:, None].expand_as(self.masked_BW)


def mask_ratios(rows: int, rng: torch.Generator) -> Tensor:
    """(B,) in (0, 1], each uniform, stratified: one in every B-th part, in random order."""
    shift = 1 - torch.rand((), generator=rng, dtype=torch.float64)
    return (torch.randperm(rows, generator=rng) + shift) / rows


def add_noise(batch: PackedBatch, mask_id: int, rng: torch.Generator, causal_block: int | None = None) -> NoisedBatch:
    """Mask each token of a completion with the probability of its row; prompts are never masked."""
    ratio_B = mask_ratios(len(batch.given_B), rng)
    drawn_BW = torch.rand(batch.tokens_BW.shape, generator=rng, dtype=torch.float64)
    noise = mask_tokens(batch, (drawn_BW < ratio_B[:, None]) & batch.canvas_BW, ratio_B, mask_id)
    return noise._replace(causal_block=causal_block)


def mask_tokens(batch: PackedBatch, masked_BW: Tensor, ratio_B: Tensor, mask_id: int) -> NoisedBatch:
    states_BW = batch.tokens_BW.masked_fill(masked_BW, mask_id)
    return NoisedBatch(states_BW, masked_BW, batch.tokens_BW, ratio_B, batch.canvas_BW.sum(1))


def token_losses(policy: Policy, noise: NoisedBatch, device: torch.device | str) -> Tensor:
    """-log p of every masked token, (Q,), row by row: one pass through the trunk, the head in pieces."""
    at_Q = noise.masked_BW.flatten().nonzero().squeeze(1)
    target_Q = noise.tokens_BW.flatten()[at_Q].to(device)
    states_BW = noise.states_BW.to(device)
    if noise.causal_block is None:
        hidden_QD = policy.hidden(states_BW, None, at_Q.to(device))
    else:
        assert isinstance(policy, BlockCausalPolicy)
        clean_BW = noise.tokens_BW.to(device)
        hidden_QD = policy.hidden_two_streams(states_BW, clean_BW, None, at_Q.to(device), noise.causal_block)
    size = max(1, PIECE // policy.vocabulary)

    def losses(hidden_PD: Tensor, target_P: Tensor) -> Tensor:
        return -token_logprobs(policy.head(hidden_PD), policy.mask_id).gather(-1, target_P[:, None]).squeeze(-1)

    pieces = zip(hidden_QD.split(size), target_Q.split(size), strict=True)
    if len(target_Q) <= size or not torch.is_grad_enabled():
        parts = [losses(h, t) for h, t in pieces]
    else:  # the logits of all pieces would not fit into memory: the backward pass computes them again
        parts = [checkpoint(losses, h, t, use_reentrant=False) for h, t in pieces]
    return torch.cat(parts) if parts else hidden_QD.sum(-1)


def bound(loss_Q: Tensor, noise: NoisedBatch) -> Tensor:
    """The sum over rows of the weighted loss: an unbiased estimate of each row's bound per token."""
    weight_Q = noise.weight_BW[noise.masked_BW].to(loss_Q.device, loss_Q.dtype)
    return (loss_Q * weight_Q).sum()


def quarter_sums(loss_Q: Tensor, noise: NoisedBatch) -> Tensor:
    """(2, 4): the sum and the number of the losses, by quarter of the mask ratio: (0, 1/4], (1/4, 1/2], ..."""
    quarter_B = (noise.ratio_B * QUARTERS).ceil().long().clamp(1, QUARTERS) - 1
    quarter_Q = quarter_B[:, None].expand_as(noise.masked_BW)[noise.masked_BW]
    sums = torch.bincount(quarter_Q, loss_Q.double().cpu(), QUARTERS)
    return torch.stack([sums, torch.bincount(quarter_Q, minlength=QUARTERS).double()])


def quarter_metrics(sums_24: Tensor) -> dict[str, float]:
    """The mean loss of a masked token by quarter of the mask ratio; empty quarters are left out."""
    quarters = zip(range(1, QUARTERS + 1), *sums_24.tolist(), strict=True)
    return {f"loss_{number}/{QUARTERS}": total / count for number, total, count in quarters if count}
