"""`max_forwards` ends a run at the update that spends the last of them, and the learning rate follows what is spent."""

from pathlib import Path

import pytest

from helpers import cut_at
from unmask.config import Config, parse_config
from unmask.training.loop import resume, train
from unmask.training.optim import learning_rate
from unmask.training.run.folder import RunFolder, read_metrics

LIMIT = 150.0


def config_for(**more: object) -> Config:
    optimizer = {"lr": 1e-2, "schedule": "linear"}
    held_out = {"prompts": 2, "samples": 1, "every": 0}
    base = {"updates": 1000, "max_forwards": LIMIT, "prompts": 1, "group": 4, "save_every": 2, "optimizer": optimizer}
    return parse_config({**base, "eval": held_out, "sudoku": {"partial": 0.5}, "method": "diffu_grpo", **more})


def updates_of(folder: Path) -> list[dict[str, float]]:
    return [row for row in read_metrics(folder) if "cost/forwards" in row]


def test_a_run_stops_once_its_forwards_are_spent(tmp_path: Path) -> None:
    config = config_for()
    result = train(config, lambda: RunFolder(tmp_path / "run", config.dump()))
    rows = updates_of(tmp_path / "run")
    spent = [row["cost/forwards"] for row in rows]
    assert spent[-2] < LIMIT <= spent[-1] and not result.ended
    before = [0.0, *spent[:-1]]
    for number, (row, share) in enumerate(zip(rows, before, strict=True), 1):
        done = max(share / LIMIT, (number - 1) / 1000)
        assert row["train/lr"] == learning_rate(config, number, share / LIMIT) == 1e-2 * (1 - done)
    last = [row for row in read_metrics(tmp_path / "run") if "eval/solved_greedy" in row][-1]
    assert last["step"] == len(rows) and (tmp_path / "run" / "checkpoint").is_dir()


def test_a_resumed_run_stops_at_the_same_update(tmp_path: Path) -> None:
    config = config_for()
    train(config, lambda: RunFolder(tmp_path / "whole", config.dump()))
    with cut_at("collect", 4):
        train(config, lambda: RunFolder(tmp_path / "cut", config.dump()))
    resume(tmp_path / "cut")
    keys = ("step", "cost/forwards", "train/lr", "train/reward", "train/grad_norm")
    whole, cut = ([[row[key] for key in keys] for row in updates_of(tmp_path / name)] for name in ("whole", "cut"))
    assert whole == cut


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_a_limit_that_is_not_a_positive_number_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="max_forwards"):
        config_for(max_forwards=value)


def test_the_decay_begins_where_the_warm_up_ends() -> None:
    """Half of the budget is spent in ten updates of warm-up: the rate is at its peak, and falls to 0 from there."""
    config = config_for(optimizer={"lr": 1e-2, "schedule": "linear", "warmup": 10})
    assert [learning_rate(config, step, 0.05 * (step - 1)) for step in (1, 10, 11)] == [1e-3, 1e-2, 1e-2]
    assert learning_rate(config, 16, 0.75) == pytest.approx(0.5e-2) and learning_rate(config, 21, 1.0) == 0.0
