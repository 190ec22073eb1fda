"""One optimiser step; the only file of the trainer that calls backward.

Memory does not grow with the number of views, also where several rows meet in one ratio: d loss / d logp is taken at
the answers, and the sum of slope * logp is propagated back piece by piece. The gradient is the same.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from unmask.core.objective import Divergence, Objective
from unmask.core.policy import Policy
from unmask.core.probes import Probes, ask, at_states, chunks, empty, microbatches
from unmask.core.shapes import Metrics
from unmask.distributed.processes import ALONE, Ranks
from unmask.training.optim import MasterAdamW
from unmask.util.micro_batch import MicroBatch


@dataclass(frozen=True)
class LossTerm:
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
    skip_zero_advantage: bool = False
    """Where a trace's advantage is zero its answers move neither loss nor metrics as long as the policy is the old one:
    true of objectives that look at ratios alone. Such traces are not asked. False asks them all."""


Hear = Callable[[LossTerm, Tensor], None]
"""Is told the answers to a part's questions, (N, L); those of questions that were not live are zero."""


class NotFinite(ValueError):
    """An update is no finite number somewhere. Nothing has been stepped, and no gradient is left."""

    def __init__(self, what: str, metrics: Mapping[str, float]) -> None:
        self.metrics = dict(metrics)
        told = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        super().__init__(f"{what} is not finite ({told}): lower optimizer.lr, or check the method's options")


def term_loss(part: LossTerm, logp_NL: Tensor) -> tuple[Tensor, Metrics]:
    """weight * (objective + kl * divergence)."""
    old_NL = logp_NL.detach() if part.old_NL is None else part.old_NL.to(logp_NL.dtype)
    loss, metrics = part.objective(logp_NL, old_NL, part.probes, part.advantage_B, part.credit_BL)
    if part.kl and (part.reference_NL is None or part.divergence is None):
        raise ValueError(f"a part with kl={part.kl} needs the reference's answers and a divergence")
    if part.reference_NL is not None and part.divergence is not None:
        divergence = part.divergence(logp_NL, part.reference_NL, part.probes)
        loss, metrics = loss + part.kl * divergence, metrics | {"kl": divergence.detach()}
    return part.weight * loss, metrics | {"loss": (part.weight * loss).detach()}


