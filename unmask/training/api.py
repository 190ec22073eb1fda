"""`unmask.train`: a training run as one function call, for scripts and notebooks."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from unmask.config import DEMO, Config, read_config
from unmask.config.defaults import device_of
from unmask.evaluation.evaluate import Evaluation
from unmask.models import Model, load_model
from unmask.models.known import check_model_name
from unmask.models.lora import has_adapter
from unmask.training.loop import train as run_training
from unmask.training.run.base_run import Hooks
from unmask.training.run.folder import RunFolder, checkpoint_of, curves_figure, read_metrics
from unmask.util.files import check_folder

Metrics = dict[str, float]
SHOWN = ("train/reward", "train/solved", "eval/solved_sampled", "eval/solved_greedy")


@dataclass(frozen=True)
class TrainedRun:
    """What a run has made."""

    policy: Model
    """The trained model on the device of the run, ready for `unmask.sample` and for `unmask.models.save`."""
    metrics: list[Metrics]
    """The lines of metrics.jsonl, one for each update and each evaluation; pandas.DataFrame(run.metrics) is a table."""
    samples: list[dict[str, Any]]
    """Prompts, completions and rewards of the first group of every update."""
    before: Evaluation
    after: Evaluation
    """Held-out problems before and after training."""
    config: Config
    folder: Path | None
    """The run folder; None if it was temporary."""

    def __repr__(self) -> str:
        solved = f"sampled {self.before.sampled} -> {self.after.sampled}"
        method = " with ".join([self.config.method, *self.config.plugins])
        return f"TrainedRun({self.config.task}, {method}: {solved})"


def train(
    task: str | None = None,
    method: str | None = None,
    model: str | Path = "tiny-two",
    plugins: str | Sequence[str] | None = None,
    out: str | Path | None = None,
    show: bool = False,
    **config: Any,
) -> TrainedRun:
    """Train as `unmask train` does, and return the trained policy with metrics and samples.

    plugins  `--with` on the command line: "daca", or ["daca", "dispo"]
    out      the run folder, which `unmask view` and `unmask train --resume` read; None leaves nothing on disk
    show     in a notebook a plot that is redrawn in place, elsewhere a line now and then; else nothing is printed
    config   keys of the configuration: updates=40, optimizer={"lr": 1e-4}, agrpo={"draws": 2}

    What is not given has the value that `unmask train` has. Mistakes are ValueErrors with the same sentences.
    """
    if out is not None:
        check_folder(Path(out))
    if not isinstance(model, str | Path):
        raise ValueError(f"model: expected the name or the folder of a model, got an object of {type(model).__name__}")
    check_model_name(str(model))
    if plugins is not None and "with" in config:
        raise ValueError("plugins and with are the same key: give only one of them")
    if plugins is None and method is not None and "with" not in config:
        plugins = []
    plugins = [plugins] if isinstance(plugins, str) else plugins
    named = {"task": task, "method": method, "model": str(model), "with": plugins}
    settings = read_config(DEMO, keyword_overrides(config), **named)
    with TemporaryDirectory() as temporary:
        folder = Path(out) if out is not None else Path(temporary) / "run"
        hooks = Hooks(on_metrics=_display(settings.updates)) if show else Hooks()
        result = run_training(settings, lambda: RunFolder(folder, settings.dump()), hooks)
        lines = (folder / "samples.jsonl").read_text().splitlines()
        policy = load_model(checkpoint_of(str(folder)), device=device_of(settings))
        if out is None and not has_adapter(policy):
            policy.home = settings.model  # the folder it was loaded from is deleted now
        return TrainedRun(
            policy=policy,
            metrics=read_metrics(folder),
            samples=[json.loads(line) for line in lines],
            before=result.before,
            after=result.after,
            config=settings,
            folder=None if out is None else folder,
        )


def keyword_overrides(config: dict[str, Any]) -> list[str]:
    """Keyword arguments as `key=value` overrides. A section is set key by key: its other keys keep their values."""
    flat = {
        f"{key}.{name}" if isinstance(value, dict) else key: part
        for key, value in config.items()
        for name, part in (value.items() if isinstance(value, dict) else [("", value)])
    }
    return [f"{key}={json.dumps(value, default=str)}" for key, value in flat.items()]


def _display(updates: int) -> Callable[[int, Metrics], None]:
    """Show the metrics of a run: a plot in a notebook, lines elsewhere."""
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        return _live_plot()
    every = max(1, updates // 12)

    def report(step: int, metrics: Metrics) -> None:
        shown = [f"{key.partition('/')[2]} {metrics[key]:.3f}" for key in SHOWN if key in metrics]
        if shown and (step % every == 0 or "eval/solved_sampled" in metrics):
            print(f"update {step}/{updates}", *shown, sep="  ", flush=True)

    return report


def _live_plot() -> Callable[[int, Metrics], None]:
    """Curves of the run, redrawn in place with every line of metrics."""
    from IPython.display import Image, display

    rows, shown = list[Metrics](), list[Any]()

    def report(step: int, metrics: Metrics) -> None:
        rows.append({"step": step, **metrics})
        if (figure := curves_figure(rows)) is None:
            raise ValueError("show: the plot needs matplotlib: pip install 'unmask[plot]'")
        picture = BytesIO()
        figure.savefig(picture, format="png", dpi=100)
        image = Image(data=picture.getvalue())
        if shown:
            shown[0].update(image)
        else:
            shown.append(display(image, display_id=True))

    return report
