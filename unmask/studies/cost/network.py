"""The sizes of a network, from its outline; no weights are loaded."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from unmask.config import Config
from unmask.models.adapter_config import check_adapter_patterns, read_adapter_config
from unmask.models.experts import Experts, Mixture
from unmask.models.fp8 import fp8_paths
from unmask.models.load import Outline
from unmask.models.lora import file_names, linear_layers, target_paths
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
    """Channels of the feed-forward half, of all experts that a column uses."""
    routed: int
    """Channels of the copies of a column for its experts, and of their outputs; 0 without experts."""
    vocabulary: int
    queries: int
    """Channels of all query heads."""
    keys: int
    """Channels of all key heads."""
    normed: int
    """Channels of queries and keys that go through a norm."""
    linear: int
    """Weights of the layers' matrices that a column uses, each once."""
    active: int
    """All weights but those of experts that a column does not use."""
    adapter: int
    """Weights of the adapter; 0: all weights are trained."""
    adapter_unused: int
    """Weights of the adapter in experts that a column does not use."""
    adapter_b: int
    """Weights of B alone, which are zero in a new adapter."""
    adapted: int
    """Weights of the layers that have an adapter."""
    adapted_fp8: int
    """Those of them that can run in fp8."""
    fp8: int
    """Weights of the layers that can run in fp8."""
    fp8_rows: int
    """Rows of these layers' matrices, each with a scale."""
    captured: bool
    """Rollout steps can be captured as CUDA graphs."""

    @property
    def trained(self) -> int:
        return self.adapter or self.parameters


def network_of(config: Config, model: Outline) -> Network:
    shape, tiny = model.lm.config, isinstance(model.tokenizer, CharacterTokenizer)
    full = config.full if config.full is not None else tiny and model.adapter is None
    policy: Any = SimpleNamespace(lm=model.lm, names=model.family.names)
    channels = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    linears = linear_layers(policy)
    mixtures = [module for module in model.lm.modules() if isinstance(module, Mixture)]
    chosen = mixtures[0].gate.chosen if mixtures else 0
    paths, rank = ([], 0) if full else _adapted(config, model, policy, linears)
    a, b = (
        rank * sum(getattr(linears[path], side) * _matrices(linears[path]) for path in paths)
        for side in ("in_features", "out_features")
    )
    stacks = {path: linear for path, linear in linears.items() if isinstance(linear, Experts)}
    low = [stacks[path] for path in paths if path in stacks]
    unused = sum((_matrices(each) - chosen) * each.in_features * each.out_features for each in stacks.values())
    blocks = {*target_paths(policy, "all"), *stacks}
    scaled = fp8_paths(policy)
    routers = sum(mixture.gate.weight.numel() for mixture in mixtures)
    queries = channels * shape.num_attention_heads
    keys = channels * getattr(shape, "num_key_value_heads", shape.num_attention_heads)
    norms = any(name.endswith("q_norm") for name, _ in model.lm.named_modules())
    item = (getattr(torch, config.dtype) if config.dtype else model.dtype).itemsize
    return Network(
        parameters=model.parameters,
        item=item,
        layers=shape.num_hidden_layers,
        width=shape.hidden_size,
        inner=max([shape.intermediate_size, *map(_inner, mixtures)]),
        routed=2 * chosen * shape.hidden_size,
        vocabulary=shape.vocab_size,
        queries=queries,
        keys=keys,
        normed=queries + keys if norms else 0,
        linear=sum(linears[path].weight.numel() for path in blocks) - unused + routers,
        active=model.parameters - unused,
        adapter=a + b,
        adapter_unused=rank * sum((each.in_features + each.out_features) * (_matrices(each) - chosen) for each in low),
        adapter_b=b,
        adapted=sum(linears[path].weight.numel() for path in paths),
        adapted_fp8=sum(linears[path].weight.numel() for path in paths if path in scaled),
        fp8=sum(linears[path].weight.numel() for path in scaled),
        fp8_rows=sum(linears[path].out_features for path in scaled),
        captured=not (model.family.encoder or (mixtures and item > 2)),  # in fp32 experts are multiplied in a loop
    )


def _adapted(config: Config, model: Outline, policy: Any, linears: Mapping[str, Any]) -> tuple[list[str], int]:
    """The paths of the adapted layers, and the rank."""
    if model.adapter is None:
        return target_paths(policy, config.lora.targets), config.lora.rank
    settings = read_adapter_config(model.adapter)
    targets = settings.target_modules
    pattern = targets if isinstance(targets, str) else "|".join(rf"(.*\.)?{re.escape(name)}" for name in targets)
    own = policy.names.own
    names = {path: (*file_names(path, linear), *file_names(own(path), linear)) for path, linear in linears.items()}
    check_adapter_patterns(model.adapter, settings, [name for each in names.values() for name in each])
    return [path for path in linears if any(re.fullmatch(pattern, name) for name in names[path])], settings.r


def _matrices(linear: Any) -> int:
    return len(linear.weight) if isinstance(linear, Experts) else 1


def _inner(mixture: Mixture) -> int:
    shared = mixture.shared_experts.gate_proj.out_features if mixture.shared_experts is not None else 0
    return mixture.gate.chosen * mixture.experts.gate_proj.out_features + shared
