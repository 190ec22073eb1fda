"""Metrics and samples in TensorBoard, Weights & Biases or trackio, in addition to metrics.jsonl and samples.jsonl.

    track: tensorboard               # or wandb, or trackio, or a list of them

A tracker receives every line of metrics.jsonl at most once: `tracking.json` in the run folder counts them. A resumed
run repeats some updates, whose lines are not sent again. A tracker that fails is dropped with a warning, and the run
continues; the lines that it missed are sent when the run is resumed. Samples are sent with the updates whose rollouts
are recorded (`trace_every`), as a table.
"""

import importlib.util
import json
import os
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import yaml

from unmask.training.batch import Batch, Experiment, samples_of
from unmask.training.run.folder import MakeFolder, RunFolder, read_metrics
from unmask.training.run.records import trace_due

if TYPE_CHECKING:
    from unmask.training.run.base_run import Hooks

PROJECT = "unmask"
COUNTS = "tracking.json"
COLUMNS = ("prompt", "completion", "reward")
"""Of the table of samples."""


class Tracker(Protocol):
    """Opened with the run folder, the resolved configuration, and a unique id of the run."""

    def __init__(self, folder: Path, config: Mapping[str, Any], number: str) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """A table with the COLUMNS."""

    def close(self) -> None: ...


class TensorBoard:
    """Event files in RUN/tensorboard."""

    def __init__(self, folder: Path, config: Mapping[str, Any], number: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        resumed = (folder / "tensorboard").exists()
        self.writer = SummaryWriter(str(folder / "tensorboard"))
        if not resumed:
            self.writer.add_text("config", f"```yaml\n{yaml.safe_dump(dict(config), sort_keys=False)}```", 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()  # a killed run has then written every line that it counted

    def log_samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
        cells = [[str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in line] for line in lines]
        self.writer.add_text("samples", "\n".join(f"| {' | '.join(line)} |" for line in cells), step)

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """The project `unmask`, or the one that WANDB_PROJECT names; its local files are in RUN/wandb."""

    def __init__(self, folder: Path, config: Mapping[str, Any], number: str) -> None:
        import wandb

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            id=number,
            resume="allow",
            config=dict(config),
            dir=str(folder),
            settings=wandb.Settings(console="off"),  # the panel is not a log
        )
        # Updates as the axis. W&B's own steps must increase, but an evaluation has the step of the update before it.
        self.run.define_metric("step", hidden=True)
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log({"step": step, **metrics})

    def log_samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        from wandb import Table

        self.run.log({"step": step, "samples": Table(columns=list(COLUMNS), data=[list(row) for row in rows])})

    def close(self) -> None:
        self.run.finish()


class Trackio:
    """The local project `unmask`; TRACKIO_DIR, TRACKIO_SPACE_ID and TRACKIO_SERVER_URL set another place."""

    def __init__(self, folder: Path, config: Mapping[str, Any], number: str) -> None:
        import trackio

        name = f"{folder.name}-{number}"
        self.run = trackio.init(project=PROJECT, name=name, config=dict(config), resume="allow", embed=False)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def log_samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        from trackio import Table

        self.run.log({"samples": Table(columns=list(COLUMNS), data=[list(row) for row in rows])}, step=step)

    def close(self) -> None:
        self.run.finish()


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}


@contextmanager
def tracking(
    config: Mapping[str, Any], make_folder: MakeFolder, hooks: "Hooks", resumed: bool
) -> "Iterator[tuple[MakeFolder, Hooks]]":
    """`make_folder` and `hooks`, such that the first process starts the trackers with the folder and sends metrics."""
    trackers = Trackers(config["track"])

    def make_and_open() -> RunFolder:
        run = make_folder()
        if trackers.names:
            trackers.start(run.path, config, resumed)
        return run

    def on_metrics(step: int, metrics: dict[str, float]) -> None:
        if trackers.folder is not None:
            trackers.log(step, metrics)
        hooks.on_metrics(step, metrics)

    def on_batch(experiment: Experiment, batch: Batch) -> None:
        if trackers.folder is not None and trace_due(trackers.step, config["trace_every"]):
            samples = samples_of(batch, config["group"])
            trackers.log_samples(
                [(experiment.task.prompt(each["row"]), each["completion"], each["reward"]) for each in samples]
            )
        hooks.on_batch(experiment, batch)

    try:
        yield make_and_open, replace(hooks, on_metrics=on_metrics, on_batch=on_batch)
    finally:
        trackers.close()


