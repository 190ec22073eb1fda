"""States at which the tokens of a finished rollout are asked: against loops."""

from itertools import combinations, permutations
from math import comb

import pytest
import torch

from helpers import MASK, Net, generator, rolled
from unmask.core.probes import Probes
from unmask.core.states import STATES, block_views, semi_autoregressive
from unmask.core.trace import Trace, select_traces

LENGTH, BLOCK = 6, 3
PLACES = range(LENGTH)
SUBSETS = [set(subset) for size in range(1, LENGTH + 1) for subset in combinations(PLACES, size)]


def test_a_semi_autoregressive_state_masks_later_blocks_and_a_part_of_one_block_and_asks_that_part():
    trace = rolled(Net(1, ends=1.0), length=6, steps=6, block=2).trace  # some rows retire
    written_B = trace.filled_BL.sum(-1).tolist()
    assert min(written_B) < max(written_B) == 6
    noise_BL = torch.rand(trace.tokens_BL.shape, generator=generator(), dtype=torch.float64)
    for masked in range(1, 7):
        level_KB = torch.tensor([[(masked - 0.5) / written for written in written_B]], dtype=torch.float64)
        probes = block_views(trace, level_KB.clamp(max=0.999), noise_BL[None])
        for n, b in enumerate(probes.trace_N.tolist()):
            left, hidden, asked = min(masked, written_B[b]), set(), set()
            for block in (2, 1, 0):
                places = [i for i in range(10) if trace.block_BL[b, i] == block]
                written = [i for i in places if trace.filled_BL[b, i]]
                if left > 0:
                    asked = {*sorted(written, key=lambda i: noise_BL[b, i])[:left]}
                    hidden |= {*places} if left > len(written) else asked
                    left -= len(written)
                hidden |= {*places} - {*written}
            assert {*(probes.states_SL[n] == MASK).nonzero().flatten().tolist()} == hidden
            assert {*probes.asked_NL[n].nonzero().flatten().tolist()} == asked
        assert probes.trace_N.tolist() == list(range(len(trace)))


def test_the_number_of_masked_positions_is_uniform_and_every_draw_is_a_unit():
    trace = rolled(Net(1, ends=-50.0), length=6, steps=6, block=2, sizes=(2,)).trace
    probes = semi_autoregressive(trace, generator(), draws=3000)
    assert len(probes.unit_N.unique()) == len(probes.unit_N) == 6000 and probes.weight_M.eq(1).all()
    assert torch.equal(probes.trace_N, torch.arange(2).repeat(3000))
    share = (probes.states_SL == MASK).sum(-1).bincount()[1:] / 6000
    assert len(share) == 6 and (share - 1 / 6).abs().max() < 0.02
    place = probes.asked_NL[(probes.states_SL == MASK).sum(-1) == 3].double().mean(0)[-6:]  # one of the middle block
    assert place[[0, 1, 4, 5]].eq(0).all() and (place[2:4] - 0.5).abs().max() < 0.05


# The weight with which each token is asked at each masked state, in expectation


def sml_by_definition(weight, trace: Trace) -> None:
    """Three strata: every third position of a random order."""
    orders = list(permutations(PLACES))
    for order in orders:
        for stratum in ({*order[k::3]} for k in range(3)):
            for i in stratum:
                weight[state_number(stratum), i] += 1 / len(orders)


def pairs_by_definition(weight, trace: Trace) -> None:
    """Half of it fully masked; a mask at a ratio in (0.2, 0.8) and its complement, divided by the ratio."""
    weight[state_number({*PLACES})] += 0.5
    t = 0.2 + 0.6 * (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    for masked in SUBSETS:
        chance = (t ** len(masked) * (1 - t) ** (LENGTH - len(masked)) / t).mean()
        weight[state_number(masked), [*masked]] += 2 * 0.5 * chance  # as a mask, and with 1 - t for t as a complement


def uniform_by_definition(weight, trace: Trace) -> None:
    """The ELBO: every size of the mask has the same weight, divided among its sets and its tokens."""
    for masked in SUBSETS:
        weight[state_number(masked), [*masked]] = 1 / (len(masked) * comb(LENGTH, len(masked)))


def blocks_by_definition(weight, trace: Trace) -> None:
    """The same in each block, with the blocks after it masked."""
    for block in ({0, 1, 2}, {3, 4, 5}):
        later = {i for i in PLACES if i > max(block)}
        for masked in (subset for subset in SUBSETS if subset <= block):
            weight[state_number(masked | later), [*masked]] = 1 / (len(masked) * comb(BLOCK, len(masked)))


def visited_by_definition(weight, trace: Trace) -> None:
    """Every step has the weight 1/T."""
    steps = trace.step_BL[0, -LENGTH:].tolist()
    for i in PLACES:
        weight[state_number({j for j in PLACES if steps[j] >= steps[i]}), i] = 1 / trace.steps


def fully_masked_by_definition(weight, trace: Trace) -> None:
    weight[state_number({*PLACES})] = 1


DEFINITIONS = {
    "sml": sml_by_definition,
    "pairs": pairs_by_definition,
    "auto": uniform_by_definition,
    "uniform": uniform_by_definition,
    "semi_autoregressive": blocks_by_definition,
    "visited": visited_by_definition,
    "fully_masked": fully_masked_by_definition,
}


def state_number(masked: set[int]) -> int:
    return sum(2**i for i in masked)


def mean_weights(probes: Probes) -> torch.Tensor:
    """By state (its number) and token, the weight with which a trace asks."""
    masked_NC = (probes.states_SL == MASK)[probes.state_N, -LENGTH:].long()
    state_N = (masked_NC * 2 ** torch.arange(LENGTH)).sum(-1)
    weight_NC = (probes.asked_NL * probes.share_NL * probes.weight_M[probes.unit_N, None])[:, -LENGTH:]
    return torch.zeros(2**LENGTH, LENGTH, dtype=torch.float64).index_add(0, state_N, weight_NC) / len(probes.trace)


@pytest.mark.parametrize("name", STATES)
def test_every_state_is_asked_with_the_weight_of_its_definition_in_expectation(name):
    traces = 40_000
    trace = rolled(Net(1, ends=-50.0), length=LENGTH, steps=LENGTH, block=BLOCK, sizes=(2,)).trace
    trace = select_traces(trace, torch.zeros(traces, dtype=torch.long))
    expected = torch.zeros(2**LENGTH, LENGTH, dtype=torch.float64)
    DEFINITIONS[name](expected, trace)
    found = mean_weights(STATES[name](trace, generator(3)))
    assert torch.equal(found > 0, expected > 0) and (found - expected).abs().max() < 0.02
    whole = {"pairs": 1.5, "visited": 1 / LENGTH}.get(name, 1.0)
    assert expected.sum(0).tolist() == pytest.approx([whole] * LENGTH, abs=1e-6)
    assert found.sum(0).tolist() == pytest.approx([whole] * LENGTH, abs=0.02)
