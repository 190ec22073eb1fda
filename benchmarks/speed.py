"""Speed and memory on LLaDA-8B's shapes with random weights, each figure beside a baseline of the same run.

    python benchmarks/speed.py peak trunk rollout --out benchmarks/results/speed.json       (one GPU)
    python benchmarks/speed.py all --toy --out toy.json                                     (a CPU, to try the script)

Prompt 200, completion 256, 128 steps, blocks of 32, unless a section says otherwise. The baseline is `plain_step`: what
the field's first implementations do. Where a full run would only repeat one step or block, some are timed and the
rest is reckoned; such rows say so under "reckoned".
"""

import argparse
import json
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unmask.commits import even
from unmask.engine import Cache
from unmask.law import Law
from unmask.methods import BASES, agrpo, daca, diffu_grpo, dispo, dps, sml
from unmask.mismatch import mismatch_metrics, replayed
from unmask.models.checkpoint import Origin
from unmask.models.decoder import Facts
from unmask.models.load import Released
from unmask.models.lora import LoraOptions, Unmoved, add_adapter, trainable
from unmask.parts import parts_of
from unmask.probes import ask
from unmask.rollout import Rollouts, _Walk, sample
from unmask.rows import Rows
from unmask.update import answers, update

MASK, EOS = 126336, 126081
SHAPE = {"length": 256, "steps": 128, "block": 32}
PROMPT = 200


