"""Does it matter that routing differs between the old policy's pass and an update's?

A small mixture of experts, trained from scratch on Sudoku, then by reinforcement learning with several inner steps,
with and without replay.

    python benchmarks/routing_replay.py --out routing_replay.json          (one core, some hours)
    python benchmarks/routing_replay.py --out low_rate.json --method diffu_grpo --rate 1e-4 --seeds 4
    python benchmarks/routing_replay.py --rollouts --out rollouts.json     (one core, ten minutes)
    python benchmarks/routing_replay.py --toy --out toy.json               (seconds, to try the script)

Replay: every pass of an inner step uses the experts that the old policy's pass over the same state chose, with the
weights that the router gives them now. Measured at the last inner step of every update, before it steps: the share of
tokens whose experts have changed, and the log-ratios with the experts of now and with those of the old pass.

--rollouts: how the experts of a rollout's own passes differ from those of a later pass over the same states with the
same weights, and what replaying them would change in the log-probabilities.
"""

import argparse
import copy
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import unmask.training.loop
import unmask.training.loss_terms
import unmask.training.setup
import unmask.training.update
from unmask.config import parse_config
from unmask.core.probes import ask, every_step
from unmask.models.experts import Mixture, SoftmaxRouter
from unmask.models.tiny import Tiny, tiny_policy
from unmask.rollout.decoding import Decoding
from unmask.rollout.sample import row_seeds, sample
from unmask.sft.pretrain import PretrainTask, cosine, diffusion_loss, masked_positions, mixture_tokens
from unmask.tasks import TASKS
from unmask.training.run.folder import RunFolder
from unmask.training.update import logprobs

EXPERTS, CHOSEN, HIDDEN, BALANCE = 16, 2, 64, 0.01
RATE, SEEDS = 4e-4, 3
METHODS: dict[str, dict[str, Any]] = {"diffu_grpo": {"diffu_grpo": {"kl": 0.0}}, "agrpo": {}}


class Tape:
    """The experts of every layer for every canvas of an update."""

    def __init__(self) -> None:
        self.mode, self.keys, self.width = "free", list[bytes](), 0
        self.store: dict[bytes, dict[int, Tensor]] = {}
        self.now: dict[int, Tensor] = {}
        self.scores: dict[int, Tensor] = {}
        self.changed = list[Tensor]()

    @contextmanager
    def use(self, mode: str) -> Iterator[None]:
        before, self.mode = self.mode, mode
        try:
            yield
        finally:
            self.mode = before

    def forced(self, layer: int) -> Tensor | None:
        if self.mode != "replay" or not all(key in self.store for key in self.keys):
            return None
        return torch.cat([self.store[key][layer] for key in self.keys])

    def note(self, layer: int, expert_TK: Tensor) -> None:
        self.now[layer] = expert_TK
        if self.mode == "record":
            for key, rows in zip(self.keys, expert_TK.split(self.width), strict=True):
                self.store.setdefault(key, {})[layer] = rows
        if self.mode == "compare":
            old_TK = torch.cat([self.store[key][layer] for key in self.keys])
            self.changed.append(~(expert_TK[..., None] == old_TK[:, None, :]).any(-1))


class ReplayRouter(SoftmaxRouter):
    def __init__(self, tape: Tape, layer: int, width: int) -> None:
        super().__init__(width, EXPERTS, CHOSEN, bias=False, normalised=True)
        self.tape, self.layer = tape, layer

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        score_TE = F.linear(x_TD, self.weight).softmax(-1, dtype=torch.float32)
        expert_TK = self.tape.forced(self.layer)
        expert_TK = score_TE.topk(CHOSEN).indices if expert_TK is None else expert_TK
        self.tape.note(self.layer, expert_TK)
        self.tape.scores[self.layer] = score_TE
        weight_TK = score_TE.gather(-1, expert_TK)
        return (weight_TK / weight_TK.sum(-1, keepdim=True)).to(x_TD.dtype), expert_TK


