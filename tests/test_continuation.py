"""Continuations of visited states: the limits at step 0 and T, the trace's own noise, and values by enumeration."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from test_exact import decoding_of
from torch import Tensor

from helpers import PROMPTS, Net, assert_close
from unmask.core.order import low_confidence, random
from unmask.core.schedule import fewer_steps, timestep
from unmask.core.token_sampling import TokenSampling
from unmask.core.trace import Trace, select_traces, state_before
from unmask.rollout.cache import Cache
from unmask.rollout.continuation import continue_from
from unmask.rollout.decoding import Decoding
from unmask.rollout.sample import row_seeds, sample
from wording import naming
from world import NetPolicy, World, enumerated, number, reward_of

DECODINGS = {
    "random": Decoding(6, order=random),
    "low confidence in blocks": Decoding(6, 4, 3),
    "threshold": Decoding(6, block=3, threshold=0.3),
    "timestep": Decoding(6, 6, schedule=timestep),
    "cut and guided": Decoding(6, 3, sampling=TokenSampling(0.7, top_k=4, guidance=0.5)),
    "no stop": Decoding(6, 3, stops=False),
}
ROWS = PROMPTS * 6


def same(one: Trace, other: Trace) -> bool:
    names = ("tokens_BL", "step_BL", "logp_BL", "group_B", "counted_BL")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)


@pytest.mark.parametrize("decoding", DECODINGS.values(), ids=DECODINGS)
def test_from_step_0_it_is_sample_from_step_t_the_trace_and_with_its_own_seed_the_trace(decoding: Decoding) -> None:
    policy, seed_B, fresh_B = Net(1, ends=1.0), row_seeds(0, len(ROWS)), row_seeds(1, len(ROWS))
    trace = sample(policy, ROWS, seed_B, decoding).trace
    again = sample(policy, ROWS, fresh_B, decoding).trace
    start_B, end_B = torch.zeros_like(seed_B), torch.full_like(seed_B, trace.steps)
    assert same(continue_from(policy, trace, start_B, fresh_B, decoding), again) and not same(trace, again)
    assert same(continue_from(policy, trace, end_B, fresh_B, decoding), trace)
    step_B = torch.arange(len(ROWS)) % (trace.steps + 1)
    own = continue_from(policy, trace, step_B, seed_B, decoding, micro_batch=5)
    assert torch.equal(own.tokens_BL, trace.tokens_BL) and torch.equal(own.step_BL, trace.step_BL)
    assert_close(own.logp_BL, trace.logp_BL)
    other = continue_from(policy, trace, step_B, fresh_B, decoding)
    assert torch.equal(state_before(other, step_B), state_before(trace, step_B))
    assert not torch.equal(other.tokens_BL, trace.tokens_BL)


def test_equal_canvases_go_through_the_model_once() -> None:
    policy, decoding = Net(1), Decoding(6, order=random)
    trace = select_traces(
        sample(policy, PROMPTS, row_seeds(0, 4), decoding).trace, torch.arange(4).repeat_interleave(9)
    )
    policy.calls.clear()
    continue_from(policy, trace, torch.full((36,), 2), row_seeds(1, 36), decoding)
    assert len(policy.calls[0]) == 4 and len(policy.calls) == 4
    for canvases_SL in policy.calls:
        assert len(canvases_SL) == len(canvases_SL.unique(dim=0)) <= 36
    assert len(policy.calls[-1]) > 4


def exact_values(world: World) -> tuple[Trace, Tensor, Tensor]:
    """Every trajectory, its reward, and the value of the state before each of its steps, (B, T + 1)."""
    paths = enumerated(world)
    reward_B, probability_B = reward_of(world, paths.trace), paths.probability_B.detach()
    columns = []
    for step in range(paths.trace.steps + 1):
        state_BC = state_before(paths.trace, step)[:, -world.length :]
        _, index_B = number(state_BC, world.policy.words + 1).unique(return_inverse=True)
        mass, worth = (
            torch.zeros(int(index_B.max()) + 1, dtype=torch.float64).index_add(0, index_B, part_B)
            for part_B in (probability_B, probability_B * reward_B)
        )
        columns.append((worth / mass)[index_B])
    return paths.trace, reward_B, torch.stack(columns, 1)


@pytest.mark.parametrize("order", ["random", "low_confidence"])
def test_the_mean_reward_of_continuations_is_the_enumerated_value(order: str) -> None:
    world, count = World(NetPolicy(2, 3, seed=5), order, steps=3), 400
    trace, reward_B, value_BT = exact_values(world)
    assert_close(value_BT.diff(dim=1).sum(1), reward_B - value_BT[:, 0])  # the differences add up to r - V(s_0)
    trace = replace(trace, order=order)
    for step in range(trace.steps):
        many = select_traces(trace, torch.arange(len(trace)).repeat_interleave(count))
        step_B = torch.full((len(many),), step)
        done = continue_from(world.policy, many, step_B, row_seeds(step, len(many)), decoding_of(world), 10**6)
        earned_BZ = reward_of(world, done).view(-1, count)
        error_B = earned_BZ.std(1) / count**0.5
        gap_B = (earned_BZ.mean(1) - value_BT[:, step]).abs()
        assert (gap_B <= 4.5 * error_B + 1e-9).all(), step
        assert gap_B.max() > 0


def test_merged_steps_commit_the_same_and_enough_of_them_change_nothing() -> None:
    counts = [[2, 1, 1, 0], [1, 1, 1, 1]]
    assert fewer_steps(counts, 0, 1) == [[4, 0, 0, 0], [4, 0, 0, 0]]
    assert fewer_steps(counts, 1, 2) == [[2, 1, 1, 0], [2, 0, 2, 0]]
    assert fewer_steps(counts, 6, 1) == [[2, 1, 1, 0], [1, 1, 2, 0]]
    assert fewer_steps(counts, 3, 4) == counts == fewer_steps(counts, 8, 1)
    policy, seed_B = Net(1, ends=1.0), row_seeds(0, len(ROWS))
    for decoding in (DECODINGS["random"], DECODINGS["low confidence in blocks"], DECODINGS["threshold"]):
        trace = sample(policy, ROWS, seed_B, decoding).trace
        step_B = torch.arange(len(ROWS)) % (trace.steps + 1)
        plain = continue_from(policy, trace, step_B, row_seeds(1, len(ROWS)), decoding)
        assert same(continue_from(policy, trace, step_B, row_seeds(1, len(ROWS)), decoding, 5, most_steps=6), plain)


def test_merged_steps_by_threshold_fill_the_block_also_if_some_draws_reach_it() -> None:
    policy, decoding = Net(1, ends=-50.0), DECODINGS["threshold"]
    trace = sample(policy, ROWS, row_seeds(0, len(ROWS)), decoding).trace
    done = continue_from(policy, trace, torch.zeros(len(ROWS)).long(), row_seeds(1, len(ROWS)), decoding, most_steps=1)
    assert (done.tokens_BL != policy.mask_id).all()


def one_shot_values(world: World) -> Tensor:
    """The exact mean reward if all masked positions of a state are drawn at once, (B, T + 1)."""
    trace = enumerated(world).trace
    columns = []
    for step in range(trace.steps):
        state_BL, value_B = state_before(trace, step), torch.zeros(len(trace), dtype=torch.float64)
        places = torch.arange(len(trace) * state_BL.shape[1])
        logits_BLV = world.policy(state_BL, trace.attended_BL, places).view(*state_BL.shape, -1).detach().double()
        logp_BLV = logits_BLV[..., : world.policy.words].log_softmax(-1)
        for text in product(range(world.policy.words), repeat=world.length):
            filled_BL = state_BL.clone()
            filled_BL[:, -world.length :] = torch.tensor(text)
            masked_BL = state_BL == trace.mask_id
            fits_B = (filled_BL == state_BL)[:, -world.length :].logical_or(masked_BL[:, -world.length :]).all(1)
            logp_BL = logp_BLV.gather(-1, filled_BL[..., None].clamp(max=world.policy.words - 1)).squeeze(-1)
            chance_B = (logp_BL * masked_BL).sum(1).exp() * fits_B
            value_B += chance_B * reward_of(world, replace(trace, tokens_BL=filled_BL))
        columns.append(value_B)
    return torch.stack([*columns, reward_of(world, trace).double()], 1)


def test_in_one_shot_the_mean_reward_is_that_of_independent_draws() -> None:
    world, count = World(NetPolicy(2, 3, seed=5), "low_confidence", steps=3), 10_000
    trace, _, value_BT = exact_values(world)
    one_shot_BT = one_shot_values(world)
    assert_close(one_shot_BT[:, -2:], value_BT[:, -2:])  # one step is left: nothing is merged
    many = select_traces(replace(trace, order="low_confidence"), torch.zeros(count, dtype=torch.long))
    step_B, decoding = torch.zeros(count, dtype=torch.long), decoding_of(world)
    done = continue_from(world.policy, many, step_B, row_seeds(9, count), decoding, 10**6, most_steps=1)
    earned_B = reward_of(world, done)
    error = float(earned_B.std()) / count**0.5
    assert abs(float(earned_B.mean() - one_shot_BT[0, 0])) < 4.5 * error
    assert abs(float(one_shot_BT[0, 0] - value_BT[0, 0])) > 9 * error  # and that is another value


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"cache": Cache()}, "cache"),
        ({"steps": 2}, "steps"),
        ({"block": 3}, "blocks"),
        ({"order": random}, "order"),
        ({"sampling": TokenSampling(0.5)}, "sampling"),
        ({"threshold": 0.9, "steps": 6}, "threshold"),
    ],
)
def test_another_decoding_than_the_traces_own_is_refused(change: dict, name: str) -> None:
    policy, decoding = Net(), Decoding(6, 6, order=low_confidence)
    trace = sample(policy, PROMPTS, row_seeds(0, 4), decoding).trace
    with pytest.raises(ValueError, match=naming(name)):
        continue_from(policy, trace, torch.zeros(4).long(), row_seeds(1, 4), replace(decoding, **change))


def test_steps_and_seeds_are_one_for_each_trace_and_within_the_rollout() -> None:
    policy, decoding = Net(), Decoding(6)
    trace = sample(policy, PROMPTS, row_seeds(0, 4), decoding).trace
    for step_B, seed_B in ((torch.full((4,), 7), row_seeds(1, 4)), (torch.zeros(4).long(), row_seeds(1, 3))):
        with pytest.raises(ValueError, match=r"between 0 and the 6|4 traces need 4 seeds"):
            continue_from(policy, trace, step_B, seed_B, decoding)
