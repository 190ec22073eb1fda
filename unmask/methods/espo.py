"""ESPO (arXiv 2512.03759).

    x ~ uniform on {0, ..., L},  M = x random completion tokens,  M' = the other L - x
    B    = mean over draws of 1/2 [ (L+1)/x sum_{i in M} log p(o_i | o without M)
                                  + (L+1)/(L-x) sum_{i in M'} log p(o_i | o without M') ]     (an empty sum is 0)
    rho  = exp((B - B_old) / L),   loss = - mean_g Clip(rho_g, A_g) + kl * k2(B_ref - B) / L
    A_g  = r_g - mean of the others; every position that was written counts, the end-token tail too (L in the
           ratio is their number; a retired row's unwritten tail is MASK in every state)

Each half is unbiased for the ELBO, E_x [(L+1)/x ...] = sum_x 1/x E[...] (tested by enumeration). The authors
stratify x over the batch; here it is stratified over the draws of each row, which lowers the variance of the row's
ratio.

Exact when the ELBO is tight (independent tokens, or a model whose conditionals agree in every order), and then in
expectation over the draws. The ratio is a biased function of B. When every draw masks everything, B is (L + 1) / 2L
times gspo's mean-field likelihood (the other half is empty).
"""

from functools import partial
from math import inf

import torch
from torch import Tensor

from unmask.core.advantage import Advantage, leave_one_out
from unmask.core.method import Method, check_functions, check_range, each_inner_step
from unmask.core.objective import KL, k2, sequence_clip, sequence_divergence
from unmask.core.probes import Probes, random_rank, views
from unmask.core.trace import Trace, all_tokens


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
    """The ELBO from `draws` complementary pairs, their sizes stratified for each trace."""
    check_range(1, inf, draws=draws)
    noise_KB = torch.rand(draws, len(trace), generator=rng, dtype=torch.float64, device=rng.device)
    size_KB = stratified_sizes(trace, noise_KB)
    return elbo_views(trace, torch.stack([random_rank(trace, rng) for _ in range(draws)]), size_KB)


def stratified_sizes(trace: Trace, noise_KB: Tensor) -> Tensor:
    """Numbers of masked positions from uniforms: one of every stratum of {0, ..., L} for each trace."""
    draws, length_B = len(noise_KB), trace.canvas_BL.sum(-1)
    level_KB = (torch.arange(draws, dtype=torch.float64)[:, None] + noise_KB.cpu()) / draws
    return (level_KB.to(length_B.device) * (length_B + 1)).long()


def espo(
    draws: int = 2,
    low: float = 0.2,
    high: float = 0.2,
    kl: float = 1e-2,
    kl_kind: KL = k2,
    advantage: Advantage = leave_one_out,
) -> Method:
    """One ratio for a whole sequence, from its ELBO: sequence-level diffusion GRPO."""
    check_range(0, inf, low=low, high=high)
    check_functions(kl_kind=kl_kind)
    return Method(
        name="espo",
        probe=each_inner_step(partial(elbo, draws=draws)),
        advantage=advantage,
        objective=partial(sequence_clip, low=low, high=high),
        counted=all_tokens,
        kl=kl,
        divergence=partial(sequence_divergence, kl=kl_kind),
        skip_zero_advantage=True,
    )
