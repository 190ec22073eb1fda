"""Does better credit pay for its passes? vine and its controls at equal cost: docs/methods/vine.md.

    unmask pretrain benchmarks/starts/large_two.yaml --out runs/starts/large_two --device cuda         # and large_noise
    python benchmarks/vine.py --device cuda --jobs 24                                        # every world
    python benchmarks/vine.py "36 positions, noise" --device cuda --jobs 24                  # one
    python benchmarks/vine.py --rate 2e-4 --device cuda --jobs 24                            # another learning rate
    python benchmarks/vine.py --tables                                                       # and with --rate 2e-4

100,000 forwards spent, five seeds, one learning rate for every line. Writes benchmarks/results/vine_RATE.json, where a
world replaces its entry.
"""

import json
from statistics import mean
from typing import Any

from choosing import RESULTS, Study, both, ends, heading, points, study_parser, with_options

LINES = {
    "vine": "vine",
    "vine, `final=true`": "vine:final=true",
    "vine, `value_steps=1`": "vine:value_steps=1",
    "agrpo": "agrpo",
    "agrpo, groups of 16": "agrpo:group=16",
    "raft, SML": "raft:states=sml",
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


def tables(found: dict[str, Any]) -> None:
    """Print the tables of docs/methods/vine.md for one learning rate."""
    print(heading("sampled / greedy", found))
    starts = [next(iter(world["lines"]["vine"]["curves"].values()))[:1] for world in found.values()]
    print("| start | " + " | ".join(both(start) for start in starts) + " |")
    for line in LINES:
        runs = [world["lines"][line]["curves"].values() for world in found.values()]
        print(f"| {line} | " + " | ".join(both([curve[-1] for curve in curves]) for curves in runs) + " |")
    print("\n" + heading("vine minus, sampled", found))
    for line in list(LINES)[1:]:
        cells = (points(ends(world, "vine"), ends(world, line)) for world in found.values())
        print(f"| {line} | " + " | ".join(cells) + " |")
    print("\n" + heading("forwards of an update", found))
    for line in LINES:
        spent = [mean(ends(world, line, "forwards")) / mean(ends(world, line, "updates")) for world in found.values()]
        print(f"| {line} | " + " | ".join(f"{forwards:,.0f}" for forwards in spent) + " |")


def main() -> None:
    parser = study_parser(__doc__, "runs/vine")
    parser.add_argument("worlds", nargs="*", metavar="WORLD", help=", ".join(WORLDS))
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
