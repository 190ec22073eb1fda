"""The embedded model: a character-level bidirectional Llama, small enough to be trained on a laptop.

Weights are stored in the Hugging Face layout (config.json with `is_causal` false, model.safetensors), so transformers'
`LlamaForCausalLM` also loads them.
"""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from unmask.models.checkpoint import Origin, StoredTensors, load_weights, read_json, save as save
from unmask.models.config_file import SIZES, ConfigFile
from unmask.models.decoder import Decoder, Facts
from unmask.models.known import EMBEDDED
from unmask.models.llama import Llama
from unmask.models.lora import has_adapter
from unmask.util.turns import Turns, plain_text

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

PAD, MASK, EOS = 0, 1, 2
SPECIALS = 3
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
# A middle dot and a pilcrow: outside the vocabulary and one column wide.
SHOWN_MASK, SHOWN_EOS = "\u00b7", "\u00b6"

SHIPPED = EMBEDDED["tiny"]

NETWORK = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "tie_word_embeddings": False}
SUPPORTED = {**NETWORK, "is_causal": False, "rope_scaling": None, "mask_token_id": MASK, "pad_token_id": PAD}
FIELDS = {
    **NETWORK,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": EOS,
    # Chosen for 64 channels and a hundred characters; Llama's own values, 0.02 and 10,000, train more slowly.
    "initializer_range": 0.1,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
    "is_causal": False,
    "model_type": "llama",
    "pad_token_id": PAD,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-6,
    "use_cache": True,
    "vocab_size": SPECIALS + len(CHARACTERS),
}
"""config.json of a new model, but for its sizes."""


class CharacterTokenizer:
    """One token per character: PAD, MASK and EOS, then newline and printable ASCII."""

    size = SPECIALS + len(CHARACTERS)

    def encode(self, text: str) -> list[int]:
        unknown = sorted(set(text) - set(CHARACTERS))
        if unknown:
            raise ValueError(f"The tiny model reads newline and printable ASCII only, not {unknown[0]!r}.")
        return [SPECIALS + CHARACTERS.index(character) for character in text]

    def prompt(self, prompt: str | Turns, system: str = "") -> list[int]:
        """The plain text: this model has no conversation format."""
        return self.encode(plain_text(prompt, system))

    def decode(self, ids: list[int]) -> str:
        """The text up to the first EOS; a PAD or MASK becomes a replacement character, which no correct answer has."""
        end = ids.index(EOS) if EOS in ids else len(ids)
        return "".join(CHARACTERS[token - SPECIALS] if token >= SPECIALS else "\ufffd" for token in ids[:end])

    def raw(self, ids: list[int]) -> str:
        return self.show(ids)

    def show(self, ids: list[int]) -> str:
        """A canvas, one character per position: MASK and EOS are visible, PAD is a blank."""
        shown = {PAD: " ", MASK: SHOWN_MASK, EOS: SHOWN_EOS}
        return "".join(shown[token] if token in shown else CHARACTERS[token - SPECIALS] for token in ids)


Size = Annotated[int, Field(gt=0, le=2**13)]


class TinyShape(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    width: Size = 64
    layers: Size = 4
    heads: Size = 4
    hidden: Size = 128  # of the feed-forward layer
    max_length: Size = 128


class Tiny(StoredTensors, Decoder):
    """A decoder with the character vocabulary."""

    mask_id = MASK
    eos_id = EOS
    pad_id = PAD
    tokenizer: CharacterTokenizer

    def __init__(self, lm: Llama) -> None:
        facts = Facts(mask_id=MASK, eos_id=EOS, pad_id=PAD, max_length=lm.config.max_position_embeddings)
        super().__init__(lm, facts, CharacterTokenizer())
        self.set_origin(Origin(vars(lm.config)))

    def _trunk(self, tokens_SL: Tensor, *rest: Any) -> Tensor:
        if tokens_SL.shape[1] > self.max_length:
            raise ValueError(f"This model takes at most {self.max_length} characters, not {tokens_SL.shape[1]}.")
        return super()._trunk(tokens_SL, *rest)


def tiny_policy(shape: TinyShape | None = None, seed: int = 0) -> Tiny:
    """An untrained model: the same seed gives the same weights. The global random state does not change."""
    shape = shape or TinyShape()
    if shape.width % shape.heads:
        raise ValueError(f"width must be a multiple of heads, but {shape.width} is not a multiple of {shape.heads}.")
    sizes = {
        "hidden_size": shape.width,
        "intermediate_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.width // shape.heads,
        "max_position_embeddings": shape.max_length,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Tiny(_network({**FIELDS, **sizes, "transformers_version": version("transformers")}))


def _network(fields: Mapping[str, Any]) -> Llama:
    return Llama(SimpleNamespace(**{name: fields[name] for name in sorted(fields)})).eval()


def transformers_network(policy: Tiny) -> "LlamaForCausalLM":
    """transformers' own class around the modules of a tiny model, for trainers that want it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        lm = LlamaForCausalLM(LlamaConfig.from_dict(policy.origin.config))
    lm.model.embed_tokens, lm.model.layers = policy.lm.model.embed_tokens, policy.lm.model.layers
    lm.model.norm, lm.model.rotary_emb, lm.lm_head = policy.lm.model.norm, policy.lm.model.rotary_emb, policy.lm.lm_head
    if has_adapter(policy):
        lm.peft_config = policy.lm.peft_config
    return lm.eval()


def is_tiny(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == "llama" and config.get("vocab_size") == CharacterTokenizer.size


def load_tiny(
    path: str | Path | None = None, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Tiny:
    """The shipped model, or one that `save` wrote."""
    folder = Path(path) if path is not None else SHIPPED
    config = read_json(folder / "config.json")
    if not is_tiny(config):
        raise ValueError(f"{folder} is not a tiny model, which is a llama with {CharacterTokenizer.size} tokens.")
    lm = tiny_network(ConfigFile(folder / "config.json", config))
    load_weights(lm, folder, dtype=dtype, device=device)
    return Tiny(lm)


def tiny_network(file: ConfigFile) -> Llama:
    """The network of a tiny model on the meta device, from its config.json."""
    config = file.fields
    file.only(SUPPORTED)
    rotary = file.kind("rope_parameters", dict, {"rope_theta": file.get("rope_theta", 1e4)})
    if rotary.get("rope_type", "default") != "default":
        raise ValueError(f"{file.path} sets rope_type to {rotary['rope_type']!r}; only 'default' is supported.")
    theta, heads = file.number("rope_theta", rotary.get("rope_theta")), file.size("num_attention_heads", 1)
    file.number("rms_norm_eps", config.get("rms_norm_eps", FIELDS["rms_norm_eps"]))
    sizes = {name: file.size(name, 1) for name in SIZES}
    sizes["num_key_value_heads"] = file.size("num_key_value_heads", heads)
    sizes["head_dim"] = file.size("head_dim", max(1, sizes["hidden_size"] // heads))
    rope = {"rope_parameters": {"rope_theta": theta, "rope_type": "default"}}
    with torch.device("meta"):
        return _network({**FIELDS, **config, **sizes, **rope})
