"""Rollouts in fp8: the rounding of e4m3, products with row-wise scales, the layers, and the policy that samples."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mixtures import mixture
from torch import Tensor, nn

import unmask.models.fp8
from adapters import Small, adapted, canvas, dense, layers_of, move, small
from estimates import llada
from helpers import generator, sample
from naive import decoder
from unmask.config import parse_config
from unmask.core.options import LoraOptions
from unmask.core.order import left_to_right
from unmask.core.token_sampling import TokenSampling
from unmask.models.experts import Experts
from unmask.models.fp8 import E4M3, Fp8Layers, Fp8Linear, fp8_paths, has_fp8, quantized
from unmask.models.lora import add_adapter, merged_adapter
from unmask.rollout.cache import Cache
from unmask.rollout.graphs import Graphs
from unmask.studies.cost.estimate import estimate
from unmask.studies.cost.hardware import FP8
from unmask.training.batch import Experiment, collect
from unmask.training.mismatch import replay_logprobs, truncated_weights
from unmask.training.setup import decoding_of, set_up
from unmask.util.micro_batch import MicroBatch

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DEVICES = [
    pytest.param(CPU, marks=pytest.mark.skipif(not has_fp8(CPU), reason="this torch has no fp8 products on a CPU")),
    pytest.param(
        CUDA,
        marks=pytest.mark.skipif(
            not torch.cuda.is_available() or not has_fp8(CUDA), reason="needs a GPU of compute capability 8.9 or more"
        ),
    ),
]
on_cpu = DEVICES[0].marks[0]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- rounding -------------------------------------------------------------------------------------------------------


def test_quantizing_changes_a_value_by_a_sixteenth_of_it_or_two_to_the_minus_ten_of_the_scale() -> None:
    x_ND = normal(64, 512) * torch.logspace(-6, 6, 64)[:, None]
    rows_ND, scale_N1 = quantized(x_ND)
    assert rows_ND.dtype == E4M3 and scale_N1.shape == (64, 1) and scale_N1.dtype == torch.float32
    apart_ND = (rows_ND.float() * scale_N1 - x_ND).abs()
    bound_ND = torch.maximum(x_ND.abs() / 16, scale_N1 / 2**10)
    assert (apart_ND <= bound_ND * (1 + 1e-5)).all() and (apart_ND > 0.9 * bound_ND).any()
    assert (rows_ND.float().abs().amax(-1) == 448).all()  # the largest value of a row uses the whole range


def test_values_of_e4m3_keep_their_bytes_and_rows_of_zeros_stay_zero() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    every = every[every.isfinite()][None]
    rows_ND, scale_N1 = quantized(torch.cat([every, torch.zeros_like(every)]))
    assert torch.equal(rows_ND.float(), torch.cat([every, torch.zeros_like(every)])) and scale_N1[0] == 1
    assert scale_N1[1] > 0


def test_powers_of_two_move_into_the_scale() -> None:
    x_ND = normal(8, 64)
    rows_ND, scale_N1 = quantized(x_ND)
    for power in (-60, -3, 1, 40):
        moved_ND, moved_N1 = quantized(x_ND * 2.0**power)
        assert torch.equal(moved_ND.float(), rows_ND.float()) and torch.equal(moved_N1, scale_N1 * 2.0**power)


def test_a_value_that_is_not_finite_spoils_its_row_only() -> None:
    x_ND = normal(3, 64)
    plain_ND = quantized(x_ND)[0].float()
    for value in (torch.inf, torch.nan):
        x_ND[1, 5] = value
        rows_ND, scale_N1 = quantized(x_ND)
        assert not (rows_ND.float() * scale_N1)[1].isfinite().any()
        assert torch.equal(rows_ND[::2].float(), plain_ND[::2])


# --- products -------------------------------------------------------------------------------------------------------


def dequantized(x_ND: Tensor) -> Tensor:
    rows_ND, scale_N1 = quantized(x_ND)
    return rows_ND.float() * scale_N1


def reference(x: Tensor, weight_MD: Tensor) -> Tensor:
    """The product of the rounded factors in fp32."""
    return F.linear(dequantized(x), dequantized(weight_MD))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 16, 16), (7, 64, 48), (33, 512, 160), (200, 1024, 256)])
def test_a_product_is_that_of_the_rounded_factors(device: torch.device, rows: int, inputs: int, outputs: int) -> None:
    x_ND = (normal(rows, inputs) * torch.logspace(-3, 3, rows)[:, None]).to(device)
    weight_MD = normal(outputs, inputs, seed=1).to(device) * torch.logspace(-2, 2, outputs, device=device)[:, None]
    x_ND[0], weight_MD[3] = 0.0, 0.0
    copy = Fp8Linear(weight_MD)
    copy.set_weight(weight_MD, None)
    for dtype in (torch.float32, torch.bfloat16):
        found_NM, expected_NM = copy(x_ND.to(dtype)), reference(x_ND.to(dtype), weight_MD)
        assert found_NM.dtype == dtype
        size_NM = dequantized(x_ND.to(dtype)).abs() @ dequantized(weight_MD).abs().T
        # bf16 has 8 bits; a GPU sums in fewer bits than fp32 has
        bits = 12 if device.type == "cpu" else 9
        assert ((found_NM - expected_NM).abs() <= expected_NM.abs() / 2**8 + size_NM / 2**bits).all()
        # far below the 3.7 % of rounding the factors
        assert (found_NM - expected_NM).norm() <= 0.01 * expected_NM.norm()
        assert (found_NM[0] == 0).all() and (found_NM[:, 3] == 0).all()


@pytest.mark.parametrize("device", DEVICES[1:])
def test_a_captured_product_sees_weights_that_were_written_later(device: torch.device) -> None:
    x_ND, graph = normal(32, 64).to(device), torch.cuda.CUDAGraph()
    copy = Fp8Linear(torch.empty(48, 64, device=device))
    copy.set_weight(normal(48, 64, seed=1).to(device), None)
    copy(x_ND)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured_NM = copy(x_ND)
    copy.set_weight(normal(48, 64, seed=2).to(device), None)
    x_ND.copy_(normal(32, 64, seed=3))
    graph.replay()
    assert torch.equal(captured_NM, copy(x_ND))


# --- the layers of a model ------------------------------------------------------------------------------------------


def modules_of(policy: Any) -> dict[str, int]:
    return {path: id(module) for path, module in policy.lm.named_modules()}


@contextmanager
def by_hand(policy: Any, paths: list[str]) -> Iterator[None]:
    """Inside it these layers are products of rounded factors in fp32, with an output in bf16."""
    linears = {path: policy.lm.get_submodule(path) for path in paths}

    def forward(linear: nn.Linear, x: Tensor) -> Tensor:
        y = reference(x, linear.weight).bfloat16().to(x.dtype)
        return y if linear.bias is None else y + linear.bias

    for linear in linears.values():
        linear.forward = partial(forward, linear)
    try:
        yield
    finally:
        for linear in linears.values():
            del linear.forward


@on_cpu
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@torch.no_grad()
def test_the_layers_of_the_blocks_run_in_fp8_and_come_back(kind: str) -> None:
    policy = small(kind=kind)
    before, plain_QV = modules_of(policy), policy(*canvas())
    fp8 = Fp8Layers(policy)
    assert len(fp8.paths) == 3 * 7 and "lm_head" not in fp8.paths
    with by_hand(policy, fp8.paths):
        expected_QV = policy(*canvas())
    with fp8.used():
        found_QV = policy(*canvas())
        replaced = {path for path, module in policy.lm.named_modules() if isinstance(module, Fp8Linear)}
        assert replaced == set(fp8.paths)
    assert modules_of(policy) == before and torch.equal(policy(*canvas()), plain_QV)
    # Another order of the sums may round an activation to its neighbour.
    assert (found_QV - expected_QV).abs().mean() < 0.1 * (expected_QV - plain_QV).abs().mean() < plain_QV.std()
    with pytest.raises(KeyboardInterrupt), fp8.used():
        raise KeyboardInterrupt
    assert modules_of(policy) == before


@on_cpu
@torch.no_grad()
def test_copies_keep_their_addresses_and_have_the_weights_of_now() -> None:
    policy = small(kind="qwen2")
    fp8, addresses = Fp8Layers(policy), []
    for number in range(3):
        for weight in policy.parameters():
            weight.mul_(1 + 0.1 * number)
        with fp8.used():
            addresses.append([(c.weight.data_ptr(), c.scale_1M.data_ptr()) for c in fp8.copies.values()])
        for path, copy in fp8.copies.items():
            linear = policy.lm.get_submodule(path)
            rows_MD, scale_M1 = quantized(linear.weight)
            assert torch.equal(copy.weight.float(), rows_MD.float()) and torch.equal(copy.scale_1M, scale_M1.T)
            assert copy.bias is linear.bias
    assert addresses[0] == addresses[1] == addresses[2]


@on_cpu
@torch.no_grad()
def test_an_adapter_is_merged_before_quantizing_or_stays_apart() -> None:
    policy = adapted()
    before, fp8, layers = modules_of(policy), Fp8Layers(policy), layers_of(policy.lm)
    expected = {path: quantized(dense(layer)) for path, layer in layers.items()}
    base = {path: quantized(layer.base_layer.weight) for path, layer in layers.items()}
    with fp8.used(), merged_adapter(policy):
        assert not layers_of(policy.lm)
        merged_QV = policy(*canvas())
    for path, (rows_MD, scale_M1) in expected.items():
        torch.testing.assert_close(fp8.copies[path].weight.float(), rows_MD.float(), rtol=1 / 8, atol=1e-3)
        torch.testing.assert_close(fp8.copies[path].scale_1M, scale_M1.T, rtol=1e-6, atol=0)
    with fp8.used(merge_adapter=False):
        assert layers_of(policy.lm).keys() == layers.keys()
        apart_QV = policy(*canvas())
    for path, (rows_MD, _) in base.items():
        assert torch.equal(fp8.copies[path].weight.float(), rows_MD.float())
    assert modules_of(policy) == before
    plain_QV = policy(*canvas())
    for found_QV in (merged_QV, apart_QV):
        assert 0 < (found_QV - plain_QV).abs().mean() < 0.3 * plain_QV.std()


@on_cpu
@torch.no_grad()
def test_routed_experts_and_routers_keep_their_dtype(tmp_path: Path) -> None:
    policy = mixture(tmp_path, "LLaDA-MoE")
    add_adapter(policy, LoraOptions(rank=2, alpha=3.0, targets=("q_proj", "experts")), seed=5)
    move(policy)
    weights = {name: weight.clone() for name, weight in policy.named_parameters()}
    fp8 = Fp8Layers(policy)
    experts = [path for path, module in policy.lm.named_modules() if isinstance(module, Experts)]
    assert experts and not [path for path in fp8.paths if "experts" in path]
    with fp8.used(), merged_adapter(policy):
        assert sum(isinstance(module, Experts) for module in policy.lm.modules()) == len(experts)
        assert not [name for name, _ in policy.named_parameters() if "lora_" in name]
    assert all(torch.equal(weight, weights[name]) for name, weight in policy.named_parameters())


@on_cpu
def test_a_device_without_fp8_and_a_model_without_fitting_layers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no linear layer .* multiples of 16"):
        Fp8Layers(tiny_of_odd_size())
    monkeypatch.setattr(unmask.models.fp8, "has_fp8", lambda device: False)
    with pytest.raises(ValueError, match=r"rollout\.precision: fp8 needs an NVIDIA GPU"):
        Fp8Layers(small())


def tiny_of_odd_size() -> Any:
    policy = small(hidden_size=24, intermediate_size=40, num_attention_heads=2, num_key_value_heads=1)
    assert not fp8_paths(policy)
    return policy


# --- the policy that samples ----------------------------------------------------------------------------------------

PROMPTS = [[3, 4, 5], [5], [3, 1, 6, 4, 2]]


@on_cpu
@pytest.mark.parametrize("cache", [None, Cache()])
def test_a_block_causal_rollout_records_the_law_of_the_fp8_network(cache: Cache | None) -> None:
    """In double precision, in which the two ways to compute a block round alike. Layers of 24 or 8 are not in fp8."""
    policy = decoder("llama", made=Small, dtype=torch.float64, causal_block=4, eos_id=-1)
    fp8 = Fp8Layers(policy)
    assert {path.rpartition(".")[2] for path in fp8.paths} == {"q_proj", "o_proj"}
    with fp8.used():
        trace = sample(policy, PROMPTS, torch.arange(3), length=8, steps=4, block=4, cache=cache).trace
        again_BL = replay_logprobs(policy, trace, MicroBatch(4))
    torch.testing.assert_close(again_BL, trace.logp_BL, rtol=0, atol=1e-9)
    exact_BL = replay_logprobs(policy, trace, MicroBatch(4))
    assert (exact_BL - trace.logp_BL).abs().max() > 1e-3


@on_cpu
def test_static_steps_in_fp8_are_those_of_changing_shapes() -> None:
    """In double precision; what a GPU captures is the static step."""
    policy = decoder(made=Small, dtype=torch.float64, eos_id=-1)
    shape = {"length": 8, "steps": 4, "block": 4, "cache": Cache()}
    with Fp8Layers(policy).used():
        static, plain = (
            sample(policy, PROMPTS, torch.arange(3), **shape, graphs=Graphs(wanted)).trace for wanted in (True, False)
        )
    assert torch.equal(static.tokens_BL, plain.tokens_BL) and torch.equal(static.step_BL, plain.step_BL)
    torch.testing.assert_close(static.logp_BL, plain.logp_BL, rtol=0, atol=1e-9)


@on_cpu
def test_weighted_by_the_ratio_what_fp8_draws_is_what_the_policy_would() -> None:
    """Two positions, five words, left to right. Every pair is drawn by some row, so the recorded probabilities are all
    of the law of the fp8 network; times the weights of the correction they are the policy's own."""
    policy = decoder(made=Small, vocabulary=6, mask_id=5, eos_id=-1, seed=2, dtype=torch.float64)
    law, value = TokenSampling(2.0), torch.rand(5, 5, generator=generator(), dtype=torch.float64).tolist()
    fp8 = Fp8Layers(policy)

    def law_at(*canvas: int) -> list[float]:
        with torch.no_grad():
            logits_V = policy(torch.tensor([canvas]), None, torch.tensor([canvas.index(5)]))[0, :5].double()
        return (logits_V / law.temperature).softmax(-1).tolist()

    def pair_law() -> dict[tuple[int, int], float]:
        first, second = law_at(3, 4, 2, 5, 5), [law_at(3, 4, 2, one, 5) for one in range(5)]
        return {(one, two): first[one] * second[one][two] for one in range(5) for two in range(5)}

    with fp8.used():
        trace = sample(
            policy, [[3, 4, 2]] * 3000, torch.arange(3000), length=2, order=left_to_right, sampling=law
        ).trace
        sampler = pair_law()
    truth = pair_law()
    weight_BL = truncated_weights(trace, replay_logprobs(policy, trace, MicroBatch(6000)), torch.inf)
    pairs = [tuple(row) for row in trace.tokens_BL[:, 3:].tolist()]
    recorded = dict(zip(pairs, trace.logp_BL.sum(1).exp().tolist(), strict=True))
    weights = dict(zip(pairs, weight_BL.prod(1).tolist(), strict=True))
    assert len(recorded) == 25 and sum(recorded.values()) == pytest.approx(1.0, abs=1e-6)
    for pair in truth:
        assert recorded[pair] == pytest.approx(sampler[pair], rel=1e-5)
        assert weights[pair] == pytest.approx(truth[pair] / sampler[pair], rel=1e-5)
    mean = {
        name: sum(chance[pair] * value[pair[0]][pair[1]] for pair in truth)
        for name, chance in (("truth", truth), ("sampler", recorded))
    }
    weighted = sum(recorded[pair] * weights[pair] * value[pair[0]][pair[1]] for pair in truth)
    assert weighted == pytest.approx(mean["truth"], rel=1e-5) and abs(mean["sampler"] / mean["truth"] - 1) > 1e-4
    torch.testing.assert_close(
        truncated_weights(trace, replay_logprobs(policy, trace, MicroBatch(6000)), 1.001), weight_BL.clamp(max=1.001)
    )


