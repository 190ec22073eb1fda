"""RAFT: rejection-sampling fine-tuning. Sample, keep the correct rollouts, and raise their likelihood.

    loss = - 1/(tokens) sum_g sum_i A_g l_i,     A_g = G / (correct rollouts in the group) if g is correct, else 0
    l_i  = log p(o_i | q, o without the stratum of i)                                      SML (methods/daca.py)

No ratio, no old policy, no reference, no clip. Every group with a correct rollout weighs the same, and a group in which
all are correct counts too. For diffusion language models nobody published it as a baseline; in our comparisons it is
the line that is hardest to beat (docs/studies/choosing.md), and it is the default of `unmask train`.

    advantage = every_sample    the control without selection: fine-tuning on all own samples
    strata = 1                  the fully masked likelihood of diffu_grpo, on the whole prompt

Exact when the tokens are independent given the prompt: then A_g without its group's factor gives the policy gradient.
Otherwise it adds b E[grad l] to it, a pull towards the policy's own samples, with b the mean reward. Reduces on-policy
to diffu_grpo with sml and advantage = correct_only, bit for bit.
"""

from functools import partial
from math import inf

from unmask.core.advantage import Advantage, correct_only
from unmask.core.method import Method, check_functions, check_range, each_inner_step
from unmask.core.objective import Normaliser, policy_gradient, token_mean
from unmask.core.strata import STRATA, Layout, random_strata, stratified


def raft(
    strata: int = STRATA,
    layout: Layout = random_strata,
    advantage: Advantage = correct_only,
    normaliser: Normaliser = token_mean,
) -> Method:
    """Fine-tuning on the policy's own correct rollouts, scored with most of the sequence as context."""
    check_range(1, inf, strata=strata)
    check_functions(layout=layout, normaliser=normaliser)
    return Method(
        name="raft",
        probe=each_inner_step(partial(stratified, strata=strata, layout=layout)),
        advantage=advantage,
        objective=partial(policy_gradient, normaliser=normaliser),
        uses_old_logprobs=False,
        skip_zero_advantage=True,
    )
