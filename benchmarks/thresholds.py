"""Should training rollouts be decoded by a threshold? docs/studies/thresholds.md.

    python benchmarks/thresholds.py --jobs 2         # 360 runs on a CPU; writes benchmarks/results/thresholds.json
    python benchmarks/thresholds.py --lines agrpo    # only this line; the others stay as they are
    python benchmarks/thresholds.py --tables

Eight lines in three worlds, trained on rollouts of two positions a step and on rollouts by two thresholds, at 50,000
forwards spent, five seeds. The learning rate is the one that the shelf chose for two positions a step, on Sudoku or on
Countdown from two behaviours. Every trained model is evaluated with two positions a step and with a threshold of 0.9.
The claims are in LOG.md.
"""

import json
from pathlib import Path
from statistics import mean
from typing import Any

from choosing import RESULTS, Study, holm, paired_p, points, study_parser
from orders import WORLDS, lines_of, solved, world_runs

STATED = {
    "raft": "raft:states=uniform",
    "diffu_grpo+daca": "diffu_grpo+daca:anchor=0.5",
    "agrpo": "agrpo",
    "diffu_grpo": "diffu_grpo",
}
"""The lines of the first claims."""
TESTS = {
    "raft, visited": "raft:states=visited",
    "agrpo, positive": "agrpo+positive",
    "daca, both signs": "diffu_grpo+daca:anchor=0.5:kl=0.05:negative=1",
    "agrpo+keep_correct": "agrpo+keep_correct",
}
"""Of what makes a model overconfident, and how to avoid it."""
LINES = STATED | TESTS
RATE_OF = {"agrpo+positive": "agrpo", "agrpo+keep_correct": "agrpo"}
"""Lines whose rate was not searched, with the one whose rate they take."""
STEPS = "two a step"
WAYS = {STEPS: "", "threshold 0.9": "rollout.threshold=0.9", "threshold 0.6": "rollout.threshold=0.6"}
DECODED = {STEPS: None, "threshold 0.9": 0.9, "threshold 0.6": 0.6}
FILE = RESULTS / "thresholds.json"


def evaluated(model: str | Path, task: str) -> dict[str, Any]:
    return {way: solved(model, task, threshold=DECODED[way]) for way in (STEPS, "threshold 0.9")}


def values(world: dict[str, Any], label: str, way: str, decoded: str, key: str) -> list[float]:
    return [run[decoded][key] for _, run in sorted(world["lines"][f"{label}, {way}"]["seeds"].items())]


def tables() -> None:
    """Print the tables of docs/studies/thresholds.md."""
    found = json.loads(FILE.read_text())
    for name, world in found.items():
        print(f"\n{name}, {world['budget']}")
        print("\n| start | sampled | greedy | samples differ | passes |\n" + "|---" * 5 + "|")
        for way, start in world["start"].items():
            shares = (f"{100 * start[key]:.1f}" for key in ("sampled", "greedy", "mixed"))
            print(f"| {way} | {' | '.join(shares)} | {start['passes']:.1f} |")
        print("\n| line | trained with | updates | idle | two a step | greedy, difference | "
              "threshold 0.9 | greedy, difference | passes |\n" + "|---" * 9 + "|")  # fmt: skip
        for label in LINES:
            for way in WAYS:
                runs = world["lines"][f"{label}, {way}"]["seeds"].values()
                cells = [f"{mean(run['updates'] for run in runs):.0f}", f"{100 * mean(r['idle'] for r in runs):.0f}"]
                for decoded in (STEPS, "threshold 0.9"):
                    sampled, greedy = (values(world, label, way, decoded, key) for key in ("sampled", "greedy"))
                    usual = values(world, label, STEPS, decoded, "greedy")
                    cells += [f"{100 * mean(sampled):.1f} / {100 * mean(greedy):.1f}"]
                    cells += ["" if way == STEPS else points(greedy, usual)]
                cells += [f"{mean(values(world, label, way, 'threshold 0.9', 'passes')):.1f}"]
                print(f"| {label} | {way} | " + " | ".join(cells) + " |")
    for decoded in (STEPS, "threshold 0.9"):
        for key in ("sampled", "greedy"):
            p_values = {
                f"{name}, {label}, {way}": paired_p(
                    values(world, label, way, decoded, key), values(world, label, STEPS, decoded, key)
                )
                for name, world in found.items()
                for label in STATED
                for way in list(WAYS)[1:]
            }
            small = {name: round(p, 4) for name, p in holm(p_values).items() if p < 0.1}
            print(f"\nevaluated by {decoded}, {key}, Holm's p below 0.1:", small)


def main() -> None:
    parser = study_parser(__doc__, "runs/thresholds")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--budget", default="forwards=5e4")
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--lines", nargs="+", choices=list(LINES))
    arguments = parser.parse_args()
    if arguments.tables:
        return tables()
    study, found = Study(arguments), json.loads(arguments.file.read_text()) if arguments.file.is_file() else {}
    rates = json.loads((RESULTS / "shelf.json").read_text())
    for searched in (world["rates"] for world in rates.values() if world.get("rates")):
        searched.update({line: searched[other] for line, other in RATE_OF.items()})
    for name, (model, task) in WORLDS.items():
        start = {way: solved(model, task, threshold=bound) for way, bound in DECODED.items()}
        found[name] = found.get(name, {}) | {"start": start}
        lines = lines_of(name, rates, {label: LINES[label] for label in arguments.lines or LINES}, WAYS)
        before = found[name].get("lines", {}) if arguments.lines else {}
        found[name] |= world_runs(study, name, lines, arguments.seeds, arguments.budget, evaluated)
        found[name]["lines"] = before | found[name]["lines"]
        arguments.file.write_text(json.dumps(found) + "\n")
    return None


if __name__ == "__main__":
    main()
