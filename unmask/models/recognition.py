"""What config.json says about a checkpoint: its family, its network without weights, and its facts.

Every fact has a source: the user, config.json, the name of the folder, the family, or the tokenizer, in this order. A
fact without a source is an error, never a guess.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from unmask.models.config_file import ConfigFile
from unmask.models.decoder import Facts
from unmask.models.families import FAMILIES, REFUSED, SUPPORTED, Family

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


BLOCK_FIELDS = ("causal_block", "block_size", "bd_size")
"""Fields of config.json with a block length: ours, that of SDAR and A2D, that of Fast-dLLM v2."""


# The releases that say their block length in their name. In another name -b64 may be a batch size.
NAMED_BLOCK = re.compile(r".*(?:sdar|trado).*-b(\d+)", re.IGNORECASE)


class Stated(NamedTuple):
    value: Any
    source: str


def model_name(folder: Path) -> str:
    """The name of the model in a folder; ORG/NAME in the hub's cache, models--ORG--NAME/snapshots/COMMIT."""
    folder = folder.resolve()
    cached = folder.parent.parent.name
    if folder.parent.name == "snapshots" and cached.startswith("models--"):
        return cached.removeprefix("models--").replace("--", "/", 1)
    return folder.name


def family_of(file: ConfigFile) -> Family:
    """By `architectures`, or by `model_type` if that is missing, and by the fields that tell relatives apart."""
    kind = kind_of(file).value
    for family in FAMILIES:
        if kind in (*family.architectures, *family.model_types):
            others = [name for other in FAMILIES if other is not family for name in other.model_types]
            if family.autoregressive and file.get("model_type") in others:
                raise ValueError(
                    f"{file.path} is of two families: architectures says {kind}, and model_type says "
                    f"{file.get('model_type')}; correct one of them."
                )
            return family
    for name, (kinds, reason) in REFUSED.items():
        if kind in kinds:
            raise ValueError(
                f"{file.path} is of the {name} family, which is not supported: {reason}. Supported: {SUPPORTED}."
            )
    raise ValueError(f"{file.path} is of the kind {kind!r}, which is not supported. Supported: {SUPPORTED}.")


def kind_of(file: ConfigFile) -> Stated:
    """The name that identifies the family."""
    kinds = file.get("architectures") or [file.get("model_type")]
    if not isinstance(kinds, list) or not isinstance(kinds[0], str | None):
        raise ValueError(f"{file.path}: architectures must be a list of names, and model_type must be a name.")
    kind, source = kinds[0], "architectures" if file.get("architectures") else "model_type"
    if kind is None:
        raise ValueError(f"{file.path} has neither architectures nor model_type.")
    if kind == "llada" and "num_experts" in file.fields:  # two families have this model_type
        return Stated("lladamoe", "model_type llada with num_experts")
    if kind in ("Dream", "DreamModel") and file.get("block_size") is not None:  # Dream has no blocks
        return Stated("DreamForCausalLM", f"{source} {kind} with block_size")
    return Stated(kind, source)


def network_of(family: Family, file: ConfigFile) -> tuple["PreTrainedModel", bool]:
    """The network on the meta device, with separate head and embedding; and whether they share one matrix."""
    kind, fields = family.network(file)

    import transformers

    try:
        config = getattr(transformers, f"{kind}Config")(**fields)
        tied = bool(config.tie_word_embeddings)
        heads = config.num_attention_heads
        if heads % getattr(config, "num_key_value_heads", heads):
            raise ValueError(f"{heads} heads cannot share {config.num_key_value_heads} key heads evenly")
        config.tie_word_embeddings = False
        config.is_causal = False
        model = getattr(transformers, f"{kind}For{'MaskedLM' if family.encoder else 'CausalLM'}")
        with torch.device("meta"):
            lm = model(config).eval()
    except Exception as error:  # transformers raises many kinds for settings that do not fit together
        raise file.unbuilt(error) from error
    if family.layers is not None:
        with torch.device("meta"):
            family.layers(lm, file)
    return lm, tied


# --- the facts ----------------------------------------------------------------------------------------------


def check_config(family: Family, file: ConfigFile, name: str, causal_block: int | None = None) -> None:
    """ValueError for what config.json alone shows to be wrong. It is called before transformers is imported, which
    takes seconds."""
    if not family.autoregressive:  # the others must say it: facts_of
        file.only({"is_causal": False})
    family.network(file)
    file.check_tokens("mask_token_id", "eos_token_id", "pad_token_id")
    block_length(family, file, name, causal_block)


def facts_of(
    family: Family,
    file: ConfigFile,
    rows: int,
    fast: "PreTrainedTokenizerFast | None",
    name: str,
    causal_block: int | None = None,
) -> Facts:
    """
    rows           of the embedding
    name           the name that the model is loaded by
    causal_block   the block length that the user gives
    """
    mask = mask_token(family, file, fast).value
    if family.autoregressive and file.fields.get("is_causal") is not False:
        raise ValueError(
            f"{file.path} does not say that this {family.name} attends in both directions. If it was trained that way, "
            'add "is_causal": false to the file. An autoregressive model must be adapted first: unmask adapt.'
        )
    end, pad = file.get("eos_token_id"), file.get("pad_token_id")
    listed = end if isinstance(end, list) else []
    end = (listed[0] if listed else None) if isinstance(end, list) else end
    if family.encoder:
        end = None  # their EOS is the separator
    if fast is not None:
        pad = fast.pad_token_id if pad is None else pad
        end = fast.eos_token_id if end is None else end
    end = pad if end is None else end
    if end is None:
        raise ValueError(f"{file.path} has no eos_token_id, and the tokenizer has no EOS token.")
    pad = end if pad is None else pad
    others = [(end, "end"), (pad, "padding"), *((token, "end") for token in listed)]
    for token, role in ((mask, "mask"), *others):
        key = {"mask": "mask_token_id", "end": "eos_token_id", "padding": "pad_token_id"}[role]
        if type(token) is not int or not 0 <= token < rows:
            raise ValueError(
                f"{file.path}: the {role} token {token} is outside the vocabulary of {rows}; set {key} in config.json."
            )
    for token, role in others:
        if token == mask:
            raise ValueError(f"{file.path}: token {mask} is both the mask token and the {role} token; correct the ids.")
    return Facts(
        mask_id=mask,
        eos_id=end,
        pad_id=pad,
        max_length=length_of(family, file),
        shift=family.shift,
        causal_block=block_length(family, file, name, causal_block).value,
        rotary_fp32=family.rotary_fp32 and file.get("rope_full_precision", True),
    )


