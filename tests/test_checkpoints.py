"""Released checkpoints: what is read and written, and what comes from the hub."""

import json
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from checkpoints import (
    DREAM,
    LLADA_SPECIALS,
    LLADA_TEXT,
    QWEN_SPECIALS,
    QWEN_TEXT,
    SDAR,
    TOKENS,
    llada,
    loaded,
    logits,
    qwen,
    reference,
    with_tokenizer,
    write,
)
from helpers import SMALL
from unmask.models import checkpoint, load_model, save, tiny_policy
from unmask.models.names import LLADA, SAME
from wording import mentions, naming

# --- what is read and written -------------------------------------------------------------------------------


def test_the_type_is_the_stated_one_unless_another_is_asked_for(tmp_path):
    for name, changes in {"a": {}, "b": {"torch_dtype": "bfloat16"}}.items():
        folder, _, _ = qwen(tmp_path / name, DREAM, **changes)
        stated = torch.bfloat16 if changes else torch.float32
        assert {weight.dtype for weight in loaded(folder).parameters()} == {stated}
        assert {weight.dtype for weight in loaded(folder, dtype=torch.float64).parameters()} == {torch.float64}
    folder, _, _ = qwen(tmp_path / "c", DREAM, torch_dtype="absent", dtype="bfloat16")
    assert loaded(folder).lm.dtype == torch.bfloat16
    folder, weights, config = qwen(tmp_path / "d", DREAM, torch_dtype="absent")
    write(folder, config, {name: weight.half() for name, weight in weights.items()})
    assert loaded(folder).lm.dtype == torch.float16  # nothing stated: as stored


@pytest.mark.parametrize("shard", [5_000_000_000, 40_000])
@pytest.mark.parametrize("make", [lambda f: llada(f, shards=2), lambda f: qwen(f, DREAM), lambda f: qwen(f, SDAR)])
def test_what_is_saved_is_what_was_read(tmp_path, make, shard):
    folder, weights, config = make(tmp_path / "theirs")
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    (folder / "modeling_theirs.py").write_text("raise SystemExit  # never run")
    (folder / "README.md").write_text("theirs")
    policy = loaded(folder)
    save(policy, tmp_path / "ours", max_shard_bytes=shard)
    written: dict[str, Tensor] = {}
    for path in (tmp_path / "ours").glob("*.safetensors"):
        held = load_file(path)
        assert not held.keys() & written.keys()
        assert len(held) == 1 or sum(weight.nbytes for weight in held.values()) <= shard
        written |= held
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], weight) for name, weight in weights.items())
    assert json.loads((tmp_path / "ours" / "config.json").read_text()) == config
    others = {path.name for path in (tmp_path / "ours").iterdir() if path.suffix != ".safetensors"}
    index = {"model.safetensors.index.json"} if shard == 40_000 else set()
    assert others == {"SHA256SUMS", "config.json", "generation_config.json", "modeling_theirs.py"} | index
    if index:
        listed = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
        assert listed["weight_map"].keys() == weights.keys()
        assert listed["metadata"]["total_size"] == sum(weight.nbytes for weight in weights.values())
    assert torch.equal(logits(loaded(tmp_path / "ours"), TOKENS), logits(policy, TOKENS))


def test_a_changed_model_is_saved_in_its_own_type(tmp_path):
    folder, _, config = llada(tmp_path / "theirs")
    policy = loaded(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        policy.lm.model.layers[1].mlp.down_proj.weight.add_(1)
    save(policy, tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text()) == {**config, "torch_dtype": "bfloat16"}
    held = load_file(tmp_path / "ours" / "model.safetensors")
    name = "model.transformer.blocks.1.ff_out.weight"
    assert torch.equal(held[name], policy.lm.model.layers[1].mlp.down_proj.weight)
    again = loaded(tmp_path / "ours")
    assert all(map(torch.equal, policy.parameters(), again.parameters()))


def test_a_failed_save_leaves_the_checkpoint_that_was_there(tmp_path, monkeypatch):
    folder, weights, _ = llada(tmp_path / "model")
    policy = loaded(folder)

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        save(policy, folder)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert load_file(folder / "model.safetensors").keys() == weights.keys()
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match="current folder"):
        save(policy, ".")


