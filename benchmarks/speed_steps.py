"""The section of speed.py about what a captured step does: head, draws, and the kernels of a block."""

import torch
from speed_bench import SpeedBench
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