def mask_token(family: Family, file: ConfigFile, fast: "PreTrainedTokenizerFast | None") -> Stated:
    if file.get("mask_token_id") is not None:
        return Stated(file.get("mask_token_id"), f"mask_token_id in {file.source}")
    if family.mask_id is not None:
        missing = "" if file.built_in else "; config.json has no mask_token_id"
        return Stated(family.mask_id, f"the {family.name} family{missing}")
    vocabulary = {} if fast is None else fast.get_vocab()
    for token, source in ((fast and fast.mask_token, "the tokenizer's mask token"), ("<|mask|>", "the tokenizer")):
        if token in vocabulary and vocabulary[token] != getattr(fast, "unk_token_id", None):
            return Stated(vocabulary[token], f"{source}, {token}")
    raise ValueError(
        f"{file.path.parent} has no mask token, neither mask_token_id in config.json nor in its tokenizer. "
        "An autoregressive model must be adapted first: unmask adapt."
    )


def length_of(family: Family, file: ConfigFile) -> int:
    length = file.size("max_sequence_length" if file.get("max_sequence_length") else "max_position_embeddings")
    return length if family.max_length is None else min(length, family.max_length)


def block_length(family: Family, file: ConfigFile, name: str, causal_block: int | None = None) -> Stated:
    """The block length of block-causal attention; None for full attention."""
    found = _stated_block(family, file, name, causal_block)
    longest = length_of(family, file)
    if found.value is not None and found.value > longest:
        raise ValueError(
            f"{file.path}: blocks of {found.value} tokens ({found.source}) are longer than the {longest} tokens that "
            "the model takes; correct the block length."
        )
    return found


def _stated_block(family: Family, file: ConfigFile, name: str, causal_block: int | None) -> Stated:
    if causal_block is not None:
        if not family.takes_blocks and file.get("causal_block") is None:
            raise ValueError(
                f"causal_block: {file.path} is of the {family.name} family, which attends to the whole canvas; leave "
                "it out. rollout.block sets the blocks of decoding."
            )
        return Stated(_checked_block(causal_block, "causal_block is"), "causal_block, stated by you or an adapter")
    if family.encoder:
        file.only({"causal_block": None})
    always = family.needs_block or family.causal_block is not None
    if "causal_block" in file.fields and file.get("causal_block") is None and not always:
        return Stated(None, f"causal_block in {file.source}")
    stated = {key: file.fields[key] for key in BLOCK_FIELDS if file.get(key) is not None}
    for key, block in stated.items():
        if key not in ("causal_block", family.block_field):
            raise ValueError(
                f"{file.path} sets {key} to {block!r}, but the {family.name} family "
                + (f"has its block length in {family.block_field}" if family.takes_blocks else "has no blocks")
                + "; rename or remove it in a copy of the folder."
            )
        _checked_block(block, f"{file.path} sets {key} to")
    if len(set(stated.values())) > 1:
        raise ValueError(f"{file.path} has two block lengths, {stated}; remove one of them, or set causal_block=N.")
    suffix = NAMED_BLOCK.fullmatch(name.rpartition("/")[2]) if family.needs_block else None
    for key, block in stated.items():
        if suffix is not None and int(suffix[1]) != block:
            raise ValueError(
                f"{file.path} sets {key} to {block}, but the name {name} says {int(suffix[1])}: set causal_block=N to "
                "the block length that the model was trained with, or rename the folder."
            )
        return Stated(block, f"{key} in {file.source}")
    if suffix is not None:
        return Stated(_checked_block(int(suffix[1]), f"the name {name} sets the block length to"), f"the name {name}")
    if family.needs_block or (family.name == "A2D" and "bd3lm" in name.lower()):
        raise ValueError(
            f"{file.path} does not have the block length of this block-causal model, and another one than it was "
            f'trained with gives wrong answers: set causal_block=N, or add "{family.block_field}": N to a copy of the '
            "folder. Models without a length in their name usually have 4 (SDAR, TraDo) or 32 (A2D)."
        )
    return Stated(family.causal_block, f"the {family.name} family")


def _checked_block(block: Any, what: str) -> int | None:
    if block is not None and (type(block) is not int or block < 1):
        raise ValueError(f"{what} {block!r}; it must be a number of tokens, or null.")
    return block


def with_block(family: Family, config: dict[str, Any], block: int | None) -> dict[str, Any]:
    """config.json with the block length in it, so that a copy does not need its name or the user."""
    stated = {config[key] for key in BLOCK_FIELDS if key in config} or {family.causal_block}
    if block is None or stated == {block}:
        return config
    key = "causal_block" if "causal_block" in config else family.block_field
    return {**{name: value for name, value in config.items() if name not in BLOCK_FIELDS}, key: block}
