"""Small checkpoints in the layouts that are released, tokenizers included, and what their networks compute."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from unmask.core.policy import Policy
from unmask.models import load_checkpoint
from unmask.models.tiny import CharacterTokenizer

# --- a straight-line pass, without transformers -------------------------------------------------------------


def reference(
    weights: dict[str, Tensor],
    own: bool,
    tokens: list[int],
    heads: int,
    kv: int,
    eps: float,
    theta: float,
    block: int = 0,
) -> Tensor:
    """Logits (L, V) of one row, from the tensors of the file under their names there; `own`: LLaDA's names."""
    weights = {name: weight.double() for name, weight in weights.items()}
    rename = {"self_attn.o_proj": "attn_out", "mlp.gate_proj": "ff_proj", "mlp.down_proj": "ff_out"}
    rename |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ff_norm"}

    def linear(x: Tensor, layer: int, name: str) -> Tensor:
        key = f"model.transformer.blocks.{layer}.{rename.get(name, name.rpartition('.')[2])}" if own else ""
        key = key or f"model.layers.{layer}.{name}"
        return x @ weights[f"{key}.weight"].T + weights.get(f"{key}.bias", torch.zeros(()))

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight

    def norm(x: Tensor, layer: int, name: str) -> Tensor:
        key = f"model.transformer.blocks.{layer}.{rename[name]}" if own else f"model.layers.{layer}.{name}"
        return normed(x, weights[f"{key}.weight"])

    def rotated(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angle = torch.arange(len(x))[:, None] * theta ** (-torch.arange(half).double() / half)
        a, b = x[:, :half], x[:, half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    embedding = weights["model.transformer.wte.weight" if own else "model.embed_tokens.weight"]
    final = weights["model.transformer.ln_f.weight" if own else "model.norm.weight"]
    head = weights.get("model.transformer.ff_out.weight" if own else "lm_head.weight", embedding)
    place = torch.arange(len(tokens))
    seen = place[None, :] // block <= place[:, None] // block if block else torch.ones(len(tokens), len(tokens)) > 0
    layers = 1 + max(int(key.split(".")[3 if own else 2]) for key in weights if ".blocks." in key or ".layers." in key)
    x = embedding[tokens]
    for layer in range(layers):
        y = norm(x, layer, "input_layernorm")
        q, k, v = (linear(y, layer, f"self_attn.{letter}_proj") for letter in "qkv")
        size, outputs = q.shape[-1] // heads, []
        for h in range(heads):
            g = h // (heads // kv)
            one, key = q[:, h * size : (h + 1) * size], k[:, g * size : (g + 1) * size]
            if f"model.layers.{layer}.self_attn.q_norm.weight" in weights:
                one = normed(one, weights[f"model.layers.{layer}.self_attn.q_norm.weight"])
                key = normed(key, weights[f"model.layers.{layer}.self_attn.k_norm.weight"])
            score = rotated(one) @ rotated(key).T / math.sqrt(size)
            outputs.append(score.masked_fill(~seen, -torch.inf).softmax(-1) @ v[:, g * size : (g + 1) * size])
        x = x + linear(torch.cat(outputs, -1), layer, "self_attn.o_proj")
        y = norm(x, layer, "post_attention_layernorm")
        gate, up = linear(y, layer, "mlp.gate_proj"), linear(y, layer, "mlp.up_proj")
        x = x + linear(gate / (1 + torch.exp(-gate)) * up, layer, "mlp.down_proj")
    return normed(x, final) @ head.T


# --- checkpoints in the released layouts --------------------------------------------------------------------

LLADA_CONFIG = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "auto_map": {"AutoConfig": "configuration_llada.LLaDAConfig"},
    "d_model": 48,
    "n_layers": 3,
    "n_heads": 4,
    "n_kv_heads": 4,
    "multi_query_attention": None,
    "mlp_hidden_size": 80,
    "mlp_ratio": 4,
    "vocab_size": 128,
    "embedding_size": 128,
    "max_sequence_length": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "rope_full_precision": True,
    "mask_token_id": 125,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "block_type": "llama",
    "activation_type": "silu",
    "layer_norm_type": "rms",
    "rope": True,
    "weight_tying": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "torch_dtype": "float32",
}
QWEN_CONFIG = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "mask_token_id": 126,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "torch_dtype": "float32",
}
DREAM = {"architectures": ["DreamModel"], "model_type": "Dream", "use_sliding_window": False, "max_window_layers": 1}
SDAR = {"architectures": ["SDARForCausalLM"], "model_type": "sdar", "num_attention_heads": 4, "head_dim": 16}
SDAR |= {"block_size": 4}
ILLADA = {"architectures": ["ILLaDAForCausalLM"], "model_type": "illada", "mask_token_id": "absent", "pad_token_id": 1}
ILLADA |= {"layer_norm_eps": None, "resid_pdrop": 0.0, "tie_word_embeddings": True}
FAST = {"architectures": ["Fast_dLLM_QwenForCausalLM"], "model_type": "Fast_dLLM_Qwen", "bd_size": 4}
FAST |= {"tie_word_embeddings": True}
A2D = {"architectures": ["A2DQwen3LMHeadModel"], "model_type": "a2d-qwen3", "num_attention_heads": 4, "head_dim": 16}


