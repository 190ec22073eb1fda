"""Probes: masked states at which the policy is asked about tokens it has already written; and `ask`.

A likelihood estimator is a function Trace -> Probes. The old, the reference and the current policy answer the
same Probes, so they are asked the same question by construction.

    unit      a (trace, term) pair. Within a unit a token's log-likelihood is the sum of share * logp over the
              rows that ask about it (unit_likelihood); then there is one ratio, one clip, one KL.
    question  a row: a state, the tokens asked there, and the share each answer has in its unit.

The estimators of one paper are in that paper's file; here are those that several papers use.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unmask.core.answers import asked_logprobs, in_pieces
from unmask.core.causal import finished_text, share_states
from unmask.core.choice import cut, log_mass_below, log_mass_outside
from unmask.core.policy import BlockCausalPolicy, Policy
from unmask.core.shapes import GIVEN
from unmask.core.trace import Trace, state_before

ONLY_VISITED = (
    "rollouts that append their blocks (rollout.append) can be scored at the states that they visited only: use agrpo, "
    "trace_rl with merge=1, or vine"
)


@dataclass(frozen=True)
class Probes:
    trace: Trace
    """Whose tokens are asked about, and how they were sampled."""
    states_SL: Tensor
    attended_SL: Tensor
    state_N: Tensor
    """The state each question is asked at."""
    unit_N: Tensor
    asked_NL: Tensor
    share_NL: Tensor
    """The part of the token's log-likelihood that this row supplies."""
    trace_M: Tensor
    weight_M: Tensor
    """The weight of each unit in the loss: importance weights of sampled steps."""
    visited: bool = False
    """The states are those the tokens were drawn at: the truncation applies as it did then."""
    passed_NL: Tensor | None = None
    """Positions a low-confidence step looked at and did not keep; asked for log F (`ask`), share 1."""
    clean_SL: Tensor | None = None
    """Of a block-causal model: the text before a token's own block, as the sampler saw it; None: as in the state."""

    @property
    def trace_N(self) -> Tensor:
        return self.trace_M[self.unit_N]


def views(
    trace: Trace, masked_KBL: Tensor, asked_KBL: Tensor, share_KBL: Tensor | None = None, apart: bool = False
) -> Probes:
    """K masked canvases a trace, all in one unit, or one unit each if they are `apart`. Only what was filled can be
    asked; empty rows are dropped."""
    if trace.appended:
        raise ValueError(ONLY_VISITED)
    views_K, batch, width = masked_KBL.shape
    asked_KBL = asked_KBL & trace.filled_BL
    share_KBL = torch.ones_like(asked_KBL, dtype=torch.float64) if share_KBL is None else share_KBL
    trace_B = torch.arange(batch, device=asked_KBL.device)
    number_N = torch.arange(views_K * batch, device=asked_KBL.device)
    trace_M = trace_B.repeat(views_K) if apart else trace_B
    clean_KBL = finished_text(trace, masked_KBL, asked_KBL)
    probes = Probes(
        trace=trace,
        states_SL=trace.tokens_BL.masked_fill(masked_KBL, trace.mask_id).flatten(0, 1),
        attended_SL=trace.attended_BL.repeat(views_K, 1),
        state_N=number_N,
        unit_N=number_N if apart else trace_B.repeat(views_K),
        asked_NL=asked_KBL.flatten(0, 1),
        share_NL=share_KBL.expand(views_K, batch, width).flatten(0, 1),
        trace_M=trace_M,
        weight_M=torch.ones(len(trace_M), dtype=torch.float64, device=asked_KBL.device),
        clean_SL=None if clean_KBL is None else clean_KBL.flatten(0, 1),
    )
    return at_states(probes, probes.asked_NL.any(-1))


def at_states(probes: Probes, state_index: Tensor) -> Probes:
    """The questions asked at some of the states (booleans or positions, in ascending order)."""
    picked_S = torch.zeros(len(probes.states_SL), dtype=torch.bool, device=probes.state_N.device)
    picked_S[state_index] = True
    number_S = picked_S.long().cumsum(0) - 1
    row_N = picked_S[probes.state_N]
    rows = {name: value[row_N] for name, value in _rows(probes).items()} | {"state_N": number_S[probes.state_N][row_N]}
    return replace(probes, **_states(probes, picked_S), **rows)


