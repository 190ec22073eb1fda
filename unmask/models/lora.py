"""Low-rank adapters: y = W x + scale * B A x, with W frozen and scale = alpha / rank. See docs/lora.md.

peft inserts them into the modules in place. With the adapter disabled the policy is its base model again, so the KL
reference needs no memory. Files are in PEFT's format under the module names of the released model: peft with the
released code reads our adapters, and we read theirs.
"""

import json
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unmask.core.options import LoraOptions, Targets
from unmask.core.policy import Policy
from unmask.models.adapter_config import (
    BLOCK,
    CONFIG,
    WEIGHTS,
    check_adapter_patterns,
    pattern_values,
    read_adapter_config,
)
from unmask.models.checkpoint import check_sums, open_safetensors, replace_folder, stored_parts
from unmask.models.earlier import EarlierPolicy
from unmask.models.experts import Experts, grouped_linear
from unmask.util.files import save_tensors

PREFIX = "base_model.model."  # peft's wrapper puts this before a model's own module names
ADAPTER = "default"  # peft's name for a single adapter
Factors = dict[str, tuple[Tensor, Tensor]]  # A and B, by the path of their module


class Adaptable(Policy, Protocol):
    """A policy around a transformers model, `lm`; `names.own` translates a module name to the released model's."""

    lm: Any
    names: Any

    def requires_grad_(self, requires_grad: bool) -> Any: ...


class Factor(nn.Module):
    """A or B. Stored in fp32, so that small steps are not rounded away; multiplied in the dtype of its input."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class ExpertFactor(nn.Module):
    """A or B of every expert, a stack."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x_RD: Tensor, end_E: Tensor) -> Tensor:
        return grouped_linear(x_RD, self.weight.to(x_RD.dtype), end_E)


class AdaptedExperts(nn.Module):
    """A stack of experts with an adapter for each, in the form of peft's layers.

    peft itself adapts a stack by adding all products B A to it in every pass, and under other names than the released
    modules of single experts have.
    """

    def __init__(self, base: Experts, scaling: float, dropout: float) -> None:
        super().__init__()
        self.base_layer, self.dropout, self.scaling = base, dropout, {ADAPTER: scaling}
        self.lora_A, self.lora_B = nn.ModuleDict(), nn.ModuleDict()
        self._disable_adapters = False

    def forward(self, x_RD: Tensor, end_E: Tensor) -> Tensor:
        y_RD = self.base_layer(x_RD, end_E)
        if self._disable_adapters:
            return y_RD
        low_RD = self.lora_A[ADAPTER](F.dropout(x_RD, self.dropout, self.training), end_E)
        return y_RD + self.lora_B[ADAPTER](low_RD, end_E) * self.scaling[ADAPTER]


def add_adapter(policy: Adaptable, options: LoraOptions, seed: int) -> None:
    """Freeze the policy and add a trainable adapter. It has no effect yet: B is zero, A is drawn from the seed."""
    rng = torch.Generator().manual_seed(seed)  # on the CPU: the same weights on every device
    linears, factors = linear_layers(policy), {}
    for path in target_paths(policy, options.targets):
        *stack, wide, deep = linears[path].weight.shape
        a = torch.empty(*stack, options.rank, deep).uniform_(-(deep**-0.5), deep**-0.5, generator=rng)  # peft's default
        factors[path] = a, torch.zeros(*stack, wide, options.rank)
    _inject(policy, factors, dict.fromkeys(factors, options.alpha), dropout=0.0, rslora=False)


def has_adapter(policy: Any) -> bool:
    return "peft_config" in vars(policy.lm)


def unfreeze_adapter(policy: Adaptable) -> None:
    """Make the adapter trainable, also if it was loaded frozen."""
    for layer in _adapter_layers(policy).values():
        for factor in (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]):
            factor.requires_grad_(True)


def trainable_parameters(policy: nn.Module) -> list[nn.Parameter]:
    """The adapter's weights, or all weights of a policy without an adapter."""
    return [weight for weight in policy.parameters() if weight.requires_grad]


@contextmanager
def disable_adapter(policy: Adaptable) -> Iterator[None]:
    """Inside it the policy is its base model."""
    enabled = [layer for layer in _adapter_layers(policy).values() if not layer._disable_adapters]
    try:
        for layer in enabled:
            layer._disable_adapters = True  # peft's public switch also resets requires_grad
        yield
    finally:
        for layer in enabled:
            layer._disable_adapters = False


