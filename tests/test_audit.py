"""What `unmask audit` measures, against enumeration, by-hand statistics and identities."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from test_bias import FROZEN, LENGTH, strong, texts
from test_exact import decoding_of
from torch import Tensor

from unmask.core.advantage import group_mean
from unmask.core.method import Method
from unmask.core.probes import ask
from unmask.core.steps import entropy_steps
from unmask.core.trace import Trace, select_traces
from unmask.methods import agrpo, coupled_grpo, diffu_grpo, espo, sml, spg, unigrpo, wd1
from unmask.studies.audit.audit import (
    AuditSettings,
    audit,
    exact_values,
    gradient_of,
    likelihoods,
    marginal_gradient,
    reference_term,
    scores_choice,
    value_figures,
)
from unmask.training.update import logprobs
from unmask.util.micro_batch import MicroBatch
from world import NetPolicy, World, cosine, enumerated, noise, relative_error, reward_of, value_gradient

ROWS = MicroBatch(10_000)


def settings_of(world: World, draws: int = 2, states: int = 10**6) -> AuditSettings:
    return AuditSettings(decoding_of(world), ROWS, draws, states)


def drawn(world: World, method: Method, trace: Trace, draws: int, label: str = "") -> Tensor:
    """So many estimates of every trace, (D, B), as one batch."""
    many = select_traces(trace, torch.arange(len(trace)).repeat(draws))
    probes = method.probe(many, torch.Generator().manual_seed(1), 1)[0]
    return likelihoods(method, probes, logprobs(world.policy, probes, ROWS))[label].view(draws, len(trace))


def strata(count: int) -> Method:
    return sml(diffu_grpo(), strata=count, anchor=0.0)


# --- values ----------------------------------------------------------------------------------------------------------

FIELD = {"mean field": diffu_grpo(prompt_masking=0.0), "sml 1": strata(1), "sml 4": strata(4)}
DRAWN = {"coupled": coupled_grpo(), "elbo": espo(), "sml 2": strata(2), "sml 3": strata(3)}


@pytest.mark.parametrize("order", FROZEN)
@pytest.mark.parametrize("name", FIELD)
def test_biases_without_noise_are_the_enumerated_ones(order: str, name: str) -> None:
    """Two draws are the same, and the mean over texts, each with its probability, is test_bias.py's number."""
    world = World(strong(), order)
    trace, probability_X = texts(world)
    exact_X = exact_values(world.policy, trace, settings_of(world)).logp_B
    assert exact_X == pytest.approx(probability_X.log(), abs=2e-5)
    estimate_DX = drawn(world, FIELD[name], trace, 2)
    assert (estimate_DX[0] - estimate_DX[1]).abs().max() < 1e-12
    bias = float((probability_X * (estimate_DX[0] - probability_X.log())).sum())
    assert bias == pytest.approx(FROZEN[order][name], abs=1e-9)


@pytest.mark.parametrize("order", FROZEN)
@pytest.mark.parametrize("name", DRAWN)
def test_biases_with_noise_are_the_enumerated_ones_within_their_own_error(order: str, name: str) -> None:
    world, draws = World(strong(), order), 1500
    trace, probability_X = texts(world)
    bias_D = (drawn(world, DRAWN[name], trace, draws) - probability_X.log()) @ probability_X
    error = float(bias_D.std()) / math.sqrt(draws)
    assert abs(float(bias_D.mean()) - FROZEN[order][name]) < 4 * error < 0.3


def test_the_audit_reports_these_values() -> None:
    world = World(strong(), "low_confidence")
    trace, probability_X = texts(world)
    reward_X = reward_of(world, trace)
    methods = {"field": strata(1), "alone": strata(4), "pairs": strata(2)}
    found = audit(world.policy, trace, reward_X, methods, torch.Generator(), settings_of(world, draws=6))
    assert found.truth == "log pi(o | q), summed over all orders" and found.slack < 1e-4
    rng = torch.Generator()
    for one in found.estimators:
        draws = 1 if one.name == "field" else 6  # nothing is drawn there
        estimates = []
        for _ in range(draws):
            probes = methods[one.name].probe(trace, rng, 1)[0]
            estimates.append(likelihoods(methods[one.name], probes, ask(world.policy, probes).detach())[""])
        methods[one.name].probe(trace, rng, 1)  # the one that was drawn too many
        by_hand = value_figures(torch.stack(estimates), probability_X.log(), LENGTH)
        assert one.values[""][0] == pytest.approx(by_hand, abs=1e-4)
        assert one.forwards == pytest.approx({"field": 1, "alone": 4, "pairs": 2}[one.name])