class Bench:
    """A model, its device, and what has been found."""

    def __init__(self, toy: bool) -> None:
        self.toy, self.device = toy, "cuda" if torch.cuda.is_available() else "cpu"
        self.found: dict[str, Any] = {"machine": machine(), "command": " ".join(sys.argv)}
        self.shape = {"length": 32, "steps": 16, "block": 8} if toy else SHAPE
        self.prompt = 12 if toy else PROMPT
        self.policy = llada(self.device, toy)
        self.peak = 0.0

    @property
    def width(self) -> int:
        return self.prompt + self.shape["length"]

    def prompts(self, rows: int, copies: int = 1) -> list[list[int]]:
        rng = torch.Generator().manual_seed(0)
        high = 90 if self.toy else 100_000
        texts = torch.randint(4, high, (rows // copies, self.prompt), generator=rng).tolist()
        return [text for text in texts for _ in range(copies)]

    def seeds(self, rows: int) -> Tensor:
        return torch.arange(rows, device=self.device)

    def roll(self, rows: int, copies: int = 1, **how: Any) -> Rollouts:
        return sample(self.policy, self.prompts(rows, copies), self.seeds(rows), **{**self.shape, **how})

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
        self.found.setdefault(section, []).append(values)
        print(section, json.dumps(values), flush=True)


def machine() -> dict[str, str]:
    import transformers

    found = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def llada(device: str, toy: bool) -> Released:
    """LLaDA-8B's network with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    mask, eos = (98, 97) if toy else (MASK, EOS)
    config = LlamaConfig(
        vocab_size=99 if toy else 126464,
        hidden_size=64 if toy else 4096,
        intermediate_size=128 if toy else 12288,
        num_hidden_layers=2 if toy else 32,
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


# --- the baseline


@contextmanager
def as_written(policy: Released) -> Iterator[None]:
    """Under it the layers are not compiled."""
    layers, compiled = policy.layers, policy.compiled
    policy.layers, policy.compiled = list(policy.lm.model.layers), False
    try:
        yield
    finally:
        policy.layers, policy.compiled = layers, compiled


@torch.no_grad()
def plain_step(bench: Bench, tokens_BL: Tensor, first: int, last: int, size: int, temperature: float = 1.0) -> None:
    """Not compiled; all logits; double-precision Gumbel noise over the vocabulary; softmax; top-k row by row."""
    policy = bench.policy
    every_Q = torch.arange(tokens_BL.numel(), device=tokens_BL.device)
    with as_written(policy):
        hidden_QD = policy.hidden(tokens_BL, None, every_Q)
    logits_BLV = policy.lm.lm_head(hidden_QD).view(*tokens_BL.shape, -1)
    noisy = logits_BLV.to(torch.float64)
    noise = torch.rand_like(noisy)
    token_BL = (noisy.exp() / (-torch.log(noise)) ** temperature).argmax(-1)
    del noisy, noise
    confidence = torch.softmax(logits_BLV, dim=-1).gather(-1, token_BL[..., None]).squeeze(-1)
    del logits_BLV
    masked = tokens_BL == policy.mask_id
    confidence[:, last:] = -torch.inf
    confidence = torch.where(masked, confidence, -torch.inf)
    for row in range(len(tokens_BL)):
        _, place = torch.topk(confidence[row], k=size)
        tokens_BL[row, place] = token_BL[row, place]


def plain_seconds(bench: Bench, rows: int, steps: int) -> float:
    """Seconds of a plain rollout, reckoned from its first `steps` steps: every step costs the same.

    Rows whose double-precision noise would not fit are done in parts, one after the other.
    """
    length, block = bench.shape["length"], bench.shape["block"]
    part = min(rows, 32)
    prompt = torch.tensor(bench.prompts(part), device=bench.device)
    masks = torch.full((part, length), bench.policy.mask_id, device=bench.device)
    tokens_BL = torch.cat([prompt, masks], dim=1)
    sizes = even(**bench.shape)[0]

    def some() -> None:
        for step in range(steps):
            plain_step(bench, tokens_BL, bench.prompt, bench.prompt + block, sizes[step % len(sizes)])

    plain_step(bench, tokens_BL.clone(), bench.prompt, bench.prompt + block, sizes[0])
    return bench.seconds(some, warm=False) / steps * bench.shape["steps"] * (rows / part)


# --- the sections


def peak(bench: Bench) -> None:
    """The rate of one large matrix product: what "peak" means in the other sections."""
    size = 512 if bench.toy else 8192
    kind = torch.float32 if bench.device == "cpu" else torch.bfloat16
    a, b = (torch.randn(size, size, device=bench.device, dtype=kind) for _ in range(2))
    seconds = bench.seconds(lambda: a @ b, repeats=20)
    bench.peak = 2 * size**3 / seconds / 1e12
    bench.note("peak", tflops=bench.peak, size=size)


def trunk_tflop(bench: Bench, rows: int, columns: int, seen: int) -> float:
    config = bench.policy.lm.config
    weights = sum(w.numel() for w in bench.policy.lm.model.layers[0].parameters())
    tokens = rows * columns
    attention = 4 * seen * config.hidden_size
    return tokens * config.num_hidden_layers * (2 * weights + attention) / 1e12


@torch.no_grad()
def trunk(bench: Bench) -> None:
    """One pass of 32 canvases, and of the 32 columns of a block against a memory: eager and compiled."""
    rows = 4 if bench.toy else 32
    tokens = torch.tensor(bench.prompts(rows), device=bench.device)
    tokens = torch.cat([tokens, tokens.new_full((rows, bench.shape["length"]), bench.policy.mask_id)], dim=1)
    at = torch.arange(rows, device=bench.device) * bench.width + bench.prompt
    first, last = bench.prompt, bench.prompt + bench.shape["block"]
    for compiled in (False, True):
        if compiled:
            start = time.perf_counter()
            bench.policy.compile_layers()
            with bench.policy.rollout():
                bench.policy.hidden(tokens, None, at)
            bench.wait()
            bench.note("trunk", compile_seconds=time.perf_counter() - start)
        _, memory = bench.policy.remember(tokens, None, at)
        padded = torch.ones_like(tokens, dtype=torch.bool)
        padded[:, :8] = False
        passes = {
            "whole, some columns padding": (lambda m=padded: bench.policy.hidden(tokens, m, at), bench.width),
            "whole": (lambda: bench.policy.hidden(tokens, None, at), bench.width),
            "window": (lambda m=memory: bench.policy.hidden_window(m, tokens, first, last, at), last - first),
        }
        for name, (action, columns) in passes.items():
            with bench.policy.rollout() if compiled else nullcontext():
                seconds = bench.seconds(action, repeats=5)
            tflop = trunk_tflop(bench, rows, columns, bench.width)
            share = tflop / seconds / bench.peak
            bench.note("trunk", kind=name, compiled=compiled, rows=rows, ms=1e3 * seconds, share_of_peak=share)


def rollout(bench: Bench) -> None:
    """Exact and cached rollouts against the plain loop."""
    small = 4 if bench.toy else 32
    plain = plain_seconds(bench, small, 4)
    bench.note("rollout", kind="plain loop", rows=small, seconds=plain, reckoned="4 of all steps timed")
    trace = bench.roll(small, cache=Cache()).trace
    exact = bench.seconds(lambda: bench.roll(small), warm=False)
    bench.note("rollout", kind="exact", rows=small, seconds=exact, speedup=plain / exact)
    for kind, cache in (("prefix cache", Cache(suffix=False)), ("dual cache", Cache())):
        seconds = bench.seconds(lambda c=cache: bench.roll(small, cache=c), warm=False)
        bench.note("rollout", kind=kind, rows=small, seconds=seconds, speedup=plain / seconds)
    apart = mismatch_metrics(trace, replayed(bench.policy, trace, Rows(32))) if bench.toy else {}
    bench.note("rollout", kind="mismatch of the dual cache", **apart)
    large = 8 if bench.toy else 128
    plain = plain_seconds(bench, large, 2)
    seconds = bench.seconds(lambda: bench.roll(large, cache=Cache()), warm=False)
    bench.note("rollout", kind="dual cache", rows=large, seconds=seconds, speedup=plain / seconds,
               reckoned="plain loop: 2 steps of 32 rows timed")


def waiting(bench: Bench) -> None:
    """The places at which a step waits for the device, by torch's own watch; there should be none."""
    if bench.device == "cpu":
        return
    plain = _Walk.step

    def watched(walk: _Walk, *arguments: int) -> None:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            plain(walk, *arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    for how in ({}, {"cache": Cache()}, {"law": Law(0.8, top_k=20)}, {"record": dps(diffu_grpo()).sampling["record"]}):
        bench.roll(4, **how)  # compiled by now, which does wait
        _Walk.step = watched
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            bench.roll(4, **how)
        _Walk.step = plain
        places = {f"{Path(w.filename).name}:{w.lineno}" for w in said if "called a synchronizing" in str(w.message)}
        told = {name: str(value) for name, value in how.items()}
        bench.note("waiting", rows=4, steps=bench.shape["steps"], places=sorted(places), how=told)


@contextmanager
def ending(bench: Bench) -> Iterator[None]:
    """Under it the policy writes an end token from a third of the completion on."""
    policy, ends = bench.policy, [torch.zeros(0)]
    plain = {name: getattr(policy, name) for name in ("hidden", "remember", "hidden_window", "head")}

    def noting(name: str) -> Callable[..., Any]:
        def asked(*arguments: Any) -> Any:
            at_Q = arguments[-1]
            ends[0] = at_Q % bench.width >= bench.prompt + bench.shape["length"] // 3
            return plain[name](*arguments)

        return asked

    def head(hidden_QD: Tensor) -> Tensor:
        logits_QV = plain["head"](hidden_QD)
        logits_QV[:, policy.eos_id] += 1e4 * ends[0]
        return logits_QV

    for name in ("hidden", "remember", "hidden_window"):
        setattr(policy, name, noting(name))
    policy.head = head
    try:
        yield
    finally:
        for name in plain:
            delattr(policy, name)


def early(bench: Bench) -> None:
    """Rows that end at a third of the length retire."""
    rows = 4 if bench.toy else 32
    for name, cache in (("exact", None), ("dual cache", Cache())):
        whole = bench.seconds(lambda c=cache: bench.roll(rows, cache=c), warm=False)
        with ending(bench):
            third = bench.seconds(lambda c=cache: bench.roll(rows, cache=c), warm=False)
        bench.note("early", kind=name, rows=rows, seconds=third, full_length=whole, ratio=third / whole)


class Trainer:
    """One training step of a method on random rewards, with LoRA r128 on every linear layer of the blocks."""

    def __init__(self, bench: Bench, rows: int, checkpointing: bool = False) -> None:
        self.bench, self.rows = bench, Rows(rows)
        bench.policy.checkpointing = checkpointing
        if not trainable(bench.policy):
            add_adapter(bench.policy, LoraOptions(rank=4 if bench.toy else 128), seed=0)
        for name, weight in bench.policy.named_parameters():
            if "lora_B" in name:
                weight.data.zero_()  # fresh again: the reference of an adapter that has moved is a copy of all of it
        self.optimizer = torch.optim.AdamW(trainable(bench.policy), lr=1e-6, fused=bench.device == "cuda")
        self.reference = Unmoved(bench.policy, alike=bench.policy.compiled)

    def learn(self, method: Any, rollouts: Rollouts, right_or_wrong: bool = False) -> None:
        """Rewards are all different, so that nothing is idle; or 0 and 1 alike often."""
        rng = torch.Generator().manual_seed(0)

        def rewards(count: int) -> Tensor:
            drawn = torch.rand(count, dtype=torch.float64, generator=rng).to(self.bench.device)
            return drawn.round() if right_or_wrong else drawn

        reward, twigs = rewards(len(rollouts.trace)), rollouts.branches
        branch_reward = None if twigs is None else rewards(len(twigs))
        reference = self.reference if method.needs_reference else None
        turns = parts_of(
            method, self.bench.policy, reference, rollouts, reward, branch_reward, rng, rows=self.rows
        )
        for parts in turns:
            update(self.bench.policy, self.optimizer, parts, self.rows, 1.0)


def step(bench: Bench) -> None:
    """Rollout of 8 x 8 and update: DACA with the dual cache against diffu-GRPO on the plain loop; DiSPO's price."""
    groups = (2, 4) if bench.toy else (8, 8)
    rows = groups[0] * groups[1]
    group = torch.arange(rows, device=bench.device) // groups[1]
    trainer = Trainer(bench, 16)
    plain = plain_seconds(bench, rows, 4)
    times: dict[str, float] = {}
    base, full = diffu_grpo(), daca(diffu_grpo(), strata=4)
    for name, method in (("diffu_grpo", base), ("daca", full), ("dispo", dispo(diffu_grpo()))):
        found: list[Rollouts] = []

        def roll(m: Any = method, f: list[Rollouts] = found) -> None:
            f.append(bench.roll(rows, groups[1], cache=Cache(), group_B=group, **m.sampling))

        rolled = bench.seconds(roll)
        learnt = bench.seconds(lambda m=method, f=found: trainer.learn(m, f[-1]))
        times[name] = rolled + learnt
        bench.note("step", method=name, rows=rows, rollout=rolled, update=learnt, total=times[name])
        times[name + " update"] = learnt
        if name == "dispo":
            some = bench.seconds(lambda m=method, f=found: trainer.learn(m, f[-1], right_or_wrong=True))
            ratio = times["diffu_grpo"] / (rolled + some)
            bench.note("step", kind="dispo's throughput, rewards 0 or 1", update=some, ratio=ratio)
    baseline = plain + times["diffu_grpo update"]
    bench.note("step", kind="plain loop + diffu_grpo update", total=baseline, reckoned="4 steps timed")
    bench.note("step", kind="daca, dual cache, against that", speedup=baseline / times["daca"])
    bench.note("step", kind="dispo's throughput against diffu_grpo's", ratio=times["diffu_grpo"] / times["dispo"])


def agreement(bench: Bench) -> None:
    """Before any step: log-probabilities of the old policy and of the reference against the policy's own."""
    rows = 4 if bench.toy else 16
    trainer = Trainer(bench, 16)
    rollouts = bench.roll(rows, rows, cache=Cache(), group_B=torch.zeros_like(bench.seeds(rows)))
    (probes,) = diffu_grpo().probe(rollouts.trace, torch.Generator().manual_seed(0), 1)
    new_NL = ask(bench.policy, probes).detach()
    for name, policy in (("old", bench.policy), ("reference", trainer.reference)):
        apart_NL = (answers(policy, probes, trainer.rows) - new_NL).abs()
        bench.note("agreement", of=name, compiled=bench.policy.compiled, largest=float(apart_NL.max()))


def memory(bench: Bench) -> None:
    """The peak of LoRA training at group 8, prompt 200 and completion 256, rollout included."""
    rows = 4 if bench.toy else 8
    group = torch.zeros(rows, dtype=torch.long, device=bench.device)
    for name, method in (("diffu_grpo", diffu_grpo()), ("daca", daca(diffu_grpo(), strata=4))):
        trainer = Trainer(bench, 1, checkpointing=True)

        def whole_step(m: Any = method, t: Trainer = trainer) -> None:
            for _ in range(2):  # from the second on the optimiser's state is there during the rollout
                t.learn(m, bench.roll(rows, rows, cache=Cache(), group_B=group, **m.sampling))

        bench.note("memory", method=name, rows=rows, micro_batch=1, peak_gib=bench.memory(whole_step))


def methods(bench: Bench) -> None:
    """One training step of every method at the same rollout: seconds, memory and passes."""
    groups = (2, 4) if bench.toy else (2, 8)
    rows = groups[0] * groups[1]
    group = torch.arange(rows, device=bench.device) // groups[1]
    trainer = Trainer(bench, 16)
    shelf = {name: factory() for name, factory in BASES.items()}
    shelf["agrpo"] = agrpo(draws=8) if bench.toy else agrpo(draws=24)
    base = diffu_grpo()
    shelf |= {"diffu_grpo + sml": sml(base), "diffu_grpo + dps": dps(base), "diffu_grpo + daca": daca(base)}
    shelf |= {"diffu_grpo + dispo": dispo(base)}
    for name, method in shelf.items():
        rollouts = bench.roll(rows, groups[1], cache=Cache(), group_B=group, **method.sampling)
        passed = {"forward": 0, "with gradient": 0}
        inner = bench.policy.hidden

        def counted(tokens: Tensor, *rest: Any, p: dict[str, int] = passed, inner: Any = inner) -> Tensor:
            p["with gradient" if torch.is_grad_enabled() else "forward"] += len(tokens)
            return inner(tokens, *rest)

        bench.policy.hidden = counted
        peak_gib = bench.memory(lambda m=method, r=rollouts: trainer.learn(m, r))
        bench.policy.hidden = inner
        seconds = bench.seconds(lambda m=method, r=rollouts: trainer.learn(m, r), warm=False)
        equivalents = (passed["forward"] + 3 * passed["with gradient"]) / rows  # a way back costs two forward
        bench.note("methods", method=name, rows=rows, seconds=seconds, peak_gib=peak_gib, states=passed,
                   forward_equivalents_a_row=equivalents)


def growth(bench: Bench) -> None:
    """Cost against completion length, group size and strata: dual-cache rollout and DACA update."""
    trainer = Trainer(bench, 8)
    lengths = (16, 32) if bench.toy else (128, 256, 512, 1024)
    small = 4 if bench.toy else 8
    for length in lengths:
        shape = {"length": length, "steps": length // 2, "block": bench.shape["block"]}
        one = {"length": length, "steps": length // 2}

        def roll(s: dict[str, int] = shape) -> Rollouts:
            method = daca(diffu_grpo(), strata=4)
            return bench.roll(small, small, **s, cache=Cache(), group_B=torch.zeros_like(bench.seeds(small)),
                              **method.sampling)

        rolled: list[Rollouts] = []
        seconds = bench.seconds(lambda r=roll, out=rolled: out.append(r()), warm=length in lengths[:2])
        learnt = bench.seconds(lambda r=rolled[-1]: trainer.learn(daca(diffu_grpo(), strata=4), r))
        bench.note("growth", by="length", **one, rows=small, rollout=seconds, update=learnt)
    sizes = (2, 4) if bench.toy else (4, 16, 64)
    for rows in sizes:
        group = torch.zeros_like(bench.seeds(rows))
        method = daca(diffu_grpo(), strata=4)
        rolled = []

        def roll_group(r: int = rows, g: Tensor = group, m: Any = method, out: list[Rollouts] = rolled) -> None:
            out.append(bench.roll(r, r, cache=Cache(), group_B=g, **m.sampling))

        seconds = bench.seconds(roll_group, warm=False)
        learnt = bench.seconds(lambda r=rolled, m=method: trainer.learn(m, r[0]))
        bench.note("growth", by="group", group=rows, rollout=seconds, update=learnt)
    rollouts = bench.roll(small, small, cache=Cache(), group_B=torch.zeros_like(bench.seeds(small)),
                          **daca(diffu_grpo()).sampling)
    for strata in (1, 2, 4) if bench.toy else (1, 2, 4, 8, 16):
        method = daca(diffu_grpo(), strata=strata)
        learnt = bench.seconds(lambda m=method, r=rollouts: trainer.learn(m, r))
        bench.note("growth", by="strata", strata=strata, rows=small, update=learnt)


# The first five without an adapter, the others with one.
SECTIONS = {f.__name__: f for f in (peak, trunk, rollout, early, waiting, agreement, memory, step, methods, growth)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="+", choices=[*SECTIONS, "all"])
    parser.add_argument("--toy", action="store_true", help="a model of two small layers")
    parser.add_argument("--eager", action="store_true", help="do not compile the layers for rollouts")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    wanted = [name for name in SECTIONS if name in arguments.sections or "all" in arguments.sections]
    bench = Bench(arguments.toy)
    if "trunk" not in wanted and not arguments.eager:
        bench.policy.compile_layers()
    for name in wanted:
        SECTIONS[name](bench)
        arguments.out.write_text(json.dumps(bench.found, indent=1) + "\n")


if __name__ == "__main__":
    main()
