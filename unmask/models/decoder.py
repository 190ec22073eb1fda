"""Decoders of the Llama kind as masked diffusion models: LLaDA, Dream, SDAR, A2D, their mixtures of experts, ours.

Weights and modules are transformers' own classes, so they load, save, shard and take adapters as usual. The forward
pass is written here, because it does what theirs cannot: attend in both directions or by blocks, rotate in the
precision each family was trained with, compute a window of columns against cached keys and values, and return hidden
states only at the positions that are needed.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unmask.core.policy import Memory, Tokenizer
from unmask.core.token_sampling import wide_logits
from unmask.models.experts import Mixture, product_waits
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
    column: Tensor
    """(W,), or (S, W) if every row has its own."""
    reach: int
    """Columns of the cache that can be attended to."""

    def updated(self, key_SHWD: Tensor, value_SHWD: Tensor) -> tuple[Tensor, Tensor]:
        """The cached keys and values, with new ones at the columns of the window."""
        if self.column.dim() == 1:
            key, value = (
                old.index_copy_(2, self.column, new)
                for old, new in ((self.key_SHLD, key_SHWD), (self.value_SHLD, value_SHWD))
            )
        else:
            index_SHWD = self.column[:, None, :, None].expand_as(key_SHWD)
            key, value = (
                old.scatter_(2, index_SHWD, new)
                for old, new in ((self.key_SHLD, key_SHWD), (self.value_SHLD, value_SHWD))
            )
        return key[:, :, : self.reach], value[:, :, : self.reach]


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
        return wide_logits(self.lm.get_output_embeddings()(hidden_QD))


class Decoder(TransformersPolicy):
    """Implements CachingPolicy around a LlamaForCausalLM, Qwen2ForCausalLM or Qwen3ForCausalLM."""

    def __init__(self, lm: "PreTrainedModel", facts: Facts, tokenizer: Tokenizer) -> None:
        super().__init__(lm, facts, tokenizer)
        self.causal_block, self.shift = facts.causal_block, facts.shift
        self.gradient_checkpointing = False
        """Recompute each layer in the backward pass instead of keeping its activations."""
        # A plain attribute: casting the module to bf16 would round a buffer.
        self.frequency_D: Tensor = lm.model.rotary_emb.inv_freq.detach().float().clone()
        self.layers: list[Callable[..., Tensor]] = list(lm.model.layers)
        self.compiled = False
        self.rolling, self.even = False, False
        for layer in lm.model.layers:
            layer.forward = MethodType(_layer, layer)
            if not hasattr(layer.self_attn, "q_norm"):
                layer.self_attn.q_norm = layer.self_attn.k_norm = nn.Identity()

    @contextmanager
    def rollout(self, even: bool = False) -> Iterator[None]:
        """Compiled passes inside it run without gradient, and the last layer computes only what is asked for if that is
        `even`. A pass that enters a ratio must not run inside it."""
        before = self.rolling, self.even
        self.rolling, self.even = True, even
        try:
            yield
        finally:
            self.rolling, self.even = before

    def head(self, hidden_QD: Tensor) -> Tensor:
        """In rollouts in the dtype of the model: `token_logprobs` casts, compiled draws while they read the logits."""
        return self.lm.get_output_embeddings()(hidden_QD) if self.rolling else super().head(hidden_QD)

    def compile_layers(self) -> None:
        """Compile the layers: faster on a large GPU, after some seconds of compilation."""
        # All layers share one code object. It is compiled once for every kind of batch: padded or not, with or without
        # a cache, one row or more, adapter on or off, all columns or some of them (the last layer of a rollout).
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        self.layers = [torch.compile(layer.forward) for layer in self.lm.model.layers]
        self.compiled = True

    def hidden(self, tokens_SL: Tensor, attended_SL: Tensor | None, at_Q: Tensor) -> Tensor:
        return self._trunk(tokens_SL, attended_SL, 0, tokens_SL.shape[1], at_Q, None)

    def remember(
        self, tokens_SL: Tensor, attended_SL: Tensor | None, at_Q: Tensor, last: int | None = None
    ) -> tuple[Tensor, Memory]:
        config, weight = self.lm.config, self.lm.model.embed_tokens.weight
        channels = self.lm.model.layers[0].self_attn.head_dim
        shape = (len(tokens_SL), config.num_key_value_heads, tokens_SL.shape[1], channels)
        last = tokens_SL.shape[1] if last is None else min(last, tokens_SL.shape[1])
        blank = torch.empty if last == tokens_SL.shape[1] else torch.zeros
        keys, values = (
            [blank(shape, dtype=weight.dtype, device=tokens_SL.device) for _ in self.layers] for _ in range(2)
        )
        memory = Memory(keys, values, attended_SL)
        return self._trunk(tokens_SL, attended_SL, 0, last, at_Q, memory, last), memory

    def hidden_window(self, memory: Memory, tokens_SL: Tensor, first: int, last: int, at_Q: Tensor) -> Tensor:
        first = max(0, first - int(self.facts.shift))
        return self._trunk(tokens_SL, memory.attended_SL, first, last, at_Q, memory)

    def hidden_columns(self, memory: Memory, tokens_SL: Tensor, column_W: Tensor, at_Q: Tensor) -> Tensor:
        width, shift = tokens_SL.shape[1], int(self.facts.shift)
        first = column_W[0] - shift
        if shift:
            column_W = torch.cat([column_W[:1] - 1, column_W]).clamp(min=0)
        self.record_pass(tokens_SL, len(column_W))
        position_SL, mask = self._place(tokens_SL, memory.attended_SL, 0, len(column_W))
        x_SWD = self.lm.model.embed_tokens(tokens_SL[:, column_W])
        at = (at_Q // width, at_Q % width - shift - first)
        return self._layers_pass(x_SWD, position_SL[:, column_W], mask, at, _windows(memory, column_W, width))

    def capture_obstacle(self) -> str | None:
        stacks = [stack for each in self.modules() if isinstance(each, Mixture) for stack in each.experts.parameters()]
        if any(product_waits(self.lm.model.embed_tokens.weight, stack) for stack in stacks):
            return "the matrices of its experts are multiplied in a loop that waits for the device"
        if any(hasattr(weight, "placements") for weight in self.parameters()):
            return "the weights are sharded"
        return None

    def addresses(self) -> Hashable:
        parts = [part for m in self.lm.modules() for part in (vars(m), m._parameters, m._buffers)]
        tensors = [value for part in parts for value in part.values() if isinstance(value, Tensor)]
        read = tuple((value.data_ptr(), value.dtype, value.shape) for value in tensors)
        return tuple(map(id, self.lm.modules())), tuple(map(id, self.layers)), read

    def hidden_blocks(self, memory: Memory, tokens_SL: Tensor, column_SW: Tensor, reach: int, at_Q: Tensor) -> Tensor:
        width = tokens_SL.shape[1]
        first_S, attended_SL = column_SW[:, 0] - int(self.facts.shift), memory.attended_SL
        if self.facts.shift:
            column_SW = torch.cat([first_S[:, None], column_SW], 1)
        column_SW = column_SW.clamp(0, width - 1)  # columns that do not exist repeat the first or the last one
        self.record_pass(tokens_SL, column_SW.shape[1])
        attended_SL = torch.ones_like(tokens_SL, dtype=torch.bool) if attended_SL is None else attended_SL
        place_SL = _positions(attended_SL)
        place_SW, real_SW = place_SL.gather(1, column_SW), attended_SL.gather(1, column_SW)
        mask = self._seen_blocks(place_SW, real_SW, place_SL[:, :reach], attended_SL[:, :reach])
        row_Q, column_Q = at_Q // width, at_Q % width - int(self.facts.shift)
        # Positions outside the window may be asked about where the answer is not used.
        at = (row_Q, (column_Q - first_S[row_Q]).clamp(0, column_SW.shape[1] - 1))
        x_SWD = self.lm.model.embed_tokens(tokens_SL.gather(1, column_SW))
        return self._layers_pass(x_SWD, place_SW, mask, at, _windows(memory, column_SW, reach))

    def hidden_two_streams(
        self, states_SL: Tensor, clean_SL: Tensor, attended_SL: Tensor | None, at_Q: Tensor, block: int
    ) -> Tensor:
        assert self.causal_block is not None
        attended_SL = torch.ones_like(states_SL, dtype=torch.bool) if attended_SL is None else attended_SL
        width = states_SL.shape[1]
        row_Q, column_Q = at_Q // width, at_Q % width
        first = max(0, int(column_Q.min()) - block + 1) if len(at_Q) else width - 1
        self.record_pass(states_SL, 2 * width - first)
        place_SL = _positions(attended_SL)
        both_SW = torch.cat([clean_SL, states_SL[:, first:]], 1)
        place_SW, real_SW = (torch.cat([each, each[:, first:]], 1) for each in (place_SL, attended_SL))
        noisy_W = torch.arange(both_SW.shape[1], device=both_SW.device) >= width
        mask = self._seen_blocks(place_SW, real_SW, place_SW, real_SW)
        part_SW = place_SW // block
        # A noisy token sees the noisy tokens of its own block and the clean ones of earlier blocks.
        earlier_S1WW = (part_SW[:, None, None, :] < part_SW[:, None, :, None]) & ~noisy_W
        own_S1WW = (part_SW[:, None, None, :] == part_SW[:, None, :, None]) & noisy_W
        mask = mask & torch.where(noisy_W[:, None], earlier_S1WW | own_S1WW, ~noisy_W) | ~real_SW[:, None, :, None]
        local_Q = column_Q + width - first
        if self.facts.shift:  # the first token of a block is predicted by the finished block before it
            before_Q = (column_Q - 1).clamp(min=0)
            inside_Q = part_SW[row_Q, before_Q] == part_SW[row_Q, column_Q]
            local_Q = torch.where(inside_Q, local_Q - 1, before_Q)
        return self._layers_pass(self.lm.model.embed_tokens(both_SW), place_SW, mask, (row_Q, local_Q))

    def _trunk(
        self,
        tokens_SL: Tensor,
        attended_SL: Tensor | None,
        first: int,
        last: int,
        at_Q: Tensor,
        memory: Memory | None,
        reach: int | None = None,
    ) -> Tensor:
        """The final hidden states at `at_Q`; only columns first..last - 1 are computed, against those up to `reach`."""
        width = tokens_SL.shape[1]
        self.record_pass(tokens_SL, last - first)
        x_SWD = self.lm.model.embed_tokens(tokens_SL[:, first:last])
        reach = width if reach is None else reach
        position_SL, mask = self._place(tokens_SL, attended_SL, first, last)
        mask = None if mask is None else mask[..., :reach]
        column_W = torch.arange(first, last, device=tokens_SL.device)
        windows = None if memory is None else _windows(memory, column_W, reach)
        row_Q, column_Q = at_Q // width, at_Q % width
        if self.facts.shift:
            column_Q = (column_Q - 1).clamp(min=0)  # the first token is always given, never predicted
        return self._layers_pass(x_SWD, position_SL[:, first:last], mask, (row_Q, column_Q - first), windows)

    def _layers_pass(
        self,
        x_SWD: Tensor,
        position_SW: Tensor,
        mask: Tensor | None,
        at: tuple[Tensor, Tensor],
        windows: list[Window] | None = None,
    ) -> Tensor:
        """The final hidden states of some columns, (Q, D), at rows and columns `at` of them; with `windows`, against
        cached keys and values. If the rows are asked evenly, the last layer computes only these states."""
        row_Q, column_Q = at
        asked_SM = column_Q.view(len(x_SWD), -1) if self.even and len(column_Q) else None
        cos_SWD, sin_SWD = self._rotation(position_SW, x_SWD.dtype)
        # A compiled layer rounds differently with and without gradient: a pass that may enter a ratio runs with it.
        with_gradient = self.compiled and not self.rolling and windows is None
        with torch.set_grad_enabled(torch.is_grad_enabled() or with_gradient):
            for number, layer in enumerate(self.layers):
                window = None if windows is None else windows[number]
                some_SM = asked_SM if number + 1 == len(self.layers) else None
                if self.gradient_checkpointing and torch.is_grad_enabled():
                    x_SWD = checkpoint(layer, x_SWD, cos_SWD, sin_SWD, mask, window, some_SM, use_reentrant=False)
                else:
                    x_SWD = layer(x_SWD, cos_SWD, sin_SWD, mask, window, some_SM)
        x_QD = x_SWD.flatten(0, 1)
        return self.lm.model.norm(x_QD if asked_SM is not None else x_QD[row_Q * x_SWD.shape[1] + column_Q])

    def _place(
        self, tokens_SL: Tensor, attended_SL: Tensor | None, first: int, last: int
    ) -> tuple[Tensor, Tensor | None]:
        """Positions, counted over attended tokens so that padding has no effect; and the attention mask, None for full
        attention."""
        if attended_SL is None:
            if self.causal_block is None:
                return torch.arange(tokens_SL.shape[1], device=tokens_SL.device)[None], None
            attended_SL = torch.ones_like(tokens_SL, dtype=torch.bool)
        position_SL = _positions(attended_SL)
        if self.causal_block is None:
            return position_SL, attended_SL[:, None, None, :].expand(-1, 1, last - first, -1)
        place_SW, real_SW = position_SL[:, first:last], attended_SL[:, first:last]
        return position_SL, self._seen_blocks(place_SW, real_SW, position_SL, attended_SL)

    def _seen_blocks(self, place_SW: Tensor, real_SW: Tensor, key_place_SL: Tensor, key_real_SL: Tensor) -> Tensor:
        """(S, 1, W, L): the keys that each query attends to by blocks."""
        assert self.causal_block is not None
        block_SW, block_SL = place_SW // self.causal_block, key_place_SL // self.causal_block
        seen_S1WL = key_real_SL[:, None, None, :] & (block_SL[:, None, None, :] <= block_SW[:, None, :, None])
        # A padded query attends to all: a row that attends to nothing gives NaN on some devices.
        return seen_S1WL | ~real_SW[:, None, :, None]

    def _rotation(self, position_SW: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of every position's angles, (S, 1, W, channels)."""
        if self.frequency_D.device != position_SW.device:
            self.frequency_D = self.frequency_D.to(position_SW.device)
        angle_SWD = (position_SW[..., None].float() * self.frequency_D).repeat(1, 1, 2)[:, None]
        scaling = self.lm.model.rotary_emb.attention_scaling
        cos, sin = angle_SWD.cos() * scaling, angle_SWD.sin() * scaling
        return (cos, sin) if self.facts.rotary_fp32 else (cos.to(dtype), sin.to(dtype))