@pytest.mark.parametrize("order", ["random", "left_to_right", "surest_position", "low_confidence"])
def test_every_step_has_no_bias_against_the_trajectory(order: str) -> None:
    world = World(NetPolicy(2, 4, seed=2), order, steps=2)
    paths = enumerated(world)
    truth = exact_values(world.policy, paths.trace, settings_of(world, states=0))
    estimate_DB = drawn(world, agrpo(draws=2, choice=order == "low_confidence"), paths.trace, 1)
    assert estimate_DB[0] == pytest.approx(truth.logp_B, abs=1e-12)
    chance_B = paths.step_BT.detach().log().sum(-1)  # with the choice of positions, whatever the order
    offset_B = chance_B - truth.logp_B
    assert float(offset_B.std()) < 1e-9  # for the random order it is a constant, else zero
    assert (float(offset_B.abs().max()) > 1) == (order == "random")
    assert ("choice" in truth.description) == (order == "low_confidence")


def test_wd1_is_read_as_the_mean_field_it_is() -> None:
    world = World(strong())
    trace, _ = texts(world)
    one_X, other_X = (drawn(world, method, trace, 1)[0] for method in (wd1(prompt_masking=0.0), strata(1)))
    assert one_X == pytest.approx(other_X, abs=1e-12)


def test_unigrpo_is_the_mean_over_what_it_asked() -> None:
    world, method = World(strong()), unigrpo()
    trace, _ = texts(world)
    probes = method.probe(trace, torch.Generator().manual_seed(3), 1)[0]
    logp_NL = ask(world.policy, probes).detach()
    found = likelihoods(method, probes, logp_NL)[""].tolist()
    asked = {int(b): n for n, b in enumerate(probes.trace_N)}
    assert 0 < len(asked) < len(trace)  # one of the traces was asked nothing
    for x, value in enumerate(found):
        if x in asked:
            row, put = logp_NL[asked[x]], probes.asked_NL[asked[x]]
            assert value == pytest.approx(LENGTH * float(row[put].mean()), abs=1e-12)
        else:
            assert math.isnan(value)


def test_both_bounds_of_spg_by_hand() -> None:
    world, beta, mix = World(strong(), block=2, steps=4), 1.3, 0.4
    trace, _ = texts(world)
    method = spg(draws=2, beta=beta, mix=mix)
    probes = method.probe(trace, torch.Generator().manual_seed(5), 1)[0]
    logp_NL = ask(world.policy, probes).detach()
    found = likelihoods(method, probes, logp_NL)
    for x in range(len(trace)):
        rows = [n for n, b in enumerate(probes.trace_N.tolist()) if b == x]
        cells = [{i: float(logp_NL[n, i]) for i in range(LENGTH) if probes.asked_NL[n, i]} for n in rows]
        lower = sum(sum(row.values()) / len(row) for row in cells) / len(rows)
        powers = [
            sum(math.exp(beta * row[i]) / (len(row) / LENGTH) for row in cells if i in row) / len(rows)
            for i in range(LENGTH)
        ]
        upper = [math.log(power) / beta for power in powers if power]
        bad = mix * sum(upper) / len(upper) + (1 - mix) * lower
        assert float(found["A > 0"][x]) == pytest.approx(LENGTH * lower, abs=1e-9)
        assert float(found["A < 0"][x]) == pytest.approx(LENGTH * bad, abs=1e-9)


@pytest.mark.parametrize("steps", [None, entropy_steps])
@pytest.mark.parametrize("draws", [1, 2, 4])
def test_the_variance_of_independent_steps_falls_as_one_over_their_number(draws: int, steps: object) -> None:
    """Var = (sum_t p_t (x_t / p_t)^2 - (sum_t x_t)^2) / k, and the expectation is the trajectory's."""
    world, many = World(NetPolicy(2, 4, seed=4)), 300
    trace = select_traces(enumerated(world).trace, torch.tensor([3, 40, 77]))
    law_BT = torch.ones(3, 4, dtype=torch.float64) if steps is None else entropy_steps(trace)
    law_BT = law_BT / law_BT.sum(-1, keepdim=True)
    step_BT = torch.zeros(3, 4, dtype=torch.float64).scatter_add(1, trace.step_BL, trace.logp_BL)
    whole_B = step_BT.sum(-1)
    variance_B = ((step_BT**2 / law_BT).sum(-1) - whole_B**2) / draws
    law = {} if steps is None else {"steps": entropy_steps}
    estimate_DB = drawn(world, agrpo(draws=draws, spread=False, **law), trace, many)
    found = value_figures(estimate_DB, whole_B, 4.0)
    fourth = float(((estimate_DB - whole_B) ** 2).mean(-1).std()) / math.sqrt(many)
    assert abs(found.noise - float(variance_B.mean())) < 4 * fourth
    assert abs(found.bias) < 4 * float(estimate_DB.mean(-1).std()) / math.sqrt(many)
    spread = value_figures(drawn(world, agrpo(draws=draws, **law), trace, many), whole_B, 4.0)
    assert spread.noise < found.noise * 1.1
    if draws == 4 and steps is None:
        assert spread.noise < 1e-20