def random_weights(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Where nothing is neutral: no zero bias, no norm of ones."""
    rng = torch.Generator().manual_seed(seed)

    def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1 and name.endswith("weight"):
            return 0.5 + torch.rand(shape, generator=rng)
        return torch.randn(shape, generator=rng) * (0.3 if len(shape) == 1 else 0.25)

    return {name: drawn(name, shape) for name, shape in shapes.items()}


def llada_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, heads = config["d_model"], config["n_heads"]
    narrow = width // heads * (config["n_kv_heads"] or (1 if config["multi_query_attention"] else heads))
    inner, rows = config["mlp_hidden_size"] or config["mlp_ratio"] * width, config["embedding_size"]
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (rows, width), "ln_f.weight": (width,)}
    if not config["weight_tying"]:
        shapes["ff_out.weight"] = (rows, width)
    for i in range(config["n_layers"]):
        out = {"q_proj": width, "k_proj": narrow, "v_proj": narrow}
        if config["include_qkv_bias"]:
            shapes |= {f"blocks.{i}.{name}.bias": (size,) for name, size in out.items()}
        out |= {"attn_out": width, "ff_proj": inner, "up_proj": inner}
        shapes |= {f"blocks.{i}.{name}.weight": (size, width) for name, size in out.items()}
        shapes |= {f"blocks.{i}.ff_out.weight": (width, inner)}
        shapes |= {f"blocks.{i}.{name}.weight": (width,) for name in ("attn_norm", "ff_norm")}
    return {f"model.transformer.{name}": shape for name, shape in shapes.items()}


def qwen_shapes(config: dict[str, Any], bias: bool, norms: bool, head: bool = True) -> dict[str, tuple[int, ...]]:
    width, inner, rows = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    size = config.get("head_dim", width // config["num_attention_heads"])
    wide, narrow = size * config["num_attention_heads"], size * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (rows, width), "model.norm.weight": (width,)}
    if head:
        shapes["lm_head.weight"] = (rows, width)
    for i in range(config["num_hidden_layers"]):
        for letter, out in zip("qkv", (wide, narrow, narrow), strict=True):
            shapes[f"model.layers.{i}.self_attn.{letter}_proj.weight"] = (out, width)
            if bias:
                shapes[f"model.layers.{i}.self_attn.{letter}_proj.bias"] = (out,)
            if norms and letter != "v":
                shapes[f"model.layers.{i}.self_attn.{letter}_norm.weight"] = (size,)
        shapes[f"model.layers.{i}.self_attn.o_proj.weight"] = (width, wide)
        shapes |= {f"model.layers.{i}.mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
        shapes[f"model.layers.{i}.mlp.down_proj.weight"] = (width, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{i}.{name}.weight"] = (width,)
    return shapes


def write(folder: Path, config: dict[str, Any], weights: dict[str, Tensor], shards: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    place = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(weights)}
    for file in set(place.values()):
        save_file({name: weights[name] for name in weights if place[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    return folder


def llada(folder: Path, shards: int = 1, **changes: Any) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
    config = {**LLADA_CONFIG, **changes}
    weights = random_weights(llada_shapes(config))
    return write(folder, config, weights, shards), weights, config


def qwen(folder: Path, kind: dict[str, Any], shards: int = 1, head: bool = True, **changes: Any):
    config = {**QWEN_CONFIG, **kind, **changes}
    config = {name: value for name, value in config.items() if value != "absent"}
    bias = "qwen2" in config["model_type"] or kind in (DREAM, FAST)
    norms = "qwen3" in config["model_type"] or kind is SDAR
    weights = random_weights(qwen_shapes(config, bias, norms, head))
    return write(folder, config, weights, shards), weights, config


def loaded(folder: Path, **settings: Any):
    """These vocabularies belong to no text."""
    return load_checkpoint(folder, tokenizer=CharacterTokenizer(), **settings)


@torch.no_grad()
def logits(policy: Policy, tokens: list[int]) -> Tensor:
    return policy(torch.tensor([tokens]), None, torch.arange(len(tokens)))


TOKENS = torch.randint(0, 128, (13,), generator=torch.Generator().manual_seed(1)).tolist()
TOKENS[4] = TOKENS[7] = TOKENS[12] = 125

# --- tokenizers ---------------------------------------------------------------------------------------------

LLADA_SPECIALS = ["<|startoftext|>", "<|endoftext|>", "<|mdm_mask|>", "<|start_header_id|>", "<|end_header_id|>"]
LLADA_SPECIALS += ["<|eot_id|>"]
QWEN_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|beginoftext|>", "<|mask|>"]
LLADA_TEXT = {"vocab_size": 272, "embedding_size": 272, "mask_token_id": 258, "eos_token_id": 257, "pad_token_id": 257}
QWEN_TEXT = {"vocab_size": 272, "mask_token_id": 260, "eos_token_id": 256, "pad_token_id": 256}
LLADA_TEMPLATE = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)
QWEN_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)


def with_tokenizer(folder: Path, specials: list[str], fast: bool = True, **config: Any) -> Path:
    """One token for each byte, then these; as tokenizer.json, or as vocab.json and merges.txt."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if fast:
        tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in specials])
        tokenizer.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    else:
        tokenizer.model.save(str(folder))
        flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
        config["added_tokens_decoder"] = {str(256 + i): {"content": p, **flags} for i, p in enumerate(specials)}
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False, **config}))
    return folder


