"""The states at which a method can ask about the tokens of a rollout: estimators that several methods share, by name.

    l_i = sum over the drawn states that ask about i of share * log p(o_i | state)

In expectation over the draws every token has the same weight: 1, in `coupled` 3/2, in `sampled_steps` 1/T
(tests/test_states.py). `semi_autoregressive` leaves the weights to the normaliser; `block_elbo` has them.
"""

from dataclasses import replace

import torch
from torch import Tensor

from unmask.core.method import MOST, Estimator, check_range
from unmask.core.probes import Probes, fully_masked, random_rank, rank, uniform, unit_asked, views
from unmask.core.steps import sampled_steps
from unmask.core.strata import stratified
from unmask.core.trace import Trace


def coupled_views(trace: Trace, masked_BL: Tensor, ratio_B: Tensor) -> Probes:
    """The fully masked view, a mask and its complement, with their shares."""
    first_BL, second_BL = trace.canvas_BL & masked_BL, trace.canvas_BL & ~masked_BL
    ratio_B1 = ratio_B[:, None].expand_as(masked_BL)
    masked_KBL = torch.stack([trace.canvas_BL, first_BL, second_BL])
    share_KBL = torch.stack([torch.full_like(ratio_B1, 0.5), 0.5 / ratio_B1, 0.5 / (1 - ratio_B1)])
    return views(trace, masked_KBL, masked_KBL, share_KBL)


def coupled(trace: Trace, rng: torch.Generator) -> Probes:
    """A random complementary pair of masks and the fully masked view (coupled-GRPO, 2506.20639)."""
    ratio_B = 0.2 + 0.6 * uniform(rng, trace.group_B)
    return coupled_views(trace, uniform(rng, trace.tokens_BL) < ratio_B[:, None], ratio_B)


def elbo_views(trace: Trace, rank_KBL: Tensor, size_KB: Tensor) -> Probes:
    """For each draw, the `size` first positions of a random order masked, and then the others."""
    length_B11 = trace.canvas_BL.sum(-1)[None, :, None]
    size_KB1, draws = size_KB[..., None], len(size_KB)
    first_KBL = trace.canvas_BL & (rank_KBL < size_KB1)
    masked_KBL = torch.cat([first_KBL, trace.canvas_BL & ~first_KBL])
    count_KB1 = torch.cat([size_KB1, length_B11 - size_KB1]).clamp(min=1)
    share_KBL = ((length_B11 + 1) / count_KB1.double() / (2 * draws)).expand(masked_KBL.shape)
    return views(trace, masked_KBL, masked_KBL, share_KBL)


def elbo(trace: Trace, rng: torch.Generator, draws: int = 2) -> Probes:
    """The ELBO from `draws` complementary pairs, their sizes stratified for each trace (ESPO, 2512.03759)."""
    check_range(1, MOST + 1, draws=draws)
    noise_KB = torch.rand(draws, len(trace), generator=rng, dtype=torch.float64, device=rng.device)
    size_KB = stratified_sizes(trace, noise_KB)
    return elbo_views(trace, torch.stack([random_rank(trace, rng) for _ in range(draws)]), size_KB)


def stratified_sizes(trace: Trace, noise_KB: Tensor) -> Tensor:
    """Numbers of masked positions from uniforms: one of every stratum of {0, ..., L} for each trace."""
    draws, length_B = len(noise_KB), trace.canvas_BL.sum(-1)
    level_KB = (torch.arange(draws, dtype=torch.float64)[:, None] + noise_KB.cpu()) / draws
    return (level_KB.to(length_B.device) * (length_B + 1)).long()


def uniform_sizes(trace: Trace, rng: torch.Generator) -> Probes:
    """The ELBO from one pair: masks of uniform size, as in pre-training. Every token is asked once."""
    return elbo(trace, rng, draws=1)


def auto_states(trace: Trace, rng: torch.Generator) -> Probes:
    """uniform_sizes, for a method whose states may be replaced: sml and daca put their strata in this place."""
    return uniform_sizes(trace, rng)


def semi_autoregressive(trace: Trace, rng: torch.Generator, draws: int = 1) -> Probes:
    """Blocks before a random one clean, blocks after it masked, and a random part of it masked and asked (DTM).

    The number of masked positions is uniform on 1..L; L positions were written. Every draw is a unit.
    """
    check_range(1, MOST + 1, draws=draws)
    level_KB = torch.rand(draws, len(trace), generator=rng, dtype=torch.float64, device=rng.device)
    noise_KBL = torch.stack([uniform(rng, trace.tokens_BL) for _ in range(draws)])
    return block_views(trace, level_KB.to(noise_KBL.device), noise_KBL)


def block_views(trace: Trace, level_KB: Tensor, noise_KBL: Tensor) -> Probes:
    """The semi-autoregressive state with 1 + floor(level * L) masked positions; in its block those with the least noise
    are masked."""
    block_BL, filled_BL = trace.block_BL.clamp(min=0), trace.filled_BL.long()
    count_BW = filled_BL.new_zeros(len(trace), int(block_BL.max()) + 1).scatter_add(1, block_BL, filled_BL)
    from_BW = count_BW.flip(-1).cumsum(-1).flip(-1)  # positions of a block and of all later ones
    from_BL, after_BL = (each_BW.gather(1, block_BL) for each_BW in (from_BW, from_BW - count_BW))
    masked_KB1 = 1 + (level_KB * from_BW[:, 0]).long()[..., None]
    here_KBL = trace.filled_BL & (after_BL < masked_KB1) & (masked_KB1 <= from_BL)
    asked_KBL = here_KBL & (rank(noise_KBL.masked_fill(~here_KBL, 2.0)) < masked_KB1 - after_BL)
    return views(trace, asked_KBL | (trace.canvas_BL & (from_BL < masked_KB1)), asked_KBL, apart=True)


def block_elbo(trace: Trace, rng: torch.Generator) -> Probes:
    """The ELBO of completions that are written block by block, from one semi-autoregressive state: its k asked tokens
    have the weight L / k. Take a normaliser that does not divide by k: canvas_mean, trace_sum, or in a large batch
    token_mean, which divides by the sum of all k."""
    probes = semi_autoregressive(trace, rng)
    asked_M, written_B = unit_asked(probes).sum(-1).clamp(min=1), trace.filled_BL.sum(-1)
    return replace(probes, weight_M=written_B[probes.trace_M] / asked_M.double())


STATES: dict[str, Estimator] = {
    "auto": auto_states,
    "sml": stratified,
    "pairs": coupled,
    "uniform": uniform_sizes,
    "semi_autoregressive": block_elbo,
    "visited": sampled_steps,
    "fully_masked": fully_masked,
}
