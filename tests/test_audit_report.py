"""From the audit's figures to tables and a conclusion; and the command itself."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from test_audit_figures import slope, value

from unmask.config.method_names import every_estimator, method_spec, method_specs, split_overrides
from unmask.studies.audit.figures import (
    Audit,
    EstimatorFigures,
    GradientFigures,
    ValueFigures,
    defined_problems,
    estimator_comparison,
    mean_cosine,
    slope_shares,
)
from unmask.studies.audit.report import (
    audit_data,
    audit_from_data,
    conclusion,
    constant_reward_note,
    read_audit,
    slope_rows,
    tables,
    value_rows,
)
from unmask.util.statistics import jackknife_interval, t_interval
from wording import mentions


def found(rs: dict[str, list[float]], forwards: float = 2.0) -> Audit:
    made = [
        EstimatorFigures(name, forwards, {"": [value(r) for r in some]}, [slope(r, 0.0) for r in some])
        for name, some in rs.items()
    ]
    return Audit("the truth", "the reference", made, 16)


# --- tables and the conclusion ---------------------------------------------------------------------------------------


def test_the_tables_hold_the_figures() -> None:
    rows = [value(0.5, relative=1.0, bias=-2.0), value(0.7, relative=3.0, bias=-4.0)]
    one = EstimatorFigures("a", 2.0, {"A > 0": rows, "A < 0": rows}, [slope(0.6, 1.0), None])
    audit = Audit("the truth", "the reference", [one], 16)
    first, second = value_rows(audit, budget=4.0)
    assert (first[0], second[0]) == ("a (A > 0)", "a (A < 0)") and first[1:] == second[1:]
    assert first[1] == "2" and first[2].startswith("-3.00 [") and first[3:6] == ("-0.750", "2", "4")
    assert first[6].startswith("0.60 [")
    (line,) = slope_rows(audit, budget=4.0)
    assert line == ("a", "2", f"{0.6 / math.sqrt(2):.2f}", "0.60", "1", "2", f"{0.6 / math.sqrt(1.5):.2f}")
    assert slope_rows(audit, budget=1.0)[0][-1] == "-" == value_rows(audit, budget=1.0)[0][-1]
    assert [table.row_count for table in tables(audit, 4.0)] == [2, 1]
    summed = replace(audit, marginal=EstimatorFigures("sum over orders", 9.0, {}, [slope(0.8, 0.0), None]))
    assert slope_rows(summed, 4.0) == [("sum over orders", "9", "0.80", "0.80", "0", "0", "-"), line]
    assert conclusion(summed, 9.0) == conclusion(audit, 9.0)  # it is no method


def test_an_expectation_is_not_cut_at_one() -> None:
    """The noise that was taken off may have been too much, which the reader should see."""
    audit = Audit("", "", [EstimatorFigures("a", 1.0, {}, [slope(1.05, 0.2), slope(1.01, 0.2)])], 16)
    assert slope_rows(audit, 4.0)[0][3].startswith("1.03 [")


def test_few_draws_and_problems_promise_no_correlation_above_one() -> None:
    """A budget of eight draws after four, of which half of what is left was noise; and two problems that differ."""
    lost, sure = GradientFigures(0.85, 1.0, 0.3, 2.0), slope(0.5, 0.0)
    short = ValueFigures(-1.0, 2.0, 0.4, 0.4, 0.85, 0.3, 1.0, 8.0)
    audit = Audit("", "", [EstimatorFigures("a", 0.5, {"": [short] * 2}, [lost, lost])], 4)
    assert value_rows(audit, 4.0)[0][-1] == slope_rows(audit, 4.0)[0][-1] == "-"
    assert conclusion(audit, 4.0).count("the draws are too few") == 2
    apart = Audit(
        "", "", [EstimatorFigures(name, 1.0, {}, [slope(r, 0.0), sure]) for name, r in (("a", -0.9), ("b", 0.4))], 4
    )
    assert [row[3] for row in slope_rows(apart, 4.0)] == ["-0.20 [-1.00, 1.00]", "0.45 [-0.19, 1.00]"]
    assert "0.65 [-2.00, 2.00] above a" in conclusion(apart, 4.0)
    change = {row.figure: row.change for row in estimator_comparison(apart, *apart.estimators, 4.0)}["cosine"]
    assert change == pytest.approx((-0.65, -2.0, 2.0))


def test_numbers_survive_their_file() -> None:
    audit = found({"a": [0.125, 0.25, 0.75], "b": [0.375, 0.25, 0.5]})
    audit.estimators[0].slopes[1] = None
    audit.estimators[1].values[""][0] = value(0.375)._replace(pearson=None, spearman=None)
    assert audit_from_data(json.loads(json.dumps(audit_data(audit)))) == audit
    summed = replace(audit, marginal=replace(audit.estimators[0], values={}))
    assert audit_from_data(json.loads(json.dumps(audit_data(summed)))) == summed


def test_the_conclusion_says_who_leads_and_whether_that_is_sure() -> None:
    clear = conclusion(found({"good": [0.90, 0.92, 0.91], "bad": [0.50, 0.53, 0.52]}), 4)
    assert "the likelihood good has the largest r (0.91), 0.39 [" in clear and clear.count("which excludes a tie") == 2
    close = conclusion(found({"good": [0.9, 0.1, 0.6], "bad": [0.2, 0.7, 0.5]}), 4)
    assert close.count("does not exclude a tie") == 2
    assert "is the only one" in conclusion(found({"good": [0.9, 0.1]}), 4)
    assert conclusion(found({"good": [0.9], "bad": [0.8]}), 4).count("too few problems for an interval") == 2
    assert conclusion(found({"good": [0.9, 0.1], "bad": [0.2, 0.3]}), 1).count("no estimator can be chosen") == 2


RESULTS = sorted((Path(__file__).parents[1] / "benchmarks" / "results").glob("audit_*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_stored_runs_say_what_they_said_and_do_not_exclude_what_is_known(path: Path) -> None:
    """A trajectory's steps, some of them, with the choice where it depends on the policy: the mean draw is the
    reference, and its cosine one."""
    data = read_audit(path)
    audit = audit_from_data(data)
    assert conclusion(audit, data["budget"]) == data["conclusion"]
    told = 0
    for one in audit.estimators:
        if one.name.startswith("agrpo") and ("choice" in one.name) == (data["order"] == "low_confidence"):
            shares = slope_shares(one.slopes)
            if (cosine := jackknife_interval(mean_cosine(shares, audit.draws), defined_problems(shares))) is not None:
                told += one.forwards < data["steps"]
                assert cosine.low - 1e-6 <= 1 <= cosine.high + 1e-6
    assert told >= 1


# --- methods in one word ---------------------------------------------------------------------------------------------


def test_a_word_is_read_piece_by_piece() -> None:
    spec = method_spec("agrpo:draws=2:spread=false")
    assert (spec.label, spec.words) == ("agrpo:draws=2:spread=false", ["agrpo"])
    assert list(spec.overrides()) == ["agrpo.draws=2", "agrpo.spread=false"]
    spec = method_spec("wd1:psi=2+sml:strata=8+dps")
    assert (spec.label, spec.words) == ("wd1:psi=2+sml:strata=8+dps", ["wd1", "sml", "dps"])
    assert list(spec.overrides()) == ["wd1.psi=2", "sml.strata=8"]
    assert list(method_spec("agrpo:seed=2").overrides(options_only=True)) == ["agrpo.seed=2"]  # no key of the run
    alone = method_spec("sml:strata=8")
    assert (alone.label, alone.words, alone.sections) == ("sml:strata=8", ["diffu_grpo", "sml"], ["diffu_grpo", "sml"])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("agrpi", "there is no 'agrpi'"),
        ("agrpo:draws", "not of the form key=value"),
        ("agrpo+wd1", "two bases"),
        ("sml+wd1", "two bases"),
        (" , ", "name at least one"),
        ("wd1,wd1", "named twice"),
    ],
)
def test_a_word_that_cannot_be_read_is_an_error(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        method_specs(text)


def test_options_go_to_the_methods_that_have_them() -> None:
    chosen = method_specs("agrpo,sml")
    assert split_overrides(["rollout.steps=4", "agrpo.draws=2"], chosen) == (["rollout.steps=4"], ["agrpo.draws=2"])
    with pytest.raises(ValueError, match=r"^wd1: "):
        split_overrides(["wd1.psi=2"], chosen)


def test_short_completions_leave_out_what_does_not_fit() -> None:
    names = [one.label for one in every_estimator(3, 2, False)]
    assert "sml:strata=2:anchor=0" in names and "sml:strata=4:anchor=0" not in names and "daca" not in names
    assert names[-1] == "agrpo:draws=2" and "agrpo:draws=2:choice=true" not in names
    assert every_estimator(8, 4, True)[-1].label == "agrpo:draws=4:choice=true"


# --- the command -----------------------------------------------------------------------------------------------------

SMALL = ("--task", "countdown", "--problems", "2", "--group", "4", "--draws", "2")
WORDS = "sml:strata=1:anchor=0,spg,agrpo:draws=4:choice=true"


def test_the_command_measures_writes_and_shows_again(unmask) -> None:
    code, out, err = unmask("audit", "tiny", *SMALL, "--methods", WORDS, "--out", "a", "seed=3")
    assert code == 0, err
    assert "left" in err and "summed over all orders" in out
    last = next(line for line in out.splitlines() if line.startswith("At 4 forward passes"))
    data = json.loads(Path("a/audit.json").read_text())
    assert data["conclusion"] == last and data["seed"] == 3
    field, bounds, exact = data["estimators"]
    assert (field["forwards"], exact["forwards"]) == (1.0, 4.0) and list(bounds["values"]) == ["A > 0", "A < 0"]
    for along, reference, signal, error in zip(*(exact["slopes"][f] for f in GradientFigures._fields), strict=True):
        assert along is None or (error == 0 and along**2 == pytest.approx(reference * signal, rel=1e-4))
    assert Path("a/audit.png").stat().st_size > 1000
    assert data["marginal"]["forwards"] > 4
    shown = unmask("audit", "a/audit.json")
    assert shown[0] == 0 and last in shown[1]
    assert [line for line in out.splitlines() if "│" in line] == [line for line in shown[1].splitlines() if "│" in line]


def test_a_reward_that_never_varies_is_the_first_thing_said(unmask) -> None:
    rows = "length = 4\ndef rows(): return [{'prompt': f'{n}='} for n in range(20)]\n"
    Path("mine.py").write_text(f"{rows}def reward(completion): return 0.0\n")
    few = ("--methods", "diffu_grpo", "--problems", "2", "--group", "3", "--draws", "2", "--states", "0")
    code, out, err = unmask("audit", "tiny", "--task", "mine.py", *few, "--out", "a", "reward.timeout=null")
    assert code == 0, err
    note = out.splitlines()[0]
    assert mentions(note, "all 6 rollouts is 0,", "no gradient", "easier", "rollout.temperature")
    assert json.loads(Path("a/audit.json").read_text())["note"] == note
    assert unmask("audit", "a/audit.json")[1].startswith(note)
    assert mentions(constant_reward_note([1.0, 1.0], True) or "", "all 2 rollouts is 1,", "harder")
    assert constant_reward_note([0.0, 1.0], False) is None


def test_two_estimators_of_a_file_are_compared(unmask) -> None:
    audit = found({"good": [0.90, 0.92, 0.91], "bad": [0.50, 0.53, 0.52]})
    Path("audit.json").write_text(json.dumps({"budget": 4, **audit_data(audit)}))
    code, out, _ = unmask("audit", "audit.json", "--compare", "good,bad")
    change = t_interval([0.40, 0.39, 0.39])
    told = f"{change.mean:+.2f} [{change.low:+.2f}, {change.high:+.2f}]"
    assert code == 0 and [line.count(told) for line in out.splitlines() if "cosine of mean" in line] == [1]
    rows = json.loads(unmask("audit", "audit.json", "--compare", "good,bad", "--json")[1])
    assert next(row for row in rows if row["figure"] == "r")["change"] == pytest.approx(change)
    for names, told in (("good,worse", "no 'worse'; the file has good, bad"), ("good", "name two estimators")):
        code, _, err = unmask("audit", "audit.json", "--compare", names)
        assert code == 2 and told in err


def test_the_same_command_gives_the_same_numbers(unmask) -> None:
    one, other = (json.loads(unmask("audit", "tiny", *SMALL, "--methods", "sml,agrpo", "--json")[1]) for _ in range(2))
    assert one["estimators"] == other["estimators"] and one["truth"].startswith("log pi")


def test_beyond_the_allowed_states_it_is_the_trajectory(unmask) -> None:
    words = ("--methods", "agrpo:draws=4", "--states", "0")
    code, out, _ = unmask("audit", "tiny", *SMALL, *words, "rollout.order=random")
    assert code == 0 and "Values against log P(trajectory), tokens only" in out
    row = next(line for line in out.splitlines() if line.startswith("│ agrpo"))
    assert "0.00 [" in row.split("│")[3]


@pytest.mark.parametrize("more", [("--methods", "agrpo:draws=1", "--states", "0"), ("--credit",)])
def test_by_threshold_the_steps_are_those_that_were_used(unmask, more: tuple[str, ...]) -> None:
    code, out, err = unmask("audit", "tiny", *SMALL, *more, "rollout.threshold=1e-9")
    assert code == 0, err
    assert "1.0 steps on average, by a threshold of 1e-09, low_confidence order" in out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["tiny", "--methods", "nothing"], "there is no 'nothing'"),
        (["tiny", "--methods", "dispo"], "one has several terms"),
        (["tiny", "--methods", "vine"], "name agrpo"),
        (["tiny", "--methods", "agrpo:draw=2"], "agrpo.draw: unknown option"),
        (["tiny", "--methods", "sml:strata=99"], "strata=99"),
        (["tiny", "--methods", "agrpo", "wd1.psi=2"], "not among the methods"),
        (["tiny", *SMALL, "--methods", "wd1", "rollout.temperature=0"], "temperature 0"),
        (["tiny", "--compare", "wd1,spg"], "measure with --out"),
        (["nowhere"], "nowhere"),
        (["nowhere.json"], "nowhere.json"),
    ],
)
def test_what_a_user_can_put_right_is_one_line(unmask, arguments: list[str], told: str) -> None:
    code, _, err = unmask("audit", *arguments)
    assert code == 2 and told in err.splitlines()[-1] and "Traceback" not in err


def test_a_file_that_is_no_audit_is_an_error(unmask) -> None:
    Path("x.json").write_text("{}")
    code, _, err = unmask("audit", "x.json")
    assert code == 2 and "x.json is not an audit.json" in err
