"""Log-likelihoods of given completions against enumeration: every order, every completion."""

from itertools import permutations, product

import pytest
import torch

from unmask.evaluation.likelihood import ESTIMATORS, LONGEST, LikelihoodSettings, log_likelihoods
from world import NetPolicy, joint_policy

WORDS, LENGTH, PROMPT = 3, 3, [1, 0]
TEXTS = [list(text) for text in product(range(WORDS), repeat=LENGTH)]


def logps(policy, texts, estimator: str, **settings) -> torch.Tensor:
    pairs = [(PROMPT, text) for text in texts]
    return torch.tensor(log_likelihoods(policy, pairs, LikelihoodSettings(estimator, **settings), "cpu"))


def of_order(policy, text: list[int], order: tuple[int, ...]) -> float:
    """The log-probability of writing the text in this order, one token at a time."""
    state, total = [policy.mask_id] * LENGTH, 0.0
    for place in order:
        canvas = torch.tensor([PROMPT + state])
        logits = policy(canvas, None, torch.tensor([len(PROMPT) + place]))[0]
        total += float(logits[:WORDS].log_softmax(-1)[text[place]])
        state[place] = text[place]
    return total


@torch.no_grad()
def test_estimators_against_every_order():
    policy = NetPolicy(WORDS, LENGTH, seed=3)
    orders = list(permutations(range(LENGTH)))
    by_order = torch.tensor([[of_order(policy, text, order) for order in orders] for text in TEXTS])
    exact = logps(policy, TEXTS, "exact", micro_batch=5)
    torch.testing.assert_close(exact, by_order.logsumexp(-1) - torch.tensor(len(orders)).log(), rtol=0, atol=1e-5)
    torch.testing.assert_close(logps(policy, TEXTS, "left_to_right"), by_order[:, 0], rtol=0, atol=1e-5)
    for estimator in ("exact", "left_to_right", "fully_masked"):  # a distribution over completions
        assert float(logps(policy, TEXTS, estimator).exp().sum()) == pytest.approx(1, abs=1e-5)
    bound = by_order.mean(-1)
    assert (bound < exact - 1e-3).any()
    estimate = logps(policy, TEXTS, "elbo", draws=1500, micro_batch=4096)
    assert (estimate - bound).abs().max() < 0.1 and float((estimate - bound).mean()) == pytest.approx(0, abs=0.02)


@torch.no_grad()
def test_the_orders_of_one_joint_distribution_agree():
    policy, joint = joint_policy(WORDS, LENGTH, seed=1)
    wanted = joint.flatten().log()
    for estimator in ("exact", "left_to_right"):
        torch.testing.assert_close(logps(policy, TEXTS, estimator), wanted, rtol=0, atol=1e-5, check_dtype=False)


def test_completions_of_several_lengths_and_none(model):
    from unmask.models import load_model

    policy = load_model(model)
    pairs = [([5, 6], [7, 8]), ([5], [9]), ([6, 7, 8], [9]), ([5], [])]
    for estimator in ESTIMATORS:
        settings = LikelihoodSettings(estimator, draws=2)
        together = log_likelihoods(policy, pairs, settings, "cpu")
        alone = [log_likelihoods(policy, [pair], settings, "cpu")[0] for pair in pairs[1:3]]
        assert together[1:3] == pytest.approx(alone, abs=1e-4) and together[3] == 0.0
    with pytest.raises(ValueError, match="exact: a completion has 11 tokens"):
        log_likelihoods(policy, [([5], [9] * (LONGEST + 1))], LikelihoodSettings("exact"), "cpu")


@torch.no_grad()
def test_an_elbo_does_not_depend_on_the_other_requests():
    policy = NetPolicy(WORDS, LENGTH, seed=3)
    pairs = [([1, 0], [0, 1, 2]), ([1, 0], [2, 1, 0]), ([2, 0], [0, 1, 2]), ([2, 1], [1, 1, 2])]
    settings = LikelihoodSettings("elbo", draws=2, seed=4)
    alone = [log_likelihoods(policy, [pair], settings, "cpu")[0] for pair in pairs]
    assert log_likelihoods(policy, pairs[::-1], settings, "cpu")[::-1] == pytest.approx(alone, abs=1e-6)
    small = LikelihoodSettings("elbo", draws=2, seed=4, micro_batch=1)
    assert log_likelihoods(policy, pairs, small, "cpu") == pytest.approx(alone, abs=1e-6)
    other = LikelihoodSettings("elbo", draws=2, seed=5)
    assert log_likelihoods(policy, pairs, other, "cpu") != pytest.approx(alone, abs=1e-3)


@torch.no_grad()
def test_the_completions_of_one_prompt_share_their_draws():
    states = []

    class Recorded(NetPolicy):
        def hidden(self, tokens_SL, *rest):
            states.append(tokens_SL == self.mask_id)
            return super().hidden(tokens_SL, *rest)

    policy = Recorded(WORDS, LENGTH, seed=3)
    for prompt, completion in (([1, 0], [0, 1, 2]), ([1, 0], [2, 1, 0]), ([2, 0], [0, 1, 2])):
        log_likelihoods(policy, [(prompt, completion)], LikelihoodSettings("elbo", draws=4), "cpu")
    first, second, other = states
    assert torch.equal(first, second) and not torch.equal(first, other)