class ReferencePolicy(EarlierPolicy):
    """A policy with an adapter as it was when this object was created.

    If the adapter is new, that is the base model, which costs nothing; otherwise it keeps a copy of the adapter.
    `alike`: a new adapter stays enabled, with B zero, because compiled layers round differently with it disabled.
    """

    def __init__(self, policy: Adaptable, alike: bool = False) -> None:
        layers = _adapter_layers(policy).values()
        a, b = ([getattr(layer, name)[ADAPTER].weight for layer in layers] for name in ("lora_A", "lora_B"))
        fresh = not any(weight.any() for weight in b)
        self.base = policy if fresh and not alike else None
        super().__init__(policy, [] if self.base is not None else b if fresh else a + b)

    def _as_it_was(self) -> AbstractContextManager[None]:
        return super()._as_it_was() if self.base is None else disable_adapter(self.base)


@torch.no_grad()
def merge(policy: Adaptable) -> None:
    """Add the adapter to the weights: W + scale * B A in fp32, rounded once. All weights become trainable."""
    for path, layer in _adapter_layers(policy).items():
        _add_to_weight(layer)
        policy.lm.set_submodule(path, layer.base_layer)
    del policy.lm.peft_config
    policy.requires_grad_(True)


@contextmanager
def merged_adapter(policy: Adaptable) -> Iterator[None]:
    """Inside it the adapter is part of the weights and the policy has its base model's modules, so a pass costs what
    one of the base model costs. For passes without gradient.

    Afterwards the weights have their old bytes, copied back: subtracting B A would round. The copy takes the memory of
    the adapted layers. If there is not enough, a warning says so and the adapter is not merged. Weights keep their
    addresses, which captured graphs need.
    """
    layers, kept = _adapter_layers(policy), dict[str, Tensor]()

    def restore() -> None:
        for path, base in kept.items():
            layers[path].base_layer.weight.data.copy_(base)
            policy.lm.set_submodule(path, layers[path])
        kept.clear()

    try:
        try:
            for path, layer in layers.items():
                kept[path] = layer.base_layer.weight.data.clone()
                _add_to_weight(layer)
                policy.lm.set_submodule(path, layer.base_layer)
        except torch.OutOfMemoryError:
            restore()
            warnings.warn(
                "there is not enough memory to merge the adapter for rollouts, so they are slower; "
                "set rollout.merge_adapter=false",
                stacklevel=3,
            )
        yield
    finally:
        restore()


def _add_to_weight(layer: Any) -> None:
    layer.base_layer.weight.data.copy_(merged_weight(layer))


def merged_weight(layer: Any) -> Tensor:
    """W + scale * B A of one of peft's layers, in fp32."""
    weight = layer.base_layer.weight.data
    kind = torch.promote_types(weight.dtype, torch.float32)
    a, b = (factor[ADAPTER].weight.data.to(kind) for factor in (layer.lora_A, layer.lora_B))
    return (b @ a).mul_(layer.scaling[ADAPTER]).add_(weight)


