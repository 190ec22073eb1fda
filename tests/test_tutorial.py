"""Every step of the tutorial runs exactly as printed, in order, in an empty folder, and does what the page says.

Files are the Python blocks that begin with their name. Left out are `pip`, and what needs a GPU and is not a dry run.
`unmask view`, which serves until Ctrl-C, gets its Ctrl-C at once; `unmask compare` starts no processes.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from unmask.cli.main import app
from unmask.view.server import Viewer

UNMASK: Any = typer.main.get_command(app)
PAGE = Path(__file__).parent.parent / "docs" / "tutorial.md"
BLOCK = re.compile(r"(<!-- gpu[^\n]*\n)?^```(python|sh)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def steps() -> list[tuple[str, str]]:
    """Files by name with their text, and commands, in the order of the page."""
    printed = []
    for gpu, language, text in BLOCK.findall(PAGE.read_text()):
        if language == "python":
            printed.append((text.partition("\n")[0].removeprefix("# "), text))
        else:
            lines = text.replace("\\\n", " ").splitlines()
            printed += [
                ("unmask", line) for line in lines if line.startswith("unmask ") and (not gpu or "--dry-run" in line)
            ]
    return printed


def metrics(run: str, name: str) -> list[float]:
    rows = map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines())
    return [row[name] for row in rows if name in row]


def test_every_step_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, cells_here: None
) -> None:
    def interrupted(viewer: Viewer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Viewer, "serve_forever", interrupted)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.chdir(tmp_path)
    commands = []
    for name, text in steps():
        if name != "unmask":
            Path(name).write_text(text)
            continue
        commands.append(shlex.split(text, comments=True)[1:])
        UNMASK.main(commands[-1], prog_name="unmask", standalone_mode=False)
    assert {words[0] for words in commands} == {"train", "view", "sample", "eval", "doctor", "methods", "compare"}
    before, *_, after = metrics("runs/first", "eval/solved_sampled")
    assert after > before + 0.3
    before, *_, after = metrics("runs/mine", "eval/reward")
    assert after > before + 0.1
    for page in ("demo.html", "both.html"):
        assert "unmask-data" in Path(page).read_text()
    assert "<svg" in Path("first.svg").read_text()
    assert {"config.yaml", "metrics.jsonl", "samples.jsonl", "traces.jsonl", "checkpoint"} <= {
        path.name for path in Path("runs/first").iterdir()
    }
    assert Path("runs/compared/results.json").is_file()
    out = capsys.readouterr().out
    assert "1.89   37.8 of 140 GiB" in out  # hours and peak of the dry run, as the page says
