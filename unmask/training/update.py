"""One optimiser step: ask, objective, backward, step. The only file of the trainer that calls backward.

Memory does not grow with the number of probes, even if several of them share one ratio: d loss / d logp is taken at the
log-probabilities, and the sum of slope * logp is propagated back one micro-batch at a time. The gradient is the same.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from unmask.core.objective import CrossEntropy, Divergence, Objective
from unmask.core.policy import Policy
from unmask.core.probes import Probes, ask, ask_with_teacher, at_states, chunks, empty, microbatches
from unmask.core.shapes import Metrics
from unmask.distributed.processes import ALONE, Ranks
from unmask.distributed.sharding import whole
from unmask.training.optim import Optimizer
from unmask.util.micro_batch import MicroBatch, as_micro_batch


@dataclass(frozen=True)
class LossTerm:
    """One term of the loss: the probes, what is known about them, and the objective."""

    probes: Probes
    advantage_B: Tensor
    credit_BL: Tensor
    objective: Objective
    old_NL: Tensor | None = None
    """The old policy's log-probabilities. None: the policy has not changed since it sampled, so it is the old one."""
    reference_NL: Tensor | None = None
    kl: float = 0.0
    divergence: Divergence | None = None
    weight: float = 1.0
    label: str = ""
    """The prefix of its metrics."""
    skip_zero_advantage: bool = False
    """Skip the passes of traces with zero advantage. Exact when the objective depends on ratios alone: such a trace
    then changes neither loss nor metrics while the policy is the old one."""
    teacher: Policy | None = None
    """Asked together with the policy, if the term has `distillation`."""
    distillation: float = 0.0
    cross_entropy: CrossEntropy | None = None


OnLogprobs = Callable[[LossTerm, Tensor], None]
"""Called with a term and the policy's log-probabilities at its probes, (N, L); zero for probes that were skipped."""


class NotFinite(ValueError):
    """A loss or gradient is not finite. The optimiser has not stepped, and gradients are cleared."""

    def __init__(self, what: str, metrics: Mapping[str, float]) -> None:
        self.metrics = dict(metrics)
        values = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        super().__init__(f"{what} is not finite ({values}): lower optimizer.lr, or check the method's options")


class BrokenUpdate(NamedTuple):
    """An update that was skipped because it was not finite."""

    inner_step: int
    terms: list[LossTerm]
    """Empty if the rollouts were not finite."""
    error: NotFinite


@dataclass(frozen=True)
class UpdateResult:
    """The metrics of the finished inner steps, and the inner step that was not finite, which is the last."""

    metrics: list[Metrics] = field(default_factory=list)
    broken: BrokenUpdate | None = None

    def means(self) -> dict[str, float]:
        """The mean of each metric over the inner steps."""
        names = dict.fromkeys(name for step in self.metrics for name in step)
        values = {name: [float(step[name]) for step in self.metrics if name in step] for name in names}
        return {f"train/{name}": sum(each) / len(each) for name, each in values.items()}


def term_loss(term: LossTerm, logp_NL: Tensor, cross_NL: Tensor | None = None) -> tuple[Tensor, Metrics]:
    """weight * (objective + kl * divergence + distillation * cross-entropy), from the policy's log-probabilities and
    its cross-entropies to the teacher (`answers`)."""
    old_NL = logp_NL.detach() if term.old_NL is None else term.old_NL.to(logp_NL.dtype)
    loss, metrics = term.objective(logp_NL, old_NL, term.probes, term.advantage_B, term.credit_BL)
    if term.kl and (term.reference_NL is None or term.divergence is None):
        raise ValueError(f"a term with kl={term.kl} needs the reference's log-probabilities and a divergence")
    if term.reference_NL is not None and term.divergence is not None:
        divergence = term.divergence(logp_NL, term.reference_NL, term.probes)
        loss, metrics = loss + term.kl * divergence, metrics | {"kl": divergence.detach()}
    if term.distillation:
        if cross_NL is None or term.cross_entropy is None:
            raise ValueError(f"a term with distillation={term.distillation} needs its cross-entropies to a teacher")
        cross = term.cross_entropy(cross_NL, term.probes)
        loss, metrics = loss + term.distillation * cross, metrics | {"cross_entropy": cross.detach()}
    return term.weight * loss, metrics | {"loss": (term.weight * loss).detach()}


def _loss_of(term: LossTerm, value_ANL: Tensor) -> tuple[Tensor, Metrics]:
    return term_loss(term, value_ANL[0], None if term.teacher is None else value_ANL[1])