class TinyMixture(Tiny):
    """The embedded model with experts in every layer."""

    tape: Tape

    def rollout(self, even: bool = False) -> AbstractContextManager[None]:
        return super().rollout()  # the last layer computes all positions, so that their experts are known

    def _trunk(self, tokens_SL: Tensor, attended_SL: Tensor | None, *rest: Any) -> Tensor:
        seen = torch.ones_like(tokens_SL) if attended_SL is None else attended_SL.long()
        self.tape.keys = [row.numpy().tobytes() for row in torch.cat([tokens_SL, seen], 1)]
        self.tape.width = tokens_SL.shape[1]
        return super()._trunk(tokens_SL, attended_SL, *rest)


def new_mixture(seed: int) -> TinyMixture:
    lm, tape, rng = tiny_policy(seed=seed).lm, Tape(), torch.Generator().manual_seed(seed)
    for number, layer in enumerate(lm.model.layers):
        layer.mlp = Mixture(ReplayRouter(tape, number, lm.config.hidden_size), HIDDEN, 0)
        for weight in layer.mlp.parameters():
            weight.data.normal_(0.0, 0.1, generator=rng)
    policy = TinyMixture(lm)
    policy.tape = tape
    return policy.eval()


def pretrained(steps: int, seed: int) -> TinyMixture:
    """Masked diffusion on Sudokus of which most are wrong, as for the embedded model, with a loss for even loads."""
    part = PretrainTask(task="sudoku", options={"holes": [9, 12]}, batch=64, wrong=0.95, noise=0.325)
    task, policy = TASKS["sudoku"](**part.options), new_mixture(seed)
    rows = task.rows("train", steps * part.batch, seed)
    prompt_NP, completion_NC = mixture_tokens(part, task, rows, random.Random(seed))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(step, steps, 50))
    masking = torch.Generator().manual_seed(seed)
    for prompt_BP, completion_BC in zip(prompt_NP.split(part.batch), completion_NC.split(part.batch), strict=True):
        masked_BC = masked_positions(len(prompt_BP), completion_BC.shape[1], masking)
        loss = diffusion_loss(policy, prompt_BP, completion_BC, masked_BC)
        for layer, score_TE in policy.tape.scores.items():
            load_E = F.one_hot(policy.tape.now[layer], EXPERTS).float().mean((0, 1))
            loss = loss + BALANCE * EXPERTS * (load_E * score_TE.mean(0)).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    policy.tape.scores.clear()
    return policy


# --- one run --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def measured(policy: TinyMixture, term: Any) -> dict[str, float]:
    """At an inner step that is not the first: changed experts, and log-ratios with and without replay."""
    tape, changed, tokens = policy.tape, [], []
    ratios = {}
    for mode in ("free", "replay"):
        with tape.use(mode):
            ratios[mode] = (ask(policy, term.probes) - term.old_NL)[term.probes.asked_NL]
        if mode == "free":
            for layer, expert_TK in tape.now.items():
                old_TK = torch.cat([tape.store[key][layer] for key in tape.keys])
                kept_TK = (expert_TK[..., None] == old_TK[:, None, :]).any(-1)
                changed.append(~kept_TK)
            tokens = torch.stack([each.any(-1) for each in changed])
    free, replay = ratios["free"], ratios["replay"]
    far = {mode: float(((ratio.exp() - 1).abs() > 0.2).float().mean()) for mode, ratio in ratios.items()}
    return {
        "experts_changed": float(torch.stack(changed).float().mean()),
        "tokens_changed_in_a_layer": float(tokens.float().mean()),
        "tokens_changed": float(tokens.any(0).float().mean()),
        "log_ratio": float(free.abs().mean()),
        "log_ratio_replay": float(replay.abs().mean()),
        "difference": float((free - replay).abs().mean()),
        "difference_max": float((free - replay).abs().max()),
        "beyond_clip": far["free"],
        "beyond_clip_replay": far["replay"],
    }