@torch.no_grad()
def logprobs(policy: Policy, probes: Probes, rows: MicroBatch, ranks: Ranks = ALONE) -> Tensor:
    """What the policy says without gradient, (N, L), every process answering at its share of the states."""
    mine = ranks.share(len(probes.states_SL))
    while True:
        try:
            found = [(number_N, ask(policy, piece)) for number_N, piece in chunks(probes, rows.most, mine)]
            break
        except torch.OutOfMemoryError as error:
            _fewer(rows, ranks, error)
    if ranks.sharded:
        longest = -(-(len(probes.states_SL) // -ranks.size) // -rows.most)
        found += [(probes.state_N[:0], ask(policy, empty(probes))) for _ in range(longest - len(found))]
    if ranks.sharded and isinstance(policy, FSDPModule):
        policy.reshard()  # nothing comes back through these passes, so what surrounds the layers may go too
    return _summed(_put_together(probes, found), ranks)


def accumulate(policy: Policy, part: LossTerm, rows: int | MicroBatch, ranks: Ranks = ALONE) -> Metrics:
    """Add the gradient of one part to the parameters, with at most `rows` states in memory at a time.

    With several processes, each adds its share; `ranks.sum_gradients` puts the shares together.
    """
    rows = rows if isinstance(rows, MicroBatch) else MicroBatch(rows)
    known_NL = _summed(_backpropagated(policy, part, rows.most, ranks), ranks)
    with torch.no_grad():
        return term_loss(part, known_NL)[1]


def _backpropagated(policy: Policy, part: LossTerm, rows: int, ranks: Ranks) -> Tensor:
    """Add this process's share of the gradient; returns the answers it has heard, (N, L), zero elsewhere.

    A trace's states go through together, so that its slopes are known when its pass is still there to go back through.
    Where they are too many for one pass they are asked first without gradient.
    """
    probes, live_N, heard = part.probes, live_questions(part), []
    # Whose a trace is must not depend on `rows`, of which others may have fewer. Sharded, all have as many, and a pass
    # is one of all of them: who has less to ask than the others asks nothing beside them.
    everybody = range(ranks.size) if ranks.sharded else [ranks.rank]
    shares = {rank: microbatches(probes, rows, replace(ranks, rank=rank).share, live_N) for rank in everybody}
    mine = shares[ranks.rank]
    for turn in range(max(map(len, shares.values()))):
        bundle_S = mine[turn] if turn < len(mine) else probes.state_N[:0]
        passes = max(-(len(share[turn]) // -rows) for share in shares.values() if turn < len(share))
        number_N, pieces_S = _questions(probes, bundle_S), [bundle_S[i * rows : (i + 1) * rows] for i in range(passes)]
        pieces = [(_questions(probes, piece_S), _posed(probes, piece_S)) for piece_S in pieces_S]
        held = ask(policy, pieces[0][1]) if passes == 1 else None
        with torch.no_grad():
            said = [ask(policy, piece) for _, piece in pieces] if held is None else [held.detach()]
        known_NL = _put_together(probes, list(zip((piece_N for piece_N, _ in pieces), said, strict=True)))
        slope_NL = _slopes(part, known_NL, number_N)
        heard.append((number_N, known_NL[number_N]))
        for piece_N, piece in pieces:
            answer_NL = ask(policy, piece) if held is None else held
            # Sharded gradients are averaged on their way back.
            ((ranks.size if ranks.sharded else 1) * slope_NL[piece_N] * answer_NL).sum().backward()
    return _put_together(probes, heard)


def _slopes(part: LossTerm, known_NL: Tensor, number_N: Tensor) -> Tensor:
    """d loss / d logp of some questions, (N, L), at answers known for them: no loss mixes the answers of two traces."""
    stand_in_NL = torch.zeros_like(known_NL) if part.old_NL is None else part.old_NL.to(known_NL.dtype).clone()
    stand_in_NL[number_N] = known_NL[number_N]
    stand_in_NL.requires_grad_()
    loss, _ = term_loss(part, stand_in_NL)
    (slope_NL,) = torch.autograd.grad(loss, stand_in_NL)
    return slope_NL


def live_questions(part: LossTerm) -> Tensor:
    """Questions that are asked, (N,): all, but for traces that cannot teach anything."""
    if not part.skip_zero_advantage or part.old_NL is not None or part.reference_NL is not None:
        return torch.ones_like(part.probes.state_N, dtype=torch.bool)
    return part.advantage_B[part.probes.trace_N] != 0


def _questions(probes: Probes, state_S: Tensor) -> Tensor:
    """The numbers of the questions put at some states."""
    return torch.isin(probes.state_N, state_S).nonzero().squeeze(1)


def _posed(probes: Probes, state_S: Tensor) -> Probes:
    """The questions put at some states; at none, a pass that asks nothing."""
    return at_states(probes, state_S) if len(state_S) else empty(probes)


def _put_together(probes: Probes, found: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Answers in their places, (N, L)."""
    dtype = found[0][1].dtype if found else probes.share_NL.dtype
    answer_NL = torch.zeros(probes.share_NL.shape, dtype=dtype, device=probes.share_NL.device)
    for number_N, piece_NL in found:
        answer_NL[number_N] = piece_NL.to(dtype)
    return answer_NL


def _summed(answer_NL: Tensor, ranks: Ranks) -> Tensor:
    """The answers of all processes. In double: one that has heard none does not know the type of the others'."""
    return answer_NL if ranks.size == 1 else ranks.sum(answer_NL.double())


def _fewer(rows: MicroBatch, ranks: Ranks, error: torch.OutOfMemoryError) -> None:
    """Try again with fewer rows; sharded, the others would wait for a pass that does not come."""
    if ranks.sharded:
        raise error
    rows.halve(error)


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer | MasterAdamW,
    parts: list[LossTerm],
    rows: int | MicroBatch,
    max_norm: float,
    ranks: Ranks = ALONE,
    hear: Hear | None = None,
) -> Metrics:
    """One optimiser step on the sum of the parts. A loss or gradient that is not finite is NotFinite, before the step:
    all processes see the same sums, so they raise it together. `hear` is told what the policy has said to each part.

    When memory runs out, what this process has found is thrown away and found again with fewer rows.
    """
    rows, asked = (
        rows if isinstance(rows, MicroBatch) else MicroBatch(rows),
        [part for part in parts if len(part.probes.state_N)],
    )
    while True:
        optimizer.zero_grad(set_to_none=True)
        try:
            heard = [_backpropagated(policy, part, rows.most, ranks) for part in asked]
            break
        except torch.OutOfMemoryError as error:
            _fewer(rows, ranks, error)
    metrics: Metrics = {}
    with torch.no_grad():
        for part, known_NL in zip(asked, heard, strict=True):
            known_NL = _summed(known_NL, ranks)
            found = term_loss(part, known_NL)[1]
            if hear is not None:
                hear(part, known_NL)
            metrics |= {part.label + name: value for name, value in found.items()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    ranks.sum_gradients(parameters)
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    metrics["grad_norm"] = norm.full_tensor() if isinstance(norm, DTensor) else norm
    ill = [name for name, value in metrics.items() if name.endswith(("loss", "grad_norm")) and not value.isfinite()]
    if ill:
        optimizer.zero_grad(set_to_none=True)
        what = "the gradient" if "grad_norm" in ill else "the loss"
        raise NotFinite(what, {name: float(value) for name, value in metrics.items()})
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)  # as large as what is trained, and the next rollout needs the room
    return metrics
