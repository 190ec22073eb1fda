"""Surprise as credit: the plug-in of benchmarks/surprise.py. Alone: --with benchmarks/surprise_credit.py:surprise.

    w_i = (1 - share) + share * (1 - p_i) / mean(1 - p),     p_i the probability with which token i was drawn

The mean over the counted tokens of a rollout is one. The rule 1 - p is that of examples/own_rule.py.
"""

from dataclasses import replace

from torch import Tensor, where

from unmask.core.method import Method, check_range
from unmask.core.trace import Trace
from unmask.methods.daca import shuffled_steps


def surprise(base: Method, share: float = 1.0, shuffled: bool = False) -> Method:
    """Weight tokens by 1 - p; with `shuffled` the control, the same means of steps in another order."""
    check_range(0, 1.0001, share=share)

    def credit(trace: Trace) -> Tensor:
        surprise_BL = (1 - trace.logp_BL.exp()) * trace.counted_BL
        if shuffled:
            surprise_BL = shuffled_steps(surprise_BL, trace) * trace.counted_BL
        count_B1 = trace.counted_BL.sum(-1, keepdim=True).clamp(min=1)
        mean_B1 = surprise_BL.sum(-1, keepdim=True) / count_B1
        return (1 - share) + share * where(mean_B1 > 1e-9, surprise_BL / mean_B1.clamp(min=1e-9), 1.0)

    return replace(base, name=f"{base.name}+surprise", credit=credit)