# --- in training ----------------------------------------------------------------------------------------------------


def config_for(model: str, full: bool = True, **rollout: Any) -> Any:
    lora = {} if full else {"lora": {"rank": 2, "alpha": 4.0}}
    return parse_config(
        {
            "model": model,
            "method": "diffu_grpo",
            "full": full,
            **lora,
            "prompts": 2,
            "group": 4,
            "eval": {"prompts": 2, "samples": 1},
            "sudoku": {"partial": 0.5},
            "rollout": {"precision": "fp8", **rollout},
        }
    )


@on_cpu
@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("rollout", [{"mismatch": 1.0}, {"correction": 1.005}, {"cache": "dual", "block": 4}])
def test_every_batch_has_the_mismatch_of_fp8_and_its_correction(model: str, full: bool, rollout: Any) -> None:
    config = config_for(model, full, **rollout)
    task, method = config.build_task(), config.build_method()
    with set_up(config, method.needs_reference) as setup:
        if not full:
            move(setup.policy, by=0.2)
        before, modules = [weight.clone() for weight in setup.policy.parameters()], modules_of(setup.policy)
        batch = collect(Experiment(setup, task, method, config, decoding_of(config, task)), 1)
        assert modules_of(setup.policy) == modules
        assert all(map(torch.equal, setup.policy.parameters(), before))
        exact_BL = replay_logprobs(setup.policy, batch.trace, MicroBatch(64))
        assert setup.fp8 is not None and len(setup.fp8.copies) == 7 * setup.policy.lm.config.num_hidden_layers
    apart = (exact_BL - batch.trace.logp_BL).abs()[batch.trace.filled_BL]
    assert batch.mismatch.keys() == {"train/cache_mismatch", "train/cache_mismatch_max"}
    assert apart.mean() > 1e-3
    if "cache" not in rollout:
        assert batch.mismatch["train/cache_mismatch"] == pytest.approx(float(apart.mean()), rel=1e-3)
    if "correction" in rollout:
        weight_BL = truncated_weights(batch.trace, exact_BL, 1.005)
        torch.testing.assert_close(batch.weight_BL, weight_BL, rtol=1e-4, atol=1e-4)
        assert (weight_BL == 1.005).any() and (weight_BL < 1).any()
    else:
        assert batch.weight_BL is None


