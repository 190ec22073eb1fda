"""iLLaDA, SDAR in several block sizes, and Fast-dLLM v2: small checkpoints in their layouts, loaded to merged."""

import json

import pytest
import torch
from safetensors.torch import load_file

import unmask as library
from checkpoints import (
    FAST,
    ILLADA,
    QWEN_SPECIALS,
    QWEN_TEXT,
    SDAR,
    TOKENS,
    loaded,
    logits,
    qwen,
    reference,
    with_tokenizer,
    write,
)
from unmask.core.probes import ask, every_step
from unmask.models import load_model, save
from unmask.models.lora import has_adapter, merge
from unmask.rollout.cache import Cache
from unmask.rollout.decoding import Decoding
from unmask.rollout.sample import row_seeds, sample

KINDS = {
    "illada": (ILLADA, {}),
    "illada, no head": (ILLADA, {"head": False, "shards": 2}),
    "sdar 8": (SDAR, {"block_size": 8}),
    "sdar 5": (SDAR, {"block_size": 5, "shards": 2}),
    "fast": (FAST, {"head": False}),
    "fast, own head": (FAST, {"tie_word_embeddings": False, "bd_size": 5}),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_network_is_what_its_equations_say(tmp_path, name):
    kind, changes = KINDS[name]
    folder, weights, config = qwen(tmp_path, kind, **changes)
    policy = loaded(folder, dtype=torch.float64)
    block = config.get("block_size", config.get("bd_size", 0))
    expected = reference(weights, False, TOKENS, config["num_attention_heads"], 2, 1e-6, 1e6, block)
    assert policy.causal_block == (block or None) and policy.facts.shift == (kind is FAST)
    ours = logits(policy, TOKENS)
    if kind is FAST:
        ours, expected = ours[1:], expected[:-1]
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    save(policy, tmp_path / "copy")
    stored = {
        key: value for path in (tmp_path / "copy").glob("*.safetensors") for key, value in load_file(path).items()
    }
    assert stored.keys() == weights.keys() and json.loads((tmp_path / "copy/config.json").read_text()) == {
        **config,
        "torch_dtype": "float64",
        **({"tie_word_embeddings": False} if "lm_head.weight" in weights else {}),
    }


def test_an_equal_stored_head_is_shared_and_another_one_is_kept(tmp_path):
    folder, weights, config = qwen(tmp_path, ILLADA)
    assert loaded(folder).lm.lm_head.weight is not loaded(folder).lm.model.embed_tokens.weight
    write(folder, config, {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()})
    policy = loaded(folder)
    assert policy.lm.lm_head.weight is policy.lm.model.embed_tokens.weight


def test_under_shift_the_first_token_of_a_block_does_not_see_its_block(tmp_path):
    policy = loaded(qwen(tmp_path, FAST, bd_size=4, head=False)[0], dtype=torch.float64)
    before, other = logits(policy, TOKENS[:12]), [*TOKENS]
    other[5] = (other[5] + 1) % 128  # in the second block
    changed = (logits(policy, other[:12]) != before).any(-1)
    # Tokens 1 to 4 are predicted in the first block; 5 to 8 in the second, and so on.
    assert changed.tolist() == [False] * 5 + [True] * 7


@torch.no_grad()
@pytest.mark.parametrize("name", ["sdar 5", "fast, own head"])
def test_rollouts_with_the_exact_cache_are_those_without_and_have_the_likelihood_that_is_asked(tmp_path, name):
    """Prompts of unequal length end inside blocks, on their border, and in the first block."""
    kind, changes = KINDS[name]
    policy = loaded(qwen(tmp_path, kind, **changes)[0], dtype=torch.float64)
    policy.eos_id = -1
    prompts, seed_B = [TOKENS[:3], TOKENS[:5], TOKENS[:7], TOKENS[:10]], row_seeds(3, 4)
    traces = [
        sample(policy, prompts, seed_B, Decoding(length=10, cache=cache)).trace for cache in (None, Cache(suffix=True))
    ]
    assert torch.equal(traces[0].tokens_BL, traces[1].tokens_BL)
    torch.testing.assert_close(traces[0].logp_BL, traces[1].logp_BL, rtol=0, atol=1e-9)
    probes = every_step(traces[0], torch.Generator())
    logp_NL = ask(policy, probes)
    total_B = torch.zeros(4, dtype=torch.float64).index_add(
        0, probes.trace_N, (logp_NL * probes.asked_NL).sum(1).double()
    )
    torch.testing.assert_close(total_B, traces[0].logp_BL.double().sum(1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", ["illada, no head", "sdar 8", "fast"])
def test_a_run_trains_and_its_checkpoint_has_the_familys_names(tmp_path, monkeypatch, name, full):
    kind, changes = KINDS[name]
    mask = {"mask_token_id": "absent"} if kind is ILLADA else {}
    folder, weights, _ = qwen(tmp_path / "base", kind, **{**changes, **QWEN_TEXT, **mask})
    with_tokenizer(folder, QWEN_SPECIALS)
    run = library.train(
        model=folder,
        task="arithmetic",
        method="diffu_grpo",
        updates=1,
        prompts=1,
        group=2,
        full=full,
        out=tmp_path / "run",
        show=False,
        rollout={"length": 16, "steps": 4},
        eval={"prompts": 1},
    )
    policy = run.policy
    assert has_adapter(policy) != full
    if not full:
        merge(policy)
    save(policy, tmp_path / "merged")
    assert load_file(tmp_path / "merged/model.safetensors").keys() == weights.keys()
    again = load_model(tmp_path / "merged")
    assert (again.mask_id, again.causal_block) == (5 if kind is ILLADA else 260, policy.causal_block)
    assert torch.equal(logits(again, TOKENS), logits(policy, TOKENS))