def _states(probes: Probes, index: Tensor | slice) -> dict[str, Any]:
    """The tensors with one row for each state, at some of the states, by name."""
    states = {"states_SL": probes.states_SL, "attended_SL": probes.attended_SL, "clean_SL": probes.clean_SL}
    return {name: value[index] for name, value in states.items() if value is not None}


def _rows(probes: Probes) -> dict[str, Any]:
    """The tensors with one row for each question, by name."""
    rows = {f.name: getattr(probes, f.name) for f in fields(probes) if f.name.endswith(("_N", "_NL"))}
    return {name: value for name, value in rows.items() if value is not None}


def chunks(probes: Probes, size: int, states: range | None = None) -> Iterator[tuple[Tensor, Probes]]:
    """The Probes (or some of their states) in pieces of at most `size` states, with the numbers of their questions."""
    states = range(len(probes.states_SL)) if states is None else states
    for start in states[::size]:
        stop = min(start + size, states.stop)
        inside_N = (probes.state_N >= start) & (probes.state_N < stop)
        yield inside_N.nonzero().squeeze(1), at_states(probes, torch.arange(start, stop, device=inside_N.device))


def microbatches(
    probes: Probes, most: int, share: Callable[[int], range] = range, live_N: Tensor | None = None
) -> list[Tensor]:
    """States in micro-batches of at most `most`, those of one trace together (in one of their own if they are more).

    Traces without a live question are left out; share(count) is the range of the others that are wanted.
    """
    count, device = len(probes.states_SL), probes.state_N.device
    traces = len(probes.trace)
    pair_P = (probes.state_N * traces + probes.trace_N).unique()  # as numbers: unique(dim=1) is far slower
    state_P, trace_P = pair_P // traces, pair_P % traces
    component_S = torch.zeros(count, dtype=torch.long, device=device)
    if len(pair_P) == count:  # every state belongs to one trace
        component_S[state_P] = trace_P
    elif len(pair_P) == len(trace_P.unique()):  # every trace has one state, which siblings share
        component_S = torch.arange(count, device=device)
    _, component_S, size_C = component_S.unique(return_inverse=True, return_counts=True)
    live_C = torch.zeros_like(size_C, dtype=torch.bool)
    live_C[component_S[probes.state_N if live_N is None else probes.state_N[live_N]]] = True
    sizes = size_C[live_C].tolist()
    mine, batches = share(len(sizes)), list[int]()
    for size in sizes[mine.start : mine.stop]:
        if batches and batches[-1] + size <= most:
            batches[-1] += size
        else:
            batches.append(size)
    first = sum(sizes[: mine.start])
    state_S = component_S.argsort(stable=True)
    state_S = state_S[live_C[component_S[state_S]]][first : first + sum(batches)]
    return [batch_S.sort().values for batch_S in state_S.split(batches)] if batches else []


def empty(probes: Probes) -> Probes:
    """One state and no questions: a pass without effect, for a process that has nothing to ask while others do."""
    nothing = {name: value[:0] for name, value in _rows(probes).items()}
    return replace(probes, **_states(probes, slice(1)), **nothing)


def ask(policy: Policy, probes: Probes, micro_batch: int | None = None) -> Tensor:
    """Log-probability of every asked token, (N, L), zero elsewhere: by the distribution it was sampled from.

    At `passed` positions the answer is log F, with F the probability that a draw there ranks below every draw that was
    kept (docs/estimators.md): with c the lexicographic minimum of (score, -position) over the kept draws,
    F_j(c) = sum of q_j(v) over v with (score_j(v), -j) < c. The sum of a row is then the exact log-probability of a
    low-confidence step, tokens and choice of positions together. By threshold, c is the threshold itself if more draws
    were kept than a step commits at least, or all that were kept reach it; otherwise these were the surest draws, and c
    is as before. In the order left_to_right it was the leftmost draw, and c is the threshold. If the sampler recorded
    how many tokens of a position rank above c (specs.Record, choice), F is the mass outside that many likeliest tokens:
    rounding between sampler and scorer then moves no token across c.

    Answers are at least FLOOR: the sampler need not have visited a state of an estimator, and a policy with logits of
    -inf may be asked there about a token it cannot write. `micro_batch` limits the states in one pass.
    """
    _check_likelihood(probes)
    if not len(probes.states_SL):
        return torch.zeros_like(probes.share_NL)
    if micro_batch is not None and micro_batch < 1:
        raise ValueError(f"the micro-batch size must be at least 1, not {micro_batch}")
    if micro_batch is None or len(probes.states_SL) <= micro_batch:
        return _answers(policy, probes)[0]
    pieces = [(number_N, _answers(policy, piece)[0]) for number_N, piece in chunks(probes, micro_batch)]
    out_NL = torch.zeros_like(probes.share_NL, dtype=pieces[0][1].dtype)
    for number_N, piece_NL in pieces:
        out_NL[number_N] = piece_NL
    return out_NL


