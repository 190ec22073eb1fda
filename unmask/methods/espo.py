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

from unmask.core.advantage import Advantage, leave_one_out
from unmask.core.method import Method, check_functions, check_range, each_inner_step
from unmask.core.objective import KL, k2, sequence_clip, sequence_divergence
from unmask.core.states import elbo
from unmask.core.trace import all_tokens


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
