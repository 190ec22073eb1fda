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
from wording import mentions


def test_a_config_has_to_be_there_and_be_one(tmp_path):
    assert mentions(said(tmp_path), "config.json", "FOLDER")
    (tmp_path / "config.json").write_text("{oh")
    assert mentions(said(tmp_path), "FOLDER/config.json", "JSON")
    (tmp_path / "config.json").write_text("[]")
    assert mentions(said(tmp_path), "FOLDER/config.json", "JSON object")
    (tmp_path / "config.json").write_text("{}")
    assert mentions(said(tmp_path), "FOLDER/config.json", "architectures", "model_type")


@pytest.mark.parametrize(
    ("stated", "called"),
    [
        ({"model_type": "llada2_moe_veomni"}, "LLaDA2 with merged experts"),
        ({"architectures": ["DiffusionGemmaForBlockDiffusion"]}, "DiffusionGemma"),
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "GPT2LMHeadModel"),
        ({"architectures": ["LlamaForMultipleChoice"], "model_type": "llama"}, "LlamaForMultipleChoice"),
    ],
)
def test_other_families_are_refused_by_name(tmp_path, stated, called):
    (tmp_path / "config.json").write_text(json.dumps(stated))
    assert mentions(said(tmp_path), "FOLDER/config.json", called, SUPPORTED)


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
    from unmask.models.config_file import ConfigFile
    from unmask.models.recognition import family_of, network_of

    config = {**QWEN_CONFIG, **kind, **dict(zip(QWEN_SIZES, sizes, strict=False)), **rest}
    stated = ConfigFile(Path("config.json"), config)
    lm, _ = network_of(family_of(stated), stated)  # without storage
    assert sum(weight.numel() for weight in lm.parameters()) == parameters


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.architectures[0])
def test_every_family_is_told_by_its_architecture_alone(family):
    from unmask.models.config_file import ConfigFile
    from unmask.models.recognition import family_of

    for kind in ({"architectures": [family.architectures[0]]}, {"model_type": family.model_types[0]}):
        assert family_of(ConfigFile(Path("config.json"), kind)) is family


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
    assert mentions(said(folder), "FOLDER/config.json", option, repr(value), only)


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
    assert mentions(said(folder), "FOLDER/config.json", option, repr(value), only)


def test_settings_that_make_no_network_are_named(tmp_path):
    for field in ("d_model", "rope_theta", "block_type", "weight_tying"):
        folder, _, config = llada(tmp_path)
        write(folder, {**config, field: None}, {})
        assert mentions(said(folder), "FOLDER/config.json", field)
    folder, _, _ = qwen(tmp_path, DREAM, rope_theta="absent")
    assert mentions(said(folder), "FOLDER/config.json", "rope_theta")
    folder, _, config = qwen(tmp_path, DREAM)
    write(folder, {**config, "hidden_size": "wide"}, {})
    assert mentions(said(folder), "FOLDER/config.json", "hidden_size", "wide")
    write(folder, {**config, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, {})
    assert mentions(said(folder), "FOLDER/config.json", "rotary")
    write(folder, {**config, "layer_types": ["full_attention", "sliding_attention"]}, {})
    assert mentions(said(folder), "FOLDER/config.json", "sliding window")
    write(folder, {**config, "torch_dtype": "int8"}, {})
    assert mentions(said(folder), "FOLDER/config.json", "int8", "float64", "float32")


def test_weights_have_to_be_whole(tmp_path):
    folder, weights, config = llada(tmp_path / "a", shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert mentions(said(folder), "model-00002-of-00003.safetensors", "FOLDER", "model.safetensors.index.json")
    (folder / "model.safetensors.index.json").write_text("{}")
    assert mentions(said(folder), "FOLDER/model.safetensors.index.json", "weight_map")

    folder, weights, config = llada(tmp_path / "b")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert mentions(said(folder), "FOLDER/model.safetensors")
    path.write_bytes(b"<html>404</html>")
    assert mentions(said(folder), "FOLDER/model.safetensors")

    name = "model.transformer.blocks.1.ff_out.weight"
    write(folder, config, {**weights, name: torch.zeros(48, 81)})
    assert mentions(said(folder), "FOLDER/model.safetensors", name, [48, 81], "config.json", [48, 80])
    write(folder, config, {key: weight for key, weight in weights.items() if key != name})
    assert mentions(said(folder), "FOLDER", name)
    write(folder, config, {key: weight for key, weight in weights.items() if ".blocks.1." not in key})
    assert mentions(said(folder), "FOLDER", "model.transformer.blocks.1.q_proj.weight", 8)
    other = "model.transformer.blocks.1.att_proj.weight"
    write(folder, config, {**weights, other: torch.zeros(1)})
    assert mentions(said(folder), "FOLDER/model.safetensors", other)
    write(folder, config, {**weights, name: torch.full((48, 80), torch.nan)})
    assert mentions(said(folder), "FOLDER", "logits", "finite")


def test_only_safetensors_are_read(tmp_path):
    folder, _, _ = llada(tmp_path)
    (folder / "model.safetensors").unlink()
    assert mentions(said(folder), "model.safetensors", "FOLDER")
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert mentions(said(folder), "FOLDER", "pickle", "safetensors")


def test_an_autoregressive_model_is_refused_as_far_as_it_can_be_told(tmp_path):
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    folder, weights, config = qwen(tmp_path, kind, **{**QWEN_TEXT, "mask_token_id": "absent"})
    with_tokenizer(folder, QWEN_SPECIALS[:3])
    assert mentions(said(folder, load_model), "FOLDER", "mask_token_id", "config.json", "unmask adapt")
    with_tokenizer(folder, QWEN_SPECIALS)
    for causal in ({}, {"is_causal": True}, {"is_causal": None}):
        write(folder, {**config, **causal}, weights)
        assert mentions(said(folder, load_model), "FOLDER/config.json", '"is_causal": false', "unmask adapt")
    write(folder, {**config, "is_causal": False}, weights)
    assert load_model(folder).mask_id == 260
    write(folder, {**config, "is_causal": False, "eos_token_id": None, "pad_token_id": None}, weights)
    assert mentions(said(folder, load_model), "FOLDER/config.json", "eos_token_id", "tokenizer")


def test_a_block_length_has_to_be_said_where_the_name_promises_one(tmp_path):
    folder, weights, config = qwen(tmp_path / "Qwen3-0.6B-diffusion-bd3lm-v0.1", A2D)
    assert mentions(said(folder), "FOLDER/config.json", "causal_block=N", '"block_size": N', 32)
    write(folder, {**config, "causal_block": 32}, weights)
    assert loaded(folder).causal_block == 32
    write(folder, {**config, "causal_block": 0}, weights)
    assert mentions(said(folder), "FOLDER/config.json", "causal_block", 0)
