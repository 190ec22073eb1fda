"""Checkpoints that are refused, and what is said."""

import json
from pathlib import Path

import pytest
import torch

from checkpoints import (
    A2D,
    DREAM,
    LLADA_CONFIG,
    QWEN_CONFIG,
    QWEN_SPECIALS,
    QWEN_TEXT,
    SDAR,
    llada,
    loaded,
    qwen,
    said,
    with_tokenizer,
    write,
)
from unmask.models import load_model
from unmask.models.families import FAMILIES, SUPPORTED


def test_a_config_has_to_be_there_and_be_one(tmp_path):
    assert said(tmp_path) == "There is no config.json in FOLDER; give a folder that holds a checkpoint."
    (tmp_path / "config.json").write_text("{oh")
    assert said(tmp_path).startswith("FOLDER/config.json is not JSON: Expecting property name")
    (tmp_path / "config.json").write_text("[]")
    assert said(tmp_path) == "FOLDER/config.json holds no JSON object."
    (tmp_path / "config.json").write_text("{}")
    assert said(tmp_path) == "FOLDER/config.json states neither architectures nor model_type."


@pytest.mark.parametrize(
    ("stated", "called"),
    [
        ({"architectures": ["LLaDAMoEModelLM"], "model_type": "llada"}, "of the LLaDA-MoE family"),
        ({"model_type": "llada", "num_experts": 64}, "of the LLaDA-MoE family"),
        ({"architectures": ["LLaDA2MoeModelLM"]}, "of the LLaDA2 family"),
        ({"model_type": "sdar_moe"}, "of the SDAR-MoE family"),
        ({"architectures": ["DiffusionGemmaForBlockDiffusion"]}, "of the DiffusionGemma family"),
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "of the kind 'GPT2LMHeadModel'"),
        ({"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"}, "of the kind 'LlamaForSeq"),
    ],
)
def test_other_families_are_refused_by_name(tmp_path, stated, called):
    (tmp_path / "config.json").write_text(json.dumps(stated))
    refusal = said(tmp_path)
    assert refusal.startswith(f"FOLDER/config.json is {called}")
    assert refusal.endswith(f", which is not supported. Supported: {SUPPORTED}.")


LLADA_8B = {"d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "mlp_hidden_size": 12288}
LLADA_8B |= {"vocab_size": 126464, "embedding_size": 126464}
QWEN_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")


@pytest.mark.parametrize(
    ("kind", "sizes", "rest", "parameters"),
    [
        (DREAM, (3584, 28, 28, 4, 18944), {"vocab_size": 152064}, 7_615_616_512),
        (SDAR, (2048, 28, 16, 8, 6144), {"vocab_size": 151936, "head_dim": 128}, 2_031_739_904),
        (SDAR, (2560, 36, 32, 8, 9728), {"vocab_size": 151936, "head_dim": 128}, 4_411_424_256),
        (SDAR, (4096, 36, 32, 8, 12288), {"vocab_size": 151936, "head_dim": 128}, 8_190_735_360),
        (A2D, (1024, 28, 16, 8, 3072), {"vocab_size": 151936, "head_dim": 128}, 751_632_384),
        ({"model_type": "a2d-qwen2"}, (896, 24, 14, 2, 4864), {"vocab_size": 151936}, 630_167_424),
        ({"model_type": "llada"}, (), {**LLADA_CONFIG, **LLADA_8B}, 8_015_581_184),
    ],
)
def test_the_released_sizes_give_the_released_number_of_parameters(kind, sizes, rest, parameters):
    from unmask.models.families import Stated, family_of, network_of

    config = {**QWEN_CONFIG, **kind, **dict(zip(QWEN_SIZES, sizes, strict=False)), **rest}
    stated = Stated(Path("config.json"), config)
    lm, _ = network_of(family_of(stated), stated)  # without storage
    assert sum(weight.numel() for weight in lm.parameters()) == parameters


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.architectures[0])
def test_every_family_is_told_by_its_architecture_alone(family):
    from unmask.models.families import Stated, family_of

    for kind in ({"architectures": [family.architectures[0]]}, {"model_type": family.model_types[0]}):
        assert family_of(Stated(Path("config.json"), kind)) is family


@pytest.mark.parametrize(
    ("option", "value", "only"),
    [
        ("block_type", "sequential", "'llama'"),
        ("activation_type", "swiglu", "'silu'"),
        ("layer_norm_type", "gemma_rms", "'rms'"),
        ("layer_norm_with_affine", False, "True"),
        ("bias_for_layer_norm", True, "False"),
        ("rope", False, "True"),
        ("alibi", True, "False"),
        ("include_bias", True, "False"),
        ("attention_layer_norm", True, "False"),
        ("scale_logits", True, "False"),
        ("input_emb_norm", True, "False"),
        ("block_group_size", 2, "1"),
        ("residual_dropout", 0.1, "0.0"),
        ("quantization_config", {"bits": 4}, "None"),
    ],
)
def test_lladas_unused_options_are_refused_by_name(tmp_path, option, value, only):
    folder, _, _ = llada(tmp_path, **{option: value})
    assert said(folder) == f"FOLDER/config.json sets {option} to {value!r}; only {only} is supported."


@pytest.mark.parametrize(
    ("option", "value", "only"),
    [
        ("use_sliding_window", True, "False"),
        ("use_mrope", True, "False"),
        ("partial_rotary_factor", 0.5, "1.0"),
        ("attention_dropout", 0.1, "0.0"),
        ("quantization_config", {"bits": 4}, "None"),
    ],
)
def test_what_the_pass_does_not_do_is_refused_by_name(tmp_path, option, value, only):
    folder, _, _ = qwen(tmp_path, DREAM, **{option: value})
    assert said(folder) == f"FOLDER/config.json sets {option} to {value!r}; only {only} is supported."


