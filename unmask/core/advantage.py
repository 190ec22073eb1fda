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


def group_size(group_B: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """The size of a trace's group, at every trace."""
    return group_sum(torch.ones_like(group_B, dtype=dtype), group_B)


def group_max(value_B: Tensor, group_B: Tensor) -> Tensor:
    """The largest value of a trace's group, at every trace."""
    _, index_B = group_B.unique(return_inverse=True)
    return torch.zeros_like(value_B).scatter_reduce(0, index_B, value_B, "amax", include_self=False)[index_B]


def _compared(reward_B: Tensor, group_B: Tensor) -> Tensor:
    if not reward_B.isfinite().all():
        raise ValueError("a reward is not a finite number: nothing can be compared with it")
    size_B = group_size(group_B, reward_B.dtype)
    if (size_B < 2).any():
        raise ValueError(
            "a group of one trace has nothing to be compared with: use at least 2 per prompt (group_B of sample)"
        )
    return size_B


def group_mean(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """A = r - mean of the group (d1, SPG, AGRPO, DiSPO). It is (G - 1) / G times leave_one_out."""
    return reward_B - group_sum(reward_B, group_B) / _compared(reward_B, group_B)


def leave_one_out(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """A = r - mean of the others in the group: an unbiased baseline (coupled-GRPO, ESPO)."""
    size_B = _compared(reward_B, group_B)
    return reward_B - (group_sum(reward_B, group_B) - reward_B) / (size_B - 1)


def z_score(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """A = (r - mean) / std of the group, population std (GRPO, GSPO)."""
    centred_B = group_mean(reward_B, group_B)
    variance_B = group_sum(centred_B**2, group_B) / group_size(group_B, reward_B.dtype)
    return centred_B / (variance_B.sqrt() + EPSILON)


def batch_z_score(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """A = (r - mean) / std over the whole batch, groups ignored (REINFORCE++, 2501.03262)."""
    return z_score(reward_B, torch.zeros_like(group_B))


def group_mean_batch_std(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """A = (r - mean of the group) / std over the whole batch of that (REINFORCE++-baseline)."""
    return batch_z_score(group_mean(reward_B, group_B), group_B)


def varied(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Traces whose group has more than one reward: the others carry no signal under a group baseline."""
    return group_max(reward_B, group_B) > -group_max(-reward_B, group_B)


ADVANTAGES: dict[str, Advantage] = {
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "z_score": z_score,
    "batch_z_score": batch_z_score,
    "group_mean_batch_std": group_mean_batch_std,
}
