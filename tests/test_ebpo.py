"""EBPO: the ELBO of every block after the finished text before it, by enumeration; one ratio a sequence."""

from itertools import permutations, product

import pytest
import torch

from helpers import Net, assert_close, generator, moved, rolled, sample
from naive import decoder
from unmask.core.objective import clipped_surrogate
from unmask.core.order import left_to_right, random
from unmask.core.probes import ask, unit_likelihood
from unmask.core.token_sampling import token_logprobs
from unmask.core.trace import all_tokens
from unmask.methods.ebpo import block_bounds, bound_views, ebpo
from unmask.rollout.sample import row_seeds


@torch.no_grad()
def bound_by_hand(policy, trace, b: int) -> float:
    """The sum over blocks of the mean over the orders of a block of its log-likelihood, written one token at a time."""
    first, total = int((~trace.attended_BL[b]).sum()), 0.0
    tokens, blocks = trace.tokens_BL[b].tolist(), trace.block_BL[b].tolist()
    for number in range(max(blocks) + 1):
        places = [i for i, block in enumerate(blocks) if block == number]
        orders = list(permutations(places))
        for order in orders:
            canvas = [trace.mask_id if block >= number else token for token, block in zip(tokens, blocks, strict=True)]
            for place in order:
                tokens_SL = torch.tensor([canvas[first:]])
                logp_V = token_logprobs(policy(tokens_SL, None, torch.tensor([place - first])), trace.mask_id)[0]
                canvas[place] = tokens[place]
                total += float(logp_V[canvas[place]]) / len(orders)
    return total


def causal():
    return decoder("qwen3", dtype=torch.float64, causal_block=2, eos_id=-1)


POLICIES = {"block-causal": causal, "full": lambda: Net(seed=2, ends=-50.0)}


@pytest.mark.parametrize("kind", POLICIES)
def test_the_expectation_of_a_draw_is_the_sum_of_the_elbos_of_the_blocks(kind):
    """Every size and every order of the noise in each block of two positions."""
    policy = POLICIES[kind]()
    trace = sample(policy, [[3], [3, 4]], row_seeds(1, 2), length=4, block=2, order=random).trace
    blocks, width, total_B = int(trace.block_BL.max()) + 1, trace.tokens_BL.shape[1], torch.zeros(2).double()
    cells = list(product((1, 2), (False, True), repeat=blocks))
    count_BK = torch.stack([(trace.block_BL == number).sum(-1) for number in range(blocks)], 1)
    for cell in cells:
        size_K, turned_K = torch.tensor(cell[::2]), torch.tensor(cell[1::2])
        place_L = torch.arange(width) / width
        noise_BL = torch.where(turned_K[trace.block_BL.clamp(min=0)], 1 - place_L, place_L).double()
        probes = bound_views(trace, torch.minimum(size_K, count_BK.clamp(min=1))[None], noise_BL[None])
        if kind == "block-causal":
            assert len(probes.states_SL) == 2  # one pass a rollout
        with torch.no_grad():
            total_B += unit_likelihood(ask(policy, probes), probes).sum(-1) / len(cells)
    for b in range(2):
        assert abs(total_B[b] - bound_by_hand(policy, trace, b)) < 1e-9


def test_levels_are_equally_spaced_over_draws_and_blocks():
    trace = rolled(Net(1, ends=-50.0), length=6, steps=6, block=2, counted=all_tokens).trace
    probes = block_bounds(trace, generator(), draws=2)
    assert len(probes.asked_NL) == 2 * 3 * len(trace)
    asked_N = probes.asked_NL.sum(-1)
    block_N = torch.where(probes.asked_NL, trace.block_BL[probes.trace_N], -1).max(-1).values
    for b, number in product(range(len(trace)), range(3)):
        sizes = asked_N[(probes.trace_N == b) & (block_N == number)].tolist()
        assert sorted(sizes) == [1, 2]  # two draws half a level apart, in blocks of two
    assert_close((probes.share_NL * probes.asked_NL).sum(-1), torch.ones(len(probes.asked_NL)).double())


def test_blocks_of_one_token_give_the_log_probability_of_the_trajectory():
    policy = decoder("qwen3", dtype=torch.float64, causal_block=1)
    trace = sample(policy, [[3, 4]] * 3, row_seeds(0, 3), length=4, order=left_to_right).trace
    probes = block_bounds(trace, generator(), draws=1)
    with torch.no_grad():
        assert_close(unit_likelihood(ask(policy, probes), probes).sum(-1), trace.logp_BL.sum(-1), 1e-9)


@pytest.mark.parametrize(("mean", "draws"), [(True, 4), (True, 1), (False, 4)])
def test_the_loss_is_one_clipped_ratio_a_sequence(mean, draws):
    """With one draw some tokens are not asked; the length is that of the completion."""
    policy = Net(1, ends=-50.0)
    trace, method = rolled(policy, length=4, steps=4, block=2, counted=all_tokens).trace, ebpo(draws, mean)
    probes = method.probe(trace, generator(), 1)[0]
    with torch.no_grad():
        logp_NL, old_NL = ask(policy, probes), ask(moved(policy, 0.02), probes)
    advantage_B = method.advantage(torch.arange(len(trace)).double() % 2, trace.group_B)
    gain_B = unit_likelihood(logp_NL - old_NL, probes).sum(-1) / (4 if mean else 1)
    wanted = -clipped_surrogate(gain_B.exp(), advantage_B, 0.2, 0.2)[0].mean()
    loss, _ = method.objective(logp_NL, old_NL, probes, advantage_B, torch.ones_like(trace.logp_BL))
    assert_close(loss, wanted)
