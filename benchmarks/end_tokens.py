"""Do answers get shorter if a model is trained on its own correct rollouts? docs/studies/orders.md.

    python benchmarks/end_tokens.py --jobs 2     # a CPU; writes benchmarks/results/end_tokens.json
    python benchmarks/end_tokens.py --table

A tiny model is pre-trained on sums of two to four digits, 40 % of the answers careless (minus read as plus).
Completions have 48 positions; an answer needs 5 to 22 of them, and the rest is end tokens. Then raft is trained in
three orders and diffu_grpo+daca in one, counting the tokens up to the first end token or all of them. The claims are
in LOG.md.
"""

import argparse
import json
import os
import random
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

from choosing import RESULTS

from unmask.core.method import Method
from unmask.core.trace import all_tokens
from unmask.methods import diffu_grpo, raft
from unmask.studies.compare.cells import write_json
from unmask.tasks import TASKS, Row
from unmask.tasks.puzzles.arithmetic import Arithmetic, sum_steps
from unmask.tasks.support.split import hashed_split

CANVAS, UPDATES, SEEDS = 48, 100, 3
FILE, START = RESULTS / "end_tokens.json", Path("runs/end_tokens/start")
ORDERS = ("low_confidence", "surest_position", "random")
METRICS = ("train/solved", "train/late_eos", "train/nll")
PRETRAIN = {
    "seed": 0, "threads": 1, "steps": 2500, "learning_rate": 2e-3, "warmup": 50, "weight_decay": 0.01,
    "shape": {"width": 64, "layers": 4, "heads": 4, "hidden": 128, "max_length": 128},
    "mixture": [{"task": "arithmetic", "batch": 64, "behaviours": {"careless": 0.4}}],
}  # fmt: skip


class Sums(Arithmetic):
    """Answers of different lengths, without padding, on a canvas that is longer than all of them."""

    def __init__(self) -> None:
        super().__init__(terms=4, largest=9)
        self.length = CANVAS
        self.behaviours = {"careless": lambda row: self.solution({"terms": map(abs, row["terms"])})}

    def draw(self, rng: random.Random, split: str) -> Row | None:
        terms = [rng.randint(1, 9)]
        terms += [rng.choice((1, -1)) * rng.randint(1, 9) for _ in range(rng.randint(1, 3))]
        if min(sum(terms[:count]) for count in range(1, len(terms) + 1)) < 0:
            return None
        fits = hashed_split(" ".join(map(str, sorted(terms)))) == split
        return {"terms": terms, "answer": sum(terms)} if fits else None

    def prompt(self, row: Row) -> str:
        first, *others = row["terms"]
        return (str(first) + "".join(f"{term:+d}" for term in others) + "=").rjust(9)

    def solution(self, row: Row) -> str:
        return ";".join(sum_steps(list(row["terms"])))


TASKS["arithmetic"] = Sums  # in every process that imports this file


def raft_all() -> Method:
    return replace(raft(), counted=all_tokens)


def diffu_all() -> Method:
    return replace(diffu_grpo(), counted=all_tokens)


LINES = {
    "raft": "raft",
    "raft, all tokens": f"{__file__}:raft_all",
    "diffu_grpo+daca": "diffu_grpo+daca",
    "diffu_grpo+daca, all tokens": f"{__file__}:diffu_all+daca",
}


def train(label: str, order: str, seed: int) -> dict[str, Any]:
    import unmask

    method, *plugins = LINES[label].split("+")
    run = unmask.train(
        "arithmetic", method, str(START), plugins=plugins, seed=seed, updates=UPDATES, device="cpu",
        optimizer={"lr": 2e-4, "schedule": "linear"}, eval={"prompts": 128, "samples": 2},
        rollout={"length": CANVAS, "steps": CANVAS // 2, "block": CANVAS, "order": order},
    )  # fmt: skip
    rows = [row for row in run.metrics if "train/reward" in row]
    ends = [row["eval/solved_sampled"] for row in run.metrics if "eval/solved_sampled" in row]
    answers = [[len(one["completion"]) for one in run.samples if one["step"] == row["step"]] for row in rows]
    found = {"before": ends[0], "after": ends[-1], "answer": [round(mean(lengths), 4) for lengths in answers]}
    return found | {key: [round(row[key], 4) for row in rows] for key in METRICS}


def table(found: dict[str, Any]) -> None:
    """Means of the seeds: the evaluations before and after training; the first and the last ten updates."""
    print("| line | order | sampled, % | tokens of an answer | late_eos |\n" + "|---" * 5 + "|")
    for name, runs in found["runs"].items():
        label, _, order = name.rpartition(", ")
        cells = [f"{100 * mean(run[end] for run in runs.values()):.1f}" for end in ("before", "after")]
        for key, form in (("answer", ".1f"), ("train/late_eos", ".2f")):
            parts = (slice(10), slice(-10, None))
            cells += [f"{mean(mean(run[key][part]) for run in runs.values()):{form}}" for part in parts]
        pairs = [f"{a} → {b}" for a, b in zip(cells[::2], cells[1::2], strict=True)]
        print(f"| {label} | {order} | " + " | ".join(pairs) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="only print the table of the stored results")
    given = parser.parse_args()
    if not given.table:
        from unmask.sft.pretrain import PretrainConfig, pretrain

        if not (START / "model.safetensors").is_file():
            pretrain(PretrainConfig.model_validate(PRETRAIN), START)
        cells = [(label, order) for label in LINES for order in ORDERS if "daca" not in label or order == ORDERS[0]]
        found: dict[str, Any] = {"updates": UPDATES, "runs": {", ".join(cell): {} for cell in cells}}
        with ProcessPoolExecutor(given.jobs, get_context("spawn")) as workers:
            jobs = {
                workers.submit(train, *cell, seed): (", ".join(cell), seed) for seed in range(SEEDS) for cell in cells
            }
            for done, job in enumerate(as_completed(jobs), 1):
                name, seed = jobs[job]
                found["runs"][name][seed] = job.result()
                print(f"{done}/{len(jobs)}", name, seed, flush=True)
        write_json(FILE, found)
    table(json.loads(FILE.read_text()))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
