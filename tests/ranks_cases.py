"""What the processes of ranks_worker.py train: a toy task, a toy model, and the cases."""

from pathlib import Path
from typing import Any

import torch
from task_variants import task_of

from unmask.config import Config, parse_config
from unmask.models import Tiny, tiny_policy
from unmask.models.tiny import EOS, TinyShape
from unmask.tasks import Task


def toy_task(dull: int = 0, quiet: int = -1, raises: int = -1) -> Task:
    """Six characters after prompts of different lengths; the reward is a hash of what they say.

    Prompts below `dull`, and all of update `quiet`, earn 0.5 whatever they say; the reward of prompt `raises` raises.
    """

    def reward(row: dict[str, Any], text: str) -> float:
        if row["i"] == raises:
            raise RuntimeError("the grader is ill")
        idle = row["i"] < dull or (row["number"] // 5) % 2**24 == quiet
        return 0.5 if idle else (sum(map(ord, text)) % 7) / 6

    return task_of(
        name="toy",
        summary="a hash",
        length=6,
        rows=lambda split, n, seed: [{"i": i, "number": seed} for i in range(n)],
        prompt=lambda row: "abcd"[: 1 + row["i"] % 4] + str(row["number"] % 10),
        solution=lambda row: "aaaaaa",
        reward=reward,
        solved=lambda row, text: reward(row, text) == 1,
    )


def toy_model() -> Tiny:
    """Small, untrained, and fond of end tokens: every state has a constant component that their logit reads."""
    policy = tiny_policy(TinyShape(width=16, layers=2, heads=2, hidden=20, max_length=32), seed=1)
    with torch.no_grad():
        policy.lm.model.embed_tokens.weight[:, 0] = 1.0
        policy.lm.lm_head.weight[EOS, 0] = 0.8
    return policy


# Nine rollouts and at most four states a pass: processes differ in how many passes their share takes.
LORA = {"rank": 3, "alpha": 6, "targets": ["q_proj", "down_proj"]}
COMMON: dict[str, Any] = {
    "task": "toy",
    "method": "diffu_grpo",
    "updates": 2,  # the second has a reference, and with inner 2 an old policy, that is not the policy itself
    "prompts": 3,
    "group": 3,
    "inner_steps": 2,
    "micro_batch_size": 4,
    "optimizer": {"lr": 0.01},
    "eval": {"prompts": 2, "samples": 1},
}
DUAL = {"block": 3, "steps": 4, "cache": "dual", "correction": 1.5}
TOP = {"top_p": 0.7}
DACA = {"with": ["daca", "dispo"], "daca": {"strata": 3}, "dispo": {"kl": 0.1}}
SPG = {"method": "spg", "spg": {"kl": 0.1}, "inner_steps": 1}
# Two draws: with these no gradient is so near to Adam's epsilon that rounding, in sharded sums, would be made large.
EXACT = {"choice": True, "draws": 2}
QUIET = {"method": "agrpo", "agrpo": EXACT, "updates": 3, "inner_steps": 1, "micro_batch_size": 9, "toy": {"quiet": 2}}
FEW = {"prompts": 2, "group": 2, "inner_steps": 1, "toy": {"dull": 1}, "idle_groups": "skip", "optimizer": {"lr": 1e-5}}
TEACHER = {"updates": 3, "inner_steps": 1, "dtm": {"h": 1.0, "teacher_every": 2}, "micro_batch_size": 3}
SKIP, RESAMPLE = ({"toy": {"dull": 1}, "idle_groups": kind} for kind in ("skip", "resample"))

CASES: dict[str, dict[str, Any]] = {
    "lora-daca": {**DACA, "rollout": {"top_k": 5, "block": 3, "steps": 4}},
    "full-daca": {**DACA, "micro_batch_size": 5, "rollout": {**TOP, "steps": 3}},
    "lora-agrpo": {"method": "agrpo", "agrpo": {"kl": 0.1, "steps": "entropy"}, "rollout": DUAL, "with": ["dispo"]},
    "full-agrpo": {
        "method": "agrpo",
        "agrpo": {"kl": 0.1, "draws": 3},
        "inner_steps": 1,
        "micro_batch_size": 2,
        "rollout": DUAL | TOP,
        **SKIP,
    },
    "lora-espo": {
        "method": "espo",
        "inner_steps": 1,
        "micro_batch_size": 5,
        "rollout": {"micro_batch_size": 2},
        **RESAMPLE,
    },
    "full-espo": {"method": "espo", "micro_batch_size": 5, **RESAMPLE},
    "lora-spg": {**SPG, "rollout": {"cache": "prefix", "block": 2, "mismatch": 0.5}},
    "full-spg": {**SPG, "gradient_checkpointing": True, "rollout": {**TOP, "block": 2}},
    "lora-quiet": {**QUIET, "idle_groups": "skip"},  # then nothing may move, also not by momentum
    "full-quiet": QUIET,
    "full-experts": {"inner_steps": 1, "rollout": {"cache": "prefix"}},  # LLaDA2: experts and block-causal attention
    "full-vine": {"method": "vine", "inner_steps": 1, "vine": {"completions": 2}, "with": ["keep_correct", "dispo"]},
    "lora-dtm": {"method": "dtm", **TEACHER, "rollout": {"block": 3, "steps": 4}},
    "full-dtm": {"method": "dtm", **TEACHER, "rollout": {**TOP, "block": 2}},
    # The last process cannot hold more than one state at a time. (In full-agrpo, not more than one rollout.)
    "lora-oom": {"inner_steps": 1},
    # Two states, so that among three processes one has none; in fp32, the type of a real run.
    "lora-few": FEW,
    "full-few": FEW,
}
SIZES = {1: list(CASES), 2: list(CASES)[:-2], 3: ["lora-daca", "lora-few", "full-few"]}
"""What so many processes are asked to do."""


def case_config(name: str, model: str) -> Config:
    """fp64 where nothing is said against it: then other orders of summation do not hide a mistake, or look like one."""
    kind = {"full": True} if name.startswith("full") else {"full": False, "lora": LORA}
    model = str(Path(model).with_name("experts")) if name == "full-experts" else model
    config = parse_config({**COMMON, "model": model, **kind, **CASES[name]})
    return config if name.endswith("few") else config.model_copy(update={"dtype": "float64"})
