"""The draws of a step, compiled: they are those of the plain function, for any number of positions; and logits of any
dtype are cast before they are used."""

import pytest
import torch

from unmask.core.order import low_confidence, margin
from unmask.core.specs import Record
from unmask.core.token_sampling import IN_PARTS, TokenSampling, uniforms
from unmask.rollout.draws import DrawSettings, Places, compiled_draws, compiled_uniforms, draws

MASK = 3
SETTINGS = [
    (TokenSampling(0.7), low_confidence),
    (TokenSampling(0.0), margin),
    (TokenSampling(top_k=6), low_confidence),
]


@pytest.mark.parametrize(("sampling", "order"), SETTINGS)
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


@pytest.mark.parametrize(("sampling", "order"), SETTINGS)
@pytest.mark.parametrize("words", [50, IN_PARTS + 9])
def test_logits_in_bf16_are_cast_before_anything_is_computed(sampling, order, words):
    """Bit for bit: a softmax in bf16 would change log-probabilities by 1 %."""
    settings, rng = DrawSettings(MASK, sampling, order, Record(3, True, True), True), torch.Generator().manual_seed(0)
    logits_QV = (3 * torch.randn(64, words, generator=rng)).bfloat16()
    places = Places(*torch.rand(2, 64, generator=rng), torch.arange(64))
    wanted = draws(logits_QV.float(), places, settings)
    for found in (way(logits_QV, places, settings) for way in (draws, compiled_draws("aot_eager"))):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def noise_arguments(rows: int, positions: int, device: str) -> tuple[torch.Tensor, ...]:
    """As the sampler asks, with seeds of all 64 bits."""
    rng = torch.Generator().manual_seed(rows)
    seed_R1, away_RM = (
        torch.randint(-(2**63), 2**63 - 1, size, generator=rng) for size in ((rows, 1), (rows, positions))
    )
    return tuple(each.to(device) for each in (seed_R1, torch.arange(2)[:, None, None], torch.tensor([[77]]), away_RM))


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("cpu", "aot_eager"),
        pytest.param(
            *("cuda", "inductor"), marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
        ),
    ],
)
def test_compiled_noise_is_bit_for_bit_that_of_the_plain_function(device, backend):
    for rows, positions in ((32, 32), (32, 24), (1, 8), (3, 4)):
        given = noise_arguments(rows, positions, device)
        assert torch.equal(compiled_uniforms(backend)(*given), uniforms(*given))
