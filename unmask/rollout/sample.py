"""sample: prompts -> Trace. Semi-autoregressive blocks; a schedule gives the number of positions a step commits.

denoiser.py runs the steps. All noise is a function of (row seed, step, position), so a row's result does not depend on
the batch it is in.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from unmask.core.order import order_name
from unmask.core.policy import CachingPolicy, Policy, ShiftedPolicy
from unmask.core.shapes import GIVEN, NEVER, NO_TOKEN
from unmask.core.specs import RolloutRequest
from unmask.core.token_sampling import splitmix64
from unmask.core.trace import Trace, concat_traces, pad_traces
from unmask.rollout.branches import branch_steps, fill_states
from unmask.rollout.decoding import Decoding
from unmask.rollout.denoiser import Denoiser, denoise, denoise_continuously
from unmask.rollout.engine import Engine, prompt_rows
from unmask.rollout.graphs import columns_of, copy_of
from unmask.rollout.recorder import RolloutRecorder
from unmask.util.micro_batch import MicroBatch, as_micro_batch


def canvas(
    prompts: Sequence[Sequence[int]], length: int, policy: Policy, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Prompts padded on the left, then `length` masks: tokens_BL and attended_BL."""
    if not prompts:
        raise ValueError("no prompts: the list to sample from is empty")
    if isinstance(policy, ShiftedPolicy) and policy.shift and not all(map(len, prompts)):
        raise ValueError(
            "a prompt is empty, but this model predicts a token at the position before it, so nothing predicts the "
            "first one: give a prompt of at least one token"
        )
    outside = [i for p in prompts for i in p if not 0 <= i < policy.vocabulary]
    if outside:
        raise ValueError(f"a prompt has the token id {outside[0]}, outside the vocabulary of {policy.vocabulary}")
    width = max(len(p) for p in prompts)
    if width + length > policy.max_length:
        room = policy.max_length - width
        advice = f"set rollout.length={room} or less (in the file of your own task: length = {room})"
        raise ValueError(
            f"the longest prompt has {width} tokens; with a completion of {length} this is more than the model's limit "
            f"of {policy.max_length}: {advice if room > 0 else 'shorten the prompt'}"
        )
    padded = [[policy.pad_id] * (width - len(p)) + list(p) + [policy.mask_id] * length for p in prompts]
    real = [[False] * (width - len(p)) + [True] * (len(p) + length) for p in prompts]
    return torch.tensor(padded, device=device), torch.tensor(real, device=device)


def row_seeds(seed: int, rows: int) -> Tensor:
    """Seeds for the `rows` rollouts of one batch; all noise of a row is a function of its seed."""
    return splitmix64(torch.tensor(seed)) + torch.arange(rows)


class Rollouts(NamedTuple):
    trace: Trace
    branches: Trace | None
    """One-step traces that start at a visited state; group = the row of `trace` they started from."""


@torch.no_grad()
def sample(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    seed_B: Tensor,
    decoding: Decoding,
    *,
    group_B: Tensor | None = None,
    request: RolloutRequest = RolloutRequest(),
    micro_batch: int | MicroBatch | None = None,
) -> Rollouts:
    """Denoise `decoding.length` positions after every prompt, at most `micro_batch` prompts at a time.

    A row retires once it has an end token with nothing masked before it; what it never filled stays MASK. `request` is
    what a method needs of the rollouts (`method.request`). Without `group_B` every prompt is a group.
    """
    decoding = decoding.for_policy(policy)
    if len(seed_B) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts need {len(prompts)} row seeds, got {len(seed_B)}")
    if decoding.append and request.branch is not None:
        raise ValueError("append=True: a branch fills later blocks too, which are not on the canvas; sample without it")
    group_B = torch.arange(len(prompts), device=seed_B.device) if group_B is None else group_B
    if micro_batch is None:
        return _sample_batch(policy, prompts, seed_B, decoding, group_B, request)
    micro_batch, done, start = as_micro_batch(micro_batch), list[Rollouts](), 0
    if decoding.causal_block is not None and request.branch is None:
        return _sample_continuously(policy, prompts, seed_B, decoding, group_B, request, micro_batch)
    while start < len(prompts):
        part = slice(start, start + micro_batch.size)
        try:
            trace, branches = _sample_batch(policy, prompts[part], seed_B[part], decoding, group_B[part], request)
        except torch.OutOfMemoryError as error:
            decoding.graphs.release()
            micro_batch.halve(error, len(prompts[part]))
            continue
        if branches is not None:
            branches = replace(branches, group_B=branches.group_B + start)
        done.append(Rollouts(trace, branches))
        start += len(trace)
    if len(done) == 1:
        return done[0]
    some = [branches for _, branches in done if branches is not None and len(branches)]
    return Rollouts(concat_traces([trace for trace, _ in done]), concat_traces(some) if some else done[0].branches)


def _sample_continuously(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    seed_B: Tensor,
    decoding: Decoding,
    group_B: Tensor,
    request: RolloutRequest,
    micro_batch: MicroBatch,
) -> Rollouts:
    """Rollouts of a block-causal model; a row that ends is replaced by the next prompt when a block begins."""
    while True:
        slots = min(micro_batch.size, len(prompts))
        try:
            return _sample_batch(policy, prompts, seed_B, decoding, group_B, request, slots)
        except torch.OutOfMemoryError as error:
            decoding.graphs.release()
            micro_batch.halve(error, slots)


