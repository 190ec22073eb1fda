"""The page with its data: one self-contained file, and the parts that the server sends."""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from unmask.util.files import check_output
from unmask.view.index import RunReader, json_text, runs_index
from unmask.view.sources import find_runs

PAGE = Path(__file__).parent / "page.html"
DATA, TRACES = "<!--unmask-data-->", "<!--unmask-traces-->"
LARGEST = 64 * 2**20
"""Bytes of groups in an exported page."""
UNSAFE = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}
"""Characters that could end a script element. In JSON they occur in strings only, so they can be escaped there."""


def template(path: Path = PAGE) -> tuple[str, str, str]:
    """The built page in three pieces: before the data, between data and traces, after the traces."""
    if not path.is_file():
        raise ValueError(f"the viewer's page {path} does not exist: `make web` builds it")
    text = path.read_text(encoding="utf-8")
    if text.count(DATA) != 1 or text.count(TRACES) != 1 or text.index(DATA) > text.index(TRACES):
        raise ValueError(f"{path} is not the viewer's page: it has no place for the data; `make web` builds it")
    head, _, rest = text.partition(DATA)
    middle, _, tail = rest.partition(TRACES)
    return head, middle, tail


def block(name: str, text: str) -> str:
    """JSON as a data block of the page, which a browser does not run."""
    return f'<script type="application/json" id="{name}">{text.translate(UNSAFE)}</script>\n'


def export(runs: Path | str | Sequence[Path | str], path: Path | str, page: Path = PAGE) -> Path:
    """Write runs, with the viewer, to one HTML file that opens anywhere; each path as in `unmask view`."""
    paths, path = [runs] if isinstance(runs, Path | str) else list(runs), Path(path)
    check_output(path)
    readers = find_runs(list(map(Path, paths)))
    head, middle, tail = template(page)
    for run in readers:
        run.refresh()
        thin(run, LARGEST // len(readers))
    aside = path.with_name(f".{path.name}.partial")
    with aside.open("w", encoding="utf-8") as file:
        file.write(head + block("unmask-data", json_text(runs_index(readers, live=False))) + middle)
        for number, run in enumerate(readers):
            for group in run.groups():
                if (line := run.trace(group["id"])) is not None:
                    file.write(block(f"trace-{number}-{group['id']}", line.decode()))
        file.write(tail)
    os.replace(aside, path)
    return path


def thin(run: RunReader, largest: int) -> None:
    """Keep every n-th step, with the smallest n for which the groups have at most `largest` bytes, or the first."""
    by_step, groups = dict[int | None, list[str]](), run.groups()
    for group in groups:
        by_step.setdefault(group["step"], []).append(group["id"])
    steps = list(by_step.values())
    sizes = [sum(map(run.size, names)) for names in steps]
    stride = next(n for n in range(1, len(sizes) + 2) if sum(sizes[::n]) <= largest or n > len(sizes))
    if stride > 1:
        chosen = {name for names in steps[::stride] for name in names}
        message = f"{run.folder}: {len(chosen)} of {len(groups)} groups are in the page; all would make it too large"
        warnings.warn(message, stacklevel=3)
        run.keep(chosen)
