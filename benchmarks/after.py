"""What training on Sudoku or Countdown has changed beside its own score, for the runs that `compare --keep` has left:

    python benchmarks/after.py FOLDER --out benchmarks/results/after_sudoku.json

Of the embedded model and of every run: solved at a quarter, half, once and twice the steps it was trained with; solved
on the task it was not trained on, and on its own with other words around the prompt; and where Sudokus break, which is
the first step after which a row, column or box holds a digit twice. 256 held-out problems, 4 samples each, the same
noise for all.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from unmask.core.trace import Trace, state_before
from unmask.evaluation.evaluate import Evaluator
from unmask.evaluation.prompt_variants import PromptVariant, task_in_variant
from unmask.models import Model
from unmask.models.load import load_model
from unmask.rollout.decoding import Decoding
from unmask.rollout.sample import row_seeds, sample
from unmask.tasks import TASKS
from unmask.tasks.puzzles.sudoku import CELLS, units
from unmask.util.micro_batch import MicroBatch

PROBLEMS, SAMPLES, SEED = 256, 4, -1
OTHER = {"sudoku": "countdown", "countdown": "sudoku"}
WORDINGS = ("Solve: {own_prompt}", "{own_prompt} {own_prompt}")
ROWS = MicroBatch(512)


def solved(policy: Model, task_name: str, steps: int | None = None, template: str = "") -> dict[str, float]:
    task = TASKS[task_name]()
    if template:
        task = task_in_variant(task, PromptVariant("", template, ""))
    decoding = Decoding(task.length, steps or task.length // 2, task.length)
    evaluator = Evaluator(policy, task, decoding, SAMPLES, SEED, "cpu", ROWS)
    found = evaluator.evaluate(task.rows("test", PROBLEMS, 0))
    return {"sampled": found.sampled.value, "greedy": found.greedy.value, "pass@4": found.passes[SAMPLES].value}


def broken(cells: list[int], blank: int) -> bool:
    """Whether a digit stands twice in a row, column or box of a grid that is partly filled."""
    filled = ([cells[cell] for cell in unit if cells[cell] != blank] for unit in units(4))
    return any(len(set(unit)) < len(unit) for unit in filled)


def first_breaks(trace: Trace, blank: int) -> Iterator[int | None]:
    """For each trace the step after which it is broken first; None if it never is."""
    states = [state_before(trace, step + 1)[:, -CELLS:].tolist() for step in range(trace.steps)]
    for row in range(len(trace)):
        yield next((step for step, state in enumerate(states) if broken(state[row], blank)), None)


def breaks(policy: Model) -> dict[str, Any]:
    """The share of rollouts that break at each step, of all; and the mean step, of those that do."""
    task = TASKS["sudoku"]()
    rows = [row for row in task.rows("test", PROBLEMS, 0) for _ in range(SAMPLES)]
    prompts = [task.prompt_ids(policy.tokenizer, row) for row in rows]
    decoding = Decoding(task.length, task.length // 2, task.length)
    trace = sample(policy, prompts, row_seeds(SEED, len(rows)), decoding, micro_batch=ROWS).trace
    found = list(first_breaks(trace, policy.mask_id))
    steps = [step for step in found if step is not None]
    at = [steps.count(step) / len(found) for step in range(trace.steps)]
    return {"broken": len(steps) / len(found), "mean_step": sum(steps) / max(1, len(steps)), "at_step": at}


def measured(policy: Model, trained: str) -> dict[str, Any]:
    length, other = TASKS[trained]().length, OTHER[trained]
    frontier = {steps: solved(policy, trained, steps) for steps in (length // 8, length // 4, length // 2, length)}
    wordings = {template: solved(policy, trained, None, template) for template in WORDINGS}
    return {trained: frontier, other: solved(policy, other), "wordings": wordings, "breaks": breaks(policy)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if not list(arguments.folder.glob("cells/*/run/checkpoint")):
        sys.exit(f"{arguments.folder} has no trained models: compare with --keep")
    compared = json.loads((arguments.folder / "results.json").read_text())
    with torch.no_grad():
        results: dict[str, Any] = {"start": measured(load_model("tiny"), compared["task"])}
    for row in compared["cells"]:
        for seed, cell in row["folders"].items():
            checkpoint = arguments.folder / cell / "run" / "checkpoint"
            if checkpoint.is_dir():
                with torch.no_grad():
                    results.setdefault(row["label"], {})[seed] = measured(load_model(checkpoint), compared["task"])
                print(row["label"], seed, results[row["label"]][seed]["breaks"], flush=True)
                arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
