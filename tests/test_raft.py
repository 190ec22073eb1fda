"""RAFT against a loop, and against diffu_grpo with SML and correct answers only."""

from dataclasses import replace
from itertools import permutations, product

import pytest
import torch

from helpers import Net, assert_close, assert_identical, generator, rolled, slopes
from unmask.config import parse_config
from unmask.core.advantage import batch_z_score, correct_only
from unmask.core.objective import sequence_mean, token_mean, trace_sum
from unmask.core.probes import ask, unit_likelihood
from unmask.core.states import STATES, block_elbo, elbo_views, uniform_sizes
from unmask.core.strata import stratified, strided_strata
from unmask.core.trace import all_tokens, until_eos
from unmask.methods import agrpo, coupled_grpo, daca, diffu_grpo, dispo, espo, keep_correct, raft, reinforce_pp, sml
from unmask.rollout.sample import Rollouts
from unmask.training.loss_terms import ScoredRollouts, Scorer, loss_terms
from unmask.training.update import accumulate, term_loss
from world import World, number, table_of, traced


def right_or_wrong(trace) -> torch.Tensor:
    return (torch.arange(len(trace)) % 3 == 0).double()


def test_it_is_diffu_grpo_with_sml_and_correct_answers_only_bit_for_bit():
    policy = Net(1)
    rollouts = rolled(policy)
    clipped = sml(diffu_grpo(advantage=correct_only), anchor=0.0)
    batch, none = ScoredRollouts(rollouts, right_or_wrong(rollouts.trace)), torch.zeros(())
    for mine in (raft(stratified), sml(raft(), anchor=0.0)):  # the plug-in replaces the default states
        (terms,), (others,) = (loss_terms(method, batch, Scorer(policy), generator()) for method in (mine, clipped))
        assert_identical((none, slopes(policy, terms)[1]), (none, slopes(policy, others)[1]))


@pytest.mark.parametrize(
    ("states", "normaliser", "other"),
    [
        ("pairs", token_mean, coupled_grpo(kl=0.0, advantage=correct_only)),
        ("visited", trace_sum, agrpo(advantage=correct_only)),
        ("fully_masked", token_mean, diffu_grpo(0.0, kl=0.0, advantage=correct_only)),
    ],
    ids=["pairs", "visited", "fully_masked"],
)
def test_with_other_states_it_is_their_method_on_correct_answers_bit_for_bit(states, normaliser, other):
    policy, none = Net(1, ends=1.0), torch.zeros(())
    rollouts = rolled(policy, counted=other.counted)
    batch, mine = ScoredRollouts(rollouts, right_or_wrong(rollouts.trace)), raft(STATES[states], normaliser=normaliser)
    (terms,), (others,) = (loss_terms(method, batch, Scorer(policy), generator()) for method in (mine, other))
    assert_identical((none, slopes(policy, terms)[1]), (none, slopes(policy, others)[1]))


def test_by_default_it_is_espo_on_correct_answers():
    policy = Net(1, ends=1.0)
    rollouts = rolled(policy, counted=all_tokens)
    batch = ScoredRollouts(rollouts, right_or_wrong(rollouts.trace))
    mine, other = raft(normaliser=sequence_mean), espo(1, kl=0.0, advantage=correct_only)
    (terms,), (others,) = (loss_terms(method, batch, Scorer(policy), generator()) for method in (mine, other))
    assert_close(slopes(policy, terms)[1], slopes(policy, others)[1], 1e-12)


def test_options_of_strata_are_refused_with_other_states():
    for options in ({"strata": 4}, {"layout": strided_strata}):
        assert raft(stratified, **options).probe is not None
        for states in ("uniform", "pairs"):
            with pytest.raises(ValueError, match="strata and layout belong to states=sml"):
                raft(STATES[states], **options)
    config = {"method": "raft"}
    with pytest.raises(ValueError, match=r"raft: strata and layout .* set it, or leave them out"):
        parse_config({**config, "raft": {"strata": 4}})
    with pytest.raises(ValueError, match=r"raft.states: there is no 'elbo'"):
        parse_config({**config, "raft": {"states": "elbo"}})


