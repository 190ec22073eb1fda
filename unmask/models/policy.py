"""What the library asks of a model, and nothing more."""

from typing import Protocol, runtime_checkable

from torch import Tensor


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


@runtime_checkable
class Policy(Protocol):
    """A masked diffusion model: the distribution of every token given the whole canvas.

    tokens_SL   (S, L) long: canvases, MASK where unknown
    attended_SL (S, L) bool: False at padding, which is never attended to and never changes a row's result
    at_Q        (Q,) long: positions of the flattened canvases, row * L + position
    returns     (Q, V) logits at just those positions, fp32 or better: row q is the distribution of the token
                at position at_Q[q] itself, also for models whose own convention is shifted by one
    """

    @property
    def mask_id(self) -> int: ...

    @property
    def eos_id(self) -> int: ...

    @property
    def pad_id(self) -> int: ...

    @property
    def max_length(self) -> int: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def __call__(self, tokens_SL: Tensor, attended_SL: Tensor, at_Q: Tensor) -> Tensor: ...