def test_settings_that_make_no_network_are_named(tmp_path):
    for field in ("d_model", "rope_theta", "block_type", "weight_tying"):
        folder, _, config = llada(tmp_path)
        write(folder, {**config, field: None}, {})
        needed = f"FOLDER/config.json does not state {field}, which a checkpoint of this kind needs."
        assert said(folder) == needed
    folder, _, _ = qwen(tmp_path, DREAM, rope_theta="absent")
    assert said(folder) == "FOLDER/config.json does not state rope_theta, which a checkpoint of this kind needs."
    folder, _, config = qwen(tmp_path, DREAM)
    write(folder, {**config, "hidden_size": "wide"}, {})
    assert said(folder) == "FOLDER/config.json sets hidden_size to 'wide'; it is a whole number above 0."
    write(folder, {**config, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, {})
    assert said(folder).startswith("FOLDER/config.json asks for rotary frequencies that depend on the length")
    write(folder, {**config, "layer_types": ["full_attention", "sliding_attention"]}, {})
    assert said(folder) == "FOLDER/config.json asks for layers with a sliding window, which is not supported."
    write(folder, {**config, "torch_dtype": "int8"}, {})
    assert said(folder).startswith("FOLDER/config.json states the type 'int8'; float64, float32,")


def test_weights_have_to_be_whole(tmp_path):
    folder, weights, config = llada(tmp_path / "a", shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    gone = "There is no model-00002-of-00003.safetensors in FOLDER, though model.safetensors.index.json names it"
    assert said(folder) == f"{gone}; download it again."
    (folder / "model.safetensors.index.json").write_text("{}")
    assert said(folder) == "FOLDER/model.safetensors.index.json holds no weight_map."

    folder, weights, config = llada(tmp_path / "b")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert said(folder).startswith("FOLDER/model.safetensors is not a whole safetensors file (")
    path.write_bytes(b"<html>404</html>")
    assert said(folder).startswith("FOLDER/model.safetensors is not a whole safetensors file (")

    name = "model.transformer.blocks.1.ff_out.weight"
    write(folder, config, {**weights, name: torch.zeros(48, 81)})
    assert said(folder) == f"FOLDER/model.safetensors: {name} has the shape [48, 81]; config.json asks for [48, 80]."
    write(folder, config, {key: weight for key, weight in weights.items() if key != name})
    assert said(folder) == f"FOLDER holds no tensor {name}."
    write(folder, config, {key: weight for key, weight in weights.items() if ".blocks.1." not in key})
    assert said(folder) == "FOLDER holds no tensor model.transformer.blocks.1.q_proj.weight and 8 more."
    other = "model.transformer.blocks.1.att_proj.weight"
    write(folder, config, {**weights, other: torch.zeros(1)})
    assert said(folder) == f"FOLDER/model.safetensors holds {other}, which this kind of model does not have."
    write(folder, config, {**weights, name: torch.full((48, 80), torch.nan)})
    assert said(folder) == "FOLDER: The logits of this model are not all finite numbers: its weights are damaged."


def test_only_safetensors_are_read(tmp_path):
    folder, _, _ = llada(tmp_path)
    (folder / "model.safetensors").unlink()
    assert said(folder) == "There is no model.safetensors in FOLDER, nor an index of several such files."
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert said(folder) == (
        "FOLDER holds pickled weights only, and a pickle can run code: only safetensors are read. "
        "Convert them with the tool that wrote them."
    )


def test_an_autoregressive_model_is_refused_as_far_as_it_can_be_told(tmp_path):
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    folder, weights, config = qwen(tmp_path, kind, **{**QWEN_TEXT, "mask_token_id": "absent"})
    with_tokenizer(folder, QWEN_SPECIALS[:3])
    assert said(folder, load_model) == (
        "FOLDER has no mask token, neither as mask_token_id in config.json nor in its tokenizer. "
        "An autoregressive model has to be made into a masked diffusion model first: unmask adapt."
    )
    with_tokenizer(folder, QWEN_SPECIALS)
    for causal in ({}, {"is_causal": True}, {"is_causal": None}):
        write(folder, {**config, **causal}, weights)
        assert said(folder, load_model) == (
            "FOLDER/config.json does not say that this Llama attends in both directions. If it was trained to, add "
            '"is_causal": false to the file; an autoregressive model has to be adapted first: unmask adapt.'
        )
    write(folder, {**config, "is_causal": False}, weights)
    assert load_model(folder).mask_id == 260
    write(folder, {**config, "is_causal": False, "eos_token_id": None, "pad_token_id": None}, weights)
    assert said(folder, load_model) == "FOLDER/config.json does not state eos_token_id, and the tokenizer has none."


def test_a_block_length_has_to_be_said_where_the_name_promises_one(tmp_path):
    folder, weights, config = qwen(tmp_path / "Qwen3-0.6B-diffusion-bd3lm-v0.1", A2D)
    assert said(folder) == (
        "FOLDER/config.json does not state the block length of this block-causal model: "
        'add "causal_block": 32 (or what it was trained with; null for full attention) to a copy of the folder.'
    )
    write(folder, {**config, "causal_block": 32}, weights)
    assert loaded(folder).causal_block == 32
    write(folder, {**config, "causal_block": 0}, weights)
    assert said(folder) == "FOLDER/config.json sets causal_block to 0; it is a number of tokens, or null."
