"""What a sampler remembers beside tokens, steps and their log-probabilities."""

from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.law import Law, entropy, kept_ids, widened
from unmask.order import Look


@dataclass(frozen=True)
class Record:
    """What a method wants remembered beside tokens, steps and their log-probabilities.

    `top` > 0: `step_top_id`, `step_top_logp` (T, B, W, top): the likeliest tokens at temperature 1 of every
    position of the block looked at; id -1, log-probability 0 where it was not masked or the row had ended.
    `entropy`: (B, C) entropy of the law each token was drawn from.
    """

    top: int = 0
    entropy: bool = False

    def __or__(self, other: "Record") -> "Record":
        return Record(max(self.top, other.top), self.entropy or other.entropy)


class Notes:
    """What the recorders keep while a rollout runs."""

    def __init__(self, record: Record, steps: int, batch: int, length: int, law: Law) -> None:
        self.record, self.steps, self.batch, self.length, self.law = record, steps, batch, length, law
        self.top: dict[int, tuple[Tensor, Tensor]] = {}
        self.single: dict[str, list[tuple[Tensor, ...]]] = {"entropy": [], "kept": []}

    def seen(self, look: Look, kept_QV: Tensor | None) -> dict[str, Tensor]:
        """What is kept of a piece."""
        found = {}
        if self.record.entropy:
            found["entropy"] = entropy(look.law_QV)
        if kept_QV is not None:
            found["kept"] = kept_ids(kept_QV, self.law.most_kept)
        if self.record.top:
            found["top_logp"], found["top_id"] = look.plain_QV.topk(min(self.record.top, look.plain_QV.shape[-1] - 1))
        return found

    def take(
        self,
        found: dict[str, Tensor],
        step: int,
        live_R: Tensor,
        column_RM: Tensor,
        place_RM: Tensor,
        valid_RM: Tensor,
        chosen_RM: Tensor,
        block: int,
    ) -> None:
        """What is kept of a step."""
        for name in self.single:
            if name in found:
                self.single[name].append((live_R[:, None], column_RM, chosen_RM, found[name]))
        if self.record.top:
            shape = (self.batch, block, found["top_id"].shape[-1])
            cell, unseen_RM1 = (live_R[:, None], place_RM), ~valid_RM[..., None]
            id_BWK = torch.full(shape, -1, device=live_R.device)
            id_BWK[cell] = found["top_id"].view(*place_RM.shape, -1).masked_fill(unseen_RM1, -1)
            logp_BWK = torch.zeros(shape, dtype=found["top_logp"].dtype, device=live_R.device)
            logp_BWK[cell] = found["top_logp"].view(*place_RM.shape, -1).masked_fill(unseen_RM1, 0.0)
            self.top[step] = id_BWK, logp_BWK

    def tensors(self) -> dict[str, Tensor]:
        seen: dict[str, Tensor] = {}
        for name, parts in self.single.items():
            if parts:
                widest = max(value.shape[-1] for *_, value in parts)
                tail = parts[0][-1].shape[1:-1] + ((widest,) if name == "kept" else ())
                full = parts[0][-1].new_full((self.batch, self.length, *tail), -1 if name == "kept" else 0)
                for row_R1, column_RM, chosen_RM, value_Q in parts:
                    value_Q = widened(value_Q, widest) if name == "kept" else value_Q
                    value_RM = value_Q.view(*column_RM.shape, *tail)
                    chosen = chosen_RM.view(*chosen_RM.shape, *(1 for _ in tail))
                    full[row_R1, column_RM] = torch.where(chosen, value_RM, full[row_R1, column_RM])
                seen[name] = full
        if "kept" in seen:  # what was passed over may have kept more
            seen["kept"] = seen["kept"][..., : int((seen["kept"] >= 0).sum(-1).max())]
        if self.top:
            id_BWK, logp_BWK = next(iter(self.top.values()))
            blank = torch.full_like(id_BWK, -1), torch.zeros_like(logp_BWK)  # nobody looked at that step
            ids, logps = zip(*(self.top.get(step, blank) for step in range(self.steps)), strict=True)
            seen["step_top_id"], seen["step_top_logp"] = torch.stack(ids), torch.stack(logps)
        return seen
