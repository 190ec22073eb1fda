"""Does the credit rule 1 - p, the best without passes in docs/credit.md, help training? docs/credit.md#in-training.

    python benchmarks/surprise.py --jobs 2             # 225 runs on a CPU; writes benchmarks/results/surprise.json
    python benchmarks/surprise.py rates --jobs 2       # 264 runs; writes benchmarks/results/surprise_rates.json
    python benchmarks/surprise.py random --jobs 2      # 40 runs; writes benchmarks/results/surprise_random.json
    python benchmarks/surprise.py --tables

First part: three bases in three worlds, with 1 - p as the whole weight of a token or half of it, and with the weights
of the steps shuffled, the control. 100,000 forwards spent, five seeds, one rate. Second part: three bases alone and
with the whole weight, each at a rate of its own, in one of these worlds and three others. `unmask pretrain
benchmarks/starts/minis_two.yaml --out runs/starts/minis_two` makes the start of two of them. Third part: two bases in
random order. The claims are in LOG.md. The first two parts were run when the plug-in was a file with the same formula,
benchmarks/surprise_credit.py; their results name it.
"""

import argparse
import json
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from choosing import RESULTS, WORLDS as STUDIED, Study, both, holm, paired_p

from unmask.util.statistics import t_interval

BASES = ("raft", "agrpo", "diffu_grpo")
SHARES = ("0.5", "1")
LINES = {
    f"{base}{label}": base + plugin
    for base in BASES
    for label, plugin in {
        "": "",
        **{f", {share}": f"+surprise:share={share}" for share in SHARES},
        **{f", {share} shuffled": f"+surprise:share={share}:shuffled=true" for share in SHARES},
    }.items()
}
WORLDS = {
    "Sudoku, two behaviours": ("tiny-two", "sudoku"),
    "Sudoku, noise": ("tiny", "sudoku"),
    "Countdown, two behaviours": ("tiny-two", "countdown"),
}
FILE = RESULTS / "surprise.json"
OWN_RATES = (2e-4, 4e-4, 8e-4)
PLUGINS = {"": "", ", 1": "+surprise"}
RATED_BASES = ("diffu_grpo", "coupled_grpo", "agrpo")
RATED_WORLDS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "Sudoku, two behaviours": ("tiny-two", "sudoku", ()),
    "Countdown, noise": ("tiny", "countdown", ()),
    "arithmetic": STUDIED["arithmetic"],
    "json_mini": STUDIED["json_mini"],
}
RATED_FILE = RESULTS / "surprise_rates.json"
RATED_LINES = {base + label: base + plugin for base in RATED_BASES for label, plugin in PLUGINS.items()}
RANDOM_WORLDS = ("Sudoku, two behaviours", "Sudoku, noise")
RANDOM_LINES = {line: RATED_LINES[line] for line in ("diffu_grpo", "diffu_grpo, 1", "agrpo", "agrpo, 1")}
RANDOM_FILE = RESULTS / "surprise_random.json"


def ends(world: dict[str, Any], line: str, measure: str = "sampled") -> list[float]:
    return [curve[-1][measure] for _, curve in sorted(world["lines"][line]["curves"].items())]


def difference(world: dict[str, Any], line: str, other: str, measure: str = "sampled") -> str:
    pairs = zip(ends(world, line, measure), ends(world, other, measure), strict=True)
    middle, low, high = (100 * x for x in t_interval([a - b for a, b in pairs]))
    return f"{middle:+.1f} [{low:+.1f}, {high:+.1f}]"


