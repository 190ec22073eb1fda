"""States at which the tokens of a finished rollout are asked: against loops."""

import torch

from helpers import MASK, Net, generator, rolled
from unmask.core.states import block_views, semi_autoregressive


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
