"""Released checkpoints: what the network computes, what is read, written and refused, and the tokenizers."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from unmask.models import CachingPolicy, Policy, load_checkpoint, load_model, save
from unmask.models.check import check
from unmask.models.families import FAMILIES, SUPPORTED
from unmask.models.names import LLADA, SAME
from unmask.models.tiny import CharacterTokenizer

# --- a straight-line pass, without transformers -------------------------------------------------------------


def reference(
    weights: dict[str, Tensor],
    own: bool,
    tokens: list[int],
    heads: int,
    kv: int,
    eps: float,
    theta: float,
    block: int = 0,
) -> Tensor:
    """Logits (L, V) of one row, from the tensors of the file under their names there; `own`: LLaDA's names."""
    weights = {name: weight.double() for name, weight in weights.items()}
    rename = {"self_attn.o_proj": "attn_out", "mlp.gate_proj": "ff_proj", "mlp.down_proj": "ff_out"}
    rename |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ff_norm"}

    def linear(x: Tensor, layer: int, name: str) -> Tensor:
        key = f"model.transformer.blocks.{layer}.{rename.get(name, name.rpartition('.')[2])}" if own else ""
        key = key or f"model.layers.{layer}.{name}"
        return x @ weights[f"{key}.weight"].T + weights.get(f"{key}.bias", torch.zeros(()))

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight

    def norm(x: Tensor, layer: int, name: str) -> Tensor:
        key = f"model.transformer.blocks.{layer}.{rename[name]}" if own else f"model.layers.{layer}.{name}"
        return normed(x, weights[f"{key}.weight"])

    def rotated(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angle = torch.arange(len(x))[:, None] * theta ** (-torch.arange(half).double() / half)
        a, b = x[:, :half], x[:, half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    embedding = weights["model.transformer.wte.weight" if own else "model.embed_tokens.weight"]
    final = weights["model.transformer.ln_f.weight" if own else "model.norm.weight"]
    head = weights.get("model.transformer.ff_out.weight" if own else "lm_head.weight", embedding)
    place = torch.arange(len(tokens))
    seen = place[None, :] // block <= place[:, None] // block if block else torch.ones(len(tokens), len(tokens)) > 0
    layers = 1 + max(int(key.split(".")[3 if own else 2]) for key in weights if ".blocks." in key or ".layers." in key)
    x = embedding[tokens]
    for layer in range(layers):
        y = norm(x, layer, "input_layernorm")
        q, k, v = (linear(y, layer, f"self_attn.{letter}_proj") for letter in "qkv")
        size, outputs = q.shape[-1] // heads, []
        for h in range(heads):
            g = h // (heads // kv)
            one, key = q[:, h * size : (h + 1) * size], k[:, g * size : (g + 1) * size]
            if f"model.layers.{layer}.self_attn.q_norm.weight" in weights:
                one = normed(one, weights[f"model.layers.{layer}.self_attn.q_norm.weight"])
                key = normed(key, weights[f"model.layers.{layer}.self_attn.k_norm.weight"])
            score = rotated(one) @ rotated(key).T / math.sqrt(size)
            outputs.append(score.masked_fill(~seen, -torch.inf).softmax(-1) @ v[:, g * size : (g + 1) * size])
        x = x + linear(torch.cat(outputs, -1), layer, "self_attn.o_proj")
        y = norm(x, layer, "post_attention_layernorm")
        gate, up = linear(y, layer, "mlp.gate_proj"), linear(y, layer, "mlp.up_proj")
        x = x + linear(gate / (1 + torch.exp(-gate)) * up, layer, "mlp.down_proj")
    return normed(x, final) @ head.T


# --- checkpoints in the released layouts --------------------------------------------------------------------

LLADA_CONFIG = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "auto_map": {"AutoConfig": "configuration_llada.LLaDAConfig"},
    "d_model": 48,
    "n_layers": 3,
    "n_heads": 4,
    "n_kv_heads": 4,
    "multi_query_attention": None,
    "mlp_hidden_size": 80,
    "mlp_ratio": 4,
    "vocab_size": 128,
    "embedding_size": 128,
    "max_sequence_length": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "rope_full_precision": True,
    "mask_token_id": 125,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "block_type": "llama",
    "activation_type": "silu",
    "layer_norm_type": "rms",
    "rope": True,
    "weight_tying": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "torch_dtype": "float32",
}
QWEN_CONFIG = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "mask_token_id": 126,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "torch_dtype": "float32",
}
DREAM = {"architectures": ["DreamModel"], "model_type": "Dream", "use_sliding_window": False, "max_window_layers": 1}
SDAR = {"architectures": ["SDARForCausalLM"], "model_type": "sdar", "num_attention_heads": 4, "head_dim": 16}
A2D = {"architectures": ["A2DQwen3LMHeadModel"], "model_type": "a2d-qwen3", "num_attention_heads": 4, "head_dim": 16}


