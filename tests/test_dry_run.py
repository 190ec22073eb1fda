"""The command `unmask train --dry-run`, and what it says where something is not to be had."""

import json
import os
import stat
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from estimates import LLADA, llada
from unmask.config import parse_config
from unmask.models.known import KNOWN
from unmask.studies.cost.estimate import estimate
from wording import mentions, naming


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, CUDA and the network are out of bounds."""

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("a dry run has no business here")

    for name in ("safetensors.safe_open", "safetensors.torch.load_file", "unmask.models.load.fill",
                 "unmask.models.tiny.fill", "torch.cuda.is_available", "torch._C._cuda_init",
                 "socket.socket.connect", "unmask.training.run.folder.RunFolder.__init__"):  # fmt: skip
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
    assert found["network"]["adapter"] == 335_544_320
    assert found["passes"]["update, gradient"]["states"] == 12 * 8 // 2 * 2
    assert [time["hardware"] for time in found["times"]] == ["NVIDIA GeForce RTX 4090"]
    assert any("there is no tokenizer" in note for note in found["notes"])
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
    found = estimate(llada(task=task, rollout={"length": 64, "steps": 8}, **{task: {"protocol": "d1"}}))
    assert found.prompt == 200
    (note,) = [note for note in found.notes if "hub" in note]
    assert mentions(note, task, 200, f"{task}.data=FILE.jsonl")


def test_a_file_tells_the_prompt_and_its_faults_are_not_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"question": f"{i} + 1 = ?" + " and" * (i == 7) * 300, "answer": f"#### {i + 1}"} for i in range(40)]
    path.write_text("\n".join(map(json.dumps, rows)))
    config = llada(task="gsm8k", prompts=40, gsm8k={"protocol": "d1", "data": str(path)})
    found = estimate(config)
    assert 300 < found.prompt < 420 and any("token" in note for note in found.notes)
    path.write_text('{"question": "1 + 1 = ?"}')
    with pytest.raises(ValueError, match="'answer'"):
        estimate(llada(task="gsm8k", gsm8k={"data": str(path)}))


def test_a_folder_needs_its_config_alone(unmask, untouched: None, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    stated = {**KNOWN[LLADA], "n_layers": 2, "d_model": 64, "n_heads": 4, "n_kv_heads": 4, "mlp_hidden_size": 128}
    (tmp_path / "model" / "config.json").write_text(json.dumps(stated))
    code, out, _ = unmask("train", "--dry-run", "--model", "model", "--json")
    assert code == 0 and json.loads(out)["network"]["layers"] == 2


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--dry-run", "--hardware", "abacus"], ["--hardware", "abacus", "h200"]),
        (["--json"], ["--json", "--dry-run"]),
        (["--dry-run", "rollout.temperature=0"], ["temperature", 0]),
        (["--dry-run", "--model", "nowhere"], ["nowhere"]),
        (["--dry-run", "--model", "some/model"], ["some/model", "hub"]),
        (["--dry-run", "rollout.length=200"], [200, 128]),
    ],
)
def test_what_cannot_be_estimated_is_one_sentence(unmask, arguments: list[str], names: list) -> None:
    code, out, err = unmask("train", *arguments)
    assert code == 2 and not out and mentions(err, *names) and err.count("\n") == 1


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
    with pytest.raises(ValueError, match="cache"):
        estimate(parse_config({**plain, "rollout": {"cache": "dual"}}))
    with pytest.raises(ValueError, match=naming("compile", "decoders")):
        estimate(parse_config({**plain, "compile": True}))
