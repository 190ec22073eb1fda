"""How far each likelihood estimator is from log pi(o | q), exactly, in a world of strongly coupled positions.

The bias is E[estimate - log pi(o | q)] over the texts o that the sampler writes (enumerated) and over the
estimator's own masks (every mask, order and partition; the mask ratio by Gauss-Legendre, exact for polynomials).
"""

from functools import cache
from itertools import permutations, product

import pytest
import torch
from torch import Tensor

from unmask.core.probes import Probes, ask, fully_masked, unit_likelihood
from unmask.core.states import coupled_views, elbo_views
from unmask.core.strata import strata_views
from unmask.core.trace import Trace
from world import NetPolicy, World, enumerated, joint_policy, laws, number, traced

LENGTH, WORDS = 4, 2
ORDERS = [torch.tensor(order) for order in permutations(range(LENGTH))]


def texts(world: World) -> tuple[Trace, Tensor]:
    """Every text as a trace, and the probability that the sampler writes it."""
    paths = enumerated(world)
    probability_X = torch.zeros(WORDS**LENGTH, dtype=torch.float64)
    probability_X.index_add_(0, number(paths.trace.tokens_BL, WORDS), paths.probability_B.detach())
    text_XC = torch.tensor(list(product(range(WORDS), repeat=LENGTH)))
    return traced(world, text_XC, torch.arange(LENGTH).expand_as(text_XC)), probability_X


def answered(world: World, probes: Probes) -> Tensor:
    """The estimate of log pi of each trace."""
    return unit_likelihood(ask(world.policy, probes), probes).sum(-1).detach()


# The estimators, their randomness integrated out


def mean_field(world: World, trace: Trace) -> Tensor:
    return answered(world, fully_masked(trace, torch.Generator()))


def coupled(world: World, trace: Trace) -> Tensor:
    """t uniform on (0.2, 0.8): four nodes are exact for the polynomials t^m (1 - t)^(L - m) / t."""
    nodes, weights = gauss_legendre(0.2, 0.8)
    total_X = torch.zeros(len(trace), dtype=torch.float64)
    for ratio, weight in zip(nodes, weights, strict=True):
        ratio_X = torch.full((len(trace),), ratio, dtype=torch.float64)
        for mask in product([False, True], repeat=LENGTH):
            chance = ratio ** sum(mask) * (1 - ratio) ** (LENGTH - sum(mask))
            probes = coupled_views(trace, torch.tensor(mask).expand_as(trace.tokens_BL), ratio_X)
            total_X += weight * chance * answered(world, probes)
    return total_X


def gauss_legendre(low: float, high: float) -> tuple[list[float], list[float]]:
    """Four nodes and weights (of mean one) on [low, high]: the roots of P_4 = (35 x^4 - 30 x^2 + 3) / 8."""
    roots = [sign * ((3 + other * 2 * 1.2**0.5) / 7) ** 0.5 for sign in (-1, 1) for other in (-1, 1)]
    weights = [(18 - other * 30**0.5) / 72 for _ in (-1, 1) for other in (-1, 1)]
    return [(low + high) / 2 + (high - low) / 2 * x for x in roots], weights


def elbo(world: World, trace: Trace) -> Tensor:
    """Every order and every number of masked positions, one complementary pair each."""
    total_X = torch.zeros(len(trace), dtype=torch.float64)
    for rank_L, size in product(ORDERS, range(LENGTH + 1)):
        size_KB = torch.full((1, len(trace)), size)
        total_X += answered(world, elbo_views(trace, rank_L.expand(1, len(trace), -1), size_KB))
    return total_X / len(ORDERS) / (LENGTH + 1)


def sml(strata: int):
    def estimate(world: World, trace: Trace) -> Tensor:
        total_X = torch.zeros(len(trace), dtype=torch.float64)
        for rank_L in ORDERS:
            stratum_BL = (rank_L % strata).expand_as(trace.tokens_BL)
            total_X += answered(world, strata_views(trace, stratum_BL, strata))
        return total_X / len(ORDERS)

    return estimate


