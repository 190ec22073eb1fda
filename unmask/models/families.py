"""The supported families of models: how config.json identifies them, their networks, their special tokens.

FAMILIES has every fact that the tensors of a family do not show. A value in config.json takes precedence.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from unmask.models.config_file import SIZES, ConfigFile
from unmask.models.decoder import Facts
from unmask.models.names import LLADA, SAME, Names

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


@dataclass(frozen=True)
class Family:
    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    network: Callable[[ConfigFile], tuple[str, dict[str, Any]]]
    """The prefix of the transformers class that runs it, and the configuration of that class."""
    names: Names = SAME
    mask_id: int | None = None
    """Used if config.json has none. None: the tokenizer's mask token."""
    shift: bool = False
    causal_block: int | None = None
    block_field: str = "causal_block"
    rotary_fp32: bool = False
    max_length: int | None = None
    """The usable length, if config.json has a longer one."""
    ends: tuple[str, ...] = ()
    """Tokens that end a completion, in addition to EOS."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that the authors always pass to the chat template."""
    autoregressive: bool = False
    """The architecture is autoregressive: config.json must say that the checkpoint is bidirectional."""
    encoder: bool = False
    tied: Mapping[str, str] = field(default_factory=lambda: {"lm_head.weight": "model.embed_tokens.weight"})
    tied_field: str = "tie_word_embeddings"
    unused: tuple[str, ...] = ()


# --- the networks -------------------------------------------------------------------------------------------

