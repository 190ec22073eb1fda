"""What a sampler records in addition to tokens, steps and their log-probabilities."""

from typing import NamedTuple

import torch
from torch import Tensor

from unmask.core.order import StepLogits, low_confidence
from unmask.core.schedule import CommitCounts
from unmask.core.specs import Record
from unmask.core.token_sampling import TokenSampling, entropy, kept_ids, pad_ids


class StepPositions(NamedTuple):
    """The positions of a step: R rows, at most M positions each."""

    step: int | Tensor
    """(R, 1) if rows are at different steps."""
    size: int
    """How many the step commits, at least."""
    live_R: Tensor
    column_RM: Tensor
    """Columns of the completion."""
    place_RM: Tensor
    """Places within the block."""
    valid_RM: Tensor
    chosen_RM: Tensor


class RolloutRecorder:
    """Collects what a Record asks for while a rollout runs."""

    def __init__(
        self, record: Record, commits: CommitCounts, batch: int, length: int, sampling: TokenSampling, adaptive: bool
    ) -> None:
        self.record, self.batch, self.length, self.sampling = record, batch, length, sampling
        self.block_T = [number for number, sizes in enumerate(commits) for _ in sizes]
        self.adaptive = adaptive
        self.top: dict[int, tuple[Tensor, Tensor]] = {}
        self.above_TBC: Tensor | None = None
        self.single: dict[str, list[tuple[Tensor, ...]]] = {"entropy": [], "confidence": [], "kept": []}

    def of_piece(self, logits: StepLogits, kept_QV: Tensor | None) -> dict[str, Tensor]:
        piece = {}
        if self.record.entropy:
            piece["entropy"] = entropy(logits.logq_QV)
        if self.record.confidence:
            piece["confidence"] = low_confidence(logits)
        if kept_QV is not None:
            piece["kept"] = kept_ids(kept_QV, self.sampling.most_kept)
        if self.record.top:
            count = min(self.record.top, logits.plain_QV.shape[-1] - 1)
            piece["top_logp"], piece["top_id"] = logits.plain_QV.topk(count)
        return piece

    def record_step(self, drawn: dict[str, Tensor], positions: StepPositions, block: int) -> None:
        step, size, live_R, column_RM, place_RM, valid_RM, chosen_RM = positions
        for name in self.single:
            if name in drawn:
                value_RM = drawn[name].view(*column_RM.shape, *drawn[name].shape[1:])
                self.single[name].append(self._of_chosen(live_R[:, None], column_RM, chosen_RM, value_RM, size))
        if self.record.choice:
            if self.above_TBC is None:
                self.above_TBC = drawn["above"].new_zeros(len(self.block_T), self.batch, self.length)
            passed_RM = valid_RM & ~chosen_RM
            self.above_TBC[step, live_R[:, None], column_RM] = drawn["above"].view_as(column_RM) * passed_RM
        if self.record.top:
            shape, unseen_RM1 = (self.batch, block, drawn["top_id"].shape[-1]), ~valid_RM[..., None]
            id_RMK = drawn["top_id"].view(*place_RM.shape, -1).masked_fill(unseen_RM1, -1)
            logp_RMK = drawn["top_logp"].view(*place_RM.shape, -1).masked_fill(unseen_RM1, 0.0)
            step_R = None if isinstance(step, int) else step.squeeze(1)
            for own in [step] if isinstance(step, int) else step.unique().tolist():
                rows = slice(None) if step_R is None else step_R == own
                cell = (live_R[rows, None], place_RM[rows])
                if own not in self.top:
                    blank = torch.zeros(shape, dtype=logp_RMK.dtype, device=live_R.device)
                    self.top[own] = torch.full(shape, -1, device=live_R.device), blank
                for top_BWK, value_RMK in zip(self.top[own], (id_RMK, logp_RMK), strict=True):
                    top_BWK[cell] = value_RMK[rows]

    def _of_chosen(
        self, row_R1: Tensor, column_RM: Tensor, chosen_RM: Tensor, value_RM: Tensor, size: int
    ) -> tuple[Tensor, ...]:
        """The values at the positions that a step committed; at all positions if it may commit any number."""
        if chosen_RM.shape[1] > size and not self.adaptive:
            first_Rk = chosen_RM.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices[:, :size]
            cell = (torch.arange(len(first_Rk), device=first_Rk.device)[:, None], first_Rk)
            column_RM, chosen_RM, value_RM = column_RM[cell], chosen_RM[cell], value_RM[cell]
        return row_R1, column_RM, chosen_RM, value_RM

    def tensors(self) -> dict[str, Tensor]:
        seen: dict[str, Tensor] = {}
        for name, parts in self.single.items():
            if parts:
                widest = max(value.shape[-1] for *_, value in parts)
                tail = (widest,) if name == "kept" else ()
                full = parts[0][-1].new_full((self.batch, self.length, *tail), -1 if name == "kept" else 0)
                for row_R1, column_RM, chosen_RM, value_RM in parts:
                    value_RM = pad_ids(value_RM, widest) if name == "kept" else value_RM
                    chosen = chosen_RM.view(*chosen_RM.shape, *(1 for _ in tail))
                    full[row_R1, column_RM] = torch.where(chosen, value_RM, full[row_R1, column_RM])
                seen[name] = full
        if "kept" in seen:  # positions that were not committed may have kept more
            seen["kept"] = seen["kept"][..., : int((seen["kept"] >= 0).sum(-1).max())]
        if self.above_TBC is not None:
            seen["step_above"] = self.above_TBC
        if self.top:
            ids, logps = zip(*map(self._recorded_top, range(len(self.block_T))), strict=True)
            self.top.clear()
            seen["step_top_id"], seen["step_top_logp"] = torch.stack(ids), torch.stack(logps)
        return seen

    def _recorded_top(self, step: int) -> tuple[Tensor, Tensor]:
        """The likeliest tokens of a step; of the next one in the block if it committed nothing (same canvas)."""
        for later in range(step, len(self.block_T)):
            if self.block_T[later] != self.block_T[step]:
                break
            if later in self.top:
                return self.top[later]
        id_BWK, logp_BWK = next(iter(self.top.values()))
        return torch.full_like(id_BWK, -1), torch.zeros_like(logp_BWK)