ESTIMATORS = {"mean field": mean_field, "coupled": coupled, "elbo": elbo} | {
    f"sml {strata}": sml(strata) for strata in range(1, LENGTH + 1)
}


# The same by definition, from the table of laws and nothing else


@cache
def law_table(world: World) -> Tensor:
    return laws(world)[1].log().detach()


def log_law(world: World, text: tuple[int, ...], place: int, masked: tuple[int, ...]) -> float:
    """log p(o_place | o with `masked` masked)."""
    state = torch.tensor([WORDS if i in masked else token for i, token in enumerate(text)])
    return law_table(world)[number(state, WORDS + 1), place, text[place]].item()


def elbo_by_definition(world: World, text: tuple[int, ...]) -> float:
    """E over uniformly random orders of the sum of log p(o_i | what came before)."""
    orders = list(permutations(range(LENGTH)))
    return sum(log_law(world, text, o[k], o[k:]) for o in orders for k in range(LENGTH)) / len(orders)


def coupled_by_definition(world: World, text: tuple[int, ...]) -> float:
    """1/2 log p(all masked) + 1/2 E[1/t ...] + 1/2 E[1/(1 - t) ...]; the last two are alike, t being symmetric."""
    total = 0.5 * sum(log_law(world, text, i, tuple(range(LENGTH))) for i in range(LENGTH))
    grid = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000 * 0.6 + 0.2
    for mask in product([False, True], repeat=LENGTH):
        masked = tuple(i for i in range(LENGTH) if mask[i])
        mean = (grid ** (len(masked) - 1) * (1 - grid) ** (LENGTH - len(masked))).mean().item()
        total += mean * sum(log_law(world, text, i, masked) for i in masked)
    return total


def strong(seed: int = 36) -> NetPolicy:
    return NetPolicy(WORDS, LENGTH, seed=seed, scale=3.0)


def biases(world: World) -> dict[str, float]:
    trace, probability_X = texts(world)
    truth_X = probability_X.log()
    return {
        name: float((probability_X * (estimate(world, trace) - truth_X)).sum()) for name, estimate in ESTIMATORS.items()
    }


def test_every_estimator_is_its_definition():
    world = World(strong())
    trace, _ = texts(world)
    found = {name: estimate(world, trace).tolist() for name, estimate in ESTIMATORS.items()}
    everywhere = tuple(range(LENGTH))
    for x in (0, 5, 10, 15):
        text = tuple(trace.tokens_BL[x].tolist())
        field = sum(log_law(world, text, i, everywhere) for i in everywhere)
        assert found["mean field"][x] == pytest.approx(field, abs=1e-12)
        assert found["sml 1"][x] == pytest.approx(field, abs=1e-12)
        alone = sum(log_law(world, text, i, (i,)) for i in everywhere)
        assert found["sml 4"][x] == pytest.approx(alone, abs=1e-12)
        assert found["elbo"][x] == pytest.approx(elbo_by_definition(world, text), abs=1e-12)
        assert found["coupled"][x] == pytest.approx(coupled_by_definition(world, text), abs=1e-8)


def test_an_elbo_draw_that_masks_everything_is_mean_field_times_a_factor():
    """(L + 1) / (2 L), not 1: the other half of the pair is empty."""
    world = World(strong())
    trace, _ = texts(world)
    for size in (0, LENGTH):
        rank_KBL = torch.arange(LENGTH).expand(1, len(trace), -1)
        found_X = answered(world, elbo_views(trace, rank_KBL, torch.full((1, len(trace)), size)))
        assert (found_X - (LENGTH + 1) / (2 * LENGTH) * mean_field(world, trace)).abs().max() < 1e-12


