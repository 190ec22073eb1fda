"""SmolLM2 as a block-causal model, from end to end on one GPU: adaptation, evaluation, rollouts with the exact cache,
reinforcement learning, evaluation.

    unmask fetch smollm2 --out runs/smollm2
    python benchmarks/adapt_blocks.py runs/smollm2 --work runs/blocks --out benchmarks/results/adapt_blocks.json
    python benchmarks/adapt_blocks.py toy --work toy --out toy.json --toy      (a CPU, a random model in `toy`)

The parts are the commands of a user, in blocks of 32: `unmask adapt --block`, `unmask train recipe:smollm2_rl`. Solve
rates are those of held-out problems, sampled at temperature 1 and greedy. Rollouts are timed with and without the cache
on the same prompts, all positions filled. The result file is written after every part; a part that is in it, or whose
folder is finished, is not run again.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LENGTHS = {"countdown_text": 64, "sudoku_text": 96, "word_problems": 64}
"""Tasks, and the positions of a completion."""
BLOCK = 32


class Parts:
    def __init__(self, out: Path) -> None:
        self.out, self.start = out, time.perf_counter()
        self.results: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {}

    def add(self, name: str, part: Any) -> None:
        """Run a part unless it is in the result file, and write it there with its seconds."""
        if name in self.results:
            return
        before = time.perf_counter()
        found = part()
        self.results[name] = {**found, "seconds": round(time.perf_counter() - before, 1)}
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(self.results, indent=1) + "\n")
        print(f"{time.perf_counter() - self.start:6.1f} s  {name}: {json.dumps(self.results[name])[:1000]}", flush=True)


def unmask(*words: str) -> dict[str, str]:
    """Run a command of ours; its arguments."""
    print("unmask", *words, flush=True)
    subprocess.run([sys.executable, "-m", "unmask", *words], check=True, stdout=subprocess.DEVNULL)
    return {"command": " ".join(["unmask", *words])}


def curve(folder: Path) -> dict[str, Any]:
    """The loss of the updates, and what was evaluated before and after them."""
    from unmask.training.run.folder import read_metrics

    lines = read_metrics(folder)
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    ends = ("solved_sampled", "solved_greedy")
    evaluated = [{key: value for key, value in line.items() if key.endswith(ends)} for line in lines]
    tenth = max(1, len(losses) // 10)
    means = [sum(losses[i : i + tenth]) / len(losses[i : i + tenth]) for i in range(0, len(losses), tenth)]
    times = {key for line in lines for key in line if key.startswith("time/")}
    spent = {key: sorted(line[key] for line in lines if key in line) for key in sorted(times)}
    return {
        "updates": len(losses),
        "loss": [round(loss, 4) for loss in means],
        "solved_in_training": [line["train/solved"] for line in lines if "train/solved" in line],
        "evaluations": [line for line in evaluated if line],
        "medians": {key: values[len(values) // 2] for key, values in spent.items()},
    }


def adapt_model(args: argparse.Namespace) -> dict[str, Any]:
    folder = args.work / "adapt"
    shown: dict[str, Any] = {}
    if not (folder / "finished.json").is_file():
        words = [f"updates={args.updates}", "eval.every=0", "save_every=0", f"optimizer.warmup={min(50, args.updates)}"]
        if args.toy:
            words += ["max_examples=8", "batch_tokens=2048", "micro_batch_tokens=2048", "dtype=float32"]
            words += ["compile=false", "eval.prompts=2"]
        shown = unmask(
            "adapt", str(args.model), "recipe:adapt_smollm2", "--block", str(BLOCK), "--out", str(folder), *words
        )
    return {**shown, **curve(folder)}


def loaded(folder: Path, args: argparse.Namespace) -> Any:
    import torch

    from unmask.models import load_model
    from unmask.training.run.folder import checkpoint_of

    dtype = torch.float32 if args.toy else torch.bfloat16
    policy = load_model(checkpoint_of(str(folder)), dtype=dtype, device="cpu" if args.toy else "cuda")
    assert policy.causal_block == BLOCK
    return policy


def solve_rates(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Sampled and greedy, with the exact cache, by task."""
    import torch

    from unmask.evaluation.evaluate import Evaluator
    from unmask.rollout.cache import Cache
    from unmask.rollout.decoding import Decoding
    from unmask.tasks import TASKS
    from unmask.util.micro_batch import MicroBatch

    policy, found = loaded(folder, args), {}
    device = "cpu" if args.toy else "cuda"
    for name in args.tasks:
        task, length = TASKS[name](), LENGTHS[name]
        rows = task.rows("test", args.problems, 0)
        decoding = Decoding(length, length // 2, cache=Cache())
        before = time.perf_counter()
        with torch.no_grad():
            evaluator = Evaluator(policy, task, decoding, args.samples, 0, device, MicroBatch(256))
            evaluation = evaluator.evaluate(rows)
        found[name] = {**evaluation.data(), "seconds": round(time.perf_counter() - before, 2)}
    return found


def rollout_speed(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of rollouts in which nothing ends, one token a step, with and without the exact cache."""
    import torch

    from unmask.rollout.cache import Cache
    from unmask.rollout.decoding import Decoding
    from unmask.rollout.sample import sample
    from unmask.tasks import TASKS

    policy, task = loaded(folder, args), TASKS["countdown_text"]()
    device, rows, length = ("cpu", 2, 64) if args.toy else ("cuda", 64, 256)
    prompts = [task.prompt_ids(policy.tokenizer, row) for row in task.rows("test", rows, 0)]
    seed_B, found = torch.arange(rows, device=device), {"rows": rows, "length": length}
    tokens = {}
    for name, cache in (("exact cache", Cache()), ("whole passes", None)):
        decoding = Decoding(length, length, cache=cache, stops=False)
        for _ in range(2):  # the first is not counted
            if device == "cuda":
                torch.cuda.synchronize()
            before = time.perf_counter()
            trace = sample(policy, prompts, seed_B, decoding).trace
            tokens[name] = trace.tokens_BL[:, -length:].tolist()  # waits
            seconds = time.perf_counter() - before
        found[name] = {"seconds": seconds, "tokens_per_s": rows * length / seconds}
    pairs = [zip(*texts, strict=True) for texts in zip(*tokens.values(), strict=True)]
    equal = [a == b for pair in pairs for a, b in pair]
    ratio = found["exact cache"]["tokens_per_s"] / found["whole passes"]["tokens_per_s"]
    return {**found, "ratio": ratio, "equal_tokens": sum(equal) / len(equal)}


def train(args: argparse.Namespace) -> dict[str, Any]:
    folder = args.work / "rl"
    shown: dict[str, Any] = {}
    if not (folder / "finished.json").is_file():
        words = [f"updates={args.rl_updates}", "rollout.cache=dual", "compile=false", "eval.every=0", "save_every=0"]
        if args.toy:
            words += ["prompts=2", "group=2", "dtype=float32", "eval.prompts=2"]
        shown = unmask("train", "recipe:smollm2_rl", "--model", str(args.work / "adapt"), "--out", str(folder), *words)
    return {**shown, **curve(folder)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder with SmolLM2")
    parser.add_argument("--work", type=Path, required=True, help="for the runs")
    parser.add_argument("--out", type=Path, required=True, help="figures, JSON")
    parser.add_argument("--updates", type=int, default=640, help="of the adaptation")
    parser.add_argument("--rl-updates", type=int, default=16)
    parser.add_argument("--problems", type=int, default=256)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--toy", action="store_true", help="a few updates of a small model on a CPU")
    args = parser.parse_args()
    args.tasks = list(LENGTHS)
    if args.toy:
        args.updates, args.rl_updates, args.problems, args.samples, args.tasks = 2, 1, 2, 1, ["countdown_text"]
    parts = Parts(args.out)
    parts.add("adapt", lambda: adapt_model(args))
    parts.add("solved", lambda: solve_rates(args.work / "adapt", args))
    parts.add("rollouts", lambda: rollout_speed(args.work / "adapt", args))
    parts.add("rl", lambda: train(args))
    parts.add("solved after rl", lambda: solve_rates(args.work / "rl", args))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
