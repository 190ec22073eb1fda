"""The section of speed.py about captured steps: beside the same steps uncaptured, and beside an earlier commit."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from speed_baseline import Baseline, roll
from speed_bench import SpeedBench
from torch import Tensor

from unmask.core.trace import Trace
from unmask.rollout.graphs import Graphs

REPETITIONS, WARM = 3, 2
"""Runs that count, and those before them that do not: the second captures."""


def graphs(bench: SpeedBench) -> None:
    """Dual-cache rollouts of 1, 8 and 32 rows, exact ones of 8: captured, not captured, and the baseline in turns.

    Of an exact rollout one block is timed, the last of the canvas, and of one with the dual cache two: every block
    costs the same. With `--rows`: only dual-cache rollouts of so many rows, all blocks, captured and the baseline;
    with `--copies` so many of them have the same prompt, as the rollouts of a group.
    """
    baseline = None if bench.baseline is None else Baseline(bench.baseline, bench)
    if bench.rows is not None:
        cell = {"rows": bench.rows, "cached": True, "blocks": bench.blocks, "copies": bench.copies}
        _cell(bench, baseline, "dual cache", cell, ["captured"])
    else:
        for rows in (1, 3) if bench.toy else (1, 8, 32):
            _cell(bench, baseline, "dual cache", {"rows": rows, "cached": True, "blocks": 2})
        _cell(bench, baseline, "exact", {"rows": 3 if bench.toy else 8, "cached": False, "blocks": 1})
    if baseline is not None:
        baseline.end()


def _cell(
    bench: SpeedBench,
    baseline: Baseline | None,
    kind: str,
    cell: dict[str, Any],
    named: Sequence[str] = ("captured", "not captured"),
) -> None:
    """Time a cell in the ways that are named, in turns with the baseline; the first rounds warm up."""
    times = bench.blocks // cell["blocks"]  # such rollouts make a whole one
    ways = {"captured": Graphs(True), "not captured": Graphs(False), "static": Graphs(True, captures=False)}
    traces: dict[str, Trace] = {}

    def taken(name: str) -> float:
        if name == "baseline":
            assert baseline is not None
            return baseline.seconds(cell)
        with bench.changed(graphs=ways[name]):
            return bench.seconds(lambda: traces.update({name: roll(bench, cell).trace}), warm=False)

    timed = [*named, *(["baseline"] if baseline else [])]
    warm = 1 if times == 1 else WARM  # a whole rollout has every shape twice, so the first captures
    rounds = [{name: taken(name) for name in timed} for _ in range(warm + REPETITIONS)]
    taken("static")
    captured, tokens = ways["captured"], cell["rows"] * bench.shape["length"]
    gib = {name: size / 2**30 for name, size in captured.bytes().items()}
    note: dict[str, Any] = {
        "kind": kind,
        "rows": cell["rows"],
        "copies": cell.get("copies", 1),
        "graphs": len(captured.steps),
        "gib": gib,
    }
    fastest = median(each["captured"] for each in rounds[warm:])
    for name in timed:
        seconds = [times * each[name] for each in rounds[warm:]]
        middle, spread = median(seconds), {"fastest": min(seconds), "slowest": max(seconds)}
        rate = {"tokens_per_second": tokens / middle, "captured_is_faster": middle / times / fastest}
        note[name] = {**rate, "seconds": middle, **spread, "first_round": rounds[0][name]}
    others = {"static": "from the same step uncaptured", "not captured": "from the step of changing shapes"}
    note["tokens that differ"] = {
        words: gap(traces["captured"], traces[name]) for name, words in others.items() if name in traces
    }
    bench.note("graphs", **note, repetitions=REPETITIONS, reckoned=f"{cell['blocks']} of {bench.blocks} blocks timed")
    captured.release()


def gap(mine: Trace, other: Trace) -> dict[str, float]:
    """Tokens that differ; and in the first step, which both take on the same canvas, the nats."""
    first_BL: Tensor = (mine.step_BL == 0) & (other.step_BL == 0) & (mine.tokens_BL == other.tokens_BL)
    nats = (mine.logp_BL - other.logp_BL).abs()[first_BL]
    return {
        "tokens": float((mine.tokens_BL != other.tokens_BL).sum()),
        "of": float(mine.filled_BL.sum()),
        "first_step_positions": float(first_BL.sum()),
        "first_step_nats": float(nats.max()) if len(nats) else 0.0,
    }
