"""A run that is cut off anywhere and gone on with ends as if nothing had happened: the same log, the same weights."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
import yaml

import unmask.training.batch
import unmask.training.loop
import unmask.training.run.base_run
import unmask.training.run.state
from helpers import SMALL, cut_at
from unmask.config import Config, parse_config, read_config
from unmask.core.options import LoraOptions
from unmask.evaluation.evaluate import Evaluation, evaluation_of
from unmask.models import load_model, save, tiny_policy
from unmask.models.checkpoint import fingerprint_of
from unmask.models.known import EMBEDDED
from unmask.models.lora import add_adapter
from unmask.tasks.scoring import RewardError, RewardFailure
from unmask.training.loop import resume, train
from unmask.training.optim import make_optimizer
from unmask.training.run.base_run import Hooks
from unmask.training.run.folder import LOGS, RunFolder, read_metrics
from unmask.training.run.state import newest_state, restore, state_tensors, write_state
from unmask.util.signals import Paused, block_signals
from unmask.util.statistics import Proportion
from wording import mentions, naming

METHODS = {
    "daca and dispo, adapter": {"method": "diffu_grpo", "with": ["daca", "dispo"], "full": False, "lora": {"rank": 2}},
    "agrpo, all weights": {"method": "agrpo", "idle_groups": "resample"},
    "vine and keep_correct, bf16": {
        "method": "vine",
        "with": ["keep_correct"],
        "vine": {"completions": 2},
        "dtype": "bfloat16",
        "full": True,
        "inner_steps": 2,
    },
}


def config_for(model: str, **more: object) -> Config:
    """Five updates, a state after the second and the fourth, an evaluation after the second and the fourth."""
    optimizer = {"lr": 1e-2, "schedule": "linear", "warmup": 1}
    held_out = {"prompts": 3, "samples": 2, "every": 2}
    base = {"model": model, "updates": 5, "prompts": 3, "group": 4, "save_every": 2, "optimizer": optimizer}
    short = {"sudoku": {"partial": 0.5}, "rollout": {"steps": 3}}
    return parse_config({**base, **short, "eval": held_out, **more})


def run(config: Config, folder: Path) -> Path:
    train(config, lambda: RunFolder(folder, config.dump()))
    return folder


def told(folder: Path) -> dict[str, object]:
    """What a run leaves behind, but for times."""
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    weights = load_model(folder / "checkpoint").state_dict()
    return {
        "metrics": [{key: v for key, v in row.items() if not key.startswith("time/")} for row in metrics],
        "samples": (folder / "samples.jsonl").read_text() if (folder / "samples.jsonl").exists() else "",
        "finished": (folder / "finished.json").read_text(),
        "weights": {name: weight.float().numpy().tobytes() for name, weight in weights.items()},
    }


@pytest.fixture(scope="module")
def whole(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What a run of AGRPO leaves behind that was never cut off."""
    return told(run(config_for(model, method="agrpo"), tmp_path_factory.mktemp("whole") / "run"))