# Other values of these settings are not supported by the decoder's forward pass.
PLAIN = {
    "use_sliding_window": False,
    "use_mrope": False,
    "partial_rotary_factor": 1.0,
    "attention_dropout": 0.0,
    "clip_qkv": None,
    "quantization_config": None,
}
LLADA_PLAIN = {
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


def _llada(file: ConfigFile) -> tuple[str, dict[str, Any]]:
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


def _decoder(kind: str) -> Callable[[ConfigFile], tuple[str, dict[str, Any]]]:
    def network(file: ConfigFile) -> tuple[str, dict[str, Any]]:
        file.only(PLAIN)
        if set(file.kind("layer_types", list, [])) - {"full_attention"}:
            raise ValueError(f"{file.path} has layers with a sliding window, which are not supported.")
        config: dict[str, Any] = {name: file.size(name) for name in SIZES}
        config["rms_norm_eps"] = file.need("rms_norm_eps")
        config["num_key_value_heads"] = file.size("num_key_value_heads", config["num_attention_heads"])
        if file.get("head_dim") is not None:
            file.size("head_dim")
        for name in ("head_dim", "hidden_act", "attention_bias", "mlp_bias", "tie_word_embeddings", "pad_token_id"):
            if file.get(name) is not None:
                config[name] = file.get(name)
        rotary = file.kind("rope_parameters", dict, file.kind("rope_scaling", dict, {}))
        theta = rotary.get("rope_theta", file.get("rope_theta", 1e4) if kind == "Llama" else None)
        rest = {name: value for name, value in rotary.items() if name != "type"}
        config["rope_parameters"] = {
            **rest,
            "rope_type": rotary.get("rope_type", rotary.get("type", "default")),
            "rope_theta": file.number("rope_theta", theta),
        }
        if config["rope_parameters"]["rope_type"] in ("dynamic", "longrope"):
            raise ValueError(f"{file.path} has rotary frequencies that depend on the length: they are not supported.")
        return kind, {**config, "bos_token_id": None, "eos_token_id": None}

    return network


def _encoder(kind: str, **off: Any) -> Callable[[ConfigFile], tuple[str, dict[str, Any]]]:
    def network(file: ConfigFile) -> tuple[str, dict[str, Any]]:
        file.only({"is_decoder": False, "position_embedding_type": "absolute", "quantization_config": None})
        for name in SIZES:
            file.size(name)
        outer = ("architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "auto_map")
        config = {name: value for name, value in file.fields.items() if name not in outer}
        tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"))
        settings = {"pad_token_id": file.get("pad_token_id"), "attn_implementation": "sdpa"}
        # Dropout would make two passes over one canvas differ, and so every ratio of their probabilities.
        return kind, {**config, **tokens, **settings, **off}

    return network


# --- the table ----------------------------------------------------------------------------------------------

_CHAT = ("<|im_end|>", "<|endoftext|>")
_HEADER = ("<|eot_id|>", "<|end_of_text|>", "<|endoftext|>")
_QUIET = {"enable_thinking": False}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_NO_DROPOUT_MODERN = {"attention_dropout": 0.0, "embedding_dropout": 0.0, "mlp_dropout": 0.0}
_BERT_TIES = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}

FAMILIES = (
    Family(
        "LLaDA",
        ("LLaDAModelLM",),
        ("llada",),
        _llada,
        names=LLADA,
        mask_id=126336,
        rotary_fp32=True,
        ends=_HEADER,
        tied_field="weight_tying",
    ),
    Family(
        "Dream",
        ("DreamModel",),
        ("Dream",),
        _decoder("Qwen2"),
        mask_id=151666,
        shift=True,
        max_length=2048,
        ends=_CHAT,
    ),
    Family(
        "SDAR",
        ("SDARForCausalLM",),
        ("sdar",),
        _decoder("Qwen3"),
        mask_id=151669,
        causal_block=4,
        block_field="block_size",
        ends=_CHAT,
    ),
    Family("A2D", ("A2DLlamaLMHeadModel",), ("a2d-llama",), _decoder("Llama"), block_field="block_size", ends=_HEADER),
    Family("A2D", ("A2DQwen2LMHeadModel",), ("a2d-qwen2",), _decoder("Qwen2"), block_field="block_size", ends=_CHAT),
    Family(
        "A2D",
        ("A2DQwen3LMHeadModel",),
        ("a2d-qwen3",),
        _decoder("Qwen3"),
        block_field="block_size",
        ends=_CHAT,
        template=_QUIET,
    ),
    Family("Llama", ("LlamaForCausalLM",), ("llama",), _decoder("Llama"), autoregressive=True, ends=_HEADER),
    Family("Qwen2", ("Qwen2ForCausalLM",), ("qwen2",), _decoder("Qwen2"), autoregressive=True, ends=_CHAT),
    Family(
        "Qwen3",
        ("Qwen3ForCausalLM",),
        ("qwen3",),
        _decoder("Qwen3"),
        autoregressive=True,
        ends=_CHAT,
        template=_QUIET,
    ),
    Family(
        "BERT",
        ("BertForMaskedLM", "BertForPreTraining"),
        ("bert",),
        _encoder("Bert", **_NO_DROPOUT),
        encoder=True,
        tied=_BERT_TIES,
        unused=("bert.pooler.", "cls.seq_relationship.", "bert.embeddings.position_ids"),
    ),
    Family(
        "ModernBERT",
        ("ModernBertForMaskedLM",),
        ("modernbert",),
        _encoder("ModernBert", **_NO_DROPOUT_MODERN),
        encoder=True,
        tied={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
    ),
)

REFUSED = {
    "LLaDA-MoE": ("LLaDAMoEModelLM", "lladamoe"),
    "LLaDA2": ("LLaDA2MoeModelLM", "llada2_moe", "llada2_moe_veomni"),
    "SDAR-MoE": ("SDARMoeForCausalLM", "sdar_moe"),
    "DiffusionGemma": ("DiffusionGemmaForBlockDiffusion", "diffusion_gemma"),
}
SUPPORTED = (
    "LLaDA, Dream and DiffuCoder, SDAR, A2D, Llama, Qwen2 and Qwen3 made into masked diffusion models, "
    "BERT and ModernBERT"
)


def family_of(file: ConfigFile) -> Family:
    """By `architectures`, or by `model_type` if that is missing."""
    kinds = file.get("architectures") or [file.get("model_type")]
    if not isinstance(kinds, list) or not isinstance(kinds[0], str | None):
        raise ValueError(f"{file.path}: architectures must be a list of names, and model_type must be a name.")
    kind = kinds[0]
    if kind == "llada" and "num_experts" in file.fields:  # two families have this model_type
        kind = "lladamoe"
    if kind is None:
        raise ValueError(f"{file.path} has neither architectures nor model_type.")
    for family in FAMILIES:
        if kind in (*family.architectures, *family.model_types):
            return family
    for name, kinds in REFUSED.items():
        if kind in kinds:
            raise ValueError(f"{file.path} is of the {name} family, which is not supported. Supported: {SUPPORTED}.")
    raise ValueError(f"{file.path} is of the kind {kind!r}, which is not supported. Supported: {SUPPORTED}.")


def network_of(family: Family, file: ConfigFile) -> tuple["PreTrainedModel", bool]:
    """The network on the meta device, with separate head and embedding; and whether they share one matrix."""
    import transformers

    kind, fields = family.network(file)
    try:
        config = getattr(transformers, f"{kind}Config")(**fields)
        tied = bool(config.tie_word_embeddings)
        config.tie_word_embeddings = False
        config.is_causal = False
        model = getattr(transformers, f"{kind}For{'MaskedLM' if family.encoder else 'CausalLM'}")
        with torch.device("meta"):
            return model(config).eval(), tied
    except Exception as error:  # transformers raises many kinds for settings that do not fit together
        raise file.unbuilt(error) from error


# --- the facts ----------------------------------------------------------------------------------------------


def facts_of(family: Family, file: ConfigFile, rows: int, fast: "PreTrainedTokenizerFast | None", name: str) -> Facts:
    """From config.json, else from the family, else from the tokenizer.

    rows   of the embedding
    name   the name that the model is loaded by
    """
    mask = file.get("mask_token_id", family.mask_id)
    if mask is None and fast is not None:
        mask = fast.mask_token_id if fast.mask_token_id is not None else fast.get_vocab().get("<|mask|>")
    if mask is None:
        raise ValueError(
            f"{file.path.parent} has no mask token, neither mask_token_id in config.json nor in its tokenizer. "
            "An autoregressive model must be adapted first: unmask adapt."
        )
    if family.autoregressive and file.fields.get("is_causal") is not False:
        raise ValueError(
            f"{file.path} does not say that this {family.name} attends in both directions. If it was trained that way, "
            'add "is_causal": false to the file. An autoregressive model must be adapted first: unmask adapt.'
        )
    end, pad = file.get("eos_token_id"), file.get("pad_token_id")
    listed = end if isinstance(end, list) else []
    end = (listed[0] if listed else None) if isinstance(end, list) else end
    if family.encoder:
        end = None  # their EOS is the separator
    if fast is not None:
        pad = fast.pad_token_id if pad is None else pad
        end = fast.eos_token_id if end is None else end
    end = pad if end is None else end
    if end is None:
        raise ValueError(f"{file.path} has no eos_token_id, and the tokenizer has no EOS token.")
    pad = end if pad is None else pad
    for token, role in ((mask, "mask"), (end, "end"), (pad, "padding"), *((token, "end") for token in listed)):
        if type(token) is not int or not 0 <= token < rows:
            raise ValueError(f"{file.path}: the {role} token {token} is outside the vocabulary of {rows}.")
    return Facts(
        mask_id=mask,
        eos_id=end,
        pad_id=pad,
        max_length=length_of(family, file),
        shift=family.shift,
        causal_block=None if family.encoder else block_of(family, file, name),
        rotary_fp32=family.rotary_fp32 and file.get("rope_full_precision", True),
    )


def length_of(family: Family, file: ConfigFile) -> int:
    length = file.size("max_sequence_length" if file.get("max_sequence_length") else "max_position_embeddings")
    return length if family.max_length is None else min(length, family.max_length)


def block_of(family: Family, file: ConfigFile, name: str) -> int | None:
    declared = [key for key in ("causal_block", family.block_field) if key in file.fields]
    if not declared:
        if family.name == "A2D" and "bd3lm" in name.lower():
            raise ValueError(
                f'{file.path} does not have the block length of this block-causal model: add "causal_block": 32 '
                "(or the length it was trained with; null for full attention) to a copy of the folder."
            )
        return family.causal_block
    block = file.fields[declared[0]]
    if block is not None and (type(block) is not int or block < 1):
        raise ValueError(f"{file.path} sets {declared[0]} to {block!r}; it must be a number of tokens, or null.")
    return block
