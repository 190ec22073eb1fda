"""Whether a loaded model does what its family is said to do: one short canvas, three passes, no gradient."""

import torch
from torch import Tensor

from unmask.core.policy import Policy


@torch.no_grad()
def check(policy: Policy, device: str | torch.device, first: int = 0, causal_block: int | None = None) -> None:
    """ValueError unless the logits are numbers and attention is bidirectional, or block-causal with this block length.

    It tells what the network does, not what its weights were trained for: nothing in a checkpoint's tensors says that
    an autoregressive model is one. first: the first position that the model can say.
    """
    block = causal_block or min(8, policy.max_length)
    length = min(block if causal_block is None else 2 * block, policy.max_length)
    rows = policy.vocabulary
    tokens_L = torch.arange(length, device=device) % rows
    before_V = _said(policy, tokens_L, first)
    if not before_V.isfinite().all():
        raise ValueError("The logits of this model are not all finite numbers: its weights are damaged.")
    if first < block - 1 < length and torch.equal(before_V, _said(policy, _changed(tokens_L, block - 1, rows), first)):
        raise ValueError(
            "A later token does not change what this model says of an earlier one: "
            "it is causal, or its weights are damaged."
        )
    if length > block and not torch.equal(before_V, _said(policy, _changed(tokens_L, length - 1, rows), first)):
        raise ValueError("A later block changes what this model says of an earlier one: it is not block-causal.")


def _said(policy: Policy, tokens_L: Tensor, place: int) -> Tensor:
    return policy(tokens_L[None], None, torch.tensor([place], device=tokens_L.device))[0]


def _changed(tokens_L: Tensor, place: int, rows: int) -> Tensor:
    changed_L = tokens_L.clone()
    changed_L[place] = (tokens_L[place] + rows // 2) % rows
    return changed_L
