"""Adapters: what they compute, what they leave alone, and that peft elsewhere means the same by the same files."""

import copy
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from unmask.models import lora
from unmask.models.checkpoint import Origin
from unmask.models.decoder import Decoder, Facts
from unmask.models.lora import (
    LoraOptions,
    Unmoved,
    adapter_disabled,
    add_adapter,
    base_of,
    load_adapter,
    merge,
    save_adapter,
    trainable,
    unfreeze_adapter,
)
from unmask.models.masked_lm import Bert
from unmask.models.names import LLADA, SAME, Names
from unmask.models.policy import Policy

FACTS = Facts(mask_id=38, eos_id=2, pad_id=0, max_length=64)
SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
NATIVE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OWN = ("q_proj", "k_proj", "v_proj", "attn_out", "ff_proj", "up_proj", "ff_out")
OPTIONS = LoraOptions(rank=4, alpha=6.0)


class Small(Decoder):
    names: Names = LLADA


def small(names: Names = LLADA, kind: str = "llama", seed: int = 0, **shape: Any) -> Small:
    """A decoder on whose weights nothing is neutral."""
    lm = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE | shape)),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE | shape)),
    }[kind]()
    rng = torch.Generator().manual_seed(seed)
    for weight in lm.parameters():
        weight.data = 0.25 * torch.randn(weight.shape, generator=rng)
    policy = Small(lm.eval(), FACTS, tokenizer=None)
    policy.names = names
    return policy


