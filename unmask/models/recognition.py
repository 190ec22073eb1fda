"""What config.json says about a checkpoint: its family, its network without weights, and its facts."""

from typing import TYPE_CHECKING

import torch

from unmask.models.config_file import ConfigFile
from unmask.models.decoder import Facts
from unmask.models.families import FAMILIES, REFUSED, SUPPORTED, Family

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


def family_of(file: ConfigFile) -> Family:
    """By `architectures`, or by `model_type` if that is missing."""
    kinds = file.get("architectures") or [file.get("model_type")]
    if not isinstance(kinds, list) or not isinstance(kinds[0], str | None):
        raise ValueError(f"{file.path}: architectures must be a list of names, and model_type must be a name.")
    kind = kinds[0]
    if kind == "llada" and "num_experts" in file.fields:  # two families have this model_type
        kind = "lladamoe"
    if kind is None:
        raise ValueError(f"{file.path} has neither architectures nor model_type.")
    for family in FAMILIES:
        if kind in (*family.architectures, *family.model_types):
            return family
    for name, kinds in REFUSED.items():
        if kind in kinds:
            raise ValueError(f"{file.path} is of the {name} family, which is not supported. Supported: {SUPPORTED}.")
    raise ValueError(f"{file.path} is of the kind {kind!r}, which is not supported. Supported: {SUPPORTED}.")


def network_of(family: Family, file: ConfigFile) -> tuple["PreTrainedModel", bool]:
    """The network on the meta device, with separate head and embedding; and whether they share one matrix."""
    import transformers

    kind, fields = family.network(file)
    try:
        config = getattr(transformers, f"{kind}Config")(**fields)
        tied = bool(config.tie_word_embeddings)
        config.tie_word_embeddings = False
        config.is_causal = False
        model = getattr(transformers, f"{kind}For{'MaskedLM' if family.encoder else 'CausalLM'}")
        with torch.device("meta"):
            return model(config).eval(), tied
    except Exception as error:  # transformers raises many kinds for settings that do not fit together
        raise file.unbuilt(error) from error


# --- the facts ----------------------------------------------------------------------------------------------


def facts_of(family: Family, file: ConfigFile, rows: int, fast: "PreTrainedTokenizerFast | None", name: str) -> Facts:
    """From config.json, else from the family, else from the tokenizer.

    rows   of the embedding
    name   the name that the model is loaded by
    """
    mask = file.get("mask_token_id", family.mask_id)
    if mask is None and fast is not None:
        mask = fast.mask_token_id if fast.mask_token_id is not None else fast.get_vocab().get("<|mask|>")
    if mask is None:
        raise ValueError(
            f"{file.path.parent} has no mask token, neither mask_token_id in config.json nor in its tokenizer. "
            "An autoregressive model must be adapted first: unmask adapt."
        )
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
    for token, role in ((mask, "mask"), (end, "end"), (pad, "padding"), *((token, "end") for token in listed)):
        if type(token) is not int or not 0 <= token < rows:
            raise ValueError(f"{file.path}: the {role} token {token} is outside the vocabulary of {rows}.")
    return Facts(
        mask_id=mask,
        eos_id=end,
        pad_id=pad,
        max_length=length_of(family, file),
        shift=family.shift,
        causal_block=None if family.encoder else block_of(family, file, name),
        rotary_fp32=family.rotary_fp32 and file.get("rope_full_precision", True),
    )


def length_of(family: Family, file: ConfigFile) -> int:
    length = file.size("max_sequence_length" if file.get("max_sequence_length") else "max_position_embeddings")
    return length if family.max_length is None else min(length, family.max_length)


def block_of(family: Family, file: ConfigFile, name: str) -> int | None:
    declared = [key for key in ("causal_block", family.block_field) if key in file.fields]
    if not declared:
        if family.name == "A2D" and "bd3lm" in name.lower():
            raise ValueError(
                f'{file.path} does not have the block length of this block-causal model: add "causal_block": 32 '
                "(or the length it was trained with; null for full attention) to a copy of the folder."
            )
        return family.causal_block
    block = file.fields[declared[0]]
    if block is not None and (type(block) is not int or block < 1):
        raise ValueError(f"{file.path} sets {declared[0]} to {block!r}; it must be a number of tokens, or null.")
    return block
