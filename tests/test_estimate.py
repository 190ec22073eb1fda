"""A dry run says what a real one does: passes exactly, memory and seconds as the benchmark measured them."""

import json
import os
import stat
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unmask import batch as batch_module
from unmask import train as train_module
from unmask.config import Config, parse_config
from unmask.counting import Tally
from unmask.estimate import (
    COMPILED,
    EAGER,
    H200_RATE,
    Estimate,
    Hardware,
    estimate,
    gpu,
    network_of,
    operations,
    seconds,
)
from unmask.models import load_model, save, tiny_policy
from unmask.models.decoder import Decoder
from unmask.models.load import KNOWN, outline
from unmask.models.lora import LoraOptions, add_adapter, save_adapter, trainable
from unmask.models.tiny import TinyShape

SPEED = json.loads((Path(__file__).parent.parent / "benchmarks" / "results" / "speed.json").read_text())
DEMO = json.loads((Path(__file__).parent.parent / "benchmarks" / "results" / "demo.json").read_text())
LLADA = "GSAI-ML/LLaDA-8B-Instruct"


def measured(section: str, **wanted: Any) -> dict[str, Any]:
    """The one row of the benchmark that says so."""
    rows = [row for run in SPEED for row in run.get(section, ()) if all(row.get(k) == v for k, v in wanted.items())]
    (row,) = rows
    return row


# --- passes ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    save(tiny_policy(TinyShape(width=16, layers=1, heads=2, hidden=16, max_length=64), seed=1), folder)
    return str(folder)


