"""What the commands that train share: their arguments, run folders, resuming and pausing."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import TypeVar

import typer

Result = TypeVar("Result")


def split_settings(arguments: list[str]) -> tuple[Path | None, list[str]]:
    """The configuration file, wherever it stands (a first argument without = is meant to be one), and the overrides."""
    for place, word in enumerate(arguments):
        if Path(word).is_file() or (place == 0 and "=" not in word):
            return Path(word), arguments[:place] + arguments[place + 1 :]
    return None, arguments


def run_folder(name: str, out: Path | None) -> Path:
    """The folder to write: `out`, or a new one in runs/. ValueError if it cannot be used."""
    from unmask.training.run.folder import check_folder, fresh_folder

    folder = out or fresh_folder(name)
    check_folder(folder)
    return folder


def can_resume(folder: Path, config_file: str, given: tuple[object, ...]) -> bool:
    """Whether there is something to resume; ValueError if it is no run folder, or other arguments are given too."""
    from unmask.training.run.folder import FINISHED
    from unmask.util.parsing import check_exists

    if any(given):
        raise ValueError("--resume uses the configuration of the run: give nothing else")
    if (folder / FINISHED).is_file():
        shutil.rmtree(folder / "state", ignore_errors=True)  # of a run that was ended in its last moment
        typer.echo(f"{folder} is finished: there is nothing to resume")  # no error: a queue may well try again
        return False
    check_exists(folder)
    if not (folder / config_file).is_file():
        raise ValueError(f"{folder} is not a run folder: there is no {config_file} in it")
    return True


def is_first_process() -> bool:
    """Of several processes the first one prints."""
    return os.environ.get("RANK", "0") == "0"


def run_until_paused(command: str, folder: Path, training: Callable[[Callable[[], bool]], Result]) -> Result | None:
    """Call `training` with a function that says whether a signal asked to stop. Returns its result; None if the run
    was paused, after printing how to resume it."""
    from unmask.util.signals import Paused, stop_requests

    try:
        with stop_requests() as should_stop:
            return training(should_stop)
    except Paused as paused:
        if is_first_process():
            typer.echo(f"{paused}. To resume: unmask {command} --resume {quote(str(folder))}")
        return None
