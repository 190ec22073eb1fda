"""The teacher: an earlier policy, a copy of the trainable weights that is refreshed after some updates."""

import torch
from torch import Tensor

from unmask.models import Model
from unmask.models.earlier import EarlierPolicy
from unmask.models.lora import trainable_parameters


class Teacher:
    """`model` is the policy with an adapter as it was, or a copy of a policy whose weights are all trained."""

    def __init__(self, policy: Model, model: EarlierPolicy | Model) -> None:
        self.model, self.weights = model, trainable_parameters(policy)

    @property
    def copies(self) -> list[Tensor]:
        """In the order of the policy's trainable weights."""
        return self.model.copies if isinstance(self.model, EarlierPolicy) else list(self.model.parameters())

    @torch.no_grad()
    def refresh(self) -> None:
        """From now on the teacher is the current policy."""
        for copy, weight in zip(self.copies, self.weights, strict=True):
            copy.copy_(weight)
