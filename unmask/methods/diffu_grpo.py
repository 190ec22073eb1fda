"""diffu-GRPO (d1, arXiv 2504.12216).

    l_i  = log p(o_i | q', all of o masked),  q' = the prompt with each token hidden with probability 0.15
    loss = - 1/(sum of |o_g|) sum_g sum_i Clip(exp(l_i - l_i_old), A_g) + kl * k3_i,      A_g = r_g - mean

One forward scores every token: a mean-field likelihood.

Exact when the tokens are independent given the prompt and prompt_masking = 0; otherwise biased (tests/test_bias.py has
the numbers), and the expected update may even lower the expected reward (tests/test_direction.py): it asks at the first
state about tokens that were drawn at later ones, and a token that is good late may be bad first. Reduces to one stratum
of SML (methods/daca.py) with prompt_masking = 0.
"""

from functools import partial
from math import inf

from unmask.core.advantage import Advantage, group_mean
from unmask.core.method import Method, check_functions, check_range, each_inner_step
from unmask.core.objective import KL, Normaliser, k3, token_clip, token_divergence, token_mean
from unmask.core.probes import fully_masked


def diffu_grpo(
    prompt_masking: float = 0.15,
    low: float = 0.5,
    high: float = 0.5,
    kl_kind: KL = k3,
    kl: float = 0.04,
    advantage: Advantage = group_mean,
    normaliser: Normaliser = token_mean,
) -> Method:
    """Mean-field likelihood, token ratios: d1's GRPO."""
    check_range(0, 1, prompt_masking=prompt_masking)
    check_range(0, inf, low=low, high=high)
    check_functions(normaliser=normaliser, kl_kind=kl_kind)
    return Method(
        name="diffu_grpo",
        probe=each_inner_step(partial(fully_masked, prompt_masking=prompt_masking)),
        advantage=advantage,
        objective=partial(token_clip, low=low, high=high, normaliser=normaliser),
        kl=kl,
        divergence=partial(token_divergence, kl=kl_kind, normaliser=normaliser),
        skip_zero_advantage=True,
    )
