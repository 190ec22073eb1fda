"""The networks of the families with mixtures of experts: LLaDA-MoE, LLaDA2 and SDAR-MoE.

Attention, norms and the frame are transformers' Qwen3, or its GLM-4-MoE for LLaDA2, which rotates a part of each head.
The mixtures of experts.py replace the feed-forward half of the layers that have experts.
"""

from functools import partial
from typing import Any

from unmask.models.checkpoint import read_json
from unmask.models.config_file import ConfigFile
from unmask.models.experts import SigmoidRouter, SoftmaxRouter, add_mixtures
from unmask.models.llama import Linear
from unmask.models.networks import FOREIGN, PLAIN, check_layer_types

# Other values of these settings are not supported; the authors' own code ignores most of them.
ROTARY_PLAIN = {"rope_scaling": None, "rope_parameters": None}
SDAR_MOE_PLAIN = {
    **{name: value for name, value in PLAIN.items() if name != "num_experts"},
    **ROTARY_PLAIN,
    "hidden_act": "silu",
    "attention_bias": False,
}
LLADA_MOE_PLAIN = {
    **SDAR_MOE_PLAIN,
    "qk_layernorm": True,
    "norm_topk_prob": False,
    "moe_router_score_function": "softmax",
    "routed_scaling_factor": 1,
    "router_num_group": None,
    "router_topk_group": None,
}
LLADA2_PLAIN = {
    **FOREIGN,
    **ROTARY_PLAIN,
    "hidden_act": "silu",
    "use_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": True,
    "use_rmsnorm": True,
    "using_split_qkv_in_self_attention": False,
    "use_sliding_window": False,
    "norm_topk_prob": True,
    "score_function": "sigmoid",
    "router_dtype": "fp32",
    "moe_router_enable_expert_bias": True,
    "norm_head": False,
    "norm_softmax": False,
    "attention_dropout": 0.0,
    "embedding_dropout": 0.0,
    "output_dropout": 0.0,
    "quantization_config": None,
}


def llada_moe_network(file: ConfigFile) -> tuple[str, dict[str, Any]]:
    file.only(LLADA_MOE_PLAIN)
    file.need("partial_rotary_factor")  # the class has another default
    return "Qwen3", _qwen3(file, file.size("dense_intermediate_size"))


def llada2_network(file: ConfigFile) -> tuple[str, dict[str, Any]]:
    file.only(LLADA2_PLAIN)
    _check_editing(file)
    config = _qwen3(file, file.size("intermediate_size"))
    part = file.number("partial_rotary_factor")
    rotated = int(config["head_dim"] * part)
    if rotated % 2 or not 0 < rotated <= config["head_dim"] or file.get("rotary_dim", rotated) != rotated:
        raise ValueError(f"{file.path}: partial_rotary_factor {part} and rotary_dim do not fit the heads.")
    config["rope_parameters"]["partial_rotary_factor"] = part
    # All layers are dense here: `llada2_layers` adds the mixtures.
    return "Glm4Moe", {**config, "use_qk_norm": True, "first_k_dense_replace": config["num_hidden_layers"]}


def _check_editing(file: ConfigFile) -> None:
    """ValueError for a LLaDA2.1 that edits tokens it has written: a trace has one step for each token."""
    stated, beside = {file.path: file.get("editing_threshold")}, file.path.with_name("generation_config.json")
    if beside.is_file():
        stated[beside] = read_json(beside).get("editing_threshold")
    for path, threshold in stated.items():
        if threshold is not None:
            raise ValueError(
                f"{path} sets editing_threshold to {threshold!r}, but this package samples with editing off: a token "
                "that is written stays. To use the model so, remove the field in a copy of the folder, or set it to "
                "null."
            )


def sdar_moe_network(file: ConfigFile) -> tuple[str, dict[str, Any]]:
    file.only(SDAR_MOE_PLAIN)
    return "Qwen3", _qwen3(file, file.size("intermediate_size"))


