"""The run folder: configuration, metrics, samples, weights.

config.yaml      the resolved configuration          run.jsonl       command, hardware, versions, starting weights
metrics.jsonl    one JSON object a line, the first before any update
samples.jsonl    completions with their rewards      checkpoint/     weights in the Hugging Face layout, model card
curves.png       reward and solve rates              (with matplotlib installed)
traces.jsonl     groups of rollouts, step by step    (`unmask view`; docs/viewer.md)
errors.jsonl     completions whose reward failed     (if any)
warnings.jsonl   health warnings                     (if any; unmask.training.run.health)
broken/          updates that were not finite        (if they stopped the run; unmask.training.run.replay)
tracking.json    lines that trackers have received   (with track, whose own files are in tensorboard/, wandb/)
checkpoint-best/ the weights of the best evaluation  (with eval.best, eval.early_stop or eval.collapse)
finished.json    solve rates before and after; until it exists, `--resume` starts from state/
"""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from unmask.models import Model, save
from unmask.models.checkpoint import CARD, SUMS, check_sums
from unmask.models.lora import has_adapter, save_adapter
from unmask.tasks.scoring import RewardFailure
from unmask.tasks.task import behaviour_shares, main_behaviours
from unmask.training.run.file_names import BEST, FINISHED, LAST, LOGS, STARTS
from unmask.training.run.health import HealthWarning, current_name
from unmask.training.run.provenance import start_line
from unmask.util.files import check_folder, fresh_folder as fresh_folder, fsync, naming_file, write_whole
from unmask.util.plots import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class RunFolder:
    """Writes a run folder. It is created only after all checks."""

    def __init__(self, path: Path, config: Mapping[str, Any], name: str = "config.yaml") -> None:
        check_folder(path)
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.write_config(config, name)

    @classmethod
    def reopen(cls, folder: Path, lengths: Mapping[str, int]) -> "RunFolder":
        """The folder of a resumed run. Its logs are truncated to their lengths in the saved state."""
        run = cls.__new__(cls)
        run.path = folder
        for name in (LAST, BEST):  # left by a process that was killed
            for old in folder.glob(f".{name}.old-*"):
                if (folder / name).exists():
                    shutil.rmtree(old)
                else:
                    old.rename(folder / name)
            for new in folder.glob(f".{name}.new-*"):
                shutil.rmtree(new)
        for part in folder.glob(".*.partial"):
            shutil.rmtree(part) if part.is_dir() else part.unlink()
        for name in LOGS:
            size = (folder / name).stat().st_size if (folder / name).is_file() else 0
            if size < lengths.get(name, 0):
                raise ValueError(f"{folder / name} is shorter than when the state was saved: part of it is lost")
            if name in lengths:
                (folder / name).touch()
                os.truncate(folder / name, lengths[name])
            else:
                (folder / name).unlink(missing_ok=True)
        return run

    def write_config(self, config: Mapping[str, Any], name: str) -> None:
        write_whole(self.path / name, yaml.safe_dump(dict(config), sort_keys=False))

    def log_lengths(self) -> dict[str, int]:
        """The bytes of each log, after syncing them to disk."""
        paths = [self.path / name for name in LOGS if (self.path / name).is_file()]
        for path in paths:
            fsync(path)
        return {path.name: path.stat().st_size for path in paths}

    def take_stop_request(self) -> bool:
        """Whether there is a file `stop` in the folder; it is removed."""
        requested = (self.path / "stop").is_file()
        if requested:
            (self.path / "stop").unlink(missing_ok=True)
        return requested

    def finish(
        self, before: Mapping[str, float], after: Mapping[str, float], facts: Mapping[str, Any], card: str
    ) -> None:
        """Write the last model card, mark the run as finished, and remove its saved states."""
        write_whole(self.path / LAST / CARD, card)
        write_whole(self.path / FINISHED, json.dumps({"before": before, "after": after, **facts}, indent=2) + "\n")
        shutil.rmtree(self.path / "state", ignore_errors=True)

    def log_start(self, fingerprint: str) -> None:
        """Log the command, hardware, versions and starting weights of this start."""
        self._append(STARTS, [start_line(fingerprint)])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._append("metrics.jsonl", [{"step": step, **metrics}])

    def log_samples(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        self._append("samples.jsonl", [{"step": step, **sample} for sample in samples])

    def log_traces(self, lines: Iterable[Mapping[str, Any]]) -> None:
        self._append("traces.jsonl", lines)

    def log_errors(self, step: int, failures: Iterable[RewardFailure]) -> None:
        self._append("errors.jsonl", [{"step": step, **failure._asdict()} for failure in failures])

    def log_warnings(self, step: int, warnings: Iterable[HealthWarning]) -> None:
        self._append("warnings.jsonl", [{"step": step, **warning._asdict()} for warning in warnings])

    def save(self, policy: Model, card: str, name: str = LAST) -> None:
        """Save the weights, or only the adapter of a model with one, and the model card."""
        if has_adapter(policy):
            save_adapter(policy, self.path / name, policy.home)
        else:
            save(policy, self.path / name)
        write_whole(self.path / name / CARD, card)

    def has_best(self) -> bool:
        """Whether the weights of the best evaluation exist and match their checksums."""
        try:
            check_sums(self.path / BEST)
        except ValueError:
            return False
        return (self.path / BEST / SUMS).is_file()

    def take_best(self) -> None:
        """Replace the last weights by those of the best evaluation."""
        aside = self.path / f".{LAST}.partial"
        shutil.rmtree(aside, ignore_errors=True)
        shutil.copytree(self.path / BEST, aside)
        shutil.rmtree(self.path / LAST, ignore_errors=True)
        aside.rename(self.path / LAST)

    def draw(self) -> Path | None:
        """curves.png, if matplotlib is installed."""
        if (figure := curves_figure(read_metrics(self.path))) is None:
            return None
        figure.savefig(self.path / "curves.png", dpi=120)
        return self.path / "curves.png"

    def _append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append lines; without any, the file is not created."""
        if text := "".join(json.dumps(row) + "\n" for row in rows):
            with naming_file(self.path / name), (self.path / name).open("a") as file:
                file.write(text)


MakeFolder = Callable[[], RunFolder]


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Lock the run against other processes; ValueError if one is writing it. Under torchrun the first process locks."""
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    with (folder / STARTS).open("a") as file:  # network disks can only lock files that are open for writing
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{folder} is being trained by another process: wait, or stop it with: touch {folder / 'stop'}"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # a disk without locks
                raise
        yield


@contextmanager
def lock_when_made(make_folder: MakeFolder) -> Iterator[MakeFolder]:
    """`make_folder`, which also locks the run."""
    with ExitStack() as locks:

        def make() -> RunFolder:
            run = make_folder()
            locks.enter_context(lock_run(run.path))
            return run

        yield make


def with_config(make_folder: MakeFolder, config: Mapping[str, Any], name: str = "config.yaml") -> MakeFolder:
    """`make_folder`, which also writes this configuration."""

    def make() -> RunFolder:
        run = make_folder()
        run.write_config(config, name)
        return run

    return make


def curves_figure(rows: Sequence[Mapping[str, float]]) -> "Figure | None":
    """Reward, solve rates and behaviours over updates; None if matplotlib is not installed."""
    if (figure := new_figure(9, 3.2)) is None:
        return None
    panels = [["train/reward"], ["train/solved", "eval/solved_sampled", "eval/solved_greedy"]]
    measured = main_behaviours([behaviour_shares(row) for row in rows])
    shares = [{f"{name} answers": share for name, share in of.items()} for of in measured]
    if names := list(dict.fromkeys(name for of in shares for name in of)):
        rows = [{**row, **of} for row, of in zip(rows, shares, strict=True)]
        panels.append(names)
    figure.set_size_inches(4.5 * len(panels), 3.2)
    for axes, names in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for name in names:
            points = [(row["step"], row[name]) for row in rows if name in row]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o" if len(points) < 15 else "", label=name)
                axes.legend()
        axes.set_xlabel("updates")
    return figure


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl, with metrics of older versions under their current names."""
    path, rows = folder / "metrics.jsonl", list[dict[str, float]]()
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            rows.append({current_name(name): value for name, value in json.loads(line).items()})
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{path}:{number} is damaged: {error}") from None
    return rows


def checkpoint_of(run_or_model: str) -> str:
    """The model to load for a run folder, a model folder, or a model's name."""
    folder = Path(run_or_model)
    if (folder / LAST).is_dir():
        return str(folder / LAST)
    if (folder / "metrics.jsonl").is_file():
        raise ValueError(f"{folder} is a run without a checkpoint: it did not save one; resume it with --resume")
    return run_or_model
