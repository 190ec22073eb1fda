"""Measured rates of hardware; docs/dry_run.md names the source of each number.

The rows are those of benchmarks/results/speed.json, unless another file is named, LLaDA-8B's shapes on one H200;
tests/test_estimate_figures.py recomputes them.
"""

import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass, replace
from functools import cache

import torch

from unmask.studies.cost.gpus import GPUS
from unmask.studies.cost.network import Network


@dataclass(frozen=True)
class Efficiency:
    """The share of a large matrix product's rate that a pass reaches, and the cost outside the products."""

    whole: float
    window: float
    gradient: float
    vocabulary: float = 358.0
    """Bytes of memory traffic for each logit that is sampled from; row "early", dual cache, minus its passes."""
    launch: float = 1.25e-3
    """The least seconds of a layer in a pass, with an adapter; row "growth", length 256, minus its whole passes and its
    sampling."""
    bare_launch: float = 0.525e-3
    """The same without an adapter; row "few_rows", 8 rows."""
    replay: float = 0.0
    """Seconds of a layer in a captured step beside its products, or beside reading its weights if that takes longer."""
    captured_replay: float = 0.0744e-3
    """The same where steps are captured: speed_graphs.json, dual cache, 1 row, minus its products and the reading of
    weights. It includes what a step does outside the pass."""
    captured_vocabulary: float = 60.0
    """Bytes for each logit in a captured step: the head writes 2, the cast moves 6; banning MASK, log-softmax and draw
    move 52, or compiled 15 (docs/performance.md, captured steps)."""

    def captured(self) -> "Efficiency":
        """The same for steps that are captured as CUDA graphs, which launch nothing."""
        static = {"vocabulary": self.captured_vocabulary, "replay": self.captured_replay}
        return replace(self, launch=0.0, bare_launch=0.0, **static)


# The replay of EAGER: speed_blocks.json, SDAR-1.7B, 1 row.
# Rows "trunk", windows minus reading the cache, and wd1: of "methods_as_written" (not compiled) and of "methods".
EAGER = Efficiency(whole=0.605, window=0.555, gradient=0.482, captured_replay=0.26e-3)
COMPILED = Efficiency(whole=0.810, window=0.816, gradient=0.685, captured_vocabulary=23.0)
# Between LLaDA-MoE-7B-A1B and LLaDA2-mini, not compiled; benchmarks/results/speed_experts.json.
# Windows and replay: LLaDA2.0-mini, captured, 32 rows and 1; benchmarks/results/speed_blocks_experts.json.
EXPERTS = Efficiency(whole=0.26, window=0.11, gradient=0.18, launch=2e-3, bare_launch=2e-3, captured_replay=0.244e-3)
# The embedded model on one core, sampling included, against a product of its own size: median of 25 pairs of timings.
CPU = Efficiency(whole=0.2, window=0.2, gradient=0.2, vocabulary=0.0, launch=0.0, bare_launch=0.0)
H200_RATE = 772e12  # row "peak"
FP8 = 1.69
"""How many times faster the layers that can run in fp8 are there than in bf16, quantizing their inputs included;
speed_fp8.json, whole pass."""
WITHOUT_FP8 = ("a100-80",)
WITHOUT_GROUPED = ("a100-80", "4090")
"""GPUs on which experts are multiplied in a loop, which waits for the device (models/experts.py)."""
SHEET = H200_RATE / 989e12
"""The share of its data sheet that the H200 reaches; other GPUs are assumed to reach the same share."""


@dataclass(frozen=True)
class Hardware:
    name: str
    rate: float
    """Operations a second of a large matrix product in the type of the weights."""
    fp8_rate: float | None
    """The same in fp8; None: it has no fp8."""
    bandwidth: float
    """Bytes of memory a second."""
    memory: float
    """GiB."""
    shares: Efficiency
    source: str
    loops_over_experts: bool = False
    """It has no kernel for grouped products, so experts are multiplied one after the other."""


def gpu(key: str, network: Network, compiled: bool) -> Hardware:
    name, half, single, bandwidth, memory = GPUS[key]
    rate = SHEET * 1e12 * (half if network.item == 2 else single)
    fp8 = None if key in WITHOUT_FP8 else SHEET * 1e12 * half * FP8
    known = key == "h200" and network.item == 2
    shares = EXPERTS if network.routed else COMPILED if compiled else EAGER
    source = "rates measured" if known else "rates from its data sheet, scaled by the share that the H200 reached"
    return Hardware(name, rate, fp8, bandwidth * 1e12, memory, shares, source, key in WITHOUT_GROUPED)


def cpu(network: Network) -> Hardware:
    deep, wide = min(1024, network.width), min(1024, network.inner)
    # Few rows: without instructions for it bf16 takes a hundred times as long as fp32.
    rate = cpu_rate(128, deep, wide, "bfloat16" if network.item == 2 else "float32")
    threads = torch.get_num_threads()
    source = f"{rate / 1e9:.0f} GFLOP/s timed, {threads} thread{'s' * (threads > 1)}"
    return Hardware("CPU", rate, rate, 1e10, cpu_memory(), CPU, source)


def hardware_of(name: str | None, network: Network, compiled: bool, tiny: bool) -> Hardware | str:
    """By name; None: this machine, the CPU for the embedded model. A note if the rates are not known."""
    if name in GPUS:
        return gpu(name, network, compiled)
    at_hand = None if tiny or name == "cpu" else gpu_at_hand()
    if at_hand is None:
        return cpu(network)
    for key, word in (("h200", "H200"), ("h100", "H100"), ("a100-80", "A100.*80"), ("4090", "4090")):
        if re.search(word, at_hand[0]):
            return replace(gpu(key, network, compiled), name=at_hand[0], memory=at_hand[1])
    return f"{at_hand[0]}, {at_hand[1]:.0f} GiB: its rates are not known; name a similar GPU with --hardware"


def gpu_at_hand() -> tuple[str, float] | None:
    """The first GPU's name and memory in GiB, from nvidia-smi, since torch would start CUDA. None without a GPU."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    if shutil.which(command[0]) is None:
        return None
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    name, _, memory = output.partition("\n")[0].rpartition(",")
    return (name.strip(), float(memory) / 1024) if name else None


@cache
def cpu_rate(rows: int, deep: int, wide: int, dtype: str, seconds: float = 0.2) -> float:
    """Operations a second of a (rows, deep) by (deep, wide) product on this CPU, timed for `seconds`."""
    kind, rng = getattr(torch, dtype), torch.Generator().manual_seed(0)
    a, b = (torch.rand(shape, generator=rng).to(kind) for shape in ((rows, deep), (deep, wide)))
    a @ b
    start, count = time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < seconds or not count:
        a @ b
        count += 1
    return 2 * rows * deep * wide * count / spent


def cpu_memory() -> float:
    """GiB of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
