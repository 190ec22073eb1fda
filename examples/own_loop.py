"""DACA-GRPO with DiSPO in a loop of one's own: only pure parts of unmask, no trainer, no configuration.

    python examples/own_loop.py
"""

import copy

import torch

import unmask
from unmask import Part

UPDATES, PROMPTS, GROUP, LENGTH, STEPS = 20, 8, 8, 16, 8

policy = unmask.load_model("tiny")
reference = copy.deepcopy(policy).requires_grad_(False)
task = unmask.TASKS["sudoku"]()
method = unmask.dispo(unmask.daca(unmask.diffu_grpo(), strata=4), branches=2)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
rng = torch.Generator().manual_seed(0)


def rewards(rows, trace):
    texts = [policy.tokenizer.decode(ids) for ids in trace.tokens_BL[:, -LENGTH:].tolist()]
    return torch.tensor([task.reward(row, text) for row, text in zip(rows, texts, strict=True)])


for update in range(UPDATES):
    rows = [row for row in task.rows("train", PROMPTS, update) for _ in range(GROUP)]
    trace, branches = unmask.sample(
        policy,
        [policy.tokenizer.encode(task.prompt(row)) for row in rows],
        unmask.row_seeds(update, len(rows)),
        length=LENGTH,
        steps=STEPS,
        group_B=torch.arange(len(rows)) // GROUP,
        counted=method.counted,
        record=method.record,
        branch=method.branch.branch,
    )
    reward_B = rewards(rows, trace)
    (probes,) = method.probe(trace, rng, 1)
    with torch.no_grad():
        reference_NL = unmask.ask(reference, probes)
    base = Part(
        probes,
        method.advantage(reward_B, trace.group_B),
        method.credit(trace),
        method.objective,
        reference_NL=reference_NL,
        kl=method.kl,
        divergence=method.divergence,
    )
    twig_reward_B = rewards([rows[i] for i in branches.group_B.tolist()], branches)
    twigs = Part(
        unmask.one_shot(branches),
        method.branch.advantage(twig_reward_B, branches.group_B),
        unmask.uniform_credit(branches),
        method.branch.objective,
        weight=method.branch.weight,
    )
    optimizer.zero_grad()
    for part in (base, twigs):
        unmask.accumulate(policy, part, rows=256)
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    print(f"update {update:3d}  reward {reward_B.mean():.3f}  of the branches {twig_reward_B.mean():.3f}")
