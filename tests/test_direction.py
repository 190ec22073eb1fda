"""Does a method push the policy uphill? Its expected on-policy update against the exact gradient of J.

Every base, alone and with sml, dps, daca, dispo, and daca and dispo, on every pair of trajectories of two worlds of
coupled positions (a pair is a batch of one group, enumerated and weighted by its probability). The questions are the
method's own random ones, drawn 10 times for every pair; the standard error of the inner product is in the assertion.
`pytest -s` prints the cosines.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from test_exact_dispo import branch_part, every_branch
from torch import Tensor

from helpers import ON_ROLLOUTS
from unmask.core.advantage import batch_z_score, group_mean, leave_one_out
from unmask.core.method import Method
from unmask.core.probes import Probes, ask
from unmask.core.specs import Branch
from unmask.core.trace import Trace
from unmask.methods import (
    agrpo,
    coupled_grpo,
    daca,
    diffu_grpo,
    dispo,
    dps,
    dtm,
    espo,
    gspo,
    reinforce_pp,
    sml,
    spg,
    step_merge,
    unigrpo,
    wd1,
)
from unmask.training.update import LossTerm
from world import (
    NetPolicy,
    TablePolicy,
    World,
    cosine,
    enumerated,
    grouped,
    relative_error,
    reward_of,
    step_of,
    value_gradient,
)

DRAWS = 10
METHODS = ON_ROLLOUTS | {
    "agrpo, choice": lambda: agrpo(choice=True),
    "step_merge": lambda: step_merge(segments=2),
    "dtm": lambda: dtm(h=0.5),  # with a large h it climbs the mean of exp(h r), which is another hill
}
CASES = [
    (order, name)
    for order in ("random", "low_confidence")
    for name in METHODS
    if name != "agrpo, choice" or order == "low_confidence"
    if name != "dtm" or order == "random"  # without a baseline, its pull towards its own samples can be the larger part
]
SEEDS = (44, 45)
TABLE: dict[str, dict[str, float]] = {}


@pytest.fixture(scope="module", autouse=True)
def report() -> Iterator[None]:
    """The cosines, a line a base, once the module is done."""
    yield
    names = list(dict.fromkeys(column for row in TABLE.values() for column in row))
    print("\n\n" + " " * 32 + "".join(f"{name:>8}" for name in names))
    for name, row in TABLE.items():
        print(f"{name:<32}" + "".join(f"{row[column]:8.3f}" if column in row else " " * 8 for column in names))


class Uphill:
    """A world, its trajectories and pairs, and the gradient of J there."""

    def __init__(self, world: World) -> None:
        self.world, self.paths = world, enumerated(world)
        self.pairs, self.weight_B = grouped(self.paths.trace, self.paths.probability_B, 2)
        self.truth = value_gradient(world, self.paths)

    def of_base(self, method: Method, draws: int) -> Tensor:
        """The expected update of a method's base term, one row for every draw of its questions."""
        reward_B = reward_of(self.world, self.pairs)
        advantage_B = method.advantage(reward_B, self.pairs.group_B)
        if method.advantage is batch_z_score:  # a pair is the whole batch; few pairs differ in their rewards
            reward_X2, which_P = reward_B.view(-1, 2).unique(dim=0, return_inverse=True)
            advantage_X2 = torch.stack([method.advantage(reward_2, torch.zeros(2)) for reward_2 in reward_X2])
            advantage_B = advantage_X2[which_P].flatten()
        credit_BL, rng = method.credit(self.pairs), torch.Generator().manual_seed(0)
        return torch.stack(
            [
                step_of(self.world.policy, [self._part(method, probes, advantage_B, credit_BL)])
                for probes in (method.probe(self.pairs, rng, 1)[0] for _ in range(draws))
            ]
        )

    def _part(self, method: Method, probes: Probes, advantage_B: Tensor, credit_BL: Tensor) -> LossTerm:
        with torch.no_grad():
            reference_NL = ask(self.world.policy, probes) if method.kl else None
        kl = (reference_NL, method.kl, method.divergence)
        return LossTerm(probes, advantage_B * self.weight_B, credit_BL, method.objective, None, *kl)

    def of_branches(self, method: Method) -> Tensor:
        branches, weight_B = branches_of(self, method.request.branch)
        return step_of(self.world.policy, [branch_part(method, self.world, branches, weight_B)])


