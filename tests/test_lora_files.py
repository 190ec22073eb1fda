"""Adapters on disk: what is written, what of other programs is read, and what is refused."""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from adapters import NATIVE, OWN, Small, adapted, canvas, layers_of, move, small
from unmask.core.options import LoraOptions
from unmask.models import lora
from unmask.models.adapter_config import base_of
from unmask.models.lora import (
    disable_adapter,
    load_adapter,
    merge,
    save_adapter,
    trainable_parameters,
    unfreeze_adapter,
)
from unmask.models.names import LLADA, SAME, Names
from wording import naming

# --- files --------------------------------------------------------------------------------------------------


class Toy(nn.Module):
    """The modules of a LLaDA under its own names, with the weights of one of ours; peft asks no more of a model."""

    def __init__(self, policy: Small) -> None:
        super().__init__()
        for path, module in policy.lm.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                *parents, name = policy.names.own(path).split(".")
                inner: nn.Module = self
                for parent in parents:
                    if not hasattr(inner, parent):
                        inner.add_module(parent, nn.Module())
                    inner = getattr(inner, parent)
                inner.add_module(name, copy.deepcopy(module))


def same_function(policy: Small, theirs: nn.Module, own: Callable[[str], str]) -> None:
    """Every linear layer, adapted or not, does here what it does there."""
    paths = [path for path, module in small().lm.named_modules() if isinstance(module, nn.Linear)]
    assert len(paths) == 3 * 7 + 1
    for path in paths:
        mine, other = policy.lm.get_submodule(path), theirs.get_submodule(own(path))
        x = torch.randn(4, mine.in_features, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(mine(x), other(x), rtol=1e-6, atol=1e-6)


def written(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((folder / "adapter_config.json").read_text()), load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("names", [LLADA, SAME])
def test_what_is_saved_is_loaded_bit_for_bit(names: Names, tmp_path: Path) -> None:
    policy, other = adapted(LoraOptions(rank=4, alpha=6.0), names=names), small(names=names)
    save_adapter(policy, tmp_path / "a", base="GSAI-ML/LLaDA-8B-Instruct")
    assert base_of(tmp_path / "a") == "GSAI-ML/LLaDA-8B-Instruct"
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "SHA256SUMS",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    load_adapter(other, tmp_path / "a", trainable=True)
    for mine, theirs in zip(trainable_parameters(policy), trainable_parameters(other), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(policy(*canvas()), other(*canvas()))
    still = small(names=names)
    load_adapter(still, tmp_path / "a")
    assert not trainable_parameters(still) and torch.equal(policy(*canvas()), still(*canvas()))
    with disable_adapter(still):
        assert torch.equal(still(*canvas()), small()(*canvas()))
    assert not trainable_parameters(still)


def test_a_loaded_adapter_can_be_made_trainable(tmp_path: Path) -> None:
    policy, other = adapted(), small()
    save_adapter(policy, tmp_path, base="b")
    assert lora.has_adapter(policy) and not lora.has_adapter(other)
    load_adapter(other, tmp_path)
    assert lora.has_adapter(other) and not trainable_parameters(other)
    unfreeze_adapter(other)
    assert [n for n, w in other.named_parameters() if w.requires_grad] == [
        n for n, _ in other.named_parameters() if "lora_" in n
    ]
    merge(other)
    assert not lora.has_adapter(other)


def test_the_loaded_weights_do_not_follow_the_file(tmp_path: Path) -> None:
    policy = adapted()
    save_adapter(policy, tmp_path, base="b")
    other = small()
    load_adapter(other, tmp_path)
    before_QV = other(*canvas())
    file = tmp_path / "adapter_model.safetensors"
    content = file.read_bytes()
    with file.open("r+b") as opened:  # as a tool would that writes in place
        opened.seek(len(content) // 2)
        opened.write(b"\x00" * (len(content) // 2))
    assert torch.equal(other(*canvas()), before_QV)


def test_saving_again_replaces_the_adapter_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "optimizer.pt").write_bytes(b"mine")
    policy, other = adapted(), small()
    save_adapter(policy, tmp_path, base="one")
    move(policy)
    save_adapter(policy, tmp_path, base="two")
    load_adapter(other, tmp_path)
    assert torch.equal(policy(*canvas()), other(*canvas())) and base_of(tmp_path) == "two"
    assert (tmp_path / "optimizer.pt").read_bytes() == b"mine" and len(list(tmp_path.iterdir())) == 4


def test_a_save_cut_short_leaves_the_adapter_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, other = adapted(), small()
    save_adapter(policy, tmp_path, base="one")
    before_QV = policy(*canvas())
    move(policy)

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space"):
        save_adapter(policy, tmp_path, base="two")
    load_adapter(other, tmp_path)
    assert base_of(tmp_path) == "one" and torch.equal(other(*canvas()), before_QV)


@pytest.mark.parametrize("targets", ["all", ("q_proj", "down_proj")])
def test_peft_on_the_released_names_reads_what_we_write(targets: Any, tmp_path: Path) -> None:
    policy = adapted(LoraOptions(rank=4, alpha=6.0, targets=targets))
    save_adapter(policy, tmp_path, base="GSAI-ML/LLaDA-8B-Base")
    stated, tensors = written(tmp_path)
    assert "base_model.model.model.transformer.blocks.2.ff_out.lora_A.weight" in tensors
    assert all(key.startswith("base_model.model.model.transformer.blocks.") for key in tensors)
    assert not re.fullmatch(stated["target_modules"], "model.transformer.ff_out")
    theirs = peft.PeftModel.from_pretrained(Toy(small()), tmp_path).base_model.model
    assert {policy.names.own(path) for path in layers_of(policy.lm)} == layers_of(theirs).keys()
    same_function(policy, theirs, policy.names.own)


THEIRS = {
    "d1's seven names, of which LLaDA has four": (dict(target_modules=[*NATIVE]), 12),
    "its own names, which hit the head": (dict(target_modules=[*OWN]), 22),
    "a pattern": (dict(target_modules=r".*blocks\.\d+\.(attn_out|ff_out)"), 6),
    "patterns of ranks and alphas": (
        dict(
            target_modules=[*OWN[:4]],
            rank_pattern={"v_proj": 2, r"blocks\.1\.attn_out": 7},
            alpha_pattern={"q_proj": 3},
        ),
        12,
    ),
    "rank-stabilised": (dict(target_modules=["q_proj"], use_rslora=True), 3),
    "some layers only": (dict(target_modules=["ff_proj"], layers_to_transform=[0, 2], layers_pattern="blocks"), 2),
    "all but": (dict(target_modules=[*OWN], exclude_modules=["model.transformer.ff_out", "k_proj"]), 18),
    "another start": (dict(target_modules=["up_proj"], init_lora_weights="gaussian"), 3),
    "all-linear": (dict(target_modules="all-linear"), 22),
}


@pytest.mark.parametrize("case", THEIRS)
def test_an_adapter_of_peft_on_the_released_names_is_read(case: str, tmp_path: Path) -> None:
    settings, count = THEIRS[case]
    theirs = peft.get_peft_model(Toy(small()), peft.LoraConfig(r=4, lora_alpha=6, **settings))
    move(theirs)
    theirs.save_pretrained(tmp_path)
    policy = small()
    load_adapter(policy, tmp_path)
    assert len(layers_of(policy)) == len(layers_of(theirs)) == count
    same_function(policy, theirs.base_model.model, policy.names.own)
    base_QV = small()(*canvas())
    assert not torch.allclose(policy(*canvas()), base_QV, atol=1e-3)
    with disable_adapter(policy):
        assert torch.equal(policy(*canvas()), base_QV)

    save_adapter(policy, tmp_path / "ours", base="b")  # and written by us it is the same adapter still
    again = small()
    load_adapter(again, tmp_path / "ours")
    assert torch.equal(again(*canvas()), policy(*canvas()))
    back = peft.PeftModel.from_pretrained(Toy(small()), tmp_path / "ours").base_model.model
    assert layers_of(back).keys() == layers_of(theirs.base_model.model).keys()
    same_function(policy, back, policy.names.own)
    adapted_QV = policy(*canvas())
    merge(policy)
    torch.testing.assert_close(policy(*canvas()), adapted_QV, rtol=0, atol=2e-5)


@pytest.mark.parametrize("names", [LLADA, SAME])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_of_peft_on_transformers_names_is_read(names: Names, dtype: torch.dtype, tmp_path: Path) -> None:
    donor, policy = small(), small(names=names)
    theirs = peft.get_peft_model(donor.lm, peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"]))
    move(theirs)
    for weight in trainable_parameters(donor):
        weight.data = weight.data.to(dtype).float()
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    save_file({key: weight.to(dtype) for key, weight in load_file(file).items()}, file)
    load_adapter(policy, tmp_path)
    assert len(layers_of(policy)) == 6
    assert torch.equal(policy(*canvas()), donor(*canvas()))


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"use_dora": True}, ["use_dora", True]),
        ({"bias": "lora_only"}, ["bias", "lora_only"]),
        ({"modules_to_save": ["wte"]}, ["modules_to_save"]),
        ({"fan_in_fan_out": True}, ["fan_in_fan_out", True]),
        ({"lora_bias": True}, ["lora_bias", True]),
        ({"layer_replication": [[0, 2]]}, ["layer_replication"]),
        ({"trainable_token_indices": [3]}, ["trainable_token_indices"]),
        ({"target_parameters": ["experts.weight"]}, ["target_parameters"]),
        ({"some_later_variant": {"a": 1}}, ["some_later_variant"]),
        ({"init_lora_weights": "pissa"}, ["init_lora_weights", "pissa"]),
        ({"peft_type": "IA3"}, ["peft_type", "LORA", "IA3"]),
        ({"r": 0}, ["r", 0]),
        ({"lora_alpha": "much"}, ["lora_alpha", "much"]),
        ({"lora_alpha": float("nan")}, ["lora_alpha", "nan"]),
        ({"lora_dropout": -1.0}, ["lora_dropout", "-1.0"]),
        ({"target_modules": None}, ["target_modules", None]),
        ({"target_modules": ["query"]}, ["query", "linear layer"]),
    ],
)
def test_what_cannot_be_honoured_is_refused(change: dict[str, Any], names: list, tmp_path: Path) -> None:
    save_adapter(adapted(), tmp_path, base="b")
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(written(tmp_path)[0] | change))
    policy = small()
    with pytest.raises(ValueError, match=naming(file, *names)):
        load_adapter(policy, tmp_path)
    assert not layers_of(policy) and len(trainable_parameters(policy)) == len(list(policy.parameters()))


KEY = "base_model.model.model.transformer.blocks.1.attn_out.lora_B.weight"


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({KEY: torch.zeros(32, 5)}, [KEY, torch.float32, (32, 5), (32, 4)]),
        ({KEY: torch.zeros(32, 4, dtype=torch.int8)}, [KEY, torch.int8, (32, 4)]),
        ({KEY: None}, [KEY]),
        ({KEY.replace("attn_out", "attn_norm"): torch.zeros(32, 4)}, ["attn_norm.lora_B.weight", "linear layer"]),
        ({KEY.replace("blocks.1", "blocks.3"): torch.zeros(32, 4)}, ["blocks.3.attn_out.lora_B.weight"]),
        ({"base_model.model.model.transformer.wte.lora_embedding_A": torch.zeros(4, 40)}, ["wte.lora_embedding_A"]),
    ],
)
def test_tensors_have_to_be_the_ones_that_are_meant(change: dict[str, Any], names: list, tmp_path: Path) -> None:
    save_adapter(adapted(), tmp_path, base="b")
    file = tmp_path / "adapter_model.safetensors"
    (tmp_path / "SHA256SUMS").unlink()
    tensors = written(tmp_path)[1] | change
    save_file({key: value for key, value in tensors.items() if value is not None}, file)
    policy = small()
    with pytest.raises(ValueError, match=naming(file, *names)):
        load_adapter(policy, tmp_path)
    assert not layers_of(policy) and len(trainable_parameters(policy)) == len(list(policy.parameters()))


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    save_adapter(adapted(), tmp_path, base="b")
    with pytest.raises(ValueError, match=naming("adapter_model.safetensors", "lora_A")):
        load_adapter(small(hidden_size=64), tmp_path)
    with pytest.raises(ValueError, match="linear layer"):
        load_adapter(small(num_hidden_layers=2), tmp_path)
    with pytest.raises(ValueError, match="linear layer"):
        load_adapter(small(names=SAME), tmp_path)


