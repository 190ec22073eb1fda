"""The run folder: what a run was, what it measured, what it said, and the weights it ended with.

    config.yaml      the resolved configuration          versions.json   what it ran on
    metrics.jsonl    one JSON object a line, the first before any update
    samples.jsonl    completions with their rewards      checkpoint/     weights in the Hugging Face layout
    curves.png       reward and solve rates              (with matplotlib installed)
"""

import json
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from unmask.models import Model, save
from unmask.models.lora import adapted, save_adapter
from unmask.version import __version__


def fresh_folder(name: str, parent: Path = Path("runs")) -> Path:
    """runs/NAME, or runs/NAME-2, -3, ... if that exists."""
    number, folder = 1, parent / name
    while folder.exists():
        number += 1
        folder = parent / f"{name}-{number}"
    return folder


def check_folder(folder: Path) -> None:
    """ValueError if a run would write over something."""
    if folder.is_file() or (folder.exists() and any(folder.iterdir())):
        raise ValueError(f"{folder} already exists and is not an empty folder; choose another --out")


def versions() -> dict[str, str]:
    """What a run depends on, by version."""
    found = {"unmask": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "numpy", "safetensors"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found


class Run:
    """Writes a run folder. Made only once everything that can be checked has been."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        check_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        (folder / "config.yaml").write_text(yaml.safe_dump(dict(config), sort_keys=False))
        (folder / "versions.json").write_text(json.dumps(versions(), indent=2) + "\n")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._append("metrics.jsonl", [{"step": step, **metrics}])

    def log_samples(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        self._append("samples.jsonl", [{"step": step, **sample} for sample in samples])

    def save(self, policy: Model) -> None:
        """The weights: all of them, or of a model with an adapter the adapter alone, which names its base."""
        if adapted(policy):
            save_adapter(policy, self.folder / "checkpoint", policy.home)
        else:
            save(policy, self.folder / "checkpoint")

    def draw(self) -> Path | None:
        """curves.png, where matplotlib is installed."""
        try:
            import matplotlib
        except ImportError:
            return None
        matplotlib.use("Agg")
        from matplotlib.figure import Figure

        rows = read_metrics(self.folder)
        figure = Figure(figsize=(9, 3.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        for axes, names in (
            (left, ["train/reward"]),
            (right, ["train/solved", "eval/solved_sampled", "eval/solved_greedy"]),
        ):
            for name in names:
                points = [(row["step"], row[name]) for row in rows if name in row]
                if points:
                    axes.plot(*zip(*points, strict=True), marker="o" if len(points) < 15 else "", label=name)
            axes.set_xlabel("updates")
            axes.legend()
        path = self.folder / "curves.png"
        figure.savefig(path, dpi=120)
        return path

    def _append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        with (self.folder / name).open("a") as file:
            file.write(text)


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def checkpoint_of(run_or_model: str) -> str:
    """The model to load for a run folder, a model folder, or a model's name."""
    folder = Path(run_or_model)
    if (folder / "checkpoint").is_dir():
        return str(folder / "checkpoint")
    if (folder / "metrics.jsonl").is_file():
        raise ValueError(f"{folder} is a run without a checkpoint: it did not finish")
    return run_or_model
