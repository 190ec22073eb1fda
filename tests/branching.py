"""Branches in the enumerable world of world.py: the states that are visited, and the ways they are filled in."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from unmask.core.shapes import GIVEN, NEVER
from unmask.core.trace import TokenRule, Trace, all_tokens
from world import Paths, World, digits, number, traced


def visits(world: World, paths: Paths) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The live states before each step with their visiting probabilities: (step, tokens_SC, mass_S)."""
    tokens_BC, when_BC = (x[:, -world.length :] for x in (paths.trace.tokens_BL, paths.trace.step_BL))
    for step in range(paths.trace.steps):
        live_B = ((when_BC >= step) & (when_BC != NEVER)).any(-1)
        state_BC = tokens_BC.masked_fill(when_BC >= step, world.policy.mask_id)[live_B]
        state_SC, index_B = state_BC.unique(dim=0, return_inverse=True)
        mass_S = torch.zeros(len(state_SC), dtype=torch.float64)
        yield step, state_SC, mass_S.index_add(0, index_B, paths.probability_B.detach()[live_B])


def fillings(world: World, state_C: Tensor, drawn_SCV: Tensor) -> tuple[Tensor, Tensor]:
    """Every way to fill a state in one shot and its probability, differentiable: (A, C), (A,)."""
    masked = (state_C == world.policy.mask_id).nonzero().squeeze(1)
    word_AM = digits(world.policy.words, len(masked))
    tokens_AC = state_C.repeat(len(word_AM), 1)
    tokens_AC[:, masked] = word_AM
    drawn_MV = drawn_SCV[number(state_C, world.policy.words + 1)][masked]
    probability_A = drawn_MV[torch.arange(len(masked)), word_AM].prod(-1)
    possible_A = probability_A > 0
    return tokens_AC[possible_A], probability_A[possible_A]


def branch_traces(
    world: World, state_BC: Tensor, tokens_BC: Tensor, group_B: Tensor, counted: TokenRule = all_tokens
) -> Trace:
    """One-step traces that fill states, as `sample` makes them."""
    when_BC = torch.where(state_BC == world.policy.mask_id, 0, GIVEN)
    trace = traced(world, tokens_BC, when_BC, counted)
    seen = {"kept": trace.seen["kept"]} if world.sampling.truncated else {}
    return replace(trace, group_B=group_B, steps=1, seen=seen)