def random_weights(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Where nothing is neutral: no zero bias, no norm of ones."""
    rng = torch.Generator().manual_seed(seed)

    def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1 and name.endswith("weight"):
            return 0.5 + torch.rand(shape, generator=rng)
        return torch.randn(shape, generator=rng) * (0.3 if len(shape) == 1 else 0.25)

    return {name: drawn(name, shape) for name, shape in shapes.items()}


def llada_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, heads = config["d_model"], config["n_heads"]
    narrow = width // heads * (config["n_kv_heads"] or (1 if config["multi_query_attention"] else heads))
    inner, rows = config["mlp_hidden_size"] or config["mlp_ratio"] * width, config["embedding_size"]
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (rows, width), "ln_f.weight": (width,)}
    if not config["weight_tying"]:
        shapes["ff_out.weight"] = (rows, width)
    for i in range(config["n_layers"]):
        out = {"q_proj": width, "k_proj": narrow, "v_proj": narrow}
        if config["include_qkv_bias"]:
            shapes |= {f"blocks.{i}.{name}.bias": (size,) for name, size in out.items()}
        out |= {"attn_out": width, "ff_proj": inner, "up_proj": inner}
        shapes |= {f"blocks.{i}.{name}.weight": (size, width) for name, size in out.items()}
        shapes |= {f"blocks.{i}.ff_out.weight": (width, inner)}
        shapes |= {f"blocks.{i}.{name}.weight": (width,) for name in ("attn_norm", "ff_norm")}
    return {f"model.transformer.{name}": shape for name, shape in shapes.items()}


def qwen_shapes(config: dict[str, Any], bias: bool, norms: bool, head: bool = True) -> dict[str, tuple[int, ...]]:
    width, inner, rows = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    size = config.get("head_dim", width // config["num_attention_heads"])
    wide, narrow = size * config["num_attention_heads"], size * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (rows, width), "model.norm.weight": (width,)}
    if head:
        shapes["lm_head.weight"] = (rows, width)
    for i in range(config["num_hidden_layers"]):
        for letter, out in zip("qkv", (wide, narrow, narrow), strict=True):
            shapes[f"model.layers.{i}.self_attn.{letter}_proj.weight"] = (out, width)
            if bias:
                shapes[f"model.layers.{i}.self_attn.{letter}_proj.bias"] = (out,)
            if norms and letter != "v":
                shapes[f"model.layers.{i}.self_attn.{letter}_norm.weight"] = (size,)
        shapes[f"model.layers.{i}.self_attn.o_proj.weight"] = (width, wide)
        shapes |= {f"model.layers.{i}.mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
        shapes[f"model.layers.{i}.mlp.down_proj.weight"] = (width, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{i}.{name}.weight"] = (width,)
    return shapes


def write(folder: Path, config: dict[str, Any], weights: dict[str, Tensor], shards: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    place = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(weights)}
    for file in set(place.values()):
        save_file({name: weights[name] for name in weights if place[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    return folder


def llada(folder: Path, shards: int = 1, **changes: Any) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
    config = {**LLADA_CONFIG, **changes}
    weights = random_weights(llada_shapes(config))
    return write(folder, config, weights, shards), weights, config


def qwen(folder: Path, kind: dict[str, Any], shards: int = 1, head: bool = True, **changes: Any):
    config = {**QWEN_CONFIG, **kind, **changes}
    config = {name: value for name, value in config.items() if value != "absent"}
    bias, norms = "qwen2" in config["model_type"] or kind is DREAM, "qwen3" in config["model_type"] or kind is SDAR
    weights = random_weights(qwen_shapes(config, bias, norms, head))
    return write(folder, config, weights, shards), weights, config


def loaded(folder: Path, **settings: Any):
    """These vocabularies belong to no text."""
    return load_checkpoint(folder, tokenizer=CharacterTokenizer(), **settings)


@torch.no_grad()
def logits(policy: Policy, tokens: list[int]) -> Tensor:
    return policy(torch.tensor([tokens]), None, torch.arange(len(tokens)))


TOKENS = torch.randint(0, 128, (13,), generator=torch.Generator().manual_seed(1)).tolist()
TOKENS[4] = TOKENS[7] = TOKENS[12] = 125

# --- what is computed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_kv_heads": 2, "shards": 3},
        {"n_kv_heads": None, "multi_query_attention": True},
        {"n_kv_heads": None},
        {"vocab_size": 126, "shards": 2},
        {"mlp_hidden_size": None, "mlp_ratio": 2, "rms_norm_eps": 1e-3, "rope_theta": 1e4},
        {"weight_tying": True},
        {"include_qkv_bias": True, "n_kv_heads": 2},
    ],
    ids=lambda changes: "-".join(changes) or "released",
)
def test_llada_is_what_its_equations_say(tmp_path, changes):
    folder, weights, config = llada(tmp_path, **changes)
    kv = config["n_kv_heads"] or (1 if config["multi_query_attention"] else 4)
    expected = reference(weights, True, TOKENS, 4, kv, config["rms_norm_eps"], config["rope_theta"])
    policy = loaded(folder, dtype=torch.float64)
    assert isinstance(policy, CachingPolicy) and policy.vocabulary == 128 and policy.max_length == 64
    torch.testing.assert_close(logits(policy, TOKENS), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_attention_heads": 4, "num_key_value_heads": 4, "shards": 3},
        {"num_attention_heads": 4, "num_key_value_heads": 1, "rms_norm_eps": 1e-3, "rope_theta": 1e4},
        {"sliding_window": 2},  # does nothing while use_sliding_window is false
    ],
    ids=lambda changes: "-".join(changes) or "released",
)
def test_dream_is_what_its_equations_say_one_place_on(tmp_path, changes):
    folder, weights, config = qwen(tmp_path, DREAM, **changes)
    sizes = [config[name] for name in ("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "rope_theta")]
    said = reference(weights, False, TOKENS, *sizes)
    torch.testing.assert_close(logits(loaded(folder, dtype=torch.float64), TOKENS)[1:], said[:-1], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "changes", "block"),
    [
        (SDAR, {}, 4),
        (SDAR, {"block_size": 8}, 8),
        (A2D, {}, 0),
        (A2D, {"causal_block": 4}, 4),
        (A2D, {"block_size": 5}, 5),
        (A2D, {"causal_block": None, "block_size": 5}, 0),
        ({"architectures": ["A2DQwen2LMHeadModel"], "model_type": "a2d-qwen2"}, {}, 0),
        ({"architectures": ["A2DLlamaLMHeadModel"], "model_type": "a2d-llama"}, {}, 0),
        ({"model_type": "a2d-llama"}, {}, 0),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, {"is_causal": False}, 0),
        ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, {"is_causal": False}, 0),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 8}, {"is_causal": False}, 0),
    ],
)
@pytest.mark.parametrize("length", [12, 13])
def test_the_others_are_what_their_equations_say(tmp_path, kind, changes, block, length):
    folder, weights, config = qwen(tmp_path, kind, **changes)
    expected = reference(weights, False, TOKENS[:length], config["num_attention_heads"], 2, 1e-6, 1e6, block)
    policy = loaded(folder, dtype=torch.float64)
    assert policy.causal_block == (block or None)
    torch.testing.assert_close(logits(policy, TOKENS[:length]), expected, rtol=0, atol=1e-5)


def test_rotary_settings_are_read_in_their_old_and_new_form(tmp_path):
    kind = {"model_type": "a2d-llama"}
    old, _, _ = qwen(tmp_path / "a", kind, rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=1e4)
    new, _, _ = qwen(
        tmp_path / "b",
        kind,
        rope_theta="absent",
        rope_scaling="absent",
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    )
    assert torch.equal(logits(loaded(old), TOKENS), logits(loaded(new), TOKENS))
    torch.testing.assert_close(loaded(old).frequency_D, 1e4 ** (-torch.arange(4) / 4) / 2)


PADDABLE: dict[str, Callable[[Path], Any]] = {
    "llada": lambda folder: loaded(llada(folder, n_kv_heads=2)[0]),
    "dream": lambda folder: loaded(qwen(folder, DREAM)[0]),
    "sdar": lambda folder: loaded(qwen(folder, SDAR)[0]),
    "bert": lambda folder: load_model(bert(folder)),
    "modernbert": lambda folder: load_model(modernbert(folder)),
}


@torch.no_grad()
@pytest.mark.parametrize("family", PADDABLE)
def test_a_padded_row_is_the_row_alone(tmp_path, family):
    policy = PADDABLE[family](tmp_path)
    rows, first = [TOKENS[:5], TOKENS[:13], TOKENS[3:10]], int(family == "dream")
    rows = [[token % policy.vocabulary for token in row] for row in rows]
    alone = [logits(policy, row)[first:] for row in rows]  # Dream does not say the first token, wherever it stands
    for left in (True, False):
        tokens_SL, attended_SL = torch.full((3, 13), 7), torch.zeros(3, 13, dtype=torch.bool)
        for s, row in enumerate(rows):
            where = slice(13 - len(row), None) if left else slice(len(row))
            tokens_SL[s, where], attended_SL[s, where] = torch.tensor(row), True
        both_SLV = policy(tokens_SL, attended_SL, torch.arange(39)).view(3, 13, -1)
        for s, said in enumerate(alone):
            torch.testing.assert_close(both_SLV[s][attended_SL[s]][first:], said, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["llada", "dream", "sdar"])
def test_a_window_over_a_memory_is_the_whole_pass(tmp_path, family, padded):
    policy = PADDABLE[family](tmp_path).double()  # matrices of other shapes are summed in another order
    tokens_SL = torch.tensor([TOKENS[:12], TOKENS[1:13]])
    attended_SL = None
    if padded:
        attended_SL = torch.ones(2, 12, dtype=torch.bool)
        attended_SL[0, :2] = False
    everywhere_Q = torch.arange(24)
    whole_QD, memory = policy.remember(tokens_SL, attended_SL, everywhere_Q)
    assert torch.equal(whole_QD, policy.hidden(tokens_SL, attended_SL, everywhere_Q))
    for first, last in [(0, 12), (4, 8), (8, 12), (3, 4)]:
        at_Q = torch.tensor([12 * s + i for s in range(2) for i in range(first, last)])
        window_QD = policy.hidden_window(memory, tokens_SL, first, last, at_Q)
        torch.testing.assert_close(window_QD, whole_QD[at_Q], rtol=0, atol=1e-6)


@torch.no_grad()
def test_a_changed_block_is_recomputed_exactly_where_attention_is_block_causal(tmp_path):
    policy = PADDABLE["sdar"](tmp_path).double()
    tokens_SL, at_Q = torch.tensor([TOKENS[:12]]), torch.arange(8, 12)
    _, memory = policy.remember(tokens_SL, None, at_Q)
    tokens_SL[0, 8:] = torch.tensor([9, 8, 7, 6])
    changed_QD = policy.hidden_window(memory, tokens_SL, 8, 12, at_Q)
    torch.testing.assert_close(changed_QD, policy.hidden(tokens_SL, None, at_Q), rtol=0, atol=1e-6)
    # What was remembered of the changed block is the new one: an earlier window still is what it was.
    earlier_Q = torch.arange(4, 8)
    earlier_QD = policy.hidden_window(memory, tokens_SL, 4, 8, earlier_Q)
    torch.testing.assert_close(earlier_QD, policy.hidden(tokens_SL, None, earlier_Q), rtol=0, atol=1e-6)


def test_casting_does_not_round_the_rotary_frequencies(tmp_path):
    folder, _, _ = llada(tmp_path, torch_dtype="bfloat16")
    policy = loaded(folder)
    assert {weight.dtype for weight in policy.parameters()} == {torch.bfloat16}
    exact = 5e5 ** (-torch.arange(6, dtype=torch.float64) / 6)
    torch.testing.assert_close(policy.frequency_D.double(), exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(policy.to(torch.float16).frequency_D.double(), exact, rtol=1e-6, atol=0)


# --- what is read and written -------------------------------------------------------------------------------


def test_the_type_is_the_stated_one_unless_another_is_asked_for(tmp_path):
    for name, changes in {"a": {}, "b": {"torch_dtype": "bfloat16"}}.items():
        folder, _, _ = qwen(tmp_path / name, DREAM, **changes)
        stated = torch.bfloat16 if changes else torch.float32
        assert {weight.dtype for weight in loaded(folder).parameters()} == {stated}
        assert {weight.dtype for weight in loaded(folder, dtype=torch.float64).parameters()} == {torch.float64}
    folder, _, _ = qwen(tmp_path / "c", DREAM, torch_dtype="absent", dtype="bfloat16")
    assert loaded(folder).lm.dtype == torch.bfloat16
    folder, weights, config = qwen(tmp_path / "d", DREAM, torch_dtype="absent")
    write(folder, config, {name: weight.half() for name, weight in weights.items()})
    assert loaded(folder).lm.dtype == torch.float16  # nothing stated: as stored


@pytest.mark.parametrize("shard", [5_000_000_000, 40_000])
@pytest.mark.parametrize("make", [lambda f: llada(f, shards=2), lambda f: qwen(f, DREAM), lambda f: qwen(f, SDAR)])
def test_what_is_saved_is_what_was_read(tmp_path, make, shard):
    folder, weights, config = make(tmp_path / "theirs")
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    (folder / "modeling_theirs.py").write_text("raise SystemExit  # never run")
    (folder / "README.md").write_text("theirs")
    policy = loaded(folder)
    save(policy, tmp_path / "ours", max_shard_bytes=shard)
    written: dict[str, Tensor] = {}
    for path in (tmp_path / "ours").glob("*.safetensors"):
        held = load_file(path)
        assert not held.keys() & written.keys()
        assert len(held) == 1 or sum(weight.nbytes for weight in held.values()) <= shard
        written |= held
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], weight) for name, weight in weights.items())
    assert json.loads((tmp_path / "ours" / "config.json").read_text()) == config
    others = {path.name for path in (tmp_path / "ours").iterdir() if path.suffix != ".safetensors"}
    index = {"model.safetensors.index.json"} if shard == 40_000 else set()
    assert others == {"config.json", "generation_config.json", "modeling_theirs.py"} | index
    if index:
        listed = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
        assert listed["weight_map"].keys() == weights.keys()
        assert listed["metadata"]["total_size"] == sum(weight.nbytes for weight in weights.values())
    assert torch.equal(logits(loaded(tmp_path / "ours"), TOKENS), logits(policy, TOKENS))


def test_a_changed_model_is_saved_in_its_own_type(tmp_path):
    folder, _, config = llada(tmp_path / "theirs")
    policy = loaded(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        policy.lm.model.layers[1].mlp.down_proj.weight.add_(1)
    save(policy, tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text()) == {**config, "torch_dtype": "bfloat16"}
    held = load_file(tmp_path / "ours" / "model.safetensors")
    name = "model.transformer.blocks.1.ff_out.weight"
    assert torch.equal(held[name], policy.lm.model.layers[1].mlp.down_proj.weight)
    again = loaded(tmp_path / "ours")
    assert all(map(torch.equal, policy.parameters(), again.parameters()))


def test_a_failed_save_leaves_the_checkpoint_that_was_there(tmp_path, monkeypatch):
    folder, weights, _ = llada(tmp_path / "model")
    policy = loaded(folder)

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        save(policy, folder)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert load_file(folder / "model.safetensors").keys() == weights.keys()
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match="give one other than the current folder"):
        save(policy, ".")


def test_a_model_does_not_follow_its_file(tmp_path):
    folder, _, _ = llada(tmp_path)
    policy = loaded(folder)
    before = logits(policy, TOKENS)
    path = folder / "model.safetensors"
    with path.open("r+b") as file:  # in place: the same file, other bytes
        file.seek(path.stat().st_size // 2)
        file.write(b"\xff" * 1000)
    assert torch.equal(logits(policy, TOKENS), before)


def test_a_head_that_is_the_embedding_is_shared(tmp_path):
    kind, tied = {"model_type": "a2d-llama"}, {"tie_word_embeddings": True}
    folder, weights, config = qwen(tmp_path / "without", kind, head=False, **tied)
    policy = loaded(folder, dtype=torch.float64)
    assert policy.lm.lm_head.weight is policy.lm.model.embed_tokens.weight
    expected = reference(weights, False, TOKENS, 6, 2, 1e-6, 1e6)
    torch.testing.assert_close(logits(policy, TOKENS), expected, rtol=0, atol=1e-5)
    shipped = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    equal = loaded(write(tmp_path / "equal", config, shipped))
    assert equal.lm.lm_head.weight is equal.lm.model.embed_tokens.weight
    save(equal, tmp_path / "saved")
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() == weights.keys()
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == config


def test_a_head_that_was_shipped_and_differs_is_kept_apart(tmp_path):
    folder, weights, config = qwen(tmp_path / "theirs", {"model_type": "a2d-llama"}, tie_word_embeddings=True)
    policy = loaded(folder, dtype=torch.float64)
    expected = reference(weights, False, TOKENS, 6, 2, 1e-6, 1e6)
    torch.testing.assert_close(logits(policy, TOKENS), expected, rtol=0, atol=1e-5)
    save(policy, tmp_path / "ours")
    assert load_file(tmp_path / "ours" / "model.safetensors").keys() == weights.keys()
    # Or else whoever reads it ties them again, and loses the head.
    assert json.loads((tmp_path / "ours" / "config.json").read_text()) == {
        **config,
        "tie_word_embeddings": False,
        "torch_dtype": "float64",
    }
    assert torch.equal(logits(loaded(tmp_path / "ours"), TOKENS), logits(policy, TOKENS))


def test_names_go_both_ways_for_modules_and_tensors():
    pairs = {
        "model.layers.3.self_attn.o_proj.weight": "model.transformer.blocks.3.attn_out.weight",
        "model.layers.31.mlp.down_proj.weight": "model.transformer.blocks.31.ff_out.weight",
        "model.layers.3.mlp.gate_proj": "model.transformer.blocks.3.ff_proj",
        "model.layers.0.self_attn.q_proj.bias": "model.transformer.blocks.0.q_proj.bias",
        "model.layers.0.self_attn.v_proj.lora_A.weight": "model.transformer.blocks.0.v_proj.lora_A.weight",
        "model.layers.12": "model.transformer.blocks.12",
        "lm_head.weight": "model.transformer.ff_out.weight",
        "lm_head": "model.transformer.ff_out",
        "model.embed_tokens.weight": "model.transformer.wte.weight",
        "model.norm": "model.transformer.ln_f",
    }
    for native, own in pairs.items():
        assert LLADA.own(native) == own and LLADA.native(own) == native
        assert SAME.own(native) == SAME.native(native) == native
    assert LLADA.native("model.transformer.wpe.weight") == "model.transformer.wpe.weight"  # no such thing: reported so


def test_an_adapter_is_read_with_its_base(tmp_path):
    pytest.importorskip("peft")
    from unmask.models.lora import LoraOptions, add_adapter, save_adapter

    folder = with_tokenizer(llada(tmp_path / "base", **LLADA_TEXT)[0], LLADA_SPECIALS)
    policy = load_model(folder)
    before = logits(policy, TOKENS)
    add_adapter(policy, LoraOptions(rank=2), seed=0)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if "lora_B" in name:
                weight.normal_(generator=torch.Generator().manual_seed(0))
    save_adapter(policy, tmp_path / "adapter", str(folder))
    again = load_model(tmp_path / "adapter")
    assert torch.equal(logits(again, TOKENS), logits(policy, TOKENS))
    assert not torch.allclose(logits(again, TOKENS), before)
    with pytest.raises(ValueError, match="This model has an adapter: merge it first"):
        save(policy, tmp_path / "whole")


# --- tokenizers ---------------------------------------------------------------------------------------------

LLADA_SPECIALS = ["<|startoftext|>", "<|endoftext|>", "<|mdm_mask|>", "<|start_header_id|>", "<|end_header_id|>"]
LLADA_SPECIALS += ["<|eot_id|>"]
QWEN_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|beginoftext|>", "<|mask|>"]
LLADA_TEXT = {"vocab_size": 272, "embedding_size": 272, "mask_token_id": 258, "eos_token_id": 257, "pad_token_id": 257}
QWEN_TEXT = {"vocab_size": 272, "mask_token_id": 260, "eos_token_id": 256, "pad_token_id": 256}
LLADA_TEMPLATE = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)
QWEN_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)


def with_tokenizer(folder: Path, specials: list[str], fast: bool = True, **config: Any) -> Path:
    """One token for each byte, then these; as tokenizer.json, or as vocab.json and merges.txt."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if fast:
        tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in specials])
        tokenizer.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    else:
        tokenizer.model.save(str(folder))
        flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
        config["added_tokens_decoder"] = {str(256 + i): {"content": p, **flags} for i, p in enumerate(specials)}
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False, **config}))
    return folder


