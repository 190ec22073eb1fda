"""coupled-GRPO (DiffuCoder, arXiv 2506.20639).

    t ~ U(0.2, 0.8), M = each completion token masked with probability t, M' = its complement
    l_i  = 1/2 log p(o_i | q, all masked) + 1/2 { log p(o_i | o without M) / t        for i in M
                                                { log p(o_i | o without M') / (1 - t)  for i in M'
    loss = - token mean of Clip(exp(l_i - l_i_old), A_g) + kl * k3_i,      A_g = r_g - mean of the others

Three views, as in the authors' code (the paper describes the complementary pair). With the 1/t weights l_i is not a
log-probability, and the ratio exponentiates it.

Exact when: never, not even for independent tokens: then l_i is log p_i times a random factor of mean 3/2. Reduces
to SML with the strata M, M' and anchor 1/2 if t = 1/2 and the factor 2 of 1/t is dropped.
"""

from functools import partial
from math import inf

from unmask.core.advantage import Advantage, leave_one_out
from unmask.core.method import Method, check_functions, check_range, each_inner_step
from unmask.core.objective import KL, Normaliser, k3, token_clip, token_divergence, token_mean
from unmask.core.states import coupled


def coupled_grpo(
    low: float = 0.5,
    high: float = 0.5,
    kl_kind: KL = k3,
    kl: float = 0.01,
    advantage: Advantage = leave_one_out,
    normaliser: Normaliser = token_mean,
) -> Method:
    """Complementary masks, every token scored once by the pair: DiffuCoder's GRPO."""
    check_range(0, inf, low=low, high=high)
    check_functions(normaliser=normaliser, kl_kind=kl_kind)
    return Method(
        name="coupled_grpo",
        probe=each_inner_step(coupled),
        advantage=advantage,
        objective=partial(token_clip, low=low, high=high, normaliser=normaliser),
        kl=kl,
        divergence=partial(token_divergence, kl=kl_kind, normaliser=normaliser),
        skip_zero_advantage=True,
    )
