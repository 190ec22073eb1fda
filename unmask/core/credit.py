"""What credit rules share: sums over the tokens of a step, the control that shuffles the scores of steps, and the check
that a method has no other credit.
"""

import torch
from torch import Tensor

from unmask.core.method import Method, uniform_credit
from unmask.core.token_sampling import uniforms
from unmask.core.trace import Trace


def check_uniform_credit(base: Method, rule: str) -> None:
    """ValueError if the method has a credit that the rule would replace."""
    if base.credit is not uniform_credit:
        raise ValueError(f"{base.name} has a credit of its own, which {rule} would replace: use one of them")


def step_sums(value_BL: Tensor, trace: Trace) -> Tensor:
    """The sum over the tokens that each step committed, (B, T)."""
    step_BL = torch.where(trace.filled_BL, trace.step_BL, 0)
    return value_BL.new_zeros(len(trace), trace.steps).scatter_add(1, step_BL, value_BL * trace.filled_BL)


def shuffled_steps(score_BL: Tensor, trace: Trace) -> Tensor:
    """The control: the scores of the steps that wrote something, shuffled among those steps of the same trace.

    A gain that remains with them is not due to the scores. The permutation is a function of what the trace wrote.
    """
    place_L = torch.arange(trace.tokens_BL.shape[1], 0, -1, device=score_BL.device)
    seed_B = (trace.tokens_BL * place_L * trace.filled_BL).sum(-1)
    size_BT = step_sums(torch.ones_like(score_BL), trace)
    score_BT = step_sums(score_BL, trace) / size_BT.clamp(min=1)
    key_BT = uniforms(seed_B[:, None], torch.arange(trace.steps, device=score_BL.device))
    order_BT = key_BT.masked_fill(size_BT == 0, 2.0).argsort(-1)  # the steps that wrote something come first
    number_BT = ((size_BT > 0).cumsum(-1) - 1).clamp(min=0)
    step_BL = torch.where(trace.filled_BL, trace.step_BL, 0)
    return score_BT.gather(1, order_BT).gather(1, number_BT).gather(1, step_BL) * trace.filled_BL
