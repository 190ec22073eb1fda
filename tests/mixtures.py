"""Small random checkpoints with mixtures of experts in the released layouts, and what their networks compute."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from unmask.models import load_checkpoint
from unmask.models.checkpoint import stored_parts
from unmask.models.config_file import ConfigFile
from unmask.models.load import Released
from unmask.models.recognition import family_of, network_of
from unmask.models.tiny import CHARACTERS, EOS, MASK, SPECIALS, CharacterTokenizer

COMMON: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": CharacterTokenizer.size,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 100.0,
    "tie_word_embeddings": False,
    "mask_token_id": MASK,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "torch_dtype": "float32",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "LLaDA-MoE": {
        **COMMON,
        "architectures": ["LLaDAMoEModelLM"],
        "model_type": "llada",
        "partial_rotary_factor": 1,
        "moe_layer_freq": [0, 1],
        "dense_intermediate_size": 24,
        "expert_intermediate_size": 8,
        "shared_expert_intermediate_size": 12,
        "moe_router_enable_expert_bias": True,
    },
    "LLaDA2": {
        **COMMON,
        "architectures": ["LLaDA2MoeModelLM"],
        "model_type": "llada2_moe",
        "head_dim": 8,
        "partial_rotary_factor": 0.5,
        "first_k_dense_replace": 1,
        "intermediate_size": 24,
        "moe_intermediate_size": 8,
        "num_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
    },
    "SDAR-MoE": {
        **COMMON,
        "architectures": ["SDARMoeForCausalLM"],
        "model_type": "sdar_moe",
        "head_dim": 8,
        "block_size": 4,
        "mlp_only_layers": [0],
        "intermediate_size": 24,
        "moe_intermediate_size": 8,
        "norm_topk_prob": True,
    },
}


def mixture_folder(folder: Path, family: str, seed: int = 0, **changed: Any) -> Path:
    """A checkpoint with random weights, every one far from zero, so that each matters."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIGS[family], **changed}
    (folder / "config.json").write_text(json.dumps(config))
    file = ConfigFile(folder / "config.json", config)
    lm, _ = network_of(family_of(file), file)
    rng, names = torch.Generator().manual_seed(seed), family_of(file).names
    weights = {}
    for name, tensor in lm.state_dict().items():
        for part, each in stored_parts(name, tensor).items():
            spread = 0.5 if each.ndim > 1 else 0.1
            weights[names.own(part)] = spread * torch.randn(each.shape, generator=rng) + float(
                part.endswith("norm.weight")
            )
    save_file(weights, folder / "model.safetensors")
    return folder


def write_tokenizer(folder: Path) -> None:
    """The character tokenizer of the embedded model as a file."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    characters = {character: number + SPECIALS for number, character in enumerate(CHARACTERS)}
    vocabulary = {"[PAD]": 0, "[MASK]": MASK, "[EOS]": EOS, **characters}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))


def mixture(folder: Path, family: str, dtype: torch.dtype | None = None, **changed: Any) -> Released:
    loaded = load_checkpoint(mixture_folder(folder, family, **changed), dtype, tokenizer=CharacterTokenizer())
    assert isinstance(loaded, Released)
    return loaded


# --- a straight-line pass, token by token, from the tensors of the file ----------------------------------------


def naive_logits(weights: dict[str, Tensor], config: dict[str, Any], tokens: list[int], block: int) -> Tensor:
    """Logits (L, V) of one row in float64. block 0: full attention."""
    weights = {name: weight.double() for name, weight in weights.items()}
    second = config["model_type"] == "llada2_moe"
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim", config["hidden_size"] // heads)
    turned = size // 2 if second else size

    def norm(x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config["rms_norm_eps"]) * weights[f"{name}.weight"]

    def rotated(x: Tensor, place: int) -> Tensor:
        half = turned // 2
        angle = place * config["rope_theta"] ** (-torch.arange(half).double() / half)
        a, b, rest = x[:half], x[half:turned], x[turned:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest])

    def swiglu(x: Tensor, name: str) -> Tensor:
        gate, up = (weights[f"{name}.{kind}_proj.weight"] @ x for kind in ("gate", "up"))
        return weights[f"{name}.down_proj.weight"] @ (gate * gate.sigmoid() * up)

    def attended(x_LD: Tensor, prefix: str) -> Tensor:
        if second:
            q, k, v = (x_LD @ weights[f"{prefix}attention.query_key_value.weight"].T).split(
                [heads * size, kv * size, kv * size], -1
            )
            names = "attention.query_layernorm", "attention.key_layernorm", "attention.dense"
        else:
            q, k, v = (x_LD @ weights[f"{prefix}self_attn.{letter}_proj.weight"].T for letter in "qkv")
            names = "self_attn.q_norm", "self_attn.k_norm", "self_attn.o_proj"
        rows = []
        for i in range(len(x_LD)):
            parts = []
            for h in range(heads):
                g = h // (heads // kv)
                one = rotated(norm(q[i, h * size : (h + 1) * size], prefix + names[0]), i)
                seen = [j for j in range(len(x_LD)) if not block or j // block <= i // block]
                keys = torch.stack([rotated(norm(k[j, g * size : (g + 1) * size], prefix + names[1]), j) for j in seen])
                parts.append((keys @ one / size**0.5).softmax(0) @ v[seen, g * size : (g + 1) * size])
            rows.append(weights[f"{prefix}{names[2]}.weight"] @ torch.cat(parts))
        return torch.stack(rows)

    def mixed(x: Tensor, prefix: str) -> Tensor:
        scores = weights[f"{prefix}mlp.gate.weight"] @ x
        chosen, total = config["num_experts_per_tok"], torch.zeros_like(x)
        if second:
            scores = scores.sigmoid()
            biased = scores + weights[f"{prefix}mlp.gate.expert_bias"]
            groups = biased.view(config["n_group"], -1)
            best = groups.sort(-1, descending=True).values[:, :2].sum(-1).argsort(descending=True)
            for group in best[config["topk_group"] :]:
                groups[group] = -torch.inf
            picked = groups.flatten().argsort(descending=True)[:chosen].tolist()
            factor = config["routed_scaling_factor"] / sum(scores[e] for e in picked)
        else:
            scores = scores.softmax(0)
            if f"{prefix}mlp.expert_bias" in weights:
                scores = scores + weights[f"{prefix}mlp.expert_bias"]
            picked = scores.argsort(descending=True)[:chosen].tolist()
            factor = 1 / sum(scores[e] for e in picked) if config.get("norm_topk_prob") else 1.0
        for expert in picked:
            total = total + scores[expert] * factor * swiglu(x, f"{prefix}mlp.experts.{expert}")
        for shared in (f"{prefix}shared_expert", f"{prefix}mlp.shared_experts"):
            if f"{shared}.up_proj.weight" in weights:
                total = total + swiglu(x, shared)
        return total

    x_LD = weights["model.word_embeddings.weight" if second else "model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        x_LD = x_LD + attended(norm(x_LD, f"{prefix}input_layernorm"), prefix)
        y_LD = norm(x_LD, f"{prefix}post_attention_layernorm")
        dense = f"{prefix}mlp.up_proj.weight" in weights
        rows = [swiglu(y, f"{prefix}mlp") if dense else mixed(y, prefix) for y in y_LD]
        x_LD = x_LD + torch.stack(rows)
    return norm(x_LD, "model.norm") @ weights["lm_head.weight"].T
