"""What faster decoding costs on a model that has been trained, and what reinforcement learning leaves at fewer steps.

    python benchmarks/decoding.py ways runs/study/adapt --task countdown_text --device cuda --out ways.json
    python benchmarks/decoding.py steps runs/compared --device cuda --out steps.json       # of `unmask compare --keep`
    python benchmarks/decoding.py elsewhere runs/compared --device cuda --out elsewhere.json

ways    exact passes, caches, thresholds and fp8: solved, greedy and sampled; positions a second; passes a completion;
        and how far the log-probabilities of samples with a cache or in fp8 are from the exact ones, in nats
steps   every run of a comparison, and the model it began with, at 1, 1/2 and 1/4 of the steps it was trained with
elsewhere   the same runs asked in other words, and on tasks they were not trained on
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from adapt_study import LESSONS

from unmask.config import Config, parse_config
from unmask.core.trace import Trace
from unmask.evaluation.evaluate import Evaluator
from unmask.evaluation.prompt_variants import PromptVariant, task_in_variant
from unmask.models import Model, load_model
from unmask.models.fp8 import Fp8Layers, has_fp8
from unmask.rollout.cache import Cache
from unmask.rollout.decoding import Decoding
from unmask.rollout.sample import completions, row_seeds, sample
from unmask.tasks import TASKS, Task
from unmask.tasks.scoring import score
from unmask.training.mismatch import mismatch_metrics, random_share, replay_logprobs
from unmask.training.run.folder import checkpoint_of
from unmask.training.setup import decoding_of
from unmask.util.micro_batch import MicroBatch
from unmask.util.statistics import mean_proportion

Figures = dict[str, float]
SEED = -1
SHARES = (1, 2, 4)
REPLAYED = 64
"""Rows whose samples are scored again without a cache."""
FORM = "Answer like this: <reasoning>\n...\n</reasoning>\n<answer>\n\\boxed{{...}}\n</answer>"
WORDINGS = {
    "countdown_text": [
        PromptVariant("polite", "Please solve this for me. Thank you!\n\n{own_prompt}", "polite"),
        PromptVariant("repeated", "{own_prompt}\n\nAgain: the target is {target}, the numbers {numbers}.", "repeated"),
        PromptVariant("short", "Reach {target} with {numbers}, each once, by + - * /. " + FORM, "short"),
        PromptVariant("bare", "{numbers} -> {target}", "bare"),
    ]
}
"""Other words for the prompt that a run was trained with: from nearly the same to hardly anything."""


def loaded(model: str, device: str) -> Model:
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    return load_model(checkpoint_of(model), dtype=dtype, device=device)


# --- ways to decode -----------------------------------------------------------------------------------------


def ways(length: int, steps: int, block: int) -> Iterator[tuple[str, Decoding]]:
    exact = Decoding(length, steps, block)
    yield "exact", exact
    for share in SHARES[1:]:
        yield f"1/{share} of the steps", replace(exact, steps=exact.steps // share)
    yield "prefix cache", replace(exact, cache=Cache(suffix=False))
    yield "dual cache", replace(exact, cache=Cache())
    yield "dual cache, never renewed", replace(exact, cache=Cache(refresh=length // block))
    for enough in (0.99, 0.95, 0.9, 0.8, 0.6):
        yield f"threshold {enough}", replace(exact, threshold=enough)
    yield "dual cache, threshold 0.9", replace(exact, cache=Cache(), threshold=0.9)
    yield "fp8", exact
    yield "fp8, dual cache", replace(exact, cache=Cache())


def passes(trace: Trace) -> float:
    """Steps at which a row wrote something, mean: each is a pass for it."""
    written_BT = torch.zeros(len(trace), trace.steps, device=trace.step_BL.device)
    step_BL = torch.where(trace.filled_BL, trace.step_BL, 0)
    return float(written_BT.scatter_add(1, step_BL, trace.filled_BL.float()).gt(0).sum(-1).float().mean())


def measured(policy: Model, task: Task, how: Decoding, fp8: Fp8Layers | None, given: argparse.Namespace) -> Figures:
    """Of one way: `samples` completions of every problem, at once; the median time of `repetitions`."""
    rows = [row for row in task.rows("test", given.problems, 0) for _ in range(given.samples)]
    prompts, seed_B = (
        [task.prompt_ids(policy.tokenizer, row) for row in rows],
        row_seeds(SEED, len(rows)).to(given.device),
    )
    batch = MicroBatch(given.rows)
    times = []
    with fp8.used() if fp8 is not None else nullcontext():
        sample(policy, prompts[: given.rows], seed_B[: given.rows], how, micro_batch=batch)  # to warm up
        for _ in range(given.repetitions):
            if given.device.startswith("cuda"):
                torch.cuda.synchronize()
            clock = time.perf_counter()
            trace = sample(policy, prompts, seed_B, how, micro_batch=batch).trace
            if given.device.startswith("cuda"):
                torch.cuda.synchronize()
            times.append(time.perf_counter() - clock)
    seconds = median(times)
    solved_B = score(task, rows, completions(policy, trace, how.length), device=given.device).solved_B
    share = mean_proportion(solved_B.double().view(given.problems, given.samples).mean(-1).tolist())
    found = {"solved": share.value, "low": share.low, "high": share.high, "seconds": seconds, "passes": passes(trace)}
    found |= {"fastest": min(times), "slowest": max(times), "positions_per_s": len(rows) * how.length / seconds}
    if (how.cache is not None or fp8 is not None) and how.sampling.temperature:
        some = random_share(trace, min(1.0, REPLAYED / len(trace)), torch.Generator().manual_seed(0))
        apart = mismatch_metrics(some, replay_logprobs(policy, some, batch))
        found |= {"mismatch": apart["train/cache_mismatch"], "mismatch_max": apart["train/cache_mismatch_max"]}
    return found


def all_ways(given: argparse.Namespace) -> dict[str, Any]:
    policy, task = loaded(given.folder, given.device), TASKS[given.task](**given.options)
    results: dict[str, Any] = {}
    steps = given.steps or given.length // 2
    shape = {"length": given.length, "steps": steps, "block": given.block, "rows": given.rows}
    shape |= {"problems": given.problems, "samples": given.samples, "repetitions": given.repetitions}
    found = {"task": given.task, "options": given.options, **shape, "ways": results}
    layers = Fp8Layers(policy) if has_fp8(torch.device(given.device)) else None
    for name, how in ways(given.length, steps, given.block):
        if ("fp8" in name and layers is None) or (given.ways and name not in given.ways):
            continue
        fp8 = layers if "fp8" in name else None
        sampled = measured(policy, task, how, fp8, given)
        greedy = measured(policy, task, how.greedy(), fp8, argparse.Namespace(**{**vars(given), "samples": 1}))
        results[name] = {"sampled": sampled, "greedy": greedy}
        print(name, results[name], flush=True)
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    return found


# --- fewer steps after training -----------------------------------------------------------------------------


def frontier(policy: Model, config: Config, given: argparse.Namespace) -> dict[str, Any]:
    """Solved at shares of the steps of a run's configuration."""
    task = config.build_task()
    how, rows = decoding_of(config, task), task.rows("test", given.problems, 0)
    found = {}
    for share in SHARES:
        fewer = replace(how, steps=how.steps // share)
        evaluator = Evaluator(policy, task, fewer, given.samples, SEED, given.device, MicroBatch(given.rows))
        found[f"1/{share}"] = evaluator.evaluate(rows).data()
    return found


def elsewhere(policy: Model, config: Config, given: argparse.Namespace) -> dict[str, Any]:
    """Solved in every wording of the prompt, and on the other lessons, in as many positions as they were taught in."""
    task = config.build_task()
    how = decoding_of(config, task)
    asked = {
        "own": (task, how),
        **{one.name: (task_in_variant(task, one), how) for one in WORDINGS.get(config.task, ())},
    }
    for name, length in LESSONS.items():
        if name != config.task:
            asked[name] = TASKS[name](), replace(how, length=length, steps=length // 2)
    found = {}
    for name, (other, way) in asked.items():
        rows = other.rows("test", given.problems, 0)
        evaluator = Evaluator(policy, other, way, given.samples, SEED, given.device, MicroBatch(given.rows))
        found[name] = evaluator.evaluate(rows).data()
    return found


def all_runs(measure: Callable[..., dict[str, Any]], given: argparse.Namespace) -> dict[str, Any]:
    folder = Path(given.folder)
    cells = json.loads((folder / "results.json").read_text())["cells"]
    first = parse_config(cells[0]["config"])
    results: dict[str, Any] = {"start": measure(loaded(first.model, given.device), first, given), "runs": {}}
    for row in cells:
        for seed, cell in row["folders"].items():
            run = folder / cell / "run"
            if not (run / "checkpoint").is_dir():
                continue
            found = measure(loaded(str(run), given.device), parse_config(row["config"]), given)
            results["runs"].setdefault(row["label"], {})[seed] = found
            print(row["label"], seed, {name: told["sampled"][0] for name, told in found.items()}, flush=True)
            given.out.write_text(json.dumps(results, indent=1) + "\n")
    if not results["runs"]:
        raise SystemExit(f"{folder} has no trained models: compare with --keep")
    return results


WHAT = {"ways": all_ways, "steps": partial(all_runs, frontier), "elsewhere": partial(all_runs, elsewhere)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(WHAT))
    parser.add_argument("folder", help="ways: a model or a run; else a comparison")
    parser.add_argument("--task", default="countdown_text", help="of ways")
    parser.add_argument("--options", type=json.loads, default={}, help="of the task of ways, as JSON")
    parser.add_argument("--ways", nargs="+", help="these only")
    parser.add_argument("--length", type=int, default=64, help="of ways")
    parser.add_argument("--steps", type=int, help="of ways; default: half of the length")
    parser.add_argument("--block", type=int, default=32, help="of ways")
    parser.add_argument("--problems", type=int, default=256)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--rows", type=int, default=256, help="rolled out at a time")
    parser.add_argument("--repetitions", type=int, default=1, help="of ways: timings, of which the median is reported")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    with torch.no_grad():
        results = WHAT[given.what](given)
    given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
