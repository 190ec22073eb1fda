"""The configuration of an adapter in PEFT's format: what is supported, its base model and its patterns."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, PositiveInt, ValidationError

from unmask.models.checkpoint import open_safetensors, read_json
from unmask.models.trial import check_patterns, is_plain

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
V = TypeVar("V")
BLOCK = "causal_block"  # in the metadata of WEIGHTS, because peft refuses unknown keys in CONFIG


class AdapterConfig(BaseModel):
    """The fields of adapter_config.json that are supported."""

    model_config = ConfigDict(extra="allow", frozen=True)
    peft_type: Literal["LORA"]
    base_model_name_or_path: str | None = None
    r: PositiveInt
    lora_alpha: FiniteFloat
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    use_rslora: bool = False
    rank_pattern: dict[str, PositiveInt] = {}
    alpha_pattern: dict[str, FiniteFloat] = {}
    target_modules: list[str] | str
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    init_lora_weights: bool | Literal["gaussian", "eva", "orthogonal"] = True  # others change the base's weights


# No effect on a trained adapter. Any other key that is set is refused: it may be a variant that is not supported.
INERT = {"auto_mapping", "revision", "task_type", "inference_mode", "peft_version", "megatron_core"}
INERT |= {"qalora_group_size", "eva_config", "runtime_config"}


def read_adapter_config(folder: Path) -> AdapterConfig:
    file = folder / CONFIG
    try:
        settings = AdapterConfig.model_validate(read_json(file))
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{file}: {first['loc'][0]}: {first['msg']}, got {first['input']!r}.") from None
    for key, value in (settings.model_extra or {}).items():
        if key not in INERT and value not in (None, False, "none", [], {}):
            raise ValueError(f"{file}: {key} is {value!r}, but only plain LoRA on linear layers is supported.")
    return settings


def base_of(folder: str | Path) -> str:
    """The name or path of an adapter's base model."""
    base = read_adapter_config(Path(folder)).base_model_name_or_path
    if not base:
        raise ValueError(f"{Path(folder) / CONFIG} does not name its base model (base_model_name_or_path).")
    if (Path(base) / CONFIG).is_file():
        raise ValueError(f"{Path(folder) / CONFIG}: its base model is an adapter; merge that adapter first.")
    return base


def base_block(folder: str | Path) -> int | None:
    """The block length of block-causal attention that an adapter was trained with, if its file states one."""
    if not (Path(folder) / WEIGHTS).is_file():
        return None
    with open_safetensors(Path(folder) / WEIGHTS) as file:
        stated = (file.metadata() or {}).get(BLOCK)
    if stated is None:
        return None
    if not re.fullmatch(r"[1-9][0-9]{0,8}", stated):
        raise ValueError(f"{Path(folder) / WEIGHTS} sets {BLOCK} to {stated!r}; it must be a number of tokens.")
    return int(stated)


def pattern_values(patterns: Mapping[str, V], default: V) -> Callable[[str], V]:
    """The value of a module by its name: that of the first pattern that matches an end of the name, as in peft.

    Patterns that are names are looked up, because a mixture of experts can have thousands of them.
    """
    order = {pattern: number for number, pattern in enumerate(patterns)}
    others = {pattern: re.compile(rf"(.*\.)?({pattern})$") for pattern in patterns if not is_plain(pattern)}

    def value(name: str) -> V:
        parts = name.split(".")
        ends = [".".join(parts[start:]) for start in range(len(parts))]
        matching = [end for end in ends if end in order and end not in others]
        matching += [pattern for pattern, compiled in others.items() if compiled.match(name)]
        return patterns[min(matching, key=lambda pattern: order[pattern])] if matching else default

    return value


def check_adapter_patterns(folder: Path, settings: AdapterConfig, names: Sequence[str]) -> None:
    """ValueError for a regular expression that is invalid or takes for ever on one of these names."""
    fields = [settings.target_modules, settings.exclude_modules]
    layers = settings.layers_pattern or []
    patterns = [field for field in fields if isinstance(field, str)] + [*settings.rank_pattern, *settings.alpha_pattern]
    try:
        check_patterns([*patterns, *([layers] if isinstance(layers, str) else layers)], names)
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from None
