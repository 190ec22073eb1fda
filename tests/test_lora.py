"""Adapters: what they compute, what they leave alone, and that peft elsewhere means the same by the same files."""

import copy
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from adapters import FACTS, NATIVE, OPTIONS, OWN, Small, adapted, canvas, dense, layers_of, move, small
from unmask.core.options import LoraOptions
from unmask.core.policy import Policy
from unmask.models.checkpoint import Origin
from unmask.models.encoder import Bert
from unmask.models.lora import (
    ReferencePolicy,
    add_adapter,
    disable_adapter,
    merge,
    save_adapter,
    trainable_parameters,
)

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
    first, again, other = ([w for w in trainable_parameters(p) if w.shape[0] == 4] for p in policies)
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


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_gradients_are_those_of_the_dense_weights_and_only_the_adapter_has_them(gradient_checkpointing: bool) -> None:
    policy = adapted().double()
    policy.gradient_checkpointing = gradient_checkpointing
    full = copy.deepcopy(policy)
    merge(full)
    want_QV = torch.randn(len(canvas()[2]), 40, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for model in (policy, full):
        (model(*canvas()).log_softmax(-1) * want_QV).sum().backward()

    assert {id(w) for w in trainable_parameters(policy)} == {id(w) for w in policy.parameters() if w.grad is not None}
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
    assert {w.dtype for w in trainable_parameters(policy)} == {torch.float32}
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
    assert {w.grad.dtype for w in trainable_parameters(policy) if w.grad is not None} == {torch.float32}


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
    with disable_adapter(policy):
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
    with disable_adapter(other):
        assert torch.equal(policy(*canvas()), before_QV)
    merge(other)
    assert torch.equal(policy(*canvas()), before_QV)


# --- the base inside it -------------------------------------------------------------------------------------


def test_the_reference_stays_the_base_while_training_moves_the_adapter() -> None:
    policy, base = small(), small()
    add_adapter(policy, OPTIONS, seed=0)
    reference = ReferencePolicy(policy)
    assert isinstance(reference, Policy)
    optimizer = torch.optim.AdamW(trainable_parameters(policy), lr=0.05)
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
    reference = ReferencePolicy(policy)
    assert torch.equal(reference(*canvas()), twin(*canvas()))
    move(policy, seed=8)
    moved_QV, kept = policy(*canvas()), [weight.detach().clone() for weight in trainable_parameters(policy)]
    assert not torch.allclose(moved_QV, twin(*canvas()), atol=1e-3)
    assert torch.equal(reference(*canvas()), twin(*canvas()))
    assert torch.equal(reference.head(reference.hidden(*canvas())), twin(*canvas()))
    assert torch.equal(policy(*canvas()), moved_QV)  # and the policy is where it was
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(trainable_parameters(policy), kept, strict=True))


def test_switching_off_nests_survives_an_error_and_leaves_gradients_as_they_were() -> None:
    policy, base = adapted(), small()
    frozen = policy.lm.model.layers[1].mlp.up_proj.lora_A["default"].weight.requires_grad_(False)
    on_QV, off_QV = policy(*canvas()), base(*canvas())
    count = len(trainable_parameters(policy))
    with disable_adapter(policy):
        with disable_adapter(policy):
            assert torch.equal(policy(*canvas()), off_QV)
        assert torch.equal(policy(*canvas()), off_QV)
    assert torch.equal(policy(*canvas()), on_QV)
    with pytest.raises(RuntimeError, match="inside"), disable_adapter(policy):
        raise RuntimeError("inside")
    assert torch.equal(policy(*canvas()), on_QV)
    assert len(trainable_parameters(policy)) == count and not frozen.requires_grad


def test_the_reference_may_be_asked_between_a_forward_pass_and_its_backward_pass() -> None:
    gradients = []
    for asked in (False, True):
        policy = adapted()
        policy.gradient_checkpointing = True
        loss = policy(*canvas()).logsumexp(-1).sum()
        if asked:
            ReferencePolicy(policy)(*canvas())
        loss.backward()
        gradients.append([w.grad for w in trainable_parameters(policy)])
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
    assert len(trainable_parameters(policy)) == len(list(policy.parameters()))
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
    with pytest.raises(ValueError, match=f"{target!r} .*: {said}$"):
        add_adapter(policy, LoraOptions(targets=("q_proj", target)), seed=0)
    assert len(trainable_parameters(policy)) == len(list(policy.parameters()))  # and nothing was touched


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"alpha": 0}, {"alpha": float("inf")}, {"targets": ()}, {"r": 8}])
def test_options_are_strict(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LoraOptions(**wrong)
    assert LoraOptions(targets=["q_proj"]).targets == ("q_proj",)  # as YAML gives it
    with pytest.raises(ValueError, match=r"list: write \[experts\]"):
        LoraOptions(targets="experts")


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
        counted[targets] = sum(weight.numel() for weight in trainable_parameters(policy))
    assert list(counted.values()) == [335_544_320, 167_772_160]


def test_one_adapter_at_a_time_and_none_where_there_is_none() -> None:
    policy = small()
    for asks in (
        ReferencePolicy,
        merge,
        lambda p: save_adapter(p, "x", "y"),
        lambda p: disable_adapter(p).__enter__(),
    ):
        with pytest.raises(ValueError, match="This policy has no adapter"):
            asks(policy)
    add_adapter(policy, OPTIONS, seed=0)
    with pytest.raises(ValueError, match="already has an adapter"):
        add_adapter(policy, OPTIONS, seed=0)


def test_without_peft_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"peft .*pip install 'unmask\[lora\]'"):
        add_adapter(small(), OPTIONS, seed=0)
