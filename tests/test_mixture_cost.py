"""The dry run of a mixture of experts: weights, operations of the experts that a token uses, activations."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mixtures import mixture

from estimates import llada
from unmask.config import read_config
from unmask.core.options import LoraOptions
from unmask.models.known import KNOWN
from unmask.models.load import outline
from unmask.models.lora import add_adapter
from unmask.studies.cost.counting import Tally
from unmask.studies.cost.estimate import estimate, kept_bytes, operations, seconds
from unmask.studies.cost.hardware import gpu
from unmask.studies.cost.network import network_of

MINI, MOE = "inclusionAI/LLaDA2.0-mini", "inclusionAI/LLaDA-MoE-7B-A1B-Instruct"
SPEED = json.loads((Path(__file__).parent.parent / "benchmarks" / "results" / "speed_experts.json").read_text())
KINDS = {
    "whole pass": ("rollout, whole", 328),
    "window of 32 columns, cached": ("rollout, window", 32),
    "pass with gradients of all weights": ("update, gradient", 328),
}
"""Kinds of passes, and their columns."""


def test_the_released_sizes_give_the_released_number_of_parameters():
    assert 2 * (outline(MINI).parameters + 19 * 256) == 32_511_286_784  # bytes of its files, expert biases included
    assert outline(MOE).parameters == 7_356_880_896
    assert outline("JetLM/SDAR-30B-A3B-Chat", causal_block=4).parameters == 30_532_122_624


def test_only_the_experts_of_a_token_count_in_its_operations():
    network = network_of(llada(model=MOE, full=True), outline(MOE))
    layer = 4 * 2048**2 + 64 * 2048 + 8 * 3 * 2048 * 1024  # attention, router, eight experts
    assert network.linear == 16 * layer
    assert network.active == network.parameters - 16 * 56 * 3 * 2048 * 1024
    tally = Tally(states=1, columns=100, positions=10, most=1)
    head, attention = 10 * 2 * 2048 * 157184, 100 * 16 * 4 * 100 * 2048
    assert operations(network, "rollout, whole", tally, 100) == 100 * 2 * 16 * layer + attention + head


@pytest.mark.parametrize("model", [MOE, MINI])
@pytest.mark.parametrize("kind", KINDS)
def test_the_seconds_of_a_pass_are_within_two_fifths_of_the_measured_ones(model, kind):
    (row,) = (row for row in SPEED["rows"] if (row["model"], row["kind"], row["experts"]) == (model, kind, "grouped"))
    network, (name, columns), tally = network_of(llada(model=model, full=True), outline(model)), KINDS[kind], Tally()
    tally.add(row["tokens"] // columns, columns, 0)
    forecast = seconds(network, gpu("h200", network, compiled=False), name, tally, 328)
    assert 0.6 < forecast / row["seconds"] < 1.4


def test_adapters_on_experts_count_all_experts_in_memory_and_those_of_a_token_in_operations():
    options = {"rank": 8, "targets": ["q_proj", "experts"]}
    network = network_of(llada(model=MOE, lora=options), outline(MOE))
    query, expert = 8 * (2048 + 2048), 8 * 3 * (2048 + 1024)
    assert network.adapter == 16 * (query + 64 * expert)
    assert network.adapter - network.adapter_unused == 16 * (query + 8 * expert)


def test_a_block_causal_rollout_with_a_cache_has_memory_though_no_pass_is_whole(monkeypatch):
    monkeypatch.setattr("unmask.studies.cost.hardware.cpu_rate", lambda *_: 1e11)
    shape = {"length": 64, "steps": 8, "block": 32, "cache": "prefix"}
    found = estimate(llada(model=MINI, compile=False, micro_batch_size=2, rollout=shape), "h200", prompt=32)
    network, rollout = found.network, found.memory_gib["rollout"]
    assert found.passes["rollout, whole"].states == 0
    assert any("mixture of experts" in note for note in found.notes)
    rows = found.passes["rollout, window"].most
    assert rollout["KV cache"] * 2**30 == rows * 96 * 2 * network.keys * 20 * 2
    assert rollout["activations"] > 0 and rollout["logits"] > 0
    # An update sees the masked states and the finished text in one pass: more columns than the canvas has.
    asked = found.passes["update, gradient"]
    casts = 2 * network.adapter
    kept = kept_bytes(network, compiled=False) * 20
    assert found.memory_gib["update"]["activations"] * 2**30 == pytest.approx(asked.most * asked.width * kept + casts)
    assert asked.width > 96


@pytest.mark.parametrize("adapted", [False, True])
def test_a_layer_keeps_what_is_counted(adapted: bool, tmp_path: Path):
    """What torch saves for the backward pass of the layer with experts, but for what is narrower than a layer."""
    policy = mixture(tmp_path, "SDAR-MoE", torch.bfloat16, num_hidden_layers=1, mlp_only_layers=[])
    if adapted:
        add_adapter(policy, LoraOptions(rank=2), seed=0)
    policy.lm.model.embed_tokens.register_forward_hook(lambda *found: found[-1].detach().requires_grad_())
    policy.causal_block = None
    weights = {weight.untyped_storage().data_ptr() for weight in policy.parameters()}
    kept: dict[int, int] = {}

    def keep(saved: torch.Tensor) -> torch.Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in weights and saved.is_floating_point() and saved.numel() >= 3 * 50 * 16:
            kept[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        policy.hidden(torch.full((3, 50), 5), None, torch.tensor([0]))
    sizes = {
        "width": 16,
        "inner": 3 * 8,
        "routed": 2 * 3 * 16,
        "queries": 4 * 8,
        "keys": 2 * 8,
        "normed": 6 * 8,
        "item": 2,
    }
    network = replace(network_of(llada(model=MOE), outline(MOE)), **sizes, adapter=int(adapted))
    counted = 3 * 50 * kept_bytes(network, compiled=False)
    if adapted:  # frozen experts keep less: their inputs are needed for their own gradient only
        assert 0.8 * counted < sum(kept.values()) < counted
    else:
        assert sum(kept.values()) == counted


def test_the_figures_of_what_fits_where_are_those_of_the_dry_run():
    page = (Path(__file__).parent.parent / "docs" / "multi_gpu.md").read_text()
    table = {row.split("|")[1].strip(): row.split("|")[2:-1] for row in page.splitlines() if row.startswith("| ")}
    command = page.partition("unmask train task=countdown")[2].partition("--dry-run")[0].replace("\\\n", " ").split()
    given = ["task=countdown", *command]
    full = estimate(read_config(None, given), "a100-80").memory_gib
    rows = {"weights, bf16": "weights", "KL reference": "reference", "fp32 copies": "fp32 copies", "Adam": "Adam"}
    for name, part in {**rows, "gradients, fp32": "gradients"}.items():
        assert float(table[name][0]) == round(full["update"][part], 1)
    assert float(table["sum"][0]) == round(full["update"]["peak"], 1)
    for name, model in (("LLaDA-MoE-7B-A1B", MOE), ("LLaDA2.0-mini", MINI)):
        alone = estimate(read_config(None, [*given, f"model={model}", "full=false"]), "a100-80").memory_gib
        assert float(table[name][0]) == round(max(parts["peak"] for parts in alone.values()), 1)
        parts = estimate(read_config(None, [*given, f"model={model}"]), "a100-80").memory_gib["rollout"]
        shared = sum(parts[part] for part in ("weights", "reference", "fp32 copies", "Adam")) / 8
        rest = sum(parts[part] for part in ("KV cache", "activations", "logits"))
        assert float(table[name][1]) == round(parts["weights"] + shared + rest, 1)


def test_rollouts_that_do_not_fill_the_last_batch_of_a_block_causal_model_are_planned(tmp_path):
    """When the last rows begin, all others have ended, in the same step and not before."""
    (tmp_path / "config.json").write_text(json.dumps({**KNOWN["JetLM/SDAR-1.7B-Chat"], "block_size": 32}))
    shape = {"length": 64, "steps": 16, "block": None, "cache": "auto", "micro_batch_size": 8}
    config = llada(model=str(tmp_path), method="agrpo", prompts=3, group=4, rollout=shape, micro_batch_size=12)
    twelve, eight = (
        estimate(each, "h200", prompt=192).passes["rollout, window"].columns
        for each in (config, config.model_copy(update={"prompts": 2}))
    )
    assert twelve == pytest.approx(1.5 * eight, rel=0.01)
