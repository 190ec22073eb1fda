"""The sizes of a network, from its outline; no weights are loaded."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from unmask.config import Config
from unmask.models.load import Outline
from unmask.models.lora import linear_layers, read_adapter_config, target_paths
from unmask.models.tiny import CharacterTokenizer


@dataclass(frozen=True)
class Network:
    """The sizes from which operations, seconds and bytes are computed."""

    parameters: int
    item: int
    """Bytes of a weight."""
    layers: int
    width: int
    inner: int
    """Channels of the feed-forward half."""
    vocabulary: int
    queries: int
    """Channels of all query heads."""
    keys: int
    """Channels of all key heads."""
    linear: int
    """Weights of the layers' matrices, each used once a column."""
    adapter: int
    """Weights of the adapter; 0: all weights are trained."""
    adapter_b: int
    """Weights of B alone, which are zero in a new adapter."""

    @property
    def trained(self) -> int:
        return self.adapter or self.parameters


def network_of(config: Config, model: Outline) -> Network:
    shape, tiny = model.lm.config, isinstance(model.tokenizer, CharacterTokenizer)
    full = config.full if config.full is not None else tiny and model.adapter is None
    policy: Any = SimpleNamespace(lm=model.lm, names=model.family.names)
    channels = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    linears = linear_layers(policy)
    a, b = (0, 0) if full else _adapter_weights(config, model, policy, linears)
    return Network(
        parameters=model.parameters,
        item=(getattr(torch, config.dtype) if config.dtype else model.dtype).itemsize,
        layers=shape.num_hidden_layers,
        width=shape.hidden_size,
        inner=shape.intermediate_size,
        vocabulary=shape.vocab_size,
        queries=channels * shape.num_attention_heads,
        keys=channels * getattr(shape, "num_key_value_heads", shape.num_attention_heads),
        linear=sum(linears[path].weight.numel() for path in target_paths(policy, "all")),
        adapter=a + b,
        adapter_b=b,
    )


def _adapter_weights(config: Config, model: Outline, policy: Any, linears: Mapping[str, nn.Linear]) -> tuple[int, int]:
    """The number of weights of A and of B."""
    if model.adapter is None:
        paths, rank = target_paths(policy, config.lora.targets), config.lora.rank
    else:
        settings = read_adapter_config(model.adapter)
        targets, rank = settings.target_modules, settings.r
        pattern = targets if isinstance(targets, str) else "|".join(rf"(.*\.)?{re.escape(name)}" for name in targets)
        paths = [path for path in linears if any(re.fullmatch(pattern, n) for n in (path, policy.names.own(path)))]
    a, b = (sum(getattr(linears[path], side) for path in paths) for side in ("in_features", "out_features"))
    return rank * a, rank * b
