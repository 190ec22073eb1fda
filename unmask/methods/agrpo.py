"""AGRPO (arXiv 2510.04019): the policy gradient of the denoising process itself.

    loss = - mean_g 1/k sum_{j=1..k} v_{g,j} sum over i committed at step t_j of Clip(p(o_i|s_{t_j}) / p_old(...), A_g)
    t_j ~ P_g(t),   v_{g,j} = (1/m_g) / P_g(t_j),   A_g = r_g - mean,   m_g = T

Its expectation is (G - 1) / (G T) grad J: a mean over steps, a sum over the tokens of a step. A step at which a row
wrote nothing (it had ended, or a threshold let it skip the step) adds zero to this and is never drawn.

    uniform_steps  P(t) = 1/n_g over the n_g steps at which the row wrote something
    entropy_steps  P(t) in proportion to the entropy of the distributions drawn from at t
    spread = True  t_j from u_j = (j + rand) / k, fresh for every row and j: stratified within each row. (The
                   authors' code stratifies over the batch, which gains almost nothing once rows differ in advantage.)
                   A row with n_g < T steps to draw from and n_g <= k draws is asked at each of them once.
    truncate       m_g = the last step that wrote a word, + 1, as in the authors' code; rows of end tokens only
                   then have weight 0. The result is not the gradient of an objective: m_g depends on the future.
    choice         adds the choice of positions (probes.ask, log F), one ratio a step; for low_confidence rollouts,
                   also by threshold, and left_to_right ones by threshold; other orders choose differently.
                   Mask-Aware Policy Gradients (2607.15200) and DCoLT (2505.10446) score positions too, by
                   Plackett-Luce; log F is exact for these samplers.

Exact when the update is on-policy and the order is random, left_to_right or surest_position (whose choice does
not depend on the draws and is piecewise constant in the weights); under low_confidence, and left_to_right by
threshold, only with choice = True. Not exact with truncate. Reduces to all steps, each of weight 1/T, with k = T
spread uniform draws (TraceRL and CJ-GRPO take the mean over a step's tokens, not the sum).
"""

from functools import partial
from math import inf

from unmask.core.advantage import Advantage, group_mean
from unmask.core.method import Method, check_functions, check_range, each_inner_step
from unmask.core.objective import KL, k3, step_clip, token_clip, token_divergence, trace_sum
from unmask.core.order import low_confidence
from unmask.core.specs import Record
from unmask.core.steps import StepDistribution, entropy_steps, sampled_steps, uniform_steps
from unmask.core.trace import all_tokens


def agrpo(
    draws: int = 4,
    steps: StepDistribution = uniform_steps,
    spread: bool = True,
    truncate: bool = False,
    choice: bool = False,
    low: float = 0.2,
    high: float = 0.2,
    kl: float = 0.0,
    kl_kind: KL = k3,
    advantage: Advantage = group_mean,
) -> Method:
    """Exact per-step policy gradients at sampled denoising steps. (The paper takes 24 draws of 128 steps.)"""
    check_range(0, inf, low=low, high=high)
    check_functions(steps=steps, kl_kind=kl_kind)
    objective = step_clip if choice else partial(token_clip, normaliser=trace_sum)
    return Method(
        name="agrpo",
        probe=each_inner_step(
            partial(sampled_steps, draws=draws, steps=steps, spread=spread, truncate=truncate, choice=choice)
        ),
        advantage=advantage,
        objective=partial(objective, low=low, high=high),
        record=Record(entropy=steps is entropy_steps, choice=choice),
        counted=all_tokens,
        kl=kl,
        divergence=partial(token_divergence, kl=kl_kind, normaliser=trace_sum),
        trajectory=True,
        order=low_confidence if choice else None,
        skip_zero_advantage=True,
    )
