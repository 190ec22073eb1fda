"""Advantages against loops over groups of different size."""

import statistics

import pytest
import torch
from hypothesis import given, settings as bounded, strategies as st

from helpers import assert_close, generator
from unmask.core.advantage import (
    ADVANTAGES,
    EPSILON,
    batch_z_score,
    group_max,
    group_mean,
    group_mean_batch_std,
    group_size,
    group_sum,
    leave_one_out,
    rewards_differ,
    z_score,
)
from unmask.methods.wd1 import preference_weight

SELECTING = {"correct_only", "best_of_group", "every_sample"}  # tests/test_positive.py
COMPARING = {name: f for name, f in ADVANTAGES.items() if name not in SELECTING}
"""Advantages that compare a trace with its group."""


@st.composite
def grouped_rewards(draw):
    """Rewards on a grid (ties occur), groups of 2 to 5 with arbitrary numbers, traces in any order."""
    sizes = draw(st.lists(st.integers(2, 5), min_size=1, max_size=4))
    names = draw(st.lists(st.integers(-9, 99), min_size=len(sizes), max_size=len(sizes), unique=True))
    group = draw(st.permutations([name for name, size in zip(names, sizes, strict=True) for _ in range(size)]))
    reward = [draw(st.integers(-4, 8)) / 4 for _ in group]
    return reward, list(group)


def by_group(reward, group):
    """For every trace: its own reward and the rewards of its group."""
    pairs = list(zip(reward, group, strict=True))
    return [(r, [x for x, other in pairs if other == g]) for r, g in pairs]


def mean_by_loop(reward, group):
    return [r - statistics.fmean(all_of_it) for r, all_of_it in by_group(reward, group)]


def leave_one_out_by_loop(reward, group):
    return [r - (sum(all_of_it) - r) / (len(all_of_it) - 1) for r, all_of_it in by_group(reward, group)]


def z_by_loop(reward, group):
    return [(r - statistics.fmean(x)) / (statistics.pstdev(x) + EPSILON) for r, x in by_group(reward, group)]


def batch_z_by_loop(reward, group):
    return z_by_loop(reward, [0] * len(group))


def mean_batch_std_by_loop(reward, group):
    return batch_z_by_loop(mean_by_loop(reward, group), group)


@pytest.mark.parametrize(
    ("advantage", "by_loop"),
    [
        (group_mean, mean_by_loop),
        (leave_one_out, leave_one_out_by_loop),
        (z_score, z_by_loop),
        (batch_z_score, batch_z_by_loop),
        (group_mean_batch_std, mean_batch_std_by_loop),
    ],
)
@given(case=grouped_rewards())
@bounded(max_examples=40)
def test_every_advantage_is_its_loop(advantage, by_loop, case):
    reward, group = case
    found_B = advantage(torch.tensor(reward, dtype=torch.float64), torch.tensor(group))
    expected_B = torch.tensor(by_loop(reward, group), dtype=torch.float64)
    # Where all rewards are equal the difference is rounding, magnified by 1 / EPSILON.
    assert_close(found_B, expected_B, 1e-8)


def test_every_advantage_on_the_list_was_tested():
    baselines = {"group_mean", "leave_one_out", "z_score", "batch_z_score", "group_mean_batch_std"}
    assert set(COMPARING) == baselines
    assert set(ADVANTAGES) - baselines == SELECTING


@given(case=grouped_rewards())
@bounded(max_examples=40)
def test_group_mean_is_g_minus_one_over_g_times_leave_one_out(case):
    reward_B, group_B = torch.tensor(case[0], dtype=torch.float64), torch.tensor(case[1])
    factor_B = (group_size(group_B) - 1) / group_size(group_B)
    assert_close(group_mean(reward_B, group_B), factor_B * leave_one_out(reward_B, group_B), 1e-12)


@given(case=grouped_rewards())
@bounded(max_examples=40)
def test_group_sum_size_and_max_are_their_loops(case):
    reward_B, group_B = torch.tensor(case[0], dtype=torch.float64), torch.tensor(case[1])
    members = [x for _, x in by_group(*case)]
    assert group_sum(reward_B, group_B).tolist() == [sum(x) for x in members]
    assert group_size(group_B).tolist() == [len(x) for x in members]
    assert group_max(reward_B, group_B).tolist() == [max(x) for x in members]