def real_passes(config: Config, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tally]:
    """What a training run really asks of its model, by stage; no row ends early and no two rewards are alike."""
    noted: dict[str, Tally] = defaultdict(Tally)
    stage = ["evaluation"]

    def within(name: str, function: Any) -> Any:
        def called(*arguments: Any, **more: Any) -> Any:
            before, stage[0] = stage[0], name
            try:
                return function(*arguments, **more)
            finally:
                stage[0] = before

        return called

    def note(policy: Any, kind: str, states: int, columns: int, at_Q: torch.Tensor) -> None:
        without = any(getattr(module, "_disable_adapters", False) for module in policy.modules())
        key = {"rollout": f"rollout, {kind}", "evaluation": f"evaluation, {kind}"}.get(stage[0], stage[0])
        if stage[0] == "update":
            frozen = without or not any(weight.requires_grad for weight in policy.parameters())
            key = "update, " + ("reference" if frozen else "gradient" if torch.is_grad_enabled() else "no gradient")
        tally = noted[key]
        tally.states, tally.columns = tally.states + states, tally.columns + states * columns
        tally.positions += len(at_Q)

    plain = {name: getattr(Decoder, name) for name in ("hidden", "remember", "hidden_window", "head")}

    def whole(name: str) -> Any:
        def asked(policy: Any, tokens_SL: torch.Tensor, attended_SL: Any, at_Q: torch.Tensor) -> Any:
            note(policy, "whole", *tokens_SL.shape, at_Q)
            return plain[name](policy, tokens_SL, attended_SL, at_Q)

        return asked

    def window(policy: Any, memory: Any, tokens_SL: Any, first: int, last: int, at_Q: torch.Tensor) -> Any:
        note(policy, "window", len(tokens_SL), last - first, at_Q)
        return plain["hidden_window"](policy, memory, tokens_SL, first, last, at_Q)

    def head(policy: Any, hidden_QD: torch.Tensor) -> torch.Tensor:
        logits_QV = plain["head"](policy, hidden_QD)
        return logits_QV - 1e4 * (torch.arange(logits_QV.shape[1]) == policy.eos_id)

    def judged(task: Any, rows: Any, texts: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rng = torch.Generator().manual_seed(len(rows))
        return torch.rand(len(rows), dtype=torch.float64, generator=rng), torch.zeros(len(rows), dtype=torch.bool)

    for name, function in (("hidden", whole("hidden")), ("remember", whole("remember"))):
        monkeypatch.setattr(Decoder, name, function)
    monkeypatch.setattr(Decoder, "hidden_window", window)
    monkeypatch.setattr(Decoder, "head", head)
    monkeypatch.setattr(batch_module, "judged", judged)
    stages = {"collect": "rollout", "cache_check": "cache check", "parts_of": "update", "update": "update"}
    for name, called in stages.items():
        monkeypatch.setattr(train_module, name, within(called, getattr(train_module, name)))
    ranks = {"log": lambda *_: None, "log_samples": lambda *_: None, "save": lambda *_: None, "draw": lambda: None}
    train_module.train(config, lambda: type("NoRun", (), {k: staticmethod(f) for k, f in ranks.items()})())  # type: ignore[arg-type]
    return noted


CASES = {
    "diffu_grpo": {"method": "diffu_grpo"},
    "daca, inner updates": {"method": "diffu_grpo", "with": ["daca"], "inner": 3, "daca": {"strata": 3}},
    "agrpo, more draws than a pass holds": {"method": "agrpo", "agrpo": {"draws": 5}, "rows": 3},
    "agrpo with choice": {"method": "agrpo", "agrpo": {"choice": True}, "inner": 2},
    "coupled, branches, dual cache": {
        "method": "coupled_grpo", "with": ["dispo"], "rollout": {"block": 4, "cache": "dual"},
    },
    "wd1, prefix cache, rare refresh": {
        "method": "wd1", "with": ["sml", "dps"], "rollout": {"block": 4, "cache": "prefix", "refresh": 2},
    },
    "spg, branches, correction": {
        "method": "spg", "with": ["dispo"], "inner": 2,
        "rollout": {"block": 8, "cache": "dual", "correction": 2.0},
        "dispo": {"branches": 3, "kl": 0.1},
    },
    "reinforce_pp, a price on the reward": {"method": "reinforce_pp", "inner": 2, "rows": 4},
    "espo": {"method": "espo", "seed": 3},
    "unigrpo, inner updates": {"method": "unigrpo", "inner": 4},
    "gspo, some steps commit nothing": {"method": "gspo", "rollout": {"schedule": "timestep", "steps": 24}},
    "an adapter": {"method": "diffu_grpo", "full": False, "lora": {"rank": 2}, "inner": 2},
    "small passes": {"method": "coupled_grpo", "rows": 2, "prompts": 5, "rollout": {"rows": 3}},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_passes_are_those_of_a_real_run(case: str, small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    short = {"updates": 1, "prompts": 3, "group": 2, "eval": {"prompts": 3, "samples": 2}}
    config = parse_config({"model": small, "task": "sudoku", "device": "cpu", **short, **CASES[case]})
    found = estimate(config)
    real = real_passes(config, monkeypatch)
    for kind, tally in found.passes.items():
        times = found.evaluations if kind.startswith("evaluation") else 1
        expected = tuple(times * count for count in (tally.states, tally.columns, tally.positions))
        assert expected == (real[kind].states, real[kind].columns, real[kind].positions), kind
    assert set(real) <= set(found.passes)


def test_a_threshold_is_counted_as_one_position_a_step_and_says_so() -> None:
    plain = {"task": "sudoku", "device": "cpu", "rollout": {"steps": 16}}
    exact = estimate(parse_config(plain))
    bound = estimate(parse_config({**plain, "rollout": {"threshold": 0.01, "steps": 4}}))
    assert bound.passes == exact.passes and any("upper bound, as if" in note for note in bound.notes)
    more = estimate(parse_config({**plain, "idle_groups": "resample"}))
    assert any("up to 5 times" in note for note in more.notes)


def test_evaluations_on_the_way_are_counted() -> None:
    found = estimate(parse_config({"device": "cpu", "updates": 20, "eval": {"every": 5}}))
    assert found.evaluations == 2 + 3  # before, after, and at 5, 10, 15


# --- what is trained ------------------------------------------------------------------------------------------------


def test_weights_are_counted_as_in_the_real_model(small: str, tmp_path: Path) -> None:
    for name in ("tiny", small):
        policy, found = load_model(name), estimate(parse_config({"model": name, "device": "cpu"}))
        assert found.network.parameters == found.network.trained == sum(w.numel() for w in policy.parameters())
    add_adapter(policy, LoraOptions(rank=3, targets=("q_proj", "down_proj")), seed=0)
    count = sum(weight.numel() for weight in trainable(policy))
    options = {"rank": 3, "targets": ["q_proj", "down_proj"]}
    with pytest.raises(ValueError, match="lora: has options, but no new adapter"):
        estimate(parse_config({"model": small, "lora": options, "device": "cpu"}))
    found = estimate(parse_config({"model": small, "full": False, "lora": options, "device": "cpu"}))
    assert found.network.trained == count
    save_adapter(policy, tmp_path / "adapter", small)
    for full, trained in ((None, count), (True, found.network.parameters)):
        again = estimate(parse_config({"model": str(tmp_path / "adapter"), "full": full, "device": "cpu"}))
        assert again.network.trained == trained
        assert again.memory_gib["update"]["reference"] == trained * 4 / 2**30  # what it was before this training


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("GSAI-ML/LLaDA-8B-Base", 8_015_581_184),
        ("Dream-org/Dream-v0-Instruct-7B", 7_615_616_512),
        ("apple/DiffuCoder-7B-cpGRPO", 7_615_616_512),
        ("JetLM/SDAR-1.7B-Chat", 2_031_739_904),
        ("JetLM/SDAR-4B-Chat", 4_411_424_256),
        ("JetLM/SDAR-8B-Chat", 8_190_735_360),
    ],
)
def test_known_models_have_the_published_number_of_weights(name: str, parameters: int) -> None:
    found = outline(name)
    assert found.parameters == parameters and found.dtype == torch.bfloat16 and name in KNOWN
    assert found.causal_block == (4 if "SDAR" in name else None)


def llada(**more: Any) -> Config:
    shape = {"length": 256, "steps": 128, "block": 32, "cache": "dual", "mismatch": 0.0}
    rollout = {**shape, **more.pop("rollout", {})}
    return parse_config({"model": LLADA, "task": "countdown", "compile": True, "device": "cpu", "rollout": rollout,
                         "eval": {"prompts": 1, "samples": 1}, **more})  # fmt: skip


def test_adapters_of_llada_have_the_sizes_that_peft_gives_them() -> None:
    config, found = llada(), outline(LLADA)
    assert network_of(config, found).adapter == 335_544_320
    named = llada(lora={"targets": ["q_proj", "k_proj", "v_proj", "up_proj"]})
    assert network_of(named, found).adapter == 167_772_160
    assert network_of(llada(full=True), found).trained == 8_015_581_184


# --- operations, seconds, memory ------------------------------------------------------------------------------------


def test_operations_by_hand() -> None:
    network, tally = network_of(llada(), outline(LLADA)), Tally(states=3, columns=3 * 456, positions=100, most=3)
    layer = 4 * 4096**2 + 3 * 4096 * 12288
    low = 128 * (4 * 8192 + 3 * 16384)
    column = 32 * (2 * layer + 4 * 456 * 4096)
    head = 2 * 4096 * 126464
    reference = 1368 * column + 100 * head
    assert operations(network, "update, reference", tally, 456) == reference
    policy = reference + 1368 * 32 * 2 * low
    assert operations(network, "update, no gradient", tally, 456) == policy
    # Back: every matrix once for the frozen, twice for the adapter; attention twice.
    back = 1368 * 32 * (2 * layer + 2 * 4 * 456 * 4096 + 2 * 2 * low) + 100 * head
    assert operations(network, "update, gradient", tally, 456) == policy + back
    again = policy + back + 1368 * (column + 32 * 2 * low)
    assert operations(network, "update, gradient", tally, 456, checkpointing=True) == again
    pieces = replace(tally, positions=3000)  # three states ask more than a piece holds
    once, twice = (operations(network, kind, pieces, 456) for kind in ("update, no gradient", "update, gradient"))
    assert twice == once + back + 2900 * head + 3000 * head
    full = replace(network, adapter=0)
    assert operations(full, "update, gradient", tally, 456) == 3 * reference


def test_the_constants_are_those_of_the_benchmark() -> None:
    """Each recomputed from the row that the code names."""
    for compiled, shares in ((False, EAGER), (True, COMPILED)):
        for kind in ("whole", "window"):
            row = measured("trunk", kind=kind, compiled=compiled)
            assert getattr(shares, kind) == pytest.approx(row["share_of_peak"], abs=1e-3)
    assert [round(run["peak"][0]["tflops"]) for run in SPEED] == [784, 785, 794] and H200_RATE == 785e12
    network = network_of(llada(), outline(LLADA))
    learnt = Tally(16, 16 * 456, 16 * 256, 16)
    rate = operations(network, "update, gradient", learnt, 456) / measured("methods", method="wd1")["seconds"]
    assert rate / H200_RATE == pytest.approx(EAGER.gradient, abs=1e-3)
    bare = replace(network, adapter=0)
    blocks, steps = 8, 16
    first, later = 32 * blocks * 32, 32 * blocks * sum(range(2, 32, 2))  # positions looked at
    passes = {
        "rollout, whole": Tally(32 * blocks, 32 * blocks * 456, first, 32),
        "rollout, window": Tally(32 * blocks * (steps - 1), 32 * blocks * (steps - 1) * 32, later, 32),
    }
    on = replace(gpu("h200", bare, compiled=True), shares=replace(COMPILED, vocabulary=0.0))
    left = measured("early", kind="dual cache")["full_length"]
    left -= sum(seconds(bare, on, kind, tally, 456) for kind, tally in passes.items())
    traffic = left * on.bandwidth / ((first + later) * 126464)
    assert traffic == pytest.approx(COMPILED.vocabulary, rel=0.01)


def rolled(found: Estimate, config: Config) -> float:
    """Seconds of a rollout on an H200 without an adapter, as the benchmark's rollout section has it."""
    network = replace(found.network, adapter=0)
    on = gpu("h200", network, config.compile)
    kinds = ("rollout, whole", "rollout, window")
    return sum(seconds(network, on, kind, found.passes[kind], found.prompt + found.length) for kind in kinds)


@pytest.mark.parametrize(
    ("rows", "cache", "kind"),
    [(32, "none", "exact"), (32, "prefix", "prefix cache"), (32, "dual", "dual cache"), (128, "dual", "dual cache")],
)
def test_a_rollout_takes_what_was_measured(rows: int, cache: str, kind: str) -> None:
    config = llada(prompts=rows // 8, group=8, rollout={"cache": cache, "rows": rows})
    expected = measured("rollout", kind=kind, rows=rows)["seconds"]
    assert rolled(estimate(config, "h200", prompt=200), config) == pytest.approx(expected, rel=0.12)


@pytest.mark.parametrize("method", ["diffu_grpo", "daca", "dispo"])
def test_a_training_step_takes_what_was_measured(method: str) -> None:
    plugins = [] if method == "diffu_grpo" else [method]
    config = llada(**{"with": plugins}, prompts=8, group=8, rows=16, rollout={"rows": 64})
    time = estimate(config, "h200", prompt=200).times[-1]
    row = measured("step", method=method)
    assert time.hardware == "NVIDIA H200" and time.source == "rates measured"
    assert time.rollout_s == pytest.approx(row["rollout"], rel=0.12)
    assert time.update_s == pytest.approx(row["update"], rel=0.12)


SHELF = [row["method"] for run in SPEED for row in run.get("methods", ())]


@pytest.mark.parametrize("method", SHELF)
def test_an_update_of_every_method_takes_what_was_measured(method: str) -> None:
    base, *plugins = method.split(" + ")
    more = {"agrpo": {"draws": 24}} if base == "agrpo" else {}
    config = llada(method=base, **{"with": plugins}, prompts=2, group=8, rows=16, **more)
    found, row = estimate(config, "h200", prompt=200), measured("methods", method=method)
    # When this was measured the passes without gradient were compiled too.
    assert found.times[-1].update_s == pytest.approx(row["seconds"], rel=0.15)
    if base != "agrpo":  # of whose rows one had ended early
        passes = found.passes
        assert row["states"]["with gradient"] == passes["update, gradient"].states
        assert row["states"]["forward"] == passes["update, no gradient"].states + passes["update, reference"].states
    if method != SHELF[0]:  # before whose first step the optimiser had no state
        assert found.memory_gib["update"]["peak"] == pytest.approx(row["peak_gib"], rel=0.1)


@pytest.mark.parametrize("method", ["diffu_grpo", "daca"])
def test_the_memory_of_training_is_what_was_measured(method: str) -> None:
    plugins = [] if method == "diffu_grpo" else [method]
    config = llada(**{"with": plugins}, prompts=1, group=8, rows=1, checkpointing=True)
    sizes = estimate(config, "h200", prompt=200).memory_gib
    expected = measured("memory", method=method)["peak_gib"]
    assert max(parts["peak"] for parts in sizes.values()) == pytest.approx(expected, rel=0.1)
    assert sizes["rollout"]["weights"] == pytest.approx(14.93, abs=0.01)
    assert sizes["rollout"]["KV cache"] == pytest.approx(8 * 456 * 512 / 2**20)  # 512 KiB a token
    assert sizes["update"]["Adam"] == 2 * sizes["update"]["gradients"] == 2 * sizes["update"]["adapter"]


def test_all_weights_in_half_precision_have_fp32_copies_and_a_reference() -> None:
    found = estimate(llada(full=True), "a100-80", prompt=200)
    sizes, (time,) = found.memory_gib["update"], found.times[-1:]
    once = sizes["weights"]
    assert sizes["adapter"] == 0 and sizes["reference"] == once
    assert sizes["fp32 copies"] == sizes["gradients"] == sizes["Adam"] / 2 == 2 * once
    plain = estimate(llada(full=True, dtype="float32", method="wd1"), prompt=200).memory_gib["update"]
    assert plain["weights"] == plain["gradients"] == plain["Adam"] / 2 == 2 * once
    assert plain["reference"] == plain["fp32 copies"] == 0
    assert time.hardware == "NVIDIA A100 80GB" and sizes["peak"] > time.memory_gib and "data sheet" in time.source


def test_the_demo_takes_what_was_measured_on_a_cpu() -> None:
    """Within a factor of two: 90 to 140 GFLOP/s were timed on the core that ran it."""
    network = estimate(parse_config({"device": "cpu"})).network
    from unmask.estimate import CPU, _time

    config = parse_config({"with": ["daca"], "device": "cpu"})
    found = estimate(config)
    on = Hardware("CPU", 115e9, 1e10, 8.0, CPU, CPU, "")
    hours = _time(config, network, on, found.passes, found.prompt + found.length, found.evaluations).run_h
    for run in DEMO["demo"].values():
        assert run["seconds"] / 2 < 3600 * hours < 2 * run["seconds"]


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, CUDA and the network are out of bounds."""

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("a dry run has no business here")

    for name in ("safetensors.safe_open", "safetensors.torch.load_file", "unmask.models.load.fill",
                 "unmask.models.tiny.fill", "torch.cuda.is_available", "torch._C._cuda_init",
                 "socket.socket.connect", "unmask.run.Run.__init__"):  # fmt: skip
        monkeypatch.setattr(name, forbidden, raising=False)


def test_a_dry_run_prints_and_leaves_nothing(unmask, untouched: None, tmp_path: Path) -> None:
    code, out, err = unmask("train", "--dry-run")
    assert (code, err) == (0, "") and list(tmp_path.iterdir()) == []
    for word in ("177,088 weights", "all weights", "update, gradient", "memory, GiB", "CPU", "note: an upper"):
        assert word in out
    large = ("--model", LLADA, "rollout.length=256", "rollout.block=32", "rollout.cache=dual", "device=cuda")
    code, out, err = unmask("train", "--dry-run", *large, "--hardware", "4090", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "") and list(tmp_path.iterdir()) == []
    assert found["network"]["adapter"] == 335_544_320 and found["passes"]["update, gradient"]["states"] == 12 * 8 * 5
    assert [time["hardware"] for time in found["times"]][-1] == "NVIDIA GeForce RTX 4090"
    assert any("tokenizer is not here" in note for note in found["notes"])
    code, out, _ = unmask("train", "--dry-run", *large, "--hardware", "4090")
    assert code == 0 and "MEMORY DOES NOT SUFFICE" in out and "does not" not in out.split("H200")[-1]


LOST = {
    "no package": None,
    "no connection": ConnectionError("offline"),
    "no such set": FileNotFoundError("not on\nthe hub"),
}


@pytest.mark.parametrize("lost", LOST.values(), ids=LOST)
@pytest.mark.parametrize("task", ["gsm8k", "math500"])
def test_without_the_hub_a_prompt_has_200_tokens(
    task: str, lost: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_dataset(*_: Any, **__: Any) -> None:
        raise lost or AssertionError

    package = lost and SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", package)  # None: not installed
    found = estimate(llada(task=task, **{task: {"protocol": "d1"}}))
    assert found.prompt == 200
    (note,) = [note for note in found.notes if "hub" in note]
    assert note == (
        f"the rows of {task} cannot be had from the hub: prompts are assumed to have 200 tokens; "
        f"{task}.data=FILE.jsonl would tell"
    )


def test_a_file_tells_the_prompt_and_its_faults_are_not_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"question": f"{i} + 1 = ?" + " and" * (i == 7) * 300, "answer": f"#### {i + 1}"} for i in range(40)]
    path.write_text("\n".join(map(json.dumps, rows)))
    config = llada(task="gsm8k", prompts=40, gsm8k={"protocol": "d1", "data": str(path)})
    found = estimate(config)
    assert 300 < found.prompt < 420 and any("a token a word, digit or sign" in note for note in found.notes)
    path.write_text('{"question": "1 + 1 = ?"}')
    with pytest.raises(ValueError, match="'answer' is missing"):
        estimate(llada(task="gsm8k", gsm8k={"data": str(path)}))


def test_a_folder_needs_its_config_alone(unmask, untouched: None, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    stated = {**KNOWN[LLADA], "n_layers": 2, "d_model": 64, "n_heads": 4, "n_kv_heads": 4, "mlp_hidden_size": 128}
    (tmp_path / "model" / "config.json").write_text(json.dumps(stated))
    code, out, _ = unmask("train", "--dry-run", "--model", "model", "--json")
    assert code == 0 and json.loads(out)["network"]["layers"] == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--dry-run", "--hardware", "abacus"], "'abacus' is not known here; known: h200"),
        (["--json"], "--json and --hardware belong to --dry-run"),
        (["--dry-run", "rollout.temperature=0"], "training needs a temperature above 0"),
        (["--dry-run", "--model", "nowhere"], "no model 'nowhere'"),
        (["--dry-run", "--model", "some/model"], "the hub cannot be reached"),
        (["--dry-run", "rollout.length=200"], "the model's limit of 128 is passed"),
    ],
)
def test_what_cannot_be_estimated_is_one_sentence(unmask, arguments: list[str], sentence: str) -> None:
    code, out, err = unmask("train", *arguments)
    assert code == 2 and not out and sentence in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("said", "hardware", "note"),
    [("NVIDIA A100-SXM4-80GB, 81920", "NVIDIA A100-SXM4-80GB", ""), ("NVIDIA Q9, 4096", "NVIDIA H200", "Q9, 4 GiB")],
)
def test_the_gpu_at_hand_is_asked_by_name(monkeypatch, tmp_path: Path, said: str, hardware: str, note: str) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\necho '{said}'\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = estimate(llada())
    assert found.times[0].hardware == hardware and note in "".join(found.notes)
    assert estimate(parse_config({"device": "cpu"})).times[0].hardware == "CPU"  # where the embedded model stays


def test_encoders_are_counted_without_a_cache(tmp_path: Path) -> None:
    stated = {"architectures": ["ModernBertForMaskedLM"], "hidden_size": 768, "num_hidden_layers": 22,
              "num_attention_heads": 12, "intermediate_size": 1152, "vocab_size": 50368,
              "max_position_embeddings": 8192, "tie_word_embeddings": True, "pad_token_id": 50283}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(stated))
    plain = {"model": str(tmp_path), "device": "cpu"}
    assert estimate(parse_config(plain)).network.parameters == 149_655_232
    with pytest.raises(ValueError, match="cannot be rolled out with a cache"):
        estimate(parse_config({**plain, "rollout": {"cache": "dual"}}))
    with pytest.raises(ValueError, match="compile has been built for decoders"):
        estimate(parse_config({**plain, "compile": True}))
