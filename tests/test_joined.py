"""Linear layers with the same input as one product: the same numbers, weights that stay parameters of their own, files
that stay the same; and no joint product where it would not be that of the modules."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mixtures import mixture
from test_last_layer import MODELS, passes
from torch import Tensor, nn
from torch.fx import GraphModule

import unmask.models.decoder
from adapters import OPTIONS, adapted, canvas, small
from helpers import assert_close
from unmask.config.sections import OptimizerConfig
from unmask.core.options import LoraOptions
from unmask.models import TinyShape, tiny_policy
from unmask.models.checkpoint import save
from unmask.models.fp8 import Fp8Linear
from unmask.models.joined import joined, joined_layer, lay_out, lay_side_by_side
from unmask.models.llama import Linear
from unmask.models.lora import add_adapter, merged_adapter
from unmask.training.optim import make_optimizer
from unmask.training.run.state import state_tensors
from unmask.util.files import save_tensors


def three(bias: bool = False, dtype: torch.dtype = torch.float32) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [kind(6, rows, bias=bias, dtype=dtype) for kind, rows in ((nn.Linear, 8), (Linear, 4), (nn.Linear, 4))]


@pytest.fixture
def as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """compile_layers without the compiler."""
    monkeypatch.setattr(torch, "compile", lambda function: function)


@pytest.fixture
def joint(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each joint product was of."""
    noted, plain = list[int](), unmask.models.decoder.products

    def watched(x: Tensor, matrix: Any, linears: Any) -> tuple[Tensor, ...]:
        noted.append(len(linears))
        return plain(x, matrix, linears)

    monkeypatch.setattr(unmask.models.decoder, "products", watched)
    return noted


# --- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_weights_laid_side_by_side_keep_values_identity_and_gradients(bias: bool) -> None:
    linears, plain = three(bias), three(bias)
    before = [weight for each in linears for weight in each.parameters()]
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    assert joined(linears) is None
    lay_side_by_side(linears)
    assert [id(weight) for each in linears for weight in each.parameters()] == [id(weight) for weight in before]
    for each, other in zip(linears, plain, strict=True):
        for one in (each, other):
            one(x).square().sum().backward()
        for weight, same in zip(each.parameters(), other.parameters(), strict=True):
            assert torch.equal(weight, same) and torch.equal(weight.grad, same.grad)
            assert weight.is_contiguous() and weight.requires_grad
    matrix = joined(linears)
    assert torch.equal(matrix.weight_MD, torch.cat([each.weight for each in plain]))
    assert not matrix.weight_MD.requires_grad and not matrix.weight_MD._is_view()
    assert torch.equal(matrix.bias_M, torch.cat([each.bias for each in plain])) if bias else matrix.bias_M is None


def test_it_is_done_once_and_the_weights_take_no_more_memory() -> None:
    linears = three(bias=True)
    lay_side_by_side(linears)
    storages = {weight.untyped_storage().data_ptr(): weight for each in linears for weight in each.parameters()}
    sizes = sum(weight.nbytes for each in linears for weight in each.parameters())
    assert sum(weight.untyped_storage().nbytes() for weight in storages.values()) == sizes
    lay_side_by_side(linears)
    assert {weight.untyped_storage().data_ptr() for each in linears for weight in each.parameters()} == {*storages}


def test_an_optimizer_and_a_copy_change_the_matrix_too() -> None:
    linears = three()
    lay_side_by_side(linears)
    matrix, before_MD = joined(linears), joined(linears).weight_MD.clone()
    optimizer = torch.optim.AdamW([each.weight for each in linears], lr=0.1)
    sum(each.weight.sum() for each in linears).backward()
    optimizer.step()
    assert (matrix.weight_MD != before_MD).all()
    with torch.no_grad():
        linears[1].weight.copy_(torch.ones(4, 6))
    assert torch.equal(matrix.weight_MD, torch.cat([each.weight for each in linears]))
    assert joined(linears).weight_MD.data_ptr() == matrix.weight_MD.data_ptr()


class Sharded(nn.Parameter):
    pass


def no_bias(linears: list[Any]) -> None:
    linears[1].bias = None


def other_dtype(linears: list[Any]) -> None:
    linears[1].weight.data = linears[1].weight.data.view(torch.float16)


