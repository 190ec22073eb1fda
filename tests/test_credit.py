"""The credit audit: values against enumeration, figures against brute force and limits, users' rules, the commands."""

import json
import math
from pathlib import Path

import pytest
import torch
from test_continuation import exact_values
from test_exact import decoding_of
from torch import Tensor

import unmask.studies.credit.benchmark as benchmark
from helpers import Net, assert_close, generator, random_trace, rewards, rolled
from unmask.cli.main import main
from unmask.config import read_config
from unmask.core.advantage import group_mean
from unmask.core.order import left_to_right, random
from unmask.core.steps import uniform_steps
from unmask.models import load_model
from unmask.models.checkpoint import fingerprint_of
from unmask.rollout.decoding import Decoding
from unmask.studies.credit.figures import (
    bootstrap_groups,
    committing_step,
    corrected_correlation,
    correlation_sums,
    decisive_steps,
    mean_over_groups,
    rank_share,
    ratio,
    reliability,
    variance_left,
    weight_at,
)
from unmask.studies.credit.rules import StepCredit, built_in_rules, own_rule, step_means, valued, weighted
from unmask.studies.credit.study import audit_credit, measure_credit
from unmask.studies.credit.values import StateValues, ValueSettings, one_shot_values, state_values
from unmask.tasks.scoring import Scores
from unmask.util.micro_batch import MicroBatch
from wording import naming
from world import NetPolicy, World, reward_of

ROOT = Path(__file__).parent.parent

# --- values ----------------------------------------------------------------------------------------------------------


def scored(reward) -> object:
    """A score of completions by a function of their tokens."""
    return lambda trace, source_B: Scores(reward(trace), reward(trace) > 0, {}, [])


@pytest.mark.parametrize("order", ["random", "low_confidence"])
def test_values_and_one_shot_values_are_the_enumerated_ones(order: str) -> None:
    world, draws = World(NetPolicy(2, 3, seed=5), order, steps=3), 400
    trace, reward_B, exact_BT = exact_values(world)
    settings = ValueSettings(decoding_of(world), MicroBatch(10**6), draws)
    score = scored(lambda trace: reward_of(world, trace))
    values = state_values(world.policy, trace, score, settings)
    spread = float(reward_B.max() - reward_B.min()) / 2
    assert (values.value_HBT - exact_BT).abs().max() < 4.5 * spread / math.sqrt(draws)
    assert torch.equal(values.value_HBT[:, :, -1], reward_B.expand(2, -1))
    assert_close(values.change_HBT.sum(-1), reward_B - values.value_HBT[:, :, 0])
    assert not torch.equal(*values.value_HBT)  # two halves

    # One shot fills the last step's state as the sampler does, so there both values have the same expectation.
    one_shot_BT, forwards = one_shot_values(world.policy, trace, score, settings)
    assert forwards == trace.steps
    assert torch.equal(one_shot_BT[:, -1], reward_B)
    last_B = trace.filled_BL.sum(-1) == world.length
    gap_B = one_shot_BT[last_B, -2] - exact_BT[last_B, -2]
    assert gap_B.abs().max() < 4.5 * spread / math.sqrt(draws)


def test_steps_that_are_certain_are_worth_exactly_nothing() -> None:
    """Completion k has the same noise at all states of a rollout, so what does not depend on the step cancels."""
    policy, decoding = Net(2, sharp=3.0), Decoding(6, order=left_to_right)
    trace = rolled(policy, order=left_to_right).trace
    values = state_values(policy, trace, scored(rewards), ValueSettings(decoding, MicroBatch(64), 8))
    certain_BT = step_means(trace.logp_BL, trace) > -1e-3
    assert certain_BT.sum() > 5 and (values.change_HBT[:, certain_BT] == 0).all()
    assert (values.value_HBT.diff(dim=0)[0, :, 0] != 0).any()  # while the values themselves are noisy