def save_adapter(policy: Adaptable, folder: str | Path, base: str) -> None:
    """Write the adapter in PEFT's format. `base` is the name or path of its base model."""
    linears, layers = linear_layers(policy), _adapter_layers(policy)
    names = {path: file_names(policy.names.own(path), linear) for path, linear in linears.items()}
    config = policy.lm.peft_config[ADAPTER]
    # Few keys: older versions of peft, which released models need, refuse keys that they do not know.
    keys = ("r", "lora_alpha", "lora_dropout", "use_rslora", "bias", "fan_in_fan_out", "modules_to_save", "task_type")
    settings = {"peft_type": "LORA", "base_model_name_or_path": base, "inference_mode": True}
    settings |= {key: getattr(config, key) for key in keys}
    for key in ("rank_pattern", "alpha_pattern"):
        settings[key] = {name: value for path, value in getattr(config, key).items() for name in names[path]}
    others = [name for path in linears.keys() - layers.keys() for name in names[path]]
    settings["target_modules"] = _pattern([name for path in layers for name in names[path]], others)
    tensors = {}
    for path, layer in layers.items():
        for letter, factor in zip("AB", (layer.lora_A, layer.lora_B), strict=True):
            weight = factor[ADAPTER].weight.detach().cpu()
            for name, part in zip(names[path], weight if weight.ndim > 2 else [weight], strict=True):
                tensors[f"{PREFIX}{name}.lora_{letter}.weight"] = part.clone()
    with replace_folder(folder) as new:
        block = getattr(policy, "causal_block", None)
        save_tensors(tensors, new / WEIGHTS, {} if block is None else {BLOCK: str(block)})
        (new / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")


def load_adapter(policy: Adaptable, folder: str | Path, trainable: bool = False) -> None:
    """Add an adapter from a folder in PEFT's format, with transformers' module names or the released model's."""
    peft, folder = _peft(), Path(folder)
    settings, linears = read_adapter_config(folder), linear_layers(policy)
    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"There is no {folder / WEIGHTS}. A pickle (.bin) can run code and is not read.")
    check_sums(folder)
    with open_safetensors(folder / WEIGHTS) as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    own = policy.names.own
    path_of = {name: path for path, linear in linears.items() for name in file_names(own(path), linear)}
    if not any(key.removeprefix(PREFIX).rpartition(".lora_")[0] in path_of for key in tensors):
        path_of = {name: path for path, linear in linears.items() for name in file_names(path, linear)}
    check_adapter_patterns(folder, settings, list(path_of))
    config = peft.LoraConfig(**settings.model_dump(exclude=set(settings.model_extra or ())))
    rank_of = pattern_values(settings.rank_pattern, settings.r)
    alpha_of = pattern_values(settings.alpha_pattern, settings.lora_alpha)
    names = [name for name in path_of if peft.tuners.tuners_utils.check_target_module_exists(config, name)]
    if not names:
        raise ValueError(f"{folder / CONFIG}: {settings.target_modules!r} matches no linear layer of this model.")
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}
    alphas: dict[str, float] = {}
    for name in names:
        linear = linears[path_of[name]]
        rank, alpha = rank_of(name), alpha_of(name)
        if alphas.setdefault(path_of[name], alpha) != alpha:
            raise ValueError(f"{folder / CONFIG}: all experts of {path_of[name]} must have the same alpha.")
        keys = [f"{PREFIX}{name}.lora_{letter}.weight" for letter in "AB"]
        for key, shape in zip(keys, ((rank, linear.in_features), (linear.out_features, rank)), strict=True):
            tensor = tensors.get(key)
            if tensor is None or tensor.shape != shape or not tensor.is_floating_point():
                what = "missing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
                raise ValueError(f"{folder / WEIGHTS}: {key} is {what}; {CONFIG} and this model need floats {shape}.")
            if not tensor.isfinite().all():
                raise ValueError(f"{folder / WEIGHTS}: {key} has values that are not finite: the file is damaged.")
        pairs.setdefault(path_of[name], []).append((tensors.pop(keys[0]), tensors.pop(keys[1])))
    for key in tensors:
        raise ValueError(f"{folder / WEIGHTS}: {key} does not belong to a linear layer that {CONFIG} adapts.")
    factors = {}
    for path, found in pairs.items():
        factors[path] = found[0]
        if isinstance(linears[path], Experts):
            if len(found) < len(linears[path].weight) or len({len(a) for a, _ in found}) > 1:
                raise ValueError(f"{folder / CONFIG}: all experts of {path} must be adapted with the same rank.")
            factors[path] = torch.stack([a for a, _ in found]), torch.stack([b for _, b in found])
    _inject(policy, factors, alphas, settings.lora_dropout, settings.use_rslora)
    if not trainable:
        policy.requires_grad_(False)