@pytest.fixture(scope="module")
def cut(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, cut off in the fifth update; no test writes to it."""
    folder = tmp_path_factory.mktemp("cut") / "run"
    with cut_at("collect", 5):
        run(config_for(model, method="agrpo"), folder)
    return folder


@pytest.mark.parametrize("kind", METHODS)
def test_a_run_that_is_cut_off_twice_ends_as_one_that_never_was(model: str, tmp_path: Path, kind: str) -> None:
    config = config_for(model, **METHODS[kind])
    whole = told(run(config, tmp_path / "whole"))
    assert len(whole["metrics"]) == 1 + 5 + 2 + 1 and not (tmp_path / "whole" / "state").exists()
    # In a rollout and then in an evaluation; in an update and then before a state is written.
    for number, (first, second) in enumerate([(("collect", 4), ("evaluate", 2)), (("update", 4), ("write_state", 2))]):
        folder = tmp_path / str(number)
        with cut_at(*first):
            run(config, folder)
        with cut_at(*second):
            resume(folder)
        resume(folder)
        assert told(folder) == whole


def test_a_run_without_a_state_begins_again(model: str, whole: dict[str, object], tmp_path: Path) -> None:
    with cut_at("collect", 2):
        run(config_for(model, method="agrpo"), tmp_path / "cut")
    assert not (tmp_path / "cut" / "state").exists()
    resume(tmp_path / "cut")
    assert told(tmp_path / "cut") == whole


@pytest.mark.parametrize("damage", ["flipped", "truncated", "no facts", "broken facts"])
def test_a_damaged_state_is_passed_over(cut: Path, whole: dict[str, object], tmp_path: Path, damage: str) -> None:
    shutil.copytree(cut, tmp_path / "cut")
    last = tmp_path / "cut" / "state" / "4"
    tensors, facts = last / "tensors.safetensors", last / "state.json"
    data = bytearray(tensors.read_bytes())
    if damage == "flipped":
        data[-5] ^= 1
        tensors.write_bytes(data)
    elif damage == "truncated":
        tensors.write_bytes(data[: len(data) // 2])
    elif damage == "no facts":
        facts.unlink()
    else:
        facts.write_text('{"step": 4')
    with pytest.warns(UserWarning, match="state/4"):
        resume(tmp_path / "cut")
    assert told(tmp_path / "cut") == whole


def test_a_full_disk_leaves_what_was_kept_before(
    model: str, whole: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(model, method="agrpo")
    plain = safetensors.torch.save_file

    def full(tensors: dict[str, torch.Tensor], path: Path, **more: object) -> None:
        plain(tensors, path, **more)
        if "4" in path.parent.name:  # the state, whose error is of this kind
            raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", full)
        with pytest.raises(OSError, match="No space left"):
            run(config, tmp_path / "cut")
    assert [path.name for path in (tmp_path / "cut" / "state").iterdir()] == ["2"]
    resume(tmp_path / "cut")
    assert told(tmp_path / "cut") == whole


def test_the_last_two_states_are_kept_and_hold_what_was_written(tmp_path: Path) -> None:
    for step in (2, 4, 10):
        write_state(tmp_path, step, {"a": torch.full((2,), float(step))}, {"looked": step})
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [4, 10]
    state, passed_over = newest_state(tmp_path)
    assert state.step == 10 and passed_over == [] and state.tensors["a"].tolist() == [10.0, 10.0]
    (tmp_path / ".12.partial").mkdir()  # of a process that died while writing
    assert newest_state(tmp_path)[0].step == 10 and newest_state(tmp_path / "nowhere") == (None, [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimiser_weights_and_generator_come_back_exactly(dtype: torch.dtype) -> None:
    def made() -> tuple:
        policy = tiny_policy(SMALL, seed=1).to(dtype)
        return policy, make_optimizer(policy, parse_config({}).optimizer), torch.Generator().manual_seed(3)

    def stepped(policy, optimizer, rng) -> None:
        for weight in policy.parameters():
            weight.grad = torch.randn(weight.shape, generator=rng).to(dtype)
        assert len(optimizer.param_groups) == 1  # which also fetches the gradients of half-precision weights
        optimizer.step()
        optimizer.zero_grad()

    one, other = made(), made()
    for _ in range(3):
        stepped(*one)
    restore(*other, state_tensors(*one))
    for _ in range(2):
        for side in (one, other):
            stepped(*side)
        assert all(torch.equal(a, b) for a, b in zip(one[0].parameters(), other[0].parameters(), strict=True))
        kept = state_tensors(*one), state_tensors(*other)
        assert kept[0].keys() == kept[1].keys()
        assert all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])


def test_a_state_of_another_model_is_refused() -> None:
    policy, wide = (tiny_policy(shape, seed=1) for shape in (SMALL, SMALL.model_copy(update={"layers": 2})))
    rng = torch.Generator()
    kept = state_tensors(wide, make_optimizer(wide, parse_config({}).optimizer), rng)
    with pytest.raises(ValueError, match=r"weight lm\.model\.layers\.1"):
        restore(policy, make_optimizer(policy, parse_config({}).optimizer), rng, kept)


def test_a_state_of_an_adapter_of_another_rank_is_refused() -> None:
    policies = [tiny_policy(SMALL, seed=1) for _ in range(2)]
    for policy, rank in zip(policies, (2, 3), strict=True):
        add_adapter(policy, LoraOptions(rank=rank), seed=0)
    one, other = (make_optimizer(policy, parse_config({}).optimizer) for policy in policies)
    with pytest.raises(ValueError, match=r"lora_A.*\[2, 16\].*\[3, 16\]"):
        restore(policies[1], other, torch.Generator(), state_tensors(policies[0], one, torch.Generator()))


@pytest.mark.parametrize("cut", [2, 4], ids=["no state", "a state"])
def test_a_run_whose_model_has_changed_is_refused(model: str, tmp_path: Path, cut: int) -> None:
    folder, start = tmp_path / "run", tmp_path / "model"
    shutil.copytree(model, start)
    with cut_at("collect", cut):
        run(config_for(str(start), method="agrpo"), folder)
    fingerprint = fingerprint_of(load_model(model))
    (line,) = map(json.loads, (folder / "run.jsonl").read_text().splitlines())
    stored = yaml.safe_load((folder / "config.yaml").read_text())
    assert line["model_fingerprint"] == stored["resolved"]["model_fingerprint"] == fingerprint
    assert stored["model"] == str(start)
    assert cut == 2 or fingerprint in (folder / "checkpoint" / "README.md").read_text()
    other = load_model(model)
    with torch.no_grad():
        other.lm.lm_head.weight[0, 0] += 1
    save(other, start)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=naming(folder, start, "changed", fingerprint[:12], folder / "config.yaml")):
        resume(folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    save(load_model(model), start)
    resume(folder)  # written again with the same weights: a file's own bytes do not matter


def test_a_run_of_an_embedded_model_names_the_version_to_install(tmp_path: Path, monkeypatch, unmask) -> None:
    small = {"prompts": 1, "group": 2, "eval": {"prompts": 1, "samples": 1}, "rollout": {"steps": 2}}
    with cut_at("collect", 1):
        run(parse_config({"model": "tiny", "method": "agrpo", **small}), tmp_path / "run")
    monkeypatch.setitem(EMBEDDED, "tiny", EMBEDDED["tiny-two"])
    code, _, err = unmask("train", "--resume", "run")
    assert code == 2 and mentions(err, "tiny", "changed", "version of unmask in run/run.jsonl")


def test_an_evaluation_survives_json() -> None:
    passes = {1: Proportion(0.5, 0.25, 0.75), 2: Proportion(0.75, 0.5, 1.0)}
    found = Evaluation(passes[1], Proportion(0.1, 0.0, 0.3), passes, reward=0.4, problems=3, samples=2, mixed=passes[1])
    assert evaluation_of(json.loads(json.dumps(found.data()))) == found
    old = {name: value for name, value in found.data().items() if name != "mixed"}  # of a run before it was measured
    assert evaluation_of(json.loads(json.dumps(old))) == replace(found, mixed=None)


def test_a_wish_to_stop_is_granted_after_the_update(model: str, whole: dict[str, object], tmp_path: Path) -> None:
    config = config_for(model, method="agrpo")
    wishes = iter([False, False, True])
    with pytest.raises(Paused, match="stopped after update 3"):
        train(config, lambda: RunFolder(tmp_path / "cut", config.dump()), hooks=Hooks(should_stop=lambda: next(wishes)))
    assert newest_state(tmp_path / "cut" / "state")[0].step == 3
    resume(tmp_path / "cut")
    assert told(tmp_path / "cut") == whole


def test_a_file_is_a_wish_too(model: str, tmp_path: Path) -> None:
    config = config_for(model, method="agrpo")

    def wishing(step: int, metrics: dict[str, float]) -> None:
        if step == 1 and "train/reward" in metrics:
            (tmp_path / "run" / "stop").touch()

    with pytest.raises(Paused, match="stopped after update 1"):
        train(config, lambda: RunFolder(tmp_path / "run", config.dump()), Hooks(on_metrics=wishing))
    assert not (tmp_path / "run" / "stop").exists()
    assert newest_state(tmp_path / "run" / "state")[0].step == 1


def test_a_judge_does_not_hear_what_ends_a_job() -> None:
    with block_signals():
        script = "import time; print('up', flush=True); time.sleep(60)"
        child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"up\n"
    child.terminate()
    child.send_signal(signal.SIGINT)
    child.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.5)
    child.kill()
    assert child.wait(10) == -signal.SIGKILL
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGTERM, signal.SIGINT}
    child.stdout.close()


OPTIONS = ["method=agrpo", "updates=4", "save_every=1", "prompts=2", "rollout.steps=3"]
OPTIONS += ["eval.prompts=2", "eval.samples=1", "seed=3"]
STOPPED = """
import os, signal, sys
import torch._dynamo  # once: the optimiser would import it in both processes
import unmask.training.loop as loop
from unmask.cli.main import main
from unmask.training.run.folder import RunFolder

RunFolder.draw = lambda run: None
plain, children = loop.collect, []

def collect(source, step):
    if step == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    return plain(source, step)

loop.collect = collect
for name in ("SIGTERM", "SIGKILL"):
    children.append(os.fork())
    if not children[-1]:
        for stream in (1, 2):
            os.dup2(os.open(f"{name}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        sys.argv = ["unmask", *sys.argv[1:], name]
        main()
for child in children:
    os.waitpid(child, os.WUNTRACED)
print(*children, flush=True)
print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""
"""Two runs of the command, each of which stops itself in the third update and waits for SIGCONT."""


def test_a_process_that_is_ended(model: str, tmp_path: Path, unmask) -> None:
    command = ["train", *OPTIONS, "--model", model, "--out"]
    assert unmask(*command, "unended")[0] == 0
    unended = told(tmp_path / "unended")
    process = subprocess.Popen([sys.executable, "-c", STOPPED, *command], cwd=tmp_path, stdout=subprocess.PIPE)
    for child, name in zip(process.stdout.readline().split(), ("SIGTERM", "SIGKILL"), strict=True):
        code, _, err = unmask("train", "--resume", name)  # while the other process has it
        assert code == 2 and mentions(err, name, "another process")
        os.kill(int(child), signal.Signals[name])
        os.kill(int(child), signal.SIGCONT)
    codes, _ = process.communicate(timeout=120)
    assert codes.split() == [b"0", b"%d" % -signal.SIGKILL]
    said = (tmp_path / "SIGTERM.txt").read_text()
    assert "stopping after this update" in said and "unmask train --resume SIGTERM" in said
    for name in ("SIGTERM", "SIGKILL"):
        assert not (tmp_path / name / "finished.json").exists()
        assert unmask("train", "--resume", name)[0] == 0
        assert told(tmp_path / name) == unended
        code, out, _ = unmask("train", "--resume", name)
        assert code == 0 and mentions(out, name, "finished")


def test_what_cannot_be_gone_on_with(model: str, tmp_path: Path, unmask) -> None:
    code, _, err = unmask("train", "--resume", ".")
    assert code == 2 and mentions(err, "run folder", "config.yaml")
    code, _, err = unmask("train", "--resume", ".", "--seed", "1")
    assert code == 2 and mentions(err, "--resume")
    config = config_for(model, method="agrpo")
    with cut_at("collect", 4):
        run(config, tmp_path / "cut")
    metrics, settings = tmp_path / "cut" / LOGS[0], tmp_path / "cut" / "config.yaml"
    log, text = metrics.read_text(), settings.read_text()
    settings.write_text(text.replace("seed: 0", "seed: 1"))
    code, _, err = unmask("train", "--resume", "cut")
    assert code == 2 and mentions(err, "config.yaml", "changed")
    settings.write_text(text)
    metrics.write_text("")
    code, _, err = unmask("train", "--resume", "cut")
    assert code == 2 and mentions(err, "metrics.jsonl", "shorter")
    metrics.write_text(log)
    for state in (tmp_path / "cut" / "state").iterdir():
        (state / "state.json").unlink()
    code, _, err = unmask("train", "--resume", "cut")
    assert code == 2 and mentions(err, "cut", "state", "weights")
    assert metrics.read_text() == log


def test_other_versions_are_told(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_for(model, method="agrpo")
    with cut_at("collect", 4):
        run(config, tmp_path / "cut")
    monkeypatch.setattr("unmask.training.run.provenance.versions", lambda: {"torch": "9.9"})
    with pytest.warns(UserWarning, match=naming("torch", "9.9")):
        resume(tmp_path / "cut")


def test_a_file_of_ones_own_that_has_changed_is_told(model: str, tmp_path: Path, monkeypatch) -> None:
    """As it was run, not as it lay there when the state was kept."""
    monkeypatch.chdir(tmp_path)
    source = "import unmask\ndef mine(kl: float = 0.1) -> unmask.Method:\n    return unmask.wd1()\n"
    Path("mine.py").write_text(source)
    config = config_for(model, method="mine.py:mine")
    with monkeypatch.context() as patch:
        base_run = unmask.training.run.base_run
        plain = base_run.write_state
        patch.setattr(base_run, "write_state", lambda *a: (Path("mine.py").write_text(source + "# new\n"), plain(*a)))
        with cut_at("collect", 4):
            run(config, tmp_path / "cut")
    shutil.copytree("cut", "again")
    with pytest.warns(UserWarning, match=naming("mine.py", "changed")):
        resume(tmp_path / "cut")
    Path("mine.py").write_text(source)
    resume(tmp_path / "again")  # a warning would be an error


def test_a_run_that_was_killed_while_its_folder_was_created_resumes(model: str, tmp_path: Path, unmask) -> None:
    config = config_for(model, method="agrpo", updates=1)
    RunFolder(tmp_path / "run", config.dump())
    code, _, err = unmask("train", "--resume", "run")
    assert code == 0, err
    (start,) = map(json.loads, (tmp_path / "run" / "run.jsonl").read_text().splitlines())
    assert start["command"] == "unmask train --resume run"


def test_the_decided_values_are_stored_and_do_not_bind_a_resumed_run(model: str, tmp_path: Path) -> None:
    """Even if its device is missing: config.yaml lists what was decided, and it is decided again."""
    config, folder = config_for(model, method="agrpo", rollout={"block": 4}), tmp_path / "run"
    with cut_at("collect", 4):
        run(config, folder)
    stored = yaml.safe_load((folder / "config.yaml").read_text())
    rollout = {"length": 16, "steps": 8, "block": 4, "micro_batch_size": 512}
    assert {key: stored["rollout"][key] for key in rollout} == rollout and stored["device"] == "cpu"
    assert "rollout.steps" in stored["resolved"] and "rollout.block" not in stored["resolved"]
    elsewhere = {**stored, "device": "cuda:99", "resolved": {**stored["resolved"], "device": "cuda:99"}}
    assert read_config(elsewhere).dump() == read_config(folder / "config.yaml").dump() == config.dump()
    edited = {**stored, "rollout": {**stored["rollout"], "steps": 16}}
    assert read_config(edited).rollout.steps == 16 and read_config(edited).rollout.length is None
    resume(folder)
    assert yaml.safe_load((folder / "config.yaml").read_text()) == stored
    assert len((folder / "run.jsonl").read_text().splitlines()) == 2


def test_a_reward_that_fails_costs_nothing_that_was_learnt_or_counted(
    model: str, whole: dict[str, object], tmp_path: Path
) -> None:
    config = config_for(model, method="agrpo")
    plain = unmask.training.batch.score

    def ill(*given: object, **named: object) -> object:
        if len(read_metrics(tmp_path / "cut")) > 4:  # the start, two updates, an evaluation, an update
            raise RewardError([RewardFailure("sudoku", {}, "x", "the grader is ill")])
        return plain(*given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unmask.training.batch, "score", ill)
        with pytest.raises(RewardError):
            run(config, tmp_path / "cut")
    assert newest_state(tmp_path / "cut" / "state")[0].step == 3
    resume(tmp_path / "cut")
    assert told(tmp_path / "cut") == whole