def ask_with_teacher(policy: Policy, teacher: Policy, probes: Probes) -> tuple[Tensor, Tensor]:
    """The answers of `ask`, and the cross-entropy of the teacher's and the policy's distribution at every asked
    position, - sum_v p_teacher(v) log p(v) over the vocabulary, (N, L), zero elsewhere.

    Both distributions have the temperature of the rollouts, and nothing is cut by top_k or top_p. The teacher gets no
    gradient. As with `ask`, logits never exist for all positions.
    """
    _check_likelihood(probes)
    if not len(probes.states_SL):
        return torch.zeros_like(probes.share_NL), torch.zeros_like(probes.share_NL)
    logp_NL, cross_NL = _answers(policy, probes, teacher)
    return logp_NL, cross_NL


def _check_likelihood(probes: Probes) -> None:
    if probes.trace.sampling.guidance:
        raise ValueError("a guided trace has no likelihood under the policy alone: sample with guidance 0")
    if probes.trace.sampling.temperature == 0:
        raise ValueError("a greedy trace (temperature 0) has no likelihood: sample at a temperature above 0")


def _answers(policy: Policy, probes: Probes, teacher: Policy | None = None) -> tuple[Tensor, ...]:
    """One pass through the trunk; then the head, piece by piece, so that logits never exist for all positions. The
    log-probabilities, (N, L), and with a teacher the cross-entropies."""
    asked_Q = probes.asked_NL.nonzero(as_tuple=True)
    passed_Q = None if probes.passed_NL is None else probes.passed_NL.nonzero(as_tuple=True)
    row, column = asked_Q if passed_Q is None else map(torch.cat, zip(asked_Q, passed_Q, strict=True))
    at_Q = probes.state_N[row] * probes.asked_NL.shape[1] + column
    count, source = len(asked_Q[0]), probes.trace_N[asked_Q[0]]
    taught_QD = None
    if teacher is not None:
        with torch.no_grad():
            taught_QD = _hidden(teacher, probes, at_Q[:count])
    hidden_QD = _hidden(policy, probes, at_Q)

    token_Q = probes.trace.tokens_BL[source, asked_Q[1]]
    kept_QK = None
    if probes.visited and (kept_BCK := probes.trace.seen.get("kept")) is not None:
        kept_QK = kept_BCK[source, asked_Q[1] - (probes.asked_NL.shape[1] - kept_BCK.shape[1])]
    answer, heads = partial(asked_logprobs, teacher=teacher), 1 if teacher is None else 2
    about: tuple[Tensor | None, ...] = (token_Q, kept_QK, taught_QD)
    score_Q, *answers = in_pieces(policy, answer, probes.trace, hidden_QD[:count], about, heads)
    blank_NL = torch.zeros(probes.asked_NL.shape, dtype=score_Q.dtype, device=score_Q.device)
    answer_NL, *cross = (blank_NL.index_put(asked_Q, answer_Q) for answer_Q in answers)
    if passed_Q is None:
        return answer_NL, *cross

    row, column = passed_Q
    if probes.visited and (above_TBC := probes.trace.seen.get("step_above")) is not None:
        step_N = torch.where(probes.asked_NL, probes.trace.step_BL[probes.trace_N], 0).max(-1).values
        at = (step_N[row], probes.trace_N[row], column - (probes.asked_NL.shape[1] - above_TBC.shape[2]))
        (log_f,) = in_pieces(policy, log_mass_outside, probes.trace, hidden_QD[count:], (above_TBC[at],))
    else:
        score_NL = torch.full_like(answer_NL, torch.inf).index_put(asked_Q, score_Q.detach())
        column_NL = torch.arange(score_NL.shape[1], device=score_NL.device).expand_as(score_NL)
        least_N, place_N = cut(score_NL, column_NL, probes.trace)
        about = (least_N[row], column < place_N[row])
        (log_f,) = in_pieces(policy, log_mass_below, probes.trace, hidden_QD[count:], about)
    return answer_NL.index_put(passed_Q, log_f), *cross


