"""DiSPO (arXiv 2602.06462): compare fillings of the same intermediate state, for any base.

    at one state s_t of every rollout, t drawn before it with probability in proportion to ((t + 1) / T) ** lateness:
    a_z ~ product over the masked i of p(. | s_t, i),   z = 1 .. Z;   R_z = reward of s_t filled with a_z
    L_step = - 1/(states * Z * L) sum over states, z, newly filled i of Clip(p(a_zi | s_t) / p_old(...), R_z - mean R)
    loss   = L_base + weight * (L_step + kl * KL of the branches to the reference)

The base uses the rollouts only; branches have their own groups, credit one, and one question at the shared state. The
fillings are drawn after the rollout, from one full pass over the rows at their states, with or without a cache. The
paper writes a sequence ratio and builds on code that clips token by token; we clip token by token. It does not print
the exact form of its late bias; this one is ours. If a row has retired before its branch step, the branch is dropped:
the mean is over the states that remain.

Exact when on-policy, for its own objective: the expectation is (Z - 1) / (Z L) grad J_step, with J_step the value of
filling a visited state in one shot; with advantage = leave_one_out there is no factor (Z - 1) / Z. It is not the
gradient of the sampler's own return. Reduces to the base with weight 0, and if all fillings have the same reward.
"""

from dataclasses import replace
from functools import partial
from math import inf

from unmask.core.advantage import Advantage, group_mean
from unmask.core.method import MOST, Method, Term, check_functions, check_range
from unmask.core.objective import canvas_mean, token_clip, token_divergence
from unmask.core.probes import one_shot
from unmask.core.specs import Branch


def dispo(
    base: Method,
    branches: int = 2,
    weight: float = 0.5,
    lateness: float = 4.0,
    low: float = 0.2,
    high: float = 0.2,
    kl: float = 0.0,
    advantage: Advantage = group_mean,
) -> Method:
    """Branch at a visited state, score the fillings, update only what they filled."""
    if branches < 2:
        raise ValueError(f"branches={branches} must be at least 2: the fillings of a state are compared")
    check_range(2, MOST + 1, branches=branches)
    check_range(0, inf, weight=weight, low=low, high=high, kl=kl)
    check_range(-1000, 1000, lateness=lateness)
    check_functions(advantage=advantage)
    term = Term(
        probe=lambda trace, rng, inner_steps: [one_shot(trace)] * inner_steps,
        branch=Branch(branches, lateness),
        label="branch_",
        weight=weight,
        advantage=advantage,
        objective=partial(token_clip, low=low, high=high, normaliser=canvas_mean),
        kl=kl,
        divergence=partial(token_divergence, normaliser=canvas_mean),
        skip_zero_advantage=True,
    )
    return replace(base, name=f"{base.name}+dispo", further=(*base.further, term))
