"""Speed of mixtures of experts at released shapes with random weights, beside a loop over experts in the same run.

    python benchmarks/speed_experts.py --out benchmarks/results/speed_experts.json     (one GPU, under 150 s)
    python benchmarks/speed_experts.py --toy --out toy.json                            (a CPU, to try the script)

For each model: a pass over whole canvases, a pass over one block against cached keys and values, a pass with gradients
of all weights, and rollouts with and without a cache (LLaDA-MoE: dual, an approximation; LLaDA2: exact). Prompt 200,
completion 128, 64 steps, blocks of 32. A figure is the median of three repetitions (rollouts with the loop: one) after
one that is not counted; results are written after every row. Shares of the peak are operations a second of the experts
that are used, over those of one large matrix product.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from speed_bench import machine
from torch import nn

import unmask.models.experts
from unmask.models.checkpoint import Origin
from unmask.models.config_file import ConfigFile
from unmask.models.decoder import Facts
from unmask.models.experts import Mixture
from unmask.models.known import KNOWN
from unmask.models.load import Released
from unmask.models.recognition import family_of, network_of
from unmask.rollout.cache import Cache
from unmask.rollout.decoding import Decoding
from unmask.rollout.sample import sample

MODELS = ("inclusionAI/LLaDA-MoE-7B-A1B-Instruct", "inclusionAI/LLaDA2.0-mini")
PROMPT, SHAPE, REPEATS, LIMIT = 200, {"length": 128, "steps": 64, "block": 32}, 3, 140.0
TOY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "dense_intermediate_size": 64,
    "intermediate_size": 64,
    "expert_intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_experts": 16,
    "vocab_size": 99,
}


class ExpertBench:
    def __init__(self, toy: bool, out: Path) -> None:
        self.toy, self.out, self.start = toy, out, time.perf_counter()
        self.device = "cuda" if torch.cuda.is_available() and not toy else "cpu"
        self.results: dict[str, Any] = {"machine": machine(), "prompt": PROMPT, **SHAPE, "rows": []}
        self.peak = self.measured_peak()
        self.results["peak_tflops"] = self.peak / 1e12

    def measured_peak(self) -> float:
        size = 512 if self.toy else 8192
        a, b = (torch.randn(size, size, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        return 2 * size**3 / statistics.median(self.seconds(lambda: a @ b, times=10))

    def seconds(self, action: Callable[[], Any], times: int = REPEATS) -> list[float]:
        """The duration of each repetition, after one to warm up."""
        taken = []
        for number in range(times + 1):
            self.wait()
            before = time.perf_counter()
            action()
            self.wait()
            if number:
                taken.append(time.perf_counter() - before)
        return taken

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def row(
        self,
        model: str,
        kind: str,
        experts: str,
        tokens: int,
        flop: float | None,
        action: Callable[[], Any],
        times: int = REPEATS,
    ) -> None:
        """Time an action and write all results so far. After the time limit rows are left out."""
        if time.perf_counter() - self.start > LIMIT:
            self.results["left_out"] = [*self.results.get("left_out", []), f"{model}, {kind}, {experts}"]
            return
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            taken = self.seconds(action, times)
        except RuntimeError as error:  # the other rows are still worth having
            self.results["failed"] = [*self.results.get("failed", []), f"{model}, {kind}, {experts}: {error}"]
            print(self.results["failed"][-1], flush=True)
            return
        middle = statistics.median(taken)
        row: dict[str, Any] = {"model": model, "kind": kind, "experts": experts, "tokens": tokens}
        row |= {"seconds": middle, "seconds_all": taken, "tokens_a_second": tokens / middle}
        row |= {"spread": (max(taken) - min(taken)) / middle}
        if flop is not None:
            row["share_of_peak"] = flop / middle / self.peak
        if self.device == "cuda":
            row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        self.results["rows"].append(row)
        self.results["elapsed"] = time.perf_counter() - self.start
        self.out.write_text(json.dumps(self.results, indent=1) + "\n")
        print(json.dumps(row), flush=True)


@contextmanager
def loop_over_experts() -> Iterator[None]:
    """Inside it no layer uses the grouped product."""
    before = unmask.models.experts.has_grouped_kernel
    unmask.models.experts.has_grouped_kernel = lambda x_RD, weight_EOD: False
    try:
        yield
    finally:
        unmask.models.experts.has_grouped_kernel = before


def random_model(name: str, bench: Any) -> Released:
    """The network with random bf16 weights, on the device of the bench; a small one if it is a toy."""
    fields = dict(KNOWN[name])
    if bench.toy:
        fields |= {key: value for key, value in TOY.items() if key in fields or key == "head_dim"}
    file = ConfigFile(Path(name) / "config.json", fields)
    family = family_of(file)
    lm, _ = network_of(family, file)
    lm, rows = drawn_weights(lm, bench.device), fields["vocab_size"]
    facts = Facts(rows - 1, rows - 2, rows - 2, fields["max_position_embeddings"], causal_block=family.causal_block)
    return Released(lm, facts, None, Origin({}))


def drawn_weights(lm: Any, device: str) -> Any:
    """The network with random bf16 weights, drawn on the device."""
    rotary = lm.model.rotary_emb
    lm = lm.to(torch.bfloat16).to_empty(device=device)
    lm.model.rotary_emb = type(rotary)(rotary.config).to(device)
    rng = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for key, weight in (*lm.named_parameters(), *lm.named_buffers()):
            if key.endswith("expert_bias"):
                weight.zero_()
            elif "norm" in key:
                weight.fill_(1.0)
            elif not key.endswith("inv_freq"):
                weight.normal_(0.0, 0.02, generator=rng)
    return lm.requires_grad_(False)


def layer_flop(policy: Released, columns: int, seen: int) -> float:
    """Operations of a pass through the layers; of experts only those that a token uses."""
    config, total = policy.lm.config, 0.0
    for layer in policy.lm.model.layers:
        linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
        total += sum(linear.weight.numel() for linear in linears)
        if isinstance(layer.mlp, Mixture):
            experts = sum(weight.numel() for weight in layer.mlp.experts.parameters())
            total += layer.mlp.gate.weight.numel() + experts * layer.mlp.gate.chosen / layer.mlp.experts.experts
    attention = 4 * seen * config.num_attention_heads * config.head_dim * len(policy.lm.model.layers)
    return columns * (2 * total + attention)


def measure(bench: ExpertBench, name: str) -> None:
    policy = random_model(name, bench)
    prompt, shape = (12, {"length": 64, "steps": 8, "block": 32}) if bench.toy else (PROMPT, SHAPE)
    width, rows = prompt + shape["length"], 4 if bench.toy else 32
    rng = torch.Generator().manual_seed(0)
    tokens_SL = torch.randint(2, policy.vocabulary - 2, (rows, width), generator=rng).to(bench.device)
    at_Q = torch.arange(rows, device=bench.device) * width + width - 1  # one position a row: the head is not measured

    @torch.no_grad()
    def whole() -> None:
        policy.hidden(tokens_SL, None, at_Q)

    with torch.no_grad():
        memory = policy.remember(tokens_SL, None, at_Q)[1]

    @torch.no_grad()
    def window() -> None:
        policy.hidden_window(memory, tokens_SL, width - 32, width, at_Q)

    def gradient() -> None:
        policy.zero_grad(set_to_none=True)
        policy.hidden(tokens_SL[: rows // 4], None, at_Q[: rows // 4]).float().square().sum().backward()

    forward, cached = layer_flop(policy, rows * width, width), layer_flop(policy, rows * 32, width)
    gradient_flop = 3 * layer_flop(policy, rows // 4 * width, width)

    def passes(experts: str) -> None:
        bench.row(name, "whole pass", experts, rows * width, forward, whole)
        bench.row(name, "window of 32 columns, cached", experts, rows * 32, cached, window)
        policy.requires_grad_(True)
        bench.row(name, "pass with gradients of all weights", experts, rows // 4 * width, gradient_flop, gradient)
        policy.zero_grad(set_to_none=True)
        policy.requires_grad_(False)

    prompts, seed_B = tokens_SL[: rows // 2, :prompt].tolist(), torch.arange(rows // 2, device=bench.device)

    def rollouts(cache: Cache | None) -> Callable[[], Any]:
        settings = Decoding(**shape, cache=cache, stops=False)
        return lambda: sample(policy, prompts, seed_B, settings)

    made = rows // 2 * shape["length"]
    passes("grouped")
    cached_kind = "rollout, dual cache" if policy.causal_block is None else "rollout, exact cache"
    bench.row(name, cached_kind, "grouped", made, None, rollouts(Cache()))
    bench.row(name, "rollout, whole passes", "grouped", made, None, rollouts(None))
    with loop_over_experts():
        passes("loop")
        bench.row(name, cached_kind, "loop", made, None, rollouts(Cache()), times=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="two small layers on a CPU")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    bench = ExpertBench(arguments.toy, arguments.out)
    for name in MODELS:
        measure(bench, name)
        gc.collect()
        if bench.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
