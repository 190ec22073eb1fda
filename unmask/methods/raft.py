"""RAFT: rejection-sampling fine-tuning. Sample, keep the correct rollouts, and raise their likelihood.

    loss = - 1/(tokens) sum_g sum_i A_g l_i,     A_g = G / (correct rollouts in the group) if g is correct, else 0
    l_i  = (L + 1) / 2x log p(o_i | q, o without M)  for i in M, x = |M| uniform on {0, ..., L}; the rest of the
           completion is masked next, and its tokens have the weight (L + 1) / 2(L - x)     the ELBO (methods/espo.py)

No ratio, no old policy, no reference, no clip. Every group with a correct rollout weighs the same, and a group in which
all are correct counts too. For diffusion language models nobody published it as a baseline; in our comparisons it is
the line that is hardest to beat (docs/studies/shelf.md), and it is the default of `unmask train`.

    states = auto_states      uniform_sizes; the plug-ins sml and daca replace them by SML
             uniform_sizes    a mask of uniform size and its complement: the ELBO, as espo
             stratified       SML (methods/daca.py), with `strata` and `layout`
             coupled          the fully masked canvas, a mask and its complement, as coupled_grpo
             block_elbo       a partly masked block, clean blocks before it, masked blocks after it (DTM)
             sampled_steps    visited states, as agrpo
             fully_masked     the fully masked canvas, as diffu_grpo on the whole prompt
    advantage = best_of_group    best-of-n: the best rollout of each group only
    advantage = every_sample     the control without selection: fine-tuning on all own samples

Exact when the tokens are independent given the prompt: then A_g without its group's factor gives the policy gradient.
Otherwise it adds b E[grad l] to it, a pull towards the policy's own samples, with b the mean reward. Reduces on-policy
to the methods named above, with their normaliser, their tokens that count, no KL and advantage = correct_only, bit for
bit (espo up to rounding); with SML to diffu_grpo with sml (anchor 0) and advantage = correct_only.
"""

from functools import partial
from math import inf

from unmask.core.advantage import Advantage, correct_only
from unmask.core.method import Estimator, Method, check_functions, check_range, each_inner_step
from unmask.core.objective import Normaliser, canvas_mean, policy_gradient, token_mean, trace_sum
from unmask.core.states import auto_states, block_elbo
from unmask.core.strata import STRATA, Layout, random_strata, stratified


def raft(
    states: Estimator = auto_states,
    strata: int = STRATA,
    layout: Layout = random_strata,
    advantage: Advantage = correct_only,
    normaliser: Normaliser = token_mean,
) -> Method:
    """Fine-tuning on the policy's own correct rollouts, scored at masks of every size."""
    check_range(1, inf, strata=strata)
    check_functions(states=states, layout=layout, normaliser=normaliser)
    strata_used = states is stratified
    if not strata_used and (strata, layout) != (STRATA, random_strata):
        raise ValueError("strata and layout belong to states=sml: set it, or leave them out")
    if states is block_elbo and normaliser not in (canvas_mean, token_mean, trace_sum):
        raise ValueError(
            "the states semi_autoregressive need a normaliser that does not divide by the asked tokens of a rollout: "
            "token_mean, canvas_mean or trace_sum"
        )
    estimator = partial(stratified, strata=strata, layout=layout) if strata_used else states
    return Method(
        name="raft",
        probe=each_inner_step(estimator),
        advantage=advantage,
        objective=partial(policy_gradient, normaliser=normaliser),
        uses_old_logprobs=False,
        skip_zero_advantage=True,
        trajectory=states not in (auto_states, stratified),
    )
