"""Continuous against static batches: rollouts of a model of the embedded kind with block-causal attention.

    OMP_NUM_THREADS=1 python benchmarks/continuous.py
    python benchmarks/continuous.py --gpu --graphs --out continuous.json    (SDAR-1.7B's size, under 90 s on an H200)

Completions end after 1, 2, 3 or 4 quarters of the canvas, in random order (the benchmark decides where; what the model
writes before is its own). All ways sample the same prompts with the same cache. "static": a batch ends with its longest
row. "compacted": as `sample` without a micro-batch size, which drops rows that have ended. "continuous": as `sample`
with a micro-batch size. Prints the seconds (on a CPU those of the process), passes, and how many times as fast
continuous batches are: the median of `repeats` runs each, alternating, as far as `limit` seconds allow. Also the rows
whose tokens differ from those of static batches: batches of other sizes round differently, and most in bf16. With
--graphs steps have static shapes, captured as CUDA graphs on a GPU; a run before those that count captures them. --out
has the same, written after every run.
"""

import argparse
import json
import random
import time
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

import unmask
from unmask.models.tiny import EOS, Tiny, TinyShape, tiny_policy
from unmask.rollout.denoiser import Denoiser
from unmask.rollout.graphs import Graphs


class Ending(Tiny):
    """Writes an end token at a position that the first token of the prompt gives, in quarters of the completion."""

    length = 0
    calls = 0

    def _layers_pass(self, *arguments) -> Tensor:
        self.calls += 1
        return super()._layers_pass(*arguments)

    def marked(self, hidden_QD: Tensor, tokens_SL: Tensor, at_Q: Tensor) -> Tensor:
        """The hidden states, and whether each position is the last of its completion."""
        width = tokens_SL.shape[1]
        real_SL = (tokens_SL != self.pad_id) & (tokens_SL != self.mask_id)
        first_S = tokens_SL.gather(1, real_SL.long().argmax(1, keepdim=True)).squeeze(1)
        last_S = width - self.length + (first_S - 9) * self.length // 4 - 1
        return torch.cat([hidden_QD, (at_Q % width == last_S[at_Q // width])[:, None].to(hidden_QD.dtype)], 1)

    def remember(self, tokens_SL, attended_SL, at_Q, last=None):
        hidden_QD, memory = super().remember(tokens_SL, attended_SL, at_Q, last)
        return self.marked(hidden_QD, tokens_SL, at_Q), memory

    def hidden_blocks(self, memory, tokens_SL, column_SW, reach, at_Q):
        return self.marked(super().hidden_blocks(memory, tokens_SL, column_SW, reach, at_Q), tokens_SL, at_Q)

    def head(self, hidden_QD: Tensor) -> Tensor:
        logits_QV = super().head(hidden_QD[:, :-1])
        logits_QV[:, self.eos_id] = 2e4 * hidden_QD[:, -1].float() - 1e4
        return logits_QV


CPU = {"prompts": 128, "slots": 8, "length": 128, "steps": 128, "block": 4, "width": 64, "hidden": 128, "layers": 4}
GPU = {
    "prompts": 192,
    "slots": 32,
    "length": 512,
    "steps": 64,
    "block": 32,
    "width": 2048,
    "hidden": 6144,
    "layers": 28,
}


class ContinuousBench:
    def __init__(self, args: argparse.Namespace, shape: dict[str, int]) -> None:
        self.gpu, self.out, self.shape, rng = args.gpu, args.out, shape, random.Random(0)
        sizes = {name: shape[name] for name in ("width", "hidden", "layers")}
        heads = shape["width"] // (128 if self.gpu else 16)
        device = torch.device("cuda" if self.gpu else "cpu")
        with device:  # large weights are drawn there
            self.policy = Ending(tiny_policy(TinyShape(**sizes, heads=heads, max_length=1024)).lm)
        if self.gpu:
            self.policy = self.policy.to(device, torch.bfloat16)
        self.policy.causal_block, self.policy.length = shape["block"], shape["length"]
        self.prompts = [[9 + rng.randint(1, 4)] + [20] * rng.randint(7, 24) for _ in range(shape["prompts"])]
        self.seeds = torch.arange(len(self.prompts), device=device)
        self.graphs = {name: Graphs(args.graphs) for name in ("static", "compacted", "continuous")}
        self.name = "static"
        self.seconds, self.passes, self.texts = dict[str, list[float]](), dict[str, int](), dict[str, list[list[int]]]()

    @property
    def decoding(self) -> unmask.Decoding:
        graphs = self.graphs[self.name]
        return unmask.Decoding(self.shape["length"], self.shape["steps"], cache=unmask.Cache(), graphs=graphs)

    def now(self) -> float:
        if not self.gpu:
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def static(self, rows: slice) -> list[unmask.Trace]:
        compact = Denoiser.compact

        def end_together(denoiser: Denoiser) -> None:
            if denoiser.ended_B[denoiser.live_R].all():
                compact(denoiser)

        Denoiser.compact = end_together
        try:
            return self.compacted(rows)
        finally:
            Denoiser.compact = compact

    def compacted(self, rows: slice) -> list[unmask.Trace]:
        prompts, seeds, slots = self.prompts[rows], self.seeds[rows], self.shape["slots"]
        parts = [slice(start, start + slots) for start in range(0, len(prompts), slots)]
        return [unmask.sample(self.policy, prompts[part], seeds[part], self.decoding).trace for part in parts]

    def continuous(self, rows: slice) -> list[unmask.Trace]:
        slots = self.shape["slots"]
        return [
            unmask.sample(self.policy, self.prompts[rows], self.seeds[rows], self.decoding, micro_batch=slots).trace
        ]

    def measure(self, name: str) -> float:
        """Seconds of a run over all prompts."""
        self.policy.calls, started = 0, self.now()
        traces = self.roll(name, slice(None))
        self.seconds.setdefault(name, []).append(self.now() - started)
        self.passes[name] = self.policy.calls  # a replay calls no model
        length = self.shape["length"]
        self.texts[name] = [row for trace in traces for row in trace.tokens_BL[:, -length:].tolist()]
        return self.seconds[name][-1]

    def roll(self, name: str, rows: slice) -> list[unmask.Trace]:
        self.name = name
        return getattr(self, name)(rows)

    def figures(self) -> str:
        middle = {name: median(values) for name, values in self.seconds.items()}
        tokens = {name: sum(row.index(EOS) + 1 for row in rows) / middle[name] for name, rows in self.texts.items()}
        differ = {
            name: sum(mine != other for mine, other in zip(rows, self.texts["static"], strict=True))
            for name, rows in self.texts.items()
        }
        shown = {"settings": self.shape, "device": torch.cuda.get_device_name() if self.gpu else "cpu"}
        shown |= {"seconds": middle, "all_seconds": self.seconds, "tokens_per_s": tokens, "rows_that_differ": differ}
        shown["captured"] = any(step.graph is not None for each in self.graphs.values() for step in each.steps.values())
        if not shown["captured"]:
            shown["passes"] = self.passes
        if "continuous" in middle:
            shown["continuous_is_faster"] = {name: value / middle["continuous"] for name, value in middle.items()}
        return json.dumps(shown, indent=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="a large model on a GPU")
    parser.add_argument("--graphs", action="store_true", help="static steps, captured on a GPU")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=80.0, help="seconds after which no run begins")
    for name in CPU:
        parser.add_argument(f"--{name}", type=int)
    args, begun = parser.parse_args(), time.perf_counter()
    given = {name: getattr(args, name) for name in CPU if getattr(args, name) is not None}
    bench = ContinuousBench(args, {**(GPU if args.gpu else CPU), **given})
    for name in bench.graphs:  # the first passes are slower, and captured steps need a run that captures them
        bench.roll(name, slice(None) if args.graphs else slice(2))
    slowest = 0.0
    for _ in range(args.repeats):
        for name in bench.graphs:
            if time.perf_counter() - begun + slowest > args.limit and len(bench.seconds) == len(bench.graphs):
                break
            slowest = max(slowest, bench.measure(name))
            if args.out is not None:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(bench.figures() + "\n")
    print(bench.figures())


if __name__ == "__main__":
    main()