def replaced(linears: list[Any]) -> None:
    linears[1].weight.data = linears[1].weight.data.clone()


def replaced_bias(linears: list[Any]) -> None:
    linears[2].bias.data = linears[2].bias.data.clone()


def touching(linears: list[Any]) -> None:
    """Side by side, but each in a storage of its own."""
    content = bytearray(sum(each.weight.nbytes for each in linears))
    start = 0
    for each in linears:
        kind = {"dtype": each.weight.dtype, "count": each.weight.numel(), "offset": start}
        each.weight.data = torch.frombuffer(content, **kind).view_as(each.weight)
        start += each.weight.nbytes


def other_order(linears: list[Any]) -> None:
    linears[:] = [linears[0], linears[2], linears[1]]


def hooked(linears: list[Any]) -> None:
    linears[2].register_forward_hook(lambda *_: None)


def own_forward(linears: list[Any]) -> None:
    linears[2].forward = lambda x: x


def own_kind(linears: list[Any]) -> None:
    linears[0].__class__ = type("Own", (nn.Linear,), {})


def sharded(linears: list[Any]) -> None:
    linears[0].weight = Sharded(linears[0].weight.data)


def in_fp8(linears: list[Any]) -> None:
    linears[0] = Fp8Linear(linears[0].weight)


def absent(linears: list[Any]) -> None:
    linears[0] = None


def with_an_adapter(linears: list[Any]) -> None:
    import peft

    config = peft.LoraConfig(r=2)
    linears[0] = peft.tuners.lora.Linear(linears[0], "default", config=config, r=2, lora_alpha=2)


CHANGES = [
    no_bias, other_dtype, replaced, replaced_bias, touching, other_order, hooked, own_forward, own_kind, sharded,
    in_fp8, absent, with_an_adapter,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_there_is_no_matrix_of_layers_that_it_would_not_be_the_product_of(change: Callable[[list[Any]], None]) -> None:
    linears: list[Any] = three(bias=True, dtype=torch.bfloat16)
    lay_side_by_side(linears)
    assert joined(linears) is not None
    change(linears)
    assert joined(linears) is None


def test_layers_that_differ_or_have_no_weights_yet_stay_where_they_are() -> None:
    with torch.device("meta"):
        nowhere = three()
    lay_side_by_side(nowhere)
    assert joined(nowhere) is None
    linears = three()
    linears[2].bias = nn.Parameter(torch.zeros(4))
    before = [each.weight.data_ptr() for each in linears]
    lay_side_by_side(linears)
    assert [each.weight.data_ptr() for each in linears] == before


# --- files ----------------------------------------------------------------------------------------------------------


def test_checkpoints_and_states_are_the_same_files(tmp_path: Path) -> None:
    for name in ("apart", "joined"):
        policy = tiny_policy(TinyShape(layers=2), seed=1).requires_grad_(True)
        if name == "joined":
            for layer in policy.lm.model.layers:
                lay_out(layer)
                assert None not in joined_layer(layer)
        optimizer = make_optimizer(policy, OptimizerConfig())
        for weight in policy.parameters():
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        save(policy, tmp_path / name)
        tensors = state_tensors(policy, optimizer, torch.Generator().manual_seed(0))
        save_tensors(tensors, tmp_path / name / "state.safetensors")
    files = {path.name: path.read_bytes() for path in (tmp_path / "apart").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "joined").iterdir()}
    assert {"model.safetensors", "state.safetensors"} <= files.keys()


# --- passes ---------------------------------------------------------------------------------------------------------

POLICIES = {
    **{name: (lambda _, made=made: made()) for name, made in MODELS.items()},
    "qwen2, biases": lambda _: small(kind="qwen2").double(),
    "gelu, biases": lambda _: small(hidden_act="gelu", mlp_bias=True, attention_bias=True).double(),
    "mixture": lambda folder: mixture(folder, "LLaDA-MoE", torch.float64),
    "mixture, one matrix": lambda folder: mixture(folder, "LLaDA2", torch.float64),
}


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("name", POLICIES)
def test_rollouts_have_the_states_and_the_memory_of_separate_products(
    name: str, even: bool, as_written: None, joint: list[int], tmp_path: Path
) -> None:
    """With biases, norms of queries, grouped heads, windows; `even`: the last layer computes some columns."""
    policy = POLICIES[name](tmp_path)
    apart = passes(policy, True, even)
    policy.compile_layers()
    assert joint == []
    with policy.rollout():
        together = passes(policy, True, even)
    for mine, other in zip(together, apart, strict=True):
        assert_close(mine, other, 1e-5 if name == "tiny" else 1e-12)
    assert 2 in joint or name == "mixture"  # which has experts in every layer
    assert 3 in joint or name == "mixture, one matrix"


