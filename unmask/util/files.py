"""Files that are complete or absent, even after a crash of the machine."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def fsync(path: Path) -> None:
    """Sync a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Add the path to an OSError: a full disk's does not name the file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_whole(path: Path, text: str) -> None:
    """Write a file aside, sync and rename it; if that fails, the old file stays."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with naming_file(path):
            aside.write_text(text)
            fsync(aside)
            aside.rename(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def save_tensors(tensors: "Mapping[str, Tensor]", path: Path, metadata: "Mapping[str, str] | None" = None) -> None:
    """Write a safetensors file and sync it; OSError if the disk is full."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode  # of the umask; safetensors replaces the file by one that only its owner can read
    try:
        save_file(dict(tensors), path, metadata={"format": "pt", **(metadata or {})})
        path.chmod(mode)
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from None
    fsync(path)


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_input(path: Path) -> None:
    """ValueError for a missing data file."""
    if not path.is_file():
        raise ValueError(f"there is no data file {path}")


def check_output(path: Path | None) -> None:
    """ValueError if no file can be written at this path."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file to write")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} to write {path.name} in")
    if not os.access(path if path.exists() else path.parent, os.W_OK, effective_ids=True):
        raise ValueError(f"{path} cannot be written; choose another path")


def fresh_folder(name: str, parent: Path = Path("runs")) -> Path:
    """runs/NAME, or runs/NAME-2, -3, ... if that exists."""
    number, folder = 1, parent / name
    while folder.exists():
        number += 1
        folder = parent / f"{name}-{number}"
    return folder


def check_folder(folder: Path) -> None:
    """ValueError if the folder is not empty or cannot be written."""
    if folder.is_file() or (folder.exists() and any(folder.iterdir())):
        raise ValueError(f"{folder} already exists and is not an empty folder; choose another --out")
    check_writable(folder)


def check_writable(folder: Path) -> None:
    """ValueError if a folder cannot be made, or files cannot be written in it."""
    parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK, effective_ids=True):
        raise ValueError(f"{parent} cannot be written to; choose another --out")