def run(start: TinyMixture, config: dict[str, Any], replay: bool) -> dict[str, Any]:
    """A training run from a copy of the start."""
    policy, found, inner_step = copy.deepcopy(start), list[dict[str, float]](), 0
    tape = policy.tape
    settings = parse_config(config)
    plain_logprobs, plain_update, plain_load = logprobs, unmask.training.update.update, unmask.training.setup.load_model

    def recorded(*given: Any) -> Tensor:
        with tape.use("record"):
            return plain_logprobs(*given)

    def update(*given: Any, **named: Any) -> Any:
        nonlocal inner_step
        terms = next(each for each in given if isinstance(each, list))
        first = terms[0].old_NL is None
        inner_step = 0 if first else inner_step + 1
        if inner_step == settings.inner_steps - 1:
            found.append(measured(policy, terms[0]))
        with tape.use("replay" if replay else "free"):
            result = plain_update(*given, **named)
        if inner_step == settings.inner_steps - 1:
            tape.store.clear()
        return result

    unmask.training.loss_terms.logprobs = recorded
    unmask.training.update.update = update
    unmask.training.setup.load_model = lambda *_, **__: policy
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = unmask.training.loop.train(settings, lambda: RunFolder(Path(folder) / "run", settings.dump()))
    finally:
        unmask.training.loss_terms.logprobs = plain_logprobs
        unmask.training.update.update = plain_update
        unmask.training.setup.load_model = plain_load
    means = {key: statistics.fmean(each[key] for each in found) for key in found[0]}
    scores = {name: {"sampled": e.sampled.value, "greedy": e.greedy.value} for name, e in
              (("before", result.before), ("after", result.after))}  # fmt: skip
    return {"replay": replay, **scores, **means}


@torch.no_grad()
def rollout_gap(start: TinyMixture, dtype: torch.dtype, problems: int) -> dict[str, Any]:
    """Rollouts of some problems, eight of each, and one pass over every state that they visited."""
    policy, task = copy.deepcopy(start).to(dtype), TASKS["sudoku"]()
    tape, rows = policy.tape, [row for row in task.rows("train", problems, 0) for _ in range(8)]
    prompts = [task.prompt_ids(policy.tokenizer, row) for row in rows]
    with tape.use("record"):
        trace = sample(policy, prompts, row_seeds(0, len(rows)), Decoding(task.length, task.length // 2)).trace
    probes = every_step(trace, torch.Generator().manual_seed(0))
    sampled_N = trace.logp_BL.float()[probes.trace_N[:, None], torch.arange(trace.tokens_BL.shape[1])][probes.asked_NL]
    gaps = {}
    for mode in ("compare", "replay"):
        with tape.use(mode):
            gaps[mode] = (ask(policy, probes, 64).float()[probes.asked_NL] - sampled_N).abs()
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "states": len(probes.states_SL),
        "experts_changed": float(torch.cat([each.flatten() for each in tape.changed]).float().mean()),
        "gap": float(gaps["compare"].mean()),
        "gap_max": float(gaps["compare"].max()),
        "gap_replay": float(gaps["replay"].mean()),
        "gap_replay_max": float(gaps["replay"].max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rollouts", action="store_true", help="compare rollouts with passes over their states")
    parser.add_argument("--method", choices=METHODS, help="default: both")
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    arguments = parser.parse_args()
    steps, updates, seeds, problems = (20, 2, 1, 8) if arguments.toy else (2000, 40, arguments.seeds, 256)
    torch.set_num_threads(1)
    before = time.perf_counter()
    kept = arguments.out.with_suffix(".start.pt")
    if kept.is_file():
        start = new_mixture(seed=0)
        start.load_state_dict(torch.load(kept))
    else:
        start = pretrained(steps, seed=0)
        torch.save(start.state_dict(), kept)
    results: dict[str, Any] = {"pretraining_s": time.perf_counter() - before, "runs": []}
    if arguments.rollouts:
        kinds = (torch.float32, torch.bfloat16)
        results["rollouts"] = [rollout_gap(start, dtype, 2 if arguments.toy else 32) for dtype in kinds]
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
        print(json.dumps(results["rollouts"]))
        return
    shared = {"task": "sudoku", "updates": updates, "prompts": 8, "group": 8, "inner_steps": 4, "full": True}
    shared |= {"eval": {"prompts": problems, "samples": 2}, "model": "tiny", "device": "cpu"}
    methods = METHODS if arguments.method is None else [arguments.method]
    for seed, method in product(range(seeds), methods):
        for replay in (False, True):
            config = {**shared, "method": method, **METHODS[method], "optimizer": {"lr": arguments.rate}, "seed": seed}
            found = run(start, config, replay)
            row = {"method": method, "lr": arguments.rate, "seed": seed, **found}
            row["elapsed"] = time.perf_counter() - before
            results["runs"].append(row)
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")
            shown = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
            print(json.dumps(shown), flush=True)


if __name__ == "__main__":
    main()
