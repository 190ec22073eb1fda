"""What merging an adapter rounds, on the embedded model: against the adapter apart, and against exact arithmetic.

    python benchmarks/merge_rounding.py

Masked positions of random canvases, the mean |difference of log p| over the model's own distribution, in nats. "Exact"
has the same weights in fp64.
"""

import json

import torch
from torch import Tensor

from unmask.core.options import LoraOptions
from unmask.models import Model, load_model
from unmask.models.lora import add_adapter, disable_adapter, merged_adapter

SCALES = (0.0003, 0.001, 0.003, 0.01, 0.03)


def adapted_model(dtype: torch.dtype, scale: float) -> Model:
    """A at its initial scale, B normal with this standard deviation."""
    policy, rng = load_model("tiny-two", dtype), torch.Generator().manual_seed(1)
    add_adapter(policy, LoraOptions(rank=8, alpha=8.0), seed=0)
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            weight.data += scale * torch.randn(weight.shape, generator=rng)
    return policy


@torch.no_grad()
def main() -> None:
    rng = torch.Generator().manual_seed(0)
    tokens_SL, masked_SL = torch.randint(3, 20, (64, 24), generator=rng), torch.rand(64, 24, generator=rng) < 0.5
    for dtype in (torch.float32, torch.bfloat16):
        for scale in SCALES:
            policy, exact = adapted_model(dtype, scale), adapted_model(torch.float64, scale)
            tokens_SL = tokens_SL.masked_fill(masked_SL, policy.mask_id)
            for weight, rounded in zip(exact.parameters(), policy.parameters(), strict=True):
                weight.copy_(rounded)

            def logp(policy: Model, tokens_SL: Tensor = tokens_SL) -> Tensor:
                return policy(tokens_SL, None, masked_SL.flatten().nonzero().squeeze(1)).double().log_softmax(-1)

            apart_QV, exact_QV = logp(policy), logp(exact)
            with disable_adapter(policy):
                base_QV = logp(policy)
            with merged_adapter(policy):
                merged_QV = logp(policy)
            pairs = {
                "effect of the adapter": (apart_QV, base_QV),
                "merged - apart": (merged_QV, apart_QV),
                "merged - exact": (merged_QV, exact_QV),
                "apart - exact": (apart_QV, exact_QV),
            }
            found = {
                name: float((exact_QV.exp() * (one - other).nan_to_num(0.0).abs()).sum(-1).mean())
                for name, (one, other) in pairs.items()
            }
            print(json.dumps({"dtype": str(dtype), "scale of B": scale, **found}), flush=True)


if __name__ == "__main__":
    main()