@given(case=grouped_rewards())
@bounded(max_examples=60)
def test_varied_keeps_whole_groups_that_have_more_than_one_reward(case):
    reward_B, group_B = torch.tensor(case[0], dtype=torch.float64), torch.tensor(case[1])
    assert rewards_differ(reward_B, group_B).tolist() == [len(set(x)) > 1 for _, x in by_group(*case)]


def test_a_trace_at_its_groups_mean_still_has_a_varied_group():
    assert rewards_differ(torch.tensor([0.0, 0.5, 1.0]), torch.zeros(3, dtype=torch.long)).tolist() == [True] * 3


def test_equal_rewards_that_the_mean_rounds_are_not_varied():
    assert not rewards_differ(torch.full((6,), 0.7), torch.tensor([0, 0, 0, 1, 1, 1])).any()


@pytest.mark.parametrize("advantage", [group_mean, leave_one_out, z_score, group_mean_batch_std, preference_weight])
def test_a_group_of_one_is_refused(advantage):
    with pytest.raises(ValueError, match="a group has one trace"):
        advantage(torch.tensor([0.0, 1.0, 1.0]), torch.tensor([0, 0, 1]))


def test_a_batch_of_one_is_refused_by_the_batch_baseline_and_groups_of_one_are_not():
    with pytest.raises(ValueError, match="a group has one trace"):
        batch_z_score(torch.tensor([1.0]), torch.tensor([0]))
    assert_close(batch_z_score(torch.tensor([0.0, 2.0]), torch.tensor([0, 1])), torch.tensor([-1.0, 1.0]), 1e-5)


def test_rewards_without_a_difference_give_no_advantage():
    reward_B, group_B = torch.full((5,), 1.5, dtype=torch.float64), torch.tensor([0, 0, 0, 1, 1])
    for advantage in COMPARING.values():
        assert torch.equal(advantage(reward_B, group_B), torch.zeros(5, dtype=torch.float64))


def test_advantages_do_not_depend_on_the_order_of_traces():
    reward_B = torch.randn(9, generator=generator(), dtype=torch.float64)
    group_B, order_B = torch.tensor([0, 0, 3, 3, 3, 7, 7, 7, 7]), torch.randperm(9, generator=generator(1))
    for advantage in [*ADVANTAGES.values(), preference_weight]:
        assert_close(advantage(reward_B[order_B], group_B[order_B]), advantage(reward_B, group_B)[order_B], 1e-12)


@pytest.mark.parametrize("advantage", COMPARING.values(), ids=COMPARING)
@pytest.mark.parametrize("value", [4.95, 0.1, 1 / 3, 1e-30, 3e7])
@pytest.mark.parametrize("size", [2, 3, 8, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_have_no_advantage_at_all(advantage, value, size, dtype):
    """Eight fp32 rewards of 4.95 have a mean that is not 4.95 in fp32, and -0.32 came out."""
    reward_B = torch.full((size,), value, dtype=dtype)
    found_B = advantage(reward_B, torch.zeros(size, dtype=torch.long))
    assert found_B.dtype == dtype and not found_B.any()


@pytest.mark.parametrize("advantage", ADVANTAGES.values(), ids=ADVANTAGES)
def test_fp32_rewards_have_the_advantage_of_the_same_numbers_in_double(advantage):
    reward_B, group_B = 100 + torch.rand(12, generator=generator()), torch.arange(12) // 4
    assert torch.equal(advantage(reward_B, group_B), advantage(reward_B.double(), group_B).float())


@pytest.mark.parametrize("advantage", ADVANTAGES.values(), ids=ADVANTAGES)
def test_right_or_wrong_is_a_reward(advantage):
    solved_B, group_B = torch.tensor([True, False, True, True, False, False]), torch.arange(6) // 3
    for reward_B in (solved_B, solved_B.long()):
        assert torch.equal(advantage(reward_B, group_B), advantage(solved_B.double(), group_B))
        assert rewards_differ(reward_B, group_B).all()


@pytest.mark.parametrize("advantage", ADVANTAGES.values(), ids=ADVANTAGES)
@pytest.mark.parametrize(("shape", "named"), [((3,), "got 3"), ((4, 1), "got 4x1"), ((), "got one number")])
def test_rewards_of_another_shape_are_refused(advantage, shape, named):
    with pytest.raises(ValueError, match=f"4 traces need 4 rewards, {named}"):
        advantage(torch.zeros(shape), torch.arange(4) // 2)
