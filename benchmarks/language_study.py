"""The files of the study of a real language model, and its settings at full and at toy size: see language.py."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from choosing import RESULTS
from language_worlds import WORLDS, Ask

from unmask.studies.compare.cells import write_json
from unmask.util.files import digest


class Study:
    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.out, self.work, self.toy = given, given.out, given.work, given.toy
        self.places = [(self.out, "")] + [(RESULTS, "language_")] * (given.part in ("tables", "draw"))
        self.device = "cpu" if given.toy else given.device
        self.out.mkdir(parents=True, exist_ok=True)
        self.work.mkdir(parents=True, exist_ok=True)

    def read(self, name: str) -> dict[str, Any]:
        """A result file of --out; for tables and figures else of benchmarks/results. Empty if there is none."""
        for folder, prefix in self.places:
            if (path := folder / f"{prefix}{name}.json").is_file():
                found: dict[str, Any] = json.loads(path.read_text())
                return found
        return {}

    def evaluated_before(self, name: str, losses: dict[int, float]) -> dict[str, Any]:
        """The stored evaluations of an adaptation, if its chosen checkpoint has the same bytes now, and the losses of
        its whole course are equal. Empty otherwise."""
        stored = json.loads((RESULTS / "language_starts.json").read_text())
        before, model = stored["adaptations"].get(name, {}), self.work / "starts" / stored["chosen"].get(name, "")
        if {str(update): loss for update, loss in losses.items()} != before.get("loss"):
            return {}
        same = (model / "model.safetensors").is_file() and weights_hash(model) == stored["hashes"][name]
        return {kind: before[kind] for kind in ("checkpoints", "others")} if same else {}

    def by_world(self, part: str) -> dict[str, Any]:
        """The results of a part, by world: each has a file of its own, so several can be trained side by side."""
        found = {name: self.read(f"{part}_{name}") for name in WORLDS}
        return {name: results for name, results in found.items() if results}

    def write(self, name: str, found: dict[str, Any]) -> None:
        write_json(self.out / f"{name}.json", found)

    def sized(self, ask: Ask) -> Ask:
        """As it is, or at toy size."""
        return replace(ask, problems=2, samples=2, steps=ask.length // 16) if self.toy else ask

    def start(self, name: str) -> Path:
        """The folder of a start: --start, or the one that `starts` has chosen."""
        if self.given.start is not None:
            return Path(self.given.start)
        chosen = self.read("starts").get("chosen", {})
        if name not in chosen or not (folder := self.work / "starts" / chosen[name]).is_dir():
            raise SystemExit(
                f"there is no start {name} in {self.work}: run the part starts first, or give --start FOLDER"
            )
        return folder


def weights_hash(model: Path) -> str:
    return digest(model / "model.safetensors")[:16]
