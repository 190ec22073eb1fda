"""The expert layer: grouped products against a loop over experts, forward and backward."""

import pytest
import torch

from unmask.models.experts import (
    ExpertFeedForward,
    Mixture,
    SoftmaxRouter,
    grouped_linear,
    has_grouped_kernel,
    looped_linear,
)


def stacks(rows: int, dtype: torch.dtype):
    rng = torch.Generator().manual_seed(rows)
    x_RD = torch.randn(rows, 8, generator=rng).to(dtype).requires_grad_()
    weight_EOD = torch.randn(4, 16, 8, generator=rng).to(dtype).requires_grad_()
    return x_RD, weight_EOD


@pytest.mark.parametrize("ends", [(3, 3, 7, 12), (0, 0, 0, 12), (12, 12, 12, 12), (0, 0, 0, 0)])
def test_grouped_products_are_those_of_a_loop(ends):
    """Experts without tokens, all tokens at one expert, and no tokens; to 1e-6, forward and backward."""
    x_RD, weight_EOD = stacks(ends[-1], torch.float32)
    end_E = torch.tensor(ends, dtype=torch.int32)
    assert has_grouped_kernel(x_RD, weight_EOD)
    results = []
    for product in (grouped_linear, looped_linear):
        y_RO = product(x_RD, weight_EOD, end_E)
        results.append((y_RO, *torch.autograd.grad(y_RO.square().sum(), (x_RD, weight_EOD), materialize_grads=True)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # the kernel, and the loop
def test_a_layer_without_tokens_has_an_empty_output_and_no_gradient(dtype):
    layer = Mixture(SoftmaxRouter(8, 4, 2, bias=False, normalised=True), 8, shared=0).to(dtype)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight)
    y_SWD = layer(torch.zeros(1, 0, 8, dtype=dtype, requires_grad=True))
    assert y_SWD.shape == (1, 0, 8)
    y_SWD.square().sum().backward()
    assert not any(weight.grad.any() for weight in layer.experts.parameters())


def test_operands_that_the_kernel_does_not_take_go_through_the_loop():
    assert not has_grouped_kernel(torch.zeros(2, 8).double(), torch.zeros(4, 16, 8).double())
    assert not has_grouped_kernel(torch.zeros(2, 6), torch.zeros(4, 16, 6))  # rows of 24 bytes
    assert not has_grouped_kernel(torch.zeros(2, 8).bfloat16(), torch.zeros(4, 12, 8).bfloat16())


def test_the_layer_is_the_weighted_sum_over_each_tokens_experts():
    torch.manual_seed(0)
    layer = ExpertFeedForward(5, 8, 12).double()
    for weight in layer.parameters():
        torch.nn.init.normal_(weight)
    x_TD = torch.randn(7, 8, dtype=torch.float64, requires_grad=True)
    weight_TK = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)
    expert_TK = torch.stack([torch.randperm(5)[:2] for _ in range(7)])
    gate, up, down = layer.gate_proj.weight, layer.up_proj.weight, layer.down_proj.weight

    def by_hand():
        rows = []
        for t in range(7):
            terms = [
                weight_TK[t, k] * (down[e] @ (torch.nn.functional.silu(gate[e] @ x_TD[t]) * (up[e] @ x_TD[t])))
                for k, e in enumerate(expert_TK[t].tolist())
            ]
            rows.append(sum(terms))
        return torch.stack(rows)

    wanted = [x_TD, weight_TK, gate, up, down]
    for one, other in [(layer(x_TD, weight_TK, expert_TK), by_hand())]:
        torch.testing.assert_close(one, other)
        slopes = [torch.autograd.grad(y.square().sum(), wanted, retain_graph=True) for y in (one, other)]
        for slope, theirs in zip(*slopes, strict=True):
            torch.testing.assert_close(slope, theirs)