def test_a_model_does_not_follow_its_file(tmp_path):
    folder, _, _ = llada(tmp_path)
    policy = loaded(folder)
    before = logits(policy, TOKENS)
    path = folder / "model.safetensors"
    with path.open("r+b") as file:  # in place: the same file, other bytes
        file.seek(path.stat().st_size // 2)
        file.write(b"\xff" * 1000)
    assert torch.equal(logits(policy, TOKENS), before)


def test_a_fingerprint_is_of_names_shapes_types_and_every_value(monkeypatch):
    def made() -> Any:
        return tiny_policy(SMALL, seed=1)

    monkeypatch.setattr(checkpoint, "HASHED", 8)  # less than the weights of a matrix
    whole = checkpoint.fingerprint_of(made())
    assert whole == checkpoint.fingerprint_of(made()) and len(whole) == 64
    others = [tiny_policy(SMALL, seed=2), made().to(torch.bfloat16)]
    for place in range(12):  # more than are hashed one by one
        policy = made()
        policy.lm.model.embed_tokens.weight.data[0, place] += 1e-3
        others.append(policy)
    swapped = made()
    head = swapped.lm.lm_head.weight.data.view(-1)
    head[[0, -1]] = head[[-1, 0]]  # the same sum
    turned = made()
    turned.lm.lm_head.weight.data = turned.lm.lm_head.weight.data.reshape(SMALL.width, -1)
    renamed = made()
    renamed.lm.model.layers = torch.nn.ModuleDict({"first": renamed.lm.model.layers[0]})
    assert all(checkpoint.fingerprint_of(policy) != whole for policy in (*others, swapped, turned, renamed))


def test_a_fingerprint_does_not_depend_on_how_a_tensor_lies_in_memory(monkeypatch):
    monkeypatch.setattr(checkpoint, "HASHED", 8)
    policy = tiny_policy(SMALL, seed=1).to(torch.bfloat16)
    whole = checkpoint.fingerprint_of(policy)
    weight = policy.lm.lm_head.weight
    room = torch.zeros(weight.numel() + 1, dtype=weight.dtype)
    room[1:] = weight.data.flatten()
    weight.data = room[1:].view(weight.shape)
    assert checkpoint.fingerprint_of(policy) == whole


def test_a_head_that_is_the_embedding_is_shared(tmp_path):
    kind, tied = {"model_type": "a2d-llama"}, {"tie_word_embeddings": True}
    folder, weights, config = qwen(tmp_path / "without", kind, head=False, **tied)
    policy = loaded(folder, dtype=torch.float64)
    assert policy.lm.lm_head.weight is policy.lm.model.embed_tokens.weight
    expected = reference(weights, False, TOKENS, 6, 2, 1e-6, 1e6)
    torch.testing.assert_close(logits(policy, TOKENS), expected, rtol=0, atol=1e-5)
    shipped = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    equal = loaded(write(tmp_path / "equal", config, shipped))
    assert equal.lm.lm_head.weight is equal.lm.model.embed_tokens.weight
    save(equal, tmp_path / "saved")
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() == weights.keys()
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == config


def test_a_head_that_was_shipped_and_differs_is_kept_apart(tmp_path):
    folder, weights, config = qwen(tmp_path / "theirs", {"model_type": "a2d-llama"}, tie_word_embeddings=True)
    policy = loaded(folder, dtype=torch.float64)
    expected = reference(weights, False, TOKENS, 6, 2, 1e-6, 1e6)
    torch.testing.assert_close(logits(policy, TOKENS), expected, rtol=0, atol=1e-5)
    save(policy, tmp_path / "ours")
    assert load_file(tmp_path / "ours" / "model.safetensors").keys() == weights.keys()
    # Or else whoever reads it ties them again, and loses the head.
    assert json.loads((tmp_path / "ours" / "config.json").read_text()) == {
        **config,
        "tie_word_embeddings": False,
        "torch_dtype": "float64",
    }
    assert torch.equal(logits(loaded(tmp_path / "ours"), TOKENS), logits(policy, TOKENS))


def test_names_go_both_ways_for_modules_and_tensors():
    pairs = {
        "model.layers.3.self_attn.o_proj.weight": "model.transformer.blocks.3.attn_out.weight",
        "model.layers.31.mlp.down_proj.weight": "model.transformer.blocks.31.ff_out.weight",
        "model.layers.3.mlp.gate_proj": "model.transformer.blocks.3.ff_proj",
        "model.layers.0.self_attn.q_proj.bias": "model.transformer.blocks.0.q_proj.bias",
        "model.layers.0.self_attn.v_proj.lora_A.weight": "model.transformer.blocks.0.v_proj.lora_A.weight",
        "model.layers.12": "model.transformer.blocks.12",
        "lm_head.weight": "model.transformer.ff_out.weight",
        "lm_head": "model.transformer.ff_out",
        "model.embed_tokens.weight": "model.transformer.wte.weight",
        "model.norm": "model.transformer.ln_f",
    }
    for native, own in pairs.items():
        assert LLADA.own(native) == own and LLADA.native(own) == native
        assert SAME.own(native) == SAME.native(native) == native
    assert LLADA.native("model.transformer.wpe.weight") == "model.transformer.wpe.weight"  # no such thing: reported so


def test_an_adapter_is_read_with_its_base(tmp_path):
    pytest.importorskip("peft")
    from unmask.core.options import LoraOptions
    from unmask.models.lora import add_adapter, save_adapter

    folder = with_tokenizer(llada(tmp_path / "base", **LLADA_TEXT)[0], LLADA_SPECIALS)
    policy = load_model(folder)
    before = logits(policy, TOKENS)
    add_adapter(policy, LoraOptions(rank=2), seed=0)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if "lora_B" in name:
                weight.normal_(generator=torch.Generator().manual_seed(0))
    save_adapter(policy, tmp_path / "adapter", str(folder))
    again = load_model(tmp_path / "adapter")
    assert torch.equal(logits(again, TOKENS), logits(policy, TOKENS))
    assert not torch.allclose(logits(again, TOKENS), before)
    with pytest.raises(ValueError, match=naming("adapter", "merge")):
        save(policy, tmp_path / "whole")


# --- the hub ------------------------------------------------------------------------------------------------


def test_from_the_hub_come_no_code_and_no_pickles(tmp_path, monkeypatch):
    from fnmatch import fnmatch

    folder, _, _ = qwen(tmp_path / "snapshot", DREAM, **QWEN_TEXT, auto_map={"AutoModel": "modeling_dream.DreamModel"})
    settings = {
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "eos_token": "<|endoftext|>",
    }
    with_tokenizer(folder, QWEN_SPECIALS, **settings)
    asked: dict[str, Any] = {}

    def snapshot(name: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.update(name=name, wanted=lambda file: any(fnmatch(file, pattern) for pattern in allow_patterns))
        assert ignore_patterns == ["*/*"]
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    policy = load_model("Dream-org/Dream-v0-Instruct-7B")
    assert asked["name"] == "Dream-org/Dream-v0-Instruct-7B"
    for file in ("config.json", "model-00001-of-00004.safetensors", "merges.txt", "vocab.json", "README.md"):
        assert asked["wanted"](file)
    for file in ("modeling_dream.py", "pytorch_model.bin", "model.pt", "x.gguf"):
        assert not asked["wanted"](file)
    # What is saved says where its code is, since it does not lie beside it.
    save(policy, tmp_path / "ours")
    config, tokens = (
        json.loads((tmp_path / "ours" / name).read_text()) for name in ("config.json", "tokenizer_config.json")
    )
    there = "Dream-org/Dream-v0-Instruct-7B--"
    assert config["auto_map"] == {"AutoModel": f"{there}modeling_dream.DreamModel"}
    assert tokens["auto_map"] == {"AutoTokenizer": [f"{there}tokenization_dream.DreamTokenizer", None]}
    shutil.rmtree(folder)
    save(policy, tmp_path / "again")  # also when the snapshot is gone
    assert load_model(tmp_path / "again").mask_id == 260


def test_a_model_that_is_nowhere_is_explained(monkeypatch):
    with pytest.raises(ValueError) as error:
        load_model("runs/nosuch/checkpoint")
    assert mentions(str(error.value), "runs/nosuch/checkpoint")
    with pytest.raises(ValueError) as error:
        load_model("nosuch")
    assert mentions(str(error.value), "nosuch", "tiny", "GSAI-ML/LLaDA-8B-Instruct")
    with pytest.raises(ValueError) as error:  # the tests run offline
        load_model("nosuch/nosuch-8B")
    assert mentions(str(error.value), "nosuch/nosuch-8B", "hub cannot be reached")

    def unknown(*_: Any, **__: Any) -> str:
        from huggingface_hub.errors import RepositoryNotFoundError

        raise RepositoryNotFoundError.__new__(RepositoryNotFoundError)

    monkeypatch.setattr("huggingface_hub.snapshot_download", unknown)
    with pytest.raises(ValueError) as error:
        load_model("nosuch/nosuch-8B")
    assert mentions(str(error.value), "nosuch/nosuch-8B", "on the hub")