def canvas(rows: int = 3, width: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    tokens_SL = torch.randint(0, 40, (rows, width), generator=rng)
    attended_SL = torch.arange(width) >= torch.arange(rows)[:, None]
    return tokens_SL, attended_SL, torch.arange(rows * width)[attended_SL.flatten()]


def layers_of(module: nn.Module) -> dict[str, Any]:
    return {path: part for path, part in module.named_modules() if isinstance(part, peft.tuners.lora.LoraLayer)}


def move(module: nn.Module, seed: int = 3, by: float = 0.3) -> None:
    """Training, in short: every adapter weight is changed."""
    rng = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        if "lora_" in name:
            weight.data += by * torch.randn(weight.shape, generator=rng, dtype=weight.dtype)


def adapted(options: LoraOptions = OPTIONS, **kind: Any) -> Small:
    policy = small(**kind)
    add_adapter(policy, options, seed=5)
    move(policy)
    return policy


def dense(layer: Any) -> Tensor:
    """W + alpha / r B A, straight from the definition."""
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    return layer.base_layer.weight + layer.lora_alpha["default"] / len(a) * (b @ a)


# --- the adapted policy -------------------------------------------------------------------------------------


def test_a_new_adapter_changes_nothing_at_all() -> None:
    policy, base = small(), small()
    add_adapter(policy, OPTIONS, seed=0)
    assert torch.equal(policy(*canvas()), base(*canvas()))
    assert layers_of(policy.lm).keys() == {
        f"model.layers.{i}.{part}.{name}"
        for i in range(3)
        for name in NATIVE
        for part in ["mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"]
    }


def test_initial_weights_follow_from_the_seed_alone_and_the_global_random_state_is_left() -> None:
    policies = [small() for _ in range(3)]
    before = torch.get_rng_state()
    add_adapter(policies[0], OPTIONS, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    add_adapter(policies[1], OPTIONS, seed=1)
    add_adapter(policies[2], OPTIONS, seed=2)
    first, again, other = ([w for w in trainable(p) if w.shape[0] == 4] for p in policies)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not any(torch.equal(x, y) for x, y in zip(first, other, strict=True))
    down = layers_of(policies[0])["lm.model.layers.0.mlp.down_proj"].lora_A["default"].weight
    assert 0.9 * 48**-0.5 < down.abs().max() <= 48**-0.5  # uniform up to 1 / sqrt(inputs)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_every_layer_computes_w_x_plus_scaled_b_a_x(kind: str) -> None:
    policy = adapted(kind=kind).double()
    for layer in layers_of(policy).values():
        x = torch.randn(5, layer.in_features, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(layer(x), F.linear(x, dense(layer), layer.base_layer.bias), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_the_dense_weights_and_only_the_adapter_has_them(checkpointing: bool) -> None:
    policy = adapted().double()
    policy.checkpointing = checkpointing
    full = copy.deepcopy(policy)
    merge(full)
    want_QV = torch.randn(len(canvas()[2]), 40, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for model in (policy, full):
        (model(*canvas()).log_softmax(-1) * want_QV).sum().backward()

    assert {id(w) for w in trainable(policy)} == {id(w) for w in policy.parameters() if w.grad is not None}
    assert all(("lora_" in name) == (weight.grad is not None) for name, weight in policy.named_parameters())
    for path, layer in layers_of(policy.lm).items():
        by_W = full.lm.get_submodule(path).weight.grad
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        torch.testing.assert_close(a.grad, 6 / 4 * b.T @ by_W, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(b.grad, 6 / 4 * by_W @ a.T, rtol=1e-9, atol=1e-11)


def test_a_bf16_policy_keeps_bf16_activations_and_fp32_adapter_weights() -> None:
    base = small().bfloat16()
    policy = copy.deepcopy(base)
    add_adapter(policy, OPTIONS, seed=0)
    assert torch.equal(policy(*canvas()), base(*canvas()))
    move(policy)
    assert {w.dtype for w in trainable(policy)} == {torch.float32}
    layer = policy.lm.model.layers[0].mlp.down_proj
    x = torch.randn(6, 48, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert {t.dtype for t in saved} == {torch.bfloat16}  # no wide copy of an activation waits for the backward pass
    a, b = (part["default"].weight.bfloat16() for part in (layer.lora_A, layer.lora_B))
    assert torch.equal(y, layer.base_layer(x) + F.linear(F.linear(x, a), b) * 1.5)

    hidden_QD = policy.hidden(*canvas())
    assert hidden_QD.dtype == torch.bfloat16
    policy.head(hidden_QD).logsumexp(-1).sum().backward()
    assert {w.grad.dtype for w in trainable(policy) if w.grad is not None} == {torch.float32}


def test_a_step_of_three_millionths_is_kept_in_fp32_and_lost_in_bf16() -> None:
    policy = small().bfloat16()
    add_adapter(policy, LoraOptions(rank=16, targets=("q_proj",)), seed=0)
    wide = policy.lm.model.layers[0].self_attn.q_proj.lora_A["default"].weight
    narrow = nn.Parameter(wide.detach().bfloat16())
    lost = []
    for weight in (wide, narrow):
        before = weight.detach().clone()
        weight.grad = torch.ones_like(weight)
        torch.optim.AdamW([weight], lr=3e-6, weight_decay=0.0).step()
        lost.append((weight == before).double().mean().item())
    assert lost[0] == 0 and lost[1] > 0.95


def test_an_encoder_takes_an_adapter_on_its_blocks_and_not_on_its_head() -> None:
    config = BertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    policy = Bert(BertForMaskedLM(config).eval(), FACTS, tokenizer=None, origin=Origin({}))
    base_QV = policy(*canvas())
    add_adapter(policy, OPTIONS, seed=0)
    assert len(layers_of(policy)) == 2 * 6 and all("encoder.layer" in path for path in layers_of(policy))
    assert torch.equal(policy(*canvas()), base_QV)
    move(policy)
    moved_QV = policy(*canvas())
    assert not torch.allclose(moved_QV, base_QV, atol=1e-3)
    with adapter_disabled(policy):
        assert torch.equal(policy(*canvas()), base_QV)
    merge(policy)
    torch.testing.assert_close(policy(*canvas()), moved_QV, rtol=0, atol=1e-5)


def test_a_copy_of_an_adapted_policy_is_one_of_its_own() -> None:
    policy = adapted()
    other = copy.deepcopy(policy)
    before_QV = policy(*canvas())
    assert torch.equal(other(*canvas()), before_QV)
    move(other, seed=8)
    assert torch.equal(policy(*canvas()), before_QV) and not torch.equal(other(*canvas()), before_QV)
    with adapter_disabled(other):
        assert torch.equal(policy(*canvas()), before_QV)
    merge(other)
    assert torch.equal(policy(*canvas()), before_QV)


# --- the base inside it -------------------------------------------------------------------------------------


def test_the_reference_stays_the_base_while_training_moves_the_adapter() -> None:
    policy, base = small(), small()
    add_adapter(policy, OPTIONS, seed=0)
    reference = Unmoved(policy)
    assert isinstance(reference, Policy)
    optimizer = torch.optim.AdamW(trainable(policy), lr=0.05)
    for _ in range(3):
        policy(*canvas()).log_softmax(-1)[:, 5].sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not torch.allclose(policy(*canvas()), base(*canvas()), atol=1e-3)
        assert torch.equal(reference(*canvas()), base(*canvas()))
        assert torch.equal(reference.hidden(*canvas()), base.hidden(*canvas()))
        assert torch.equal(reference.head(reference.hidden(*canvas())), base(*canvas()))
    assert not reference(*canvas()).requires_grad and policy(*canvas()).requires_grad
    assert (reference.mask_id, reference.eos_id, reference.pad_id, reference.max_length) == (38, 2, 0, 64)


def test_the_reference_of_an_adapter_that_is_trained_further_is_the_policy_as_it_was() -> None:
    policy, twin = adapted(), adapted()
    reference = Unmoved(policy)
    assert torch.equal(reference(*canvas()), twin(*canvas()))
    move(policy, seed=8)
    moved_QV, kept = policy(*canvas()), [weight.detach().clone() for weight in trainable(policy)]
    assert not torch.allclose(moved_QV, twin(*canvas()), atol=1e-3)
    assert torch.equal(reference(*canvas()), twin(*canvas()))
    assert torch.equal(reference.head(reference.hidden(*canvas())), twin(*canvas()))
    assert torch.equal(policy(*canvas()), moved_QV)  # and the policy is where it was
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(trainable(policy), kept, strict=True))


def test_switching_off_nests_survives_an_error_and_leaves_gradients_as_they_were() -> None:
    policy, base = adapted(), small()
    frozen = policy.lm.model.layers[1].mlp.up_proj.lora_A["default"].weight.requires_grad_(False)
    on_QV, off_QV = policy(*canvas()), base(*canvas())
    count = len(trainable(policy))
    with adapter_disabled(policy):
        with adapter_disabled(policy):
            assert torch.equal(policy(*canvas()), off_QV)
        assert torch.equal(policy(*canvas()), off_QV)
    assert torch.equal(policy(*canvas()), on_QV)
    with pytest.raises(RuntimeError, match="inside"), adapter_disabled(policy):
        raise RuntimeError("inside")
    assert torch.equal(policy(*canvas()), on_QV)
    assert len(trainable(policy)) == count and not frozen.requires_grad


def test_the_reference_may_be_asked_between_a_forward_pass_and_its_backward_pass() -> None:
    gradients = []
    for asked in (False, True):
        policy = adapted()
        policy.checkpointing = True
        loss = policy(*canvas()).logsumexp(-1).sum()
        if asked:
            Unmoved(policy)(*canvas())
        loss.backward()
        gradients.append([w.grad for w in trainable(policy)])
    assert all(torch.equal(x, y) for x, y in zip(*gradients, strict=True))


# --- merging ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_merging_keeps_the_function_and_restores_the_modules(kind: str) -> None:
    policy, plain = adapted(kind=kind), small(kind=kind)
    before_QV = policy(*canvas())
    wanted = {path: dense(layer) for path, layer in layers_of(policy.lm).items()}
    merge(policy)
    torch.testing.assert_close(policy(*canvas()), before_QV, rtol=0, atol=1e-5)
    for path, weight in wanted.items():
        assert torch.equal(policy.lm.get_submodule(path).weight, weight)
    assert [(n, type(m)) for n, m in policy.named_modules()] == [(n, type(m)) for n, m in plain.named_modules()]
    assert policy.state_dict().keys() == plain.state_dict().keys()
    assert len(trainable(policy)) == len(list(policy.parameters()))
    add_adapter(policy, OPTIONS, seed=1)  # and it takes another one
    torch.testing.assert_close(policy(*canvas()), before_QV, rtol=0, atol=1e-5)


def test_merging_into_bf16_rounds_once() -> None:
    policy = small().bfloat16()
    add_adapter(policy, OPTIONS, seed=0)
    move(policy, by=0.02)
    layers = layers_of(policy.lm)
    once = {path: dense(layer.float()).bfloat16() for path, layer in copy.deepcopy(layers).items()}
    twice = {  # what adding a rounded product gives
        path: layer.base_layer.weight
        + (1.5 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight).bfloat16()
        for path, layer in layers.items()
    }
    merge(policy)
    assert all(torch.equal(policy.lm.get_submodule(path).weight, weight) for path, weight in once.items())
    assert not all(torch.equal(weight, twice[path]) for path, weight in once.items())


# --- targets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        (("q_proj", "k_proj", "v_proj", "up_proj"), {"q_proj", "k_proj", "v_proj", "up_proj"}),
        (NATIVE, set(NATIVE)),
        (OWN, set(NATIVE)),
        (("attn_out", "gate_proj"), {"o_proj", "gate_proj"}),
        (("ff_out",), {"down_proj"}),
        ("all", set(NATIVE)),
    ],
)
def test_targets_are_read_in_both_namings_and_never_hit_the_head(targets: Any, names: set[str]) -> None:
    policy = small()
    add_adapter(policy, LoraOptions(rank=2, targets=targets), seed=0)
    assert {path.rpartition(".")[2] for path in layers_of(policy)} == names
    assert len(layers_of(policy)) == 3 * len(names) and type(policy.lm.lm_head) is nn.Linear


@pytest.mark.parametrize("target", ["lm_head", "wte", "embed_tokens", "proj", "self_attn", "0", "input_layernorm"])
def test_an_unknown_target_is_answered_with_the_names_there_are(target: str) -> None:
    policy = small()
    said = "q_proj, k_proj, v_proj, attn_out, o_proj, ff_proj, gate_proj, up_proj, down_proj, ff_out"
    with pytest.raises(ValueError, match=f"{target!r} is no linear layer of this model's blocks: {said}$"):
        add_adapter(policy, LoraOptions(targets=("q_proj", target)), seed=0)
    assert len(trainable(policy)) == len(list(policy.parameters()))  # and nothing was touched


@pytest.mark.parametrize(
    "wrong", [{"rank": 0}, {"alpha": 0}, {"alpha": float("inf")}, {"targets": ()}, {"r": 8}]
)
def test_options_are_strict(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LoraOptions(**wrong)
    assert LoraOptions(targets=["q_proj"]).targets == ("q_proj",)  # as YAML gives it


def test_the_number_of_weights_on_llada_8b() -> None:
    counted = {}
    for targets in ("all", ("q_proj", "k_proj", "v_proj", "up_proj")):
        with torch.device("meta"):
            config = LlamaConfig(
                vocab_size=126464, hidden_size=4096, intermediate_size=12288, num_hidden_layers=32,
                num_attention_heads=32, num_key_value_heads=32, tie_word_embeddings=False,
            )  # fmt: skip
            policy = Small(LlamaForCausalLM(config), FACTS, tokenizer=None)
        assert sum(weight.numel() for weight in policy.parameters()) == 8_015_581_184
        add_adapter(policy, LoraOptions(rank=128, targets=targets), seed=0)
        counted[targets] = sum(weight.numel() for weight in trainable(policy))
    assert list(counted.values()) == [335_544_320, 167_772_160]


def test_one_adapter_at_a_time_and_none_where_there_is_none() -> None:
    policy = small()
    for asks in (Unmoved, merge, lambda p: save_adapter(p, "x", "y"), lambda p: adapter_disabled(p).__enter__()):
        with pytest.raises(ValueError, match="This policy has no adapter"):
            asks(policy)
    add_adapter(policy, OPTIONS, seed=0)
    with pytest.raises(ValueError, match="has an adapter already"):
        add_adapter(policy, OPTIONS, seed=0)


def test_without_peft_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"Adapters need peft .*: pip install 'unmask\[lora\]'"):
        add_adapter(small(), OPTIONS, seed=0)


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
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    load_adapter(other, tmp_path / "a", trainable=True)
    for mine, theirs in zip(trainable(policy), trainable(other), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(policy(*canvas()), other(*canvas()))
    still = small(names=names)
    load_adapter(still, tmp_path / "a")
    assert not trainable(still) and torch.equal(policy(*canvas()), still(*canvas()))
    with adapter_disabled(still):
        assert torch.equal(still(*canvas()), small()(*canvas()))
    assert not trainable(still)


def test_a_loaded_adapter_can_be_made_trainable(tmp_path: Path) -> None:
    policy, other = adapted(), small()
    save_adapter(policy, tmp_path, base="b")
    assert lora.adapted(policy) and not lora.adapted(other)
    load_adapter(other, tmp_path)
    assert lora.adapted(other) and not trainable(other)
    unfreeze_adapter(other)
    assert [n for n, w in other.named_parameters() if w.requires_grad] == [
        n for n, _ in other.named_parameters() if "lora_" in n
    ]
    merge(other)
    assert not lora.adapted(other)


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
    assert (tmp_path / "optimizer.pt").read_bytes() == b"mine" and len(list(tmp_path.iterdir())) == 3


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
    with adapter_disabled(policy):
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
    for weight in trainable(donor):
        weight.data = weight.data.to(dtype).float()
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    save_file({key: weight.to(dtype) for key, weight in load_file(file).items()}, file)
    load_adapter(policy, tmp_path)
    assert len(layers_of(policy)) == 6
    assert torch.equal(policy(*canvas()), donor(*canvas()))


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"use_dora": True}, "use_dora is True, but only plain LoRA"),
        ({"bias": "lora_only"}, "bias is 'lora_only', but only plain LoRA"),
        ({"modules_to_save": ["wte"]}, "modules_to_save is .*, but only plain LoRA"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True, but only plain LoRA"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices is"),
        ({"target_parameters": ["experts.weight"]}, "target_parameters is"),
        ({"some_later_variant": {"a": 1}}, "some_later_variant is"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: .*got 'pissa'"),
        ({"peft_type": "IA3"}, "peft_type: .*'LORA', got 'IA3'"),
        ({"r": 0}, "r: .*got 0"),
        ({"lora_alpha": "much"}, "lora_alpha: .*got 'much'"),
        ({"target_modules": None}, "target_modules: .*got None"),
        ({"target_modules": ["query"]}, r"\['query'\] names no linear layer of this model"),
    ],
)
def test_what_cannot_be_honoured_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    save_adapter(adapted(), tmp_path, base="b")
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(written(tmp_path)[0] | change))
    policy = small()
    with pytest.raises(ValueError, match=f"{re.escape(str(file))}: {said}"):
        load_adapter(policy, tmp_path)
    assert not layers_of(policy) and len(trainable(policy)) == len(list(policy.parameters()))


KEY = "base_model.model.model.transformer.blocks.1.attn_out.lora_B.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({KEY: torch.zeros(32, 5)}, rf"{KEY} is torch.float32 \(32, 5\); .* want floats \(32, 4\)"),
        ({KEY: torch.zeros(32, 4, dtype=torch.int8)}, rf"{KEY} is torch.int8 \(32, 4\)"),
        ({KEY: None}, f"{KEY} is missing"),
        (
            {KEY.replace("attn_out", "attn_norm"): torch.zeros(32, 4)},
            "attn_norm.lora_B.weight belongs to no linear layer",
        ),
        ({KEY.replace("blocks.1", "blocks.3"): torch.zeros(32, 4)}, "blocks.3.attn_out.lora_B.weight belongs to no"),
        (
            {"base_model.model.model.transformer.wte.lora_embedding_A": torch.zeros(4, 40)},
            "wte.lora_embedding_A belongs to no linear layer",
        ),
    ],
)
def test_tensors_have_to_be_the_ones_that_are_meant(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    save_adapter(adapted(), tmp_path, base="b")
    file = tmp_path / "adapter_model.safetensors"
    tensors = written(tmp_path)[1] | change
    save_file({key: value for key, value in tensors.items() if value is not None}, file)
    policy = small()
    with pytest.raises(ValueError, match=f"{re.escape(str(file))}: .*{said}"):
        load_adapter(policy, tmp_path)
    assert not layers_of(policy) and len(trainable(policy)) == len(list(policy.parameters()))


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    save_adapter(adapted(), tmp_path, base="b")
    with pytest.raises(ValueError, match="want floats"):
        load_adapter(small(hidden_size=64), tmp_path)
    with pytest.raises(ValueError, match="belongs to no linear layer"):
        load_adapter(small(num_hidden_layers=2), tmp_path)
    with pytest.raises(ValueError, match="names no linear layer of this model"):
        load_adapter(small(names=SAME), tmp_path)


def test_an_adapter_on_a_head_that_is_the_embedding_is_refused(tmp_path: Path) -> None:
    theirs = peft.get_peft_model(Toy(small()), peft.LoraConfig(r=4, target_modules=["ff_out"]))
    theirs.save_pretrained(tmp_path)
    policy = small()
    policy.lm.lm_head.weight = policy.lm.model.embed_tokens.weight
    with pytest.raises(ValueError, match=r"model.transformer.ff_out.lora_A.weight belongs to no linear layer"):
        load_adapter(policy, tmp_path)


def test_files_that_are_missing_cut_short_or_pickled_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"no adapter_config.json in {tmp_path}"):
        load_adapter(small(), tmp_path)
    save_adapter(adapted(), tmp_path, base="b")
    weights, config = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    whole = weights.read_bytes()
    for part in (whole[: len(whole) // 2], whole[:5], b""):
        weights.write_bytes(part)
        with pytest.raises(ValueError, match=f"{weights} is not a whole safetensors file"):
            load_adapter(small(), tmp_path)
    weights.unlink()
    (tmp_path / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(ValueError, match=rf"no {weights}; a pickle \(.bin\) can run code"):
        load_adapter(small(), tmp_path)
    config.write_text("{")
    with pytest.raises(ValueError, match=f"{config} is not JSON"):
        base_of(tmp_path)
    config.write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj"]}))
    with pytest.raises(ValueError, match=f"{config} does not name its base model"):
        base_of(tmp_path)
