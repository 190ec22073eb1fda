"""Sections of speed.py about cost: updates as a share of the peak, and scale beside the dry run's forecast."""

import copy
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from speed_bench import SpeedBench, llada
from speed_rollout import peak
from speed_training import Trainer
from torch import Tensor

from unmask.config import Config, parse_config
from unmask.config.sections import OptimizerConfig
from unmask.core.method import Method
from unmask.methods import agrpo, coupled_grpo, daca, diffu_grpo
from unmask.models.known import KNOWN
from unmask.models.load import outline
from unmask.models.lora import merged_adapter
from unmask.rollout.cache import Cache
from unmask.rollout.graphs import Graphs
from unmask.rollout.sample import Rollouts
from unmask.studies.cost.counting import Tally
from unmask.studies.cost.estimate import estimate, operations
from unmask.studies.cost.network import network_of
from unmask.training.loss_terms import ScoredRollouts, Scorer, loss_terms
from unmask.training.optim import make_optimizer
from unmask.training.update import update
from unmask.util.micro_batch import MicroBatch

# --- the dry run ----------------------------------------------------------------------------------------------------


@contextmanager
def described(bench: SpeedBench) -> Iterator[Path]:
    """A folder with the config.json of the bench's model."""
    shape = bench.policy.lm.config
    fields = {
        **KNOWN["GSAI-ML/LLaDA-8B-Instruct"],
        "d_model": shape.hidden_size,
        "n_layers": shape.num_hidden_layers,
        "n_heads": shape.num_attention_heads,
        "n_kv_heads": shape.num_key_value_heads,
        "mlp_hidden_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "embedding_size": shape.vocab_size,
        "torch_dtype": str(bench.policy.lm.lm_head.weight.dtype).removeprefix("torch."),
    }
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        yield Path(folder)


