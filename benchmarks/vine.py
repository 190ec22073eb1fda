"""Does better credit pay for its passes? vine and its controls at equal cost: docs/methods/vine.md.

    unmask pretrain benchmarks/starts/large_two.yaml --out runs/starts/large_two --device cuda         # and large_noise
    python benchmarks/vine.py --device cuda --jobs 24                                        # every world
    python benchmarks/vine.py "36 positions, noise" --device cuda --jobs 24                  # one
    python benchmarks/vine.py --rate 2e-4 --device cuda --jobs 24                            # another learning rate
    python benchmarks/vine.py --tables

100,000 forwards spent, five seeds, one learning rate for every line. Writes benchmarks/results/vine_RATE.json, where a
world replaces its entry.
"""

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

from choosing import RESULTS, Study, percent, with_options

from unmask.util.statistics import t_interval

LINES = {
    "vine": "vine",
    "vine, `final=true`": "vine:final=true",
    "vine, `value_steps=1`": "vine:value_steps=1",
    "agrpo": "agrpo",
    "agrpo, groups of 16": "agrpo:group=16",
    "raft, SML": "raft",
    "raft, uniform": "raft:states=uniform",
}
LARGE = ("sudoku_large.size=6", "sudoku_large.holes=[6,9]", "rollout.steps=12")
WORLDS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "16 positions, two behaviours": ("tiny-two", "sudoku", ()),
    "16 positions, noise": ("tiny", "sudoku", ()),
    "36 positions, two behaviours": ("runs/starts/large_two", "sudoku_large", LARGE),
    "36 positions, noise": ("runs/starts/large_noise", "sudoku_large", LARGE),
}
"""The start, the task and its settings."""


def ends(world: dict[str, Any], line: str, measure: str) -> list[float]:
    return [curve[-1][measure] for curve in world["lines"][line]["curves"].values()]


def tables(found: dict[str, Any]) -> None:
    for name, world in found.items():
        print(f"\n| {name} | updates | sampled | greedy | sampled, minus vine's |\n|---|---|---|---|---|")
        start = next(iter(world["lines"]["vine"]["curves"].values()))[0]
        print(f"| start | | {100 * start['sampled']:.1f} | {100 * start['greedy']:.1f} | |")
        for line in world["lines"]:
            cells = [line, f"{mean(ends(world, line, 'updates')):.0f}"]
            cells += [percent(ends(world, line, measure)) for measure in ("sampled", "greedy")]
            print("| " + " | ".join([*cells, difference(world, line)]) + " |")


def difference(world: dict[str, Any], line: str) -> str:
    """Of a line and vine, paired by seed."""
    if line == "vine":
        return ""
    pairs = zip(ends(world, line, "sampled"), ends(world, "vine", "sampled"), strict=True)
    middle, low, high = (100 * x for x in t_interval([a - b for a, b in pairs]))
    return f"{middle:+.1f} [{low:+.1f}, {high:+.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("worlds", nargs="*", metavar="WORLD", help=", ".join(WORLDS))
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/vine"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--budget", default="forwards=1e5")
    parser.add_argument("--rate", default="4e-4", help="the learning rate")
    arguments = parser.parse_args()
    path = RESULTS / f"vine_{arguments.rate}.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    if arguments.tables:
        return tables(found)
    study, rate = Study(arguments), f"optimizer.lr={arguments.rate}"
    lines = {name: with_options(line, rate) for name, line in LINES.items()}
    for name in arguments.worlds or WORLDS:
        model, task, more = WORLDS[name]
        settings = study.settings(model, task, "eval.every=0", *more)
        found[name] = study.run(
            f"{arguments.rate} {name}", lines, settings, seeds=arguments.seeds, budget=arguments.budget
        )
        path.write_text(json.dumps({name: found[name] for name in WORLDS if name in found}) + "\n")
    return None


if __name__ == "__main__":
    main()
