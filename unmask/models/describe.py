"""What is recognised in a checkpoint, and why: each fact with its source. No weights are loaded."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from unmask.models.adapter_config import CONFIG, base_block, base_of, read_adapter_config
from unmask.models.checkpoint import INDEX, WEIGHTS, tensor_places, weight_files
from unmask.models.config_file import ConfigFile
from unmask.models.experts import Mixture
from unmask.models.load import Outline, located_config, outline
from unmask.models.recognition import block_length, facts_of, kind_of, length_of, mask_token
from unmask.models.tiny import is_tiny
from unmask.models.tokenizer import has_tokenizer, read_tokenizer


class DescribedFact(NamedTuple):
    what: str
    value: str
    source: str


def describe_model(name_or_path: str | Path, causal_block: int | None = None) -> list[DescribedFact]:
    """The facts of a model that `load_model` loads; ValueError with the reason if it refuses the model."""
    model = outline(name_or_path, causal_block)
    if model.adapter is not None:
        base, rank = base_of(model.adapter), read_adapter_config(model.adapter).r
        adapter = DescribedFact("adapter", f"rank {rank} on {base}", CONFIG)
        return [adapter, *describe_model(base, base_block(model.adapter) if causal_block is None else causal_block)]
    folder, name, file = located_config(name_or_path)
    kind, config = kind_of(file), model.lm.config
    family = "the embedded model" if is_tiny(file.fields) else model.family.name
    recognised_by = f"the name {name}" if file.built_in else f"{kind.source} in config.json: {kind.value}"
    sizes = f"{config.num_hidden_layers} layers of {config.hidden_size}, {model.parameters:,} weights"
    facts = [
        DescribedFact("family", family, recognised_by),
        DescribedFact("network", f"{type(model.lm).__name__}, {sizes}", file.source),
    ]
    if is_tiny(file.fields):
        return facts
    facts += _experts(model, file)
    if file.built_in:
        facts.insert(0, DescribedFact("config.json", "not read; built-in sizes", "the name of a well-known model"))
    facts += _tokens(model, folder, file)
    if not model.family.encoder:
        block, source = block_length(model.family, file, name, causal_block)
        facts.append(
            DescribedFact("attention", "full" if block is None else f"block-causal, blocks of {block}", source)
        )
        shift = "i - 1" if model.family.shift else "i"
        facts.append(DescribedFact("shift", f"token i is predicted at {shift}", f"the {model.family.name} family"))
        facts += [] if file.built_in else [_rotary(model, file)]
        facts.append(_head(model, folder, file))
    if model.family.name == "LLaDA2":
        facts.append(DescribedFact("editing", "off: a token that is written stays (LLaDA2.1 can edit)", "this package"))
    more = length_of(replace(model.family, max_length=None), file) > model.max_length
    limit = f"the family; {file.source} has more" if more else file.source
    return [*facts, DescribedFact("length", f"{model.max_length} tokens", limit)]


def _experts(model: Outline, file: ConfigFile) -> list[DescribedFact]:
    mixtures = [module for module in model.lm.modules() if isinstance(module, Mixture)]
    if not mixtures:
        return []
    first = mixtures[0]
    shared = ", and shared ones" if first.shared_experts is not None else ""
    layers = f"in {len(mixtures)} of {model.lm.config.num_hidden_layers} layers"
    chosen = f"{first.experts.experts}, {first.gate.chosen} for each token{shared}, {layers}"
    return [DescribedFact("experts", chosen, file.source)]


def _tokens(model: Outline, folder: Path, file: ConfigFile) -> Iterator[DescribedFact]:
    fast = read_tokenizer(folder) if has_tokenizer(folder) else None
    if fast is None and model.family.mask_id is None and file.get("mask_token_id") is None:
        yield DescribedFact("mask token", "the tokenizer's", "config.json has no mask_token_id; no tokenizer is here")
        return
    mask = mask_token(model.family, file, fast)
    yield DescribedFact("mask token", str(mask.value), mask.source)
    stated = file.get("eos_token_id") is not None and not model.family.encoder
    if stated or fast is not None:
        facts = facts_of(model.family, file, model.lm.config.vocab_size, fast, "", model.causal_block)
        source = file.source if stated else "the tokenizer"
        yield DescribedFact("end, padding", f"{facts.eos_id}, {facts.pad_id}", source)


def _rotary(model: Outline, file: ConfigFile) -> DescribedFact:
    settings = dict(model.lm.config.rope_parameters)
    base, kind = settings.pop("rope_theta"), settings.pop("rope_type")
    wide = model.family.rotary_fp32 and file.get("rope_full_precision", True)
    more = "".join(f", {name} {value}" for name, value in settings.items() if value is not None)
    precision = "in fp32" if wide else "in the dtype of the activations"
    return DescribedFact("rotary", f"theta {base:g}, {kind}{more}, {precision}", "config.json; precision: the family")


def _head(model: Outline, folder: Path, file: ConfigFile) -> DescribedFact:
    """ValueError if tensors are missing, unexpected or of another shape, as in a load. Reads the headers only."""
    field = model.family.tied_field
    source = f"{field} in {file.source}" if field in file.fields else f"config.json has no {field}"
    stored = {}
    if (folder / WEIGHTS).is_file() or (folder / INDEX).is_file():
        tied, unused = model.family.tied if model.tied else {}, model.family.unused
        stored = tensor_places(model.lm, weight_files(folder), model.family.names, tied, unused)
    if not model.tied:
        return DescribedFact("head", "its own matrix", source)
    value = "shares the matrix of the embedding"
    if "lm_head.weight" in stored:
        value += f" if the stored {stored['lm_head.weight'][1]} is equal to it"
    return DescribedFact("head", value, source)
