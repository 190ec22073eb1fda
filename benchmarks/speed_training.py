"""Sections of speed.py with an adapter: rollouts, training steps, their memory, and how both grow."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

import torch
from speed_bench import SpeedBench
from speed_rollout import plain_seconds
from torch import Tensor

from unmask.core.options import LoraOptions
from unmask.core.probes import ask
from unmask.methods import BASES, agrpo, daca, diffu_grpo, dispo, dps, sml
from unmask.models.lora import ReferencePolicy, add_adapter, merged_adapter, trainable_parameters
from unmask.rollout.cache import Cache
from unmask.rollout.graphs import Graphs
from unmask.rollout.sample import Rollouts
from unmask.training.loss_terms import ScoredRollouts, Scorer, loss_terms
from unmask.training.mismatch import scorer_gap
from unmask.training.update import logprobs, update
from unmask.util.micro_batch import MicroBatch


class Trainer:
    """One training step of a method on random rewards, with LoRA r128 on every linear layer of the blocks."""

    def __init__(self, bench: SpeedBench, rows: int, gradient_checkpointing: bool = False) -> None:
        self.bench, self.micro_batch = bench, MicroBatch(rows)
        bench.policy.gradient_checkpointing = gradient_checkpointing
        if not trainable_parameters(bench.policy):
            add_adapter(bench.policy, LoraOptions(rank=4 if bench.toy else 128), seed=0)
        for name, weight in bench.policy.named_parameters():
            if "lora_B" in name:
                weight.data.zero_()  # fresh again: the reference of an adapter that has moved is a copy of all of it
        self.optimizer = torch.optim.AdamW(trainable_parameters(bench.policy), lr=1e-6, fused=bench.device == "cuda")
        self.reference = ReferencePolicy(bench.policy, alike=bench.policy.compiled)

    def train(self, method: Any, rollouts: Rollouts, right_or_wrong: bool = False) -> None:
        """Rewards are all different, so that nothing is idle; or 0 and 1 alike often."""
        rng = torch.Generator().manual_seed(0)

        def rewards(count: int) -> Tensor:
            drawn = torch.rand(count, dtype=torch.float64, generator=rng).to(self.bench.device)
            return drawn.round() if right_or_wrong else drawn

        reward_B, branches = rewards(len(rollouts.trace)), rollouts.branches
        batch = ScoredRollouts(rollouts, reward_B, None if branches is None else rewards(len(branches)))
        reference = self.reference if method.needs_reference else None
        for terms in loss_terms(method, batch, Scorer(self.bench.policy, reference, self.micro_batch), rng):
            update(self.bench.policy, self.optimizer, terms, self.micro_batch, 1.0)


REPETITIONS = 3


BLOCKS = 2
"""Blocks of a rollout that are timed with an adapter; all cost the same."""


def adapter(bench: SpeedBench) -> None:
    """Dual-cache rollouts of the base model, then with an adapter that is not merged and one that is, in turn.

    The merged rollout includes merging and putting the base weights back, once. `scorer_gap` as in training.
    """
    if trainable_parameters(bench.policy):
        raise ValueError("adapter: an earlier section has added an adapter to the base model")
    sizes, base = (2, 4) if bench.toy else (8, 64), {}
    for rows in sizes:
        taken, peak_gib = _timed_in_turn(bench, rows, {"base": nullcontext})
        base[rows] = _note_rollout(bench, "base", rows, taken["base"], peak_gib["base"])
    Trainer(bench, 1)
    rng = torch.Generator(bench.device).manual_seed(0)
    for name, weight in bench.policy.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(0.0, 1e-3, generator=rng)
    kinds: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "not merged": nullcontext,
        "merged": lambda: merged_adapter(bench.policy),
    }
    merging = bench.repeated(lambda: _merge_once(bench))
    bench.note("adapter", kind="merging and putting back", **merging)
    for rows in sizes:
        taken, peak_gib = _timed_in_turn(bench, rows, kinds)
        for kind in kinds:
            once = merging["seconds"] if kind == "merged" else 0.0
            _note_rollout(bench, kind, rows, taken[kind], peak_gib[kind], once, base[rows])
    short = {"length": 2 * bench.shape["block"], "steps": bench.shape["block"]}
    for kind, context in kinds.items():
        with context():
            trace = bench.roll(sizes[0], **short).trace
        gap = scorer_gap(bench.policy, trace, torch.Generator().manual_seed(0))
        bench.note("adapter", kind=kind, rows=sizes[0], scorer_gap=gap)
    copied = sum(w.numel() * w.itemsize for n, w in bench.policy.named_parameters() if n.endswith("base_layer.weight"))
    bench.note("adapter", kind="copy of the adapted layers", gib=copied / 2**30)


def _timed_in_turn(
    bench: SpeedBench, rows: int, kinds: dict[str, Callable[[], AbstractContextManager[None]]]
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds and peak memory of rollouts of `BLOCKS` blocks inside each context, after two runs that do not count: the
    second captures. Each kind has captured steps of its own."""
    graphs = {kind: Graphs() for kind in kinds}
    taken: dict[str, list[float]] = {kind: [] for kind in kinds}
    peak_gib: dict[str, float] = {}
    for number in range(2 + REPETITIONS):
        for kind, context in kinds.items():

            def roll(inside: Callable[[], AbstractContextManager[None]] = context) -> None:
                with inside():
                    bench.roll_blocks(rows, BLOCKS, cache=Cache())

            with bench.changed(graphs=graphs[kind]):
                if number == 1:
                    peak_gib[kind] = bench.memory(roll)
                else:
                    taken[kind].append(bench.seconds(roll, warm=False))
    return {kind: times[1:] for kind, times in taken.items()}, peak_gib


