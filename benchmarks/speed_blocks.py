"""Rollouts of block-causal models with the exact cache, captured as CUDA graphs and not; random weights.

    python benchmarks/speed_blocks.py --out benchmarks/results/speed_blocks.json                  (one GPU, under 90 s)
    python benchmarks/speed_blocks.py --models LLaDA2.0-mini --out benchmarks/results/speed_blocks_experts.json  (same)
    python benchmarks/speed_blocks.py --toy --models SmolLM2-135M SDAR-1.7B LLaDA2.0-mini --out toy.json        (a CPU)

Prompt 200, completion 128, 32 steps, blocks of 32, 1 and 32 rows, bf16, not compiled; no row ends. Both ways are timed
in turns: the median of three rounds after one that is not counted. Tokens are compared with those of the same static
steps uncaptured. Results are written after every cell; after 75 s no cell begins.
"""

import argparse
import gc
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from speed_bench import machine
from speed_experts import drawn_weights, random_model
from speed_graphs import gap

from unmask.models.checkpoint import Origin
from unmask.models.decoder import Facts
from unmask.models.load import Released
from unmask.rollout.decoding import Decoding
from unmask.rollout.graphs import Graphs
from unmask.rollout.sample import sample

BLOCK, PROMPT, ROUNDS, LIMIT = 32, 200, 3, 75.0
DENSE: dict[str, dict[str, int]] = {
    "SmolLM2-135M": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
    },
    "SDAR-1.7B": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
}
MODELS = (*DENSE, "LLaDA2.0-mini")


class BlockBench:
    def __init__(self, toy: bool, out: Path) -> None:
        self.toy, self.out, self.start = toy, out, time.perf_counter()
        self.device = "cuda" if torch.cuda.is_available() and not toy else "cpu"
        self.shape = {"length": 64, "steps": 4} if toy else {"length": 128, "steps": 32}
        self.prompt = 12 if toy else PROMPT
        self.results: dict[str, Any] = {"machine": machine(), "prompt": self.prompt, "block": BLOCK, **self.shape}
        self.results["cells"] = []

    def policy(self, name: str) -> Released:
        if name not in DENSE:
            policy = random_model(f"inclusionAI/{name}", self)
            policy.causal_block = BLOCK
            return policy
        from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

        sizes = {**DENSE[name], "max_position_embeddings": 4096, "tie_word_embeddings": False, "pad_token_id": None}
        if self.toy:
            sizes |= {"hidden_size": 36, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 99}
        with torch.device("meta"):
            llama = name == "SmolLM2-135M"
            lm = LlamaForCausalLM(LlamaConfig(**sizes)) if llama else Qwen3ForCausalLM(Qwen3Config(**sizes))
        rows = sizes["vocab_size"]
        facts = Facts(rows - 1, rows - 2, rows - 2, 4096, causal_block=BLOCK)
        return Released(drawn_weights(lm.eval(), self.device), facts, None, Origin({}))

    def measure(self, name: str, policy: Released, rows: int) -> None:
        rng = torch.Generator().manual_seed(0)
        prompts = torch.randint(2, policy.vocabulary - 2, (rows, self.prompt), generator=rng).tolist()
        seed_B, length = torch.arange(rows, device=self.device), self.shape["length"]
        ways = {"captured": Graphs(True), "not captured": Graphs(False), "static": Graphs(True, captures=False)}
        traces = {}

        def taken(way: str) -> float:
            self.wait()
            before, decoding = time.perf_counter(), Decoding(**self.shape, stops=False, graphs=ways[way])
            traces[way] = sample(policy, prompts, seed_B, decoding).trace
            self.wait()
            return time.perf_counter() - before

        rounds = [{way: taken(way) for way in ("captured", "not captured")} for _ in range(1 + ROUNDS)]
        taken("static")
        cell: dict[str, Any] = {"model": name, "rows": rows, "graphs": len(ways["captured"].steps)}
        cell["gib"] = {part: size / 2**30 for part, size in ways["captured"].bytes().items()}
        for way in ("captured", "not captured"):
            seconds = [each[way] for each in rounds[1:]]
            middle, steps = median(seconds), self.shape["steps"]
            cell[way] = {"seconds": middle, "all": seconds, "first_round": rounds[0][way]}
            cell[way] |= {"ms_a_step": middle / steps * 1e3, "tokens_per_second": rows * length / middle}
        cell["captured_is_faster"] = cell["not captured"]["seconds"] / cell["captured"]["seconds"]
        cell["tokens that differ"] = {
            "from the same step uncaptured": gap(traces["captured"], traces["static"]),
            "from the step of changing shapes": gap(traces["captured"], traces["not captured"]),
        }
        ways["captured"].release()
        self.results["cells"].append(cell)
        self.write()
        print(json.dumps(cell), flush=True)

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def write(self) -> None:
        self.results["elapsed"] = time.perf_counter() - self.start
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(self.results, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*DENSE])
    parser.add_argument("--toy", action="store_true", help="two small layers on a CPU, where nothing is captured")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    bench = BlockBench(arguments.toy, arguments.out)
    for name in arguments.models:
        policy = bench.policy(name)
        for rows in (1, 4) if bench.toy else (1, 32):
            if time.perf_counter() - bench.start > LIMIT:
                bench.results["left_out"] = [*bench.results.get("left_out", []), f"{name}, {rows} rows"]
                bench.write()
            else:
                bench.measure(name, policy, rows)
        del policy
        gc.collect()
        if bench.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
