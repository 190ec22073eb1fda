"""Health checks: each warns where a run really goes wrong, once, and comes out the same after a run is resumed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from ranks_cases import toy_model, toy_task
from task_variants import task_of

import unmask.training.loop
from helpers import cut_at, sample
from unmask.config import Config, parse_config
from unmask.models import save
from unmask.models.tiny import EOS, Tiny
from unmask.rollout.sample import row_seeds
from unmask.tasks import TASKS, Task
from unmask.tasks.task import RewardPart
from unmask.training.batch import rollout_stats
from unmask.training.loop import resume, train
from unmask.training.run.folder import RunFolder, read_metrics
from unmask.training.run.health import (
    CHECKS,
    EARLIER,
    REACH,
    SHORT,
    WINDOW,
    health_warnings,
    recent_updates,
    warning_messages,
)
from unmask.training.run.state import newest_state
from unmask.view.index import RunReader


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "toy", toy_task)


def model_in(folder: Path, change: Callable[[Tiny], None] = lambda policy: None) -> str:
    policy = toy_model()
    with torch.no_grad():
        change(policy)
    save(policy, folder)
    return str(folder)


def config_for(folder: Path, change: Callable[[Tiny], None] = lambda policy: None, **more: Any) -> Config:
    base = {"model": model_in(folder / "model", change), "task": "toy", "updates": WINDOW + 1, "prompts": 2, "group": 3}
    base |= {"optimizer": {"lr": 1e-6}, "eval": {"prompts": 2, "samples": 1}, "method": "agrpo"}
    return parse_config({**base, **more})


def run(config: Config, folder: Path) -> list[dict[str, Any]]:
    """The lines of warnings.jsonl, after a check of what the metrics count."""
    train(config, lambda: RunFolder(folder, config.dump()))
    file = folder / "warnings.jsonl"
    begun = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    for row in recent_updates(read_metrics(folder)):
        so_far = [warning["name"] for warning in begun if warning["step"] <= row["step"]]
        counts = {key.removeprefix("warn/"): value for key, value in row.items() if key.startswith("warn/")}
        assert counts == {name: so_far.count(name) for name in so_far}
    for warning in begun:
        sign = CHECKS[warning["name"]]
        assert (warning["bound"], warning["message"]) == (sign.bound, sign.message)
        assert warning["value"] < sign.bound if sign.below else warning["value"] > sign.bound
    return begun


def names(begun: list[dict[str, Any]]) -> dict[str, int]:
    """The update at which each warning began first."""
    return {warning["name"]: warning["step"] for warning in reversed(begun)}


# --- provoked -----------------------------------------------------------------------------------------------


def fond_of_ends(policy: Tiny) -> None:
    policy.lm.lm_head.weight[EOS, 0] = 4.0


def test_groups_without_a_signal(tmp_path: Path) -> None:
    assert names(run(config_for(tmp_path, toy={"dull": 9}), tmp_path / "run")) == {"idle_groups": WINDOW}


def test_completions_of_end_tokens_and_steps_spent_on_them(tmp_path: Path) -> None:
    config = config_for(tmp_path, fond_of_ends, rollout={"order": "random"})
    found = names(run(config, tmp_path / "run"))
    assert found["empty_completions"] == found["late_ends"] == WINDOW
    row = recent_updates(read_metrics(tmp_path / "run"))[-1]
    assert row["train/empty"] > 0.5 and row["train/late_eos"] > 0.9


def test_rollouts_that_are_all_the_same(tmp_path: Path) -> None:
    found = names(run(config_for(tmp_path, rollout={"temperature": 0.005}), tmp_path / "run"))
    assert found["entropy_collapse"] == WINDOW
    solved = toy_task()
    TASKS["toy"] = lambda: task_of(**{**vars(solved), "solved": lambda row, text: True})
    config = config_for(tmp_path, rollout={"temperature": 0.005})
    assert "entropy_collapse" not in names(run(config, tmp_path / "right"))  # nothing is left to vary


def test_a_sharp_policy_is_a_collapse_only_if_most_answers_are_wrong() -> None:
    """The demo starts sharp, with half a nat a completion, and its correct answers become sharper."""
    for nll, solved, found in ((0.1, 0.4, ["entropy_collapse"]), (0.1, 0.6, []), (0.45, 0.2, [])):
        _, warnings = health_warnings([{"train/nll": nll, "train/solved": solved}] * WINDOW)
        assert [warning.name for warning in warnings] == found


def test_rollouts_that_become_uncertain_are_a_warning_if_most_are_wrong() -> None:
    def rows(nll: float, solved: float = 0.3, count: int = WINDOW) -> list[dict[str, float]]:
        return [{"train/nll": nll, "train/solved": solved}] * count

    def found(*history: list[dict[str, float]]) -> list[str]:
        return [warning.name for warning in health_warnings([row for part in history for row in part])[1]]

    assert found(rows(1.0), rows(2.1)) == ["entropy_growth"]
    assert not found(rows(1.0), rows(1.9)) and not found(rows(1.0), rows(2.1, solved=0.6))
    assert not found(rows(1.0), rows(2.1, count=WINDOW - 1))  # two whole windows are needed
    assert not found(rows(0.3), rows(0.9))  # sharp, whatever it was before
    check, middle = CHECKS["entropy_growth"], EARLIER - 2 * WINDOW
    assert check.alarm([*rows(1.0), *rows(1.5, count=middle), *rows(2.1)]) == pytest.approx(2.1)
    assert check.alarm([*rows(1.0), *rows(1.5, count=middle + WINDOW), *rows(2.1)]) is None  # too long ago


def test_a_format_that_is_lost() -> None:
    def rows(share: float, count: int = SHORT, name: str = "format") -> list[dict[str, float]]:
        return [{f"train/reward/{name}": share}] * count

    def found(*history: list[dict[str, float]]) -> list[str]:
        return [warning.name for warning in health_warnings([row for part in history for row in part])[1]]

    assert found(rows(0.8), rows(0.39)) == ["format_lost"]
    assert not found(rows(0.8), rows(0.41))
    assert not found(rows(0.0, SHORT - 1)) and not found(rows(0.8), rows(0.0, 1))
    assert not found(rows(0.8, name="correctness"), rows(0.0, name="correctness"))
    check, middle = CHECKS["format_lost"], EARLIER - 2 * SHORT
    assert check.alarm([*rows(0.24), *rows(0.0)]) is None  # it was rare
    assert check.alarm([*rows(0.25), *rows(0.0)]) == 0
    assert check.alarm([*rows(0.8), *rows(0.6, middle), *rows(0.3)]) == pytest.approx(0.375)
    assert check.alarm([*rows(0.8), *rows(0.6, middle + SHORT), *rows(0.35)]) is None  # too long ago
    assert check.alarm([*rows(0.1, 3 * SHORT), *rows(0.8), *rows(0.3)]) == pytest.approx(0.375)  # learned, then lost
    assert check.alarm([*rows(0.8), {}, *rows(0.3)]) is None  # an update without the part
    other = rows(0.8, name="xml_format") + rows(0.2, name="xml_format")
    named = [{**a, **b} for a, b in zip(rows(0.9, 2 * SHORT), other, strict=True)]
    assert check.alarm(named) == pytest.approx(0.25)  # the smallest of several parts


def test_answers_that_shrink() -> None:
    def rows(tokens: float, count: int = SHORT) -> list[dict[str, float]]:
        return [{"train/length": tokens}] * count

    check = CHECKS["answers_shrink"]
    assert [warning.name for warning in health_warnings([*rows(200), *rows(99)])[1]] == ["answers_shrink"]
    assert check.alarm([*rows(200), *rows(101)]) is None and check.alarm(rows(200, SHORT - 1)) is None
    assert check.alarm([*rows(50), *rows(200), *rows(50)]) == pytest.approx(0.25)  # below the longest, not the first
    assert check.alarm([*rows(200), *rows(120, EARLIER - SHORT), *rows(90)]) is None  # too long ago
    assert check.alarm(rows(0)) is None and check.alarm([*rows(200), {}, *rows(90)]) is None


def test_rewards_below_one_for_a_method_that_learns_from_correct_rollouts_only(tmp_path: Path) -> None:
    solved = toy_task()
    TASKS["toy"] = lambda: task_of(**{**vars(solved), "reward": lambda row, text: solved.reward(row, text) / 2})
    assert names(run(config_for(tmp_path, method="raft"), tmp_path / "run")) == {"no_correct": WINDOW}
    assert "no_correct" not in names(run(config_for(tmp_path), tmp_path / "both"))


def test_a_cache_that_changes_what_is_said(tmp_path: Path) -> None:
    """The embedded model in blocks of two that hardly ever see what the others have become."""
    how = {"cache": "dual", "block": 2, "steps": 16, "refresh": 8, "mismatch": 1.0}
    data = {"updates": 2, "prompts": 2, "group": 3, "eval": {"prompts": 2, "samples": 1}, "rollout": how}
    assert names(run(parse_config(data), tmp_path / "run")) == {"cache_mismatch": 1}
    assert all("train/scorer_gap" not in row for row in read_metrics(tmp_path / "run"))


def test_a_model_that_does_not_say_the_same_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, plain, rng = config_for(tmp_path, updates=2), Tiny.head, torch.Generator().manual_seed(0)
    rows = []
    for noise in (0.0, 1.0):

        def head(self: Tiny, hidden_QD: torch.Tensor, noise: float = noise) -> torch.Tensor:
            logits_QV = plain(self, hidden_QD)
            return logits_QV + noise * torch.randn(logits_QV.shape, generator=rng)

        monkeypatch.setattr(Tiny, "head", head)
        rows.append((names(run(config, tmp_path / str(noise))), read_metrics(tmp_path / str(noise))[1]))
    assert rows[0][1]["train/scorer_gap"] < 1e-5 and "scorer_gap" not in rows[0][0]
    assert rows[1][1]["train/scorer_gap"] > 0.3 and rows[1][0]["scorer_gap"] == 1
    # What it costs is not on the meter; and the ratio of the first turn, being to itself, does not tell.
    assert rows[0][1]["cost/forwards"] == rows[1][1]["cost/forwards"] and rows[1][1]["train/ratio"] == 1


def test_a_gradient_that_jumps(tmp_path: Path) -> None:
    """The reward of one update is a thousandfold."""
    plain = toy_task()

    def reward(row: dict[str, Any], text: str) -> float:
        return plain.reward(row, text) * (1000 if (row["number"] // 5) % 2**24 == WINDOW + 2 else 1)

    TASKS["toy"] = lambda: task_of(**{**vars(plain), "reward": reward, "reward_range": None})
    found = run(config_for(tmp_path, updates=WINDOW + 4, optimizer={"lr": 1e-6}), tmp_path / "run")
    assert names(found) == {"gradient_spike": WINDOW + 2} and found[0]["value"] > 100


def test_a_format_that_is_paid_while_nothing_is_solved(tmp_path: Path) -> None:
    plain = toy_task()

    def task(weight: float = 1.0) -> Task:
        never = task_of(**{**vars(plain), "solved": lambda row, text: False})
        parts = {
            "correctness": RewardPart(lambda row, text: 0.0, 1.0),
            "format": RewardPart(lambda row, text: 1.0, weight),
        }
        never.set_reward_parts(parts)
        return never

    TASKS["toy"] = task
    assert names(run(config_for(tmp_path), tmp_path / "run"))["format_only"] == WINDOW
    unpaid = config_for(tmp_path, toy={"weight": 0.0})
    assert "format_only" not in names(run(unpaid, tmp_path / "unpaid"))


def long_task(long: int = 1) -> Task:
    """The prompt of the last `long` problems leaves no room, when trained on."""
    plain = toy_task()

    def prompt(row: dict[str, Any]) -> str:
        return plain.prompt(row) + ("a" * 40 if row["number"] and row["i"] >= 3 - long else "")

    return task_of(**{**vars(plain), "prompt": prompt})


def test_prompts_that_leave_no_room_are_left_out_and_never_cut(tmp_path: Path) -> None:
    TASKS["toy"] = long_task
    config = config_for(tmp_path, updates=2, prompts=3)
    found = run(config, tmp_path / "run")
    assert names(found) == {"long_prompts": 1} and found[0]["value"] == pytest.approx(1 / 3)
    rows = recent_updates(read_metrics(tmp_path / "run"))
    assert [row["train/traces"] for row in rows] == [6, 6]
    # The others are what they are without it.
    alone = config_for(tmp_path, updates=2, prompts=2, toy={"long": 0})
    run(alone, tmp_path / "alone")
    samples = [(tmp_path / name / "samples.jsonl").read_text() for name in ("run", "alone")]
    assert samples[0] == samples[1]


def test_a_batch_of_prompts_that_are_all_too_long_stops_the_run_and_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TASKS["toy"] = long_task
    config = config_for(tmp_path, updates=3, prompts=3, toy={"long": 0})
    plain = unmask.training.loop.collect

    def collect(source: Any, step: int) -> Any:
        if step == 2:
            source = type(source)(**{**vars(source), "task": long_task(3)})
        return plain(source, step)

    monkeypatch.setattr(unmask.training.loop, "collect", collect)
    told = "3 of the 3 prompts of update 2 are too long for the model's limit of 32 tokens with a completion of 6"
    with pytest.raises(ValueError, match=told):
        train(config, lambda: RunFolder(tmp_path / "run", config.dump()))
    assert newest_state(tmp_path / "run" / "state")[0].step == 1


# --- not provoked -------------------------------------------------------------------------------------------


def test_a_run_that_goes_well_says_nothing(tmp_path: Path, unmask) -> None:
    options = [f"updates={WINDOW + 2}", "prompts=3", "group=4", "eval.prompts=2", "eval.samples=1"]
    code, _, err = unmask("train", *options, "--seed", "0", "--out", "run")
    assert code == 0 and "warning" not in err and not Path("run/warnings.jsonl").exists()
    assert not [key for row in read_metrics(Path("run")) for key in row if key.startswith("warn/")]


def test_a_warning_is_a_line_on_standard_error(tmp_path: Path, unmask) -> None:
    model = model_in(tmp_path / "model")
    options = ["updates=10", "prompts=2", "group=2", "eval.prompts=2", "eval.samples=1", "toy.dull=9", "--model", model]
    code, out, err = unmask("train", "--task", "toy", *options, "--out", "run")
    assert code == 0 and "warning:" not in out
    message = f"update {WINDOW}: warning: idle_groups: {CHECKS['idle_groups'].message}"
    assert message in err and "\nwarning: no update had a gradient" in err and err.count("warning:") == 2


# --- history ------------------------------------------------------------------------------------------------


def told(config: Config, folder: Path) -> tuple[str, list[dict[str, float]]]:
    rows = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(folder)]
    return (folder / "warnings.jsonl").read_text(), rows


def test_a_run_that_is_resumed_warns_as_one_that_was_not(tmp_path: Path) -> None:
    """Cut off before the first warning, within its window, and after it."""
    config = config_for(tmp_path, toy={"dull": 9}, updates=WINDOW + 2, save_every=3, rollout={"temperature": 0.005})
    train(config, lambda: RunFolder(tmp_path / "whole", config.dump()))
    whole = told(config, tmp_path / "whole")
    assert whole[0].count("idle_groups") == 1 and whole[0].count("entropy_collapse") == 1
    for at in (2, 5, WINDOW + 2):
        with cut_at("collect", at):
            train(config, lambda at=at: RunFolder(tmp_path / str(at), config.dump()))
        resume(tmp_path / str(at))
        assert told(config, tmp_path / str(at)) == whole


KEYS = ["idle_groups", "empty", "nll", "solved", "reward", "grad_norm", "late_eos", "length", "skipped"]
KEYS += ["reward/format"]
ROWS = st.lists(
    st.fixed_dictionaries({}, optional={f"train/{key}": st.sampled_from([0.0, 0.01, 0.3, 1.0, 50.0]) for key in KEYS}),
    max_size=3 * REACH,
)


@given(rows=ROWS)
def test_what_is_further_back_than_the_reach_does_not_matter(rows: list[dict[str, float]]) -> None:
    short, long = list[dict[str, float]](), list[dict[str, float]]()
    for row in rows:
        found = health_warnings([*short, row]), health_warnings([*long, row])
        assert found[0] == found[1]
        short, long = [*short, {**row, **found[0][0]}][-REACH:], [*long, {**row, **found[1][0]}]


def begun(rows: list[dict[str, float]]) -> list[tuple[int, str]]:
    """All warnings of a history, with the number of the update."""
    history, found = list[dict[str, float]](), list[tuple[int, str]]()
    for number, row in enumerate(rows, 1):
        counts, now = health_warnings([*history, row])
        found += [(number, warning.name) for warning in now]
        history.append({**row, **counts})
    return found


def test_a_warning_is_told_once_and_again_after_it_has_been_quiet_for_a_while() -> None:
    long, fine = {"train/long_prompts": 0.1}, {"train/long_prompts": 0.0}
    assert begun([fine, long, long, long]) == [(2, "long_prompts")]
    assert begun([long, *[fine] * (WINDOW - 1), long]) == [(1, "long_prompts")]
    assert begun([long, *[fine] * WINDOW, long]) == [(1, "long_prompts"), (WINDOW + 2, "long_prompts")]


def test_a_bound_is_not_yet_a_warning_and_a_share_needs_a_window() -> None:
    at, above = ({"train/idle_groups": value} for value in (0.9, 0.91))
    assert begun([at] * 20) == [] and begun([above] * (WINDOW - 1)) == []
    assert begun([above] * WINDOW) == [(WINDOW, "idle_groups")]


def test_a_gradient_is_compared_with_the_median_of_those_before_it() -> None:
    small, large, zero = ({"train/grad_norm": value} for value in (1.0, 10.1, 0.0))
    assert begun([small] * (WINDOW - 1) + [large]) == []  # too few to say
    assert begun([small] * WINDOW + [large]) == [(WINDOW + 1, "gradient_spike")]
    assert begun([small] * WINDOW + [{}, zero, large]) == [(WINDOW + 3, "gradient_spike")]  # no norm, or nothing learnt
    # Once most of the reach is large, large is usual.
    assert begun([small] * EARLIER + [large] * 2 * EARLIER) == [(EARLIER + 1, "gradient_spike")]
    assert begun([small] * WINDOW + [{"train/grad_norm": 10.0}]) == []


def test_sentences_are_of_what_is_counted_more() -> None:
    now = {"warn/idle_groups": 2.0, "warn/late_ends": 1.0, "train/reward": 3.0}
    (line,) = warning_messages({"warn/idle_groups": 1.0, "warn/late_ends": 1.0}, now)
    assert line == f"warning: idle_groups: {CHECKS['idle_groups'].message}"
    assert list(warning_messages(now, now)) == []


def test_signs_by_hand() -> None:
    """Against a walk over every position of every row."""
    policy = toy_model()
    trace = sample(policy, [[5], [6, 7]] * 8, row_seeds(1, 16), length=6, steps=3).trace
    late, empty, nll, length = [], [], [], []
    for row in range(16):
        wrote = [i for i in range(trace.tokens_BL.shape[1]) if trace.step_BL[row, i] in (0, 1, 2)]
        ends = [bool(trace.tokens_BL[row, i] == policy.eos_id) for i in wrote]
        late += [end for end, i in zip(ends, wrote, strict=True) if trace.step_BL[row, i] == 2]
        empty.append(all(ends))
        length.append(ends.index(True) + 1 if any(ends) else len(ends))
        nll.append(-sum(float(trace.logp_BL[row, i]) for i in wrote))
    found = rollout_stats(trace)
    assert 0 < sum(late) < len(late) and 0 < sum(empty) < 16
    expected = {"empty": sum(empty) / 16, "nll": sum(nll) / 16, "late_eos": sum(late) / len(late)}
    expected["length"] = sum(length) / 16
    assert found == pytest.approx(expected)


def test_metrics_of_0_1_are_read_under_their_present_names(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("task: sudoku\n")
    old = {"step": 1, "train/reward": 0.5, "train/part/format": 1.0, "train/nats": 2.0, "train/late_ends": 0.25}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(old) + "\n")
    (tmp_path / "warnings.jsonl").write_text('{"step": 1, "name": "late_ends", "told": "text"}\n')
    new = {"train/reward": 0.5, "train/reward/format": 1.0, "train/nll": 2.0, "train/late_eos": 0.25}
    assert read_metrics(tmp_path) == [{"step": 1, **new}]
    run = RunReader(tmp_path)
    run.refresh()
    assert {name: series.data()["y"] for name, series in run.series.items()} == {n: [v] for n, v in new.items()}
    assert run.warnings == [{"step": 1, "name": "late_ends", "message": "text"}]
