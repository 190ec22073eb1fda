"""In which order should training rollouts commit positions? docs/studies/orders.md.

    python benchmarks/orders.py --jobs 2             # 135 runs on a CPU; writes benchmarks/results/orders.json
    python benchmarks/orders.py --tables

Three lines in three worlds, trained on rollouts in three orders at 50,000 forwards spent, five seeds. The learning
rate is the one that the shelf chose for low_confidence (benchmarks/results/shelf.json). Every trained model is
evaluated in low_confidence, the field's default. The claims are in LOG.md.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from choosing import RESULTS, Study, holm, paired_p, percent, points, study_parser, with_options

from unmask.core.order import ORDERS
from unmask.evaluation.evaluate import Evaluator
from unmask.models import load_model
from unmask.rollout.decoding import Decoding
from unmask.studies.compare.compare import Comparison, compare
from unmask.tasks import TASKS
from unmask.training.run.folder import read_metrics
from unmask.util.metering import Meter, count_passes
from unmask.util.micro_batch import MicroBatch

LINES = {"raft": "raft:states=uniform", "agrpo": "agrpo", "diffu_grpo": "diffu_grpo"}
TRAINED = ("low_confidence", "surest_position", "random")
WORLDS = {
    "Sudoku, two behaviours": ("tiny-two", "sudoku"),
    "Countdown, two behaviours": ("tiny-two", "countdown"),
    "Sudoku, noise": ("tiny", "sudoku"),
}
FILE = RESULTS / "orders.json"


def solved(
    model: str | Path, task_name: str, order: str = TRAINED[0], threshold: float | None = None
) -> dict[str, Any]:
    """On the test split: 256 problems, eight samples. `mixed` is the share of problems with right and wrong ones,
    `passes` the mean of a completion."""
    task, meter = TASKS[task_name](), Meter()
    decoding = Decoding(task.length, task.length // 2, task.length, order=ORDERS[order], threshold=threshold)
    rows, policy = task.rows("test", 256, 0), load_model(model)
    with torch.no_grad(), count_passes(meter, policy):
        data = Evaluator(policy, task, decoding, 8, -1, "cpu", MicroBatch(512)).evaluate(rows).data()
    return {"sampled": data["sampled"][0], "greedy": data["greedy"][0], "mixed": data["mixed"][0],
            "behaviours": data["behaviours"], "passes": meter.forwards / len(rows) / 9}  # fmt: skip


def lines_of(world: str, rates: dict[str, Any], lines: Mapping[str, str], ways: Mapping[str, str]) -> dict[str, str]:
    """All lines, each with every decoding of its training rollouts, at the learning rate that the shelf chose."""
    first = "Countdown, two behaviours" if "Countdown" in world else "Sudoku, two behaviours"
    return {
        f"{label}, {way}": with_options(
            line, f"optimizer.lr={rates[first]['rates'][line]['chosen']:g}", *filter(None, [option])
        )
        for label, line in lines.items()
        for way, option in ways.items()
    }


def trained(run: Path, found: dict[str, Any]) -> dict[str, Any]:
    """Updates and idle groups of a run, with the evaluation of its last model."""
    rows = [row for row in read_metrics(run) if "cost/forwards" in row]
    idle = [row["train/idle_groups"] for row in rows]
    return {"updates": len(rows), "idle": mean(idle), "idle_first": mean(idle[:8]), **found}


def world_runs(
    study: Study, name: str, lines: dict[str, str], seeds: int, budget: str, evaluate: Callable[[Path, str], Any]
) -> dict[str, Any]:
    """Train the lines with all seeds, then evaluate their models."""
    model, task = WORLDS[name]
    folder = study.out / name.replace(" ", "_").replace(",", "")
    settings = study.settings(model, task, "eval.every=0")
    results = compare(Comparison(list(lines.values()), ["none"], seeds, budget, settings=settings), folder, study.jobs,
                      keep=True)  # fmt: skip
    torch.set_num_threads(1)
    runs = {
        label: {
            "line": line,
            "failed": cell["failed"],
            "seeds": {
                seed: trained(folder / run / "run", evaluate(folder / run / "run" / "checkpoint", task))
                for seed, run in cell["folders"].items()
            },
        }
        for (label, line), cell in zip(lines.items(), results["cells"], strict=True)
    }
    return {"budget": results["budget"], "lines": runs}


def values(world: dict[str, Any], label: str, order: str, key: str) -> list[float]:
    return [run[key] for _, run in sorted(world["lines"][f"{label}, {order}"]["seeds"].items())]


def tables() -> None:
    """Print the tables of docs/studies/orders.md."""
    found = json.loads(FILE.read_text())
    for name, world in found.items():
        print(f"\n{name}, {world['budget']}\n\n| start | sampled | greedy | samples differ |\n|---|---|---|---|")
        for order, start in world["start"].items():
            print(
                f"| {order} | " + " | ".join(f"{100 * start[key]:.1f}" for key in ("sampled", "greedy", "mixed")) + " |"
            )
        print(
            "\n| line | order | sampled | greedy | greedy, minus low_confidence | idle groups, first 8 updates | all |"
        )
        print("|---|---|---|---|---|---|---|")
        for label in LINES:
            for order in TRAINED:
                cells = [percent(values(world, label, order, key)) for key in ("sampled", "greedy")]
                usual, other = (values(world, label, each, "greedy") for each in (TRAINED[0], order))
                cells += ["" if order == TRAINED[0] else points(other, usual)]
                cells += [f"{100 * mean(values(world, label, order, key)):.0f}" for key in ("idle_first", "idle")]
                print(f"| {label} | {order} | " + " | ".join(cells) + " |")
    for key in ("sampled", "greedy"):
        p_values = {
            f"{name}, {label}, {order}": paired_p(
                values(world, label, order, key), values(world, label, TRAINED[0], key)
            )
            for name, world in found.items()
            for label in LINES
            for order in TRAINED[1:]
        }
        print(f"\n{key}, Holm's p below 0.1:", {name: round(p, 4) for name, p in holm(p_values).items() if p < 0.1})


def main() -> None:
    parser = study_parser(__doc__, "runs/orders")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--budget", default="forwards=5e4")
    parser.add_argument("--file", type=Path, default=FILE)
    arguments = parser.parse_args()
    if arguments.tables:
        return tables()
    study, found = Study(arguments), {}
    rates = json.loads((RESULTS / "shelf.json").read_text())
    for name, (model, task) in WORLDS.items():
        lines = lines_of(name, rates, LINES, {order: f"rollout.order={order}" for order in TRAINED})
        found[name] = {"start": {order: solved(model, task, order) for order in TRAINED}}
        found[name] |= world_runs(study, name, lines, arguments.seeds, arguments.budget, solved)
        arguments.file.write_text(json.dumps(found) + "\n")
    return None


if __name__ == "__main__":
    main()
