"""The page with what it shows: one file that needs nothing else, or what the server answers with."""

import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from unmask.util.files import check_output
from unmask.view.index import RunReader, json_text, runs_index

PAGE = Path(__file__).parent / "page.html"
DATA, TRACES = "<!--unmask-data-->", "<!--unmask-traces-->"
LARGEST = 64 * 2**20
"""Bytes of groups in an exported page."""
UNSAFE = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def html_safe(text: str) -> str:
    """JSON as it may stand in HTML: nothing in it ends a script, and none of these stands outside of a string."""
    return text.translate(UNSAFE)


def template(path: Path = PAGE) -> tuple[str, str, str]:
    """The built page in three pieces: before the data, between data and traces, and the rest."""
    if not path.is_file():
        raise ValueError(f"the viewer's page {path} is not there: `make web` builds it")
    text = path.read_text(encoding="utf-8")
    if text.count(DATA) != 1 or text.count(TRACES) != 1 or text.index(DATA) > text.index(TRACES):
        raise ValueError(f"{path} is not the viewer's page: it has no place for the data; `make web` builds it")
    head, _, rest = text.partition(DATA)
    middle, _, tail = rest.partition(TRACES)
    return head, middle, tail


def block(name: str, text: str) -> str:
    """JSON as a block of data that no browser runs."""
    return f'<script type="application/json" id="{name}">{html_safe(text)}</script>\n'


def index_text(runs: Sequence[RunReader], live: bool) -> str:
    return json_text(runs_index(runs, live))


def data_block(index: str) -> str:
    return block("unmask-data", index)


def export(runs: Path | str | Sequence[Path | str], path: Path | str, page: Path = PAGE) -> Path:
    """Write the runs (a run folder or several) and the viewer to one HTML file, which opens anywhere."""
    folders, path = [runs] if isinstance(runs, Path | str) else list(runs), Path(path)
    check_output(path)
    readers = [RunReader(Path(folder)) for folder in folders]
    head, middle, tail = template(page)
    for run in readers:
        run.refresh()
        thin(run, LARGEST // len(readers))
    aside = path.with_name(f".{path.name}.partial")
    with aside.open("w", encoding="utf-8") as file:
        file.write(head + data_block(index_text(readers, live=False)) + middle)
        file.writelines(_trace_blocks(readers))
        file.write(tail)
    os.replace(aside, path)
    return path


def thin(run: RunReader, largest: int) -> None:
    """Leave steps out, evenly, until the groups of the rest have no more than so many bytes, or one step is left."""
    names, groups = dict[int | None, list[str]](), run.groups()
    for group in groups:
        names.setdefault(group["step"], []).append(group["id"])
    steps, sizes = list(names.values()), [sum(map(run.size, inside)) for inside in names.values()]
    stride = next(n for n in range(1, len(sizes) + 2) if sum(sizes[::n]) <= largest or n > len(sizes))
    if stride > 1:
        chosen = {name for inside in steps[::stride] for name in inside}
        message = f"{run.folder}: {len(chosen)} of {len(groups)} groups are in the page; all would make it too large"
        warnings.warn(message, stacklevel=3)
        run.keep(chosen)


def _trace_blocks(runs: Sequence[RunReader]) -> Iterator[str]:
    for number, run in enumerate(runs):
        for group in run.groups():
            line = run.trace(group["id"])
            if line is not None:
                yield block(f"trace-{number}-{group['id']}", line.decode())