def test_lladas_prompt_is_its_template_once(tmp_path):
    settings = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "chat_template": LLADA_TEMPLATE}
    folder = with_tokenizer(llada(tmp_path / "theirs", **LLADA_TEXT)[0], LLADA_SPECIALS, **settings)
    policy = load_model(folder)
    tokenizer, byte = policy.tokenizer, policy.tokenizer.encode
    assert byte("a<|eot_id|>") == byte("a") + [261]
    header = [259, *byte("user"), 260, *byte("\n\n")], [259, *byte("assistant"), 260, *byte("\n\n")]
    assert tokenizer.prompt("  2 + 2? ") == [256, *header[0], *byte("2 + 2?"), 261, *header[1]]
    assert (policy.mask_id, policy.eos_id, policy.pad_id) == (258, 257, 257)
    four = byte("4 ä")
    assert tokenizer.decode([*four, 257, 9, 9]) == tokenizer.decode([*four, 261, 9]) == "4 ä"  # both end a turn
    assert tokenizer.decode([259, *four[:2], 258, *four[2:], 260, 270]) == "4 \ufffdä\ufffd"
    assert tokenizer.decode([257]) == tokenizer.decode([]) == ""
    assert tokenizer.show([*byte("4 a\n"), 258, 258, 257, four[2], 270]) == "4 a\u21b5\u00b7\u00b7\u00b6\ufffd\ufffd"
    save(policy, tmp_path / "ours")
    assert load_model(tmp_path / "ours").tokenizer.prompt("2 + 2?") == tokenizer.prompt("2 + 2?")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (folder / name).read_bytes()


