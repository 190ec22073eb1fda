"""In rollouts the last layer computes only the positions that are asked for: the same states, with fewer operations."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from mixtures import mixture
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from helpers import assert_close
from naive import MASK, decoder
from unmask.models.fp8 import Fp8Layers, has_fp8
from unmask.models.tiny import TinyShape, tiny_policy

ROWS, WIDTH = 3, 16
MODELS = {
    "llama": partial(decoder, dtype=torch.float64),
    "shifted": partial(decoder, dtype=torch.float64, shift=True, rotary_fp32=True),
    "qwen3": partial(decoder, "qwen3", dtype=torch.float64),
    "block-causal": partial(decoder, "qwen3", dtype=torch.float64, causal_block=4),
    "block-causal, shifted": partial(decoder, dtype=torch.float64, causal_block=4, shift=True),
    "tiny": partial(tiny_policy, TinyShape(width=32, layers=3, hidden=64), seed=1),
}
COLUMNS = torch.tensor([[9, 11, 8], [8, 9, 10], [11, 8, 9]])
"""The columns that are asked, in any order."""


def canvases() -> Tensor:
    tokens_SL = torch.randint(1, 20, (ROWS, WIDTH), generator=torch.Generator().manual_seed(0))
    tokens_SL[:, 8:] = MASK
    return tokens_SL


def passes(policy, padded: bool, even: bool) -> list[Tensor]:
    """The states of every kind of pass, and the memory that each leaves."""
    tokens_SL, attended_SL = canvases(), None
    if padded:
        attended_SL = torch.ones(ROWS, WIDTH, dtype=torch.bool)
        attended_SL[0, :4] = attended_SL[2, :2] = False
    at_Q, nowhere = (torch.arange(ROWS)[:, None] * WIDTH + COLUMNS).flatten(), torch.zeros(0, dtype=torch.long)
    with torch.no_grad(), policy.rollout(even=True) if even else nullcontext():
        found = [policy.hidden(tokens_SL, attended_SL, at_Q)]
        first, memory = policy.remember(tokens_SL, attended_SL, at_Q)
        _, again = policy.remember(tokens_SL, attended_SL, nowhere)
        found += [first, *memory.keys, *memory.values, *again.keys, *again.values]
        changed_SL = tokens_SL.clone()
        changed_SL[:, 8] = 5
        if policy.causal_block is None:
            found.append(policy.hidden_window(memory, changed_SL, 8, 12, at_Q))
            found.append(policy.hidden_columns(memory, tokens_SL, torch.arange(8, 12), at_Q))
        else:
            column_SW = torch.arange(8, 12).expand(ROWS, -1)
            found.append(policy.hidden_blocks(memory, changed_SL, column_SW, 12, at_Q))
        return [*found, *memory.keys, *memory.values]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_states_and_the_memory_are_those_of_a_full_layer(name: str, padded: bool) -> None:
    policy = MODELS[name]()
    some, every = (passes(policy, padded, even) for even in (True, False))
    for mine, full in zip(some, every, strict=True):
        assert_close(mine, full, 1e-5 if name == "tiny" else 1e-12)


def test_so_they_are_in_a_layer_with_one_matrix_for_queries_keys_and_values(tmp_path) -> None:
    policy = mixture(tmp_path, "LLaDA2", torch.float64)
    for mine, full in zip(passes(policy, True, True), passes(policy, True, False), strict=True):
        assert_close(mine, full, 1e-12)


@pytest.mark.skipif(not has_fp8(torch.device("cpu")), reason="this build of torch has no fp8 product on a CPU")
def test_so_they_are_in_fp8() -> None:
    """Every token has its own scale, so fewer tokens change nothing."""
    policy = tiny_policy(TinyShape(width=32, layers=2, hidden=64), seed=1)
    with Fp8Layers(policy).used():
        for mine, full in zip(passes(policy, False, True), passes(policy, False, False), strict=True):
            assert_close(mine, full, 1e-2)


def test_queries_output_and_feed_forward_half_are_computed_at_the_asked_positions_alone() -> None:
    policy = decoder(dtype=torch.float64)
    tokens_SL, at_Q = canvases(), (torch.arange(ROWS)[:, None] * WIDTH + COLUMNS).flatten()

    def counted(even: bool) -> int:
        with torch.no_grad(), policy.rollout(even), FlopCounterMode(display=False) as counter:
            policy.hidden(tokens_SL, None, at_Q)
        return counter.flop_counts["Global"][torch.ops.aten.mm]

    width, inner, saved = 16, 24, ROWS * WIDTH - at_Q.numel()
    assert counted(False) - counted(True) == 2 * saved * (2 * width * width + 3 * width * inner)
