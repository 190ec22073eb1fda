"""What the commands that train share: arguments, run folders, resuming, pausing, warnings."""

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import TypeVar

import typer

from unmask.config.recipes import PREFIX, config_path
from unmask.training.run.file_names import FINISHED

Result = TypeVar("Result")


def split_settings(arguments: list[str]) -> tuple[Path | None, list[str]]:
    """The configuration file, at any place (a first argument without = is one), and the overrides."""
    for place, word in enumerate(arguments):
        if Path(word).is_file() or word.startswith(PREFIX) or (place == 0 and "=" not in word):
            return config_path(word), arguments[:place] + arguments[place + 1 :]
    return None, arguments


def run_folder(name: str, out: Path | None) -> Path:
    """The folder to write: `out`, or a new one in runs/. ValueError if it cannot be used."""
    from unmask.util.files import check_folder, fresh_folder

    folder = out or fresh_folder(name)
    check_folder(folder)
    return folder


def can_resume(folder: Path, config_file: str, given: tuple[object, ...]) -> bool:
    """Whether there is something to resume; ValueError for a folder without a run, or other arguments."""
    from unmask.util.parsing import check_exists

    if any(given):
        raise ValueError("--resume uses the configuration of the run; give nothing else")
    check_exists(folder, "give the run folder that the interrupted command printed")
    if not (folder / config_file).is_file():
        raise ValueError(f"{folder} is not a run folder: there is no {config_file} in it")
    if (folder / FINISHED).is_file():
        shutil.rmtree(folder / "state", ignore_errors=True)  # left by a run that was killed at its very end
        typer.echo(f"{folder} is finished: there is nothing to resume")  # not an error: a queue may try again
        return False
    return True


@contextmanager
def short_warnings() -> Iterator[None]:
    """Print warnings as one line each."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *place: typer.echo(f"unmask: {message}", err=True)
        yield


def is_first_process() -> bool:
    """Whether this process prints."""
    return os.environ.get("RANK", "0") == "0"


def run_until_paused(command: str, folder: Path, training: Callable[[Callable[[], bool]], Result]) -> Result | None:
    """The result of `training`, which gets a function that says whether to stop; None if the run was paused."""
    from unmask.util.signals import Paused, stop_requests

    with stop_requests() as should_stop:
        try:
            return training(should_stop)
        except Paused as paused:
            if is_first_process():
                typer.echo(f"{paused}. To resume: unmask {command} --resume {quote(str(folder))}")
            return None
