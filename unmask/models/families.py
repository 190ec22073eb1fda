"""The supported families of models: how config.json identifies them, their networks, their special tokens.

FAMILIES has every fact that the tensors of a family do not show. A value in config.json takes precedence.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from unmask.models.config_file import ConfigFile
from unmask.models.mixtures import (
    llada2_layers,
    llada2_network,
    llada_moe_layers,
    llada_moe_network,
    sdar_moe_layers,
    sdar_moe_network,
)
from unmask.models.names import LLADA, LLADA2, LLADA_MOE, SAME, Names
from unmask.models.networks import decoder_network, encoder_network, llada_network


@dataclass(frozen=True)
class Family:
    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    network: Callable[[ConfigFile], tuple[str, dict[str, Any]]]
    """The prefix of the transformers class that runs it, and the configuration of that class."""
    layers: Callable[[Any, ConfigFile], None] | None = None
    """Changes to the layers of that class: mixtures of experts."""
    names: Names = SAME
    mask_id: int | None = None
    """Used if config.json has none. None: the tokenizer's mask token."""
    shift: bool = False
    causal_block: int | None = None
    """Used if config.json has none. None: full attention."""
    block_field: str = "causal_block"
    """The field of config.json with the block length."""
    needs_block: bool = False
    """Block-causal with lengths that differ: config.json, the name (-b16) or the user must state the length."""
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

    @property
    def takes_blocks(self) -> bool:
        """Some models of the family are block-causal."""
        return self.autoregressive or self.causal_block is not None or self.block_field != "causal_block"


_CHAT = ("<|im_end|>", "<|endoftext|>")
_HEADER = ("<|eot_id|>", "<|end_of_text|>", "<|endoftext|>")
_ROLE = ("<|role_end|>", "<|endoftext|>")
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
        llada_network,
        names=LLADA,
        mask_id=126336,
        rotary_fp32=True,
        ends=_HEADER,
        tied_field="weight_tying",
    ),
    Family("iLLaDA", ("ILLaDAForCausalLM",), ("illada",), decoder_network("Llama"), mask_id=5),
    Family(
        "Dream",
        ("DreamModel",),
        ("Dream",),
        decoder_network("Qwen2"),
        mask_id=151666,
        shift=True,
        max_length=2048,
        ends=_CHAT,
    ),
    Family(
        "SDAR",
        ("SDARForCausalLM",),
        ("sdar",),
        decoder_network("Qwen3"),
        mask_id=151669,
        block_field="block_size",
        needs_block=True,
        ends=_CHAT,
    ),
    Family(
        "Fast-dLLM v2",
        ("Fast_dLLM_QwenForCausalLM",),
        ("Fast_dLLM_Qwen",),
        decoder_network("Qwen2"),
        mask_id=151665,
        shift=True,
        causal_block=32,
        block_field="bd_size",
        ends=_CHAT,
    ),
    Family(
        "SDAR-MoE",
        ("SDARMoeForCausalLM",),
        ("sdar_moe",),
        sdar_moe_network,
        layers=sdar_moe_layers,
        mask_id=151669,
        block_field="block_size",
        needs_block=True,
        ends=_CHAT,
    ),
    Family(
        "LLaDA-MoE",
        ("LLaDAMoEModelLM",),
        ("lladamoe",),
        llada_moe_network,
        layers=llada_moe_layers,
        names=LLADA_MOE,
        mask_id=156895,
        ends=_ROLE,
    ),
    Family(
        "LLaDA2",
        ("LLaDA2MoeModelLM",),
        ("llada2_moe",),
        llada2_network,
        layers=llada2_layers,
        names=LLADA2,
        mask_id=156895,
        causal_block=32,
        ends=_ROLE,
    ),
    Family(
        "A2D",
        ("A2DLlamaLMHeadModel",),
        ("a2d-llama",),
        decoder_network("Llama", theta=1e4),
        block_field="block_size",
        ends=_HEADER,
    ),
    Family(
        "A2D", ("A2DQwen2LMHeadModel",), ("a2d-qwen2",), decoder_network("Qwen2"), block_field="block_size", ends=_CHAT
    ),
    Family(
        "A2D",
        ("A2DQwen3LMHeadModel",),
        ("a2d-qwen3",),
        decoder_network("Qwen3"),
        block_field="block_size",
        ends=_CHAT,
        template=_QUIET,
    ),
    Family(
        "Llama",
        ("LlamaForCausalLM",),
        ("llama",),
        decoder_network("Llama", theta=1e4),
        autoregressive=True,
        ends=_HEADER,
    ),
    Family("Qwen2", ("Qwen2ForCausalLM",), ("qwen2",), decoder_network("Qwen2"), autoregressive=True, ends=_CHAT),
    Family(
        "Qwen3",
        ("Qwen3ForCausalLM",),
        ("qwen3",),
        decoder_network("Qwen3"),
        autoregressive=True,
        ends=_CHAT,
        template=_QUIET,
    ),
    Family(
        "BERT",
        ("BertForMaskedLM", "BertForPreTraining"),
        ("bert",),
        encoder_network("Bert", **_NO_DROPOUT),
        encoder=True,
        tied=_BERT_TIES,
        unused=("bert.pooler.", "cls.seq_relationship.", "bert.embeddings.position_ids"),
    ),
    Family(
        "ModernBERT",
        ("ModernBertForMaskedLM",),
        ("modernbert",),
        encoder_network("ModernBert", **_NO_DROPOUT_MODERN),
        encoder=True,
        tied={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
    ),
)

_UNIMPLEMENTED = "its network is not implemented"
_UNTESTED = (
    "it says {says}, but it is a {network} with blocks of {block}, and no outputs of its code are at hand to test"
)

REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "LLaDA2 with merged experts": (("llada2_moe_veomni",), _UNIMPLEMENTED),
    "DreamReasoner": (("DreamForCausalLM",), _UNTESTED.format(says="model_type Dream", network="Qwen3", block=32)),
    "Stable-DiffCoder": (
        ("StableDiffcoderForCausalLM",),
        _UNTESTED.format(says="model_type llama", network="Llama", block=4),
    ),
    "Nemotron-Labs-Diffusion": (
        ("NemotronLabsDiffusionModel", "nemotron_labs_diffusion"),
        "its rotary embedding scales queries by their position (llama_4_scaling_beta), which is not implemented",
    ),
    "DiffusionGemma": (("DiffusionGemmaForBlockDiffusion", "diffusion_gemma"), _UNIMPLEMENTED),
}
"""Families that are recognised and not supported: how config.json identifies them, and why."""
SUPPORTED = (
    "LLaDA, iLLaDA, LLaDA-MoE, LLaDA2, Dream and DiffuCoder, SDAR and TraDo, SDAR-MoE, Fast-dLLM v2, A2D, Llama, Qwen2 "
    "and Qwen3 made into masked diffusion models, BERT and ModernBERT"
)
