"""How good was each trace? Pure functions (reward_B, group_B) -> advantage_B."""

from collections.abc import Callable

import torch
from torch import Tensor

Advantage = Callable[[Tensor, Tensor], Tensor]

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""


def group_sum(value_B: Tensor, group_B: Tensor) -> Tensor:
    """The sum of a trace's group, at every trace."""
    _, index_B = group_B.unique(return_inverse=True)
    total = torch.zeros(int(index_B.max()) + 1, dtype=value_B.dtype, device=value_B.device)
    return total.index_add(0, index_B, value_B)[index_B]


def group_size(group_B: Tensor) -> Tensor:
    """The size of a trace's group, at every trace, in double."""
    return group_sum(torch.ones_like(group_B, dtype=torch.float64), group_B)


def group_max(value_B: Tensor, group_B: Tensor) -> Tensor:
    """The largest value of a trace's group, at every trace."""
    _, index_B = group_B.unique(return_inverse=True)
    return torch.zeros_like(value_B).scatter_reduce(0, index_B, value_B, "amax", include_self=False)[index_B]


def _checked(reward_B: Tensor, group_B: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards in double and the size of each trace's group; ValueError if they cannot be compared."""
    if reward_B.shape != group_B.shape:
        rewards = "x".join(map(str, reward_B.shape)) or "one number"
        raise ValueError(f"{len(group_B)} traces need {len(group_B)} rewards, got {rewards}")
    reward_B = reward_B.double()
    if not reward_B.isfinite().all():
        raise ValueError("a reward is not a finite number, so no advantage can be computed")
    size_B = group_size(group_B)
    if (size_B < 2).any():
        raise ValueError("a group has one trace and nothing to compare it with: sample at least 2 per prompt (group_B)")
    return reward_B, size_B


def _centred(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """r - mean of the group, in double; exactly zero if all rewards of the group are equal."""
    reward_B, size_B = _checked(reward_B, group_B)
    return (reward_B - group_sum(reward_B, group_B) / size_B).masked_fill(~rewards_differ(reward_B, group_B), 0.0)


def _cast(advantage_B: Tensor, reward_B: Tensor) -> Tensor:
    """In the type of the rewards; in double if that type is not a float (booleans, integers)."""
    return advantage_B.to(reward_B.dtype) if reward_B.is_floating_point() else advantage_B


def group_mean(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """A = r - mean of the group (d1, SPG, AGRPO, DiSPO). It is (G - 1) / G times leave_one_out."""
    return _cast(_centred(reward_B, group_B), reward_B)


def leave_one_out(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """A = r - mean of the others in the group: an unbiased baseline (coupled-GRPO, ESPO)."""
    exact_B, size_B = _checked(reward_B, group_B)
    others_B = (group_sum(exact_B, group_B) - exact_B) / (size_B - 1)
    return _cast((exact_B - others_B).masked_fill(~rewards_differ(exact_B, group_B), 0.0), reward_B)


def z_score(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """A = (r - mean) / std of the group, population std (GRPO, GSPO)."""
    centred_B = _centred(reward_B, group_B)
    variance_B = group_sum(centred_B**2, group_B) / group_size(group_B)
    return _cast(centred_B / (variance_B.sqrt() + EPSILON), reward_B)


def batch_z_score(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """A = (r - mean) / std over the whole batch, groups ignored (REINFORCE++, 2501.03262)."""
    return z_score(reward_B, torch.zeros_like(group_B))


def group_mean_batch_std(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """A = (r - mean of the group) / std of these differences over the whole batch (REINFORCE++-baseline)."""
    return _cast(batch_z_score(_centred(reward_B, group_B), group_B), reward_B)


def rewards_differ(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Traces whose group has more than one reward: the others carry no signal under a group baseline."""
    reward_B = reward_B.double()
    return group_max(reward_B, group_B) > -group_max(-reward_B, group_B)


def correct_only(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """A = G / (rewards of at least 1 in the group) for these, 0 for the others: rejection-sampling fine-tuning."""
    exact_B, size_B = _checked(reward_B, group_B)
    right_B = (exact_B >= 1).double()
    return _cast(right_B * size_B / group_sum(right_B, group_B).clamp(min=1), reward_B)


def best_of_group(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """A = G for the first rollout with the highest reward of its group, 0 for the others: best-of-n. A group whose
    rewards are equal and below 1 has no best rollout.

    The rollouts of a group are exchangeable, so the first of the best is a random one of them.
    """
    exact_B, size_B = _checked(reward_B, group_B)
    best_B = (exact_B == group_max(exact_B, group_B)) & (rewards_differ(exact_B, group_B) | (exact_B >= 1))
    place_B = torch.arange(len(group_B), 0, -1, dtype=torch.float64, device=group_B.device) * best_B
    return _cast(size_B * (best_B & (place_B == group_max(place_B, group_B))), reward_B)


def every_sample(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """A = 1: fine-tuning on the policy's own samples without selection, a control."""
    return _cast(torch.ones_like(_checked(reward_B, group_B)[0]), reward_B)


ADVANTAGES: dict[str, Advantage] = {
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "z_score": z_score,
    "batch_z_score": batch_z_score,
    "group_mean_batch_std": group_mean_batch_std,
    "correct_only": correct_only,
    "best_of_group": best_of_group,
    "every_sample": every_sample,
}
