"""The plug-in `positive`, and the advantages of rejection-sampling fine-tuning, against loops and limits."""

from itertools import product
from math import prod
from operator import eq, le

import pytest
import torch
from hypothesis import given, strategies as st

from helpers import ON_ROLLOUTS
from unmask.config import parse_config
from unmask.config.checks import resolved_options, unlimited_push
from unmask.core.advantage import ADVANTAGES, best_of_group, correct_only, every_sample, group_mean
from unmask.methods import BASES, PLUGINS
from unmask.methods.positive import positive
from wording import mentions

GROUPS = st.lists(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=2, max_size=5), min_size=1, max_size=4)


def tensors(groups: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    rewards = [reward for group in groups for reward in group]
    numbers = [number for number, group in enumerate(groups) for _ in group]
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(numbers)


@given(GROUPS)
def test_correct_only_shares_the_weight_of_a_group_among_its_solutions(groups: list[list[float]]) -> None:
    wanted = [len(g) / g.count(1.0) if reward == 1.0 else 0.0 for g in groups for reward in g]
    reward_B, group_B = tensors(groups)
    assert correct_only(reward_B, group_B).tolist() == wanted
    assert every_sample(reward_B, group_B).tolist() == [1.0] * len(reward_B)


@given(GROUPS)
def test_best_of_group_is_the_first_of_the_best_unless_all_are_equal_and_wrong(groups: list[list[float]]) -> None:
    wanted = []
    for g in groups:
        best = g.index(max(g)) if max(g) == 1.0 or len(set(g)) > 1 else None
        wanted += [float(len(g)) if place == best else 0.0 for place in range(len(g))]
    assert best_of_group(*tensors(groups)).tolist() == wanted


@pytest.mark.parametrize("size", [2, 3])
def test_best_of_group_trains_on_the_distribution_of_the_best_of_n(size: int) -> None:
    """P_n(x) = p(x) (F(r)^n - F(below r)^n) / P(r), less the groups in which all have the same reward below 1."""
    chance, reward = [0.1, 0.2, 0.3, 0.15, 0.25], [1.0, 0.5, 0.0, 1.0, 0.5]
    found = [0.0] * len(chance)
    for group in product(range(len(chance)), repeat=size):
        value_B = best_of_group(*tensors([[reward[x] for x in group]]))
        for x, value in zip(group, value_B.tolist(), strict=True):
            found[x] += prod(chance[y] for y in group) * value / size
    for x, r in enumerate(reward):
        upto, at = (sum(p for p, s in zip(chance, reward, strict=True) if keep(s, r)) for keep in (le, eq))
        best = chance[x] * (upto**size - (upto - at) ** size) / at
        assert found[x] == pytest.approx(best - (r < 1) * chance[x] * at ** (size - 1), abs=1e-12)


@given(GROUPS, st.sampled_from(sorted(ADVANTAGES)), st.sampled_from([0.0, 0.1, 1.0]))
def test_negative_advantages_are_scaled_and_positive_ones_stay(
    groups: list[list[float]], name: str, negative: float
) -> None:
    reward_B, group_B = tensors(groups)
    base = BASES["diffu_grpo"](advantage=ADVANTAGES[name])
    plain_B = base.advantage(reward_B, group_B)
    wanted = [value if value > 0 else negative * value for value in plain_B.tolist()]
    assert positive(base, negative).advantage(reward_B, group_B).tolist() == wanted


@pytest.mark.parametrize("name", ON_ROLLOUTS)
def test_everything_but_the_advantage_is_the_base(name: str) -> None:
    base = BASES[name]()
    method = positive(base)
    assert method.name == f"{name}+positive"
    for field in ("probe", "objective", "credit", "kl", "divergence", "record", "counted", "skip_zero_advantage"):
        assert getattr(method, field) is getattr(base, field)


def test_it_is_refused_where_it_would_change_nothing() -> None:
    with pytest.raises(ValueError, match="vine has advantages of steps"):
        positive(BASES["vine"]())
    with pytest.raises(ValueError, match="vine has a credit of its own, which DPS would replace"):
        PLUGINS["daca"](BASES["vine"]())
    with pytest.raises(ValueError, match=r"vine is defined by the states .*: leave out sml$"):
        PLUGINS["sml"](BASES["vine"]())


def test_a_scale_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        positive(BASES["agrpo"](), -0.1)


def test_the_positive_part_of_equal_rewards_is_zero() -> None:
    reward_B, group_B = tensors([[1.0, 1.0], [0.0, 0.0]])
    assert not positive(BASES["agrpo"](advantage=group_mean)).advantage(reward_B, group_B).any()


def test_correct_only_needs_rewards_whose_largest_value_is_one() -> None:
    text = {"task": "countdown_text", "rollout": {"length": 32}}
    for advantage in (correct_only, best_of_group):
        config = {"method": "diffu_grpo", "diffu_grpo": {"advantage": advantage.__name__}}
        assert parse_config({**config, "task": "sudoku"}).build_method().advantage is advantage
        with pytest.raises(ValueError, match=r"diffu_grpo counts .* is 1.5; .* --method diffu_grpo --with daca"):
            parse_config({**config, **text, "countdown_text": {"weights": {"format": 0.5}}})
    for name in ("sml", "positive", "keep_correct"):
        method = {"method": "agrpo" if name == "keep_correct" else "raft", "with": [name]}
        with pytest.raises(ValueError, match=f"{name} counts a reward of at least 1"):
            parse_config({**method, **text, "countdown_text": {"weights": {"format": 0.5}}})


BARE = {"method": "diffu_grpo", "with": ["sml"], "sml": {"anchor": 0.0, "negative": 1.0}}


@pytest.mark.parametrize("name", ["sml", "daca", "raft"])
def test_sml_that_pushes_wrong_answers_down_without_a_limit_is_warned_of(name: str) -> None:
    bare = {"method": "diffu_grpo", "with": [name], name: {"anchor": 0.0, "negative": 1.0}}
    if name == "raft":
        bare = {"method": "raft", "raft": {"advantage": "group_mean"}}
    warning = unlimited_push(parse_config(bare))
    remedy = "raft.advantage=correct_only" if name == "raft" else f"{name}.negative=0"
    assert warning is not None and mentions(warning, name, "wrong answers", remedy)


@pytest.mark.parametrize(
    "change",
    [
        {"with": ["sml", "positive"]},
        {"diffu_grpo": {"advantage": "correct_only"}, "sml": {"anchor": 0.0}},
        {"sml": {"negative": 1.0, "anchor": 0.5}},
        {"sml": {"anchor": 0.0, "negative": 1.0, "kl": 0.05}},
        {"sml": {"anchor": 0.0, "exact_negative": 1.0}},
    ],
    ids=str,
)
def test_a_limit_or_the_positive_part_needs_no_warning(change: dict) -> None:
    assert unlimited_push(parse_config({**BARE, **change})) is None


@pytest.mark.parametrize("name", ON_ROLLOUTS)
def test_no_base_and_no_default_of_daca_is_warned_of(name: str) -> None:
    for plugins in ([], ["daca"]):
        config = parse_config({"method": name, "with": plugins})
        assert unlimited_push(config) is None
        assert not plugins or resolved_options(config)["daca"]["negative"] == 0


def test_the_warning_is_printed_once_before_training(unmask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unmask.cli.train._train_with_display", lambda *given: None)
    code, _, err = unmask("train", "--method", "diffu_grpo", "--with", "sml", "sml.negative=1", "sml.anchor=0")
    assert code == 0 and err.count("wrong answers") == 1
    code, _, err = unmask("train", "--method", "diffu_grpo", "--with", "sml")
    assert code == 0 and err == ""


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        (["--with", "daca", "raft.states=sml", "daca.anchor=0"], "daca adds only its weights of tokens, DPS"),
        (["--with", "sml", "raft.states=sml", "sml.anchor=0"], "sml changes nothing"),
        (["--with", "sml", "raft.states=sml"], ""),
        (["--with", "sml", "raft.states=sml", "raft.strata=6"], "replace raft.strata"),
        (["--with", "sml", "raft.states=sml", "raft.strata=6", "sml.strata=6", "sml.anchor=0"], "sml changes nothing"),
        (["--with", "daca"], ""),
        (["--with", "sml"], ""),
        (["--with", "positive"], "positive changes nothing: raft has no negative advantages"),
        (["--method", "diffu_grpo", "--with", "sml", "--with", "positive"], "diffu_grpo+sml has no negative"),
        (["--method", "diffu_grpo", "--with", "positive"], ""),
        (["raft.advantage=every_sample"], "the control without selection"),
        (["--with", "daca", "raft.states=pairs"], ""),
        (["--with", "dps"], ""),
        (["--method", "diffu_grpo", "--with", "daca"], ""),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_choices_that_change_nothing_or_do_harm_are_noted(unmask, monkeypatch, changes, note) -> None:
    monkeypatch.setattr("unmask.cli.train._train_with_display", lambda *given: None)
    code, _, err = unmask("train", *changes)
    assert code == 0 and bool(err) == bool(note) and note in err
    assert "SML already" not in note or err.endswith(f"--method diffu_grpo --with {changes[1]}\n")
