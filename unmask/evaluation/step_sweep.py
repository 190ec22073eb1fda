"""Score against forward passes: the same problems decoded with different numbers of steps."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from unmask.evaluation.benchmark import BenchmarkCase, BenchmarkResult
from unmask.rollout.decoding import Decoding
from unmask.util.plots import new_figure


def cases_by_steps(case: BenchmarkCase, steps: Sequence[int]) -> list[BenchmarkCase]:
    """The same case with other numbers of steps; ValueError for a number that does not fit."""
    if case.decoding.threshold is not None:
        raise ValueError("--steps cannot be combined with rollout.threshold; leave one of them out")
    for count in steps:
        if not _fits(case.decoding, count):
            raise ValueError(f"--steps: {count} does not fit {_shape(case.decoding)}; {_fitting_steps(case.decoding)}")
    return [replace(case, decoding=replace(case.decoding, steps=count)) for count in steps]


def _fits(decoding: Decoding, steps: int) -> bool:
    try:
        decoding.schedule(decoding.length, steps, decoding.block)
    except ValueError:
        return False
    return True


def _shape(decoding: Decoding) -> str:
    return f"{decoding.length} positions" + (
        f" in blocks of {decoding.block}" if decoding.block < decoding.length else ""
    )


def _fitting_steps(decoding: Decoding) -> str:
    """As text: the numbers of steps that fit."""
    fitting = [steps for steps in range(1, decoding.length + 1) if _fits(decoding, steps)]
    if not fitting:
        return "no number of steps does"
    if fitting == list(range(fitting[0], decoding.length + 1, fitting[0])):
        every = "every number" if fitting[0] == 1 else f"every multiple of {fitting[0]}"
        return f"{every} up to {decoding.length} does"
    return f"these do: {', '.join(map(str, fitting))}"


def check_plot(path: Path) -> None:
    """ValueError for a file type that matplotlib cannot write; no check if it is not installed."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        return
    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise ValueError(f"--plot: {path.name} has no picture format; use one of the endings {', '.join(kinds)}")


def draw(lines: Sequence[BenchmarkResult], path: Path) -> bool:
    """Score against forward passes, a point for each number of steps; False if matplotlib is not installed."""
    if (figure := new_figure(5.4, 3.8)) is None:
        return False
    axes = figure.subplots()
    passes = [line.passes for line in lines]
    curves = {"greedy": [line.score for line in lines]}
    curves |= {f"pass@{k}, sampled": [line.sampled[k] for line in lines] for k in lines[0].sampled}
    for name, shares in curves.items():
        value = [100 * share.value for share in shares]
        around = [[100 * (s.value - s.low) for s in shares], [100 * (s.high - s.value) for s in shares]]
        axes.errorbar(passes, value, yerr=around, marker="o", capsize=2, label=name)
    for line in lines:
        label, point = f"{line.case.decoding.steps} steps", (line.passes, 100 * line.score.value)
        axes.annotate(label, point, xytext=(5, -10), textcoords="offset points", fontsize=7)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.1)
    axes.set_xlabel("forward passes a problem")
    axes.set_ylabel("score, %")
    about = lines[0].card
    axes.set_title(f"{about['task']} ({about['protocol']}), {about['problems']} problems, 95 % intervals", fontsize=9)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=140)
    return True
