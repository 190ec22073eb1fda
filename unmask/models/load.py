"""Models by name, by folder, or by their id on the Hugging Face hub."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unmask.core.policy import Policy, Tokenizer
from unmask.models.adapter_config import CONFIG as ADAPTER_CONFIG, base_block, base_of
from unmask.models.checkpoint import (
    CARD,
    Origin,
    StoredTensors,
    card_metadata,
    files_beside,
    load_weights,
    read_json,
    stated_dtype,
)
from unmask.models.config_file import ConfigFile
from unmask.models.decoder import Decoder, Facts
from unmask.models.encoder import Bert, MaskedLM, ModernBert
from unmask.models.families import Family
from unmask.models.known import EMBEDDED, KNOWN, check_model_name
from unmask.models.llama import Llama
from unmask.models.recognition import (
    block_length,
    check_config,
    facts_of,
    family_of,
    length_of,
    model_name,
    network_of,
    with_block,
)
from unmask.models.tiny import CharacterTokenizer, Tiny, is_tiny, load_tiny, tiny_network
from unmask.models.tokenizer import HubTokenizer, has_tokenizer, read_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RUN_CHECKPOINT = "checkpoint"
"""The folder of the weights in a run's folder."""
HUB_SECONDS = 5.0
# Neither pickles nor code are downloaded.
FETCHED = ("*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.txt", CARD)


class Released(StoredTensors, Decoder):
    """A decoder from a checkpoint."""

    def __init__(self, lm: "PreTrainedModel", facts: Facts, tokenizer: Tokenizer, origin: Origin) -> None:
        super().__init__(lm, facts, tokenizer)
        self.set_origin(origin)


Model = Tiny | Released | MaskedLM


def load_model(
    name_or_path: str | Path,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    *,
    causal_block: int | None = None,
) -> Model:
    """An embedded model, "tiny" or "tiny-two"; a folder with a checkpoint or an adapter; or a model's id on the hub.

    dtype          None: as in the checkpoint's config.json, and fp32 for the tiny model
    causal_block   the block length of block-causal attention; None: as the checkpoint states it
    """
    if str(name_or_path) in EMBEDDED:
        _check_no_block(name_or_path, causal_block)
        embedded = load_tiny(EMBEDDED[str(name_or_path)], dtype=dtype or torch.float32, device=device)
        embedded.home, embedded.card = str(name_or_path), {"license": "apache-2.0"}
        return embedded
    folder, hub = Path(name_or_path), None
    if not folder.is_dir():
        hub = str(name_or_path)
        folder = fetch_snapshot(hub)
    if (folder / ADAPTER_CONFIG).is_file():
        from unmask.models.lora import load_adapter

        block = base_block(folder) if causal_block is None else causal_block
        policy = load_model(base_of(folder), dtype, device, causal_block=block)
        load_adapter(policy, folder)
        return policy
    policy = load_checkpoint(folder, dtype, device, hub=hub, causal_block=causal_block)
    policy.home, policy.card = hub or str(folder.resolve()), card_metadata(folder)
    return policy


def load_checkpoint(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    *,
    tokenizer: Tokenizer | None = None,
    hub: str | None = None,
    causal_block: int | None = None,
) -> Model:
    """A checkpoint in a folder. `tokenizer` replaces the folder's own; `hub` is the id it was downloaded from."""
    folder = Path(folder)
    config = read_json(folder / "config.json")
    if is_tiny(config):
        _check_no_block(folder, causal_block)
        tiny = load_tiny(folder, dtype=dtype or torch.float32, device=device)
        _check(tiny, folder, device)
        return tiny
    file = ConfigFile(folder / "config.json", config)
    family, name = family_of(file), hub or model_name(folder)
    check_config(family, file, name, causal_block)
    lm, tied = network_of(family, file)
    rows: int = lm.config.vocab_size
    fast = read_tokenizer(folder) if tokenizer is None else None
    facts = facts_of(family, file, rows, fast, name, causal_block)
    if fast is not None:
        tokenizer = _hub_tokenizer(family, file, facts, fast, rows)
    assert tokenizer is not None
    shared = {name: base for name, base in family.tied.items() if tied or name.endswith(".bias")}
    dtype = dtype or stated_dtype(config, file.path)
    apart = load_weights(lm, folder, family.names, tied=shared, unused=family.unused, dtype=dtype, device=device)
    lm.config.tie_word_embeddings = tied and not apart
    if any(name.endswith(".weight") for name in apart):
        config[family.tied_field] = False
    origin = Origin(with_block(family, config, facts.causal_block), files_beside(folder), family.names)
    if hub is not None:
        origin = _from_hub(origin, hub)
    policy: Released | MaskedLM
    if family.encoder:
        policy = (Bert if family.name == "BERT" else ModernBert)(lm, facts, tokenizer, origin)
    else:
        policy = Released(lm, facts, tokenizer, origin)
    _check(policy.eval(), folder, device)
    return policy


