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

import json
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from choosing import RESULTS, WORLDS, Study, ends, heading, holm, paired_p, points, print_ends, study_parser

BASES = ("raft", "agrpo", "diffu_grpo")
SHARES = ("0.5", "1")
CONTROLLED = {
    f"{base}{label}": base + plugin
    for base in BASES
    for label, plugin in {
        "": "",
        **{f", {share}": f"+surprise:share={share}" for share in SHARES},
        **{f", {share} shuffled": f"+surprise:share={share}:shuffled=true" for share in SHARES},
    }.items()
}
"""The lines of the first part, by their names in the tables."""
WHOLE = {"": "", ", 1": "+surprise"}
RATED = {
    base + label: base + plugin for base in ("diffu_grpo", "coupled_grpo", "agrpo") for label, plugin in WHOLE.items()
}
World = tuple[str, str, tuple[str, ...]]
"""The start, the task and its settings."""
SUDOKU: World = ("tiny-two", "sudoku", ())
NOISE: World = ("tiny", "sudoku", ())


class Part(NamedTuple):
    file: Path
    lines: dict[str, str]
    worlds: dict[str, World]
    settings: tuple[str, ...] = ()
    rates: tuple[float, ...] = ()


PARTS = {
    "first": Part(
        RESULTS / "surprise.json",
        CONTROLLED,
        {"Sudoku, two behaviours": SUDOKU, "Sudoku, noise": NOISE, "Countdown, two behaviours": WORLDS["countdown"]},
        ("optimizer.lr=2e-4",),
    ),
    "rates": Part(
        RESULTS / "surprise_rates.json",
        RATED,
        {
            "Sudoku, two behaviours": SUDOKU,
            "Countdown, noise": ("tiny", "countdown", ()),
            "arithmetic": WORLDS["arithmetic"],
            "json_mini": WORLDS["json_mini"],
        },
        rates=(2e-4, 4e-4, 8e-4),
    ),
    "random": Part(
        RESULTS / "surprise_random.json",
        {line: text for line, text in RATED.items() if not line.startswith("coupled")},
        {"Sudoku, two behaviours": SUDOKU, "Sudoku, noise": NOISE},
        ("optimizer.lr=2e-4", "rollout.order=random"),
    ),
}


def tables() -> None:
    """Print the tables of docs/credit.md and docs/methods/surprise.md, with Holm's p-values."""
    found = json.loads(PARTS["first"].file.read_text())
    print_ends(found, CONTROLLED)
    print("\n" + heading("sampled", found))
    p_values = {}
    for base, share in product(BASES, SHARES):
        line, control = f"{base}, {share}", f"{base}, {share} shuffled"
        for name, other in (("uniform credit", base), ("control", control)):
            cells = (points(ends(world, line), ends(world, other)) for world in found.values())
            print(f"| {line} minus {name} | " + " | ".join(cells) + " |")
        p_values |= {
            f"{line}, {name}": paired_p(ends(world, line), ends(world, control)) for name, world in found.items()
        }
    print("\nHolm's p against the control:", {name: round(p, 3) for name, p in holm(p_values).items() if p < 0.5})
    for share in SHARES:
        gains = [mean(ends(world, f"{base}, {share}")) - mean(ends(world, base))
                 for world, base in product(found.values(), BASES)]  # fmt: skip
        print(f"{share} minus uniform credit, mean: {100 * mean(gains):+.1f}")
    for name in ("rates", "random"):
        print_gains(json.loads(PARTS[name].file.read_text()), PARTS[name].lines)


def print_gains(found: dict[str, Any], lines: dict[str, str]) -> None:
    """The lines, those with the whole weight minus their bases, the means over worlds, and Holm's p-values."""
    print_ends(found, lines)
    print("\n" + heading("with surprise minus without", [*found, "mean"]))
    pairs, p_values = [(line, line.removesuffix(", 1")) for line in lines if line.endswith(", 1")], {}
    for (line, base), measure in product(pairs, ("sampled", "greedy", "pass@4")):
        both = {name: (ends(world, line, measure), ends(world, base, measure)) for name, world in found.items()}
        middle = 100 * mean(mean(values) - mean(others) for values, others in both.values())
        print(f"| {base}, {measure} | " + " | ".join(points(*pair) for pair in both.values()) + f" | {middle:+.1f} |")
        if measure == "sampled":
            p_values |= {f"{base}, {name}": paired_p(*pair) for name, pair in both.items()}
    print("\nHolm's p, sampled:", {name: round(p, 3) for name, p in holm(p_values).items()})


def main() -> None:
    parser = study_parser(__doc__, "runs/surprise")
    parser.add_argument("part", choices=list(PARTS), nargs="?", default="first")
    arguments = parser.parse_args()
    if arguments.tables:
        return tables()
    study, part, found = Study(arguments), PARTS[arguments.part], {}
    for name, (model, task, more) in part.worlds.items():
        settings = study.settings(model, task, "eval.every=0", *part.settings, *more)
        folder = f"{arguments.part} {name}"
        found[name] = study.run(folder, part.lines, settings, seeds=5, budget="forwards=1e5", rates=part.rates)
        part.file.write_text(json.dumps(found) + "\n")
    return None


if __name__ == "__main__":
    main()
