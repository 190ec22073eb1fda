"""Fine-tuning runs: interrupted and resumed, updates that are not finite, and the command line."""

import itertools
import json
import math
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import unmask.sft.finetune
import unmask.sft.sft_run
import unmask.training.run.base_run
import unmask.training.setup
from helpers import Net
from unmask.cli.sft import next_command
from unmask.config import parse_config, read_config
from unmask.models import load_model
from unmask.sft.config import CONFIG, RENAMED, SftConfig, read_sft_config
from unmask.sft.diffusion_loss import NoisedBatch, token_losses
from unmask.sft.finetune import finetune, resume, sft_update
from unmask.sft.packing import Batches, PackedBatch
from unmask.training.run.base_run import Hooks
from unmask.training.run.folder import RunFolder, read_metrics
from unmask.training.run.progress import Skips
from unmask.training.run.state import newest_state
from unmask.util.signals import Paused
from wording import mentions, naming


def config_for(model: str, **more: object) -> SftConfig:
    base = {
        "model": model,
        "data": [{"task": "countdown", "max_examples": 60}],
        "updates": 5,
        "batch_tokens": 128,
        "save_every": 2,
    }
    optimizer = {"lr": 1e-2, "schedule": "cosine", "warmup": 1}
    return read_sft_config(**{**base, "optimizer": optimizer, "eval": {"prompts": 3, "every": 2}, **more})


def lines(folder: Path) -> list[dict[str, float]]:
    rows = read_metrics(folder)
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]


