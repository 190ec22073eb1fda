"""Credit rules: what each step of a rollout is worth, by the methods of the library or by a function of your own.

A rule gives a weight to every token, and the gradient of a token is multiplied by advantage * weight. In the exact
policy gradient the sum of a step's token gradients is multiplied by V(s_{t+1}) - V(s_t). So the number to compare with
it is advantage * the mean weight of the tokens that the step committed: a sum would count the number of tokens twice.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from unmask.core.method import uniform_credit
from unmask.core.steps import uniform_steps
from unmask.core.trace import Trace
from unmask.methods.daca import SCOPES, VARIANTS, progress_credit
from unmask.methods.surprise import surprise_credit
from unmask.util.user_file import run_file

CreditFunction = Callable[[Trace], Tensor]
"""Rollouts -> the weight of every token, (B, L)."""


class StepCredit(NamedTuple):
    """What a rule says of every step that wrote something, (B, T)."""

    name: str
    weight_BT: Tensor
    gradient_BT: Tensor
    """What multiplies the step's gradient: advantage times weight."""
    forwards: float
    """Forward passes for each rollout, beyond those of the rollout."""


def built_in_rules() -> dict[str, CreditFunction]:
    """Uniform credit, DPS in every variant and scope and at strength 1, surprise, and their shuffled controls."""
    rules: dict[str, CreditFunction] = {"uniform": uniform_credit}
    for variant, score in VARIANTS.items():
        for scope, traces in SCOPES.items():
            options = (
                ["dps"] + [f"variant={variant}"] * (variant != "likelihood") + [f"scope={scope}"] * (scope != "group")
            )
            rules[":".join(options)] = partial(progress_credit, variant=score, scope=traces)
    rules["dps:strength=1"] = partial(progress_credit, strength=1.0)
    rules["dps:shuffled=true"] = partial(progress_credit, shuffled=True)
    rules["surprise"] = surprise_credit
    rules["surprise:shuffled=true"] = partial(surprise_credit, shuffled=True)
    return rules


def own_rule(path: Path) -> CreditFunction:
    """The function `credit` in a user's file, which is run."""
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"{path}: there is no such Python file; a rule is a file with a function credit(trace)")
    function = getattr(run_file(path).module, "credit", None)
    if not callable(function):
        raise ValueError(f"{path}: there is no function credit(trace) in it; define one that returns (B, L) weights")
    return checked_rule(function, str(path))


def checked_rule(function: CreditFunction, name: str) -> CreditFunction:
    """A user's rule, with a ValueError unless it returns a weight for every token."""

    def credit(trace: Trace) -> Tensor:
        try:
            weight_BL = function(trace)
        except Exception as error:
            raise ValueError(f"{name}: credit raised {type(error).__name__}: {error}") from error
        shape = tuple(trace.tokens_BL.shape)
        if not isinstance(weight_BL, Tensor) or tuple(weight_BL.shape) != shape:
            got = f"the shape {tuple(weight_BL.shape)}" if isinstance(weight_BL, Tensor) else type(weight_BL).__name__
            raise ValueError(
                f"{name}: credit must return a tensor of the shape {shape} (traces x canvas columns, as "
                f"trace.tokens_BL), got {got}"
            )
        weight_BL = weight_BL.detach().to(trace.logp_BL)
        if not weight_BL[trace.filled_BL].isfinite().all():
            raise ValueError(f"{name}: credit returned a weight that is not a finite number")
        return weight_BL

    return credit


def step_means(value_BL: Tensor, trace: Trace) -> Tensor:
    """The mean over the tokens that each step committed, (B, T); 0 if there are none."""
    step_BL = torch.where(trace.filled_BL, trace.step_BL, 0)
    blank_BT = torch.zeros(len(trace), trace.steps, dtype=torch.float64, device=step_BL.device)
    sum_BT = blank_BT.scatter_add(1, step_BL, value_BL.double() * trace.filled_BL)
    return sum_BT / blank_BT.scatter_add(1, step_BL, trace.filled_BL.double()).clamp(min=1)


def weighted(name: str, rule: CreditFunction, trace: Trace, advantage_B: Tensor) -> StepCredit:
    """The credit of a rule that weights tokens."""
    weight_BT = step_means(rule(trace), trace)
    return StepCredit(name, weight_BT, advantage_B[:, None].double() * weight_BT, 0.0)


def valued(name: str, value_BT: Tensor, trace: Trace, forwards: float) -> StepCredit:
    """The credit of a rule that values states, (B, T + 1): the difference, which has the advantage in it."""
    change_BT = value_BT.diff(dim=-1).double() * (uniform_steps(trace) > 0)
    return StepCredit(name, change_BT, change_BT, forwards)
