"""Several processes do what one does: on gloo, on the CPU. The processes and what they run are in ranks_worker.py."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_alone import LONGEST, SILENT
from ranks_cases import CASES, COMMON, SIZES, toy_model, toy_task
from ranks_worker import CHECKS, PATIENCE, cramped
from typer.testing import CliRunner

import unmask.training.setup
from helpers import sample
from unmask.cli.main import app
from unmask.config import Config, parse_config, read_config
from unmask.core.options import LoraOptions
from unmask.core.probes import ask, fully_masked
from unmask.core.shapes import NEVER
from unmask.distributed.processes import ALONE, Ranks, timeout_seconds
from unmask.models import load_model, save
from unmask.models.adapter_config import base_of
from unmask.models.checkpoint import Origin
from unmask.models.decoder import Facts
from unmask.models.encoder import Bert
from unmask.models.load import Released
from unmask.models.lora import add_adapter, has_adapter, save_adapter, trainable_parameters
from unmask.models.tiny import CharacterTokenizer
from unmask.rollout.sample import row_seeds
from unmask.tasks import TASKS
from unmask.training.loop import train
from unmask.training.run.folder import RunFolder, read_metrics
from unmask.training.run.state import newest_state
from unmask.training.setup import set_up
from unmask.training.update import logprobs
from unmask.util.micro_batch import MicroBatch
from wording import mentions

pytestmark = pytest.mark.timeout(2 * PATIENCE)

HERE = Path(__file__).parent
SEVERAL = [(name, size) for size, names in SIZES.items() if size > 1 for name in names]


def said_by(command: list[str], seconds: int, folder: Path) -> tuple[int, str]:
    """The exit code of a command and what it said; it and all its processes are ended when they take too long."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **pipes) as process:
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"{' '.join(command)} hangs: {process.communicate()[0][-3000:]}")
    return process.returncode, said


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which every process has left what it found."""
    folder = tmp_path_factory.mktemp("world")
    code, said = said_by([sys.executable, str(HERE / "ranks_worker.py"), str(folder)], PATIENCE + 30, folder)
    assert code == 0, said
    return folder


def found(world: Path, name: str, size: int) -> list[dict[str, Any]]:
    """What the processes of one size have found, by rank."""
    files = [world / f"{name}-{size}-{rank}.pt" for rank in range(size)]
    results = [torch.load(file) if file.is_file() else {"error": f"{file.name}: never got there"} for file in files]
    errors = [result["error"] for result in results if "error" in result]
    assert not errors, "\n".join(errors)
    return results


def close(one: Any, other: Any, tolerance: float, where: str = "") -> None:
    """The same numbers in the same places."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert one.shape == other.shape and one.dtype == other.dtype, where
        exact = {"rtol": 0, "atol": tolerance if one.is_floating_point() else 0, "equal_nan": True}
        torch.testing.assert_close(one, other, **exact, msg=lambda text: f"{where}: {text}")
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            close(one[key], other[key], tolerance, f"{where} {key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            close(a, b, tolerance, f"{where} {number}")
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=tolerance, abs=tolerance, nan_ok=True), where
    else:
        assert one == other, where


def logged(folder: Path) -> list[dict[str, float]]:
    """The metrics that are not those of one process alone."""
    rows = read_metrics(folder)
    # Passes too: who has less to ask asks nothing beside the others, and a share may fit where the whole did not.
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "memory/", "cost/"))} for row in rows]


