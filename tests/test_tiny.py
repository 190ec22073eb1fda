"""The embedded model: what the Policy contract promises, and its tokenizer and files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from unmask.core.policy import CachingPolicy
from unmask.models import Tiny, TinyShape, load_model, load_tiny, save, tiny_policy
from unmask.models.tiny import EOS, MASK, PAD, CharacterTokenizer

SMALL = TinyShape(width=16, layers=2, heads=2, hidden=32, max_length=40)


@pytest.fixture(scope="module")
def policy():
    return tiny_policy(SMALL, seed=3).double()


def canvas(*shape: int) -> torch.Tensor:
    return torch.randint(3, CharacterTokenizer.size, shape, generator=torch.Generator().manual_seed(0))


def full(tokens_SL: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(tokens_SL, dtype=torch.bool)


def test_it_is_bidirectional(policy):
    tokens_SL = canvas(1, 9)
    moved_SL = tokens_SL.clone()
    moved_SL[0, -1] = MASK
    first = torch.tensor([0])
    difference = policy(tokens_SL, full(tokens_SL), first) - policy(moved_SL, full(tokens_SL), first)
    assert difference.abs().max() > 1e-6


def test_it_is_bidirectional_under_padding_too(policy):
    tokens_SL, attended_SL = canvas(1, 9), torch.ones(1, 9, dtype=torch.bool)
    attended_SL[0, 0] = False
    moved_SL = tokens_SL.clone()
    moved_SL[0, -1] = MASK
    first = torch.tensor([1])
    difference = policy(tokens_SL, attended_SL, first) - policy(moved_SL, attended_SL, first)
    assert difference.abs().max() > 1e-6


def test_padding_changes_nothing(policy):
    rows = [canvas(1, length)[0] for length in (5, 9, 7)]
    tokens_SL, attended_SL = torch.full((3, 9), PAD), torch.zeros(3, 9, dtype=torch.bool)
    for s, row_L in enumerate(rows):
        tokens_SL[s, 9 - len(row_L) :] = row_L
        attended_SL[s, 9 - len(row_L) :] = True
    batched_QV = policy(tokens_SL, attended_SL, attended_SL.flatten().nonzero().squeeze(1))
    alone_QV = torch.cat([policy(row_L[None], full(row_L[None]), torch.arange(len(row_L))) for row_L in rows])
    torch.testing.assert_close(batched_QV, alone_QV, rtol=0, atol=1e-10)

    tokens_SL[~attended_SL] = 17  # whatever stands there
    other_QV = policy(tokens_SL, attended_SL, attended_SL.flatten().nonzero().squeeze(1))
    torch.testing.assert_close(other_QV, alone_QV, rtol=0, atol=1e-10)


def of_transformers(policy: Tiny) -> torch.nn.Module:
    """The same weights in transformers' own class, which runs its own forward."""
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = LlamaForCausalLM(LlamaConfig.from_dict(policy.origin.config)).eval()
    for name, weight in policy.lm.named_parameters():  # and no buffer: rotary frequencies stay in fp32
        theirs.get_parameter(name).data = weight.data
    return theirs


@torch.no_grad()
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2**-7)]
)
def test_logits_are_those_of_transformers(dtype, tolerance):
    """In bf16 up to one unit in the last place of a logit of 1: rotated in fp32 they are further off."""
    policy, tokens_SL = tiny_policy(SMALL, seed=3).to(dtype), canvas(3, 8)
    at_Q = torch.tensor([0, 7, 8, 21, 23, 8])
    logits_SLV = of_transformers(policy)(input_ids=tokens_SL).logits
    asked_QV = policy(tokens_SL, None, at_Q)
    expected_QV = logits_SLV[at_Q // 8, at_Q % 8].to(asked_QV.dtype)
    torch.testing.assert_close(asked_QV, expected_QV, rtol=0, atol=tolerance)

    attended_SL = torch.ones(3, 8, dtype=torch.bool)
    attended_SL[0, :3] = attended_SL[2, 0] = False
    place = {"attention_mask": attended_SL, "position_ids": (attended_SL.cumsum(1) - 1).clamp(min=0)}
    padded_QV = of_transformers(policy)(input_ids=tokens_SL, **place).logits.flatten(0, 1)[at_Q]
    asked_QV = policy(tokens_SL, attended_SL, at_Q)
    real_Q = attended_SL.flatten()[at_Q]
    expected_QV = padded_QV[real_Q].to(asked_QV.dtype)
    torch.testing.assert_close(asked_QV[real_Q], expected_QV, rtol=0, atol=tolerance)


def test_a_call_is_the_head_on_the_trunk(policy):
    tokens_SL, at_Q = canvas(2, 6), torch.tensor([1, 4, 11])
    hidden_QD = policy.hidden(tokens_SL, None, at_Q)
    assert hidden_QD.shape == (3, SMALL.width) and isinstance(policy, CachingPolicy)
    assert torch.equal(policy.head(hidden_QD), policy(tokens_SL, None, at_Q))


def test_no_mask_is_the_mask_of_a_canvas_without_padding(policy):
    tokens_SL, at_Q = canvas(2, 6), torch.arange(12)
    torch.testing.assert_close(policy(tokens_SL, None, at_Q), policy(tokens_SL, full(tokens_SL), at_Q))


def test_logits_are_fp32_or_better():
    tokens_SL = canvas(1, 4)
    for dtype, expected in [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ]:
        assert tiny_policy(SMALL).to(dtype)(tokens_SL, full(tokens_SL), torch.arange(4)).dtype == expected


def test_the_same_seed_gives_the_same_weights_and_touches_no_global_state():
    before = torch.get_rng_state()
    a, b, c = tiny_policy(SMALL, seed=1), tiny_policy(SMALL, seed=1), tiny_policy(SMALL, seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.lm.lm_head.weight, c.lm.lm_head.weight)


def test_save_and_load_are_exact(tmp_path):
    policy = tiny_policy(SMALL, seed=5)
    save(policy, tmp_path / "model")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "SHA256SUMS",
        "config.json",
        "model.safetensors",
    ]
    again = load_model(tmp_path / "model")
    weights, loaded = policy.state_dict(), again.state_dict()
    assert weights.keys() == loaded.keys()
    assert all(torch.equal(weights[name], loaded[name]) for name in weights)
    tokens_SL = canvas(2, 6)
    asked = (tokens_SL, full(tokens_SL), torch.arange(12))
    assert torch.equal(policy(*asked), again(*asked))
    assert again.max_length == SMALL.max_length