def _positions(attended_SL: Tensor) -> Tensor:
    """Positions, counted over attended tokens."""
    return (attended_SL.cumsum(dim=1) - 1).clamp(min=0)


def _windows(memory: Memory, column: Tensor, reach: int) -> list[Window]:
    """The same columns of every layer."""
    return [Window(key, value, column, reach) for key, value in zip(memory.keys, memory.values, strict=True)]


def _layer(
    layer: Any,
    x_SWD: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor | None,
    window: Window | None = None,
    asked_SM: Tensor | None = None,
) -> Tensor:
    """One pre-norm decoder layer. It replaces the module's forward method, so that hooks (sharding) still run.

    `asked_SM`: the columns whose output is needed, in this order; keys and values are those of all columns.
    """

    def asked(part_SW: Tensor) -> Tensor:
        if asked_SM is None:
            return part_SW
        row_S1 = torch.arange(len(asked_SM), device=asked_SM.device)[:, None]
        return part_SW.expand(len(asked_SM), *part_SW.shape[1:])[row_S1, asked_SM]

    attention = layer.self_attn
    y_SWD = layer.input_layernorm(x_SWD)
    heads = (-1, attention.head_dim)
    if hasattr(attention, "query_key_value"):
        together, shared = attention.query_key_value(y_SWD).unflatten(-1, heads), attention.config.num_key_value_heads
        q, k, v = together.split([attention.config.num_attention_heads, shared, shared], dim=2)
        q = asked(q)
    else:
        q = attention.q_proj(asked(y_SWD)).unflatten(-1, heads)
        k, v = (part(y_SWD).unflatten(-1, heads) for part in (attention.k_proj, attention.v_proj))
    k, v = rotary(attention.k_norm(k).transpose(1, 2), cos, sin), v.transpose(1, 2)
    if asked_SM is not None:
        cos, sin = (asked(part.squeeze(1))[:, None] for part in (cos, sin))
        mask = None if mask is None else asked(mask.squeeze(1))[:, None]
    q = rotary(attention.q_norm(q).transpose(1, 2), cos, sin)
    if window is not None:
        k, v = window.updated(k, v)
    seen = scaled_attention(q, k, v, mask, attention.num_key_value_groups)
    x_SWD = asked(x_SWD) + attention.o_proj(seen.transpose(1, 2).flatten(2))
    return x_SWD + layer.mlp(layer.post_attention_layernorm(x_SWD))


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, the first half of the channels against the second, in the dtype of cos and sin.

    Channels beyond those of cos and sin are not rotated (LLaDA2).
    """
    x, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    wide = x.to(cos.dtype)
    first, second = wide.chunk(2, dim=-1)
    x = (wide * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)
    return torch.cat([x, rest], dim=-1) if rest.shape[-1] else x


def scaled_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, groups: int) -> Tensor:
    """Scaled dot-product attention; each key head serves `groups` query heads in order."""
    if groups > 1 and mask is not None:  # with a mask the grouped kernel is slow
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        groups = 1
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=groups > 1)