def taught(folder: Path) -> list[dict[str, Any]]:
    """The groups that were written down as they taught."""
    lines = map(json.loads, (folder / "traces.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "train"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in load_model(folder / "checkpoint").named_parameters()}


def visible(trace: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A trace without what is under its padding, and what was kept as sets."""
    shown = trace | {"tokens_BL": trace["tokens_BL"].masked_fill(~trace["attended_BL"], 0)}
    return shown | {key: trace[key].sort(-1).values for key in ("kept",) if key in trace}


# --- shares and messages ------------------------------------------------------------------------------------


def test_shares_cover_everything_once() -> None:
    for size in range(1, 10):
        for count in (*range(25), 1000):
            shares = [Ranks(rank, size).share(count) for rank in range(size)]
            assert [i for share in shares for i in share] == list(range(count))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CHECKS)
def test_in_every_process(world: Path, name: str, size: int) -> None:
    """The checks of ranks_worker.py assert; here is what they raised."""
    found(world, name, size)


# --- training -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "size"), SEVERAL)
def test_several_processes_are_one(world: Path, name: str, size: int) -> None:
    (one,) = found(world, name, 1)
    several = found(world, name, size)
    for result in several:  # every process has seen the whole batch, and has the same weights
        for mine, theirs in zip(result["traces"], one["traces"], strict=True):
            close(visible(mine), visible(theirs), 1e-5, "trace")
        close(result["updates"], one["updates"], 1e-5, "update")
        close(result["weights"], one["weights"], 1e-5, "weight")
    if name.startswith("lora"):
        assert all(torch.equal(several[0]["weights"][key], several[-1]["weights"][key]) for key in one["weights"])


@pytest.mark.parametrize(("name", "size"), SEVERAL)
def test_the_first_process_writes_what_one_would(world: Path, name: str, size: int) -> None:
    folders = [world / f"{name}-{size}-{rank}" for rank in range(size)]
    assert [folder.exists() for folder in folders] == [True] + [False] * (size - 1)
    assert [len(result["reports"]) > 0 for result in found(world, name, size)] == [True] + [False] * (size - 1)
    one = world / f"{name}-1-0"
    for file in ("config.yaml", "samples.jsonl"):
        assert (folders[0] / file).read_text() == (one / file).read_text()
    close(logged(folders[0]), logged(one), 1e-5, "metrics")
    close(taught(folders[0]), taught(one), 1e-3, "traces")  # which have four digits
    assert {file.name for file in (folders[0] / "checkpoint").iterdir()} == {
        file.name for file in (one / "checkpoint").iterdir()
    }
    close(weights(folders[0]), weights(one), 1e-5, "checkpoint")


@pytest.mark.parametrize("name", CASES)
def test_the_cases_are_what_they_are_meant_to_be(world: Path, name: str) -> None:
    (one,) = found(world, name, 1)
    first = load_model(world / ("experts" if name == "full-experts" else "model"))
    began = {key: weight.detach().double() for key, weight in first.named_parameters()}
    ended = {key.replace(".base_layer", ""): weight.double() for key, weight in one["weights"].items()}
    still = {key for key in began if torch.equal(began[key], ended[key])}
    assert still == (set(began) if name.startswith("lora") else set())
    assert all(ended[key].any() for key in ended.keys() - began.keys())  # B of an adapter is zero to begin with
    branches = [trace for trace in one["traces"] if not (trace["step_BL"] > 0).any()]  # filled in one step
    main = [trace for trace in one["traces"] if (trace["step_BL"] > 0).any()]
    if not name.endswith(("few", "experts")):
        assert not all(trace["attended_BL"].all() for trace in main)  # prompts of different lengths
        assert any((trace["step_BL"] == NEVER).any() for trace in main)  # rows that have ended
    if name.endswith("daca"):
        assert {"kept", "step_top_id", "step_top_logp"} <= main[0].keys()
        assert any(len(trace["group_B"]) for trace in branches)
    if name.endswith("quiet"):
        assert one["updates"][1]["grad_norm"] == 0 and one["updates"][0]["grad_norm"] > 0.01
    if name in ("full-agrpo", "lora-oom"):  # where memory has run out
        key = "memory/update_micro_batch_size" if name == "lora-oom" else "memory/rollout_micro_batch_size"
        assert [row[key] for row in read_metrics(world / f"{name}-1-0") if "train/loss" in row] == [1.0, 1.0]
        assert not any(key in row for row in read_metrics(world / f"{name}-2-0"))
    if name in ("full-agrpo", "full-few"):  # some processes have fewer passes to make than others
        assert sum(result["silent"] for result in found(world, name, 3 if name == "full-few" else 2)) > 0


def test_sharded_passes_are_not_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that runs out on one process ends the run: the others would wait for a pass that does not come."""
    monkeypatch.setattr("unmask.training.update.ask", cramped)
    policy = toy_model()
    probes = fully_masked(sample(policy, [[5], [6, 7]], row_seeds(0, 2), length=3).trace, torch.Generator())
    rows = MicroBatch(2)
    with pytest.raises(torch.OutOfMemoryError):
        logprobs(policy, probes, rows, Ranks(sharded=True))
    assert rows == MicroBatch(2)
    logprobs(policy, probes, rows, ALONE)
    assert rows == MicroBatch(1, halvings=1)


# --- torchrun -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "file"), [("full", "model.safetensors"), ("lora", "adapter_config.json")])
def test_the_command_line_under_torchrun(world: Path, name: str, file: str) -> None:
    """As docs/multi_gpu.md says."""
    said = (world / f"{name}.txt").read_text()
    assert (world / f"{name}.code").read_text() == "0", said
    check_run(world / name, said)
    assert (world / name / "run" / "checkpoint" / file).is_file()


def check_run(folder: Path, said: str) -> None:
    """One folder, written once, the same as without torchrun; and it can be evaluated."""
    assert said.count("update    0/2") == 1 and [path.name for path in folder.iterdir()] == ["run"]
    config = read_config(folder / "run" / "config.yaml")
    train(config, lambda: RunFolder(folder / "alone", config.dump()))
    close(logged(folder / "run"), logged(folder / "alone"), 1e-5, "metrics")
    close(weights(folder / "run"), weights(folder / "alone"), 1e-5, "checkpoint")
    result = CliRunner().invoke(app, ["eval", str(folder / "run"), "--problems", "3", "--samples", "1", "--json"])
    assert result.exit_code == 0, result.output


def test_an_error_on_one_process_ends_all(world: Path) -> None:
    said = (world / "ill.txt").read_text()
    assert (world / "ill.code").read_text() == "1"
    assert mentions(said, "toy", "RuntimeError: the grader is ill")
    assert "main FAILED" in said  # the launcher's own report; it names whoever it saw first


@pytest.mark.parametrize("name", SILENT)
def test_a_process_that_is_left_alone_stops_and_says_so(world: Path, name: str) -> None:
    """At once where the other is gone; after the timeout where it is there and silent."""
    said = (world / f"{name}-0.txt").read_text()
    code, seconds = (world / f"{name}.alone").read_text().split()
    assert int(code) == 2, said
    assert mentions(said, "another process", f"{LONGEST:g} s", "UNMASK_TIMEOUT")
    assert float(seconds) < LONGEST + 30 and (float(seconds) > LONGEST - 1 or name == "killed")
    assert newest_state(world / name / "run" / "state")[0].step == 1  # from which the run goes on


@pytest.mark.parametrize("text", ["soon", "0", "-3", "nan"])
def test_a_timeout_is_a_number_of_seconds(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("UNMASK_TIMEOUT", text)
    with pytest.raises(ValueError, match=f"UNMASK_TIMEOUT: .*'{text}'"):
        timeout_seconds()


# --- setup --------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(TASKS, "toy", toy_task)
    save(toy_model(), tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def adapter(model: str, tmp_path: Path) -> str:
    """An adapter that does something, in a folder."""
    policy = load_model(model)
    add_adapter(policy, LoraOptions(rank=2), seed=3)
    with torch.no_grad():
        for weight in trainable_parameters(policy):
            weight += 0.05
    save_adapter(policy, tmp_path / "adapter", model)
    return str(tmp_path / "adapter")


def toy_config(model: str, **data: Any) -> Config:
    return parse_config(COMMON | {"model": model, "method": "agrpo", "inner_steps": 1} | data)


def test_small_models_are_trained_whole_and_others_by_an_adapter(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kind in (("tiny", None), (model, None), (model, True)):
        with set_up(toy_config(name, full=kind), needs_reference=False) as setup:
            assert setup.ranks == ALONE and setup.reference is None and not has_adapter(setup.policy)
            assert len(names_of(setup.policy)) == len(list(setup.policy.parameters()))
    with set_up(toy_config(model, full=False), needs_reference=False) as setup:
        assert has_adapter(setup.policy) and all("lora" in name for name in names_of(setup.policy))

    def released(*given: Any, **more: Any) -> Released:
        small = toy_model()
        return Released(small.lm, small.facts, small.tokenizer, small.origin)

    monkeypatch.setattr(unmask.training.setup, "load_model", released)
    with set_up(toy_config(model), needs_reference=False) as setup:
        assert has_adapter(setup.policy) and all("lora" in name for name in names_of(setup.policy))


def names_of(policy: torch.nn.Module) -> list[str]:
    return [name for name, weight in policy.named_parameters() if weight.requires_grad]


def test_an_adapter_is_trained_further(model: str, adapter: str, tmp_path: Path) -> None:
    config = toy_config(adapter)
    train(config, lambda: RunFolder(tmp_path / "run", config.dump()))
    before, after = load_model(adapter).state_dict(), weights(tmp_path / "run")
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved and moved == {name for name in after if "lora" in name}
    assert base_of(tmp_path / "run" / "checkpoint") == model
    again = toy_config(str(tmp_path / "run" / "checkpoint"))
    with set_up(again, needs_reference=True) as setup:
        assert has_adapter(setup.policy) and setup.reference is not None


def test_full_training_of_an_adapter_merges_it_first(model: str, adapter: str, tmp_path: Path) -> None:
    config, policy = toy_config(adapter, full=True), load_model(adapter)
    trace = sample(policy, [[5], [6, 7]], row_seeds(0, 2), length=3).trace
    probes = fully_masked(trace, torch.Generator())
    with set_up(config, needs_reference=True) as setup, torch.no_grad():
        assert not has_adapter(setup.policy)
        close(ask(setup.policy, probes), ask(policy, probes), 1e-5)
        close(ask(setup.reference, probes), ask(policy, probes), 1e-5)
        assert (ask(load_model(model), probes) - ask(policy, probes)).abs().max() > 1e-3
    train(config, lambda: RunFolder(tmp_path / "run", config.dump()))
    assert not has_adapter(load_model(tmp_path / "run" / "checkpoint"))


@pytest.mark.parametrize(
    ("wish", "size"), [({"gradient_checkpointing": True}, 1), ({"compile": True}, 1), ({"full": True}, 2)], ids=str
)
def test_what_is_not_built_for_encoders(
    model: str, monkeypatch: pytest.MonkeyPatch, wish: dict[str, bool], size: int
) -> None:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    lm, facts = BertForMaskedLM(BertConfig(vocab_size=99, **sizes)), Facts(mask_id=1, eos_id=2, pad_id=0, max_length=32)
    encoder = Bert(lm, facts, CharacterTokenizer(), Origin({}))

    @contextmanager
    def joined_ranks(device: str):
        yield Ranks(0, size), device

    monkeypatch.setattr(unmask.training.setup, "load_model", lambda *given, **more: encoder)
    monkeypatch.setattr(unmask.training.setup, "join_processes", joined_ranks)
    asked = "full training in several processes" if size > 1 else next(iter(wish))
    with pytest.raises(ValueError, match=f"^{asked} .*decoders.* encoders"):
        with set_up(toy_config(model, **{"full": True} | wish), needs_reference=False):
            pass