def sample_in_turn(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    seed_B: Tensor,
    decoding: Decoding,
    micro_batch: MicroBatch | None = None,
) -> Iterator[Trace]:
    """The traces of all prompts in order, yielded in batches of at most `micro_batch`."""
    micro_batch, start = micro_batch or MicroBatch(512), 0
    while start < len(prompts):
        part = slice(start, start + micro_batch.size)
        yield sample(policy, prompts[part], seed_B[part], decoding, micro_batch=micro_batch).trace
        start = part.stop


def completions(policy: Policy, trace: Trace, length: int) -> list[str]:
    """The text that each trace wrote: up to its end token, or all of it if no token ends a row."""
    read = policy.tokenizer.raw if trace.eos_id == NO_TOKEN else policy.tokenizer.decode
    return [read(ids) for ids in trace.tokens_BL[:, -length:].tolist()]


def _sample_batch(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    seed_B: Tensor,
    decoding: Decoding,
    group_B: Tensor,
    request: RolloutRequest,
    slots: int | None = None,
) -> Rollouts:
    """All rows at once; with `slots`, at most that number at a time: a row begins when another has ended."""
    commits, sure_score, block = decoding.commit_counts(), decoding.sure_score(), decoding.block
    steps = sum(len(sizes) for sizes in commits)
    trace = _blank(policy, prompts, decoding, steps, group_B, seed_B.device)
    width, padded = trace.tokens_BL.shape[1], not decoding.attend_padding and len(set(map(len, prompts))) > 1
    recorder = RolloutRecorder(request.record, commits, len(trace), decoding.length, block)
    graphs = decoding.graphs if decoding.graphs.apply_to(policy, decoding, seed_B.device) else None
    if graphs is not None:
        trace = graphs.hold_trace(pad_traces(trace, columns_of(width, policy.max_length)) if padded else trace)
        recorder = graphs.recorder(recorder)
    branch_step_B = branch_steps(request.branch, trace.steps, seed_B)
    together = slots is None or slots >= len(trace)
    engine = Engine(
        policy=policy,
        trace=trace,
        start=trace.tokens_BL.shape[1] - decoding.length,
        block=block,
        cache=decoding.used_cache,
        causal=decoding.causal_block,
        append=decoding.append,
        padded=padded,
        prompt_groups=prompt_rows(prompts, seed_B.device) if together else None,
        graphs=graphs,
    )
    everyone_R = torch.arange(len(trace), device=seed_B.device)
    denoiser = Denoiser(engine, seed_B, decoding.order, sure_score, recorder, {0: everyone_R} if together else {})
    branches, faster = None, policy.rollout if isinstance(policy, CachingPolicy) else nullcontext
    with faster(True):
        if slots is not None and not together:
            denoise_continuously(denoiser, commits[0], slots)
        else:
            state_BL, ended_B = denoise(denoiser, commits, branch_step_B)
    if request.branch is not None:
        with faster():
            branches = fill_states(engine, seed_B, state_BL, ended_B, request.branch.fillings)

    trace = replace(trace, seen=recorder.tensors())
    if graphs is not None:
        trace, branches = copy_of(trace, width), None if branches is None else copy_of(branches, width)
    trace = replace(trace, counted_BL=request.counted(trace))
    return Rollouts(trace, None if branches is None else replace(branches, counted_BL=request.counted(branches)))


def _blank(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    steps: int,
    group_B: Tensor,
    device: torch.device,
) -> Trace:
    """A trace with nothing filled yet; `sample` writes into its tensors."""
    tokens_BL, attended_BL = canvas(prompts, decoding.length, policy, device)
    attended_BL = torch.ones_like(attended_BL) if decoding.attend_padding else attended_BL
    column_L = torch.arange(tokens_BL.shape[1], device=device) - (tokens_BL.shape[1] - decoding.length)
    place_BL = column_L.repeat(len(prompts), 1)
    if decoding.causal_block is not None:
        given_B1 = attended_BL.sum(1, keepdim=True) - decoding.length
        place_BL = place_BL + given_B1 % decoding.block
    return Trace(
        tokens_BL=tokens_BL,
        step_BL=torch.where(column_L < 0, GIVEN, NEVER).repeat(len(prompts), 1),
        block_BL=torch.where(column_L < 0, GIVEN, place_BL // decoding.block),
        attended_BL=attended_BL,
        counted_BL=torch.zeros_like(attended_BL),
        logp_BL=torch.zeros(tokens_BL.shape, dtype=torch.float64, device=device),
        group_B=group_B,
        mask_id=policy.mask_id,
        eos_id=policy.eos_id if decoding.stops else NO_TOKEN,
        steps=steps,
        sampling=decoding.sampling,
        order=order_name(decoding.order),
        threshold=decoding.threshold,
        min_per_step=decoding.min_per_step,
        causal_block=decoding.causal_block,
        appended=decoding.append,
    )