def test_dreams_tokenizer_is_read_without_its_code(tmp_path):
    folder, _, _ = qwen(tmp_path, DREAM, **QWEN_TEXT)
    settings = {"tokenizer_class": "DreamTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_dream.Dream", None]}}
    settings |= {"eos_token": "<|endoftext|>", "mask_token": "<|mask|>", "chat_template": QWEN_TEMPLATE}
    with_tokenizer(folder, QWEN_SPECIALS, fast=False, **settings)
    (folder / "tokenization_dream.py").write_text("raise SystemExit")
    policy = load_model(folder)
    byte = policy.tokenizer.encode
    turn = [257, *byte("user\nhi"), 258, *byte("\n"), 257, *byte("assistant\n")]
    assert policy.tokenizer.prompt("hi") == turn
    assert policy.tokenizer.decode([*byte("so"), 258, 256]) == policy.tokenizer.decode([*byte("so"), 256, 258]) == "so"
    assert policy.mask_id == policy.tokenizer.fast.mask_token_id == 260


def test_a2d_takes_the_tokenizers_mask_and_never_thinks(tmp_path):
    folder, _, _ = qwen(tmp_path, A2D, **{**QWEN_TEXT, "mask_token_id": "absent", "eos_token_id": [258, 256]})
    with_tokenizer(folder, QWEN_SPECIALS, mask_token="<|mask|>", eos_token="<|im_end|>")
    (folder / "chat_template.jinja").write_text(QWEN_TEMPLATE)
    policy = load_model(folder)
    assert (policy.mask_id, policy.eos_id, policy.pad_id) == (260, 258, 256)
    assert policy.tokenizer.decode(policy.tokenizer.prompt("hi")[-20:]) == "\n<think>\n\n</think>\n\n"
    assert policy.tokenizer.end_ids == {256, 258}