def _inject(policy: Adaptable, factors: Factors, alphas: dict[str, float], dropout: float, rslora: bool) -> None:
    """Add trainable adapters with these weights to the modules at these paths, and freeze everything else."""
    peft = _peft()
    if has_adapter(policy):
        raise ValueError("This policy already has an adapter: merge it, or load the base model again.")
    policy.requires_grad_(False)
    rank, rank_pattern = _common({path: a.shape[-2] for path, (a, _) in factors.items()})
    alpha, alpha_pattern = _common(alphas)
    shape = {"r": rank, "rank_pattern": rank_pattern, "lora_alpha": alpha, "alpha_pattern": alpha_pattern}
    linears = linear_layers(policy)
    stacks = [path for path in factors if isinstance(linears[path], Experts)]
    target = "|".join(re.escape(path) for path in factors if path not in stacks)
    config = peft.LoraConfig(**shape, target_modules=target, lora_dropout=dropout, use_rslora=rslora)
    if target:
        # low_cpu_mem_usage (meta device): peft's own weights would take memory and draw from the global random state.
        with _unknown_to_peft(policy.lm.config):
            peft.inject_adapter_in_model(config, policy.lm, ADAPTER, low_cpu_mem_usage=True)
    else:
        policy.lm.peft_config = {ADAPTER: config}
    for path in stacks:
        own_rank = factors[path][0].shape[-2]
        scaling = alphas[path] / (own_rank**0.5 if rslora else own_rank)
        policy.lm.set_submodule(path, AdaptedExperts(linears[path], scaling, dropout))
    layers = _adapter_layers(policy)
    assert layers.keys() == factors.keys(), f"peft adapted {[*layers]}, not {[*factors]}"
    for path, layer in layers.items():
        weight = layer.base_layer.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        kind = ExpertFactor if path in stacks else Factor
        for module, factor in zip((layer.lora_A, layer.lora_B), factors[path], strict=True):
            module[ADAPTER] = kind(factor.to(weight.device, dtype, copy=True))
        layer.cast_input_dtype_enabled = False  # a Factor casts its weight to the input's dtype
        layer.train(layer.base_layer.training)  # a new module starts in training mode


@contextmanager
def _unknown_to_peft(config: Any) -> Iterator[None]:
    """Inside it config.model_type is empty. For some model types with experts peft rewrites the target modules to
    fused matrices of transformers' own network, which ours does not have."""
    own = {name: value for name, value in vars(config).items() if name == "model_type"}
    vars(config)["model_type"] = ""
    try:
        yield
    finally:
        del vars(config)["model_type"]
        vars(config).update(own)


def linear_layers(policy: Adaptable) -> dict[str, Any]:
    """Every nn.Linear and every Experts by its path, adapted or not, except a head that shares its matrix with the
    embedding."""
    shared, modules, kinds = policy.lm.get_input_embeddings().weight, policy.lm.named_modules(), nn.Linear | Experts
    linears = {path.removesuffix(".base_layer"): module for path, module in modules if isinstance(module, kinds)}
    return {path: linear for path, linear in linears.items() if linear.weight is not shared}


def file_names(name: str, linear: nn.Module) -> list[str]:
    """The names of a module in files: a stack of experts has one for each expert."""
    if not isinstance(linear, Experts):
        return [name]
    return [part.removesuffix(".weight") for part in stored_parts(f"{name}.weight", linear.weight)]


def _adapter_layers(policy: Adaptable) -> dict[str, Any]:
    """peft's layers by their path."""
    kinds = _peft().tuners.lora.LoraLayer, AdaptedExperts
    layers = {path: module for path, module in policy.lm.named_modules() if isinstance(module, kinds)}
    if not has_adapter(policy):
        raise ValueError("This policy has no adapter: add one with add_adapter or load_adapter.")
    return layers


def target_paths(policy: Adaptable, targets: Targets) -> list[str]:
    """Paths of the linear layers in numbered blocks whose last name, native or own, is one of the targets.

    Routed experts have the name `experts` only, and do not belong to "all".
    """
    linears = linear_layers(policy)
    blocks = [path for path in linears if re.search(r"\.\d+\.", path)]
    last = {path: {name.rpartition(".")[2] for name in (path, policy.names.own(path))} for path in blocks}
    last |= {path: {"experts"} for path in blocks if isinstance(linears[path], Experts)}
    there = dict.fromkeys(name for path in blocks for name in sorted(last[path]))
    for target in targets if targets != "all" else ():
        if target not in there:
            raise ValueError(f"targets: {target!r} is not a linear layer of this model's blocks: {', '.join(there)}")
    chosen = set(there) - {"experts"} if targets == "all" else set(targets)
    return [path for path in blocks if last[path] & chosen]


def _common(values: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The most frequent value, and the exceptions."""
    value = Counter(values.values()).most_common(1)[0][0]
    return value, {name: other for name, other in values.items() if other != value}


def _pattern(names: Iterable[str], others: Iterable[str]) -> str | list[str]:
    """target_modules for exactly these names: a pattern over all blocks, or a list if some blocks are left out."""
    pattern = "|".join(sorted({re.sub(r"(?<=\\\.)\d+(?=\\\.)", r"\\d+", re.escape(name)) for name in names}))
    return sorted(names) if any(re.fullmatch(pattern, other) for other in others) else pattern


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ValueError(f"Adapters need peft ({error}): pip install 'unmask[lora]'") from None
    return peft
