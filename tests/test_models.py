"""What the networks of released checkpoints compute."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import A2D, DREAM, SDAR, TOKENS, bert, llada, loaded, logits, modernbert, qwen, reference
from unmask.core.policy import CachingPolicy, Policy
from unmask.models import load_model, save
from unmask.models.load import check_attention


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
    policy = PADDABLE[family](tmp_path).double()
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
            torch.testing.assert_close(both_SLV[s][attended_SL[s]][first:], said, rtol=0, atol=1e-10)


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
    torch.testing.assert_close(whole_QD, policy.hidden(tokens_SL, attended_SL, everywhere_Q), rtol=0, atol=1e-12)
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


class Saying(torch.nn.Module):
    """A policy whose logits are the sum of the tokens that a position sees."""

    vocabulary, max_length, mask_id = 11, 64, 3

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
    check_attention(full, "cpu")
    check_attention(full, "cpu", first=1)
    check_attention(blocks, "cpu", causal_block=4)
    check_attention(blocks, "cpu", first=1, causal_block=4)
    check_attention(causal, "cpu", causal_block=1)
    with pytest.raises(ValueError, match="later token"):
        check_attention(causal, "cpu")
    with pytest.raises(ValueError, match="later token"):
        check_attention(causal, "cpu", causal_block=4)
    with pytest.raises(ValueError, match="later block"):
        check_attention(full, "cpu", causal_block=4)