def test_semi_autoregressive_states_refuse_a_normaliser_that_divides_by_their_number_again():
    assert raft(block_elbo, normaliser=trace_sum).name == "raft"
    with pytest.raises(ValueError, match="token_mean, canvas_mean or trace_sum"):
        raft(block_elbo, normaliser=sequence_mean)


def test_sml_replaces_the_default_states_and_no_others():
    trace, base = rolled(Net(1)).trace, {name: raft(states) for name, states in STATES.items()}
    pairs = [
        (raft(), base["uniform"]),
        (sml(raft(), anchor=0.0), base["sml"]),
        (daca(raft(), anchor=0.0), base["sml"]),
        (sml(base["sml"], anchor=0.0), base["sml"]),
    ]
    for name in ("uniform", "pairs", "visited", "fully_masked", "semi_autoregressive"):
        with pytest.raises(ValueError, match=r"raft is defined by the states .* or leave out raft.states"):
            parse_config({"method": "raft", "raft": {"states": name}, "with": ["sml"]})
        pairs.append((daca(base[name]), base[name]))  # DPS alone
    for method, asks_as in pairs:
        (mine,), (other,) = (each.probe(trace, generator(), 1) for each in (method, asks_as))
        assert torch.equal(mine.states_SL, other.states_SL) and torch.equal(mine.asked_NL, other.asked_NL)


def test_the_loss_is_its_loop_over_correct_rollouts():
    """The weight of a token that is masked with x of the L positions is (L + 1) / 2x."""
    policy = Net(1)
    rollouts = rolled(policy)
    trace = rollouts.trace
    ((term,),) = loss_terms(raft(), ScoredRollouts(rollouts, right_or_wrong(trace)), Scorer(policy), generator(2))
    probes = term.probes
    logp_NL, reward_B, total = ask(policy, probes).detach(), right_or_wrong(trace), 0.0
    for n, b in enumerate(probes.trace_N.tolist()):
        mates = [c for c in range(len(trace)) if trace.group_B[c] == trace.group_B[b]]
        advantage = float(reward_B[b]) * len(mates) / sum(float(reward_B[c]) for c in mates)
        masked = (probes.states_SL[probes.state_N[n]] == trace.mask_id) & trace.canvas_BL[b]
        asked = probes.asked_NL[n]
        assert not (asked & ~masked).any()  # an unwritten tail of a row that has ended is masked, and never asked
        weight = (int(trace.canvas_BL[b].sum()) + 1) / 2 / int(asked.sum())
        total += advantage * weight * float(logp_NL[n][asked & trace.counted_BL[b]].sum())
    loss, _ = term_loss(term, ask(policy, probes))
    assert float(loss.detach()) == pytest.approx(-total / int(trace.counted_BL.sum()), abs=1e-12)


@pytest.mark.parametrize(
    "options", [{"states": stratified, "strata": 4, "layout": strided_strata}, {"states": uniform_sizes}]
)
def test_keep_correct_adds_the_gradient_of_raft_to_that_of_the_base(options):
    policy = Net(1)
    rollouts = rolled(policy)
    batch = ScoredRollouts(rollouts, right_or_wrong(rollouts.trace))
    correct = raft(**options)
    for base in (agrpo(), diffu_grpo()):
        rng = generator(4)
        (alone,), (kept,) = (loss_terms(method, batch, Scorer(policy, policy), rng) for method in (base, correct))
        scorer = Scorer(policy, policy)
        ((first, second),) = loss_terms(keep_correct(base, 0.3, **options), batch, scorer, generator(4))
        assert_identical(slopes(policy, [first]), slopes(policy, alone))
        assert_identical(slopes(policy, [second]), slopes(policy, [replace(kept[0], weight=0.3)]))
        assert keep_correct(base).uses_equal_rewards and second.label == "correct_"