@cache
def branches_of(where: Uphill, branch: Branch) -> tuple[Trace, Tensor]:
    return every_branch(where.world, where.paths, branch)[:2]


@cache
def uphill(order: str, seed: int = 44) -> Uphill:
    return Uphill(World(NetPolicy(2, 3, seed=seed), order, prompt=(1,)))


def both_signs(base: Method) -> float:
    """`negative` of SML: 1, except on RAFT and DTM, which have no negative advantages."""
    return float((base.advantage(torch.tensor([1.0, 0.0]), torch.zeros(2, dtype=torch.long)) < 0).any())


def with_daca(base: Method) -> Method:
    return daca(base) if base.trajectory else daca(base, strata=3, negative=both_signs(base))


def with_sml(base: Method) -> Method:
    return sml(base, strata=3, negative=both_signs(base))  # on AGRPO it is refused


CREDITED = {"alone": lambda base: base, "sml": with_sml, "dps": dps, "daca": with_daca}
PLUGS = {"alone": "alone", "sml": "sml", "dps": "dps", "daca": "daca", "dispo": "alone", "both": "daca"}
"""What each column does to the base's own term; dispo leaves that as it is and adds the branches'."""


@cache
def base_update(order: str, seed: int, name: str, credited: str) -> Tensor:
    return uphill(order, seed).of_base(CREDITED[credited](METHODS[name]()), DRAWS)


PLUGGED = [
    (*case, seed, plug)
    for case in CASES
    for seed, plug in [*((SEEDS[0], plug) for plug in PLUGS), (SEEDS[1], "alone")]
    if plug != "sml" or not METHODS[case[1]]().trajectory  # where it would be the method alone once more
]


@pytest.mark.parametrize("order, name, seed, plug", PLUGGED)
def test_the_expected_update_points_uphill(order, name, seed, plug):
    where = uphill(order, seed)
    found = base_update(order, seed, name, PLUGS[plug])
    if plug in ("dispo", "both"):
        found = found + where.of_branches(dispo(METHODS[name]()))
    along = found @ where.truth
    angle, error = cosine(found.mean(0), where.truth), along.std() / DRAWS**0.5
    TABLE.setdefault(f"{name}, {order}, {seed}", {})[plug] = angle
    assert along.mean() > 4 * error, f"cosine {angle:.3f}, inner product {along.mean():.2e} +- {error:.1e}"


@pytest.mark.parametrize("order", ["random", "low_confidence"])
def test_the_trajectory_method_is_the_gradient_itself_up_to_the_noise_of_its_draws(order):
    where = uphill(order)
    exact = where.of_base(agrpo(draws=3, choice=order == "low_confidence"), 1)[0]  # 3 spread draws of 3 steps
    assert relative_error(exact, where.truth / (2 * 3)) < 1e-9


def test_the_choice_of_positions_must_not_be_asked_about_where_it_was_random():
    where = uphill("random")
    found = where.of_base(agrpo(draws=3, choice=True), 1)[0]
    assert relative_error(found, where.truth / (2 * 3)) > 0.1


def test_credit_turns_the_exact_gradient_by_this_much():
    """DPS is a shaped credit, the gradient of no objective: strength 0 is exact, and the turn grows with it."""
    where, angles = uphill("random"), []
    for strength in (0.0, 0.1, 1.0):
        found = where.of_base(dps(agrpo(draws=3), strength=strength), 1)[0]
        angles.append(cosine(found, where.truth))
    assert angles == pytest.approx([1.0, 0.997747987208, 0.888503399717], abs=1e-9)


def test_mean_field_can_point_downhill():
    """It asks at the first state about tokens that were drawn at later ones: what is good late may be bad first."""
    where = Uphill(World(TablePolicy(2, 3, seed=109, scale=2.0)))
    methods = diffu_grpo(prompt_masking=0), sml(diffu_grpo(), strata=3, anchor=0.0, negative=1.0)
    field, strata = (where.of_base(method, 1)[0] for method in methods)
    assert cosine(field, where.truth) == pytest.approx(-0.386598752484, abs=1e-9)
    assert cosine(strata, where.truth) == pytest.approx(0.468747298797, abs=1e-9)