def tables() -> None:
    """Print the tables of docs/credit.md, and Holm's p-values of the differences to the controls."""
    found = json.loads(FILE.read_text())
    results(found, LINES)
    print("\n| sampled | " + " | ".join(found) + " |\n|---|" + "---|" * len(found))
    p_values = {}
    for base in BASES:
        for share in SHARES:
            line, control = f"{base}, {share}", f"{base}, {share} shuffled"
            for name, other in (("uniform credit", base), ("control", control)):
                cells = (difference(world, line, other) for world in found.values())
                print(f"| {line} minus {name} | " + " | ".join(cells) + " |")
            for name, world in found.items():
                p_values[f"{line}, {name}"] = paired_p(ends(world, line), ends(world, control))
    print("\nHolm's p against the control:", {name: round(p, 3) for name, p in holm(p_values).items() if p < 0.5})
    print("mean difference to the control:", {share: f"{mean_difference(found, share):+.2f}" for share in SHARES})
    gains(json.loads(RATED_FILE.read_text()), RATED_LINES)
    gains(json.loads(RANDOM_FILE.read_text()), RANDOM_LINES)


def results(found: dict[str, Any], lines: Iterable[str]) -> None:
    print("\n| sampled / greedy | " + " | ".join(found) + " |\n|---|" + "---|" * len(found))
    for line in lines:
        cells = (both([curve[-1] for curve in world["lines"][line]["curves"].values()]) for world in found.values())
        print(f"| {line} | " + " | ".join(cells) + " |")


def gains(found: dict[str, Any], lines: Iterable[str]) -> None:
    """The table of lines with the whole weight beside their bases, and Holm's p-values of the differences."""
    results(found, lines)
    weighted, p_values = [line for line in lines if line.endswith(", 1")], {}
    for line in weighted:
        base = line.removesuffix(", 1")
        for measure in ("sampled", "greedy", "pass@4"):
            cells = [difference(world, line, base, measure) for world in found.values()]
            middle = 100 * mean(
                mean(ends(world, line, measure)) - mean(ends(world, base, measure)) for world in found.values()
            )
            print(f"| {line} minus {base}, {measure} | " + " | ".join(cells) + f" | {middle:+.1f} |")
    for line, (name, world) in product(weighted, found.items()):
        p_values[f"{line}, {name}"] = paired_p(ends(world, line), ends(world, line.removesuffix(", 1")))
    print("Holm's p:", {name: round(p, 3) for name, p in holm(p_values).items()})


def mean_difference(found: dict[str, Any], share: str) -> float:
    pairs = ((ends(world, f"{base}, {share}"), ends(world, f"{base}, {share} shuffled"))
             for world in found.values() for base in BASES)  # fmt: skip
    return 100 * mean(mean(line) - mean(control) for line, control in pairs)


def own_rates(study: Study) -> None:
    found = {}
    for name, (model, task, more) in RATED_WORLDS.items():
        settings = study.settings(model, task, "eval.every=0", *more)
        found[name] = study.run(f"rated {name}", RATED_LINES, settings, seeds=5, budget="forwards=1e5", rates=OWN_RATES)
        RATED_FILE.write_text(json.dumps(found) + "\n")


def random_order(study: Study) -> None:
    found = {}
    for name in RANDOM_WORLDS:
        settings = study.settings(*WORLDS[name], "eval.every=0", "optimizer.lr=2e-4", "rollout.order=random")
        found[name] = study.run(f"random {name}", RANDOM_LINES, settings, seeds=5, budget="forwards=1e5")
        RANDOM_FILE.write_text(json.dumps(found) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["first", "rates", "random"], nargs="?", default="first")
    parser.add_argument("--out", type=Path, default=Path("runs/surprise"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--tables", action="store_true")
    arguments = parser.parse_args()
    if arguments.tables:
        return tables()
    study, found = Study(arguments), {}
    if arguments.part == "rates":
        return own_rates(study)
    if arguments.part == "random":
        return random_order(study)
    for name, (model, task) in WORLDS.items():
        settings = study.settings(model, task, "eval.every=0", "optimizer.lr=2e-4")
        found[name] = study.run(f"surprise {name}", LINES, settings, seeds=5, budget="forwards=1e5")
        FILE.write_text(json.dumps(found) + "\n")
    return None


if __name__ == "__main__":
    main()
