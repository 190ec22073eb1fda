"""The networks of the families: config.json translated to the configuration of a transformers class."""

from collections.abc import Callable
from typing import Any

from unmask.models.config_file import SIZES, ConfigFile

# Settings of other networks (Gemma, Granite, Cohere, Ministral) that change the logits. No family here has them.
FOREIGN = {
    "llama_4_scaling_beta": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "attention_multiplier": None,
    "residual_multiplier": 1.0,
    "embedding_multiplier": 1.0,
}
# Other values of these settings are not supported by the decoder's forward pass.
PLAIN = {
    **FOREIGN,
    "use_sliding_window": False,
    "use_mrope": False,
    "partial_rotary_factor": 1.0,
    "attention_dropout": 0.0,
    "resid_pdrop": 0.0,
    "layer_norm_eps": None,  # iLLaDA: a number replaces RMSNorm by LayerNorm
    "clip_qkv": None,
    "num_experts": None,
    "quantization_config": None,
}
# Fields that the networks of transformers honour for some kinds only.
BIASES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"attention_bias": True, "mlp_bias": False},
    "Qwen3": {"mlp_bias": False},
}
# The fields of each rotary scaling; another field would change the frequencies in a way that is not implemented.
ROTARY = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "truncate",
    ),
}
LLADA_PLAIN = {
    **FOREIGN,
    "block_type": "llama",
    "activation_type": "silu",
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "bias_for_layer_norm": False,
    "rope": True,
    "alibi": False,
    "include_bias": False,
    "attention_layer_norm": False,
    "scale_logits": False,
    "input_emb_norm": False,
    "block_group_size": 1,
    "attention_dropout": 0.0,
    "residual_dropout": 0.0,
    "embedding_dropout": 0.0,
    "quantization_config": None,
}


def llada_network(file: ConfigFile) -> tuple[str, dict[str, Any]]:
    for name in ("block_type", "activation_type", "layer_norm_type", "rope"):  # LLaDA's class has other defaults
        file.need(name)
    file.only(LLADA_PLAIN)
    width, heads = file.size("d_model"), file.size("n_heads")
    config = {
        "hidden_size": width,
        "num_hidden_layers": file.size("n_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.size("n_kv_heads", 1 if file.get("multi_query_attention") else heads),
        "intermediate_size": file.size("mlp_hidden_size")
        if file.get("mlp_hidden_size")
        else int(file.need("mlp_ratio") * width),
        "vocab_size": file.size("embedding_size" if file.get("embedding_size") else "vocab_size"),
        "rms_norm_eps": file.need("rms_norm_eps"),
        "max_position_embeddings": file.size("max_sequence_length"),
        "rope_parameters": {"rope_type": "default", "rope_theta": file.number("rope_theta")},
        "tie_word_embeddings": file.need("weight_tying"),
        "bos_token_id": None,
        "eos_token_id": None,
    }
    # Qwen2 is Llama with a bias on queries, keys and values only.
    return ("Qwen2" if file.get("include_qkv_bias") else "Llama"), config


def decoder_network(kind: str, theta: float | None = None) -> Callable[[ConfigFile], tuple[str, dict[str, Any]]]:
    """theta: the rotary base if config.json has none; None: it must have one."""

    def network(file: ConfigFile) -> tuple[str, dict[str, Any]]:
        file.only({**PLAIN, **BIASES[kind]})
        check_layer_types(file)
        config: dict[str, Any] = {name: file.size(name) for name in SIZES}
        config["rms_norm_eps"] = file.need("rms_norm_eps")
        config["num_key_value_heads"] = file.size("num_key_value_heads", config["num_attention_heads"])
        if file.get("head_dim") is not None:
            file.size("head_dim")
        for name in ("head_dim", "hidden_act", "attention_bias", "mlp_bias", "tie_word_embeddings", "pad_token_id"):
            if file.get(name) is not None:
                config[name] = file.get(name)
        config["rope_parameters"] = _rotary(file, theta)
        return kind, {**config, "bos_token_id": None, "eos_token_id": None}

    return network


def check_layer_types(file: ConfigFile) -> None:
    types = file.kind("layer_types", list, [])
    if any(kind != "full_attention" for kind in types):
        raise ValueError(f"{file.path} sets layer_types to {types!r}; layers with a sliding window are not supported.")


def _rotary(file: ConfigFile, theta: float | None) -> dict[str, Any]:
    """The rotary settings in their new form. theta: the default of the family."""
    forms = [file.kind(name, dict, {}) for name in ("rope_parameters", "rope_scaling")]
    if all(forms) and forms[0] != forms[1]:
        raise ValueError(f"{file.path} has rope_parameters and rope_scaling, and they differ; remove one of them.")
    rotary = {name: value for name, value in (forms[0] or forms[1]).items() if value is not None}
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROTARY:
        raise ValueError(f"{file.path} sets rope_type to {kind!r}; supported rotary scalings: {', '.join(ROTARY)}.")
    base = rotary.get("rope_theta", file.get("rope_theta", theta))
    if file.get("rope_theta", base) != base:
        raise ValueError(f"{file.path} sets rope_theta twice, to {file.get('rope_theta')!r} and {base!r}; remove one.")
    inert = {"rope_theta": base, "rope_type": kind, "type": kind, "partial_rotary_factor": 1.0}
    if kind == "default":
        inert["factor"] = 1.0
    for name, value in rotary.items():
        if name not in ROTARY[kind] and (name not in inert or value != inert[name]):
            raise ValueError(f"{file.path} sets {name} of the rotary embedding to {value!r}, which is not supported.")
    kept = {name: value for name, value in rotary.items() if name in ROTARY[kind]}
    return {**kept, "rope_type": kind, "rope_theta": file.number("rope_theta", base)}


def encoder_network(kind: str, **off: Any) -> Callable[[ConfigFile], tuple[str, dict[str, Any]]]:
    def network(file: ConfigFile) -> tuple[str, dict[str, Any]]:
        plain = {"is_decoder": False, "position_embedding_type": "absolute", "quantization_config": None}
        file.only({**FOREIGN, **plain})
        for name in SIZES:
            file.size(name)
        outer = ("architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "auto_map")
        config = {name: value for name, value in file.fields.items() if name not in outer}
        tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"))
        settings = {"pad_token_id": file.get("pad_token_id"), "attn_implementation": "sdpa"}
        # Dropout would make two passes over one canvas differ, and so every ratio of their probabilities.
        return kind, {**config, **tokens, **settings, **off}

    return network