# Where the tokens are independent given the prompt


class Independent(NetPolicy):
    """Reads the prompt only."""

    def hidden(self, tokens_SL: Tensor, attended_SL: Tensor | None, at_Q: Tensor) -> Tensor:
        attended_SL = torch.ones_like(tokens_SL, dtype=torch.bool) if attended_SL is None else attended_SL
        prompt_SL = attended_SL & (torch.arange(tokens_SL.shape[1]) < tokens_SL.shape[1] - self.length)
        return super().hidden(tokens_SL, prompt_SL, at_Q)


@cache
def independent() -> Uphill:
    return Uphill(World(Independent(2, 3, seed=45), prompt=(1, 0)))


EXACT = {  # the method, and its expected update in units of grad J; groups of 2, 3 positions
    "diffu_grpo": (diffu_grpo(prompt_masking=0), 1 / 6),
    "diffu_grpo, one by one": (diffu_grpo(prompt_masking=0, advantage=leave_one_out), 1 / 3),
    "diffu_grpo + sml": (sml(diffu_grpo(), strata=2, negative=1.0), 1 / 6),
    "diffu_grpo + daca, strength 0": (daca(diffu_grpo(), strata=3, negative=1.0, strength=0.0), 1 / 6),
    "gspo": (gspo(prompt_masking=0, advantage=group_mean), 1 / 6),
    "reinforce_pp": (replace(reinforce_pp(prompt_masking=0), advantage=group_mean), 1 / 6),
    "spg + sml": (sml(spg(), strata=3, negative=1.0), 1 / 6),
    "agrpo": (agrpo(draws=3), 1 / 6),
}


@pytest.mark.parametrize("name", EXACT)
def test_independent_tokens_make_the_update_the_gradient(name):
    method, factor = EXACT[name]
    found = independent().of_base(method, 1)[0]
    assert relative_error(found, factor * independent().truth) < 1e-9


def test_independent_tokens_make_wd1_the_gradient_times_psi_as_rewards_draw_together():
    """2 psi for its two softmaxes, 1/2 for the mean of the pair; tokens are added up."""
    found = independent().of_base(wd1(prompt_masking=0, psi=1e-4), 1)[0]
    assert relative_error(found, 1e-4 * independent().truth) < 1e-7


DRAWN = {  # these need a mean over their masks: the factor is met within 4 standard errors
    "unigrpo": (unigrpo(advantage=group_mean), 1 / 8),  # 1 in 4 of the masks is empty
    "coupled_grpo": (coupled_grpo(), 1 / 2),  # 3/2 of what it should be: its 1/t weights
    "spg": (spg(hidden=0.0), 1 / 6),
    "espo": (espo(), 1 / 3),
    "agrpo": (agrpo(draws=1), 1 / 6),
}


@pytest.mark.parametrize("name", DRAWN)
def test_independent_tokens_make_the_mean_over_masks_the_gradient(name):
    method, factor = DRAWN[name]
    truth = independent().truth
    found = independent().of_base(method, 24)
    along = found @ truth / truth.norm() ** 2
    error = along.std() / 24**0.5
    assert abs(along.mean() - factor) < 4 * error and error < 0.1 * factor
    assert cosine(found.mean(0), truth) > 0.99


def test_a_masked_prompt_is_another_law_even_when_tokens_are_independent():
    """With d1's default of 0.15 the update is not the gradient: the sampler saw the whole prompt."""
    found = independent().of_base(diffu_grpo(), 12).mean(0)
    assert relative_error(found, independent().truth / 6) > 0.05


def test_kl_to_the_policy_itself_adds_nothing():
    where = uphill("low_confidence")
    free, held = (where.of_base(coupled_grpo(kl=kl), 1)[0] for kl in (0.0, 1.0))
    assert relative_error(held, free) < 1e-12