def test_statistics_by_hand() -> None:
    exact = [-1.0, -2.0, -4.0, -4.0]
    rows = [[-1.5, -2.0, -3.0, -6.0], [-0.5, -4.0, -5.0, -6.0]]
    found = value_figures(torch.tensor(rows, dtype=torch.float64), torch.tensor(exact, dtype=torch.float64), 7.0)
    means = [-1.0, -3.0, -4.0, -6.0]
    noises = [0.5, 2.0, 2.0, 0.0]
    assert found.bias == pytest.approx(sum(m - x for m, x in zip(means, exact, strict=True)) / 4)
    assert found.noise == pytest.approx(sum(noises) / 4)
    centre, middle = sum(exact) / 4, sum(means) / 4
    assert found.exact_spread == pytest.approx(sum((x - centre) ** 2 for x in exact) / 3)
    assert found.covariance == pytest.approx(
        sum((m - middle) * (x - centre) for m, x in zip(means, exact, strict=True)) / 3
    )
    assert found.spread == pytest.approx(sum((m - middle) ** 2 for m in means) / 3 - sum(noises) / 4 / 2)
    # ranks 3 2 0.5 0.5 against 3 2 1 0 in either draw
    assert found.spearman == pytest.approx(4.5 / math.sqrt(4.5 * 5.0))
    rs = []
    for row in rows:
        mean = sum(row) / 4
        top = sum((e - mean) * (x - centre) for e, x in zip(row, exact, strict=True))
        rs.append(top / math.sqrt(sum((e - mean) ** 2 for e in row) * sum((x - centre) ** 2 for x in exact)))
    assert found.pearson == pytest.approx(sum(rs) / 2)


def test_the_exact_value_agrees_with_itself_and_a_draw_that_says_nothing_is_left_out() -> None:
    exact_B = noise(0, 6)
    found = value_figures(exact_B[None].repeat(3, 1), exact_B, 1.0)
    assert (found.bias, found.noise, found.pearson, found.spearman) == pytest.approx((0, 0, 1, 1), abs=1e-12)
    assert found.spread == pytest.approx(found.exact_spread) == pytest.approx(found.covariance)
    holed = exact_B[None].repeat(3, 1)
    holed[0, 1] = holed[1, 3] = holed[2, 3] = torch.nan
    patched = value_figures(holed, exact_B, 1.0)
    assert (patched.bias, patched.noise, patched.pearson) == pytest.approx((0, 0, 1), abs=1e-12)
    still = value_figures(exact_B[None], torch.zeros(6, dtype=torch.float64), 1.0)
    assert still.pearson is None and still.spearman is None and still.exact_spread == 0


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "threshold"),
    [(order, math.inf) for order in ("random", "left_to_right", "low_confidence")]
    + [(order, 0.6) for order in ("left_to_right", "low_confidence", "surest_position")],
)
def test_the_reference_is_the_gradient_of_what_the_sampler_earns(order: str, threshold: float) -> None:
    """Every trajectory with its probability times its reward as advantage: the sum is grad J, by autograd."""
    world = World(NetPolicy(2, 3, seed=1), order, threshold=threshold)
    paths = enumerated(world)
    batch, weight_B = len(paths.trace), paths.probability_B.detach() * reward_of(world, paths.trace)
    part = reference_term(paths.trace, batch * weight_B, scores_choice(decoding_of(world)))
    found_P, _ = gradient_of(world.policy, part, ROWS)
    assert relative_error(-found_P, value_gradient(world, paths)) < 1e-10


@pytest.mark.parametrize("order", ["random", "low_confidence"])
def test_all_steps_are_the_reference_and_the_choice_belongs_to_them(order: str) -> None:
    world = World(NetPolicy(2, 4, seed=11), order, steps=2)
    trace = enumerated(world).trace
    trace = select_traces(trace, torch.arange(0, len(trace), 3))
    trace = replace(trace, group_B=torch.arange(len(trace)) % 3)
    methods = {"tokens": agrpo(draws=2), "some": agrpo(draws=1), "field": strata(1)}
    if order == "low_confidence":
        methods["choice"] = agrpo(draws=2, choice=True)
    rng, settings = torch.Generator().manual_seed(0), settings_of(world, draws=5)
    result = audit(world.policy, trace, reward_of(world, trace), methods, rng, settings)
    found = {one.name: one for one in result.estimators}
    for problem in range(3):
        exact = found["choice" if order == "low_confidence" else "tokens"].slopes[problem]
        assert exact is not None and exact.noise == 0
        assert exact.along**2 == pytest.approx(exact.signal * exact.reference, rel=1e-12)
        assert exact.along * trace.steps == pytest.approx(exact.reference, rel=1e-12)  # a mean over the steps
        assert found["some"].slopes[problem].noise > 0 == found["field"].slopes[problem].noise
        tokens = found["tokens"].slopes[problem]
        agreement = tokens.along / math.sqrt(tokens.signal * tokens.reference)
        assert (agreement < 0.999) == (order == "low_confidence")