# --- figures ---------------------------------------------------------------------------------------------------------


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def test_correlation_is_pearsons_without_noise_and_is_corrected_with_it() -> None:
    truth_BT, wrote_BT, group_B = noise(400, 10), noise(400, 10, seed=1) > -1, torch.arange(400) // 4
    x_BT = 0.6 * truth_BT + 0.8 * noise(400, 10, seed=2)
    exact = torch.corrcoef(torch.stack([x_BT[wrote_BT], truth_BT[wrote_BT]]))[0, 1]
    clean_GK = correlation_sums(x_BT, truth_BT.expand(2, -1, -1), wrote_BT, group_B)
    assert corrected_correlation(clean_GK.sum(0)[None]).item() == pytest.approx(exact.item(), abs=1e-9)
    assert reliability(clean_GK.sum(0)[None]).item() == pytest.approx(1)
    noisy_GK = correlation_sums(x_BT, truth_BT + 2 * noise(2, 400, 10, seed=3), wrote_BT, group_B)
    interval = bootstrap_groups(noisy_GK, corrected_correlation)
    assert interval.low < exact.item() < interval.high < interval.low + 0.4
    assert reliability(noisy_GK.sum(0)[None]).item() == pytest.approx(1 / 3, abs=0.05)  # 1 / (1 + 4 / 2)


def test_a_bootstrap_over_one_group_has_no_interval_and_over_equal_groups_no_width() -> None:
    assert bootstrap_groups(torch.tensor([[3.0, 4.0]]).double(), ratio) == (0.75, None, None)
    assert bootstrap_groups(torch.tensor([[3.0, 4.0]]).double().repeat(5, 1), ratio) == (0.75, 0.75, 0.75)
    assert bootstrap_groups(torch.zeros(3, 2).double(), ratio) is None
    values_B = torch.tensor([1.0, math.nan, 2.0, 6.0]).double()
    assert mean_over_groups(values_B, torch.zeros(4)).mean == pytest.approx(3)


def test_decisive_steps_are_confirmed_by_the_other_half() -> None:
    one, other = torch.tensor([[0.3, 0.3, 0.3, 0.1, 0.5]]), torch.tensor([[0.3, -0.3, 0.1, -0.1, 0.5]])
    wrote_BT = torch.tensor([[True, True, True, True, False]])
    steps = decisive_steps(torch.stack([one, other]), wrote_BT)
    assert steps.decisive_BT.tolist() == [[True, False, False, False, False]]
    assert steps.other_BT.tolist() == [[False, False, False, True, False]]
    assert steps.scored_B.tolist() == [True]


def test_rank_share_counts_pairs_within_a_row() -> None:
    score_BT = (noise(20, 6) * 2).round() / 2  # with ties
    high_BT, low_BT = noise(20, 6, seed=1) > 0.5, noise(20, 6, seed=2) > 0.5
    low_BT = low_BT & ~high_BT
    for b, share in enumerate(rank_share(score_BT, high_BT, low_BT).tolist()):
        pairs = [(i, j) for i in range(6) for j in range(6) if high_BT[b, i] and low_BT[b, j]]
        wins = [
            float(score_BT[b, i] > score_BT[b, j]) + 0.5 * float(score_BT[b, i] == score_BT[b, j]) for i, j in pairs
        ]
        assert share == pytest.approx(sum(wins) / len(wins)) if pairs else math.isnan(share)


def test_the_committing_step_is_the_first_after_which_one_behaviour_has_95_percent() -> None:
    shares = [[[0.5, 0.5], [0.5, 0.5], [0.96, 0.04], [1, 0]], [[0.97, 0.03], [0.9, 0.1], [1, 0], [1, 0]]]
    values = StateValues(torch.zeros(2, 2, 4), torch.tensor(shares), ("careful", "careless"), 0.0)
    assert committing_step(values).tolist() == [1, -1]
    credit = StepCredit("", torch.tensor([[-1.0, 3.0, 2.0]] * 2), torch.zeros(2, 3), 0.0)
    share_B, rank_B = weight_at(committing_step(values), credit, torch.ones(2, 3).bool())
    assert share_B[0].item() == pytest.approx(1.5) and rank_B[0].item() == 1
    assert share_B[1].isnan() and rank_B[1].isnan()