def _check_no_block(name: str | Path, causal_block: int | None) -> None:
    if causal_block is not None:
        raise ValueError(f"causal_block: {name} is the embedded model, which attends in both directions; leave it out")


def _check(policy: Model, folder: Path, device: str | torch.device) -> None:
    try:
        check_attention(policy, device, first=int(policy.facts.shift), causal_block=policy.facts.causal_block)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


@torch.no_grad()
def check_attention(
    policy: Policy, device: str | torch.device, first: int = 0, causal_block: int | None = None
) -> None:
    """ValueError unless the logits are finite and attention is bidirectional, or block-causal with this block length.

    Three passes over one short canvas, on which every second token is MASK. It checks how the network attends, not how
    its weights were trained: the tensors of an autoregressive checkpoint do not show that. first: the first position
    with a prediction.
    """
    block = causal_block or min(8, policy.max_length)
    length = min(block if causal_block is None else 2 * block, policy.max_length)
    rows = policy.vocabulary
    tokens_L = torch.arange(length, device=device) % rows
    tokens_L[1::2] = policy.mask_id

    def logits(changed: int | None = None) -> Tensor:
        """The logits at `first`, with another token at the position `changed`."""
        canvas_L = tokens_L.clone()
        if changed is not None:
            canvas_L[changed] = (tokens_L[changed] + rows // 2) % rows
        return policy(canvas_L[None], None, torch.tensor([first], device=device))[0]

    before_V = logits()
    if not before_V.isfinite().all():
        raise ValueError("The logits of this model are not finite: its weights are damaged.")
    near_V = logits(block - 1)
    if first < block - 1 < length and torch.equal(before_V, near_V):
        raise ValueError(
            "Changing a later token does not change the logits at an earlier position: "
            "the model is causal, or its weights are damaged."
        )
    # Tokens that share an expert are multiplied together, so the other tokens of a mixture change the rounding.
    rounding = (near_V - before_V).abs().max() / 10
    if length > block and (logits(length - 1) - before_V).abs().max() > rounding:
        raise ValueError("Changing a later block changes the logits of an earlier one: the model is not block-causal.")


def _hub_tokenizer(family: Family, file: ConfigFile, facts: Facts, fast: Any, rows: int) -> HubTokenizer:
    vocabulary, listed = fast.get_vocab(), file.get("eos_token_id")
    listed = listed if isinstance(listed, list) else []
    ends = [facts.eos_id, *listed, *(vocabulary[token] for token in family.ends if token in vocabulary)]
    if facts.mask_id in ends:
        raise ValueError(f"{file.path}: the mask token {facts.mask_id} also ends a turn; correct mask_token_id.")
    folder = file.path.parent
    try:
        tokenizer = HubTokenizer(fast, facts.mask_id, frozenset(ends), family.template)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    if tokenizer.size > rows:
        raise ValueError(f"The tokenizer in {folder} has {tokenizer.size} tokens, but the model only {rows}.")
    return tokenizer


# --- without weights ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outline:
    """A model without weights, as config.json describes it: its network is on the meta device."""

    family: Family
    lm: "PreTrainedModel | Llama"
    parameters: int
    """A matrix that is both head and embedding counts once."""
    dtype: torch.dtype
    """From config.json; float32 if it has none."""
    max_length: int
    causal_block: int | None
    tokenizer: Tokenizer | None
    """None if there are no tokenizer files."""
    tied: bool = False
    """config.json says that head and embedding share one matrix."""
    adapter: Path | None = None
    """The folder of its adapter."""


def outline(name_or_path: str | Path, causal_block: int | None = None) -> Outline:
    """The same models as `load_model`, from config.json alone: nothing else is downloaded from the hub."""
    folder = EMBEDDED.get(str(name_or_path), Path(name_or_path))
    if (folder / ADAPTER_CONFIG).is_file():
        block = base_block(folder) if causal_block is None else causal_block
        return replace(outline(base_of(folder), block), adapter=folder)
    folder, name, file = located_config(name_or_path)
    family = family_of(file)
    tiny = is_tiny(file.fields)
    if tiny:
        _check_no_block(name_or_path, causal_block)
    else:
        check_config(family, file, name, causal_block)
    lm, tied = (tiny_network(file), False) if tiny else network_of(family, file)
    tokenizer: Tokenizer | None = None
    if tiny:
        tokenizer = CharacterTokenizer()
    elif has_tokenizer(folder):
        fast = read_tokenizer(folder)
        facts = facts_of(family, file, lm.config.vocab_size, fast, name, causal_block)
        tokenizer = _hub_tokenizer(family, file, facts, fast, lm.config.vocab_size)
    shared = [lm.get_parameter(name).numel() for name in family.tied if tied or name.endswith(".bias")]
    return Outline(
        family=family,
        lm=lm,
        parameters=sum(weight.numel() for weight in lm.parameters()) - sum(shared),
        dtype=stated_dtype(file.fields, file.path) or torch.float32,
        max_length=length_of(family, file),
        causal_block=None if tiny else block_length(family, file, name, causal_block).value,
        tokenizer=tokenizer,
        tied=tied,
    )


def family_name(name_or_path: str | Path) -> str:
    """The name of the family of a model that `load_model` or a run loads, from config.json alone."""
    folder = EMBEDDED.get(str(name_or_path), Path(name_or_path))
    folder = folder / RUN_CHECKPOINT if (folder / RUN_CHECKPOINT).is_dir() else folder
    if (folder / ADAPTER_CONFIG).is_file():
        return family_name(base_of(folder))
    _, _, file = located_config(folder if folder.is_dir() else name_or_path)
    return "the embedded model" if is_tiny(file.fields) else family_of(file).name


def family_name_of(policy: object) -> str:
    """The same of a policy that `load_model` returned."""
    if not isinstance(policy, StoredTensors):
        raise ValueError(f"the family of a {type(policy).__name__} is not known: name a preset")
    config = policy.origin.config
    return "the embedded model" if is_tiny(config) else family_of(ConfigFile(Path("config.json"), config)).name


def located_config(name_or_path: str | Path) -> tuple[Path, str, ConfigFile]:
    """The folder of a model, the name it is loaded by, and its config.json, which may come from the hub or be KNOWN."""
    folder = EMBEDDED.get(str(name_or_path), Path(name_or_path))
    if folder.is_dir():
        return folder, model_name(folder), ConfigFile(folder / "config.json", read_json(folder / "config.json"))
    name = str(name_or_path)
    if name in KNOWN:
        return folder, name, ConfigFile(folder / "config.json", KNOWN[name], built_in=True)
    path = fetch_snapshot(name, only="config.json")
    return folder, name, ConfigFile(path, read_json(path))


# --- the hub ------------------------------------------------------------------------------------------------


def fetch_snapshot(name: str, only: str | None = None) -> Path:
    """The folder of a model on the hub, downloaded unless it is in the cache; or the path of one of its files."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    check_model_name(name)
    try:
        if only is not None:
            return Path(hf_hub_download(name, only, local_files_only=not _is_reachable(name, only)))
        return Path(snapshot_download(name, allow_patterns=list(FETCHED), ignore_patterns=["*/*"]))
    except RepositoryNotFoundError as error:
        raise ValueError(f"There is no folder {name}, and no model {name} on the hub that you may read.") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, ConnectionError, TimeoutError) as error:
        raise ValueError(
            f"There is no folder {name}, and the hub cannot be reached to look for a model of that name. "
            "Download it on a machine with a connection and give its folder."
        ) from error


def _is_reachable(name: str, file: str) -> bool:
    """Whether the hub answers. Without this question a download without a connection is tried six times, for 30 s."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(name, file), timeout=HUB_SECONDS)
    except HfHubHTTPError:  # an answer: the download says what is wrong
        return True
    except Exception:  # the HTTP library of the hub's client has its own errors, and changes
        return False
    return True


def _from_hub(origin: Origin, hub: str) -> Origin:
    """The authors' code is not downloaded: `auto_map` gets the id of its repository, as transformers writes it."""
    files = dict(origin.files)
    if "tokenizer_config.json" in files:
        content = json.loads(files["tokenizer_config.json"])
        files["tokenizer_config.json"] = (json.dumps(_with_hub_code(content, hub), indent=2) + "\n").encode()
    return Origin(_with_hub_code(origin.config, hub), files, origin.names)


def _with_hub_code(config: dict[str, Any], hub: str) -> dict[str, Any]:
    if "auto_map" not in config:
        return config

    def with_id(value: Any) -> Any:
        if isinstance(value, list):
            return [with_id(each) for each in value]
        return value if value is None or "--" in value else f"{hub}--{value}"

    return {**config, "auto_map": {name: with_id(value) for name, value in config["auto_map"].items()}}
