"""Operations and bytes of a dry run, counted in a real network on the CPU."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from unmask.config import Config, parse_config
from unmask.config.sections import OptimizerConfig
from unmask.core.options import LoraOptions
from unmask.models import load_model, save, tiny_policy
from unmask.models.load import outline
from unmask.models.lora import add_adapter, merged_adapter, trainable_parameters
from unmask.models.tiny import TinyShape
from unmask.studies.cost.counting import Tally
from unmask.studies.cost.estimate import GIB, estimate, operations
from unmask.studies.cost.network import network_of
from unmask.training.optim import make_optimizer

WIDTH, HIDDEN, LAYERS, RANK = 32, 48, 2, 3
ROWS, COLUMNS = 3, 40


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    save(tiny_policy(TinyShape(width=WIDTH, layers=LAYERS, heads=2, hidden=HIDDEN, max_length=64), seed=1), folder)
    return str(folder)


def trained(small: str, full: bool, dtype: str = "float32") -> tuple[Any, Config]:
    """A policy to be trained, and the configuration of its training."""
    policy = load_model(small, getattr(torch, dtype)).requires_grad_(True)
    if not full:
        add_adapter(policy, LoraOptions(rank=RANK), seed=0)
    few = {"prompts": 1, "group": 2, "eval": {"prompts": 1, "samples": 1}, **({} if full else {"lora": {"rank": RANK}})}
    rollout = {"cache": "dual", "length": 16, "block": 8}
    return policy, parse_config(
        {"model": small, "device": "cpu", "full": full, "dtype": dtype, "rollout": rollout, **few}
    )


def attention_operations(products: int, query: Any, *others: Any, **_: Any) -> int:
    """torch counts none for attention on a CPU. In a backward pass the first argument is the gradient."""
    rows, heads, columns, channels = query
    return products * 2 * rows * heads * columns * others[0][2] * channels


ATEN, NAME = torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"
ATTENTION = {
    getattr(ATEN, NAME + end): partial(attention_operations, products) for end, products in (("", 2), ("_backward", 5))
}


def counted(action: Any) -> int:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        action()
    return counter.get_total_flops()


@pytest.mark.parametrize("full", [True, False])
def test_operations_are_those_that_torch_counts(full: bool, small: str) -> None:
    policy, config = trained(small, full)
    network, at_Q = network_of(config, outline(small)), torch.arange(0, ROWS * COLUMNS, 5)
    tokens_SL, tally = torch.full((ROWS, COLUMNS), 5), Tally(ROWS, ROWS * COLUMNS, len(at_Q), ROWS)
    with torch.no_grad():
        assert operations(network, "update, no gradient", tally, COLUMNS) == counted(
            lambda: policy(tokens_SL, None, at_Q)
        )
        _, memory = policy.remember(tokens_SL, None, at_Q)
        window = Tally(ROWS, ROWS * 8, ROWS, ROWS)
        at_R = torch.arange(ROWS) * COLUMNS + 20
        assert operations(network, "rollout, window", window, COLUMNS) == counted(
            lambda: policy.head(policy.hidden_window(memory, tokens_SL, 16, 24, at_R))
        )
    # The embedding is frozen with an adapter: no gradient goes through the first queries, keys and values to it.
    unneeded = 0 if full else 3 * 2 * ROWS * COLUMNS * (WIDTH * WIDTH + RANK * WIDTH)
    assert operations(network, "update, gradient", tally, COLUMNS) - unneeded == counted(
        lambda: policy(tokens_SL, None, at_Q).sum().backward()
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("full", [True, False])
def test_bytes_are_those_of_the_tensors(full: bool, dtype: str, small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, config = trained(small, full, dtype)
    found = estimate(config)
    forecast = {part: size * GIB for part, size in found.memory_gib["rollout"].items()}
    gradients = found.memory_gib["update"]["gradients"] * GIB

    def size(tensors: Any) -> int:
        return sum(tensor.numel() * tensor.itemsize for tensor in tensors)

    learning = trainable_parameters(policy)
    frozen = [weight for weight in policy.parameters() if not weight.requires_grad]
    assert forecast["weights"] == size(learning if full else frozen)
    assert forecast["adapter"] == (0 if full else size(learning))
    optimizer = make_optimizer(policy, OptimizerConfig())
    policy(torch.full((ROWS, COLUMNS), 5), None, torch.arange(COLUMNS)).sum().backward()
    optimized = [weight for group in optimizer.param_groups for weight in group["params"]]
    optimizer.step()
    assert gradients == size(weight.grad for weight in optimized)
    inner = getattr(optimizer, "inner", optimizer)
    moments = [each[name] for each in inner.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert forecast["Adam"] == size(moments)
    assert forecast["fp32 copies"] == size(getattr(optimizer, "masters", []))
    rows = max(tally.most for kind, tally in found.passes.items() if kind.startswith(("rollout", "evaluation")))
    with torch.no_grad():
        _, memory = policy.remember(torch.full((rows, found.prompt + 16), 5), None, torch.tensor([0]))
    assert forecast["KV cache"] == size([*memory.keys, *memory.values])
    if not full:
        copies, clone = [], torch.Tensor.clone
        monkeypatch.setattr(torch.Tensor, "clone", lambda tensor: copies.append(tensor) or clone(tensor))
        with merged_adapter(policy):
            assert forecast["copy of adapted layers"] == size(copies)
