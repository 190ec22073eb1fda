"""DACA-GRPO with DiSPO in your own loop: only the parts of unmask, no trainer, no configuration.

python examples/own_loop.py
"""

import copy

import torch

import unmask

UPDATES, PROMPTS, GROUP, LENGTH, STEPS = 20, 8, 8, 16, 8

policy = unmask.load_model("tiny")
reference = copy.deepcopy(policy).requires_grad_(False)
task = unmask.TASKS["sudoku"]()
method = unmask.dispo(unmask.daca(unmask.diffu_grpo(), strata=4), branches=2)
decoding, scorer = unmask.Decoding(LENGTH, STEPS), unmask.Scorer(policy, reference)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
rng = torch.Generator().manual_seed(0)


def rewards(rows, trace):
    texts = [policy.tokenizer.decode(ids) for ids in trace.tokens_BL[:, -LENGTH:].tolist()]
    return torch.tensor([task.reward(row, text) for row, text in zip(rows, texts, strict=True)])


for update in range(UPDATES):
    rows = [row for row in task.rows("train", PROMPTS, update) for _ in range(GROUP)]
    rollouts = unmask.sample(
        policy,
        [policy.tokenizer.encode(task.prompt(row)) for row in rows],
        unmask.row_seeds(update, len(rows)),
        decoding,
        group_B=torch.arange(len(rows)) // GROUP,
        request=method.request,
    )
    # The rewards are yours: of every completion, and of the fillings that DiSPO compares at a visited state.
    reward_B = rewards(rows, rollouts.trace)
    branch_reward_B = rewards([rows[i] for i in rollouts.branches.group_B.tolist()], rollouts.branches)
    # Advantage, credit (DPS), and where to ask (SML), with the old and the reference policy's log-probabilities.
    batch = unmask.ScoredRollouts(rollouts, reward_B, branch_reward_B)
    for terms in unmask.loss_terms(method, batch, scorer, rng):
        optimizer.zero_grad()
        for term in terms:
            unmask.accumulate(policy, term, micro_batch=256)  # adds to .grad, at most 256 states in memory
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    print(f"update {update:3d}  reward {reward_B.mean():.3f}  of the branches {branch_reward_B.mean():.3f}")