@torch.no_grad()
def logprobs(policy: Policy, probes: Probes, micro_batch: int | MicroBatch, ranks: Ranks = ALONE) -> Tensor:
    """The policy's log-probabilities without gradient, (N, L). Every process computes its share of the states."""
    micro_batch, mine = as_micro_batch(micro_batch), ranks.share(len(probes.states_SL))
    while True:
        try:
            size = micro_batch.size
            pieces = [(number_N, ask(policy, piece)[None]) for number_N, piece in chunks(probes, size, mine)]
            break
        except torch.OutOfMemoryError as error:
            _shrink(micro_batch, ranks, error)
    if ranks.sharded:
        longest = -(-(len(probes.states_SL) // -ranks.size) // -micro_batch.size)
        pieces += [(probes.state_N[:0], ask(policy, empty(probes))[None]) for _ in range(longest - len(pieces))]
    _reshard(policy, ranks)
    return _sum(_assemble(probes, pieces)[0], ranks)


def answers(policy: Policy, term: LossTerm, probes: Probes) -> Tensor:
    """What a term needs of the policy at some of its probes: the log-probabilities, (1, N, L), and with a teacher the
    cross-entropies, (2, N, L)."""
    if term.teacher is None:
        return ask(policy, probes)[None]
    return torch.stack(ask_with_teacher(policy, term.teacher, probes))


def accumulate(policy: Policy, term: LossTerm, micro_batch: int | MicroBatch, ranks: Ranks = ALONE) -> Metrics:
    """Add the gradient of one term to the parameters, with at most `micro_batch` masked states in a pass. Each process
    adds its share; `ranks.sum_gradients` sums the shares."""
    found_ANL = _sum(_backpropagate(policy, term, as_micro_batch(micro_batch).size, ranks), ranks)
    with torch.no_grad():
        return _loss_of(term, found_ANL)[1]


def _backpropagate(policy: Policy, term: LossTerm, size: int, ranks: Ranks) -> Tensor:
    """Add this process's share of the gradient; returns the answers it computed, (A, N, L), zero elsewhere.

    The states of a trace share a pass, so its slopes are known while the graph of the pass still exists. If they do not
    fit into one pass, they are asked without gradient first.
    """
    probes, live_N, found, kinds = term.probes, live_questions(term), [], 1 if term.teacher is None else 2
    # Which process has a trace must not depend on `size`, which can differ between processes. With sharded weights
    # `size` is the same and all processes run a pass together: one with fewer states takes part with an empty pass.
    everybody = range(ranks.size) if ranks.sharded else [ranks.rank]
    shares = {rank: microbatches(probes, size, replace(ranks, rank=rank).share, live_N) for rank in everybody}
    mine = shares[ranks.rank]
    for turn in range(max(map(len, shares.values()))):
        states_S = mine[turn] if turn < len(mine) else probes.state_N[:0]
        passes = max(-(len(share[turn]) // -size) for share in shares.values() if turn < len(share))
        number_N, pieces_S = _questions(probes, states_S), [states_S[i * size : (i + 1) * size] for i in range(passes)]
        pieces = [
            (_questions(probes, piece_S), at_states(probes, piece_S) if len(piece_S) else empty(probes))
            for piece_S in pieces_S
        ]
        with_graph = answers(policy, term, pieces[0][1]) if passes == 1 else None
        with torch.no_grad():
            each = [with_graph.detach()] if with_graph is not None else [answers(policy, term, p) for _, p in pieces]
        value_ANL = _assemble(probes, list(zip((piece_N for piece_N, _ in pieces), each, strict=True)), kinds)
        slope_ANL = _slopes(term, value_ANL, number_N)
        found.append((number_N, value_ANL[:, number_N]))
        for piece_N, piece in pieces:
            answer_ANL = answers(policy, term, piece) if with_graph is None else with_graph
            # FSDP averages gradients in the backward pass; the factor turns the mean into a sum.
            ((ranks.size if ranks.sharded else 1) * slope_ANL[:, piece_N] * answer_ANL).sum().backward()
    if term.teacher is not None:
        _reshard(term.teacher, ranks)
    return _assemble(probes, found, kinds)


def _slopes(term: LossTerm, value_ANL: Tensor, number_N: Tensor) -> Tensor:
    """d loss / d answer at some probes, (A, N, L). The others do not matter, because no loss mixes two traces."""
    stand_in_ANL = torch.zeros_like(value_ANL)
    if term.old_NL is not None:
        stand_in_ANL[0] = term.old_NL.to(value_ANL.dtype)
    stand_in_ANL[:, number_N] = value_ANL[:, number_N]
    stand_in_ANL.requires_grad_()
    loss, _ = _loss_of(term, stand_in_ANL)
    (slope_ANL,) = torch.autograd.grad(loss, stand_in_ANL)
    return slope_ANL


def live_questions(term: LossTerm) -> Tensor:
    """The probes that are asked, (N,): all except those of traces whose gradient is known to be zero."""
    pulled = term.reference_NL is not None or term.teacher is not None
    if not term.skip_zero_advantage or term.old_NL is not None or pulled:
        return torch.ones_like(term.probes.state_N, dtype=torch.bool)
    return term.advantage_B[term.probes.trace_N] != 0


def _questions(probes: Probes, state_S: Tensor) -> Tensor:
    """The numbers of the probes at some states."""
    return torch.isin(probes.state_N, state_S).nonzero().squeeze(1)


def _assemble(probes: Probes, pieces: list[tuple[Tensor, Tensor]], kinds: int = 1) -> Tensor:
    """The answers of the pieces, (A, N, L), of A kinds."""
    dtype = pieces[0][1].dtype if pieces else probes.share_NL.dtype
    whole_ANL = torch.zeros((kinds, *probes.share_NL.shape), dtype=dtype, device=probes.share_NL.device)
    for number_N, piece_ANL in pieces:
        whole_ANL[:, number_N] = piece_ANL.to(dtype)
    return whole_ANL


def _sum(answers: Tensor, ranks: Ranks) -> Tensor:
    """The answers of all processes, in double: a process without any does not know the dtype."""
    return answers if ranks.size == 1 else ranks.sum(answers.double())


def _reshard(policy: Policy, ranks: Ranks) -> None:
    """Free embedding and head of sharded weights, if no backward pass of this policy follows."""
    if ranks.sharded and hasattr(policy, "reshard"):
        policy.reshard()


def _shrink(micro_batch: MicroBatch, ranks: Ranks, error: torch.OutOfMemoryError) -> None:
    """Halve the micro-batch for a retry. With sharded weights this raises: the other processes could not follow."""
    if ranks.sharded:
        raise error
    micro_batch.halve(error)


def update(
    policy: Policy,
    optimizer: Optimizer,
    terms: list[LossTerm],
    micro_batch: int | MicroBatch,
    max_grad_norm: float,
    ranks: Ranks = ALONE,
    on_logprobs: OnLogprobs | None = None,
) -> Metrics:
    """One optimiser step on the sum of the terms. Raises NotFinite before the step if loss or gradient is not finite;
    all processes see the same sums, so they raise together. When memory runs out, this process computes its gradient
    again with a smaller micro-batch."""
    micro_batch, asked = as_micro_batch(micro_batch), [term for term in terms if len(term.probes.state_N)]
    while True:
        optimizer.zero_grad(set_to_none=True)
        try:
            computed = [_backpropagate(policy, term, micro_batch.size, ranks) for term in asked]
            break
        except torch.OutOfMemoryError as error:
            _shrink(micro_batch, ranks, error)
    metrics: Metrics = {}
    with torch.no_grad():
        for term, found_ANL in zip(asked, computed, strict=True):
            found_ANL = _sum(found_ANL, ranks)
            if on_logprobs is not None:
                on_logprobs(term, found_ANL[0])
            metrics |= {term.label + name: value for name, value in _loss_of(term, found_ANL)[1].items()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    ranks.sum_gradients(parameters)
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    metrics["grad_norm"] = whole(norm)
    bad = [name for name, value in metrics.items() if name.endswith(("loss", "grad_norm")) and not value.isfinite()]
    if bad:
        optimizer.zero_grad(set_to_none=True)
        what = "the gradient" if "grad_norm" in bad else "the loss"
        raise NotFinite(what, {name: float(value) for name, value in metrics.items()})
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)  # frees memory for the next rollout
    return metrics


def inner_updates(
    policy: Policy,
    optimizer: Optimizer,
    steps: list[list[LossTerm]],
    micro_batch: MicroBatch,
    max_grad_norm: float,
    ranks: Ranks = ALONE,
    on_logprobs: OnLogprobs | None = None,
) -> UpdateResult:
    """One optimiser step for each list of terms, up to the first that is not finite. `on_logprobs` is called in the
    first step only."""
    result = UpdateResult()
    for number, terms in enumerate(steps):
        hook = None if number else on_logprobs
        try:
            result.metrics.append(update(policy, optimizer, terms, micro_batch, max_grad_norm, ranks, hook))
        except NotFinite as error:
            return replace(result, broken=BrokenUpdate(number, terms, error))
    return result