def _merge_once(bench: SpeedBench) -> None:
    with merged_adapter(bench.policy):
        pass


def _note_rollout(
    bench: SpeedBench, kind: str, rows: int, times: list[float], peak_gib: float, once: float = 0.0, base: float = 0.0
) -> float:
    """The median and the spread of one kind of rollout, of all its blocks, and its ratio to the base model. `once`:
    seconds that a rollout takes whatever its length."""
    factor = bench.shape["length"] // bench.shape["block"] // BLOCKS
    whole = sorted(factor * (time - once) + once for time in times)
    middle = median(whole)
    bench.note(
        "adapter",
        kind=kind,
        rows=rows,
        seconds=middle,
        fastest=whole[0],
        slowest=whole[-1],
        tokens_per_second=rows * bench.shape["length"] / middle,
        times_base=middle / (base or middle),
        peak_gib=peak_gib,
        reckoned=f"{BLOCKS} blocks timed",
    )
    return middle


def step(bench: SpeedBench) -> None:
    """Rollout of 8 x 8 and update: DACA with the dual cache against diffu-GRPO on the plain loop; DiSPO's price."""
    groups = (2, 4) if bench.toy else (8, 8)
    rows = groups[0] * groups[1]
    trainer = Trainer(bench, 16)
    plain = plain_seconds(bench, rows, 4)
    times: dict[str, float] = {}
    base, full = diffu_grpo(), daca(diffu_grpo(), strata=4)
    for name, method in (("diffu_grpo", base), ("daca", full), ("dispo", dispo(diffu_grpo()))):
        found: list[Rollouts] = []

        def roll(m: Any = method, f: list[Rollouts] = found) -> None:
            f.append(bench.roll(rows, groups[1], request=m.request, cache=Cache()))

        rolled = bench.seconds(roll)
        updated = bench.seconds(lambda m=method, f=found: trainer.train(m, f[-1]))
        times[name] = rolled + updated
        bench.note("step", method=name, rows=rows, rollout=rolled, update=updated, total=times[name])
        times[name + " update"] = updated
        if name == "dispo":
            some = bench.seconds(lambda m=method, f=found: trainer.train(m, f[-1], right_or_wrong=True))
            ratio = times["diffu_grpo"] / (rolled + some)
            bench.note("step", kind="dispo's throughput, rewards 0 or 1", update=some, ratio=ratio)
    baseline = plain + times["diffu_grpo update"]
    bench.note("step", kind="plain loop + diffu_grpo update", total=baseline, reckoned="4 steps timed")
    bench.note("step", kind="daca, dual cache, against that", speedup=baseline / times["daca"])
    bench.note("step", kind="dispo's throughput against diffu_grpo's", ratio=times["diffu_grpo"] / times["dispo"])


def agreement(bench: SpeedBench) -> None:
    """Before any step: log-probabilities of the old policy and of the reference against the policy's own."""
    rows = 4 if bench.toy else 16
    trainer = Trainer(bench, 16)
    rollouts = bench.roll(rows, rows, cache=Cache())
    (probes,) = diffu_grpo().probe(rollouts.trace, torch.Generator().manual_seed(0), 1)
    new_NL = ask(bench.policy, probes).detach()
    for name, policy in (("old", bench.policy), ("reference", trainer.reference)):
        apart_NL = (logprobs(policy, probes, trainer.micro_batch) - new_NL).abs()
        bench.note("agreement", of=name, compiled=bench.policy.compiled, largest=float(apart_NL.max()))


