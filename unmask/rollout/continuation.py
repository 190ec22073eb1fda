"""continue_from: complete rollouts again from states that they visited, by the same sampler.

The state before step t is the canvas without what was written at step t or later. A continuation runs exactly the steps
that remain, so its reward is a sample of the value of that state. All noise is a function of (row seed, step,
position): from step 0 a continuation is the rollout that `sample` makes with the same seed, from step T it is the trace
itself, and with the trace's own seed it is the trace itself from any step. Log-probabilities are equal up to rounding,
because equal canvases go through the model once: the completions of a state share its first pass, and often more.
"""

from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from unmask.core.order import order_name
from unmask.core.policy import CachingPolicy, Policy
from unmask.core.schedule import CommitCounts, fewer_steps
from unmask.core.shapes import GIVEN, NEVER
from unmask.core.specs import Record
from unmask.core.trace import Trace, all_tokens, concat_traces, select_traces, state_before
from unmask.rollout.decoding import Decoding
from unmask.rollout.denoiser import Denoiser, denoise, ended
from unmask.rollout.engine import Engine
from unmask.rollout.recorder import RolloutRecorder
from unmask.util.micro_batch import MicroBatch, as_micro_batch


@torch.no_grad()
def continue_from(
    policy: Policy,
    trace: Trace,
    step_B: Tensor,
    seed_B: Tensor,
    decoding: Decoding,
    micro_batch: int | MicroBatch = 512,
    most_steps: int | None = None,
) -> Trace:
    """Complete every trace from its state before step `step_B`, 0 to T, with the noise of `seed_B`.

    `decoding` must be the one that the traces were sampled with. To complete a state several times, repeat its trace
    (`select_traces`) with other seeds. All tokens count, and nothing is recorded (`seen` is empty).
    `most_steps` merges the steps that remain in a block into at most this number (1: one shot): faster, and biased.
    """
    if not len(trace):
        return replace(trace, seen={})
    decoding = decoding.for_policy(policy)
    check_uncached(decoding)
    _check_decoding(trace, decoding)
    for name, value in (("steps", step_B), ("seeds", seed_B)):
        if value.shape != (len(trace),):
            raise ValueError(f"{len(trace)} traces need {len(trace)} {name}, got the shape {tuple(value.shape)}")
    if ((step_B < 0) | (step_B > trace.steps)).any():
        raise ValueError(f"a step to continue from must lie between 0 and the {trace.steps} denoising steps")
    trace = replace(trace, seen={})
    # Rows with the same remaining steps go through the model together.
    order_B, micro_batch, done = step_B.argsort(stable=True), as_micro_batch(micro_batch), list[Trace]()
    while (start := sum(map(len, done))) < len(trace):
        index, commits = order_B[start : start + micro_batch.size], decoding.commit_counts()
        if most_steps is not None:  # a schedule for each step that rows start from
            index = index[step_B[index] == step_B[index[0]]]
            commits = fewer_steps(commits, int(step_B[index[0]]), most_steps)
        try:
            done.append(_complete(policy, select_traces(trace, index), step_B[index], seed_B[index], decoding, commits))
        except torch.OutOfMemoryError as error:
            micro_batch.halve(error, len(index))
    return select_traces(concat_traces(done), order_B.argsort())


def check_uncached(decoding: Decoding) -> None:
    """ValueError for a decoding whose rollouts cannot be continued. A cache of a block-causal model is exact; the
    continuation does without."""
    if decoding.used_cache is not None and decoding.causal_block is None:
        raise ValueError(
            "rollouts with a cache cannot be continued exactly, since the cache depends on earlier steps: "
            "sample with cache none (rollout.cache=none)"
        )


def _check_decoding(trace: Trace, decoding: Decoding) -> None:
    """ValueError unless the traces were sampled with this decoding."""
    sampled = {
        "length": (int((trace.block_BL[0] != GIVEN).sum()), decoding.length),
        "steps": (trace.steps, sum(map(len, decoding.commit_counts()))),
        "blocks": (int(trace.block_BL[0].max()) + 1, _blocks(trace, decoding)),
        "append": (trace.appended, decoding.append),
        "sampling": (trace.sampling, decoding.sampling),
        "order": (trace.order or order_name(decoding.order), order_name(decoding.order)),
        "threshold": (trace.threshold, decoding.threshold),
        "min_per_step": (trace.min_per_step, decoding.min_per_step),
    }
    for name, (was, given) in sampled.items():
        if was != given:
            raise ValueError(
                f"the traces were sampled with {name} {was}, and decoding has {given}: pass the decoding that they "
                "were sampled with"
            )


def _blocks(trace: Trace, decoding: Decoding) -> int:
    """The blocks of the first row."""
    given = 0 if decoding.causal_block is None else int(trace.attended_BL[0].sum()) - decoding.length
    return -(-(given % decoding.block + decoding.length) // decoding.block)


def _complete(
    policy: Policy, trace: Trace, step_B: Tensor, seed_B: Tensor, decoding: Decoding, commits: CommitCounts
) -> Trace:
    later_BL = trace.step_BL >= step_B[:, None]
    trace = replace(
        trace,
        tokens_BL=state_before(trace, step_B),
        step_BL=trace.step_BL.masked_fill(later_BL, NEVER),
        logp_BL=trace.logp_BL.masked_fill(later_BL, 0.0),
    )
    sure_score = decoding.sure_score()
    start = trace.tokens_BL.shape[1] - decoding.length
    engine = Engine(
        policy=policy,
        trace=trace,
        start=start,
        block=decoding.block,
        causal=decoding.causal_block,
        append=decoding.append,
        padded=not bool(trace.attended_BL.all()),
        merges=True,
    )
    recorder = RolloutRecorder(Record(), commits, len(trace), decoding.length, decoding.block)
    open_B = ~ended(trace.tokens_BL[:, start:], trace)
    starts = {step: (open_B & (step_B == step)).nonzero().squeeze(1) for step in step_B.unique().tolist()}
    denoiser = Denoiser(engine, seed_B, decoding.order, sure_score, recorder, starts)
    with policy.rollout(even=True) if isinstance(policy, CachingPolicy) else nullcontext():
        denoise(denoiser, commits, torch.full_like(step_B, -1))
    return replace(trace, counted_BL=all_tokens(trace))
