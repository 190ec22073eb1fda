"""What a sampler records in addition to tokens, steps and their log-probabilities."""

from typing import NamedTuple

import torch
from torch import Tensor

from unmask.core.schedule import CommitCounts
from unmask.core.specs import Record
from unmask.core.token_sampling import pad_ids

_BLANK = {"entropy": 0, "confidence": 0, "kept": -1, "step_above": 0, "step_top_id": -1, "step_top_logp": 0}
"""What can be recorded, and its value where nothing was."""


class StepPositions(NamedTuple):
    """The positions of a step: R rows, at most M positions each."""

    step: int | Tensor
    """(R, 1) if rows are at different steps; (1, 1) in a static step."""
    live_R: Tensor
    column_RM: Tensor
    """Columns of the completion."""
    place_RM: Tensor
    """Places within the block."""
    valid_RM: Tensor
    chosen_RM: Tensor


class RolloutRecorder:
    """Records what a Record asks for while a rollout runs. All steps write to the same tensors."""

    def __init__(self, record: Record, commits: CommitCounts, batch: int, length: int, block: int) -> None:
        self.record, self.batch, self.length = record, batch, length
        self.block, self.commits = min(block, length), commits
        self.seen: dict[str, Tensor] = {}

    def clear(self) -> None:
        """Begin again, with the same tensors."""
        for name, value in self.seen.items():
            value.fill_(_BLANK[name])

    def record_step(self, drawn: dict[str, Tensor], positions: StepPositions) -> None:
        step, live_R, column_RM, place_RM, valid_RM, chosen_RM = positions
        row_R1, steps = live_R[:, None], sum(map(len, self.commits))
        for name in (name for name in _BLANK if name in drawn):
            value, tail = drawn[name].view(*column_RM.shape, *drawn[name].shape[1:]), drawn[name].shape[1:]
            if name in ("step_top_id", "step_top_logp"):
                whole = self._tensor(name, value, (steps, self.batch, self.block, *tail))
                write(whole, (step, row_R1, place_RM), value, valid_RM[..., None])
            elif name == "step_above":
                whole = self._tensor(name, value, (steps, self.batch, self.length))
                write(whole, (step, row_R1, column_RM), value, valid_RM & ~chosen_RM)
            else:
                whole = self._tensor(name, value, (self.batch, self.length, *tail))
                value = pad_ids(value, whole.shape[-1]) if name == "kept" else value
                chosen = chosen_RM.view(*chosen_RM.shape, *(1 for _ in tail))
                write(whole, (row_R1, column_RM), value, chosen)

    def _tensor(self, name: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
        if name not in self.seen:
            self.seen[name] = value.new_full(shape, _BLANK[name])
        elif name == "kept" and shape[-1] > self.seen[name].shape[-1]:  # top_p may keep more at a later step
            self.seen[name] = pad_ids(self.seen[name], shape[-1])
        return self.seen[name]

    def tensors(self) -> dict[str, Tensor]:
        seen = dict(self.seen)
        if "kept" in seen:  # positions that were not committed may have kept more
            seen["kept"] = seen["kept"][..., : int((seen["kept"] >= 0).sum(-1).max())]
        for name in ("step_top_id", "step_top_logp"):
            if name in seen and not all(size for sizes in self.commits for size in sizes):
                seen[name] = seen[name][self._looked_T()]
        return seen

    def _looked_T(self) -> list[int]:
        """The step at which the canvas of each step was seen: the next one in the block if it committed nothing."""
        looked, first = list[int](), 0
        for sizes in self.commits:
            for place in range(len(sizes)):
                later = (first + other for other in range(place, len(sizes)) if sizes[other])
                looked.append(next(later, first + place))
            first += len(sizes)
        return looked


def write(target: Tensor, cell: tuple[Tensor | int, ...], value: Tensor | int, chosen: Tensor) -> None:
    """target[cell] = value, where `chosen`."""
    value = value.to(target.dtype) if isinstance(value, Tensor) else value
    target[cell] = torch.where(chosen, value, target[cell])
