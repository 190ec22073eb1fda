"""The draws of a step, compiled: they are those of the plain function, for any number of positions."""

import pytest
import torch

from unmask.core.order import low_confidence, margin
from unmask.core.specs import Record
from unmask.core.token_sampling import IN_PARTS, TokenSampling
from unmask.rollout.draws import DrawSettings, Places, compiled_draws, draws

MASK = 3


@pytest.mark.parametrize(
    ("sampling", "order"),
    [(TokenSampling(0.7), low_confidence), (TokenSampling(0.0), margin), (TokenSampling(top_k=6), low_confidence)],
)
def test_compiled_draws_are_those_of_the_plain_function(sampling, order):
    settings, rng = DrawSettings(MASK, sampling, order, Record(3, True, True), True), torch.Generator().manual_seed(0)
    for count in (7, 5, 12):
        logits_QV = 3 * torch.randn(count, IN_PARTS + 9, dtype=torch.float64, generator=rng)
        uniform_SQ = torch.rand(2, count, generator=rng)
        places = Places(*uniform_SQ, torch.arange(count))
        wanted, found = draws(logits_QV, places, settings), compiled_draws("aot_eager")(logits_QV, places, settings)
        assert found.keys() == wanted.keys()
        assert all((found[name].double() - wanted[name].double()).abs().max() < 1e-12 for name in wanted)
        assert not (found["token"] == MASK).any()
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert compiled_draws("aot_eager")(logits_QV[:4], Places(*(each[:4] for each in places)), settings)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled, "compiled again for four positions"
