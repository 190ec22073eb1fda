"""pass@k against its definition; evaluation against a task with a known answer."""

import itertools
import math

import pytest
import torch
from task_variants import task_of

from unmask.evaluation.evaluate import Evaluator, mixed_at_k, pass_at_k
from unmask.models import tiny_policy
from unmask.rollout.decoding import Decoding
from unmask.tasks import TASKS, Task
from unmask.tasks.scoring import score


def test_pass_and_mixed_at_k_are_shares_of_k_subsets() -> None:
    samples = 6
    for hits, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        outcomes = [i < hits for i in range(samples)]
        subsets = list(itertools.combinations(outcomes, k))
        expected = sum(any(subset) for subset in subsets) / len(subsets)
        assert float(pass_at_k(k, torch.tensor([hits]), samples)) == pytest.approx(expected, abs=1e-12)
        both = sum(any(subset) and not all(subset) for subset in subsets) / len(subsets)
        assert float(mixed_at_k(k, torch.tensor([hits]), samples)) == pytest.approx(both, abs=1e-12)
    with pytest.raises(ValueError, match="pass@7 needs at least 7 samples"):
        pass_at_k(7, torch.tensor([1]), samples)


def _letter_task(letter: str) -> Task:
    """Solved by a completion that starts with the letter."""
    return task_of(
        name="letter",
        summary="",
        length=2,
        rows=lambda split, n, seed: [{"i": i} for i in range(n)],
        prompt=lambda row: "a" * (1 + row["i"] % 3),
        solution=lambda row: letter,
        reward=lambda row, text: float(text.startswith(letter)),
        solved=lambda row, text: text.startswith(letter),
    )


class _Fixed:
    """A policy that writes one letter with a known probability and another otherwise, whatever it sees."""

    def __init__(self, letter: str, probability: float) -> None:
        tiny = tiny_policy()
        self.mask_id, self.eos_id, self.pad_id, self.max_length = 1, 2, 0, 64
        self.tokenizer = tiny.tokenizer
        self.logits_V = torch.full((tiny.tokenizer.size,), -torch.inf)
        self.logits_V[self.tokenizer.encode(letter)[0]] = math.log(probability)
        self.logits_V[self.tokenizer.encode("x")[0]] = math.log(1 - probability)

        self.vocabulary = len(self.logits_V)

    def head(self, logits_QV):
        return logits_QV

    def hidden(self, tokens_SL, attended_SL, at_Q):
        return self.logits_V.expand(len(at_Q), -1)


def test_evaluation_of_a_known_policy_gives_its_known_rates() -> None:
    task, policy = _letter_task("q"), _Fixed("q", 0.4)
    found = Evaluator(policy, task, Decoding(2, 2, 2), samples=4, seed=3).evaluate(task.rows("test", 600, 0))
    assert found.greedy.value == 0.0  # x is likelier
    # low_confidence keeps the surer of two draws, ties to the left. The first position ends as q if both draws are q,
    # or if it drew q, lost to an x, and draws q again.
    p = 0.4 * 0.4 + 0.4 * 0.6 * 0.4
    assert found.sampled.value == pytest.approx(p, abs=0.03)  # 2400 samples: 3.4 standard errors
    assert found.passes[2].value == pytest.approx(1 - (1 - p) ** 2, abs=0.05)
    assert found.passes[4].value == pytest.approx(1 - (1 - p) ** 4, abs=0.07)
    assert found.mixed is not None and found.mixed.value == found.metrics()["eval/mixed"]
    assert found.mixed.value == pytest.approx(1 - p**4 - (1 - p) ** 4, abs=0.07)
    assert found.reward == pytest.approx(found.sampled.value)


def test_one_sample_a_problem_cannot_be_mixed() -> None:
    task = _letter_task("q")
    found = Evaluator(_Fixed("q", 0.4), task, Decoding(2, 2, 2), samples=1).evaluate(task.rows("test", 4, 0))
    assert found.mixed is None and "eval/mixed" not in found.metrics()


def test_no_problems_is_an_error() -> None:
    with pytest.raises(ValueError, match="no problems"):
        Evaluator(_Fixed("q", 0.5), TASKS["sudoku"](), Decoding(2, 2, 2)).evaluate([])


def test_work_that_can_be_done_ahead_is_done_once_for_all_completions() -> None:
    called, task = [], _letter_task("q").variant(prepare=lambda rows, texts: called.append((rows, texts)))
    rows = task.rows("test", 3, 0)
    found = score(task, rows, ["q", "x", "q"])
    assert called == [(rows, ["q", "x", "q"])]
    plain = score(task.variant(prepare=lambda rows, texts: None), rows, ["q", "x", "q"])
    assert found.reward_B.tolist() == plain.reward_B.tolist() == [1.0, 0.0, 1.0]
    assert torch.equal(found.solved_B, plain.solved_B)
