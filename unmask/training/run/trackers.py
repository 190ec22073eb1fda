"""Metrics in TensorBoard, Weights & Biases or trackio, beside metrics.jsonl, which stays the record of a run.

    track: tensorboard               # or wandb, or trackio, or a list of them

A tracker is told every line of metrics.jsonl at most once: `tracking.json` in the run folder counts them. A run that
goes on from an earlier state does some updates again, and they are not told again; lines that a tracker missed, because
it had failed, are told when the run goes on. One that fails is warned of and left alone: the run goes on.
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

from unmask.training.run.folder import RunFolder, read_metrics

if TYPE_CHECKING:
    from unmask.config import Config
    from unmask.training.run.base_run import Hooks, MakeFolder

PROJECT = "unmask"
COUNTS = "tracking.json"


class Tracker(Protocol):
    """Opened with the run folder, the resolved configuration, and an id that no other run has."""

    def __init__(self, folder: Path, config: Mapping[str, Any], number: str) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in RUN/tensorboard."""

    def __init__(self, folder: Path, config: Mapping[str, Any], number: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        begun = (folder / "tensorboard").exists()
        self.writer = SummaryWriter(str(folder / "tensorboard"))
        if not begun:
            self.writer.add_text("config", f"```yaml\n{yaml.safe_dump(dict(config), sort_keys=False)}```", 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()  # a run that is killed has told what it had counted

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """The project `unmask`, or the one that WANDB_PROJECT names; what is kept here is in RUN/wandb."""

    def __init__(self, folder: Path, config: Mapping[str, Any], number: str) -> None:
        import wandb

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            id=number,
            resume="allow",
            config=dict(config),
            dir=str(folder),
            settings=wandb.Settings(console="off"),  # the panel is no log
        )
        # Updates as the axis. W&B's own steps may only grow, and an evaluation has the step of the update before it.
        self.run.define_metric("step", hidden=True)
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log({"step": step, **metrics})

    def close(self) -> None:
        self.run.finish()


class Trackio:
    """The local project `unmask`; TRACKIO_DIR, TRACKIO_SPACE_ID and TRACKIO_SERVER_URL say where else."""

    def __init__(self, folder: Path, config: Mapping[str, Any], number: str) -> None:
        import trackio

        name = f"{folder.name}-{number}"
        self.run = trackio.init(project=PROJECT, name=name, config=dict(config), resume="allow", embed=False)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        self.run.finish()


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}


@contextmanager
def tracking(
    config: "Config", make_folder: "MakeFolder", hooks: "Hooks", resumed: bool
) -> "Iterator[tuple[MakeFolder, Hooks]]":
    """Both as they were, with the trackers told what is reported once the folder is there: by the first process."""
    check(config.track)
    trackers = Trackers(config.track)

    def make_and_open() -> RunFolder:
        run = make_folder()
        if config.track:
            trackers.begin(run.path, config.dump(), resumed)
        return run

    def on_metrics(step: int, metrics: dict[str, float]) -> None:
        if trackers.folder is not None:
            trackers.log(step, metrics)
        hooks.on_metrics(step, metrics)

    try:
        yield make_and_open, replace(hooks, on_metrics=on_metrics)
    finally:
        trackers.close()


def check(names: Sequence[str]) -> None:
    """ValueError where a package is missing, or W&B does not know who is asking: before a model is loaded."""
    for name in names:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a folder of that name, as W&B makes one, is no package
            raise ValueError(f"track: {name} is not installed; pip install 'unmask[{name}]', or leave it out")
    if "wandb" in names and os.environ.get("RANK", "0") == "0":
        import wandb

        try:
            wandb.login()  # asks in a terminal, and does so before the panel is there
        except wandb.Error as error:
            told = " ".join(str(error).split())
            raise ValueError(f"track: wandb cannot be used: {told}; or set WANDB_MODE=offline") from error


class Trackers:
    """The trackers of one run, and how many lines of metrics.jsonl each has been told."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.open = names, dict[str, Tracker]()
        self.folder: Path | None = None
        self.lines, self.told, self.number = 0, dict[str, int](), secrets.token_hex(4)

    def begin(self, folder: Path, config: Mapping[str, Any], resumed: bool) -> None:
        """Open them, and tell what is in metrics.jsonl and they have not been told."""
        if (folder / COUNTS).is_file():
            kept = json.loads((folder / COUNTS).read_text())
            self.told, self.number = kept["told"], kept["id"]
        self.folder = folder
        self._keep()
        for name in self.names:
            try:
                self.open[name] = TRACKERS[name](folder, config, self.number)
            except Exception as error:
                if not resumed:  # there is somebody to put it right, and nothing to lose yet
                    told = " ".join(str(error).split())
                    raise ValueError(
                        f"track: {name} cannot be started: {told}; put that right and unmask train --resume {folder}"
                    ) from error
                _warn(name, error)
        rows = read_metrics(folder) if (folder / "metrics.jsonl").is_file() else []
        for row in rows:
            self.log(int(row["step"]), {key: value for key, value in row.items() if key != "step"})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The next line of metrics.jsonl, to those that have not been told it."""
        self.lines += 1
        due = {name: tracker for name, tracker in self.open.items() if self.told.get(name, 0) < self.lines}
        if not due:
            return
        self.told.update(dict.fromkeys(due, self.lines))
        self._keep()  # first: rather a line that is lost with the process than one that is told twice
        for name, tracker in due.items():
            try:
                tracker.log(step, metrics)
            except Exception as error:
                self.told[name] = self.lines - 1
                self._keep()
                del self.open[name]
                _warn(name, error)

    def close(self) -> None:
        for name, tracker in self.open.items():
            try:
                tracker.close()
            except Exception as error:
                _warn(name, error)

    def _keep(self) -> None:
        assert self.folder is not None
        aside = self.folder / f".{COUNTS}.partial"
        aside.write_text(json.dumps({"id": self.number, "told": self.told}) + "\n")
        aside.rename(self.folder / COUNTS)


def _warn(name: str, error: Exception) -> None:
    told = f"{name} fails ({type(error).__name__}: {error}) and is left alone; metrics.jsonl has everything"
    warnings.warn(f"{told}, and --resume tells it the rest", stacklevel=2)
