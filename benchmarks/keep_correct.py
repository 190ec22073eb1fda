"""At which masked states should keep_correct score correct rollouts? docs/methods/keep_correct.md.

    unmask pretrain benchmarks/starts/minis_two.yaml --out runs/starts/minis_two
    python benchmarks/keep_correct.py --jobs 2       # 120 runs on a CPU; writes benchmarks/results/keep_correct.json
    python benchmarks/keep_correct.py --tables

Two bases, alone and with the term at SML's and at uniform states, in four worlds. 100,000 forwards spent, five seeds,
the rate that the shelf chose for the base, on json_mini the study of surprise. The claims are in LOG.md.
"""

import json

from choosing import (
    RESULTS,
    WORLDS,
    Study,
    print_differences,
    print_ends,
    study_parser,
    with_options,
)

FILE = RESULTS / "keep_correct.json"
BASES = ("agrpo", "diffu_grpo")
TERMS = {"": "", ", SML": "+keep_correct:weight=0.5:states=sml", ", uniform": "+keep_correct:weight=0.5:states=uniform"}
COLUMNS = {
    "Sudoku, two behaviours": ("tiny-two", "sudoku", ()),
    "Sudoku, noise": ("tiny", "sudoku", ()),
    "Countdown, two behaviours": WORLDS["countdown"],
    "json_mini": WORLDS["json_mini"],
}
RATES = {"Sudoku, noise": ("shelf", "Sudoku, two behaviours"), "json_mini": ("surprise_rates", "json_mini")}
"""Where the rates of a column are that has none of its own in the shelf: the file and its column."""


def lines_of(name: str) -> dict[str, str]:
    file, column = RATES.get(name, ("shelf", name))
    rates = json.loads((RESULTS / f"{file}.json").read_text())[column]["rates"]
    return {
        base + term: with_options(base, f"optimizer.lr={rates[base]['chosen']:g}") + plugin
        for base in BASES
        for term, plugin in TERMS.items()
    }


def tables() -> None:
    """Print the tables of docs/methods/keep_correct.md."""
    found = json.loads(FILE.read_text())
    print_ends(found, [base + term for base in BASES for term in TERMS])
    print_differences(found, [(base + ", uniform", base + other) for base in BASES for other in ("", ", SML")])


def main() -> None:
    arguments = study_parser(__doc__, "runs/keep_correct").parse_args()
    if arguments.tables:
        return tables()
    study, found = Study(arguments), {}
    for name, (model, task, more) in COLUMNS.items():
        settings = study.settings(model, task, "eval.every=0", *more)
        found[name] = study.run(f"keep {name}", lines_of(name), settings, seeds=5, budget="forwards=1e5")
        FILE.write_text(json.dumps(found) + "\n")
    return None


if __name__ == "__main__":
    main()