def test_where_there_is_one_order_the_sum_over_orders_is_the_reference() -> None:
    world = World(NetPolicy(2, 4, seed=11), "left_to_right", steps=2)
    trace = select_traces(enumerated(world).trace, torch.arange(0, 16, 3))
    run = partial(audit, world.policy, trace, reward_of(world, trace), {"a": strata(1)}, torch.Generator())
    summed = run(settings_of(world)).marginal
    assert summed is not None and summed.slopes[0] is not None
    assert summed.slopes[0].along == pytest.approx(summed.slopes[0].reference, rel=1e-10)
    assert summed.slopes[0].signal == pytest.approx(summed.slopes[0].reference, rel=1e-10)
    assert run(settings_of(world, states=0)).marginal is None  # no states allowed


@pytest.mark.parametrize("order", ["random", "low_confidence"])
def test_the_sum_over_orders_is_as_unbiased_as_the_reference_and_below_one(order: str) -> None:
    """Both have the gradient of what the sampler earns as their expectation, and differ on every sample of it."""
    world = World(NetPolicy(2, 3, seed=1), order)
    paths = enumerated(world)
    batch, weight_B = len(paths.trace), paths.probability_B.detach() * reward_of(world, paths.trace)
    decoding = decoding_of(world)
    found_P, _ = marginal_gradient(world.policy, paths.trace, batch * weight_B, decoding, ROWS)
    assert relative_error(-found_P, value_gradient(world, paths)) < 1e-4  # what is not followed
    few = select_traces(paths.trace, torch.arange(0, batch, 5))
    summed = audit(
        world.policy, few, reward_of(world, few), {"a": strata(1)}, torch.Generator(), settings_of(world)
    ).marginal
    assert summed is not None and summed.slopes[0] is not None
    along, reference, signal, error = summed.slopes[0]
    assert along / math.sqrt(reference * signal) < 0.99 and error == 0


def test_mean_and_noise_of_gradients_are_those_of_their_list() -> None:
    """The audit's running figures against the gradients themselves, drawn again with the same numbers."""
    world = World(NetPolicy(2, 4, seed=11))
    trace = select_traces(enumerated(world).trace, torch.arange(8) * 40)
    reward_B, method, draws = reward_of(world, trace), strata(2), 7
    found = audit(world.policy, trace, reward_B, {"sml": method}, torch.Generator(), settings_of(world, draws))
    rng, vectors = torch.Generator(), []
    for _ in range(draws):
        probes = method.probe(trace, rng, 1)[0]
        loss, _ = method.objective(
            (logp_NL := ask(world.policy, probes)),
            logp_NL.detach(),
            probes,
            group_mean(reward_B, trace.group_B),
            torch.ones_like(trace.logp_BL),
        )
        vectors.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(world.policy.parameters()))]))
    vector_DP = torch.stack(vectors)
    mean_P, noise_hand = vector_DP.mean(0), float((vector_DP - vector_DP.mean(0)).square().sum() / (draws - 1))
    slope = found.estimators[0].slopes[0]
    assert slope is not None and slope.noise == pytest.approx(noise_hand, rel=1e-10)
    assert slope.signal == pytest.approx(float(mean_P @ mean_P) - noise_hand / draws, rel=1e-10)
    reference_P, _ = gradient_of(world.policy, reference_term(trace, group_mean(reward_B, trace.group_B), False), ROWS)
    assert slope.along == pytest.approx(float(mean_P @ reference_P), rel=1e-10)
    assert slope.along / math.sqrt(slope.reference * float(mean_P @ mean_P)) == pytest.approx(
        cosine(mean_P, reference_P), rel=1e-10
    )


def test_a_group_whose_rewards_are_alike_has_no_gradient() -> None:
    world = World(NetPolicy(2, 4, seed=11))
    trace = select_traces(enumerated(world).trace, torch.arange(6) * 40)
    trace = replace(trace, group_B=torch.tensor([0, 0, 0, 1, 1, 1]))
    reward_B = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    found = audit(world.policy, trace, reward_B, {"a": strata(2)}, torch.Generator(), settings_of(world))
    first, second = found.estimators[0].slopes
    assert first is None and second is not None and len(found.estimators[0].values[""]) == 2