def memory(bench: SpeedBench) -> None:
    """The peak of LoRA training at group 8, prompt 200 and completion 256, rollout included."""
    rows = 4 if bench.toy else 8
    for name, method in (("diffu_grpo", diffu_grpo()), ("daca", daca(diffu_grpo(), strata=4))):
        trainer = Trainer(bench, 1, gradient_checkpointing=True)

        def whole_step(m: Any = method, t: Trainer = trainer) -> None:
            for _ in range(2):  # from the second on the optimiser's state is there during the rollout
                t.train(m, bench.roll(rows, rows, request=m.request, cache=Cache()))

        bench.note("memory", method=name, rows=rows, micro_batch=1, peak_gib=bench.memory(whole_step))


def methods(bench: SpeedBench) -> None:
    """One training step of every method at the same rollout: seconds, memory and passes."""
    groups = (2, 4) if bench.toy else (2, 8)
    rows = groups[0] * groups[1]
    trainer = Trainer(bench, 16)
    shelf = {name: factory() for name, factory in BASES.items()}
    shelf["agrpo"] = agrpo(draws=8) if bench.toy else agrpo(draws=24)
    base = diffu_grpo()
    shelf |= {"diffu_grpo + sml": sml(base), "diffu_grpo + dps": dps(base), "diffu_grpo + daca": daca(base)}
    shelf |= {"diffu_grpo + dispo": dispo(base)}
    for name, method in shelf.items():
        rollouts = bench.roll(rows, groups[1], request=method.request, cache=Cache())
        passed = {"forward": 0, "with gradient": 0}
        inner = bench.policy.hidden

        def counted(tokens: Tensor, *rest: Any, p: dict[str, int] = passed, inner: Any = inner) -> Tensor:
            p["with gradient" if torch.is_grad_enabled() else "forward"] += len(tokens)
            return inner(tokens, *rest)

        bench.policy.hidden = counted
        peak_gib = bench.memory(lambda m=method, r=rollouts: trainer.train(m, r))
        bench.policy.hidden = inner
        seconds = bench.seconds(lambda m=method, r=rollouts: trainer.train(m, r), warm=False)
        equivalents = (passed["forward"] + 3 * passed["with gradient"]) / rows  # a way back costs two forward
        bench.note(
            "methods",
            method=name,
            rows=rows,
            seconds=seconds,
            peak_gib=peak_gib,
            states=passed,
            forward_equivalents_a_row=equivalents,
        )


def growth(bench: SpeedBench) -> None:
    """Cost against completion length, group size and strata: dual-cache rollout and DACA update."""
    trainer = Trainer(bench, 8)
    lengths = (16, 32) if bench.toy else (128, 256, 512, 1024)
    small = 4 if bench.toy else 8
    for length in lengths:
        shape = {"length": length, "steps": length // 2, "block": bench.shape["block"]}
        one = {"length": length, "steps": length // 2}

        def roll(s: dict[str, int] = shape) -> Rollouts:
            method = daca(diffu_grpo(), strata=4)
            return bench.roll(small, small, method.request, **s, cache=Cache())

        rolled: list[Rollouts] = []
        seconds = bench.seconds(lambda r=roll, out=rolled: out.append(r()), warm=length in lengths[:2])
        updated = bench.seconds(lambda r=rolled[-1]: trainer.train(daca(diffu_grpo(), strata=4), r))
        bench.note("growth", by="length", **one, rows=small, rollout=seconds, update=updated)
    sizes = (2, 4) if bench.toy else (4, 16, 64)
    for rows in sizes:
        method = daca(diffu_grpo(), strata=4)
        rolled = []

        def roll_group(r: int = rows, m: Any = method, out: list[Rollouts] = rolled) -> None:
            out.append(bench.roll(r, r, m.request, cache=Cache()))

        seconds = bench.seconds(roll_group, warm=False)
        updated = bench.seconds(lambda r=rolled, m=method: trainer.train(m, r[0]))
        bench.note("growth", by="group", group=rows, rollout=seconds, update=updated)
    rollouts = bench.roll(small, small, daca(diffu_grpo()).request, cache=Cache())
    for strata in (1, 2, 4) if bench.toy else (1, 2, 4, 8, 16):
        method = daca(diffu_grpo(), strata=strata)
        updated = bench.seconds(lambda m=method, r=rollouts: trainer.train(m, r))
        bench.note("growth", by="strata", strata=strata, rows=small, update=updated)
