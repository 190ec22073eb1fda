"""Encoders trained with a masked token objective, BERT and ModernBERT, as policies.

They run transformers' own forward pass and have no cache.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unmask.core.policy import Tokenizer
from unmask.models.checkpoint import Origin, StoredTensors
from unmask.models.decoder import Facts, TransformersPolicy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class MaskedLM(StoredTensors, TransformersPolicy):
    """Implements Policy."""

    def __init__(self, lm: "PreTrainedModel", facts: Facts, tokenizer: Tokenizer, origin: Origin) -> None:
        super().__init__(lm, facts, tokenizer)
        self.set_origin(origin)

    def hidden(self, tokens_SL: Tensor, attended_SL: Tensor | None, at_Q: Tensor) -> Tensor:
        """The states just before the projection to the vocabulary."""
        if tokens_SL.shape[1] > self.max_length:
            raise ValueError(f"This model takes at most {self.max_length} tokens, not {tokens_SL.shape[1]}.")
        self.record_pass(tokens_SL, tokens_SL.shape[1])
        position_SL = None if attended_SL is None else (attended_SL.cumsum(dim=1) - 1).clamp(min=0)
        return self._transform(self._states(tokens_SL, attended_SL, position_SL).flatten(0, 1)[at_Q])

    def _states(self, tokens_SL: Tensor, attended_SL: Tensor | None, position_SL: Tensor | None) -> Tensor:
        raise NotImplementedError

    def _transform(self, states_QD: Tensor) -> Tensor:
        raise NotImplementedError


class Bert(MaskedLM):
    def _states(self, tokens_SL: Tensor, attended_SL: Tensor | None, position_SL: Tensor | None) -> Tensor:
        output = self.lm.bert(input_ids=tokens_SL, attention_mask=attended_SL, position_ids=position_SL)
        return output.last_hidden_state

    def _transform(self, states_QD: Tensor) -> Tensor:
        return self.lm.cls.predictions.transform(states_QD)


class ModernBert(MaskedLM):
    def _states(self, tokens_SL: Tensor, attended_SL: Tensor | None, position_SL: Tensor | None) -> Tensor:
        masks = None if attended_SL is None else self._masks(attended_SL)
        output = self.lm.model(input_ids=tokens_SL, attention_mask=masks, position_ids=position_SL)
        return output.last_hidden_state

    def _masks(self, attended_SL: Tensor) -> dict[str, Tensor]:
        """The attention masks of the two kinds of layers. A padded query attends to all: a row that attends to nothing
        gives NaN on some devices."""
        column_L = torch.arange(attended_SL.shape[1], device=attended_SL.device)
        near_LL = (column_L[:, None] - column_L).abs() <= self.lm.config.sliding_window
        full_S1LL = attended_SL[:, None, None, :].expand(-1, 1, len(column_L), -1)
        local_S1LL = (full_S1LL & near_LL) | ~attended_SL[:, None, :, None]
        return {"full_attention": full_S1LL, "sliding_attention": local_S1LL}

    def _transform(self, states_QD: Tensor) -> Tensor:
        return self.lm.head(states_QD)