def test_without_a_template_a_prompt_is_the_text(tmp_path):
    folder = with_tokenizer(qwen(tmp_path, SDAR, **QWEN_TEXT)[0], QWEN_SPECIALS)
    tokenizer = load_model(folder).tokenizer
    assert tokenizer.prompt("2 + 2?") == tokenizer.encode("2 + 2?")
    assert tokenizer.decode(tokenizer.encode("2 + 2?")) == "2 + 2?"


# --- encoders -----------------------------------------------------------------------------------------------

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "a",
    "two",
    "and",
    "##ish",
    "four",
    "[",
    "]",
    "/",
    "answer",
    "question",
]


def encoder(folder: Path, lm: Any, **changes: Any) -> Path:
    """As transformers saves it, with weights where nothing is neutral."""
    with torch.no_grad():
        for name, weight in random_weights({n: tuple(w.shape) for n, w in lm.named_parameters()}).items():
            lm.get_parameter(name).copy_(weight)
    lm.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))
    return folder


SMALL = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "pad_token_id": 0}


def bert(folder: Path, **changes: Any) -> Path:
    from transformers import BertConfig, BertForMaskedLM

    return encoder(
        folder, BertForMaskedLM(BertConfig(**SMALL, num_hidden_layers=2, max_position_embeddings=20)), **changes
    )


