"""The section of speed.py about the matrix products of a pass, by the library that computes them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from speed_bench import SpeedBench
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]


@torch.no_grad()
def products(bench: SpeedBench) -> None:
    """TFLOP/s of all products of a pass, layer by layer with their own weights, captured: for the columns of a block
    and for whole canvases of 32 rows. With the library that torch chooses, with cuBLAS and cuBLASLt by name, as
    weights times transposed states, and with torch's own kernels, chosen by timing them."""
    layers = bench.policy.lm.model.layers[: 2 if bench.toy else None]
    weights = [weight for layer in layers for weight in layer.parameters() if weight.ndim == 2]
    rows, on_gpu = 2 if bench.toy else 32, bench.device == "cuda"
    for columns in (bench.shape["block"], bench.width):
        tokens = rows * columns
        states = {
            width: torch.randn(tokens, width, device=bench.device, dtype=weights[0].dtype)
            for width in {weight.shape[1] for weight in weights}
        }
        transposed = {width: state.T.contiguous() for width, state in states.items()}
        with torch._inductor.config.patch(max_autotune_gemm=True):
            timed = torch.compile(lambda x, w: F.linear(x, w), dynamic=False) if on_gpu else F.linear
            ways: dict[str, tuple[str, dict[int, Tensor], Product]] = {
                "torch's choice": ("default", states, F.linear),
                "cuBLAS": ("cublas", states, F.linear),
                "cuBLASLt": ("cublaslt", states, F.linear),
                "cuBLAS, transposed": ("cublas", transposed, lambda x, w: w @ x),
                "cuBLASLt, transposed": ("cublaslt", transposed, lambda x, w: w @ x),
                "timed and chosen by the compiler": ("default", states, timed),
            }
            found = {name: _seconds(bench, weights, *way) for name, way in ways.items()}
        tflop = 2e-12 * tokens * sum(weight.numel() for weight in weights)
        bench.note("products", rows=rows, columns=columns,
                   tflops={name: tflop / seconds for name, seconds in found.items()})  # fmt: skip


def _seconds(
    bench: SpeedBench, weights: list[Tensor], library: str, states: dict[int, Tensor], product: Product
) -> float:
    """The median of five timings of all products, one after the other."""

    def all_products() -> None:
        for weight in weights:
            product(states[weight.shape[1]], weight)

    with _preferred(library, bench.device == "cuda"):
        all_products()
        action = all_products
        if bench.device == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                all_products()
            action = graph.replay
        return bench.repeated(action, repetitions=5)["seconds"]


@contextmanager
def _preferred(library: str, on_gpu: bool) -> Iterator[None]:
    """Use this library for products inside the block."""
    if not on_gpu:
        yield
        return
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(library)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)