def test_a_correction_needs_a_cache_or_fp8(model: str) -> None:
    with pytest.raises(ValueError, match=r"rollout\.correction: without a cache or fp8"):
        config_for(model, precision="model", correction=2.0)
    with pytest.raises(ValueError, match=r"rollout\.precision"):
        config_for(model, precision="fp4")


# --- the dry run ----------------------------------------------------------------------------------------------------


def test_a_dry_run_counts_the_copies_and_the_faster_products() -> None:
    shape = {"prompts": 4, "group": 8, "rollout": {"micro_batch_size": 32, "cache": "none"}}
    plain, fp8, merged = (
        estimate(llada(**{**shape, "rollout": {**shape["rollout"], **more}}), "h200", prompt=200)
        for more in ({}, {"precision": "fp8"}, {"precision": "fp8", "merge_adapter": True})
    )
    layers, rows = 32 * (4 * 4096**2 + 3 * 4096 * 12288), 32 * (5 * 4096 + 2 * 12288)
    for stage in ("rollout", "update"):
        assert fp8.memory_gib[stage]["fp8 copies"] == (layers + 4 * rows) / 2**30
        assert plain.memory_gib[stage]["fp8 copies"] == 0
    assert merged.memory_gib["rollout"]["copy of adapted layers"] == 0  # the sum goes into the copies
    assert fp8.passes == plain.passes and fp8.times[-1].update_s == plain.times[-1].update_s
    spared = fp8.passes["rollout, whole"].columns * 2 * layers * (1 - 1 / FP8) / (772e12 * 0.810)
    preparing = 15 * layers / 4.8e12
    assert plain.times[-1].rollout_s - fp8.times[-1].rollout_s == pytest.approx(spared - preparing, rel=1e-3)
    checked = estimate(llada(**{**shape, "rollout": {"precision": "fp8", "cache": "none", "mismatch": 0.1}}), "h200")
    assert checked.passes["cache check"].states == 3 * 128  # three of the 32 rollouts at every step
    with pytest.raises(ValueError, match="A100 80GB has no fp8"):
        estimate(llada(rollout={"precision": "fp8"}), "a100-80", prompt=200)
