"""How much weight should DACA's fully masked view have? docs/methods/daca.md.

    unmask pretrain benchmarks/starts/minis_two.yaml --out runs/starts/minis_two
    python benchmarks/anchor.py --jobs 2       # 140 runs on a CPU; writes benchmarks/results/anchor.json
    python benchmarks/anchor.py --tables

diffu_grpo+daca with four anchors, and raft with two and at its own states, in four worlds. 100,000 forwards spent, five
seeds, a rate of 4e-4: that is what the shelf chose for DACA with anchors of 0 and 0.5 on Sudoku and on Countdown, and
for raft on Sudoku. No rate was searched for the others and on json_mini. The claims are in LOG.md.
"""

import json

from choosing import RESULTS, Study, print_differences, print_ends, study_parser
from keep_correct import COLUMNS

FILE = RESULTS / "anchor.json"
ANCHORS = (0, 0.25, 0.5, 0.75)
LINES = {f"anchor {anchor:g}": f"diffu_grpo:optimizer.lr=4e-4+daca:anchor={anchor:g}" for anchor in ANCHORS}
RAFT = {
    "raft, uniform": "raft:states=uniform:optimizer.lr=4e-4",
    "raft, anchor 0.25": "raft:optimizer.lr=4e-4+sml:anchor=0.25",
    "raft, anchor 0.5": "raft:optimizer.lr=4e-4+sml:anchor=0.5",
}
AGAINST = {line: "anchor 0.5" for line in LINES} | {line: "raft, uniform" for line in RAFT}
"""The default that a line is compared with."""


def tables() -> None:
    """Print the tables of docs/methods/daca.md."""
    found = json.loads(FILE.read_text())
    print_ends(found, AGAINST)
    print_differences(found, [pair for pair in AGAINST.items() if pair[0] != pair[1]])


def main() -> None:
    arguments = study_parser(__doc__, "runs/anchor").parse_args()
    if arguments.tables:
        return tables()
    study, found = Study(arguments), {}
    for name, (model, task, more) in COLUMNS.items():
        settings = study.settings(model, task, "eval.every=0", *more)
        found[name], raft = (
            study.run(f"{part} {name}", lines, settings, seeds=5, budget="forwards=1e5")
            for part, lines in (("anchor", LINES), ("raft", RAFT))
        )
        found[name]["lines"] |= raft["lines"]
        FILE.write_text(json.dumps(found) + "\n")
    return None


if __name__ == "__main__":
    main()
