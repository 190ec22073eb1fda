"""The families with mixtures of experts: against a straight-line pass, loaded, saved, adapted and trained."""

import json

import peft
import pytest
import torch
from mixtures import CONFIGS, mixture, mixture_folder, naive_logits
from safetensors.torch import load_file, save_file

from unmask.core.options import LoraOptions
from unmask.models import load_checkpoint, save
from unmask.models.checkpoint import fingerprint_of
from unmask.models.describe import describe_model
from unmask.models.lora import add_adapter, disable_adapter, load_adapter, merge, save_adapter, trainable_parameters
from unmask.models.tiny import CharacterTokenizer
from wording import mentions

BLOCKS = {"LLaDA-MoE": 0, "LLaDA2": 32, "SDAR-MoE": 4}
TOKENS = [5, 9, 1, 30, 1, 1, 44, 2, 60, 17]
families = pytest.mark.parametrize("family", CONFIGS)


def logits(policy, tokens: list[int] = TOKENS):
    return policy(torch.tensor([tokens]), None, torch.arange(len(tokens)))


@families
def test_logits_are_those_of_a_pass_token_by_token(family, tmp_path):
    policy = mixture(tmp_path, family, torch.float64)
    weights = load_file(tmp_path / "model.safetensors")
    theirs_LV = naive_logits(weights, CONFIGS[family], TOKENS, BLOCKS[family])
    with torch.no_grad():
        torch.testing.assert_close(logits(policy), theirs_LV, rtol=0, atol=1e-5)  # norms are in fp32
    assert policy.causal_block == (BLOCKS[family] or None)


def test_one_chosen_expert_of_llada2_keeps_its_own_weight(tmp_path):
    """The original divides by the sum of the chosen weights only if there are several."""
    policy = mixture(tmp_path, "LLaDA2", torch.float64, num_experts_per_tok=1)
    gate = policy.lm.model.layers[1].mlp.gate
    x_TD = torch.randn(5, 16, dtype=torch.float64)
    weight_TK, expert_TK = gate(x_TD)
    torch.testing.assert_close(weight_TK, 2.5 * (x_TD @ gate.weight.T).sigmoid().gather(1, expert_TK))


@families
def test_a_checkpoint_is_written_back_as_it_was(family, tmp_path):
    policy = mixture(tmp_path / "first", family)
    save(policy, tmp_path / "again", max_shard_bytes=20_000)
    before = load_file(tmp_path / "first/model.safetensors")
    after = {}
    for shard in (tmp_path / "again").glob("*.safetensors"):
        after |= load_file(shard)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((tmp_path / "again/config.json").read_text()) == CONFIGS[family]
    again = load_checkpoint(tmp_path / "again", tokenizer=CharacterTokenizer())
    assert fingerprint_of(again) == fingerprint_of(policy)


def test_the_expert_bias_is_no_parameter_is_rounded_like_the_weights_and_counts_in_the_fingerprint(tmp_path):
    policy = mixture(tmp_path, "LLaDA2", torch.bfloat16)
    gate = policy.lm.model.layers[1].mlp.gate
    stored = load_file(tmp_path / "model.safetensors")["model.layers.1.mlp.gate.expert_bias"]
    assert torch.equal(gate.expert_bias, stored.bfloat16())
    assert not any("expert_bias" in name for name, _ in policy.named_parameters())
    before = fingerprint_of(policy)
    gate.expert_bias[0] += 1
    assert fingerprint_of(policy) != before


@pytest.mark.parametrize("experts", [True, False])
@families
def test_an_adapter_moves_is_saved_under_the_released_names_and_merges(family, experts, tmp_path):
    """On attention and experts, and on the default layers: all but the routed experts."""
    policy = mixture(tmp_path / "model", family, torch.float64)
    base_LV = logits(policy).detach()
    targets = ("query_key_value" if family == "LLaDA2" else "q_proj", "experts") if experts else "all"
    add_adapter(policy, LoraOptions(rank=2, alpha=4.0, targets=targets), seed=0)
    assert torch.equal(logits(policy), base_LV)
    with torch.no_grad():
        for weight in trainable_parameters(policy):
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    moved_LV = logits(policy).detach()
    assert (moved_LV - base_LV).abs().max() > 0.1
    with disable_adapter(policy):
        assert torch.equal(logits(policy), base_LV)
    save_adapter(policy, tmp_path / "adapter", base=str(tmp_path / "model"))
    tensors = load_file(tmp_path / "adapter/adapter_model.safetensors")
    if experts:
        assert tensors["base_model.model.model.layers.1.mlp.experts.7.down_proj.lora_A.weight"].shape == (2, 8)
    assert any("shared_experts.up_proj" in name for name in tensors) == (family == "LLaDA2" and not experts)
    again = load_checkpoint(tmp_path / "model", torch.float64, tokenizer=CharacterTokenizer())
    load_adapter(again, tmp_path / "adapter")
    assert torch.equal(logits(again), moved_LV)
    merge(policy)
    torch.testing.assert_close(logits(policy), moved_LV, rtol=0, atol=1e-9)
    save(policy, tmp_path / "merged")
    merged = load_checkpoint(tmp_path / "merged", torch.float64, tokenizer=CharacterTokenizer())
    assert torch.equal(logits(merged), logits(policy))


