"""Decoders of the Llama kind (Llama, Qwen2, Qwen3) as masked diffusion models: LLaDA, Dream, SDAR, A2D, ours.

Weights and modules are transformers' own classes, so they load, save, shard and take adapters as usual. The forward
pass is written here, because it does what theirs cannot: attend in both directions or by blocks, rotate in the
precision each family was trained with, compute a window of columns against cached keys and values, and return hidden
states only at the positions that are needed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unmask.core.policy import Memory, Tokenizer
from unmask.util.metering import PassCounterMixin

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Facts:
    """Properties of a checkpoint that its tensors do not show."""

    mask_id: int
    eos_id: int
    pad_id: int
    max_length: int
    shift: bool = False
    """The logits at position i - 1 are the distribution of token i (Dream)."""
    causal_block: int | None = None
    """Attention is block-causal with this block length, counted from the first real token; None: full."""
    rotary_fp32: bool = False
    """Queries and keys are rotated in fp32 (LLaDA), not in the dtype of the activations."""


class Window(NamedTuple):
    """Columns that a layer computes against cached keys and values; it updates the cache at these columns."""

    key_SHLD: Tensor
    value_SHLD: Tensor
    column_W: Tensor


class TransformersPolicy(PassCounterMixin, nn.Module):
    """A policy around a transformers model: what decoders and encoders have in common."""

    def __init__(self, lm: "PreTrainedModel", facts: Facts, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.lm = lm
        self.facts = facts
        self.tokenizer = tokenizer
        self.mask_id, self.eos_id, self.pad_id = facts.mask_id, facts.eos_id, facts.pad_id
        self.max_length = facts.max_length
        self.vocabulary: int = lm.config.vocab_size

    def forward(self, tokens_SL: Tensor, attended_SL: Tensor | None, at_Q: Tensor) -> Tensor:
        return self.head(self.hidden(tokens_SL, attended_SL, at_Q))

    def hidden(self, tokens_SL: Tensor, attended_SL: Tensor | None, at_Q: Tensor) -> Tensor:
        raise NotImplementedError

    def head(self, hidden_QD: Tensor) -> Tensor:
        logits_QV = self.lm.get_output_embeddings()(hidden_QD)
        return logits_QV if logits_QV.dtype == torch.float64 else logits_QV.float()


class Decoder(TransformersPolicy):
    """Implements CachingPolicy around a LlamaForCausalLM, Qwen2ForCausalLM or Qwen3ForCausalLM."""

    def __init__(self, lm: "PreTrainedModel", facts: Facts, tokenizer: Tokenizer) -> None:
        super().__init__(lm, facts, tokenizer)
        self.causal_block = facts.causal_block
        self.gradient_checkpointing = False
        """Recompute each layer in the backward pass instead of keeping its activations."""
        # A plain attribute: casting the module to bf16 would round a buffer.
        self.frequency_D: Tensor = lm.model.rotary_emb.inv_freq.detach().float().clone()
        self.layers: list[Callable[..., Tensor]] = list(lm.model.layers)
        self.compiled = False
        self.rolling = False
        for layer in lm.model.layers:
            layer.forward = MethodType(_layer, layer)
            if lm.config.model_type != "qwen3":  # only Qwen3 has norms on its queries and keys
                layer.self_attn.q_norm = layer.self_attn.k_norm = nn.Identity()

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Compiled passes inside it run without gradient. A pass that enters a ratio must not run inside it."""
        before, self.rolling = self.rolling, True
        try:
            yield
        finally:
            self.rolling = before

    def compile_layers(self) -> None:
        """Compile the layers: faster on a large GPU, after some seconds of compilation."""
        # All layers share one code object. It is compiled once for every kind of batch: padded or not, with or without
        # a cache, one row or more, adapter on or off.
        torch._dynamo.config.recompile_limit = max(32, torch._dynamo.config.recompile_limit)
        self.layers = [torch.compile(layer.forward) for layer in self.lm.model.layers]
        self.compiled = True

    def hidden(self, tokens_SL: Tensor, attended_SL: Tensor | None, at_Q: Tensor) -> Tensor:
        return self._trunk(tokens_SL, attended_SL, 0, tokens_SL.shape[1], at_Q, None)

    def remember(self, tokens_SL: Tensor, attended_SL: Tensor | None, at_Q: Tensor) -> tuple[Tensor, Memory]:
        config, weight = self.lm.config, self.lm.model.embed_tokens.weight
        channels = self.lm.model.layers[0].self_attn.head_dim
        shape = (len(tokens_SL), config.num_key_value_heads, tokens_SL.shape[1], channels)
        keys, values = (
            [torch.empty(shape, dtype=weight.dtype, device=tokens_SL.device) for _ in self.layers] for _ in range(2)
        )
        memory = Memory(keys, values, attended_SL)
        return self._trunk(tokens_SL, attended_SL, 0, tokens_SL.shape[1], at_Q, memory), memory

    def hidden_window(self, memory: Memory, tokens_SL: Tensor, first: int, last: int, at_Q: Tensor) -> Tensor:
        first = max(0, first - int(self.facts.shift))
        return self._trunk(tokens_SL, memory.attended_SL, first, last, at_Q, memory)

    def _trunk(
        self, tokens_SL: Tensor, attended_SL: Tensor | None, first: int, last: int, at_Q: Tensor, memory: Memory | None
    ) -> Tensor:
        """The final hidden states at `at_Q`; only columns first..last - 1 are computed."""
        width = tokens_SL.shape[1]
        self.record_pass(tokens_SL, last - first)
        x_SWD = self.lm.model.embed_tokens(tokens_SL[:, first:last])
        position_SL, mask = self._place(tokens_SL, attended_SL, first, last)
        cos_SWD, sin_SWD = self._rotation(position_SL[:, first:last], x_SWD.dtype)
        column_W = torch.arange(first, last, device=tokens_SL.device) if memory is not None else None
        # A compiled layer rounds differently with and without gradient: a pass that may enter a ratio runs with it.
        with_gradient = self.compiled and not self.rolling and memory is None
        with torch.set_grad_enabled(torch.is_grad_enabled() or with_gradient):
            for number, layer in enumerate(self.layers):
                window = None
                if memory is not None and column_W is not None:
                    window = Window(memory.keys[number], memory.values[number], column_W)
                if self.gradient_checkpointing and torch.is_grad_enabled():
                    x_SWD = checkpoint(layer, x_SWD, cos_SWD, sin_SWD, mask, window, use_reentrant=False)
                else:
                    x_SWD = layer(x_SWD, cos_SWD, sin_SWD, mask, window)
        row_Q, column_Q = at_Q // width, at_Q % width
        if self.facts.shift:
            column_Q = (column_Q - 1).clamp(min=0)  # the first token is always given, never predicted
        picked_QD = x_SWD.flatten(0, 1)[row_Q * (last - first) + column_Q - first]
        return self.lm.model.norm(picked_QD)

    def _place(
        self, tokens_SL: Tensor, attended_SL: Tensor | None, first: int, last: int
    ) -> tuple[Tensor, Tensor | None]:
        """Positions, counted over attended tokens so that padding has no effect; and the attention mask, None for full
        attention."""
        if attended_SL is None:
            if self.causal_block is None:
                return torch.arange(tokens_SL.shape[1], device=tokens_SL.device)[None], None
            attended_SL = torch.ones_like(tokens_SL, dtype=torch.bool)
        position_SL = (attended_SL.cumsum(dim=1) - 1).clamp(min=0)
        seen_S1WL = attended_SL[:, None, None, :].expand(-1, 1, last - first, -1)
        if self.causal_block is not None:
            block_SL = position_SL // self.causal_block
            seen_S1WL = seen_S1WL & (block_SL[:, None, None, :] <= block_SL[:, None, first:last, None])
            # A padded query attends to all: a row that attends to nothing gives NaN on some devices.
            seen_S1WL = seen_S1WL | ~attended_SL[:, None, first:last, None]
        return position_SL, seen_S1WL

    def _rotation(self, position_SW: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of every position's angles, (S, 1, W, channels)."""
        if self.frequency_D.device != position_SW.device:
            self.frequency_D = self.frequency_D.to(position_SW.device)
        angle_SWD = (position_SW[..., None].float() * self.frequency_D).repeat(1, 1, 2)[:, None]
        scaling = self.lm.model.rotary_emb.attention_scaling
        cos, sin = angle_SWD.cos() * scaling, angle_SWD.sin() * scaling
        return (cos, sin) if self.facts.rotary_fp32 else (cos.to(dtype), sin.to(dtype))


def _layer(
    layer: Any, x_SWD: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, window: Window | None = None
) -> Tensor:
    """One pre-norm decoder layer. It replaces the module's forward method, so that hooks (sharding) still run."""
    attention = layer.self_attn
    y_SWD = layer.input_layernorm(x_SWD)
    heads = (*y_SWD.shape[:2], -1, attention.head_dim)
    q = attention.q_norm(attention.q_proj(y_SWD).view(heads))
    k = attention.k_norm(attention.k_proj(y_SWD).view(heads))
    v = attention.v_proj(y_SWD).view(heads).transpose(1, 2)
    q, k = (rotary(part.transpose(1, 2), cos, sin) for part in (q, k))
    if window is not None:
        k = window.key_SHLD.index_copy_(2, window.column_W, k)
        v = window.value_SHLD.index_copy_(2, window.column_W, v)
    seen = scaled_attention(q, k, v, mask, attention.num_key_value_groups)
    x_SWD = x_SWD + attention.o_proj(seen.transpose(1, 2).flatten(2))
    return x_SWD + layer.mlp(layer.post_attention_layernorm(x_SWD))


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, the first half of the channels against the second, in the dtype of cos and sin."""
    wide = x.to(cos.dtype)
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


def scaled_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, groups: int) -> Tensor:
    """Scaled dot-product attention; each key head serves `groups` query heads in order."""
    if groups > 1 and mask is not None:  # with a mask the grouped kernel is slow
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        groups = 1
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=groups > 1)