def test_a_kl_on_the_reward_does_not_make_correct_rollouts_wrong():
    """reinforce_pp subtracts a price from the reward. keep_correct takes it before, exact_negative after."""
    policy, reference = Net(1), Net(2)
    rollouts = rolled(policy)
    reward_B, base, scorer = right_or_wrong(rollouts.trace), reinforce_pp(kl=0.5), Scorer(policy, reference)
    batch = ScoredRollouts(rollouts, reward_B)
    ((first, kept),) = loss_terms(keep_correct(base), batch, scorer, generator())
    assert len(first.advantage_B.unique()) > 2  # rollouts have different prices
    assert torch.equal(kept.advantage_B, correct_only(reward_B, rollouts.trace.group_B))
    ((above, below),) = loss_terms(sml(base, exact_negative=1.0), batch, scorer, generator())
    both_B = above.advantage_B + below.advantage_B
    assert len(both_B.unique()) > 2 and float(both_B.mean()) == pytest.approx(0, abs=1e-9)


def test_the_log_probability_in_the_metrics_is_that_of_correct_rollouts():
    policy = Net(1)
    rollouts = rolled(policy)
    trace, batch = rollouts.trace, ScoredRollouts(rollouts, right_or_wrong(rollouts.trace))
    ((term,),) = loss_terms(raft(), batch, Scorer(policy), generator(2))
    likelihood_BL = unit_likelihood(ask(policy, term.probes), term.probes).detach()
    right_BL = trace.counted_BL & (right_or_wrong(trace) > 0)[:, None]
    for skipped in (True, False):
        metrics = accumulate(policy, replace(term, skip_zero_advantage=skipped), 64)
        assert float(metrics["logp"]) == pytest.approx(float(likelihood_BL[right_BL].mean()), abs=1e-9)


def test_groups_with_equal_rewards_are_not_dropped():
    assert raft().uses_equal_rewards and not diffu_grpo().uses_equal_rewards
    assert not dispo(diffu_grpo(), advantage=batch_z_score).uses_equal_rewards  # of the branches, which are not dropped
    for name, choice in product(("raft", "reinforce_pp"), ("skip", "resample")):
        with pytest.raises(ValueError, match=f"idle_groups: {name} learns from groups with equal rewards"):
            parse_config({"method": name, "idle_groups": choice})
    assert parse_config({"method": "reinforce_pp", "reinforce_pp": {"baseline": True}, "idle_groups": "skip"})


def test_counting_to_the_first_end_token_unlearns_where_answers_end():
    """Without selection, and from a model with exact conditionals, raft leaves the model as it is if all tokens count.
    Counted to the first end token, texts that ended before a position have no target there, so end tokens lose."""
    word, end, mask = 0, 1, 2
    text_BL = torch.tensor([[word, end, end], [word, word, end], [word, word, word], [word, word, word]])
    joint = torch.zeros(2, 2, 2, dtype=torch.float64)
    for text in text_BL.tolist():
        joint[tuple(text)] += 1 / len(text_BL)
    policy = table_of(joint)
    policy.eos_id = end

    def every_mask(trace, rng):
        orders, sizes = zip(*product(permutations(range(3)), range(4)), strict=True)
        shape = (len(orders), len(trace))
        return elbo_views(
            trace, torch.tensor(orders)[:, None].expand(*shape, 3), torch.tensor(sizes)[:, None].expand(shape)
        )

    slopes_of = {}
    for counted in (all_tokens, until_eos):
        trace = traced(World(policy), text_BL, torch.arange(3).expand_as(text_BL), counted)
        method = replace(raft(every_mask, normaliser=trace_sum), counted=counted)
        batch = ScoredRollouts(Rollouts(trace, None), torch.ones(len(trace), dtype=torch.float64))
        (terms,) = loss_terms(method, batch, Scorer(policy), generator())
        (slopes_of[counted],) = slopes(policy, terms)[1]
    assert slopes_of[all_tokens].abs().max() < 1e-15
    # The fully masked canvas, last position: words are two of four targets, and two of the three that are counted.
    nothing = number(torch.tensor([mask] * 3), 3)
    weight = (3 + 1) / 3 / 2  # of a token if all are masked
    share = weight * 2 / 4  # all are masked at two of the four sizes: at 3, and at 0 in the complement
    lost = share * torch.tensor([2 / 4 - 3 / 4 * 2 / 4, 1 / 4 - 3 / 4 * 2 / 4], dtype=torch.float64)
    assert_close(-slopes_of[until_eos][nothing, 2, :2], lost, 1e-12)