KINDS = {
    "all weights, attention annealed": {"attention_annealing": 3},
    "bf16": {"dtype": "bfloat16"},
    "adapter": {"full": False, "lora": {"rank": 2}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_cut_off_ends_as_if_it_had_not_been(
    model: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(model, **KINDS[kind])
    finetune(config, lambda: RunFolder(tmp_path / "whole", config.dump(), CONFIG))
    calls = itertools.count(1)

    def cut(*arguments: object) -> dict[str, float]:
        if next(calls) == 4:
            raise KeyboardInterrupt
        return sft_update(*arguments)

    monkeypatch.setattr(unmask.sft.finetune, "sft_update", cut)
    with pytest.raises(KeyboardInterrupt):
        finetune(config, lambda: RunFolder(tmp_path / "cut", config.dump(), CONFIG))
    monkeypatch.setattr(unmask.training.setup, "fingerprint_of", lambda policy: "other weights")
    with pytest.raises(ValueError, match=naming(tmp_path / "cut" / CONFIG, model, "changed")):
        resume(tmp_path / "cut")
    monkeypatch.undo()
    resume(tmp_path / "cut")
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
    assert (tmp_path / "cut" / "samples.jsonl").read_text() == (tmp_path / "whole" / "samples.jsonl").read_text()
    weights = [(tmp_path / name / "checkpoint").glob("*.safetensors") for name in ("cut", "whole")]
    assert next(weights[0]).read_bytes() == next(weights[1]).read_bytes()
    told = json.loads((tmp_path / "whole" / "finished.json").read_text())
    assert told["canvas"] == {"countdown": 16} and not (tmp_path / "whole" / "state").exists()


@pytest.mark.parametrize("last", [2, 3, 5], ids=["evaluation due", "nothing due", "end"])
def test_a_paused_run_ends_as_one_that_was_not(model: str, last: int, tmp_path: Path) -> None:
    config = config_for(model)
    finetune(config, lambda: RunFolder(tmp_path / "whole", config.dump(), CONFIG))
    seen = list[int]()
    hooks = Hooks(on_metrics=lambda step, metrics: seen.append(step), should_stop=lambda: seen[-1] == last)
    with pytest.raises(Paused) as paused:
        finetune(config, lambda: RunFolder(tmp_path / "paused", config.dump(), CONFIG), hooks)
    assert paused.value.step == last and seen[:2] == [0, 0]
    resume(tmp_path / "paused")
    assert lines(tmp_path / "paused") == lines(tmp_path / "whole")
    ends = [(tmp_path / name / "finished.json").read_text() for name in ("paused", "whole")]
    assert ends[0] == ends[1]


def test_without_held_out_examples_nothing_is_evaluated_and_the_same_is_learned(model: str, tmp_path: Path) -> None:
    for prompts in (0, 2):
        config = config_for(model, eval={"prompts": prompts, "every": 2})
        result = finetune(config, lambda c=config, n=prompts: RunFolder(tmp_path / str(n), c.dump(), CONFIG))
        assert bool(result.after) == bool(result.before) == bool(prompts)
    losses = [[row["train/loss"] for row in lines(tmp_path / name) if "train/loss" in row] for name in "02"]
    assert losses[0] == losses[1] and len(losses[0]) == config.updates
    assert not any(key.startswith("eval/") for row in lines(tmp_path / "0") for key in row)
    config, seen = config_for(model, eval={"prompts": 0, "every": 2}), list[int]()
    hooks = Hooks(on_metrics=lambda step, metrics: seen.append(step), should_stop=lambda: seen[-1] == 3)
    with pytest.raises(Paused):
        finetune(config, lambda: RunFolder(tmp_path / "paused", config.dump(), CONFIG), hooks)
    resume(tmp_path / "paused")
    assert lines(tmp_path / "paused") == lines(tmp_path / "0")


# --- updates that are not finite ----------------------------------------------------------------------------

Fault = Callable[[str, set[int]], None]


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Fault:
    """The model goes wrong in some updates: in what it says, or on the way back."""
    now, drawn, plain = [0], Batches.batch, token_losses

    def batch(self: Batches, update: int) -> PackedBatch:
        now[0] = update
        return drawn(self, update)

    def install(where: str, updates: set[int]) -> None:
        def losses(policy: Net, noise: NoisedBatch, device: str) -> Tensor:
            loss_Q = plain(policy, noise, device)
            if now[0] not in updates or not loss_Q.requires_grad:
                return loss_Q
            if where == "loss":
                return loss_Q * math.nan
            loss_Q.register_hook(lambda slope_Q: slope_Q * math.inf)
            return loss_Q

        monkeypatch.setattr(Batches, "batch", batch)
        monkeypatch.setattr(unmask.sft.finetune, "token_losses", losses)

    return install


@pytest.fixture
def few(model: str, tmp_path: Path) -> Callable[..., SftConfig]:
    """Of a file with ten lines."""
    rows = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(10)]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def config(patience: int = 5, **more: object) -> SftConfig:
        base = {"data": [str(tmp_path / "few.jsonl")], "updates": 4, "batch_tokens": 64, "eval": {"every": 2}}
        return config_for(model, **{**base, "optimizer": {"lr": 1e-2, "max_skipped_updates": patience}, **more})

    return config


def run(config: SftConfig, folder: Path) -> list[dict[str, float]]:
    """The lines of its updates."""
    finetune(config, lambda: RunFolder(folder, config.dump(), CONFIG))
    return [row for row in lines(folder) if "train/skipped" in row]


@pytest.mark.parametrize(("where", "dtype"), [("loss", None), ("gradient", None), ("gradient", "bfloat16")])
def test_an_update_that_is_not_finite_is_skipped_and_leaves_nothing_behind(
    few: Callable[..., SftConfig],
    fault: Fault,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    dtype: str | None,
) -> None:
    fault(where, {2})
    states, plain = dict[int, tuple[dict[str, Tensor], Skips]](), unmask.training.run.base_run.write_state

    def write(folder: Path, step: int, tensors: dict[str, Tensor], facts: dict) -> None:
        states[step] = {name: tensor.clone() for name, tensor in tensors.items()}, facts["skips"]
        plain(folder, step, tensors, facts)

    monkeypatch.setattr(unmask.training.run.base_run, "write_state", write)
    with pytest.warns(UserWarning, match=naming("update 2", "skipped", "loss", "gradient")):
        rows = run(few(save_every=1, dtype=dtype), tmp_path / "run")
    before, after = states[1][0], states[2][0]
    assert "exp_avg lm.lm_head.weight" in after
    assert all(torch.equal(before[name], after[name]) for name in before if name != "generator")
    assert not torch.equal(after["weight lm.lm_head.weight"], states[3][0]["weight lm.lm_head.weight"])
    assert [row["train/skipped"] for row in rows] == [0, 1, 1, 1]
    assert [states[step][1] for step in (1, 2, 3)] == [Skips(), Skips(1, 1), Skips(1, 0)]
    assert ["train/grad_norm" in row for row in rows] == [True, False, True, True]
    assert ["train/loss" in row for row in rows] == [True, where == "gradient", True, True]
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()


@pytest.mark.filterwarnings("ignore:update . was skipped")
def test_too_many_in_a_row_stop_the_run_and_the_next_try_ends_as_if_they_had_not(
    few: Callable[..., SftConfig], fault: Fault, tmp_path: Path
) -> None:
    fault("loss", {1, 3, 4})
    rows = run(few(patience=3, updates=6), tmp_path / "whole")
    assert [row["train/skipped"] for row in rows] == [1, 1, 2, 3, 3, 3]
    with pytest.raises(ValueError, match=naming("2 updates", "skipped", "loss", "nan")):
        run(few(patience=2, updates=6, save_every=5), tmp_path / "run")
    state, _ = newest_state(tmp_path / "run" / "state")
    assert state.step == 4 and state.facts["skips"] == [3, 2]
    resume(tmp_path / "run")
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    weights = [(tmp_path / name / "checkpoint" / "model.safetensors").read_bytes() for name in ("run", "whole")]
    assert weights[0] == weights[1]


# --- from the command line ----------------------------------------------------------------------------------


def test_rows_are_read_before_a_model_is_loaded(unmask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("unmask.training.setup.load_model")
    Path("rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n')
    code, _, err = unmask("sft", "tiny", "--data", "rows.jsonl")
    assert code == 2 and mentions(err, "rows.jsonl:2", "completion") and not Path("runs").exists()
    row = {"question": "1 + 1?", "answer": "#### 2"}
    for name, rows in {"train": [row], "test": [{**row, "answer": None}]}.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("task.yaml").write_text("data: [{task: gsm8k, options: {data: train.jsonl, test_data: test.jsonl}}]\n")
    code, _, err = unmask("sft", "tiny", "task.yaml")
    assert code == 2 and "test.jsonl line 1" in err and not Path("runs").exists()


def test_an_evaluation_that_is_refused_leaves_no_folder(
    few: Callable[..., SftConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*given: object) -> None:
        raise ValueError("too long")

    monkeypatch.setattr(unmask.sft.sft_run, "sample_in_turn", refused)
    with pytest.raises(ValueError, match="too long"):
        run(few(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_embedded_model_learns_and_what_it_becomes_is_a_model_like_others(unmask, tmp_path: Path) -> None:
    """`unmask sft`, then `unmask eval` of the run, and the run as a model to train."""
    code, out, _ = unmask(
        *("sft", "tiny", "--data", "countdown", "--out", "run", "updates=10", "batch_tokens=1024", "optimizer.lr=3e-3"),
        *("eval.prompts=8", "max_examples=300", "save_every=6"),
    )
    assert code == 0 and "Model: run/checkpoint" in out and "update 10/10" in out
    assert "unmask train --model run --task countdown --full" in out
    told = json.loads(Path("run/finished.json").read_text())
    before, after = (told[when]["eval/countdown/loss"] for when in ("before", "after"))
    assert before > 2 > 6 * after  # of 16 positions it had learnt to fill 8
    few = ("--problems", "4", "--samples", "1", "rollout.length=16")
    code, out, _ = unmask("eval", "run", "--task", "countdown", "--json", *few)
    assert code == 0 and json.loads(out)
    assert load_model(Path("run/checkpoint")).mask_id == 1
    assert parse_config({"model": "run", "task": "countdown"}).model == "run"


@pytest.mark.parametrize(
    ("name", "options"),
    [("smollm2_two", {"protocol": "short"}), ("smollm2_long", {"protocol": "short", "holes": [7, 9]})],
)
def test_the_next_command_trains_the_first_task_as_it_was_taught(name: str, options: dict[str, object]) -> None:
    config = read_sft_config(Path(__file__).parents[1] / "benchmarks" / "starts" / f"{name}.yaml", model="tiny")
    command = shlex.split(next_command(config, Path("my runs")))
    assert command[:7] == ["unmask", "train", "--model", "my runs", "--task", "sudoku_text", "--full"]
    trained = read_config(overrides=command[7:], task="sudoku_text", model="tiny")
    assert trained.rollout.length == config.data[0].canvas
    assert options.items() <= trained.options["sudoku_text"].items() == config.data[0].options.items()


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("sft",), ["model"]),
        (("sft", "tiny"), ["data"]),
        (("sft", "tiny", "--data", "gsm9k"), ["gsm9k"]),
        (("sft", "tiny", "--data", "none.jsonl"), ["none.jsonl"]),
        (("sft", "tiny", "--data", "sudoku", "--data", "sudoku"), ["data", "sudoku", "twice"]),
        (("sft", "tiny", "--data", "sudoku", "upates=3"), ["upates", "updates"]),
        (("sft", "tiny", "--data", "sudoku", "updates=3", "attention_annealing=4"), ["attention_annealing", 3]),
        (("sft", "tiny", "--data", "sudoku", "optimizer.lr=-1"), ["optimizer.lr", -1]),
        (("sft", "--resume", "nowhere"), ["nowhere"]),
        (("sft", "tiny", "--resume", "nowhere"), ["--resume"]),
        (("adapt", "tiny", "--data", "sudoku"), ["tiny", "masked diffusion"]),
    ],
)
def test_what_a_user_can_put_right_is_one_sentence(unmask, arguments: tuple[str, ...], names: list) -> None:
    code, _, err = unmask(*arguments)
    assert code == 2 and mentions(err, *names) and err.count("\n") == 1 and not Path("runs").exists()


OLD = {"rows": 7, "tokens": 64, "pass_tokens": 32, "grow": 2, "checkpointing": True}


@pytest.mark.parametrize("old", OLD)
def test_a_key_of_0_1_means_the_same_under_its_old_name(old: str, tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match=naming(old, RENAMED[old])):
        named = read_sft_config(model="tiny", data=["countdown"], **{old: OLD[old]})
    with pytest.warns(FutureWarning, match=naming(old, RENAMED[old])):
        overridden = read_sft_config(None, [f"{old}={OLD[old]}"], model="tiny", data=["countdown"])
    (tmp_path / "old.yaml").write_text(f"{old}: {OLD[old]}\n")
    with pytest.warns(FutureWarning, match=naming(old, RENAMED[old])):
        read = read_sft_config(tmp_path / "old.yaml", model="tiny", data=["countdown"])
    new = read_sft_config(model="tiny", data=["countdown"], **{RENAMED[old]: OLD[old]})
    assert named == overridden == read == new and new != read_sft_config(model="tiny", data=["countdown"])


def test_nested_keys_of_0_1_mean_the_same_under_their_old_names() -> None:
    with pytest.warns(FutureWarning, match=naming("rows", "max_examples")):
        old = read_sft_config(model="tiny", data=[{"task": "countdown", "rows": 7}])
    assert old == read_sft_config(model="tiny", data=[{"task": "countdown", "max_examples": 7}])
    with pytest.warns(FutureWarning, match=naming("optimizer.max_norm", "optimizer.max_grad_norm")):
        old = read_sft_config(model="tiny", data=["countdown"], optimizer={"max_norm": 0.5})
    assert old.optimizer.max_grad_norm == 0.5
    with pytest.raises(ValueError, match=naming("tokens", "batch_tokens")), pytest.warns(FutureWarning):
        read_sft_config(model="tiny", data=["countdown"], tokens=64, batch_tokens=64)
