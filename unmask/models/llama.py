"""The network of the embedded model: a Llama without transformers, whose import takes two seconds.

Modules and tensors have the names that transformers gives them, so checkpoints, adapters and sharding work alike. The
pass through the layers is in decoder.py.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        if not self.weight.is_meta:  # nothing to draw, and torch would import its compiler to do so
            super().reset_parameters()


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) in fp32, times a weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width, self.head_dim = config.hidden_size, config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = Linear(width, queries, bias=False)
        self.k_proj = Linear(width, keys, bias=False)
        self.v_proj = Linear(width, keys, bias=False)
        self.o_proj = Linear(queries, width, bias=False)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = Linear(width, hidden, bias=False)
        self.up_proj = Linear(width, hidden, bias=False)
        self.down_proj = Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = FeedForward(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class RotaryFrequencies(nn.Module):
    attention_scaling = 1.0

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        exponent_D = torch.arange(0, config.head_dim, 2, dtype=torch.float, device="cpu") / config.head_dim
        self.inv_freq = nn.Buffer(1 / config.rope_parameters["rope_theta"] ** exponent_D, persistent=False)


class Trunk(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(LlamaLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryFrequencies(config)


class Llama(nn.Module):
    """`config` has the fields of a Llama's config.json as attributes."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self._draw(self.model)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self._draw(self.lm_head)

    @torch.no_grad()
    def _draw(self, part: nn.Module) -> None:
        """Draw the weights in the order in which transformers draws them: a seed gives the same model there."""
        for module in part.modules():
            if isinstance(module, Linear | Embedding) and not module.weight.is_meta:
                module.weight.normal_(std=self.config.initializer_range)
            if isinstance(module, Embedding):
                module.weight[self.config.pad_token_id] = 0

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head
