"""Turns an autoregressive checkpoint into the start of a masked diffusion model: same weights, bidirectional attention.

The result is a checkpoint with a MASK token and `is_causal` false. Its weights are not trained for either yet:
`unmask adapt` trains it next, with `unmask.sft.finetune`.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from unmask.models.checkpoint import Origin, card_metadata, files_beside, load_weights, read_json, save
from unmask.models.config_file import ConfigFile
from unmask.models.families import Family
from unmask.models.known import EMBEDDED
from unmask.models.load import Released, fetch_snapshot
from unmask.models.recognition import facts_of, family_of, length_of, model_name, network_of
from unmask.models.tiny import is_tiny
from unmask.models.tokenizer import HubTokenizer, read_tokenizer
from unmask.sft.fetch import PACKAGES, fetch_once

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

MASK = "<|mask|>"
ADAPTED = "adapted.json"
"""In the folder of an adapted model: the model it was made from, and what was changed."""
ALREADY = "is already a masked diffusion model: train it further with unmask sft"
EVEN = 64
"""The embedding is extended to a multiple of this number of rows: matrices of odd sizes are slow."""


def source_folder(name: str) -> Path:
    """The folder of a checkpoint: a name that `unmask fetch` knows, a path, or an id on the hub."""
    if name in EMBEDDED or (Path(name) / "checkpoint").is_dir():  # the folder of a run
        raise ValueError(f"{name} {ALREADY}")
    if name in PACKAGES:
        return fetch_once(name)
    return Path(name) if Path(name).is_dir() else fetch_snapshot(name)


def base_metadata(name: str, source: Path) -> dict[str, Any]:
    """The id on the hub and the license of the model of this name in this folder, as far as they are known."""
    if name in PACKAGES:
        return dict(PACKAGES[name].card)
    card = card_metadata(source)
    known: dict[str, Any] = {key: value for key, value in card.items() if key in ("base_model", "license")}
    return known if Path(name).is_dir() else {**known, "base_model": name}


def adapt(source: Path, folder: Path, mask_token: str | None = None, block: int | None = None) -> dict[str, Any]:
    """Write the checkpoint in `source` with bidirectional attention and a MASK token; returns what was done.

    mask_token   an unused token of the tokenizer that becomes MASK; None: its mask token, or a new one
    block        attention is block-causal, bidirectional in blocks of this length; None: full
    """
    config = read_json(source / "config.json")
    file = ConfigFile(source / "config.json", config)
    family = family_of(file)
    if is_tiny(config) or not family.autoregressive or config.get("is_causal") is False:
        raise ValueError(f"{source} {ALREADY}")
    if block is not None and block > (longest := length_of(family, file)):
        raise ValueError(f"--block {block}: the model takes {longest} tokens; choose a smaller block")
    fast = read_tokenizer(source)
    mask_id, is_new = _ensure_mask(fast, config, mask_token)
    lm, tied = network_of(family, file)
    shared = {name: base for name, base in family.tied.items() if tied}
    apart = load_weights(lm, source, family.names, tied=shared)
    rows = _add_rows(lm, mask_id, tied=tied and not apart)
    if is_new:  # a new token starts as the mean of the trained ones
        weight_VD = lm.model.embed_tokens.weight.data
        weight_VD[mask_id] = weight_VD[: min(len(fast) - 1, rows)].float().mean(0).to(weight_VD.dtype)
    config = {**config, "is_causal": False, "mask_token_id": mask_id, "vocab_size": rows}
    if block is not None:
        config["causal_block"] = block
    if apart:
        config[family.tied_field] = False
    save(_released_model(lm, family, config, source, fast), folder)
    done = {"mask_token": fast.mask_token, "mask_id": mask_id, "new": is_new, "rows": rows}
    return done if block is None else {**done, "block": block}


def _ensure_mask(fast: "PreTrainedTokenizerFast", config: dict[str, Any], mask_token: str | None) -> tuple[int, bool]:
    """Give the tokenizer a MASK token if it has none; returns its id, and whether the model has to learn it."""
    if mask_token is not None:
        if mask_token not in fast.get_vocab():
            raise ValueError(f"mask token: the tokenizer has no token {mask_token!r}; leave it out to add a new one")
        fast.add_special_tokens({"mask_token": mask_token})
        return fast.get_vocab()[mask_token], True
    known = fast.get_vocab().get(MASK) if fast.mask_token_id is None else fast.mask_token_id
    if config.get("mask_token_id") is not None or known is not None:
        return config.get("mask_token_id", known), False
    fast.add_special_tokens({"mask_token": MASK})
    return fast.get_vocab()[MASK], True


def _add_rows(lm: "PreTrainedModel", token: int, tied: bool) -> int:
    """Extend embedding and head to have a row for the token; returns their number of rows."""
    rows: int = lm.config.vocab_size
    if token < rows:
        return rows
    rows = -(-(token + 1) // EVEN) * EVEN
    for module in (lm.model.embed_tokens, lm.lm_head):
        old_VD = module.weight.detach()
        more_VD = old_VD.float().mean(0).to(old_VD.dtype).expand(rows - len(old_VD), -1)
        module.weight = nn.Parameter(torch.cat([old_VD, more_VD]))
    if tied:
        lm.lm_head.weight = lm.model.embed_tokens.weight
    lm.config.vocab_size = rows
    return rows


def _released_model(
    lm: "PreTrainedModel", family: Family, config: dict[str, Any], source: Path, fast: "PreTrainedTokenizerFast"
) -> Released:
    with TemporaryDirectory() as aside:
        fast.save_pretrained(aside)
        files = {**files_beside(source), **files_beside(Path(aside))}
    file = ConfigFile(source / "config.json", config)
    facts = facts_of(family, file, config["vocab_size"], fast, model_name(source))
    tokenizer = HubTokenizer(fast, facts.mask_id, frozenset([facts.eos_id]), family.template)
    return Released(lm, facts, tokenizer, Origin(config, files, family.names))
