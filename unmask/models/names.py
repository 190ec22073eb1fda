"""The names of tensors and modules in released files, and their names in transformers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Names:
    """Translates names of modules (`...q_proj`) and their tensors (`...q_proj.weight`).

    `native` names are those of the transformers class, `own` names those of the released files. A name that is in
    neither table is the same in both.
    """

    whole: Mapping[str, str] = field(default_factory=dict)
    """native -> own, for modules outside the layers."""
    layer: Mapping[str, str] = field(default_factory=dict)
    """native -> own, for modules inside a layer."""
    layers: tuple[str, str] = ("model.layers", "model.layers")
    """The list of layers, native and own."""

    def own(self, native: str) -> str:
        return _translation(native, self.whole, self.layer, *self.layers)

    def native(self, own: str) -> str:
        whole, layer = ({v: k for k, v in table.items()} for table in (self.whole, self.layer))
        return _translation(own, whole, layer, *reversed(self.layers))


def _translation(name: str, whole: Mapping[str, str], layer: Mapping[str, str], source: str, target: str) -> str:
    inside = re.fullmatch(rf"{re.escape(source)}\.(\d+)(?:\.(.+))?", name)
    if inside:
        number, rest = inside.groups()
        if rest is None:
            return f"{target}.{number}"
        prefix = _prefix(rest, layer)
        return name if prefix is None else f"{target}.{number}.{layer[prefix]}{rest.removeprefix(prefix)}"
    prefix = _prefix(name, whole)
    return name if prefix is None else whole[prefix] + name.removeprefix(prefix)


def _prefix(name: str, table: Mapping[str, str]) -> str | None:
    return next((module for module in table if name == module or name.startswith(f"{module}.")), None)


SAME = Names()

LLADA = Names(
    whole={
        "model.embed_tokens": "model.transformer.wte",
        "model.norm": "model.transformer.ln_f",
        "lm_head": "model.transformer.ff_out",
    },
    layer={
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "q_proj",
        "self_attn.k_proj": "k_proj",
        "self_attn.v_proj": "v_proj",
        "self_attn.o_proj": "attn_out",
        "post_attention_layernorm": "ff_norm",
        "mlp.gate_proj": "ff_proj",
        "mlp.up_proj": "up_proj",
        "mlp.down_proj": "ff_out",
    },
    layers=("model.layers", "model.transformer.blocks"),
)

LLADA_MOE = Names(layer={"mlp.gate.expert_bias": "mlp.expert_bias", "mlp.shared_experts": "shared_expert"})

LLADA2 = Names(
    whole={"model.embed_tokens": "model.word_embeddings"},
    layer={
        "self_attn.query_key_value": "attention.query_key_value",
        "self_attn.o_proj": "attention.dense",
        "self_attn.q_norm": "attention.query_layernorm",
        "self_attn.k_norm": "attention.key_layernorm",
    },
)
