"""The terminal display: the live panel of a training run or plain lines, tables, canvases."""

import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from unmask.cli.panel import Completion, Panel, canvas, elapsed_and_left
from unmask.tasks.task import main_behaviours
from unmask.training.run.health import warning_messages

if TYPE_CHECKING:
    from unmask.config import Config
    from unmask.evaluation.evaluate import Evaluation
    from unmask.tasks import Task
    from unmask.training.run.base_run import Hooks
    from unmask.training.run.training_run import TrainingResult

console = Console()
OnMetrics = Callable[[int, dict[str, float]], None]
SHOWN = ["train/reward", "train/solved", "train/kl", "train/grad_norm", "eval/solved_sampled", "eval/solved_greedy"]


def live() -> bool:
    """Whether output goes to a terminal that can redraw, not to a file or a pipe."""
    return sys.stdout.isatty() and console.is_interactive and console.encoding.startswith("utf")


@contextmanager
def training_display(config: "Config", name: str, should_stop: "Callable[[], bool]") -> "Iterator[Hooks]":
    """A header at once; then a live panel in a terminal, elsewhere about a dozen plain lines."""
    panel, every, drawn = Panel(config, name), max(1, config.updates // 12), live()
    # Other output goes above the panel, except a standard error that is not a terminal.
    frame = Live(panel, console=console, refresh_per_second=1, redirect_stderr=sys.stderr.isatty())
    warning_counts: dict[str, float] = {}
    _line(_header(config, name))

    def report(step: int, metrics: dict[str, float]) -> None:
        if drawn:
            frame.start(refresh=True)  # not before the first report: an error of the set-up is not drawn over
        messages = list(warning_messages(warning_counts, metrics))
        panel.report(step, metrics, [message.split(": ")[1] for message in messages])
        if not drawn and ("eval/solved_sampled" in metrics or (step and step % every == 0)):
            text = "  ".join(f"{key.partition('/')[2]} {metrics[key]:.3f}" for key in SHOWN if key in metrics)
            _line(f"update {step:4d}/{config.updates}  {text}  {panel.times()}")
        for message in messages:
            print(f"update {step}: {message}", file=sys.stderr, flush=True)
        warning_counts.update({key: value for key, value in metrics.items() if key.startswith("warn/")})

    try:
        from unmask.training.run.base_run import Hooks

        hooks = Hooks(on_metrics=report, should_stop=should_stop)
        yield replace(hooks, on_batch=panel.on_batch) if drawn else hooks
    finally:
        frame.stop()


def _header(config: "Config", name: str) -> str:
    kl = config.build_method().kl
    penalty = f"KL {kl:g} to the model it starts from" if kl else "no KL"
    return f"{name}: {config.updates} updates of {config.prompts} prompts x {config.group} rollouts, {penalty}"


def _line(text: str) -> None:
    """Print a line without markup, colours or wrapping, so that commands and paths can be copied."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def training_bar(steps: int, name: str, unit: str) -> "Iterator[OnMetrics]":
    """A live bar with the losses in a terminal; elsewhere plain lines, which count in `unit`."""
    columns = [TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn()]
    columns += [TextColumn("{task.fields[text]}"), TimeRemainingColumn()]
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        job, started = bar.add_task(name, total=steps, text=""), time.monotonic()

        def report(step: int, metrics: dict[str, float]) -> None:
            text = "  ".join(f"{key} {value:.3f}" for key, value in metrics.items())
            bar.update(job, completed=step + 1, text=text)
            if not console.is_terminal and (step + 1) % max(1, steps // 20) == 0:
                spent = time.monotonic() - started
                _line(f"{unit} {step + 1}/{steps}  {text}  {elapsed_and_left(spent, spent * (steps / (step + 1) - 1))}")

        yield report


def show_result(config: "Config", name: str, result: "TrainingResult") -> None:
    """The table at the end of a run, and what to try next."""
    table = Table(
        title=f"{config.build_task().name}: solved, {result.after.problems} held-out problems, 95 % intervals"
    )
    for heading in ("", "before", "after", "gain"):
        table.add_column(heading, justify="left" if not heading else "right")
    before, after = result.before, result.after
    rows = [("sampled", before.sampled, after.sampled), ("greedy", before.greedy, after.greedy)]
    rows += [(f"pass@{k}", before.passes[k], after.passes[k]) for k in after.passes if k > 1]
    for label, was, now in rows:
        table.add_row(label, str(was), str(now), f"{100 * (now.value - was.value):+.1f}")
    first, last = main_behaviours([before.behaviours, after.behaviours])
    for behaviour, share in last.items():
        start = first.get(behaviour)  # a run of 0.1 that is resumed has none
        shown, gain = ("", "") if start is None else (_percent(start), f"{100 * (share - start):+.1f}")
        table.add_row(f"{behaviour} answers", shown, _percent(share), gain)
    console.print(table)
    assert result.run is not None  # only the first process shows a result
    folder = result.run.path
    if result.ended:
        _line(f"{result.ended}. The weights are those of the best evaluation.")
    from unmask.training.run.folder import read_metrics

    if without_gradient(read_metrics(folder)):
        message = (
            "warning: no update had a gradient, so nothing was learned: with raft no rollout had a reward of at least "
            "1, with a group baseline the rewards of each group were equal"
        )
        print(message, file=sys.stderr, flush=True)
    _line(f"{name}: {result.seconds:.0f} s. Run folder: {folder}")
    _line("Try next:")
    file = config.options["own"]["file"] if config.task == "own" else ""
    for command in next_commands(config.build_task(), str(folder), file):
        _line(f"  {command}")


def without_gradient(rows: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a run has updates, and the gradient of all of them is 0."""
    norms = [row["train/grad_norm"] for row in rows if "train/grad_norm" in row]
    return bool(norms) and not any(norms)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def next_commands(task: "Task", folder: str, file: str = "") -> list[str]:
    """Commands to try after a run. A prompt of several lines is left out. `file` is the Python file of the task."""
    named = f" --task {shlex.quote(file)}" if file else ""
    prompt = task.prompt(task.rows("test", 1, 0)[0])
    sample = [f"unmask sample {folder} {shlex.quote(prompt)} --steps{named}"] if len(prompt.splitlines()) == 1 else []
    next_run = f"unmask train {folder}/config.yaml --method agrpo --with dispo{named}"
    return [f"unmask eval {folder}{named}", *sample, f"unmask view {folder}", next_run, "unmask methods"]


def show_evaluation(title: str, evaluation: "Evaluation") -> None:
    _line(f"{title}: {evaluation.problems} held-out problems, {evaluation.samples} samples each")
    table = Table()
    table.add_column("")
    table.add_column("of problems, 95 % interval", justify="right")
    table.add_row("pass@1 sampled", str(evaluation.sampled))
    table.add_row("pass@1 greedy", str(evaluation.greedy))
    for k, share in evaluation.passes.items():
        if k > 1:
            table.add_row(f"pass@{k}", str(share))
    (shares,) = main_behaviours([evaluation.behaviours])
    for behaviour, shown in shares.items():
        table.add_row(f"{behaviour}, of all samples", _percent(shown))
    if evaluation.mixed is not None:
        table.add_row(f"{max(evaluation.passes)} samples differ", str(evaluation.mixed))
    console.print(table)


def canvases(completion: Completion) -> Iterator[str]:
    """The completion after each denoising step, step 0 all masked: a line each."""
    for step in range(completion.steps + 1):
        yield f"{step:4d}  {canvas(completion, step).plain}"


def play(completion: Completion, speed: float) -> None:
    """Play the denoising at `speed` steps a second; Ctrl-C skips to the end."""
    with Live(console=console, auto_refresh=False) as frame:
        with suppress(KeyboardInterrupt):
            for step in range(completion.steps):
                frame.update(Text.assemble((f"step {step}\n", "dim"), canvas(completion, step)), refresh=True)
                time.sleep(1 / speed)
        frame.update(Text.assemble((f"{completion.steps} steps\n", "dim"), canvas(completion)), refresh=True)