def _hidden(policy: Policy, probes: Probes, at_Q: Tensor) -> Tensor:
    """The pass through the trunk; of a block-causal policy, with the context that the sampler had."""
    attended_SL = None if probes.attended_SL.all() else probes.attended_SL
    if probes.clean_SL is None:
        return policy.hidden(probes.states_SL, attended_SL, at_Q)
    if not isinstance(policy, BlockCausalPolicy):
        raise ValueError("this block-causal policy cannot be asked: it needs the method hidden_two_streams")
    block = probes.trace.causal_block
    assert block is not None
    return policy.hidden_two_streams(probes.states_SL, probes.clean_SL, attended_SL, at_Q, block)


def unit_likelihood(logp_NL: Tensor, probes: Probes) -> Tensor:
    """Log-likelihood of each token in each unit, (M, L): the share-weighted sum over the rows that ask."""
    share_NL = probes.share_NL.to(logp_NL.dtype)
    total_ML = torch.zeros(len(probes.trace_M), logp_NL.shape[1], dtype=logp_NL.dtype, device=logp_NL.device)
    return total_ML.index_add(0, probes.unit_N, share_NL * logp_NL)


def unit_asked(probes: Probes) -> Tensor:
    """Which tokens each unit asks about, (M, L)."""
    asked_ML = torch.zeros(len(probes.trace_M), probes.asked_NL.shape[1], device=probes.unit_N.device)
    return asked_ML.index_add(0, probes.unit_N, probes.asked_NL.float()) > 0


def fully_masked(trace: Trace, rng: torch.Generator, prompt_masking: float = 0.0) -> Probes:
    """Mean field: every token asked with the whole completion masked, one forward (d1, 2504.12216).

    `prompt_masking` hides each prompt token with that probability.
    """
    masked_BL = trace.canvas_BL
    if prompt_masking:
        masked_BL = masked_BL | (trace.attended_BL & (uniform(rng, trace.canvas_BL) < prompt_masking))
    return views(trace, masked_BL[None], trace.canvas_BL[None])


def segmented(trace: Trace, rng: torch.Generator, segments: int = 4, prompt_masking: float = 0.0) -> Probes:
    """Visited states merged: the tokens of a segment of steps are asked at the segment's first state
    (d2-StepMerge, 2509.21474). With T segments it asks what every_step asks, but does not apply the cuts of top_k and
    top_p; with one it is mean field. `prompt_masking` as in fully_masked, the same in all segments."""
    if not 1 <= segments <= trace.steps:
        raise ValueError(f"segments={segments} must lie between 1 and the {trace.steps} denoising steps")
    edge_K = torch.arange(segments + 1, device=trace.step_BL.device) * trace.steps // segments
    masked_KBL = trace.step_BL >= edge_K[:-1, None, None]
    asked_KBL = masked_KBL & (trace.step_BL < edge_K[1:, None, None])
    if prompt_masking:
        hidden_BL = trace.attended_BL & (uniform(rng, trace.canvas_BL) < prompt_masking)
        masked_KBL = masked_KBL | (hidden_BL & ~trace.canvas_BL)
    return views(trace, masked_KBL, asked_KBL)


def left_to_right_views(trace: Trace, rng: torch.Generator) -> Probes:
    """Each token asked with itself and everything right of it masked (JustGRPO, 2601.15165), one forward a position.

    Exact when the rollout went left to right, one token a step, with nothing cut by top_k or top_p.
    """
    place_L = torch.arange(trace.tokens_BL.shape[1], device=trace.tokens_BL.device)
    at_K = place_L[trace.canvas_BL.any(0)]
    masked_KBL = trace.canvas_BL & (place_L >= at_K[:, None, None])
    return views(trace, masked_KBL, trace.canvas_BL & (place_L == at_K[:, None, None]))