def test_an_adapter_on_a_head_that_is_the_embedding_is_refused(tmp_path: Path) -> None:
    theirs = peft.get_peft_model(Toy(small()), peft.LoraConfig(r=4, target_modules=["ff_out"]))
    theirs.save_pretrained(tmp_path)
    policy = small()
    policy.lm.lm_head.weight = policy.lm.model.embed_tokens.weight
    with pytest.raises(ValueError, match=naming("model.transformer.ff_out.lora_A.weight")):
        load_adapter(policy, tmp_path)


def test_files_that_are_missing_cut_short_or_pickled_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=naming("adapter_config.json", tmp_path)):
        load_adapter(small(), tmp_path)
    save_adapter(adapted(), tmp_path, base="b")
    weights, config = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    (tmp_path / "SHA256SUMS").unlink()  # which would have told it of any of these
    whole = weights.read_bytes()
    for part in (whole[: len(whole) // 2], whole[:5], b""):
        weights.write_bytes(part)
        with pytest.raises(ValueError, match=naming(weights)):
            load_adapter(small(), tmp_path)
    weights.unlink()
    (tmp_path / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(ValueError, match=naming(weights, "pickle")):
        load_adapter(small(), tmp_path)
    config.write_text("{")
    with pytest.raises(ValueError, match=naming(config, "JSON")):
        base_of(tmp_path)
    config.write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj"]}))
    with pytest.raises(ValueError, match=naming(config, "base model")):
        base_of(tmp_path)
