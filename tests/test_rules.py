"""The study of the two rules (benchmarks/rules.py): its expected gradients are those of the product and of J."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from unmask.core.objective import policy_gradient
from unmask.core.probes import ask, every_step
from unmask.core.strata import strata_views


@pytest.fixture(scope="module")
def rules() -> Any:
    path = Path(__file__).parent.parent / "benchmarks" / "rules.py"
    spec = importlib.util.spec_from_file_location("rules", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def study(rules: Any) -> Any:
    """A policy in the middle of training: its conditionals do not agree, and no sign or likelihood is another's."""
    found = rules.Study("choosing", iterations=8)
    assert 0.02 < found.solve_rates(found.start).mean() < 0.95
    return found


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((found - wanted).norm() < 1e-12 * wanted.norm())


def test_visited_with_both_signs_is_the_gradient_of_the_solve_rate(study: Any) -> None:
    assert close(study.gradient(study.start, "visited", "both signs")[0], study.true_gradient(study.start))


def test_the_parts_of_either_sign_add_up_and_other_likelihoods_are_biased(rules: Any, study: Any) -> None:
    truth = study.true_gradient(study.start)
    for likelihood in (*rules.RULE_1, *rules.RULE_2):
        signs = ("both signs", "positive part", "negative part")
        both, positive, negative = (study.gradient(study.start, likelihood, sign)[0] for sign in signs)
        assert close(positive + negative, both)
        assert close(both, truth) == (likelihood == "visited")
    elbo = torch.stack([study.gradient(study.start, name, "both signs")[0] for name in rules.RULE_2]).mean(0)
    assert close(study.gradient(study.start, "ELBO", "both signs")[0], elbo)
    same = [study.gradient(study.start, name, "both signs")[0] for name in ("SML", "2 masked")]
    assert close(*same)


def test_the_questions_give_the_gradient_of_the_products_own_objective(rules: Any, study: Any) -> None:
    policy, trace = study.start, study.trace
    table_SCV = rules.logprob_table(policy)
    steps = study.questions["visited"]
    chance_B = steps.entries(rules.transitions(table_SCV, study.order)).detach()[study.steps_BT].prod(1)
    assert torch.allclose(chance_B.sum(), torch.tensor(9.0).double())
    mean_P = study.solve_rates(policy).detach()
    advantage_B = chance_B * (study.reward_B - mean_P[trace.group_B]) * len(trace) / 9
    halves = [strata_views(trace, mask_BL.long(), 2) for mask_BL in rules._masks(trace, range(2, 3))]
    for name, draws in (("visited", [every_step(trace, torch.Generator())]), ("SML", halves)):
        losses = []
        for probes in draws:
            logp_NL = ask(policy, probes)
            credit_BL = torch.ones_like(trace.tokens_BL, dtype=torch.float64)
            losses.append(policy_gradient(logp_NL, logp_NL.detach(), probes, advantage_B, credit_BL)[0] / len(draws))
        found = rules.flat_gradient(policy, -sum(losses))
        assert close(found, study.gradient(policy, name, "both signs")[0])


@pytest.mark.parametrize("order", ["random", "left_to_right", "low_confidence"])
def test_a_step_writes_one_token_with_probability_one(rules: Any, study: Any, order: str) -> None:
    table_SCV = rules.logprob_table(study.start).detach()
    for greedy in (False, True):
        total_S = rules.transitions(table_SCV, order, greedy).sum((1, 2))
        assert torch.allclose(total_S, rules.MASKED_SC.any(1).double())
