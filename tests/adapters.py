"""Small policies with low-rank adapters."""

from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from unmask.core.options import LoraOptions
from unmask.models.decoder import Decoder, Facts
from unmask.models.lora import add_adapter
from unmask.models.names import LLADA, Names

FACTS = Facts(mask_id=38, eos_id=2, pad_id=0, max_length=64)
SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
NATIVE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OWN = ("q_proj", "k_proj", "v_proj", "attn_out", "ff_proj", "up_proj", "ff_out")
OPTIONS = LoraOptions(rank=4, alpha=6.0)


class Small(Decoder):
    names: Names = LLADA


def small(names: Names = LLADA, kind: str = "llama", seed: int = 0, **shape: Any) -> Small:
    """A decoder on whose weights nothing is neutral."""
    lm = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE | shape)),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE | shape)),
    }[kind]()
    rng = torch.Generator().manual_seed(seed)
    for weight in lm.parameters():
        weight.data = 0.25 * torch.randn(weight.shape, generator=rng)
    policy = Small(lm.eval(), FACTS, tokenizer=None)
    policy.names = names
    return policy


def canvas(rows: int = 3, width: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    tokens_SL = torch.randint(0, 40, (rows, width), generator=rng)
    attended_SL = torch.arange(width) >= torch.arange(rows)[:, None]
    return tokens_SL, attended_SL, torch.arange(rows * width)[attended_SL.flatten()]


def layers_of(module: nn.Module) -> dict[str, Any]:
    return {path: part for path, part in module.named_modules() if isinstance(part, peft.tuners.lora.LoraLayer)}


def move(module: nn.Module, seed: int = 3, by: float = 0.3) -> None:
    """Training, in short: every adapter weight is changed."""
    rng = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        if "lora_" in name:
            weight.data += by * torch.randn(weight.shape, generator=rng, dtype=weight.dtype)


def adapted(options: LoraOptions = OPTIONS, **kind: Any) -> Small:
    policy = small(**kind)
    add_adapter(policy, options, seed=5)
    move(policy)
    return policy


def dense(layer: Any) -> Tensor:
    """W + alpha / r B A, straight from the definition."""
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    return layer.base_layer.weight + layer.lora_alpha["default"] / len(a) * (b @ a)