def check_trackers(names: Sequence[str]) -> None:
    """ValueError if a package is missing or W&B has no login, before a model is loaded."""
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # W&B makes a folder `wandb`, which imports as an empty package
            raise ValueError(f"track: {name} is not installed; pip install 'unmask[{name}]', or leave it out")
    if "wandb" in names and os.environ.get("RANK", "0") == "0":
        import wandb

        try:
            wandb.login()  # may ask in the terminal, so before the panel starts
        except wandb.Error as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"track: wandb cannot be used: {reason}; or set WANDB_MODE=offline") from error


class Trackers:
    """The trackers of one run, and the number of lines of metrics.jsonl that each has received."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.open = names, dict[str, Tracker]()
        self.folder: Path | None = None
        self.lines, self.sent, self.number = 0, dict[str, int](), secrets.token_hex(4)
        self.step, self.due = 0, dict[str, Tracker]()
        """Of the last line, and the trackers that had not received it."""

    def start(self, folder: Path, config: Mapping[str, Any], resumed: bool) -> None:
        """Open the trackers, and send the lines of metrics.jsonl that they have not received."""
        if (folder / COUNTS).is_file():
            saved = json.loads((folder / COUNTS).read_text())
            self.sent, self.number = saved["told"], saved["id"]
        self.folder = folder
        self._save_counts()
        for name in self.names:
            try:
                self.open[name] = TRACKERS[name](folder, config, self.number)
            except Exception as error:
                if not resumed:  # nothing is lost yet, so the user can fix it
                    reason = " ".join(str(error).split())
                    raise ValueError(
                        f"track: {name} cannot be started: {reason}; fix that, then unmask train --resume {folder}"
                    ) from error
                _warn(name, error)
        rows = read_metrics(folder) if (folder / "metrics.jsonl").is_file() else []
        for row in rows:
            self.log(int(row["step"]), {key: value for key, value in row.items() if key != "step"})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the next line of metrics.jsonl to the trackers that have not received it."""
        self.lines, self.step = self.lines + 1, step
        self.due = due = {name: tracker for name, tracker in self.open.items() if self.sent.get(name, 0) < self.lines}
        if not due:
            return
        self.sent.update(dict.fromkeys(due, self.lines))
        self._save_counts()  # first: after a crash, a lost line is better than one sent twice
        for name, tracker in due.items():
            try:
                tracker.log(step, metrics)
            except Exception as error:
                self.sent[name] = self.lines - 1
                self._save_counts()
                del self.open[name]
                _warn(name, error)

    def log_samples(self, rows: Sequence[Sequence[Any]]) -> None:
        """Send the samples of the last line's update to the trackers that have just received that line."""
        for name, tracker in self.due.items():
            if name in self.open:
                try:
                    tracker.log_samples(self.step, rows)
                except Exception as error:
                    del self.open[name]
                    _warn(name, error)

    def close(self) -> None:
        for name, tracker in self.open.items():
            try:
                tracker.close()
            except Exception as error:
                _warn(name, error)

    def _save_counts(self) -> None:
        assert self.folder is not None
        aside = self.folder / f".{COUNTS}.partial"
        aside.write_text(json.dumps({"id": self.number, "told": self.sent}) + "\n")
        aside.rename(self.folder / COUNTS)


def _warn(name: str, error: Exception) -> None:
    problem = f"{name} failed ({type(error).__name__}: {error}) and is dropped; metrics.jsonl has everything"
    warnings.warn(f"{problem}, and --resume sends it the rest", stacklevel=2)