def config_of(bench: SpeedBench, folder: Path, rows: int, length: int, micro_batch: int, **more: Any) -> Config:
    group = min(rows, 8)
    block = bench.shape["block"]
    rollout = {"length": length, "steps": length // 2, "block": block, "cache": "dual", "micro_batch_size": rows}
    lora = {} if more.get("full") else {"lora": {"rank": 4 if bench.toy else 128}}
    keys = {"task": "countdown", "method": "coupled_grpo", "compile": bench.policy.compiled, "device": "cpu", **lora}
    batch = {"prompts": rows // group, "group": group, "micro_batch_size": micro_batch}
    evaluation = {"prompts": 1, "samples": 1}
    return parse_config(
        {"model": str(folder), "rollout": {**rollout, "mismatch": 0.0}, "eval": evaluation, **keys, **batch, **more}
    )


def forecast(bench: SpeedBench, config: Config) -> dict[str, float]:
    found = estimate(config, "cpu" if bench.toy else "h200", prompt=bench.prompt)
    peaks = {f"{name}_gib": parts["peak"] for name, parts in found.memory_gib.items()}
    return {"rollout_s": found.times[-1].rollout_s, "update_s": found.times[-1].update_s, **peaks}


# --- updates --------------------------------------------------------------------------------------------------------

KERNELS = {
    "attention": r"flash|fmha|attention|sdpa|cudnn",
    "products": r"gemm|nvjet|xmma|cutlass|cublas|addmm|aten::mm|aten::bmm|splitK",
    "fused by the compiler": r"triton",
    "softmax": r"[sS]oft[mM]ax",
    "optimizer and norm": r"multi_tensor|adam|foreach",
    "copies": r"[mM]emcpy|[mM]emset|copy|Cat",
    "elementwise": r"elementwise|vectorized|reduce",
}


def updates(bench: SpeedBench) -> None:
    """Updates of 16 rollouts, LoRA r128: seconds, share of the peak, and a profile of the kernels."""
    if not bench.peak:
        peak(bench)
    groups = (2, 4) if bench.toy else (2, 8)
    rows = groups[0] * groups[1]
    old = {"anchor": 0.5, "kl": 0.05, "negative": 1.0}
    draws = 6 if bench.toy else 24
    cells: list[tuple[str, Method, int, Method]] = [
        ("coupled_grpo", coupled_grpo(), 16, coupled_grpo()),
        ("diffu_grpo + daca", daca(diffu_grpo(), strata=4, **old), 16, daca(diffu_grpo(), strata=4, **old)),
        (f"agrpo, {draws} draws", agrpo(draws=draws), draws, agrpo(draws=4)),
    ]
    rolled: dict[str, Rollouts] = {}
    for name, method, micro_batch, short in cells:
        trainer = Trainer(bench, micro_batch)
        if name not in rolled:
            rolled[name] = bench.roll(rows, groups[1], request=method.request, cache=Cache())
        trainer.train(short, rolled[name])  # compiles
        tallies: dict[str, Tally] = {}
        spent: list[dict[str, float]] = []

        def once(m: Method = method, t: Trainer = trainer, s: Any = spent, r: Rollouts = rolled[name]) -> None:
            s.append(_train_in_parts(t, m, r))

        def counted(action: Any = once, found: dict[str, Tally] = tallies) -> None:
            found.clear()
            with tallied(bench, found):
                action()

        found = bench.cell(counted, warm=0)
        if "out_of_memory" in found:
            bench.note("updates", method=name, rows=rows, micro_batch=micro_batch, **found)
            continue
        with described(bench) as folder:
            network = network_of(config_of(bench, folder, rows, bench.shape["length"], 16), outline(folder))
        work = {kind: operations(network, kind, tally, bench.width) for kind, tally in tallies.items()}
        parts = {key: median(part[key] for part in spent) for key in ("no_gradient_s", "gradient_s")}
        rate = bench.peak * 1e12
        bench.note(
            "updates",
            method=name,
            rows=rows,
            micro_batch=micro_batch,
            **found,
            share_of_peak=sum(work.values()) / found["seconds"] / rate,
            gradient_share_of_peak=work["update, gradient"] / parts["gradient_s"] / rate,
            **parts,
            tflop=sum(work.values()) / 1e12,
            states={kind: tally.states for kind, tally in tallies.items()},
        )
        profile = profiled(bench, trainer, short, rolled[name])
        bench.note("updates", method=f"{name}, profile of a short update", micro_batch=micro_batch, profile=profile)


def _train_in_parts(trainer: Trainer, method: Method, rollouts: Rollouts) -> dict[str, float]:
    """`Trainer.train` with a clock between the passes without gradient and those with it."""
    bench, rng = trainer.bench, torch.Generator().manual_seed(0)
    reward_B = torch.rand(len(rollouts.trace), dtype=torch.float64, generator=rng).to(bench.device)
    scorer = Scorer(bench.policy, trainer.reference if method.needs_reference else None, trainer.micro_batch)
    terms: list[Any] = []
    first = bench.seconds(
        lambda: terms.extend(loss_terms(method, ScoredRollouts(rollouts, reward_B), scorer, rng)), warm=False
    )
    second = bench.seconds(
        lambda: update(bench.policy, trainer.optimizer, terms[0], trainer.micro_batch, 1.0), warm=False
    )
    return {"no_gradient_s": first, "gradient_s": second}


@contextmanager
def tallied(bench: SpeedBench, tallies: dict[str, Tally]) -> Iterator[None]:
    """Inside it passes of the policy, also as its reference, are counted as a dry run counts them."""
    plain = bench.policy.hidden

    def counted(tokens_SL: Tensor, attended_SL: Tensor | None, at_Q: Tensor) -> Tensor:
        kind = "update, gradient" if torch.is_grad_enabled() else "update, no gradient"
        tallies.setdefault(kind, Tally()).add(*tokens_SL.shape, len(at_Q))
        return plain(tokens_SL, attended_SL, at_Q)

    bench.policy.hidden = counted
    try:
        yield
    finally:
        del bench.policy.hidden


def profiled(bench: SpeedBench, trainer: Trainer, method: Method, rollouts: Rollouts) -> dict[str, Any]:
    """Seconds of the kernels of one update by kind, the longest of them, and the share of the time in which one ran."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = bench.device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        seconds = bench.seconds(lambda: trainer.train(method, rollouts), warm=False)
    events = [
        (event.key, (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6, event.count)
        for event in found.key_averages()
    ]
    kinds: dict[str, float] = defaultdict(float)
    for name, spent, _ in events:
        kinds[next((kind for kind, words in KERNELS.items() if re.search(words, name)), "other")] += spent
    longest = sorted(events, key=lambda event: -event[1])[:25]
    return {
        "seconds": seconds,
        "busy": sum(kinds.values()) / seconds,
        "kinds": dict(sorted(kinds.items(), key=lambda item: -item[1])),
        "longest": [{"kernel": name[:120], "seconds": spent, "calls": count} for name, spent, count in longest],
    }


# --- scale ----------------------------------------------------------------------------------------------------------


def scale(bench: SpeedBench) -> None:
    """LoRA r128: dual-cache rollouts by rows and length, and updates of 8 rows by length, after their forecasts."""
    rolled = [(8, 256), (32, 256), (128, 256), (256, 256), (32, 512), (32, 1024), (8, 2048), (32, 2048)]
    updated = [256, 512, 1024, 2048]
    if bench.toy:
        rolled, updated = [(2, 32), (4, 64)], [32, 64]
    forecasts = _forecasts(bench, rolled, updated)
    trainer = Trainer(bench, 8)
    _measure_updates(bench, "LoRA", updated, forecasts, trainer.optimizer, trainer.reference)

    def roll(rows: int, length: int) -> None:
        with merged_adapter(bench.policy):
            bench.roll_blocks(rows, 1, bench.prompt + length, cache=Cache())

    def merge() -> None:
        with merged_adapter(bench.policy):
            pass

    _measure_rollouts(bench, "LoRA", rolled, forecasts, roll, bench.repeated(merge)["seconds"])


def scale_full(bench: SpeedBench) -> None:
    """All weights, with half of the layers, whose state fits one GPU; then one update with all of them."""
    compiled, layers = bench.policy.compiled, bench.policy.lm.config.num_hidden_layers
    for number, (rolled, updated) in {
        layers // 2: ([(32, 512)], [256, 2048]),
        layers: ([], [256]),
    }.items():
        if bench.toy:
            rolled, updated = [(2, 32)] * bool(rolled), [32]
        bench.policy = None  # freed before the next is built
        bench.policy = llada(bench.device, bench.toy, number).requires_grad_(True)
        reference, kind = copy.deepcopy(bench.policy).requires_grad_(compiled), f"full, {number} layers"
        for policy in (bench.policy, reference) if compiled else ():
            policy.compile_layers()
        forecasts = _forecasts(bench, rolled, updated, full=True)
        optimizer = make_optimizer(bench.policy, OptimizerConfig(lr=1e-6))
        _measure_updates(bench, kind, updated, forecasts, optimizer, reference)

        def roll(rows: int, length: int) -> None:
            bench.roll_blocks(rows, 1, bench.prompt + length, cache=Cache())

        _measure_rollouts(bench, kind, rolled, forecasts, roll, 0.0)
        del optimizer, reference


Forecasts = dict[tuple[str, int, int], dict[str, float]]


def _forecasts(bench: SpeedBench, rolled: list[tuple[int, int]], updated: list[int], **more: Any) -> Forecasts:
    """Forecasts of all cells, written down before anything is measured."""
    found, rows = {}, 4 if bench.toy else 8
    with described(bench) as folder:
        for what, count, length in [("rollout", *cell) for cell in rolled] + [("update", rows, n) for n in updated]:
            found[what, count, length] = forecast(bench, config_of(bench, folder, count, length, 8, **more))
    layers = bench.policy.lm.config.num_hidden_layers
    for (what, count, length), values in found.items():
        where = {"full": bool(more), "layers": layers, "rows": count, "length": length}
        bench.note("forecast", what=what, **where, **values)
    return found


def _measure_updates(
    bench: SpeedBench, kind: str, lengths: list[int], forecasts: Forecasts, optimizer: Any, reference: Any
) -> None:
    """One update of coupled_grpo on a group of 8, whose completions are drawn in one step."""
    rows, method = 4 if bench.toy else 8, coupled_grpo()
    scorer = Scorer(bench.policy, reference, MicroBatch(8))
    for number, length in enumerate(lengths):
        rollouts = bench.roll(rows, rows, length=length, steps=1, block=length)
        batch = ScoredRollouts(rollouts, torch.arange(rows, device=bench.device).double())

        def train(b: ScoredRollouts = batch) -> None:
            (terms,) = loss_terms(method, b, scorer, torch.Generator().manual_seed(0))
            update(bench.policy, optimizer, terms, scorer.micro_batch, 1.0)

        found, expected = bench.cell(train, warm=number < 2), forecasts["update", rows, length]
        _compare(found, expected, "update")
        bench.note("scale", what="update", kind=kind, rows=rows, length=length, **found, forecast=expected)


def _measure_rollouts(
    bench: SpeedBench, kind: str, cells: list[tuple[int, int]], forecasts: Forecasts, roll: Any, preparing: float
) -> None:
    """One block of a dual-cache rollout, which all blocks cost; with the time to merge the adapter once. The second
    run captures its steps."""
    bench.graphs = Graphs()
    for rows, length in ((2, 32), (4, 64)) if bench.toy else ((2, 64), (4, 128)):
        roll(rows, length)  # compiles for any number of rows and columns
    for rows, length in cells:
        found = bench.cell(lambda r=rows, n=length: roll(r, n), warm=2)
        expected = forecasts["rollout", rows, length]
        if "seconds" in found:
            blocks = length // bench.shape["block"]
            for key in ("seconds", "fastest", "slowest"):
                found[key] = blocks * (found[key] - preparing) + preparing
            found["tokens_per_second"] = rows * length / found["seconds"]
        _compare(found, expected, "rollout")
        note = {"reckoned": "one block timed"}
        bench.note("scale", what="rollout", kind=kind, rows=rows, length=length, **found, forecast=expected, **note)


def _compare(found: dict[str, Any], expected: dict[str, float], what: str) -> None:
    """Add the ratios of seconds and memory to their forecasts."""
    for measured, name in (("seconds", "s"), ("peak_gib", "gib")):
        if measured in found:
            found[f"{measured}_to_forecast"] = found[measured] / expected[f"{what}_{name}"]
