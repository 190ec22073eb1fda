"""Configurations that come with the package: `recipe:NAME` in place of a file. Imports no torch."""

from pathlib import Path

from unmask.util.parsing import suggestion

FOLDER = Path(__file__).parent / "recipes"
PREFIX = "recipe:"


def recipes() -> dict[str, Path]:
    """The files by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def command_of(name: str) -> str:
    """The command that a recipe is for."""
    return next((command for command in ("pretrain", "adapt") if name.startswith(f"{command}_")), "train")


def check_command(path: Path, command: str) -> None:
    """ValueError for a recipe that is for another command."""
    if path.parent == FOLDER and (other := command_of(path.stem)) != command:
        raise ValueError(f"recipe:{path.stem} is for another command: write unmask {other} recipe:{path.stem}")


def config_path(word: str | Path) -> Path:
    """The file of `recipe:NAME`; any other word is a path."""
    name = str(word)
    if not name.startswith(PREFIX):
        return Path(word)
    known = recipes()
    if (path := known.get(name.removeprefix(PREFIX))) is None:
        raise ValueError(f"there is no recipe {name.removeprefix(PREFIX)!r}; {suggestion(name[len(PREFIX) :], known)}")
    return path


def summary(path: Path) -> str:
    """The first line of a recipe, which says what it is."""
    return path.read_text().partition("\n")[0].removeprefix("# ")