def test_a_pass_with_gradient_is_bit_for_bit_that_of_separate_weights(as_written: None, joint: list[int]) -> None:
    found = []
    for compiled in (False, True):
        policy = small(kind="qwen2")
        if compiled:
            policy.compile_layers()
        with policy.rollout():  # with gradient also inside it
            logits_QV = policy(*canvas())
        (logits_QV.log_softmax(-1)[:, 3].sum() + policy(*canvas()).square().sum()).backward()
        found.append([logits_QV, *[weight.grad for weight in policy.parameters()]])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert joint == []


@pytest.mark.parametrize("targets", [OPTIONS.targets, ["q_proj", "up_proj"]])
def test_a_merged_adapter_is_in_the_joint_products(targets: Any, as_written: None, joint: list[int]) -> None:
    policy = adapted(LoraOptions(rank=4, alpha=6.0, targets=targets)).double()
    policy.compile_layers()
    before = [(weight.data_ptr(), weight.detach().clone()) for weight in policy.parameters()]
    with torch.no_grad():
        with policy.rollout():
            apart_QV = policy(*canvas())
        assert joint == []  # every group has an adapter
        with policy.rollout(), merged_adapter(policy), policy.rollout():
            merged_QV = policy(*canvas())
        assert joint == [3, 2] * 3
    assert_close(merged_QV, apart_QV, 1e-11)
    for weight, (address, value) in zip(policy.parameters(), before, strict=True):
        assert weight.data_ptr() == address and torch.equal(weight, value)


def test_rollouts_of_layers_that_are_not_compiled_have_none(joint: list[int]) -> None:
    policy = small()
    for layer in policy.lm.model.layers:
        lay_out(layer)
    with torch.no_grad(), policy.rollout():
        policy(*canvas())
    assert joint == [] and policy.joined == []


def test_a_rollout_inside_another_leaves_its_matrices(as_written: None) -> None:
    policy = small()
    policy.compile_layers()
    with policy.rollout():
        outer = policy.joined
        with policy.rollout(even=True):
            assert policy.joined is not outer
        assert policy.joined is outer and len(outer) == 3
    assert policy.joined == []


def test_addresses_change_with_what_is_joined(as_written: None) -> None:
    policy = adapted()
    found = [policy.addresses()]
    policy.compile_layers()
    found.append(policy.addresses())
    with merged_adapter(policy):
        found.append(policy.addresses())
        weight = policy.lm.model.layers[1].self_attn.k_proj.weight
        weight.data = weight.data.clone()
        assert joined_layer(policy.lm.model.layers[1]).query_key_value is None
        found.append(policy.addresses())
    assert len(set(found)) == 4


@pytest.mark.filterwarnings("ignore")  # of torch's own modules, which compiling imports and calls
@pytest.mark.parametrize("adapter", [False, True])
def test_all_layers_are_compiled_once_with_four_products(monkeypatch: pytest.MonkeyPatch, adapter: bool) -> None:
    programs, compiler = list[GraphModule](), torch.compile

    def backend(program: GraphModule, _: list[Tensor]) -> GraphModule:
        programs.append(program)
        return program

    monkeypatch.setattr(torch, "compile", lambda function: compiler(function, backend=backend))
    torch._dynamo.reset()
    policy = tiny_policy(TinyShape(layers=3), seed=1)
    if adapter:
        add_adapter(policy, LoraOptions(rank=4, targets=["q_proj", "down_proj"]), seed=0)
    policy.compile_layers()
    tokens_SL = torch.full((2, 16), policy.mask_id)
    with torch.no_grad(), merged_adapter(policy) if adapter else nullcontext():
        for _ in range(2):
            with policy.rollout():
                policy(tokens_SL, None, torch.arange(32))
    assert [sum(node.target is F.linear for node in program.graph.nodes) for program in programs] == [4]
