"""REINFORCE++ (arXiv 2501.03262) on a masked diffusion likelihood.

    A_g  = (R_g - mean R) / std R over the whole batch,   R_g = r_g - kl * sum_i (l_i_old - l_i_ref)
    loss = - token mean of Clip(exp(l_i - l_i_old), A_g),      l_i = log p(o_i | q', all of o masked)

`baseline` is the paper's second variant: the group mean is subtracted first, the standard deviation is the batch's,
and the KL is a k2 term of the loss instead of a penalty on the reward. The paper sums the penalty from each token to
the end of the sequence; a canvas is not written in that order, so here the whole trace gets all of it.

Exact when the tokens are independent given the prompt and prompt_masking = 0. Reduces to diffu_grpo with a batch
baseline.
"""

from functools import partial
from math import inf

from unmask.core.advantage import batch_z_score, group_mean_batch_std
from unmask.core.method import Method, check_functions, check_range, each_inner_step
from unmask.core.objective import Normaliser, k2, token_clip, token_divergence, token_mean
from unmask.core.probes import fully_masked


def reinforce_pp(
    prompt_masking: float = 0.15,
    low: float = 0.2,
    high: float = 0.2,
    kl: float = 0.01,
    baseline: bool = False,
    normaliser: Normaliser = token_mean,
) -> Method:
    """Advantages normalised over the whole batch: REINFORCE++ and its baseline variant."""
    check_range(0, 1, prompt_masking=prompt_masking)
    check_range(0, inf, low=low, high=high)
    check_functions(normaliser=normaliser)
    return Method(
        name="reinforce_pp",
        probe=each_inner_step(partial(fully_masked, prompt_masking=prompt_masking)),
        advantage=group_mean_batch_std if baseline else batch_z_score,
        objective=partial(token_clip, low=low, high=high, normaliser=normaliser),
        kl=kl if baseline else 0.0,
        divergence=partial(token_divergence, kl=k2, normaliser=normaliser),
        reward_kl=0.0 if baseline else kl,
        skip_zero_advantage=True,
    )
