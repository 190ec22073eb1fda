"""A likelihood term on the policy's own correct rollouts, for any base.

    loss = L_base + weight * L_raft,     L_raft as in methods/raft.py with states = uniform_sizes

Stable recipes have a term of this kind in common, e.g. LightningRL (arXiv 2603.13319): 0.1 times the mean negative
log-likelihood of correct rollouts. It pulls towards answers that are known to be right, while the base can use both
signs. Groups in which all rollouts are correct count here too. Correct is what has a reward of at least 1 before a KL
on the reward (reinforce_pp); the tokens that count are the base's.

Exact when weight = 0 and the base is exact. Reduces to the base with weight 0; the gradient of the sum is the base's
plus weight times RAFT's, bit for bit.
"""

from dataclasses import replace
from math import inf

from unmask.core.method import Estimator, Method, Term, check_range
from unmask.core.states import uniform_sizes
from unmask.core.strata import STRATA, Layout, random_strata
from unmask.methods.raft import raft


def keep_correct(
    base: Method,
    weight: float = 0.1,
    states: Estimator = uniform_sizes,
    strata: int = STRATA,
    layout: Layout = random_strata,
) -> Method:
    """Add RAFT's loss, a likelihood term on the policy's own correct rollouts."""
    check_range(0, inf, weight=weight)
    kept = raft(states, strata, layout)
    term = Term(
        probe=kept.probe,
        advantage=kept.advantage,
        objective=kept.objective,
        weight=weight,
        uses_old_logprobs=kept.uses_old_logprobs,
        skip_zero_advantage=kept.skip_zero_advantage,
        label="correct_",
        priced=False,
    )
    return replace(base, name=f"{base.name}+keep_correct", further=(*base.further, term))
