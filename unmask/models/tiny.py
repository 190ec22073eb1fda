"""The embedded model: a character-level bidirectional Llama, small enough to be trained on a laptop.

The network is transformers' own `LlamaForCausalLM` with `is_causal = False`; weights are kept in the Hugging
Face layout (config.json, model.safetensors), so the same class reads them anywhere.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, ConfigDict, PositiveInt
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM

PAD, MASK, EOS = 0, 1, 2
SPECIALS = 3
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
# A middle dot and a pilcrow: outside the vocabulary and one column wide.
SHOWN_MASK, SHOWN_EOS = "\u00b7", "\u00b6"

SHIPPED = Path(__file__).parent.parent / "assets" / "tiny"


class CharacterTokenizer:
    """One token per character: newline and printable ASCII, behind PAD, MASK and EOS."""

    size = SPECIALS + len(CHARACTERS)

    def encode(self, text: str) -> list[int]:
        unknown = sorted(set(text) - set(CHARACTERS))
        if unknown:
            raise ValueError(f"The tiny model reads newline and printable ASCII only, not {unknown[0]!r}.")
        return [SPECIALS + CHARACTERS.index(character) for character in text]

    def decode(self, ids: list[int]) -> str:
        """The text up to the first EOS; a PAD or MASK in it is a replacement character, which no answer holds."""
        end = ids.index(EOS) if EOS in ids else len(ids)
        return "".join(CHARACTERS[token - SPECIALS] if token >= SPECIALS else "\ufffd" for token in ids[:end])

    def show(self, ids: list[int]) -> str:
        """A canvas as it stands, one character per position: MASK and EOS visible, PAD a blank."""
        shown = {PAD: " ", MASK: SHOWN_MASK, EOS: SHOWN_EOS}
        return "".join(shown[token] if token in shown else CHARACTERS[token - SPECIALS] for token in ids)


class TinyShape(BaseModel):
    """The size of a tiny model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    width: PositiveInt = 64
    layers: PositiveInt = 4
    heads: PositiveInt = 4
    hidden: PositiveInt = 128  # of the feed-forward layer
    max_length: PositiveInt = 128


class Tiny(nn.Module):
    """Implements Policy around a bidirectional LlamaForCausalLM with the character vocabulary."""

    mask_id = MASK
    eos_id = EOS
    pad_id = PAD

    def __init__(self, lm: "LlamaForCausalLM") -> None:
        super().__init__()
        self.lm = lm
        self.max_length: int = lm.config.max_position_embeddings
        self.tokenizer = CharacterTokenizer()

    def forward(self, tokens_SL: Tensor, attended_SL: Tensor, at_Q: Tensor) -> Tensor:
        if tokens_SL.shape[1] > self.max_length:
            raise ValueError(f"This model takes at most {self.max_length} characters, not {tokens_SL.shape[1]}.")
        place: dict[str, Tensor] = {}
        if not attended_SL.all():  # no mask at all is faster, and on a full canvas the same
            # Positions count attended tokens only, so that padding on the left moves nothing.
            position_SL = (attended_SL.cumsum(dim=1) - 1).clamp(min=0)
            place = {"attention_mask": attended_SL, "position_ids": position_SL}
        hidden_SLD = self.lm.model(input_ids=tokens_SL, use_cache=False, **place).last_hidden_state
        logits_QV = self.lm.lm_head(hidden_SLD.flatten(0, 1)[at_Q])
        return logits_QV if logits_QV.dtype == torch.float64 else logits_QV.float()


def tiny_policy(shape: TinyShape | None = None, seed: int = 0) -> Tiny:
    """An untrained model: the same seed gives the same weights, and the global random state is left alone."""
    from transformers import LlamaConfig

    shape = shape or TinyShape()
    if shape.width % shape.heads:
        raise ValueError(f"width must be a multiple of heads, but {shape.width} is not one of {shape.heads}.")
    config = LlamaConfig(
        vocab_size=CharacterTokenizer.size,
        hidden_size=shape.width,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.max_length,
        # For 64 channels and a hundred characters; with Llama's own 0.02 and 10,000 it learns more slowly.
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

    config.is_causal = False  # honoured only when it is set before the model is built
    return LlamaForCausalLM(config).eval()


def save(policy: Tiny, folder: str | Path) -> None:
    """Write config.json and model.safetensors."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    policy.lm.config.to_json_file(folder / "config.json")
    weights = {name: weight.detach().cpu().contiguous() for name, weight in policy.lm.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def load_tiny(
    path: str | Path | None = None, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Tiny:
    """The shipped model, or one that `save` wrote."""
    from safetensors.torch import load_file
    from transformers import LlamaConfig

    folder = Path(path) if path is not None else SHIPPED
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise ValueError(f"There is no {name} in {folder}; give a folder that holds a saved tiny model.")
    stated: dict[str, Any] = json.loads((folder / "config.json").read_text())
    if stated.get("model_type") != "llama" or stated.get("vocab_size") != CharacterTokenizer.size:
        raise ValueError(f"{folder} holds no tiny model: that is a llama with {CharacterTokenizer.size} tokens.")
    lm = _bidirectional(LlamaConfig.from_dict(stated))
    lm.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    return Tiny(lm).to(device=device, dtype=dtype)
