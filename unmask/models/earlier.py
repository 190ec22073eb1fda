"""A policy as it was: copies of the weights that training has changed since then."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from unmask.core.policy import BlockCausalPolicy, Policy


@contextmanager
def swap_weights(weights: list[nn.Parameter], other: list[Tensor]) -> Iterator[None]:
    """Inside it the values of `weights` and `other` are exchanged."""

    def swap() -> None:
        for number, weight in enumerate(weights):
            weight.data, other[number] = other[number], weight.data

    swap()
    try:
        yield
    finally:
        swap()


class EarlierPolicy:
    """Implements Policy: a policy with copies of some of its weights in their place, without gradient."""

    def __init__(self, policy: Policy, weights: list[nn.Parameter]) -> None:
        self.policy, self.weights = policy, weights
        self.copies = [weight.detach().clone() for weight in weights]
        self.mask_id, self.eos_id, self.pad_id = policy.mask_id, policy.eos_id, policy.pad_id
        self.vocabulary, self.max_length, self.tokenizer = policy.vocabulary, policy.max_length, policy.tokenizer

    def _as_it_was(self) -> AbstractContextManager[None]:
        return swap_weights(self.weights, self.copies)

    def hidden(self, tokens_SL: Tensor, attended_SL: Tensor | None, at_Q: Tensor) -> Tensor:
        with torch.no_grad(), self._as_it_was():
            return self.policy.hidden(tokens_SL, attended_SL, at_Q)

    def hidden_two_streams(
        self, states_SL: Tensor, clean_SL: Tensor, attended_SL: Tensor | None, at_Q: Tensor, block: int
    ) -> Tensor:
        assert isinstance(self.policy, BlockCausalPolicy)
        with torch.no_grad(), self._as_it_was():
            return self.policy.hidden_two_streams(states_SL, clean_SL, attended_SL, at_Q, block)

    def head(self, hidden_QD: Tensor) -> Tensor:
        with torch.no_grad(), self._as_it_was():
            return self.policy.head(hidden_QD)

    def __call__(self, tokens_SL: Tensor, attended_SL: Tensor | None, at_Q: Tensor) -> Tensor:
        return self.head(self.hidden(tokens_SL, attended_SL, at_Q))