# --- encoders -----------------------------------------------------------------------------------------------

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "a",
    "two",
    "and",
    "##ish",
    "four",
    "[",
    "]",
    "/",
    "answer",
    "question",
]


def encoder(folder: Path, lm: Any, **changes: Any) -> Path:
    """As transformers saves it, with weights where nothing is neutral."""
    with torch.no_grad():
        for name, weight in random_weights({n: tuple(w.shape) for n, w in lm.named_parameters()}).items():
            lm.get_parameter(name).copy_(weight)
    lm.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))
    return folder


SMALL = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "pad_token_id": 0}


def bert(folder: Path, **changes: Any) -> Path:
    from transformers import BertConfig, BertForMaskedLM

    return encoder(
        folder, BertForMaskedLM(BertConfig(**SMALL, num_hidden_layers=2, max_position_embeddings=20)), **changes
    )


def modernbert(folder: Path, vocab_size: int = 32) -> Path:
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 3)
    sizes = {**SMALL, "vocab_size": vocab_size, "num_hidden_layers": 4, "max_position_embeddings": 64}
    return encoder(folder, ModernBertForMaskedLM(ModernBertConfig(**sizes, **tokens, local_attention=4)))


def said(folder: Path, load: Callable[[Path], Any] = loaded) -> str:
    """What loading refuses to do, without the folder's own name."""
    with pytest.raises(ValueError) as error:
        load(folder)
    return str(error.value).replace(str(folder), "FOLDER")
