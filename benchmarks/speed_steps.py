"""The sections of speed.py about what a captured step does: head, draws, the kernels of a block, and attention."""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from speed_bench import SpeedBench
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from unmask.core.order import low_confidence
from unmask.core.specs import Record
from unmask.core.token_sampling import TokenSampling
from unmask.rollout.cache import Cache
from unmask.rollout.draws import DrawSettings, Places, compiled_draws, draws
from unmask.rollout.graphs import Graphs

LONGEST = 24
"""Kernels that are listed."""


@torch.no_grad()
def steps(bench: SpeedBench) -> None:
    """Milliseconds of head and draws for some positions; then the kernels of one block with the dual cache."""
    settings = DrawSettings(bench.policy.mask_id, TokenSampling(), low_confidence, Record(), False)
    ways = {"plain": draws} | ({"compiled": compiled_draws()} if bench.policy.compiled else {})
    width, kind = bench.policy.lm.config.hidden_size, bench.policy.lm.lm_head.weight.dtype
    for count in (20, 8) if bench.toy else (640, 160, 20):
        hidden_QD = torch.randn(count, width, device=bench.device).to(kind)
        uniform_SQ = torch.rand(2, count, device=bench.device)
        places = Places(*uniform_SQ, torch.arange(count, device=bench.device))
        with bench.policy.rollout():
            logits_QV = bench.policy.head(hidden_QD)
            ms = {"head": 1e3 * bench.seconds(lambda h=hidden_QD: bench.policy.head(h), repeats=20)}
        for name, way in ways.items():
            ms[name] = 1e3 * bench.seconds(lambda w=way, x=logits_QV, p=places: w(x, p, settings), repeats=20)
        bench.note("steps", positions=count, milliseconds=ms)
    for rows in (2,) if bench.toy else (32, 8, 1):
        with bench.changed(graphs=Graphs()):
            for _ in range(3):  # the second captures
                bench.roll_blocks(rows, 1, cache=Cache())
            _profiled(bench, rows)


@torch.no_grad()
def attention(bench: SpeedBench) -> None:
    """Microseconds of attention by each of torch's kernels: the queries of a block, and of all columns, against the
    keys and values of all columns; and of reading keys and values once at the data sheet's 4.8 TB/s. Then dual-cache
    rollouts, captured, with the kernel that torch chooses and without cuDNN's."""
    config, dtype = bench.policy.lm.config, bench.policy.lm.lm_head.weight.dtype
    kernels = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
    for rows in (2,) if bench.toy else (32, 8, 1):
        shape = (rows, config.num_attention_heads, bench.width, config.hidden_size // config.num_attention_heads)
        key, value = (torch.randn(shape, device=bench.device, dtype=dtype) for _ in range(2))
        for queries in (bench.shape["block"], bench.width):
            query = torch.randn(rows, queries, *shape[1::2], device=bench.device, dtype=dtype).transpose(1, 2)
            found = {kernel.name: _microseconds(bench, kernel, query, key, value) for kernel in kernels}
            floor = 1e6 * (key.nbytes + value.nbytes) / 4.8e12
            bench.note("attention", rows=rows, queries=queries, microseconds=found, reading=floor)
    for rows in (2,) if bench.toy else (32, 8):
        for allowed, cudnn in (("all kernels", True), ("all but cuDNN's", False)):
            bench.note("attention", rows=rows, allowed=allowed, **_rollouts(bench, rows, cudnn))


def _rollouts(bench: SpeedBench, rows: int, cudnn: bool) -> dict[str, Any]:
    """Rollouts of two blocks of a completion; the layers are compiled again, since compiling chooses the kernel."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    torch.compiler.reset()
    if bench.policy.compiled:
        bench.policy.compile_layers()
    try:
        with bench.changed(graphs=Graphs()):
            times = bench.repeated(lambda: bench.roll_blocks(rows, 2, cache=Cache()), warm=2)  # the second captures
            bench.graphs.release()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    return {**times, "tokens_per_second": rows * 2 * bench.shape["block"] / times["seconds"]}


def _microseconds(bench: SpeedBench, kernel: SDPBackend, *inputs: Tensor) -> float | None:
    """None if the kernel does not take these tensors."""
    with sdpa_kernel(kernel), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # why it does not
        try:
            return 1e6 * bench.seconds(lambda: F.scaled_dot_product_attention(*inputs), repeats=2 if bench.toy else 50)
        except RuntimeError:
            return None


def _profiled(bench: SpeedBench, rows: int) -> None:
    on_gpu = bench.device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        bench.roll_blocks(rows, 1, cache=Cache())
        bench.wait()
    times = [
        ((event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3, event.count, event.key[:110])
        for event in found.key_averages()
    ]
    longest = [{"ms": ms, "calls": calls, "kernel": name} for ms, calls, name in sorted(times, reverse=True)[:LONGEST]]
    bench.note("steps", rows=rows, block_ms=sum(ms for ms, *_ in times), longest=longest)
