"""The embedded model: a character-level bidirectional Llama, small enough to be trained on a laptop.

The network is transformers' `LlamaForCausalLM`; weights are stored in the Hugging Face format (config.json with
`is_causal` false, model.safetensors).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from unmask.models.checkpoint import Origin, StoredTensors, load_weights, read_json, save as save
from unmask.models.config_file import SIZES, ConfigFile
from unmask.models.decoder import Decoder, Facts

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM

PAD, MASK, EOS = 0, 1, 2
SPECIALS = 3
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
# A middle dot and a pilcrow: outside the vocabulary and one column wide.
SHOWN_MASK, SHOWN_EOS = "\u00b7", "\u00b6"

SHIPPED = Path(__file__).parent / "assets" / "tiny"


class CharacterTokenizer:
    """One token per character: PAD, MASK and EOS, then newline and printable ASCII."""

    size = SPECIALS + len(CHARACTERS)

    def encode(self, text: str) -> list[int]:
        unknown = sorted(set(text) - set(CHARACTERS))
        if unknown:
            raise ValueError(f"The tiny model reads newline and printable ASCII only, not {unknown[0]!r}.")
        return [SPECIALS + CHARACTERS.index(character) for character in text]

    def prompt(self, text: str, system: str = "") -> list[int]:
        """The text, after the system prompt if there is one: this model has no chat turns."""
        return self.encode(f"{system}\n\n{text}" if system else text)

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

    def __init__(self, lm: "LlamaForCausalLM") -> None:
        facts = Facts(mask_id=MASK, eos_id=EOS, pad_id=PAD, max_length=lm.config.max_position_embeddings)
        super().__init__(lm, facts, CharacterTokenizer())
        self.set_origin(Origin(json.loads(lm.config.to_json_string())))

    def _trunk(self, tokens_SL: Tensor, *rest: Any) -> Tensor:
        if tokens_SL.shape[1] > self.max_length:
            raise ValueError(f"This model takes at most {self.max_length} characters, not {tokens_SL.shape[1]}.")
        return super()._trunk(tokens_SL, *rest)


def tiny_policy(shape: TinyShape | None = None, seed: int = 0) -> Tiny:
    """An untrained model: the same seed gives the same weights. The global random state does not change."""
    from transformers import LlamaConfig

    shape = shape or TinyShape()
    if shape.width % shape.heads:
        raise ValueError(f"width must be a multiple of heads, but {shape.width} is not a multiple of {shape.heads}.")
    config = LlamaConfig(
        vocab_size=CharacterTokenizer.size,
        hidden_size=shape.width,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.max_length,
        # Chosen for 64 channels and a hundred characters; Llama's own values, 0.02 and 10,000, train more slowly.
        initializer_range=0.1,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=EOS,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Tiny(_bidirectional(config))


def _bidirectional(config: "LlamaConfig") -> "LlamaForCausalLM":
    from transformers import LlamaForCausalLM

    config.is_causal = False  # works only if it is set before the model is built
    return LlamaForCausalLM(config).eval()


def is_tiny(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == "llama" and config.get("vocab_size") == CharacterTokenizer.size


def load_tiny(
    path: str | Path | None = None, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Tiny:
    """The shipped model, or one that `save` wrote."""
    from transformers import LlamaConfig

    folder = Path(path) if path is not None else SHIPPED
    config_data = read_json(folder / "config.json")
    if not is_tiny(config_data):
        raise ValueError(f"{folder} is not a tiny model, which is a llama with {CharacterTokenizer.size} tokens.")
    file = ConfigFile(folder / "config.json", config_data)
    for name in SIZES:
        file.size(name, 1)
    try:
        with torch.device("meta"):
            lm = _bidirectional(LlamaConfig.from_dict(config_data))
    except Exception as error:  # transformers raises many kinds for settings that do not fit together
        raise file.unbuilt(error) from error
    load_weights(lm, folder, dtype=dtype, device=device)
    return Tiny(lm)