def test_saving_again_replaces_the_weights_and_leaves_other_files(tmp_path):
    save(tiny_policy(SMALL, seed=1), tmp_path / "model", max_shard_bytes=10_000)
    assert (tmp_path / "model" / "model.safetensors.index.json").is_file()
    (tmp_path / "model" / "pretrain.json").write_text("{}")
    policy = tiny_policy(SMALL, seed=2)
    save(policy, tmp_path / "model")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "SHA256SUMS",
        "config.json",
        "model.safetensors",
        "pretrain.json",
    ]
    assert torch.equal(load_model(tmp_path / "model").lm.lm_head.weight, policy.lm.lm_head.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]  # nothing is left aside


def test_loading_builds_nothing_at_random(tmp_path):
    before = torch.get_rng_state()
    policy = load_tiny(dtype=torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), before)
    assert {weight.dtype for weight in policy.parameters()} == {torch.bfloat16}
    frequencies = 100.0 ** -(torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(policy.frequency_D, frequencies, rtol=1e-6, atol=0)


def test_transformers_itself_reads_what_is_saved(tmp_path):
    from transformers import AutoModelForCausalLM

    policy = tiny_policy(SMALL, seed=5)
    save(policy, tmp_path)
    tokens_SL = canvas(2, 6)
    logits_SLV = AutoModelForCausalLM.from_pretrained(tmp_path)(input_ids=tokens_SL).logits
    torch.testing.assert_close(policy(tokens_SL, full(tokens_SL), torch.arange(12)), logits_SLV.flatten(0, 1))


def test_loading_says_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match="nosuch"):
        load_model("nosuch")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ValueError, match="not a tiny model"):
        load_tiny(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": CharacterTokenizer.size}))
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load_model(tmp_path)


def test_too_long_and_impossible_shapes_are_refused(policy):
    tokens_SL = canvas(1, SMALL.max_length + 1)
    for ask in (policy, policy.hidden, policy.remember):
        with pytest.raises(ValueError, match="at most 40"):
            ask(tokens_SL, None, torch.tensor([0]))
    with pytest.raises(ValueError, match="heads"):
        tiny_policy(TinyShape(width=10, heads=4))


def test_tokenizer_round_trip_and_specials():
    tokenizer = CharacterTokenizer()
    text = "\n" + "".join(map(chr, range(32, 127)))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and tokenizer.prompt(text) == ids
    assert len(set(ids)) == len(ids) == tokenizer.size - 3
    assert {PAD, MASK, EOS}.isdisjoint(ids)
    assert max(ids) == tokenizer.size - 1
    a, b, c = tokenizer.encode("abc")
    assert tokenizer.decode([a, b, EOS, c, EOS]) == "ab"
    assert tokenizer.decode([PAD, a, MASK, b, EOS]) == "\ufffda\ufffdb"  # no answer holds what was never a word
    assert tokenizer.decode([EOS, a]) == ""
    assert tokenizer.show([PAD, a, MASK, b, EOS, c]) == " a\u00b7b\u00b6c"


@pytest.mark.parametrize("character", ["\t", "\u00b7", "\u0661", "\x7f"])
def test_unknown_characters_are_named(character):
    with pytest.raises(ValueError) as error:
        CharacterTokenizer().encode("1+" + character)
    assert repr(character) in str(error.value)


def test_importing_the_models_does_not_import_transformers():
    code = "import sys, unmask.models; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("is_causal", True),
        ("rope_scaling", {"rope_type": "linear", "factor": 4}),
        ("mask_token_id", 7),
        ("pad_token_id", 5000),
        ("rms_norm_eps", "small"),
    ],
)
def test_a_setting_that_the_network_would_ignore_is_refused(name: str, value: object, tmp_path: Path) -> None:
    save(tiny_policy(TinyShape(width=16, layers=1, heads=2, hidden=32), seed=0), tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(ValueError, match=name):
        load_tiny(tmp_path / "model")