def test_peft_on_the_released_modules_reads_an_adapter_on_experts(tmp_path):
    """The released model has a module for every expert; peft asks no more of a model than its modules."""
    policy = mixture(tmp_path / "model", "LLaDA2")
    add_adapter(policy, LoraOptions(rank=2, alpha=4.0, targets=("query_key_value", "experts")), seed=0)
    with torch.no_grad():
        for weight in trainable_parameters(policy):
            weight.normal_(generator=torch.Generator().manual_seed(weight.numel()))
    save_adapter(policy, tmp_path / "adapter", base="x")
    released = torch.nn.Module()
    for name, weight in load_file(tmp_path / "model/model.safetensors").items():
        *parents, last = name.removesuffix(".weight").split(".")
        inner = released
        for parent in parents:
            if not hasattr(inner, parent):
                inner.add_module(parent, torch.nn.Module())
            inner = getattr(inner, parent)
        if weight.ndim == 2:
            inner.add_module(last, torch.nn.Linear(*reversed(weight.shape), bias=False))
            getattr(inner, last).weight.data = weight
    theirs = peft.PeftModel.from_pretrained(released, tmp_path / "adapter").base_model.model
    experts, x_RD = policy.lm.model.layers[1].mlp.experts, torch.randn(8, 16)
    ours_RD = experts.up_proj(x_RD, torch.arange(1, 9, dtype=torch.int32))  # a row for each expert
    for number, x_D in enumerate(x_RD):
        module = theirs.get_submodule(f"model.layers.1.mlp.experts.{number}.up_proj")
        torch.testing.assert_close(ours_RD[number], module(x_D[None])[0], rtol=1e-5, atol=1e-5)


def test_the_description_names_the_experts(tmp_path):
    facts = {fact.what: fact.value for fact in describe_model(mixture_folder(tmp_path, "LLaDA2"))}
    assert facts["experts"] == "8, 3 for each token, and shared ones, in 1 of 2 layers"


def test_all_linear_layers_are_those_outside_the_routed_experts(tmp_path):
    policy = mixture(tmp_path, "LLaDA-MoE")
    add_adapter(policy, LoraOptions(rank=2), seed=0)
    names = {name.partition(".lora_")[0] for name, weight in policy.lm.named_parameters() if weight.requires_grad}
    assert any("shared_experts" in name for name in names) and not any(".experts." in name for name in names)


def test_a_bias_of_the_router_that_is_not_finite_is_refused(tmp_path):
    """It decides the experts and leaves the logits finite."""
    folder = mixture_folder(tmp_path, "LLaDA2")
    weights, name = load_file(folder / "model.safetensors"), "model.layers.1.mlp.gate.expert_bias"
    weights[name][3] = torch.nan
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=name):
        load_checkpoint(folder, tokenizer=CharacterTokenizer())


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"exclude_modules": r".*experts\.3\..*"}, "all experts .* rank"),
        ({"alpha_pattern": {"experts.3.up_proj": 9.0}}, "all experts .* alpha"),
    ],
)
def test_an_adapter_that_differs_between_experts_is_refused(changed, what, tmp_path):
    policy = mixture(tmp_path / "model", "SDAR-MoE")
    add_adapter(policy, LoraOptions(rank=2, targets=("experts",)), seed=0)
    save_adapter(policy, tmp_path / "adapter", base="x")
    config, weights = (tmp_path / "adapter" / name for name in ("adapter_config.json", "adapter_model.safetensors"))
    config.write_text(json.dumps(json.loads(config.read_text()) | changed))
    if "exclude_modules" in changed:
        save_file({name: each for name, each in load_file(weights).items() if ".experts.3." not in name}, weights)
    (tmp_path / "adapter/SHA256SUMS").unlink()
    again = load_checkpoint(tmp_path / "model", tokenizer=CharacterTokenizer())
    with pytest.raises(ValueError, match=what):
        load_adapter(again, tmp_path / "adapter")


@families
def test_every_trained_weight_gets_a_gradient(family, tmp_path):
    """The router too; and recomputed layers choose the same experts."""
    policy = mixture(tmp_path, family, torch.float64)
    tokens = [n % 96 for n in range(64)]
    plain = torch.autograd.grad(logits(policy, tokens).logsumexp(-1).sum(), list(policy.parameters()))
    assert all(slope.any() for slope in plain)
    policy.gradient_checkpointing = True
    again = torch.autograd.grad(logits(policy, tokens).logsumexp(-1).sum(), list(policy.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("LLaDA-MoE", {"norm_topk_prob": True}),
        ("LLaDA-MoE", {"routed_scaling_factor": 2.0}),
        ("LLaDA-MoE", {"moe_router_score_function": "sigmoid"}),
        ("LLaDA-MoE", {"partial_rotary_factor": 0.5}),
        ("LLaDA-MoE", {"moe_layer_freq": [1]}),
        ("LLaDA-MoE", {"num_experts_per_tok": 9}),
        ("LLaDA-MoE", {"moe_router_enable_expert_bias": "false"}),
        ("LLaDA2", {"use_rmsnorm": False}),
        ("SDAR-MoE", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("LLaDA2", {"score_function": "softmax"}),
        ("LLaDA2", {"use_qk_norm": False}),
        ("LLaDA2", {"editing_threshold": 0.9}),
        ("LLaDA2", {"n_group": 3}),
        ("LLaDA2", {"rotary_dim": 8}),
        ("SDAR-MoE", {"hidden_act": "gelu"}),
    ],
)
def test_what_the_network_does_not_honour_is_refused_by_name(family, changed, tmp_path):
    folder = mixture_folder(tmp_path, family)
    config = {**CONFIGS[family], **changed}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=next(iter(changed))) as error:
        load_checkpoint(folder, tokenizer=CharacterTokenizer())
    assert mentions(str(error.value), "config.json")