def modernbert(folder: Path, vocab_size: int = 32) -> Path:
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 3)
    sizes = {**SMALL, "vocab_size": vocab_size, "num_hidden_layers": 4, "max_position_embeddings": 64}
    return encoder(folder, ModernBertForMaskedLM(ModernBertConfig(**sizes, **tokens, local_attention=4)))


@torch.no_grad()
@pytest.mark.parametrize("make", [bert, modernbert])
def test_encoders_say_what_transformers_says(tmp_path, make):
    from transformers import AutoModelForMaskedLM

    folder = make(tmp_path / "theirs")
    policy, theirs = load_model(folder), AutoModelForMaskedLM.from_pretrained(folder)
    assert isinstance(policy, Policy) and not isinstance(policy, CachingPolicy)
    tokens_SL = torch.tensor([TOKENS, TOKENS[::-1]]) % 32
    ours_SLV = policy(tokens_SL, None, torch.arange(26)).view(2, 13, -1)
    torch.testing.assert_close(ours_SLV, theirs(input_ids=tokens_SL).logits, rtol=0, atol=1e-6)
    # Padding far beyond the local window, where our masks are not transformers' own.
    attended_SL = torch.ones(2, 13, dtype=torch.bool)
    attended_SL[0, :9] = attended_SL[1, 11:] = False
    place_SL = (attended_SL.cumsum(1) - 1).clamp(min=0)
    theirs_SLV = theirs(input_ids=tokens_SL, attention_mask=attended_SL.long(), position_ids=place_SL).logits
    ours_SLV = policy(tokens_SL, attended_SL, torch.arange(26)).view(2, 13, -1)
    torch.testing.assert_close(ours_SLV[attended_SL], theirs_SLV[attended_SL], rtol=0, atol=1e-6)
    hidden_QD = policy.hidden(tokens_SL, None, torch.tensor([3, 20]))
    assert torch.equal(policy.head(hidden_QD), policy(tokens_SL, None, torch.tensor([3, 20])))
    # No dropout, in training either: two passes over one canvas are one.
    policy.train()
    assert torch.equal(policy.hidden(tokens_SL, None, torch.tensor([3, 20])), hidden_QD)
    save(policy, tmp_path / "ours")
    ours, same = load_file(tmp_path / "ours" / "model.safetensors"), load_file(folder / "model.safetensors")
    assert ours.keys() == same.keys() and all(torch.equal(ours[name], same[name]) for name in same)
    assert torch.equal(load_model(tmp_path / "ours").hidden(tokens_SL, None, torch.tensor([3, 20])), hidden_QD)
    with pytest.raises(ValueError, match=f"This model takes at most {policy.max_length} tokens, not 70."):
        policy(torch.ones(1, 70, dtype=torch.long), None, torch.tensor([0]))


