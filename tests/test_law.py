"""The law of a token against loops over the vocabulary, and its noise against splitmix64 in Python integers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings as bounded, strategies as st
from torch import Tensor

from helpers import generator
from unmask.core.token_sampling import (
    IN_PARTS,
    TokenSampling,
    draw_tokens,
    entropy,
    kept_ids,
    kept_tokens,
    pad_ids,
    restricted_logprobs,
    sampling_logprobs,
    tempered_logprobs,
    token_logprobs,
    uniforms,
)

MASK = 2
LAST = 1 - 2**-24
LOGITS = st.lists(st.integers(-240, 240).map(lambda n: n / 8), min_size=4, max_size=9)  # ties, but no near-ties


def law_by_loop(logits: list[float], law: TokenSampling) -> list[float]:
    """Probabilities of every token: MASK out, tempered, cut to top_k and to the smallest set of mass top_p."""
    words = [v for v in range(len(logits)) if v != MASK]
    top = max(logits[v] for v in words)
    if law.temperature == 0:
        chosen = next(v for v in words if logits[v] == top)
        return [float(v == chosen) for v in range(len(logits))]
    raw = {v: math.exp((logits[v] - top) / law.temperature) for v in words}
    total = sum(raw.values())
    ranked = sorted(words, key=lambda v: (-raw[v], v))
    kept, mass = [], 0.0
    for v in ranked[: law.top_k or None]:
        if kept and law.top_p < 1 and mass >= law.top_p:
            break
        kept.append(v)
        mass += raw[v] / total
    kept_total = sum(raw[v] for v in kept)
    return [raw[v] / kept_total if v in kept else 0.0 for v in range(len(logits))]


def probabilities(logits: list[float], law: TokenSampling) -> tuple[Tensor, Tensor | None]:
    logq_QV, kept_QV = sampling_logprobs(token_logprobs(torch.tensor([logits], dtype=torch.float64), MASK), law)
    return logq_QV[0].exp(), kept_QV


@given(LOGITS, st.sampled_from([0.0, 0.3, 1.0, 2.5]), st.integers(0, 5), st.sampled_from([1e-6, 0.31, 0.77, 1.0]))
@bounded(max_examples=150)
def test_every_law_is_the_loop_over_its_vocabulary(logits, temperature, top_k, top_p):
    law = TokenSampling(temperature, top_k, top_p)
    found_V, kept_QV = probabilities(logits, law)
    expected_V = torch.tensor(law_by_loop(logits, law), dtype=torch.float64)
    torch.testing.assert_close(found_V, expected_V, rtol=1e-9, atol=1e-12)
    if kept_QV is not None:
        assert torch.equal(kept_QV[0] & (expected_V > 1e-300), expected_V > 1e-300)


def test_the_kept_set_of_top_p_is_the_smallest_that_reaches_it():
    logq_QV = torch.randn(50, 9, generator=generator(), dtype=torch.float64).log_softmax(-1)
    for top_p in (0.2, 0.5, 0.9):
        kept_QV = kept_tokens(logq_QV, TokenSampling(top_p=top_p))
        p_QV = logq_QV.exp() * kept_QV
        assert (p_QV.sum(-1) >= top_p).all()
        least_Q = p_QV.masked_fill(~kept_QV, 2.0).min(-1).values
        assert (p_QV.sum(-1) - least_Q < top_p).all()
        assert kept_QV.sum(-1).unique().numel() > 1


def test_top_p_one_cuts_nothing_beside_top_k():
    """Rounding lifts the mass of the surest tokens to 1; the others of the top k stay."""
    plain_QV = token_logprobs(torch.tensor([[0.0, -50.0, 0.0, -60.0, -70.0]]), MASK)
    assert kept_tokens(plain_QV, TokenSampling(top_k=3)).tolist() == [[True, True, False, True, False]]


def test_ties_go_to_the_smaller_id():
    plain_QV = token_logprobs(torch.zeros(1, 6), MASK)
    assert kept_tokens(plain_QV, TokenSampling(top_k=3)).tolist() == [[True, True, False, True, False, False]]
    assert tempered_logprobs(plain_QV, 0).argmax() == 0


def test_plain_law_is_fp32_of_half_precision_and_leaves_float64():
    half_QV = torch.randn(3, 7, generator=generator()).bfloat16()
    assert token_logprobs(half_QV, MASK).dtype == torch.float32
    assert torch.equal(token_logprobs(half_QV, MASK), token_logprobs(half_QV.float(), MASK))
    assert token_logprobs(half_QV.double(), MASK).dtype == torch.float64
    assert (token_logprobs(half_QV, MASK)[:, MASK] == -torch.inf).all()


def test_temperature_one_is_the_very_same_tensor_of_numbers():
    plain_QV = token_logprobs(torch.randn(3, 7, generator=generator()), MASK)
    assert torch.equal(tempered_logprobs(plain_QV, 1.0), plain_QV)


def test_temperature_zero_draws_the_likeliest_whatever_the_uniform():
    plain_QV = token_logprobs(torch.randn(40, 7, generator=generator()), MASK)
    for u in (0.0, 0.5, LAST):
        assert torch.equal(draw_tokens(tempered_logprobs(plain_QV, 0), torch.full((40,), u)), plain_QV.argmax(-1))


@given(LOGITS, st.floats(0, LAST, width=32))
@bounded(max_examples=100)
def test_drawn_is_numpys_inverse_cdf(logits, u):
    logq_QV = token_logprobs(torch.tensor([logits], dtype=torch.float64), MASK)
    cumulative_V = np.cumsum(logq_QV[0].exp().numpy())
    expected = np.searchsorted(cumulative_V, u * cumulative_V[-1], side="right")
    assert draw_tokens(logq_QV, torch.tensor([u])).item() == min(int(expected), len(logits) - 1)


@pytest.mark.parametrize(("words", "n"), [(7, 4096), (IN_PARTS, 2**13), (IN_PARTS + 77, 2**13)])
def test_an_even_grid_of_uniforms_draws_every_token_in_proportion(words, n):
    logq_V = token_logprobs(3 * torch.randn(words, generator=generator(3), dtype=torch.float64), MASK)
    token_n = torch.cat([draw_tokens(logq_V.expand(len(u), -1), u) for u in ((torch.arange(n) + 0.5) / n).split(512)])
    count_V = torch.bincount(token_n, minlength=words)
    assert ((count_V - n * logq_V.exp()).abs() <= 1).all()


@pytest.mark.parametrize("words", [IN_PARTS, IN_PARTS + 1, 5011])
def test_in_two_stages_the_token_is_the_one_of_a_single_cumulative_sum(words):
    """In fp32 an edge may move by its rounding: then the uniform is within 1e-6 of it."""
    rng, uniform_Q = generator(words), torch.cat([torch.tensor([0.0, LAST]), torch.rand(62, generator=generator())])
    logq_QV = token_logprobs(4 * torch.randn(64, words, generator=rng), MASK)
    cumulative_QV, token_Q1 = logq_QV.double().exp().cumsum(-1), draw_tokens(logq_QV, uniform_Q)[:, None]
    level_Q1, last_Q1 = uniform_Q[:, None] * cumulative_QV[:, -1:], cumulative_QV.gather(1, token_Q1)
    assert (last_Q1 > level_Q1 - 1e-6).all() and (
        last_Q1 - logq_QV.double().exp().gather(1, token_Q1) < level_Q1 + 1e-6
    ).all()
    assert (logq_QV.gather(1, token_Q1) > -torch.inf).all()


@given(st.integers(0, 10**6), st.sampled_from([torch.float32, torch.float64]))
@bounded(max_examples=60)
def test_a_token_without_probability_is_never_drawn(seed, dtype):
    rng, words = generator(seed), 23 if seed % 8 else IN_PARTS + 9
    logits_QV = 20 * torch.randn(64, words, generator=rng, dtype=dtype)
    logits_QV[torch.rand(64, words, generator=rng) < 0.5] = -torch.inf
    logits_QV[:, 7] = 0.0
    logq_QV, _ = sampling_logprobs(token_logprobs(logits_QV, MASK), TokenSampling(0.9, top_k=5, top_p=0.95))
    for u in (0.0, 2**-24, 0.5, LAST):
        token_Q = draw_tokens(logq_QV, torch.full((64,), u))
        assert (logq_QV.gather(1, token_Q[:, None]) > -torch.inf).all()
        assert (token_Q != MASK).all()


def test_restricted_is_the_law_given_the_kept():
    logq_QV = torch.randn(5, 6, generator=generator(), dtype=torch.float64).log_softmax(-1)
    kept_QV = torch.rand(5, 6, generator=generator()) < 0.5
    kept_QV[:, 3] = True
    for q in range(5):
        mass = sum(logq_QV[q, v].exp().item() for v in range(6) if kept_QV[q, v])
        for v in range(6):
            expected = logq_QV[q, v].exp().item() / mass if kept_QV[q, v] else 0.0
            assert restricted_logprobs(logq_QV, kept_QV)[q, v].exp().item() == pytest.approx(expected, abs=1e-12)


@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 10**6))
@bounded(max_examples=60)
def test_kept_ids_say_which_tokens_were_kept(rows, words, seed):
    kept_QV = torch.rand(rows, words, generator=generator(seed)) < 0.5
    id_QK = kept_ids(kept_QV)
    wide_QK = pad_ids(id_QK, id_QK.shape[1] + 2)
    assert id_QK.shape[1] == kept_QV.sum(-1).max()
    for ids, kept_V in zip(wide_QK.tolist(), kept_QV.tolist(), strict=True):
        assert sorted(i for i in ids if i >= 0) == [v for v in range(words) if kept_V[v]]
        assert ids[-2:] == [-1, -1]


def test_entropy_is_the_sum_over_possible_tokens():
    logq_QV, _ = sampling_logprobs(
        token_logprobs(torch.randn(6, 7, generator=generator(), dtype=torch.float64), MASK), TokenSampling(top_k=4)
    )
    for q in range(6):
        expected = -sum(p * math.log(p) for p in logq_QV[q].exp().tolist() if p > 0)
        assert entropy(logq_QV)[q].item() == pytest.approx(expected, abs=1e-12)
    assert entropy(tempered_logprobs(logq_QV, 0)).tolist() == [0.0] * 6


# Noise

WORD = 2**64


def splitmix_finaliser(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
    return z ^ (z >> 31)


def uniform_by_integers(seed: int, *counters: int) -> float:
    key = splitmix_finaliser((seed + 0x9E3779B97F4A7C15) % WORD)
    for counter in counters:
        key = splitmix_finaliser(((key ^ (counter % WORD)) + 0x9E3779B97F4A7C15) % WORD)
    return (key >> 40) / 2**24


def test_the_reference_finaliser_gives_splitmix64s_published_numbers():
    """Seed 1234567, the first three outputs of the generator (its state advances by the golden gamma)."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    states = [(1234567 + (n + 1) * 0x9E3779B97F4A7C15) % WORD for n in range(3)]
    assert [splitmix_finaliser(s) for s in states] == published
    assert uniforms(torch.tensor(1234567)).item() == (published[0] >> 40) / 2**24


