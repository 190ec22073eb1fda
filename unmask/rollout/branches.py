"""Branches: one-shot fillings of visited states, as one-step traces."""

from dataclasses import replace

import torch
from torch import Tensor

from unmask.core.shapes import GIVEN
from unmask.core.specs import Branch
from unmask.core.token_sampling import draw_tokens, kept_ids, pad_ids, sampling_logprobs, token_logprobs, uniforms
from unmask.core.trace import Trace, select_traces
from unmask.rollout.engine import Engine

STREAM = 2
"""The stream of a row's noise that branches draw from; the sampler uses 0 and 1."""


def branch_steps(branch: Branch | None, steps: int, seed_B: Tensor) -> Tensor:
    """The step before which each row branches, drawn before the rollout; -1 without branches."""
    if branch is None:
        return torch.full_like(seed_B, -1)
    edges_T = branch.step_probabilities(steps).cumsum(0).to(seed_B.device)
    step_B = torch.searchsorted(edges_T, uniforms(seed_B, STREAM).double(), right=True)
    return step_B.clamp(max=steps - 1)


def fill_states(engine: Engine, seed_B: Tensor, state_BL: Tensor, ended_B: Tensor, count: int) -> Trace:
    """`count` one-step traces from each row's state, which fill all its masked positions; one full pass for all rows.

    Rows that had ended by then are left out. A branch's group is the row of the engine's trace that it started from.
    """
    row_R, start, width = (~ended_B).nonzero().squeeze(1), engine.start, state_BL.shape[1]
    rows = torch.arange(len(seed_B), device=row_R.device)
    source = select_traces(replace(engine.trace, tokens_BL=state_BL, group_B=rows, seen={}), row_R)
    masked_RL = source.tokens_BL == source.mask_id
    masked_RL[:, :start] = False
    at_Q = masked_RL.flatten().nonzero().squeeze(1)
    token_ZQ, logp_ZQ, kept_QK = _drawn(replace(engine, trace=source, memories={}), seed_B[row_R], at_Q, count)

    filled = select_traces(source, torch.arange(len(row_R), device=row_R.device).repeat_interleave(count))
    tokens_RZL, logp_RZL = (value.view(-1, count, width).clone() for value in (filled.tokens_BL, filled.logp_BL * 0))
    row_Q, column_Q = at_Q // width, at_Q % width
    tokens_RZL[row_Q, :, column_Q] = token_ZQ.T
    logp_RZL[row_Q, :, column_Q] = logp_ZQ.T.to(logp_RZL.dtype)
    seen = {}
    if kept_QK is not None:
        kept_RCK = torch.full((len(row_R), width - start, kept_QK.shape[-1]), -1, device=row_R.device)
        kept_RCK[row_Q, column_Q - start] = kept_QK
        seen["kept"] = kept_RCK.repeat_interleave(count, dim=0)
    return replace(
        filled,
        tokens_BL=tokens_RZL.flatten(0, 1),
        logp_BL=logp_RZL.flatten(0, 1),
        step_BL=torch.where(masked_RL, 0, GIVEN).repeat_interleave(count, dim=0),
        steps=1,
        seen=seen,
    )


def _drawn(engine: Engine, seed_R: Tensor, at_Q: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens at positions of the flattened canvases and their log-probabilities, (Z, Q), and kept ids, (Q, K)."""
    trace, width = engine.trace, engine.trace.tokens_BL.shape[1]
    hidden = engine.exact(torch.arange(len(trace), device=at_Q.device), at_Q) if len(at_Q) else []
    # Columns are counted from the end of the canvas, so padding does not move a row's noise.
    seed_Q, away_Q = seed_R[at_Q // width], width - at_Q % width
    tokens, logps, kept = [at_Q.new_zeros(count, 0)], [trace.logp_BL.new_zeros(count, 0)], [at_Q.new_zeros(0, 0)]
    for piece in engine.pieces(len(at_Q)):
        plain_QV = token_logprobs(engine.logits([stream[piece] for stream in hidden]), trace.mask_id)
        logq_QV, kept_QV = sampling_logprobs(plain_QV, trace.sampling)
        draws = [draw_tokens(logq_QV, uniforms(seed_Q[piece], STREAM, 1 + z, away_Q[piece])) for z in range(count)]
        tokens.append(torch.stack(draws))
        logps.append(logq_QV.gather(-1, tokens[-1].T).T)
        if kept_QV is not None:
            kept.append(kept_ids(kept_QV, trace.sampling.most_kept))
    widest = max(ids.shape[-1] for ids in kept)
    kept_QK = torch.cat([pad_ids(ids, widest) for ids in kept]) if trace.sampling.truncated else None
    return torch.cat(tokens, dim=1), torch.cat(logps, dim=1), kept_QK
