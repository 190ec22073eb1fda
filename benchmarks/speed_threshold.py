"""The section of speed.py about decoding by threshold, on random weights with a synthetic confidence.

On a trained model: python benchmarks/decoding.py ways MODEL --repetitions 3 --device cuda --out ways.json
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from speed_bench import SpeedBench
from torch import Tensor

from unmask.core.trace import Trace
from unmask.rollout.cache import Cache
from unmask.rollout.denoiser import Denoiser
from unmask.rollout.graphs import Graphs

BLOCKS = {"dual cache": 2, "exact": 1}
SURE = {"dual cache": (0.1, 0.25, 0.5), "exact": (0.25, 0.5)}
"""The probability that a masked position is sure at a step."""


@contextmanager
def some_sure(bench: SpeedBench, share: float) -> Iterator[None]:
    """Inside it a random share of the positions that are asked has a certain token, at every step anew."""
    plain = bench.policy.head

    def head(hidden_QD: Tensor) -> Tensor:
        logits_QV = plain(hidden_QD)
        logits_QV[:, 7] += 1e4 * (torch.rand(len(hidden_QD), device=hidden_QD.device) < share)
        return logits_QV

    bench.policy.head = head
    try:
        yield
    finally:
        del bench.policy.head


@contextmanager
def all_together() -> Iterator[None]:
    """Inside it rows that have finished a block stay in the batch until the block is finished in all rows."""
    plain = Denoiser._narrow

    def widest(denoiser: Denoiser) -> int:
        number = denoiser._own_number(denoiser.block)
        column_RW = denoiser.engine.block_columns(denoiser.live_R, number)
        return int(denoiser._masked(column_RW, number).sum(1).max())

    Denoiser._narrow = widest  # type: ignore[method-assign]  # the way that is compared with
    try:
        yield
    finally:
        Denoiser._narrow = plain  # type: ignore[method-assign]  # as before


def threshold(bench: SpeedBench) -> None:
    """The last blocks of canvases of the usual width: two positions a step, and all positions that are sure."""
    rows = 4 if bench.toy else 32
    for kind, settings in (("dual cache", {"cache": Cache()}), ("exact", {})):
        bench.roll_blocks(rows, 1, **settings)
        with some_sure(bench, 0.5), bench.changed(graphs=Graphs()):
            bench.roll_blocks(rows, 1, threshold=0.9, **settings)  # compiled for any number of rows
        base = _timed(bench, rows, None, {"decoding": "two positions a step", "kind": kind}, settings)
        for sure in SURE[kind]:
            _timed(bench, rows, base, {"decoding": "threshold", "kind": kind, "sure": sure}, settings)
        with all_together():
            what = {"decoding": "threshold, finished rows stay", "kind": kind, "sure": 0.25}
            _timed(bench, rows, base, what, settings)


def _timed(bench: SpeedBench, rows: int, base: float | None, what: dict[str, Any], settings: dict[str, Any]) -> float:
    """Positions a second; `base`: of decoding without a threshold."""
    traces: list[Trace] = []
    blocks = BLOCKS[what["kind"]]
    more = {"threshold": 0.9} if "sure" in what else {}

    def roll() -> None:
        torch.manual_seed(0)
        traces.append(bench.roll_blocks(rows, blocks, **settings, **more).trace)

    # Captured steps have the head that they were captured with.
    with bench.changed(graphs=Graphs()), some_sure(bench, what["sure"]) if "sure" in what else nullcontext():
        times = bench.repeated(roll)
    speed = rows * blocks * bench.shape["block"] / times["seconds"]
    bench.note(
        "threshold",
        **what,
        rows=rows,
        **times,
        positions_per_second=speed,
        times_base=speed / (base or speed),
        **_steps(traces[-1], blocks, bench.shape["block"]),
    )
    return speed


def _steps(trace: Trace, blocks: int, block: int) -> dict[str, float]:
    """The mean steps of a row, the steps of the batch, and the rows in a pass if finished rows are set aside."""
    step_RW = trace.step_BL[:, -blocks * block :].unflatten(1, (blocks, block))
    used_RK = torch.tensor([[len(set(part)) for part in row] for row in step_RW.tolist()])
    together = int(used_RK.max(0).values.sum())
    return {
        "steps_of_a_row": float(used_RK.sum(1).double().mean()),
        "steps_of_the_batch": together,
        "rows_in_a_pass": float(used_RK.sum()) / together,
    }