def visited(trace: Trace, step_BK: Tensor, weight_BK: Tensor, choice: bool = False) -> Probes:
    """The states that the rollout visited before each of `step_BK`, asked about the tokens committed there.

    Every sampled step is a unit with its own weight. `choice` adds the positions that a low-confidence step looked at
    and did not commit, so that a row's sum is the exact log-probability of the step under that order; without it the
    sum is exact for orders that do not depend on the draws.
    """
    batch, draws = step_BK.shape
    step_N1, number_N = step_BK.reshape(-1, 1), torch.arange(batch * draws, device=step_BK.device)
    trace_N = number_N // draws
    step_NL, block_NL = trace.step_BL[trace_N], trace.block_BL[trace_N]
    asked_NL, passed_NL, attended_NL = step_NL == step_N1, None, trace.attended_BL[trace_N]
    block_N1 = torch.where(asked_NL, block_NL, GIVEN).max(-1, keepdim=True).values
    if trace.appended and (asked_NL & (block_NL != block_N1)).any():
        raise ValueError(ONLY_VISITED)
    if trace.appended:
        attended_NL = attended_NL & (block_NL <= block_N1)
    if choice:
        passed_NL = (block_NL == block_N1) & (step_NL > step_N1) & asked_NL.any(-1, keepdim=True)
    probes = Probes(
        trace=trace,
        states_SL=trace.tokens_BL[trace_N].masked_fill(step_NL >= step_N1, trace.mask_id),
        attended_SL=attended_NL,
        state_N=number_N,
        unit_N=number_N,
        asked_NL=asked_NL,
        share_NL=torch.ones_like(asked_NL, dtype=torch.float64),
        trace_M=trace_N,
        weight_M=weight_BK.flatten().double(),
        visited=True,
        passed_NL=passed_NL,
    )
    return share_states(at_states(probes, asked_NL.any(-1)))


def every_step(trace: Trace, rng: torch.Generator, choice: bool = False) -> Probes:
    """All T visited states (CJ-GRPO 2509.23924, TraceRL with no merging): the trajectory's own likelihood."""
    step_BT = torch.arange(trace.steps, device=trace.step_BL.device).expand(len(trace), -1)
    return visited(trace, step_BT, torch.ones_like(step_BT, dtype=torch.float64), choice)


def one_shot(branches: Trace) -> Probes:
    """The state each branch started at, asked about what the branch filled in; siblings share the state."""
    group_S, state_N = branches.group_B.unique(return_inverse=True)
    number_N = torch.arange(len(branches), device=state_N.device)
    first_S = torch.zeros_like(group_S).scatter_reduce(0, state_N, number_N, "amin", include_self=False)
    return Probes(
        trace=branches,
        states_SL=state_before(branches, 0)[first_S],
        attended_SL=branches.attended_BL[first_S],
        state_N=state_N,
        unit_N=number_N,
        asked_NL=branches.filled_BL,
        share_NL=torch.ones_like(branches.filled_BL, dtype=torch.float64),
        trace_M=number_N,
        weight_M=torch.ones(len(branches), dtype=torch.float64, device=state_N.device),
        visited=True,
    )


def uniform(rng: torch.Generator, like_BL: Tensor) -> Tensor:
    """Uniforms in [0, 1) of the shape of `like_BL`, drawn on the generator's device."""
    return torch.rand(like_BL.shape, generator=rng, dtype=torch.float64, device=rng.device).to(like_BL.device)


def random_rank(trace: Trace, rng: torch.Generator) -> Tensor:
    """The place of every canvas position in a random order of its row, 0 first; the prompt comes last."""
    return rank(uniform(rng, trace.tokens_BL).masked_fill(~trace.canvas_BL, 2.0))


def rank(key_BL: Tensor) -> Tensor:
    """The place of every position when its row is sorted, ties to the left."""
    return key_BL.argsort(dim=-1, stable=True).argsort(-1)