@given(st.integers(-(2**63), 2**63 - 1), st.lists(st.integers(-(2**40), 2**40), max_size=3))
@bounded(max_examples=200)
def test_uniforms_are_splitmix64_of_seed_and_counters(seed, counters):
    found = uniforms(torch.tensor(seed), *counters)
    assert found.dtype == torch.float32
    assert found.item() == uniform_by_integers(seed, *counters)


def test_uniforms_lie_below_one_fill_the_range_and_depend_on_nothing_else():
    seed_B1, column_L = torch.arange(-50, 50)[:, None], torch.arange(400)
    u_BL = uniforms(seed_B1, 3, column_L)
    assert u_BL.shape == (100, 400)
    assert 0 <= u_BL.min() < 1e-3 and 1 - 1e-3 < u_BL.max() <= LAST
    assert abs(u_BL.mean() - 0.5) < 0.005 and abs(u_BL.var() - 1 / 12) < 0.002
    assert torch.equal(uniforms(seed_B1[7:9], 3, column_L), u_BL[7:9])
    assert torch.equal(uniforms(seed_B1, torch.tensor(3), column_L[90:]), u_BL[:, 90:])
    neighbours = torch.corrcoef(torch.stack([u_BL[:, :-1].flatten(), u_BL[:, 1:].flatten()]))[0, 1]
    rows = torch.corrcoef(torch.stack([u_BL[:-1].flatten(), u_BL[1:].flatten()]))[0, 1]
    assert abs(neighbours) < 0.02 and abs(rows) < 0.02


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"temperature": -0.1}, "temperature must be 0"),
        ({"top_k": -1}, "top_k must be 0"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\]"),
        ({"top_p": 1.01}, r"top_p must lie in \(0, 1\]"),
    ],
)
def test_a_law_that_cannot_be_is_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        TokenSampling(**settings)