def _qwen3(file: ConfigFile, inner: int) -> dict[str, Any]:
    check_layer_types(file)
    width, heads = file.size("hidden_size"), file.size("num_attention_heads")
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": file.size("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.size("num_key_value_heads", heads),
        "head_dim": file.size("head_dim", max(1, width // heads)),
        "vocab_size": file.size("vocab_size"),
        "max_position_embeddings": file.size("max_position_embeddings"),
        "rms_norm_eps": file.need("rms_norm_eps"),
        "rope_parameters": {"rope_type": "default", "rope_theta": file.number("rope_theta")},
        "tie_word_embeddings": file.get("tie_word_embeddings", False),
        "pad_token_id": file.get("pad_token_id"),
        "bos_token_id": None,
        "eos_token_id": None,
    }


def llada_moe_layers(lm: Any, file: ConfigFile) -> None:
    layers = file.kind("moe_layer_freq", list, [1] * file.size("num_hidden_layers"))
    if len(layers) != file.size("num_hidden_layers") or set(layers) - {0, 1}:
        raise ValueError(f"{file.path} sets moe_layer_freq to {layers!r}; it must have a 0 or a 1 for every layer.")
    bias = file.kind("moe_router_enable_expert_bias", bool, False)
    width, experts, chosen = _choice(file)
    router = partial(SoftmaxRouter, width, experts, chosen, bias=bias, normalised=False)
    shared = file.size("shared_expert_intermediate_size") if file.get("shared_expert_intermediate_size") else 0
    add_mixtures(lm, [layer == 1 for layer in layers], file.size("expert_intermediate_size"), shared, router)


def llada2_layers(lm: Any, file: ConfigFile) -> None:
    dense = file.get("first_k_dense_replace", 0)
    if type(dense) is not int or dense < 0:
        raise ValueError(f"{file.path} sets first_k_dense_replace to {dense!r}; it must be a number of layers.")
    width, experts, chosen = _choice(file)
    groups, kept = file.size("n_group"), file.size("topk_group")
    if experts % groups or kept > groups or experts // groups < 2 or chosen > kept * (experts // groups):
        raise ValueError(f"{file.path}: n_group {groups} and topk_group {kept} do not fit {experts} experts.")
    router = partial(SigmoidRouter, width, experts, chosen, groups, kept, file.number("routed_scaling_factor"))
    hidden = file.size("moe_intermediate_size")
    shared = hidden * file.size("num_shared_experts") if file.get("num_shared_experts") else 0
    add_mixtures(lm, [number >= dense for number in range(len(lm.model.layers))], hidden, shared, router)
    for layer in lm.model.layers:  # one matrix in the files, and in their adapters
        attention = layer.self_attn
        parts = attention.q_proj, attention.k_proj, attention.v_proj
        attention.query_key_value = Linear(width, sum(part.out_features for part in parts), bias=False)
        del attention.q_proj, attention.k_proj, attention.v_proj


def sdar_moe_layers(lm: Any, file: ConfigFile) -> None:
    dense, step = file.kind("mlp_only_layers", list, []), file.size("decoder_sparse_step", 1)
    normalised = file.kind("norm_topk_prob", bool, False)
    width, experts, chosen = _choice(file)
    router = partial(SoftmaxRouter, width, experts, chosen, bias=False, normalised=normalised)
    layers = [number not in dense and (number + 1) % step == 0 for number in range(len(lm.model.layers))]
    add_mixtures(lm, layers, file.size("moe_intermediate_size"), 0, router)


def _choice(file: ConfigFile) -> tuple[int, int, int]:
    """Channels, experts, and experts of a token."""
    experts, chosen = file.size("num_experts"), file.size("num_experts_per_tok")
    if chosen > experts:
        raise ValueError(f"{file.path} sets num_experts_per_tok to {chosen}, but there are only {experts} experts.")
    return file.size("hidden_size"), experts, chosen
