"""GSPO (arXiv 2507.18071) on a masked diffusion likelihood.

    s_g  = exp( 1/|o_g| sum_i (l_i - l_i_old) ),      l_i = log p(o_i | q', all of o masked)
    loss = - mean_g Clip(s_g, A_g),      A z-scored, clip range 3e-4 below and 4e-4 above

The paper is about autoregressive models; here the likelihood is diffu-GRPO's.

Exact when the tokens are independent given the prompt and prompt_masking = 0. Reduces to diffu_grpo on-policy with
sequence_mean and the same advantage (the gradients are equal at ratio 1).
"""

from functools import partial
from math import inf

from unmask.core.advantage import Advantage, z_score
from unmask.core.method import Method, check_functions, check_range, each_inner_step
from unmask.core.objective import KL, k3, sequence_clip, sequence_mean, token_divergence
from unmask.core.probes import fully_masked


def gspo(
    prompt_masking: float = 0.15,
    low: float = 3e-4,
    high: float = 4e-4,
    kl: float = 0.0,
    kl_kind: KL = k3,
    advantage: Advantage = z_score,
) -> Method:
    """One length-normalised ratio for a whole sequence: Qwen's GRPO."""
    check_range(0, 1, prompt_masking=prompt_masking)
    check_range(0, inf, low=low, high=high)
    check_functions(kl_kind=kl_kind)
    return Method(
        name="gspo",
        probe=each_inner_step(partial(fully_masked, prompt_masking=prompt_masking)),
        advantage=advantage,
        objective=partial(sequence_clip, low=low, high=high),
        kl=kl,
        divergence=partial(token_divergence, kl=kl_kind, normaliser=sequence_mean),
        skip_zero_advantage=True,
    )