def test_the_first_berts_are_read_with_their_old_names_and_their_other_heads(tmp_path):
    folder = bert(tmp_path, architectures=["BertForPreTraining"])
    expected = logits(load_model(folder), [5, 6, 4, 9])
    weights = load_file(folder / "model.safetensors")
    weights = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): weight for name, weight in weights.items()}
    weights = {name.replace("LayerNorm.bias", "LayerNorm.beta"): weight for name, weight in weights.items()}
    others = {"bert.pooler.dense.weight": torch.ones(32, 32), "cls.seq_relationship.bias": torch.ones(2)}
    save_file({**weights, **others}, folder / "model.safetensors")
    assert torch.equal(logits(load_model(folder), [5, 6, 4, 9]), expected)


def test_an_encoder_ends_where_padding_begins(tmp_path):
    policy = load_model(modernbert(tmp_path))
    assert (policy.mask_id, policy.eos_id, policy.pad_id) == (4, 0, 0)  # the stated end token is the separator
    tokenizer = policy.tokenizer
    assert tokenizer.encode("Two and fourish") == [6, 7, 9, 8]
    assert tokenizer.decode([6, 7, 9, 8, 0, 6]) == "two and fourish"
    assert tokenizer.pieces([6, 9, 8, 4, 0]) == [" two", " four", "ish", "\u00b7", "\u00b6"]


def test_bert_chat_is_a_template_and_a_closing_word(tmp_path):
    template = "{% for m in messages %}[Question]\n{{ m['content'] | trim }}\n[/Question]\n\n{% endfor %}[Answer]\n"
    folder = modernbert(tmp_path, vocab_size=272)
    (folder / "chat_template.jinja").write_text(template + "{# closed by [/Answer] #}")
    with_tokenizer(folder, ["[PAD]", "[MASK]"], pad_token="[PAD]", mask_token="[MASK]")
    tokenizer = load_model(folder).tokenizer
    assert tokenizer.prompt(" two ") == tokenizer.encode("[Question]\ntwo\n[/Question]\n\n[Answer]\n")
    assert tokenizer.decode(tokenizer.encode("four\n[/Answer]\n[Question]")) == "four\n"


# --- what is refused, and what is said ----------------------------------------------------------------------


def said(folder: Path, load: Callable[[Path], Any] = loaded) -> str:
    """What loading refuses to do, without the folder's own name."""
    with pytest.raises(ValueError) as error:
        load(folder)
    return str(error.value).replace(str(folder), "FOLDER")


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
    assert said(folder).startswith("FOLDER/config.json: Validation error for field 'hidden_size': TypeError")
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


def test_tokenizers_have_to_be_there_and_fit(tmp_path):
    folder, weights, config = llada(tmp_path, **LLADA_TEXT)
    assert said(folder, load_model) == (
        "There is no tokenizer in FOLDER: neither tokenizer.json, nor vocab.json and merges.txt, nor vocab.txt."
    )
    (folder / "tokenizer.json").write_text("{}")
    assert said(folder, load_model).startswith("The tokenizer in FOLDER cannot be read: ")
    with_tokenizer(folder, LLADA_SPECIALS)
    write(folder, {**config, "mask_token_id": 272}, weights)
    assert said(folder, load_model) == "FOLDER/config.json: the mask token 272 is outside the vocabulary of 272."
    write(folder, {**config, "eos_token_id": -1}, weights)
    assert said(folder, load_model) == "FOLDER/config.json: the end token -1 is outside the vocabulary of 272."
    folder, _, _ = llada(tmp_path, **{**LLADA_TEXT, "embedding_size": 260, "mask_token_id": 258})
    assert said(folder, load_model) == "The tokenizer in FOLDER has 262 tokens, the model only 260."


