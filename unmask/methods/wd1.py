"""wd1 (arXiv 2507.08838).

    w_g  = softmax over the group of psi * A_g  -  softmax over the group of -psi * A_g,      A_g = r_g - mean
    loss = - mean over groups of sum_g w_g sum_i l_i,      l_i = log p(o_i | q', all of o masked)

No ratio, no old policy, no KL: a weighted log-likelihood. The weight of a trace, times the group size, is its advantage
here, so that the mean over traces is the mean over groups (weighted by their sizes, if these differ).

The likelihood is exact when the tokens are independent given the prompt and prompt_masking = 0; the weights depend on
the group that was drawn, so the update is not the gradient of an objective. Reduces to diffu_grpo's on-policy gradient
(with tokens added up) times 2 psi as the differences between a group's rewards go to 0.
"""

from functools import partial
from math import inf

from torch import Tensor

from unmask.core.advantage import group_max, group_mean, group_size, group_sum
from unmask.core.method import Method, check_functions, check_range, each_inner_step
from unmask.core.objective import KL, Normaliser, k3, policy_gradient, token_divergence, trace_sum
from unmask.core.probes import fully_masked


def group_softmax(value_B: Tensor, group_B: Tensor) -> Tensor:
    """softmax within each group."""
    weight_B = (value_B - group_max(value_B, group_B)).exp()
    return weight_B / group_sum(weight_B, group_B)


def preference_weight(reward_B: Tensor, group_B: Tensor, psi: float = 1.0) -> Tensor:
    """G * (softmax(psi A) - softmax(-psi A)) within each group."""
    advantage_B = psi * group_mean(reward_B, group_B)
    weight_B = group_softmax(advantage_B, group_B) - group_softmax(-advantage_B, group_B)
    return group_size(group_B).to(weight_B.dtype) * weight_B


def wd1(
    prompt_masking: float = 0.15,
    psi: float = 1.0,
    kl: float = 0.0,
    kl_kind: KL = k3,
    normaliser: Normaliser = trace_sum,
) -> Method:
    """Weighted log-likelihood, no ratios: good traces up, bad traces down."""
    check_range(0, 1, prompt_masking=prompt_masking)
    check_range(0, inf, psi=psi)
    check_functions(normaliser=normaliser, kl_kind=kl_kind)
    return Method(
        name="wd1",
        probe=each_inner_step(partial(fully_masked, prompt_masking=prompt_masking)),
        advantage=partial(preference_weight, psi=psi),
        objective=partial(policy_gradient, normaliser=normaliser),
        kl=kl,
        divergence=partial(token_divergence, kl=kl_kind, normaliser=normaliser),
        uses_old_logprobs=False,
    )
