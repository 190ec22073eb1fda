"""Sections of speed.py without an adapter: the trunk, and rollouts against the plain loop."""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from speed_bench import SpeedBench
from torch import Tensor

from unmask.core.schedule import even
from unmask.core.token_sampling import TokenSampling
from unmask.methods import diffu_grpo, dps
from unmask.models.load import Released
from unmask.rollout.cache import Cache
from unmask.rollout.denoiser import Denoiser
from unmask.rollout.graphs import Graphs
from unmask.training.mismatch import mismatch_metrics, replay_logprobs
from unmask.util.micro_batch import MicroBatch

# --- the baseline


@contextmanager
def as_written(policy: Released) -> Iterator[None]:
    """Under it the layers are not compiled."""
    layers, compiled = policy.layers, policy.compiled
    policy.layers, policy.compiled = list(policy.lm.model.layers), False
    try:
        yield
    finally:
        policy.layers, policy.compiled = layers, compiled


@torch.no_grad()
def plain_step(
    bench: SpeedBench, tokens_BL: Tensor, first: int, last: int, size: int, temperature: float = 1.0
) -> None:
    """Not compiled; all logits; double-precision Gumbel noise over the vocabulary; softmax; top-k row by row."""
    policy = bench.policy
    every_Q = torch.arange(tokens_BL.numel(), device=tokens_BL.device)
    with as_written(policy):
        hidden_QD = policy.hidden(tokens_BL, None, every_Q)
    logits_BLV = policy.lm.lm_head(hidden_QD).view(*tokens_BL.shape, -1)
    noisy = logits_BLV.to(torch.float64)
    noise = torch.rand_like(noisy)
    token_BL = (noisy.exp() / (-torch.log(noise)) ** temperature).argmax(-1)
    del noisy, noise
    confidence = torch.softmax(logits_BLV, dim=-1).gather(-1, token_BL[..., None]).squeeze(-1)
    del logits_BLV
    masked = tokens_BL == policy.mask_id
    confidence[:, last:] = -torch.inf
    confidence = torch.where(masked, confidence, -torch.inf)
    for row in range(len(tokens_BL)):
        _, place = torch.topk(confidence[row], k=size)
        tokens_BL[row, place] = token_BL[row, place]


def plain_seconds(bench: SpeedBench, rows: int, steps: int) -> float:
    """Seconds of a plain rollout, reckoned from its first `steps` steps: every step costs the same.

    Rows whose double-precision noise would not fit are done in parts, one after the other.
    """
    length, block = bench.shape["length"], bench.shape["block"]
    part = min(rows, 32)
    prompt = torch.tensor(bench.prompts(part), device=bench.device)
    masks = torch.full((part, length), bench.policy.mask_id, device=bench.device)
    tokens_BL = torch.cat([prompt, masks], dim=1)
    sizes = even(**bench.shape)[0]

    def some() -> None:
        for step in range(steps):
            plain_step(bench, tokens_BL, bench.prompt, bench.prompt + block, sizes[step % len(sizes)])

    plain_step(bench, tokens_BL.clone(), bench.prompt, bench.prompt + block, sizes[0])
    return bench.seconds(some, warm=False) / steps * bench.shape["steps"] * (rows / part)


# --- the sections


def peak(bench: SpeedBench) -> None:
    """The rate of one large matrix product: what "peak" means in the other sections."""
    size = 512 if bench.toy else 8192
    kind = torch.float32 if bench.device == "cpu" else torch.bfloat16
    a, b = (torch.randn(size, size, device=bench.device, dtype=kind) for _ in range(2))
    seconds = bench.seconds(lambda: a @ b, repeats=20)
    bench.peak = 2 * size**3 / seconds / 1e12
    bench.note("peak", tflops=bench.peak, size=size)


def trunk_tflop(bench: SpeedBench, rows: int, columns: int, seen: int) -> float:
    config = bench.policy.lm.config
    weights = sum(w.numel() for w in bench.policy.lm.model.layers[0].parameters())
    tokens = rows * columns
    attention = 4 * seen * config.hidden_size
    return tokens * config.num_hidden_layers * (2 * weights + attention) / 1e12