def test_an_autoregressive_model_is_refused_as_far_as_it_can_be_told(tmp_path):
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    folder, weights, config = qwen(tmp_path, kind, **{**QWEN_TEXT, "mask_token_id": "absent"})
    with_tokenizer(folder, QWEN_SPECIALS[:3])
    assert said(folder, load_model) == (
        "FOLDER has no mask token, neither as mask_token_id in config.json nor in its tokenizer. "
        "An autoregressive model has to be made into a masked diffusion model first."
    )
    with_tokenizer(folder, QWEN_SPECIALS)
    for causal in ({}, {"is_causal": True}, {"is_causal": None}):
        write(folder, {**config, **causal}, weights)
        assert said(folder, load_model) == (
            "FOLDER/config.json does not say that this Llama attends in both directions. If it was trained to, add "
            '"is_causal": false to the file; an autoregressive model has to be adapted first.'
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


class Saying(torch.nn.Module):
    """A policy whose logits are the sum of the tokens that a position sees."""

    vocabulary, max_length = 11, 64

    def __init__(self, seen: Callable[[int, int], bool]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, tokens_SL: Tensor, attended_SL: Tensor | None, at_Q: Tensor) -> Tensor:
        place = int(at_Q[0])
        visible = [token for j, token in enumerate(tokens_SL[0].tolist()) if self.seen(place, j)]
        return torch.tensor([[float(sum(visible))]])


def test_attention_is_checked_as_it_is_declared():
    causal, full = Saying(lambda i, j: j <= i), Saying(lambda i, j: True)
    blocks = Saying(lambda i, j: j // 4 <= i // 4)
    check(full, "cpu")
    check(full, "cpu", first=1)
    check(blocks, "cpu", causal_block=4)
    check(blocks, "cpu", first=1, causal_block=4)
    check(causal, "cpu", causal_block=1)
    with pytest.raises(ValueError, match="A later token does not change what this model says of an earlier one"):
        check(causal, "cpu")
    with pytest.raises(ValueError, match="A later token does not change what this model says of an earlier one"):
        check(causal, "cpu", causal_block=4)
    with pytest.raises(ValueError, match="A later block changes what this model says of an earlier one"):
        check(full, "cpu", causal_block=4)


# --- the hub ------------------------------------------------------------------------------------------------


def test_from_the_hub_come_no_code_and_no_pickles(tmp_path, monkeypatch):
    from fnmatch import fnmatch

    folder, _, _ = qwen(tmp_path / "snapshot", DREAM, **QWEN_TEXT, auto_map={"AutoModel": "modeling_dream.DreamModel"})
    settings = {
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "eos_token": "<|endoftext|>",
    }
    with_tokenizer(folder, QWEN_SPECIALS, **settings)
    asked: dict[str, Any] = {}

    def snapshot(name: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.update(name=name, wanted=lambda file: any(fnmatch(file, pattern) for pattern in allow_patterns))
        assert ignore_patterns == ["*/*"]
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    policy = load_model("Dream-org/Dream-v0-Instruct-7B")
    assert asked["name"] == "Dream-org/Dream-v0-Instruct-7B"
    for file in ("config.json", "model-00001-of-00004.safetensors", "merges.txt", "vocab.json", "chat_template.jinja"):
        assert asked["wanted"](file)
    for file in ("modeling_dream.py", "pytorch_model.bin", "model.pt", "README.md", "x.gguf"):
        assert not asked["wanted"](file)
    # What is saved says where its code is, since it does not lie beside it.
    save(policy, tmp_path / "ours")
    config, tokens = (
        json.loads((tmp_path / "ours" / name).read_text()) for name in ("config.json", "tokenizer_config.json")
    )
    there = "Dream-org/Dream-v0-Instruct-7B--"
    assert config["auto_map"] == {"AutoModel": f"{there}modeling_dream.DreamModel"}
    assert tokens["auto_map"] == {"AutoTokenizer": [f"{there}tokenization_dream.DreamTokenizer", None]}
    shutil.rmtree(folder)
    save(policy, tmp_path / "again")  # also when the snapshot is gone
    assert load_model(tmp_path / "again").mask_id == 260


def test_a_model_that_is_nowhere_is_explained(monkeypatch):
    with pytest.raises(ValueError) as error:
        load_model("runs/nosuch/checkpoint")
    assert str(error.value) == (
        "There is no model 'runs/nosuch/checkpoint': give \"tiny\", a folder that holds a config.json, or an id "
        "such as GSAI-ML/LLaDA-8B-Instruct."
    )
    with pytest.raises(ValueError) as error:  # the tests run offline
        load_model("nosuch/nosuch-8B")
    assert str(error.value) == (
        "There is no folder nosuch/nosuch-8B, and the hub cannot be reached for a model of that name. "
        "Download it where there is a connection and give its folder."
    )

    def unknown(*_: Any, **__: Any) -> str:
        from huggingface_hub.errors import RepositoryNotFoundError

        raise RepositoryNotFoundError.__new__(RepositoryNotFoundError)

    monkeypatch.setattr("huggingface_hub.snapshot_download", unknown)
    with pytest.raises(ValueError) as error:
        load_model("nosuch/nosuch-8B")
    assert str(error.value) == "There is no folder nosuch/nosuch-8B, and no such model on the hub that you may read."