def test_the_variance_left_is_that_of_drawing_a_step_and_none_if_drawn_in_proportion() -> None:
    change_BT, mass_BT = noise(5, 4), noise(5, 4, seed=1).abs()
    wrote_BT = torch.ones(5, 4).bool()
    probability_BT = mass_BT / mass_BT.sum(-1, keepdim=True)
    drawn_BT = change_BT / probability_BT
    mean_B = (probability_BT * drawn_BT).sum(-1)
    by_hand_B = (probability_BT * (drawn_BT - mean_B[:, None]) ** 2).sum(-1)
    assert_close(variance_left(mass_BT, change_BT.expand(2, -1, -1), wrote_BT), by_hand_B)
    positive_BT = change_BT.abs()
    assert_close(variance_left(positive_BT, positive_BT.expand(2, -1, -1), wrote_BT), torch.zeros(5).double())


# --- rules -----------------------------------------------------------------------------------------------------------


def test_what_enters_the_gradient_is_advantage_times_the_mean_weight_of_the_step() -> None:
    trace = random_trace(3)
    value_BL, advantage_B = noise(*trace.tokens_BL.shape), noise(len(trace), seed=1)
    credit = weighted("mine", lambda trace: value_BL, trace, advantage_B)
    for b in range(len(trace)):
        for t in range(trace.steps):
            mine = [value_BL[b, i].item() for i in range(7) if trace.step_BL[b, i] == t]
            mean = sum(mine) / len(mine) if mine else 0.0
            assert credit.gradient_BT[b, t].item() == pytest.approx(advantage_B[b].item() * mean)
            assert credit.weight_BT[b, t].item() == pytest.approx(mean)


def test_the_true_credit_as_a_rule_is_perfect_and_uniform_credit_ranks_nothing() -> None:
    policy, decoding = Net(2, sharp=3.0), Decoding(6, 6, order=random)
    trace = rolled(policy, length=6, steps=6, order=random, sizes=(8, 8, 8, 8)).trace
    trace.seen["entropy"] = torch.ones(len(trace), 6)
    values = state_values(policy, trace, scored(rewards), ValueSettings(decoding, MicroBatch(10**4), 64))
    mean_BT = values.value_HBT.mean(0)
    reward_B = rewards(trace)
    credits = [
        valued("truth", mean_BT, trace, 0.0),
        weighted("uniform", built_in_rules()["uniform"], trace, group_mean(reward_B, trace.group_B)),
    ]
    audit = audit_credit(trace, reward_B, values, credits)
    truth, uniform = audit.rules
    assert truth.correlation.mean == pytest.approx(1 / math.sqrt(audit.reliability.mean), abs=0.02)
    assert uniform.gain == (0.0, 0.0, 0.0)
    assert truth.gain.mean == pytest.approx(truth.correlation.mean - uniform.correlation.mean)
    assert truth.auroc.mean == 1 and uniform.auroc == (0.5, 0.5, 0.5)
    assert 0 < audit.scored <= audit.rollouts == 32 and audit.written == int(uniform_steps(trace).sum())
    assert audit.step_variances["uniform"] == (1.0, 1.0, 1.0)
    assert audit.committed == [] and truth.commit_weight is None  # no behaviours


BAD_RULES = {
    "x = 1": "credit(trace)",
    "def credit(trace):\n    return trace.tokens_BL[0].double()": "shape",
    "def credit(trace):\n    return 1.0": "float",
    "def credit(trace):\n    return trace.logp_BL * float('nan')": "finite",
    "def credit(trace):\n    return trace.nothing": "AttributeError",
    "def credit(trace) return 1": "SyntaxError",
}


@pytest.mark.parametrize(("text", "name"), BAD_RULES.items(), ids=BAD_RULES.values())
def test_a_wrong_rule_is_named_with_what_to_do(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / "my_rule.py").write_text(text)
    with pytest.raises(ValueError, match=naming("my_rule.py", name)):
        own_rule(tmp_path / "my_rule.py")(random_trace(0))
    with pytest.raises(ValueError, match=naming("no_rule.py")):
        own_rule(tmp_path / "no_rule.py")


# --- the commands ----------------------------------------------------------------------------------------------------


