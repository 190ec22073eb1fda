"""The section of speed.py about fp8: products, passes, and rollouts beside those in bf16 of the same run."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from speed_bench import SpeedBench
from torch import Tensor

from unmask.models.fp8 import Fp8Layers, Fp8Linear, quantized
from unmask.rollout.cache import Cache
from unmask.training.mismatch import mismatch_metrics, replay_logprobs
from unmask.util.micro_batch import MicroBatch

SHARE = 16
"""An exact rollout is timed with this many times fewer steps; every step costs the same."""


def fp8(bench: SpeedBench) -> None:
    """Products and passes; then rollouts of 32 rows, exact and with the dual cache, in bf16 and in fp8."""
    layers = Fp8Layers(bench.policy)
    _products(bench)
    used = {"bf16": nullcontext, "fp8": layers.used}

    def quantize() -> None:
        with layers.used():
            pass

    bench.note("fp8", kind="quantizing all layers", **bench.repeated(quantize))
    rows = 4 if bench.toy else 32
    _passes(bench, rows, used)
    shape, share = bench.shape, 4 if bench.toy else SHARE
    kinds: dict[str, dict[str, Any]] = {
        "dual cache": {"cache": Cache()},
        "exact": {"steps": shape["steps"] // share},
    }
    for kind, settings in kinds.items():
        base = 0.0
        for name, context in used.items():
            with context():
                times = bench.repeated(lambda s=settings: bench.roll(rows, **s), warm=2)
            factor = share if kind == "exact" else 1
            whole = {key: factor * times[key] for key in ("seconds", "fastest", "slowest")}
            base = base or whole["seconds"]
            bench.note(
                "fp8",
                kind=kind,
                precision=name,
                rows=rows,
                **times | whole,
                tokens_per_second=rows * shape["length"] / whole["seconds"],
                times_bf16=base / whole["seconds"],
                **({"reckoned": f"a {share}th of the steps timed"} if factor > 1 else {}),
            )
    # How far the layers move log-probabilities, on random weights, in a short rollout.
    with layers.used():
        trace = bench.roll(rows // 4, length=shape["block"], steps=shape["block"] // 4).trace
    exact_BL = replay_logprobs(bench.policy, trace, MicroBatch(rows))
    bench.note("fp8", kind="mismatch on random weights", rows=rows // 4, **mismatch_metrics(trace, exact_BL))


def _products(bench: SpeedBench) -> None:
    """The three shapes of a layer's products: bf16; fp8 of quantized factors, summed in fp32 or fast; quantizing; and
    the error of the product, as a share of its norm."""
    config, dtype = bench.policy.lm.config, bench.policy.lm.lm_head.weight.dtype
    width, inner = config.hidden_size, config.intermediate_size
    quantizing = torch.compile(quantized) if bench.policy.compiled else quantized
    for rows in (64, 128) if bench.toy else (256, 1024, 14592):
        for deep, wide in ((width, width), (width, inner), (inner, width)):
            x_ND, weight_MD = (
                torch.randn(shape, device=bench.device).to(dtype) for shape in ((rows, deep), (wide, deep))
            )
            copy = Fp8Linear(weight_MD)
            copy.set_weight(weight_MD, None)
            rows_ND, scale_N1 = quantized(x_ND)

            def scaled(fast: bool, x: Tensor = rows_ND, a: Tensor = scale_N1, c: Fp8Linear = copy) -> Tensor:
                how = {"out_dtype": torch.bfloat16, "use_fast_accum": fast}
                return torch._scaled_mm(x, c.weight.t(), scale_a=a, scale_b=c.scale_1M, **how)

            actions = {
                "bf16": lambda x=x_ND, w=weight_MD: x @ w.t(),
                "fp8": lambda s=scaled: s(False),
                "fp8, fast sums": lambda s=scaled: s(True),
                "quantizing": lambda x=x_ND: quantizing(x),
            }
            exact_NM = x_ND.float() @ weight_MD.float().t()
            errors = {
                name: float((actions[name]().float() - exact_NM).norm() / exact_NM.norm())
                for name in ("bf16", "fp8", "fp8, fast sums")
            }
            micros = {name: 1e6 * bench.seconds(action, repeats=20) for name, action in actions.items()}
            times = {name: micros["bf16"] / micros[name] for name in ("fp8", "fp8, fast sums")}
            shape = {"rows": rows, "inputs": deep, "outputs": wide}
            bench.note("fp8", kind="product", **shape, microseconds=micros, times=times, errors=errors)


@torch.no_grad()
def _passes(bench: SpeedBench, rows: int, used: dict[str, Any]) -> None:
    """One pass of whole canvases, and of a block against cached keys and values."""
    tokens = torch.tensor(bench.prompts(rows), device=bench.device)
    tokens = torch.cat([tokens, tokens.new_full((rows, bench.shape["length"]), bench.policy.mask_id)], dim=1)
    at = torch.arange(rows, device=bench.device) * bench.width + bench.prompt
    first, last = bench.prompt, bench.prompt + bench.shape["block"]
    for name, context in used.items():
        inside: AbstractContextManager[None] = context()
        with inside, bench.policy.rollout():
            _, memory = bench.policy.remember(tokens, None, at)
            for kind, action in {
                "whole pass": lambda: bench.policy.hidden(tokens, None, at),
                "window": lambda m=memory: bench.policy.hidden_window(m, tokens, first, last, at),
            }.items():
                times = bench.repeated(lambda a=action: [a() for _ in range(5)])
                ms = {key: 200 * times[key] for key in ("seconds", "fastest", "slowest")}
                bench.note("fp8", kind=kind, precision=name, rows=rows, milliseconds=ms)
