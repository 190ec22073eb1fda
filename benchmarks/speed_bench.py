"""What all sections of speed.py share: the model, its shape, the clock, and the results."""

import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from unmask.core.specs import RolloutRequest
from unmask.models.checkpoint import Origin
from unmask.models.decoder import Facts
from unmask.models.load import Released
from unmask.rollout.decoding import Decoding
from unmask.rollout.sample import Rollouts, sample

MASK, EOS = 126336, 126081
SHAPE = {"length": 256, "steps": 128, "block": 32}
PROMPT = 200


class SpeedBench:
    """A model, its device, and the results."""

    def __init__(self, toy: bool, out: Path | None = None) -> None:
        self.toy, self.device, self.out = toy, "cuda" if torch.cuda.is_available() else "cpu", out
        self.results: dict[str, Any] = {"machine": machine(), "command": " ".join(sys.argv)}
        self.shape = {"length": 32, "steps": 16, "block": 8} if toy else SHAPE
        self.prompt = 12 if toy else PROMPT
        self.policy = llada(self.device, toy)
        self.peak = 0.0
        self.baseline: Path | None = None
        """A checkout of an earlier commit to compare with."""
        self.rows: int | None = None
        """The only number of rows to time."""
        self.copies = 1
        """Rows with the same prompt, of these."""
        self.peers: Path | None = None
        """A folder with checkouts of other projects."""
        self.graphs: Any = None
        """Captured steps to reuse; None, as an earlier commit has no such argument."""

    @property
    def width(self) -> int:
        return self.prompt + self.shape["length"]

    @property
    def blocks(self) -> int:
        return self.shape["length"] // self.shape["block"]

    def prompts(self, rows: int, copies: int = 1, width: int | None = None) -> list[list[int]]:
        rng = torch.Generator().manual_seed(0)
        high = 90 if self.toy else 100_000
        texts = torch.randint(4, high, (rows // copies, width or self.prompt), generator=rng).tolist()
        return [text for text in texts for _ in range(copies)]

    def seeds(self, rows: int) -> Tensor:
        return torch.arange(rows, device=self.device)

    def roll(self, rows: int, copies: int = 1, request: RolloutRequest = RolloutRequest(), **decoding: Any) -> Rollouts:
        """Rollouts of `rows` prompts, `copies` of each, which are a group."""
        prompts, seed_B = self.prompts(rows, copies), self.seeds(rows)
        settings = Decoding(**{**self.shape, **self.sampler, **decoding})
        group_B = seed_B // copies
        return sample(self.policy, prompts, seed_B, settings, group_B=group_B, request=request)

    @property
    def sampler(self) -> dict[str, Any]:
        return {} if self.graphs is None else {"graphs": self.graphs}

    @contextmanager
    def changed(self, **attributes: Any) -> Iterator[None]:
        """Inside it some attributes have other values."""
        before = {name: getattr(self, name) for name in attributes}
        vars(self).update(attributes)
        try:
            yield
        finally:
            vars(self).update(before)

    def roll_blocks(
        self, rows: int, blocks: int, width: int | None = None, copies: int = 1, **decoding: Any
    ) -> Rollouts:
        """Rollouts of the last blocks of canvases of `width` columns. Every block costs the same if all prompts differ
        (`copies` of each are equal), so their time is a share of that of a whole completion."""
        block, width = self.shape["block"], width or self.width
        shape = {"length": blocks * block, "steps": blocks * block * self.shape["steps"] // self.shape["length"]}
        prompts = self.prompts(rows, copies, width - shape["length"])
        settings = Decoding(**{**shape, "block": block, **self.sampler, **decoding})
        return sample(self.policy, prompts, self.seeds(rows), settings)

    def seconds(self, action: Callable[[], Any], repeats: int = 1, warm: bool = True) -> float:
        if warm:
            action()
        self.wait()
        start = time.perf_counter()
        for _ in range(repeats):
            action()
        self.wait()
        return (time.perf_counter() - start) / repeats

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def memory(self, action: Callable[[], Any]) -> float:
        """The peak of an action in GiB; 0 on a CPU."""
        if self.device == "cpu":
            action()
            return 0.0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        action()
        return torch.cuda.max_memory_allocated() / 2**30

    def note(self, section: str, **values: Any) -> None:
        self.results.setdefault(section, []).append(values)
        print(section, json.dumps(values), flush=True)
        if self.out is not None:
            self.out.write_text(json.dumps(self.results, indent=1) + "\n")

    def repeated(self, action: Callable[[], Any], repetitions: int = 3, warm: int = 1) -> dict[str, float]:
        """Median, fastest and slowest seconds of an action, after `warm` runs that do not count."""
        for _ in range(warm):
            action()
        times = [self.seconds(action, warm=False) for _ in range(repetitions)]
        return {"seconds": median(times), "fastest": min(times), "slowest": max(times), "repetitions": repetitions}

    def cell(self, action: Callable[[], Any], warm: int = 1) -> dict[str, Any]:
        """`repeated` with the peak of memory in GiB; or that memory ran out. What earlier cells captured is freed."""
        if self.graphs is not None:
            self.graphs.release()
        if self.device == "cpu":
            return self.repeated(action, warm=warm)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            times = self.repeated(action, warm=warm)
        except torch.OutOfMemoryError as error:
            return {"out_of_memory": str(error).partition(". ")[0]}
        return {**times, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def machine() -> dict[str, str]:
    import transformers

    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if torch.cuda.is_available():
        versions["gpu"] = torch.cuda.get_device_name()
    return versions


def llada(device: str, toy: bool, layers: int | None = None) -> Released:
    """LLaDA-8B's network with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    mask, eos = (98, 97) if toy else (MASK, EOS)
    config = LlamaConfig(
        vocab_size=99 if toy else 126464,
        hidden_size=64 if toy else 4096,
        intermediate_size=128 if toy else 12288,
        num_hidden_layers=layers or (2 if toy else 32),
        num_attention_heads=4 if toy else 32,
        num_key_value_heads=4 if toy else 32,
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
        pad_token_id=None,
    )
    kind = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device("meta"):
        lm = LlamaForCausalLM(config)
    lm = lm.to(kind).to_empty(device=device)
    rng = torch.Generator(device).manual_seed(0)
    for name, weight in lm.named_parameters():
        weight.data.fill_(1.0) if "norm" in name else weight.data.normal_(0.0, 0.02, generator=rng)
        weight.requires_grad_(False)
    lm.model.rotary_emb = type(lm.model.rotary_emb)(config).to(device)
    facts = Facts(mask_id=mask, eos_id=eos, pad_id=eos, max_length=4096, rotary_fp32=True)
    return Released(lm.eval(), facts, None, Origin({}))