def unmask(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr("sys.argv", ["unmask", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_the_audit_writes_figures_and_rollouts_with_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    words = ("audit", "tiny-two", "--task", "sudoku", "--credit", "--problems", 4, "--group", 4, "--draws", 4)
    assert unmask(monkeypatch, *words, "--out", tmp_path / "credit") == 0
    said = capsys.readouterr().out
    assert "dps:shuffled=true" in said and "dispo" in said and "weight at commit" in said
    data = json.loads((tmp_path / "credit" / "credit.json").read_text())
    assert data["draws"] == 4 and data["rollouts"] == 16 and sum(data["committed"]) == 16
    assert data["rules"][0]["name"] == "uniform" and data["rules"][0]["commit_weight"] == [1.0, 1.0, 1.0]
    lines = [json.loads(line) for line in (tmp_path / "credit" / "traces.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    for rollout in (rollout for line in lines for rollout in line["rollouts"]):
        assert len(rollout["values"]) == 9 and rollout["values"][-1] == rollout["reward"]


def test_the_benchmark_has_a_row_for_your_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "my_rule.py").write_text("def credit(trace):\n    return trace.logp_BL.exp()")
    monkeypatch.setattr(benchmark, "DRAWS", 2)
    monkeypatch.setattr(benchmark, "SETTINGS", (*benchmark.SETTINGS, "prompts=3", "group=4"))
    assert unmask(monkeypatch, "bench", "credit", tmp_path / "my_rule.py", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["version"] == "credit-1" and list(data["models"]) == ["tiny-two", "tiny"]
    for one in data["models"].values():
        assert one["rules"][-1]["name"].endswith("my_rule.py")


def test_the_benchmark_is_frozen() -> None:
    config = read_config(None, [f"model={benchmark.MODELS[0]}", *benchmark.SETTINGS])
    rollout = config.rollout
    assert (benchmark.VERSION, benchmark.MODELS, benchmark.DRAWS) == ("credit-1", ("tiny-two", "tiny"), 32)
    assert (config.task, config.seed, config.prompts, config.group) == ("sudoku", 0, 32, 8)
    assert (rollout.length, rollout.steps, rollout.block, rollout.order) == (16, 8, 16, "low_confidence")
    assert (rollout.temperature, rollout.top_k, rollout.top_p, rollout.guidance) == (1.0, 0, 1.0, 0.0)
    assert (rollout.threshold, rollout.cache, rollout.schedule) == (None, "none", "even")


def test_the_frozen_models_and_the_published_results_are_those_of_the_page() -> None:
    fingerprints = {name: fingerprint_of(load_model(name))[:12] for name in benchmark.MODELS}
    assert fingerprints == {"tiny-two": "32ec1e8e7d36", "tiny": "d39c2417546f"}  # else it is another version
    data = json.loads((ROOT / "benchmarks" / "results" / "credit-1.json").read_text())["models"]
    page = (ROOT / "docs" / "credit.md").read_text().partition("## Results")[2]
    for pair in zip(*(data[model]["rules"] for model in benchmark.MODELS), strict=True):
        cells = []
        for rule in pair:
            for name, form in (("correlation", ".2f"), ("gain", "+.2f"), ("auroc", ".2f")):
                cells.append("{:{form}} [{:{form}}, {:{form}}]".format(*rule[name], form=form))
        assert " | ".join(cells) in page, pair[0]["name"]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("--credit", "--methods", "agrpo"), ("--methods", "--credit")),
        (("--credit", "--budget", "4"), ("--budget",)),
        (("--rule", "x.py"), ("--rule", "--credit")),
        (("--credit", "--rule", "x.py"), ("x.py",)),
        (("--credit", "rollout.temperature=0"), ("rollout.temperature",)),
        (("--credit", "rollout.cache=dual", "rollout.block=8"), ("cache", "rollout.cache=none")),
    ],
)
def test_what_has_no_effect_or_cannot_be_continued_is_refused(
    words: tuple, names: tuple, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert unmask(monkeypatch, "audit", "tiny", *words) == 2
    said = capsys.readouterr().err
    assert all(name in said for name in names), said


def test_a_reward_that_never_varies_is_reported(model: Path) -> None:
    config = read_config(None, [f"model={model}", "task=sudoku", "prompts=2", "group=2", "full=true"])
    with pytest.raises(ValueError, match=naming("never varies")):
        measure_credit(config, {}, 2)