# Computed by this enumeration; the world is NetPolicy(2 words, 4 positions, seed 36, scale 3), one token a step.
FROZEN = {
    "random": {
        "mean field": -1.721839612880,
        "coupled": -3.137164975748,
        "elbo": -1.110523362423,
        "sml 1": -1.721839612880,
        "sml 2": -0.913508761228,
        "sml 3": -0.546181539113,
        "sml 4": -0.178854316998,
    },
    "low_confidence": {
        "mean field": -2.200284477053,
        "coupled": -3.789320600624,
        "elbo": -2.215726005361,
        "sml 1": -2.200284477053,
        "sml 2": -2.697252210309,
        "sml 3": -1.706644883163,
        "sml 4": -0.716037556017,
    },
}


@pytest.mark.parametrize("order", FROZEN)
def test_the_biases_are_these_numbers(order):
    found = biases(World(strong(), order))
    print(f"\n{order}: " + "  ".join(f"{name} {bias:+.3f}" for name, bias in found.items()))
    assert found == pytest.approx(FROZEN[order], abs=1e-9)
    assert abs(found["sml 4"]) < abs(found["mean field"])
    assert found["sml 1"] == pytest.approx(found["mean field"], abs=1e-12)


def test_strata_need_conditionals_that_agree():
    """The conditionals of an untrained network come from no joint, and then SML can be worse than mean field."""
    found = biases(World(strong(seed=33)))
    assert found["sml 4"] == pytest.approx(-3.778811258478, abs=1e-9)
    assert found["mean field"] == pytest.approx(-1.498333359505, abs=1e-9)


def test_the_elbo_is_a_lower_bound_in_random_order():
    """Jensen, text by text: pi(o) is the mean over orders of products, the ELBO the mean of their logarithms."""
    world = World(strong())
    trace, probability_X = texts(world)
    assert (elbo(world, trace) < probability_X.log()).all()


def entropy(probability_X: Tensor) -> float:
    return -float((probability_X * probability_X.log()).sum())


@pytest.mark.parametrize("seed", range(4))
def test_conditionals_of_one_joint_mean_field_is_too_low_and_leaving_one_out_too_high(seed):
    """sum_i H(x_i | x_-i) <= H(x) <= sum_i H(x_i): the biases are the two gaps, and strata go from one to the other."""
    policy, joint_X = joint_policy(WORDS, LENGTH, seed)
    joint = joint_X.view([WORDS] * LENGTH)
    alone = [entropy(joint.sum([j for j in range(LENGTH) if j != i])) for i in range(LENGTH)]
    rest = [entropy(joint_X) - entropy(joint.sum(i).flatten()) for i in range(LENGTH)]
    assert sum(rest) < entropy(joint_X) < sum(alone)
    found = biases(World(policy))
    assert found["mean field"] == pytest.approx(entropy(joint_X) - sum(alone), abs=1e-12)
    assert found["sml 4"] == pytest.approx(entropy(joint_X) - sum(rest), abs=1e-12)
    assert found["elbo"] == pytest.approx(0, abs=1e-12)  # tight: the conditionals agree in every order
    assert found["sml 1"] < found["sml 2"] < found["sml 3"] < found["sml 4"]
    assert found["sml 1"] < 0 < found["sml 4"]


def test_independent_tokens_leave_only_coupled_grpo_biased():
    """Mean field, ELBO and strata are then exact; coupled-GRPO's 1/t weights make its estimate 3/2 log pi."""
    policy, _ = joint_policy(WORDS, LENGTH, scale=0.0)
    with torch.no_grad():
        policy.table += torch.linspace(-1, 1, LENGTH, dtype=torch.float64)[:, None] * torch.arange(WORDS + 1)
    world = World(policy)
    found = biases(world)
    _, probability_X = texts(world)
    assert found.pop("coupled") == pytest.approx(-0.5 * entropy(probability_X), abs=1e-12)
    assert max(abs(bias) for bias in found.values()) < 1e-12
