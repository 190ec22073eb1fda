"""Rollouts of block-causal models with and without their exact cache: models of the embedded kind, one core.

    OMP_NUM_THREADS=1 python benchmarks/exact_cache.py --out benchmarks/results/exact_cache.json    (under a minute)

One position a step, nothing ends; the best of two runs each, seconds of the process. The tokens are compared.
"""

import argparse
import json
import time
from pathlib import Path

import torch

import unmask
from unmask.models.tiny import TinyShape, tiny_policy

SHAPES = [(20, 16, 4, 16), (20, 64, 4, 16), (60, 64, 32, 8), (60, 128, 32, 4), (60, 256, 32, 2)]
"""Tokens of the prompt, positions, block, rows."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    out, lines = parser.parse_args().out, []
    torch.set_num_threads(1)
    for prompt, length, block, rows in SHAPES:
        policy = tiny_policy(TinyShape(max_length=512))
        policy.causal_block = block
        prompts, seeds = [[9 + row % 50] * (prompt - row % 7) for row in range(rows)], torch.arange(rows)
        seconds, tokens = {"cache": torch.inf, "none": torch.inf}, {}
        for name in [*seconds] * 2:
            decoding = unmask.Decoding(length, cache=unmask.Cache() if name == "cache" else None, stops=False)
            before = time.process_time()
            tokens[name] = unmask.sample(policy, prompts, seeds, decoding).trace.tokens_BL
            seconds[name] = min(seconds[name], time.process_time() - before)
        line = {"prompt": prompt, "length": length, "block": block, "rows": rows, "seconds": seconds}
        line |= {"ratio": seconds["none"] / seconds["cache"]}
        line |= {"equal_tokens": float((tokens["cache"] == tokens["none"])[:, -length:].double().mean())}
        lines.append(line)
        out.write_text(json.dumps(lines, indent=1) + "\n")
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
