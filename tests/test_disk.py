"""What is written is there whole or not at all, and what was damaged since is not taken for what was written."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_resume import config_for, run

from helpers import SMALL, cut_at
from unmask.core.options import LoraOptions
from unmask.models import load_model, save, tiny_policy
from unmask.models.checkpoint import SUMS
from unmask.models.lora import add_adapter, save_adapter
from unmask.training.loop import resume
from unmask.training.run.folder import RunFolder
from unmask.training.run.state import newest_state, write_state
from unmask.util.files import write_whole
from wording import mentions, naming


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path: Path, monkeypatch) -> None:
    write_whole(tmp_path / "a", "one")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'a'}'"):
            write_whole(tmp_path / "a", "two")
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "one"


def test_a_run_folder_has_its_whole_configuration_or_none(model: str, tmp_path: Path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(OSError, match="No space left"):
            RunFolder(tmp_path / "run", config_for(model).dump())
    assert list((tmp_path / "run").iterdir()) == []
    RunFolder(tmp_path / "run", config_for(model).dump())  # once there is room


def altered(change: Callable[[dict[str, Any]], Any]) -> Callable[[str], str]:
    return lambda text: json.dumps(change(json.loads(text)))


def without(name: str) -> Callable[[str], str]:
    return altered(lambda facts: {key: value for key, value in facts.items() if key != name})


@pytest.mark.parametrize(
    "damage",
    [
        altered(lambda facts: {**facts, "step": 5}),
        altered(lambda facts: {**facts, "lengths": {"metrics.jsonl": 3}}),
        *map(without, ("step", "lengths", "sha256", "sum")),
        *(lambda _, text=text: text for text in ("", "[]", "null", "3", "[" * 10**5, '{"step": 4}')),
        lambda text: text.replace("e", "f", 1),
    ],
)  # fmt: skip
def test_a_state_whose_facts_are_not_those_written_is_passed_over(tmp_path: Path, damage: Callable[[str], str]) -> None:
    for step in (2, 4):
        facts = {"looked": step, "lengths": {"metrics.jsonl": 8}, "best": [1.5, None]}
        write_state(tmp_path, step, {"a": torch.ones(2)}, facts)
    (tmp_path / "x").mkdir()
    (tmp_path / "²").mkdir()
    assert newest_state(tmp_path)[0].step == 4
    path = tmp_path / "4" / "state.json"
    path.write_text(damage(path.read_text()))
    state, passed_over = newest_state(tmp_path)
    assert state.step == 2 and state.facts["best"] == [1.5, None] and len(passed_over) == 1


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-6] ^= 1
    path.write_bytes(data)


def test_damaged_weights_are_not_loaded(tmp_path: Path) -> None:
    policy = tiny_policy(SMALL, seed=1)
    save(policy, tmp_path / "model")
    add_adapter(policy, LoraOptions(rank=2), 0)
    save_adapter(policy, tmp_path / "adapter", str(tmp_path / "model"))
    for name, file in (("adapter", "adapter_model.safetensors"), ("model", "model.safetensors")):
        load_model(tmp_path / name)
        flipped(tmp_path / name / file)
        with pytest.raises(ValueError, match=naming(file, "damaged", SUMS)):
            load_model(tmp_path / name)
    (tmp_path / "model" / SUMS).unlink()
    load_model(tmp_path / "model")


def test_an_adapter_leaves_what_else_is_in_its_folder(tmp_path: Path) -> None:
    policy = tiny_policy(SMALL, seed=1)
    save(policy, tmp_path / "model")
    (tmp_path / "model" / "notes.txt").write_text("mine")
    add_adapter(policy, LoraOptions(rank=2), 0)
    save_adapter(policy, tmp_path / "model", str(tmp_path / "elsewhere"))
    assert {"notes.txt", "model.safetensors", "adapter_model.safetensors"} <= set(os.listdir(tmp_path / "model"))


@pytest.mark.parametrize("gone", [True, False])
def test_where_the_best_weights_are_lost_the_best_from_there_on_is_kept(model: str, tmp_path: Path, gone: bool) -> None:
    config = config_for(model, eval={"prompts": 3, "samples": 2, "every": 2, "best": True})
    with cut_at("collect", 5):
        run(config, tmp_path / "cut")
    weights = tmp_path / "cut" / "checkpoint-best" / "model.safetensors"
    if gone:
        weights.unlink()
    else:
        flipped(weights)
    with pytest.warns(UserWarning, match=naming("checkpoint-best", 4)):
        resume(tmp_path / "cut")
    assert json.loads((tmp_path / "cut" / "finished.json").read_text())["best"] >= 4
    load_model(tmp_path / "cut" / "checkpoint-best")


def test_weights_that_the_last_update_ruined_do_not_end_a_run_as_if_nothing_was(unmask) -> None:
    few = ["updates=1", "prompts=2", "group=2", "eval.prompts=2", "eval.samples=1", "sudoku.partial=0.5"]
    code, _, err = unmask("train", "--method", "diffu_grpo", *few, "optimizer.weight_decay=1e300", "--out", "run")
    assert code == 2 and mentions(err, "optimizer.lr")
    assert not Path("run/finished.json").exists() and Path("run/state/1").is_dir()


def test_another_number_of_threads_is_told(model: str, tmp_path: Path, monkeypatch) -> None:
    with cut_at("collect", 4):
        run(config_for(model), tmp_path / "cut")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    with pytest.warns(UserWarning, match=naming("threads", 1, 77)):
        resume(tmp_path / "cut")


def test_what_a_killed_process_had_begun_to_write_is_cleared_away(model: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", config_for(model).dump()).path
    before = sorted(folder.iterdir())
    (folder / ".finished.json.77.partial").touch()
    (folder / ".checkpoint.partial").mkdir()
    RunFolder.reopen(folder, {})
    assert sorted(folder.iterdir()) == before


def test_a_folder_named_stop_is_no_wish(model: str, tmp_path: Path) -> None:
    made = RunFolder(tmp_path / "run", config_for(model).dump())
    (tmp_path / "run" / "stop").mkdir()
    assert not made.take_stop_request()
    (tmp_path / "run" / "stop").rmdir()
    (tmp_path / "run" / "stop").touch()
    assert made.take_stop_request() and not made.take_stop_request()


def test_a_damaged_log_is_named_with_its_line(model: str, tmp_path: Path) -> None:
    with cut_at("collect", 4):
        run(config_for(model), tmp_path / "cut")
    log = tmp_path / "cut" / "metrics.jsonl"
    log.write_text(log.read_text().replace('"step": 1,', '"step": !,', 1))
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2 is damaged"):
        resume(tmp_path / "cut")


@pytest.mark.parametrize("more", [["--dry-run"], ["--json"], ["--hardware", "h200"]])
def test_going_on_takes_nothing_else(unmask, more: list[str]) -> None:
    code, _, err = unmask("train", "--resume", "run", *more)
    assert code == 2 and mentions(err, "--resume") and err.count("\n") == 1


def test_memory_that_a_cpu_does_not_have_is_one_sentence(unmask, monkeypatch) -> None:
    def hungry(*_: object, **__: object) -> None:
        torch.empty(2**50)

    monkeypatch.setattr("unmask.cli.train._train_with_display", hungry)
    code, _, err = unmask("train", "--out", "run")
    assert code == 2 and err.count("\n") == 1
    assert mentions(err, "memory", "micro_batch_size", "rollout.micro_batch_size")
