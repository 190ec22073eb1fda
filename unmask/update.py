"""One optimiser step; the only file of the trainer that calls backward.

Memory does not grow with the number of views, also where several rows meet in one ratio: when the states do
not fit in one pass, d loss / d logp is taken from log-probabilities known without gradient, and then the sum of
coefficient * logp is propagated back piece by piece. The gradient is the same.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.models.policy import Policy
from unmask.objective import Divergence, Objective
from unmask.probes import Probes, ask, chunks
from unmask.shapes import Metrics


@dataclass(frozen=True)
class Part:
    """One term of the loss: a question, what is known about it, and how the answer becomes a loss."""

    probes: Probes
    advantage_B: Tensor
    credit_BL: Tensor
    objective: Objective
    old_NL: Tensor | None = None
    """None: the policy has not moved since it sampled, so the answer itself is the old one."""
    reference_NL: Tensor | None = None
    kl: float = 0.0
    divergence: Divergence | None = None
    weight: float = 1.0
    label: str = ""
    """What its metrics begin with."""


def part_loss(part: Part, logp_NL: Tensor) -> tuple[Tensor, Metrics]:
    """weight * (objective + kl * divergence)."""
    old_NL = logp_NL.detach() if part.old_NL is None else part.old_NL.to(logp_NL.dtype)
    loss, metrics = part.objective(logp_NL, old_NL, part.probes, part.advantage_B, part.credit_BL)
    if part.kl and (part.reference_NL is None or part.divergence is None):
        raise ValueError(f"a part with kl={part.kl} needs the reference's answers and a divergence")
    if part.reference_NL is not None and part.divergence is not None:
        divergence = part.divergence(logp_NL, part.reference_NL, part.probes)
        loss, metrics = loss + part.kl * divergence, metrics | {"kl": divergence.detach()}
    return part.weight * loss, metrics | {"loss": (part.weight * loss).detach()}


def accumulate(policy: Policy, part: Part, rows: int) -> Metrics:
    """Add the gradient of one part to the parameters, with at most `rows` states in memory at a time."""
    if len(part.probes.states_SL) <= rows:
        loss, metrics = part_loss(part, ask(policy, part.probes))
        loss.backward()
        return metrics
    with torch.no_grad():
        logp_NL = ask(policy, part.probes, rows)
    logp_NL.requires_grad_()
    loss, metrics = part_loss(part, logp_NL)
    (slope_NL,) = torch.autograd.grad(loss, logp_NL)
    for number_N, piece in chunks(part.probes, rows):
        (slope_NL[number_N] * ask(policy, piece)).sum().backward()
    return metrics


def update(
    policy: Policy, optimizer: torch.optim.Optimizer, parts: list[Part], rows: int, max_norm: float
) -> Metrics:
    """One optimiser step on the sum of the parts. A gradient that is not finite is an error, before the step."""
    optimizer.zero_grad(set_to_none=True)
    metrics: Metrics = {}
    for part in parts:
        found = accumulate(policy, part, rows) if len(part.probes.state_N) else {}
        metrics |= {part.label + name: value for name, value in found.items()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    metrics["grad_norm"] = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    if not metrics["grad_norm"].isfinite():
        told = ", ".join(f"{name} {float(value):.4g}" for name, value in metrics.items())
        raise ValueError(f"the gradient is not finite ({told}): lower optimizer.lr, or check the method's options")
    optimizer.step()
    return metrics
