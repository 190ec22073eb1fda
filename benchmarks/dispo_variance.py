"""How noisy DiSPO's gradient is, by the number of fillings and by where the state lies:

    python benchmarks/dispo_variance.py --out benchmarks/results/dispo_variance.json

Embedded model, Sudoku, one rollout of each of some training puzzles. At its state before step t, Z fillings are
drawn over and over; a draw's gradient is 1/(Z - 1) sum_z (R_z - mean R) grad log p(a_z | s), which has the same mean
for every Z. Told are, of states at which 5 to 95 % of the fillings are right: the variance of a draw over the squared
length of the mean (both summed over states); and of all states: the chance that two fillings earn different rewards.
"""

import argparse
import json
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from unmask.core.trace import state_before
from unmask.models import Model
from unmask.models.load import load_model
from unmask.rollout.decoding import Decoding
from unmask.rollout.sample import row_seeds, sample
from unmask.tasks import TASKS
from unmask.util.micro_batch import MicroBatch

SIZES = (2, 3, 4, 8)
FILLINGS = 256
"""Drawn at a state; a gradient of every filling is kept, and draws of Z are made of them."""


def fillings(policy: Model, state_L: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """One-shot fillings of a state, (F, L), and the gradient of each one's log-probability, (F, P)."""
    masked_L = state_L == policy.mask_id
    at_Q = masked_L.nonzero().squeeze(1)
    logits_QV = policy(state_L[None], torch.ones_like(state_L, dtype=torch.bool)[None], at_Q)
    law_QV = logits_QV.double().log_softmax(-1)
    drawn_FQ = torch.multinomial(law_QV.detach().exp(), FILLINGS, replacement=True, generator=rng).T
    filled_FL = state_L.repeat(FILLINGS, 1)
    filled_FL[:, at_Q] = drawn_FQ
    weights = [weight for weight in policy.parameters() if weight.requires_grad]
    distinct_UQ, which_F = drawn_FQ.unique(dim=0, return_inverse=True)
    rows = []
    for choice_Q in distinct_UQ:
        found = torch.autograd.grad(law_QV[torch.arange(len(at_Q)), choice_Q].sum(), weights, retain_graph=True)
        rows.append(torch.cat([each.flatten() for each in found]))
    return filled_FL, torch.stack(rows)[which_F]


def moments(gradient_FP: Tensor, reward_F: Tensor, size: int) -> tuple[float, float]:
    """Of draws of `size` fillings: the variance, and the squared length of the true mean, without bias."""
    draws = len(reward_F) // size
    reward_DZ = reward_F[: draws * size].view(draws, size)
    advantage_DZ = (reward_DZ - reward_DZ.mean(1, keepdim=True)) * size / (size - 1)
    estimate_DP = (advantage_DZ[..., None] * gradient_FP[: draws * size].view(draws, size, -1)).mean(1)
    mean_P = estimate_DP.mean(0)
    variance = float(((estimate_DP - mean_P) ** 2).sum() / (draws - 1))
    return variance, float((mean_P**2).sum()) - variance / draws


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--puzzles", type=int, default=24)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    policy, task, rng = load_model("tiny"), TASKS["sudoku"](), torch.Generator().manual_seed(0)
    rows = task.rows("train", given.puzzles, 0)
    prompts = [task.prompt_ids(policy.tokenizer, row) for row in rows]
    decoding = Decoding(task.length, task.length // 2, task.length)
    trace = sample(policy, prompts, row_seeds(0, len(rows)), decoding, micro_batch=MicroBatch(512)).trace
    results: dict[str, dict[str, object]] = {}
    for step in range(trace.steps):
        told, apart = {size: list[tuple[float, float]]() for size in SIZES}, []
        for number, row in enumerate(rows):
            filled_FL, gradient_FP = fillings(policy, state_before(trace, step)[number], rng)
            texts = [policy.tokenizer.decode(ids) for ids in filled_FL[:, -task.length :].tolist()]
            reward_F = torch.tensor([task.reward(row, text) for text in texts], dtype=torch.float64)
            share = float(reward_F.mean())
            apart.append(2 * share * (1 - share))
            if 0.05 < share < 0.95:
                for size in SIZES:
                    told[size].append(moments(gradient_FP, reward_F, size))
        pooled = {size: [sum(each) for each in zip(*found, strict=True)] for size, found in told.items() if found}
        ratios = {size: variance / length for size, (variance, length) in pooled.items()}
        results[str(step)] = {"states": len(told[2]), "apart": mean(apart), "relative_variance": ratios}
        print(step, results[str(step)], flush=True)
        given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
