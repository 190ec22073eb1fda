"""DPS with sampled steps (AGRPO), or with SML, in a loop of verl's shape: rollouts, rewards, log-probabilities, actor.

    python examples/dps_in_verl.py

verl's trainer sends a DataProto from worker to worker: tensors with one row for each response, which it cuts and joins.
This file has the same stages without verl, which is not needed. docs/verl.md says where each part goes in verl.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import unmask

UPDATES, PROMPTS, GROUP, MINIBATCH, LENGTH, STEPS = 20, 8, 8, 32, 16, 8

methods = {
    "agrpo+dps": unmask.dps(unmask.agrpo(draws=4), strength=0.3),
    "diffu_grpo+sml+dps": unmask.dps(unmask.sml(unmask.diffu_grpo(), strata=4, anchor=0.0), strength=0.3),
}


@dataclass
class DataProto:
    batch: dict[str, Tensor]
    meta_info: dict[str, int]

    def split(self, size: int) -> "Iterator[DataProto]":
        for start in range(0, len(self.batch["input_ids"]), size):
            yield DataProto({name: rows[start : start + size] for name, rows in self.batch.items()}, self.meta_info)


def columns(trace: unmask.Trace) -> dict[str, Tensor]:
    """A trace as columns of a DataProto. verl has all but `step` and `block`, which say what was written when."""
    columns = {"input_ids": trace.tokens_BL, "attention_mask": trace.attended_BL, "response_mask": trace.counted_BL}
    columns |= {"rollout_log_probs": trace.logp_BL, "uid": trace.group_B}
    return columns | {"step": trace.step_BL, "block": trace.block_BL}


def trace_of(data: DataProto, policy: unmask.Policy) -> unmask.Trace:
    """The inverse of `columns`."""
    names = {"tokens_BL": "input_ids", "attended_BL": "attention_mask", "counted_BL": "response_mask"}
    names |= {"logp_BL": "rollout_log_probs", "group_B": "uid", "step_BL": "step", "block_BL": "block"}
    rows = {field: data.batch[name] for field, name in names.items()}
    return unmask.Trace(**rows, mask_id=policy.mask_id, eos_id=policy.eos_id, steps=data.meta_info["steps"])


class RolloutWorker:
    def __init__(self, policy: unmask.Policy, method: unmask.Method) -> None:
        self.policy, self.method = policy, method

    def generate_sequences(self, prompts: list[list[int]], uid: Tensor, seed: int) -> DataProto:
        seeds, decoding = unmask.row_seeds(seed, len(prompts)), unmask.Decoding(LENGTH, STEPS)
        request = self.method.request  # what DPS records of every step
        trace = unmask.sample(self.policy, prompts, seeds, decoding, group_B=uid, request=request).trace
        # DPS reads what was recorded, which is large: its weights are one number a token and go into the batch.
        credit_BL = self.method.credit(trace)
        return DataProto({**columns(trace), "credit": credit_BL}, {"steps": STEPS, "seed": seed})


class ActorWorker:
    def __init__(self, policy: unmask.Policy, method: unmask.Method) -> None:
        self.policy, self.method = policy, method
        self.optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-4)

    def probes(self, data: DataProto, number: int) -> unmask.Probes:
        """Where the policy is asked (SML, sampled steps): the same for the old, the reference and the new policy."""
        rng = torch.Generator().manual_seed(1000 * data.meta_info["seed"] + number)
        (probes,) = self.method.probe(trace_of(data, self.policy), rng, 1)
        return probes

    @torch.no_grad()
    def compute_log_prob(self, data: DataProto, policy: unmask.Policy) -> Tensor:
        """(B, L), as verl has it: each token is asked once, so one column holds its log-probability."""
        parts = []
        for number, rows in enumerate(data.split(MINIBATCH)):
            probes, logp_BL = self.probes(rows, number), torch.zeros_like(rows.batch["credit"])
            question, position = probes.asked_NL.nonzero(as_tuple=True)
            answers = unmask.ask(policy, probes, micro_batch=256)[question, position]
            logp_BL[probes.trace_N[question], position] = answers.to(logp_BL.dtype)
            parts.append(logp_BL)
        return torch.cat(parts)

    def update_actor(self, data: DataProto) -> list[dict[str, Tensor]]:
        """One optimiser step for each mini-batch; verl computes its loss from left to right, so ours replaces it."""
        metrics = []
        for number, rows in enumerate(data.split(MINIBATCH)):
            probes = self.probes(rows, number)
            old_NL, reference_NL = (
                rows.batch[name][probes.trace_N].masked_fill(~probes.asked_NL, 0.0)
                for name in ("old_log_probs", "ref_log_prob")
            )
            term = unmask.LossTerm(
                probes,
                rows.batch["advantages"],
                rows.batch["credit"],
                self.method.objective,
                old_NL=old_NL,
                reference_NL=reference_NL,
                kl=self.method.kl,
                divergence=self.method.divergence,
            )
            self.optimizer.zero_grad()
            metrics.append(unmask.accumulate(self.policy, term, micro_batch=256))
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
            self.optimizer.step()
        return metrics


def fit(name: str) -> None:
    """The loop of verl's trainer."""
    policy, method, task = unmask.load_model("tiny"), methods[name], unmask.TASKS["sudoku"]()
    reference = copy.deepcopy(policy).requires_grad_(False)
    rollout, actor = RolloutWorker(policy, method), ActorWorker(policy, method)
    for update in range(UPDATES):
        rows = [row for row in task.rows("train", PROMPTS, update) for _ in range(GROUP)]
        prompts = [policy.tokenizer.encode(task.prompt(row)) for row in rows]
        data = rollout.generate_sequences(prompts, torch.arange(len(rows)) // GROUP, seed=update)
        texts = [policy.tokenizer.decode(ids) for ids in data.batch["input_ids"][:, -LENGTH:].tolist()]
        reward_B = torch.tensor([task.reward(row, text) for row, text in zip(rows, texts, strict=True)])
        data.batch["old_log_probs"] = actor.compute_log_prob(data, policy)
        data.batch["ref_log_prob"] = actor.compute_log_prob(data, reference)
        data.batch["advantages"] = method.advantage(reward_B, data.batch["uid"])
        metrics = actor.update_actor(data)
        ratios = " ".join(f"{float(each['ratio']):.3f}" for each in metrics)
        print(f"{name}  update {update:3d}  reward {float(reward_B.mean()):.3f}  ratios {ratios}")


if __name__ == "__main__":
    for name in methods:
        fit(name)
