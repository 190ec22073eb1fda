"""Names of models: the sizes of well-known ones, and which names can be one. Imports no torch."""

import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from unmask.util.parsing import missing_folder_message

_LLADA: dict[str, Any] = {
    "architectures": ["LLaDAModelLM"],
    "d_model": 4096,
    "n_layers": 32,
    "n_heads": 32,
    "n_kv_heads": 32,
    "mlp_hidden_size": 12288,
    "block_type": "llama",
    "activation_type": "silu",
    "layer_norm_type": "rms",
    "rms_norm_eps": 1e-5,
    "rope": True,
    "rope_theta": 500000.0,
    "vocab_size": 126464,
    "embedding_size": 126464,
    "weight_tying": False,
    "max_sequence_length": 4096,
    "torch_dtype": "bfloat16",
}


def _qwen(kind: str, width: int, layers: int, heads: int, inner: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": [kind],
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **more,
    }


_DREAM = _qwen("DreamModel", 3584, 28, 28, 18944, num_key_value_heads=4, vocab_size=152064)
_ILLADA: dict[str, Any] = {
    "architectures": ["ILLaDAForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 155136,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,  # this and rope_theta change no size
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
_FAST = {
    size: _qwen(
        "Fast_dLLM_QwenForCausalLM",
        width,
        28,
        heads,
        inner,
        num_key_value_heads=keys,
        vocab_size=rows,
        tie_word_embeddings=tied,
        bd_size=32,
    )
    for size, (width, heads, keys, inner, rows, tied) in {
        "1.5B": (1536, 12, 2, 8960, 151936, True),
        "7B": (3584, 28, 4, 18944, 152064, False),
    }.items()
}
_SDAR = {
    size: _qwen("SDARForCausalLM", width, layers, heads, inner, num_key_value_heads=8, head_dim=128, vocab_size=151936)
    for size, (width, layers, heads, inner) in {
        "1.7B": (2048, 28, 16, 6144),
        "4B": (2560, 36, 32, 9728),
        "8B": (4096, 36, 32, 12288),
    }.items()
}
_SDAR_MOE = _qwen(
    "SDARMoeForCausalLM",
    2048,
    48,
    32,
    6144,
    num_key_value_heads=4,
    head_dim=128,
    vocab_size=151936,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    norm_topk_prob=True,
)
_LLADA_MOE: dict[str, Any] = {
    "architectures": ["LLaDAMoEModelLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "dense_intermediate_size": 8192,
    "expert_intermediate_size": 1024,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "partial_rotary_factor": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "vocab_size": 157184,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_LLADA2_MINI: dict[str, Any] = {
    "architectures": ["LLaDA2MoeModelLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 5120,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-6,
    "rope_theta": 600000.0,
    "vocab_size": 157184,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
EMBEDDED = {name: Path(__file__).parent / "assets" / name for name in ("tiny", "tiny-two")}
"""The embedded models by name: `tiny` was taught noisy solutions, `tiny-two` two behaviours (docs/model.md)."""
KNOWN: dict[str, dict[str, Any]] = {
    **{f"GSAI-ML/{name}": _LLADA for name in ("LLaDA-8B-Base", "LLaDA-8B-Instruct", "LLaDA-1.5")},
    **{f"Dream-org/Dream-v0-{name}-7B": _DREAM for name in ("Base", "Instruct")},
    **{f"apple/DiffuCoder-7B-{name}": _DREAM for name in ("Base", "Instruct", "cpGRPO")},
    **{f"GSAI-ML/iLLaDA-8B-{name}": _ILLADA for name in ("Base", "Instruct")},
    **{f"JetLM/SDAR-{size}-Chat": {**fields, "block_size": 4} for size, fields in _SDAR.items()},
    **{f"JetLM/SDAR-{size}-Chat-b{block}": fields for size, fields in _SDAR.items() for block in (8, 16, 32, 64)},
    **{f"Gen-Verse/TraDo-{size}-Instruct": {**_SDAR[size], "block_size": 4} for size in ("4B", "8B")},
    **{f"Efficient-Large-Model/Fast_dLLM_v2_{size}": fields for size, fields in _FAST.items()},
    "JetLM/SDAR-30B-A3B-Chat": _SDAR_MOE,  # its config.json has no block_size
    **{f"inclusionAI/LLaDA-MoE-7B-A1B-{name}": _LLADA_MOE for name in ("Base", "Instruct")},
    **{f"inclusionAI/LLaDA2.{version}-mini": _LLADA2_MINI for version in (0, 1)},
}
"""The sizes in the config.json of well-known models, so that `outline` needs no connection for them."""


def check_model_name(name: str) -> None:
    """ValueError for a name that is neither an embedded model, nor a folder, nor an id on the hub."""
    if name in EMBEDDED or Path(name).is_dir():
        return
    if _looks_like_path(name):
        raise ValueError(missing_folder_message(name))
    if not is_hub_id(name):
        raise ValueError(
            f"there is no run or model {name!r}: give {', '.join(EMBEDDED)}, the folder of a run or of a model, or an "
            "id on the hub, for example GSAI-ML/LLaDA-8B-Instruct"
        )


def is_hub_id(name: str) -> bool:
    """Whether a name can be an id on the hub: ORG/NAME, and neither a folder here nor a mistyped path of one."""
    named = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name, re.ASCII) is not None
    return named and not Path(name).is_dir() and not _looks_like_path(name)


def _looks_like_path(name: str) -> bool:
    """Whether a name that is not a folder looks like a mistyped path, not like an id on the hub."""
    first, slash, _ = name.partition("/")
    if not slash or name in KNOWN:
        return False
    mistyped = Path("runs").is_dir() and bool(get_close_matches(first, ["runs"], cutoff=0.75))
    return first in ("", ".", "..", "runs") or mistyped or (len(Path(name).parts) > 1 and Path(name).parent.is_dir())
