"""Models by name, by folder, or by their id on the Hugging Face hub."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unmask.models.check import check
from unmask.models.checkpoint import Kept, Origin, files_beside, fill, read_json, stated_dtype
from unmask.models.decoder import Decoder, Facts
from unmask.models.families import Stated, facts_of, family_of, network_of
from unmask.models.masked_lm import Bert, MaskedLM, ModernBert
from unmask.models.policy import Tokenizer
from unmask.models.tiny import Tiny, is_tiny, load_tiny
from unmask.models.tokenizer import HubTokenizer, read_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# No pickles and no code: nothing that could run is even fetched.
FETCHED = ("*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.txt")


class Released(Kept, Decoder):
    """A decoder that was read from a checkpoint."""

    def __init__(self, lm: "PreTrainedModel", facts: Facts, tokenizer: Tokenizer, origin: Origin) -> None:
        super().__init__(lm, facts, tokenizer)
        self.keep(origin)


Model = Tiny | Released | MaskedLM


def load_model(name_or_path: str | Path, dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> Model:
    """The embedded model, "tiny"; a folder that holds a checkpoint or an adapter; or a model's id on the hub.

    dtype None is what the checkpoint states, and fp32 for the tiny model.
    """
    if name_or_path == "tiny":
        return load_tiny(dtype=dtype or torch.float32, device=device)
    folder, hub = Path(name_or_path), None
    if not folder.is_dir():
        hub = str(name_or_path)
        folder = _fetched(hub)
    if (folder / "adapter_config.json").is_file():
        from unmask.models.lora import base_of, load_adapter

        policy = load_model(base_of(folder), dtype, device)
        load_adapter(policy, folder)
        return policy
    return load_checkpoint(folder, dtype, device, hub=hub)


def load_checkpoint(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    *,
    tokenizer: Tokenizer | None = None,
    hub: str | None = None,
) -> Model:
    """A checkpoint in a folder. A tokenizer that is given takes the place of the folder's; hub: the id it came from."""
    folder = Path(folder)
    config = read_json(folder / "config.json")
    if is_tiny(config):
        return load_tiny(folder, dtype=dtype or torch.float32, device=device)
    stated = Stated(folder / "config.json", config)
    family = family_of(stated)
    lm, tied = network_of(family, stated)
    rows: int = lm.config.vocab_size
    fast = read_tokenizer(folder) if tokenizer is None else None
    facts = facts_of(family, stated, rows, fast, hub or folder.name)
    if fast is not None:
        tokenizer = HubTokenizer(fast, facts.mask_id, _ends(family.ends, config, facts, fast), family.template)
        if tokenizer.size > rows:
            raise ValueError(f"The tokenizer in {folder} has {tokenizer.size} tokens, the model only {rows}.")
    assert tokenizer is not None
    shared = {name: base for name, base in family.tied.items() if tied or name.endswith(".bias")}
    dtype = dtype or stated_dtype(config, stated.path)
    apart = fill(lm, folder, family.names, tied=shared, unused=family.unused, dtype=dtype, device=device)
    lm.config.tie_word_embeddings = tied and not apart
    if any(name.endswith(".weight") for name in apart):
        config[family.tied_field] = False
    origin = Origin(config, files_beside(folder), family.names)
    if hub is not None:
        origin = _from_hub(origin, hub)
    policy: Released | MaskedLM
    if family.encoder:
        policy = (Bert if family.name == "BERT" else ModernBert)(lm, facts, tokenizer, origin)
    else:
        policy = Released(lm, facts, tokenizer, origin)
    try:
        check(policy, device, first=int(facts.shift), causal_block=facts.causal_block)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    return policy.eval()


def _ends(called: tuple[str, ...], config: Mapping[str, Any], facts: Facts, fast: Any) -> frozenset[int]:
    vocabulary, stated = fast.get_vocab(), config.get("eos_token_id")
    several = stated if isinstance(stated, list) else []
    return frozenset([facts.eos_id, *several, *(vocabulary[token] for token in called if token in vocabulary)])


# --- the hub ------------------------------------------------------------------------------------------------


def _fetched(name: str) -> Path:
    """The folder of a model on the hub, fetched unless it is there already."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise ValueError(
            f'There is no model {name!r}: give "tiny", a folder that holds a config.json, or an id such as '
            "GSAI-ML/LLaDA-8B-Instruct."
        )
    try:
        return Path(snapshot_download(name, allow_patterns=list(FETCHED), ignore_patterns=["*/*"]))
    except RepositoryNotFoundError as error:
        raise ValueError(f"There is no folder {name}, and no such model on the hub that you may read.") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, ConnectionError, TimeoutError) as error:
        raise ValueError(
            f"There is no folder {name}, and the hub cannot be reached for a model of that name. "
            "Download it where there is a connection and give its folder."
        ) from error


def _from_hub(origin: Origin, hub: str) -> Origin:
    """The authors' code is not fetched, so what names it has to say where it is, as transformers' own files do."""
    files = dict(origin.files)
    if "tokenizer_config.json" in files:
        content = json.loads(files["tokenizer_config.json"])
        files["tokenizer_config.json"] = (json.dumps(_located(content, hub), indent=2) + "\n").encode()
    return Origin(_located(origin.config, hub), files, origin.names)


def _located(config: dict[str, Any], hub: str) -> dict[str, Any]:
    if "auto_map" not in config:
        return config

    def at(value: Any) -> Any:
        if isinstance(value, list):
            return [at(each) for each in value]
        return value if value is None or "--" in value else f"{hub}--{value}"

    return {**config, "auto_map": {name: at(value) for name, value in config["auto_map"].items()}}