@torch.no_grad()
def trunk(bench: SpeedBench) -> None:
    """One pass of 32 canvases, and of the 32 columns of a block against a memory: eager and compiled."""
    rows = 4 if bench.toy else 32
    tokens = torch.tensor(bench.prompts(rows), device=bench.device)
    tokens = torch.cat([tokens, tokens.new_full((rows, bench.shape["length"]), bench.policy.mask_id)], dim=1)
    at = torch.arange(rows, device=bench.device) * bench.width + bench.prompt
    first, last = bench.prompt, bench.prompt + bench.shape["block"]
    for compiled in (False, True):
        if compiled:
            start = time.perf_counter()
            bench.policy.compile_layers()
            with bench.policy.rollout():
                bench.policy.hidden(tokens, None, at)
            bench.wait()
            bench.note("trunk", compile_seconds=time.perf_counter() - start)
        _, memory = bench.policy.remember(tokens, None, at)
        padded = torch.ones_like(tokens, dtype=torch.bool)
        padded[:, :8] = False
        passes = {
            "whole, some columns padding": (lambda m=padded: bench.policy.hidden(tokens, m, at), bench.width),
            "whole": (lambda: bench.policy.hidden(tokens, None, at), bench.width),
            "window": (lambda m=memory: bench.policy.hidden_window(m, tokens, first, last, at), last - first),
        }
        for name, (action, columns) in passes.items():
            with bench.policy.rollout() if compiled else nullcontext():
                seconds = bench.seconds(action, repeats=5)
            tflop = trunk_tflop(bench, rows, columns, bench.width)
            share = tflop / seconds / bench.peak
            bench.note("trunk", kind=name, compiled=compiled, rows=rows, ms=1e3 * seconds, share_of_peak=share)


def rollout(bench: SpeedBench) -> None:
    """Exact and cached rollouts against the plain loop."""
    small = 4 if bench.toy else 32
    plain = plain_seconds(bench, small, 4)
    bench.note("rollout", kind="plain loop", rows=small, seconds=plain, reckoned="4 of all steps timed")
    trace = bench.roll(small, cache=Cache()).trace
    exact = bench.seconds(lambda: bench.roll(small), warm=False)
    bench.note("rollout", kind="exact", rows=small, seconds=exact, speedup=plain / exact)
    for kind, cache in (("prefix cache", Cache(suffix=False)), ("dual cache", Cache())):
        seconds = bench.seconds(lambda c=cache: bench.roll(small, cache=c), warm=False)
        bench.note("rollout", kind=kind, rows=small, seconds=seconds, speedup=plain / seconds)
    apart = mismatch_metrics(trace, replay_logprobs(bench.policy, trace, MicroBatch(32))) if bench.toy else {}
    bench.note("rollout", kind="mismatch of the dual cache", **apart)
    large = 8 if bench.toy else 128
    plain = plain_seconds(bench, large, 2)
    seconds = bench.seconds(lambda: bench.roll(large, cache=Cache()), warm=False)
    bench.note(
        "rollout",
        kind="dual cache",
        rows=large,
        seconds=seconds,
        speedup=plain / seconds,
        reckoned="plain loop: 2 steps of 32 rows timed",
    )


def waiting(bench: SpeedBench) -> None:
    """The places at which a step waits for the device, by torch's own watch; there should be none."""
    if bench.device == "cpu":
        return
    plain = Denoiser.step

    def watched(denoiser: Denoiser, *arguments: int) -> None:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            plain(denoiser, *arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    for settings in (
        {},
        {"cache": Cache()},
        {"sampling": TokenSampling(0.8, top_k=20)},
        {"request": dps(diffu_grpo()).request},
    ):
        bench.roll(4, **settings)  # compiled and captured by now, which does wait
        Denoiser.step = watched
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            bench.roll(4, **settings)
        Denoiser.step = plain
        places = {f"{Path(w.filename).name}:{w.lineno}" for w in caught if "called a synchronizing" in str(w.message)}
        named = {name: str(value) for name, value in settings.items()}
        bench.note("waiting", rows=4, steps=bench.shape["steps"], places=sorted(places), how=named)


@contextmanager
def ending(bench: SpeedBench) -> Iterator[None]:
    """Under it the policy writes an end token from a third of the completion on."""
    policy, ends = bench.policy, [torch.zeros(0)]
    passes = ("hidden", "remember", "hidden_window", "hidden_columns")
    plain = {name: getattr(policy, name) for name in (*passes, "head")}

    def noting(name: str) -> Callable[..., Any]:
        def asked(*arguments: Any) -> Any:
            at_Q = arguments[-1]
            ends[0] = at_Q % bench.width >= bench.prompt + bench.shape["length"] // 3
            return plain[name](*arguments)

        return asked

    def head(hidden_QD: Tensor) -> Tensor:
        logits_QV = plain["head"](hidden_QD)
        logits_QV[:, policy.eos_id] += 1e4 * ends[0]
        return logits_QV

    for name in passes:
        setattr(policy, name, noting(name))
    policy.head = head
    try:
        yield
    finally:
        for name in plain:
            delattr(policy, name)


def early(bench: SpeedBench) -> None:
    """Rows that end at a third of the length retire."""
    rows = 4 if bench.toy else 32
    for name, cache in (("exact", None), ("dual cache", Cache())):
        whole = bench.seconds(lambda c=cache: bench.roll(rows, cache=c), warm=False)
        with ending(bench), bench.changed(graphs=Graphs()):
            third = bench.seconds(lambda c=cache: bench.roll(rows, cache=c), warm=False)
        bench.note("early", kind=name, rows=rows, seconds=third, full_length=whole, ratio=third / whole)
