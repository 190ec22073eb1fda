"""Continuous against static batches: rollouts of a model of the embedded kind with block-causal attention.

    OMP_NUM_THREADS=1 python benchmarks/continuous.py
    python benchmarks/continuous.py --width 2048 --hidden 6144 --layers 28 --slots 32 --prompts 256 --length 256

Completions end after 1, 2, 3 or 4 quarters of the canvas, in random order (the benchmark decides where; what the model
writes before is its own). All ways sample the same prompts with the same cache and give the same tokens. "static": a
batch ends with its longest row. "compacted": as `sample` without a micro-batch size, which drops rows that have ended;
on a GPU a pass over fewer rows takes about as long. "continuous": as `sample` with a micro-batch size. Prints the
seconds (on a CPU those of the process), the passes and their ratio: the best of `repeats` runs each, alternating. A GPU
is used if there is one.
"""

import argparse
import json
import random
import time

import torch
from torch import Tensor

import unmask
from unmask.models.tiny import Tiny, TinyShape, tiny_policy
from unmask.rollout.denoiser import Denoiser


class Ending(Tiny):
    """Writes an end token at a position that the first token of the prompt gives, in quarters of the completion."""

    length = 0
    calls = 0

    def _normed(self, x_SWD: Tensor, row_Q: Tensor, column_Q: Tensor) -> Tensor:
        self.calls += 1
        return super()._normed(x_SWD, row_Q, column_Q)

    def marked(self, hidden_QD: Tensor, tokens_SL: Tensor, at_Q: Tensor) -> Tensor:
        """The hidden states, and whether each position is the last of its completion."""
        width = tokens_SL.shape[1]
        real_SL = tokens_SL != self.pad_id
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
        logits_QV[:, self.eos_id] = torch.where(hidden_QD[:, -1] > 0, 1e4, -1e4)
        return logits_QV


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = {
        "prompts": 128,
        "slots": 8,
        "length": 128,
        "block": 4,
        "repeats": 2,
        "width": 64,
        "hidden": 128,
        "layers": 4,
    }
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args, rng = parser.parse_args(), random.Random(0)
    gpu = torch.cuda.is_available()
    shape = TinyShape(width=args.width, hidden=args.hidden, layers=args.layers, heads=args.width // 16, max_length=1024)
    policy = Ending(tiny_policy(shape).lm)
    policy = policy.to("cuda", torch.bfloat16) if gpu else policy
    policy.causal_block, policy.length = args.block, args.length
    prompts = [[9 + rng.randint(1, 4)] + [20] * rng.randint(7, 24) for _ in range(args.prompts)]
    seeds = torch.arange(len(prompts), device="cuda" if gpu else "cpu")
    decoding = unmask.Decoding(args.length, args.length, cache=unmask.Cache())

    def now() -> float:
        if not gpu:
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def static() -> list[unmask.Trace]:
        compact = Denoiser.compact

        def end_together(denoiser: Denoiser) -> None:
            if denoiser.ended_B[denoiser.live_R].all():
                compact(denoiser)

        Denoiser.compact = end_together
        try:
            return compacted()
        finally:
            Denoiser.compact = compact

    def compacted() -> list[unmask.Trace]:
        parts = [slice(start, start + args.slots) for start in range(0, len(prompts), args.slots)]
        return [unmask.sample(policy, prompts[part], seeds[part], decoding).trace for part in parts]

    def continuous() -> list[unmask.Trace]:
        return [unmask.sample(policy, prompts, seeds, decoding, micro_batch=args.slots).trace]

    unmask.sample(policy, prompts[:2], seeds[:2], decoding)  # the first passes are slower
    seconds, passes, texts = {}, {}, {}
    for _ in range(args.repeats):
        for run in (static, compacted, continuous):
            policy.calls, started = 0, now()
            traces = run()
            name = run.__name__
            seconds[name] = min(seconds.get(name, torch.inf), now() - started)
            passes[name] = policy.calls
            texts[name] = [row for trace in traces for row in trace.tokens_BL[:, -args.length :].tolist()]
    assert (
        gpu or texts["static"] == texts["compacted"] == texts["continuous"]
    )  # batches of other sizes round differently in bf16
    figures = {"seconds": seconds, "passes": passes}
    ratios = {name: {way: each[way] / each["continuous"] for way in each} for name, each in figures.items()}
    print(json.dumps({"settings": vars(args), **figures, "times continuous": ratios}, indent=1))


if __name__ == "__main__":
    main()
