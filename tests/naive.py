"""A sampler of plain loops, one row alone, all logits at every step; and small random decoders to run it on.

Only the noise is the library's (`uniforms`, with the sampler's stream numbers): from the same uniforms the same
tokens must come, at the same steps, with the same log-probabilities.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from helpers import assert_close
from unmask.core.policy import Policy
from unmask.core.schedule import even
from unmask.core.shapes import NEVER
from unmask.core.token_sampling import TokenSampling, uniforms
from unmask.core.trace import Trace
from unmask.models.decoder import Decoder, Facts
from unmask.rollout.sample import Rollouts
from world import kept_by_hand

VOCABULARY, MASK, EOS, PAD = 30, 29, 20, 0
TOKEN, PLACE, BRANCH = 0, 1, 2  # streams


def decoder(
    kind: str = "llama",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    made: Any = Decoder,
    vocabulary: int = VOCABULARY,
    **facts: Any,
) -> Any:
    """Two layers, grouped heads, weights that leave nothing neutral."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config_of, model_of = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}[kind]
    config = config_of(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6 if kind == "qwen3" else 4,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        tie_word_embeddings=False,
    )
    lm, rng = model_of(config).eval(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in lm.named_parameters():
            if "norm" in name:
                weight.copy_(0.5 + torch.rand(weight.shape, generator=rng))
            else:
                weight.copy_((1.0 if "embed" in name else 0.4) * torch.randn(weight.shape, generator=rng))
    known = {"mask_id": MASK, "eos_id": EOS, "pad_id": PAD, "max_length": 64} | facts
    return made(lm.to(dtype), Facts(**known), tokenizer=None)


class Row(NamedTuple):
    """What became of one prompt: the completion, the step that wrote each token, its log-probability."""

    tokens: list[int]
    steps: list[int]
    logps: list[float]
    forwards: int


@torch.no_grad()
def by_hand(
    policy: Policy,
    prompt: Sequence[int],
    seed: int,
    *,
    order: str,
    length: int,
    steps: int | None = None,
    block: int | None = None,
    sampling: TokenSampling = TokenSampling(),
    schedule: Any = even,
    threshold: float | None = None,
    min_per_step: int = 1,
) -> Row:
    block, mask, first = block or getattr(policy, "causal_block", None) or length, policy.mask_id, len(prompt)
    canvas, when, logps, forwards, step = [*prompt] + [mask] * length, [NEVER] * length, [0.0] * length, 0, 0
    sizes = [[min_per_step] * -(-block // min_per_step)] * (length // block) if threshold else None
    sizes = sizes or schedule(length, steps or length, block)
    ahead = 0  # tokens of the prompt in the first block, which count from position 0 of a block-causal model
    if getattr(policy, "causal_block", None):
        sizes, ahead = [*sizes, sizes[0]], first % block
    for number, turns in enumerate(sizes):
        for size in turns:
            edge = first - ahead + number * block
            inside = range(max(first, edge), min(first + length, edge + block))
            masked = [i for i in inside if canvas[i] == mask]
            if size and masked and not ended(canvas[first:], policy):
                forwards += 1
                logits_LV = guided(policy, canvas, first, sampling.guidance)
                away = torch.tensor([len(canvas) - i for i in masked])
                noise = [uniforms(torch.tensor(seed), stream, step, away).tolist() for stream in (TOKEN, PLACE)]
                found = [
                    looked(logits_LV[i].tolist(), mask, sampling, order, i, uniform, place)
                    for i, uniform, place in zip(masked, *noise, strict=True)
                ]
                sure = [found[j][3 if order == "left_to_right" else 2] for j in range(len(masked))]
                reached = [j for j in range(len(masked)) if threshold and sure[j] >= threshold]
                ranked = sorted(range(len(masked)), key=lambda j: (-found[j][2], j))
                for j in reached if len(reached) >= size else ranked[:size]:
                    canvas[masked[j]] = found[j][0]
                    when[masked[j] - first], logps[masked[j] - first] = step, found[j][1]
            step += 1
    return Row(canvas[first:], when, logps, forwards)


def guided(policy: Policy, canvas: list[int], first: int, guidance: float) -> Tensor:
    """All logits of a canvas; with guidance, uncond + (w + 1) (cond - uncond), from two passes."""
    place_L = torch.arange(len(canvas))
    prompted = policy(torch.tensor([canvas]), None, place_L).double()
    if not guidance:
        return prompted
    unprompted = policy(torch.tensor([[policy.mask_id] * first + canvas[first:]]), None, place_L).double()
    return unprompted + (guidance + 1) * (prompted - unprompted)


def looked(
    logits: list[float], mask: int, sampling: TokenSampling, order: str, column: int, uniform: float, noise: float
) -> tuple[int, float, float, float]:
    """A token, its log-probability, its score in the order and its probability at temperature 1."""
    warm, words = sampling.temperature or 1.0, [v for v in range(len(logits)) if v != mask]
    plain, drawn = softmax(logits, words, 1.0), softmax(logits, words, warm)
    if sampling.truncated:
        drawn = [p * kept for p, kept in zip(drawn, kept_by_hand(drawn, sampling), strict=True)]
        drawn = [p / sum(drawn) for p in drawn]
    token, total = max(words, key=lambda v: plain[v]), 0.0
    if sampling.temperature:
        for v in words:
            total += drawn[v]
            if total > uniform * sum(drawn):
                token = v
                break
    *_, second, best = sorted(drawn)
    score = {
        "random": noise,
        "left_to_right": -column,
        "surest_position": max(plain),
        "low_confidence": plain[token],
        "drawn_confidence": drawn[token],
        "margin": best - second,
        "negative_entropy": sum(p * math.log(p + 1e-10) for p in drawn),
    }[order]
    return token, math.log(drawn[token]) if sampling.temperature else 0.0, score, plain[token]


def softmax(logits: list[float], words: list[int], temperature: float) -> list[float]:
    most = max(logits[v] for v in words)
    weight = [math.exp((logit - most) / temperature) if v in words else 0.0 for v, logit in enumerate(logits)]
    return [w / sum(weight) for w in weight]


def ended(completion: list[int], policy: Policy) -> bool:
    """An end token stands with nothing masked before it, or nothing is masked."""
    for token in completion:
        if token in (policy.mask_id, policy.eos_id):
            return token == policy.eos_id
    return True


def assert_by_hand(trace: Trace, rows: list[Row], tolerance: float) -> None:
    """Token for token, step for step, and in the log-probabilities."""
    length = len(rows[0].tokens)
    assert trace.tokens_BL[:, -length:].tolist() == [row.tokens for row in rows]
    assert trace.step_BL[:, -length:].tolist() == [row.steps for row in rows]
    logp_BC = torch.tensor([row.logps for row in rows], dtype=torch.float64)
    assert_close(trace.logp_BL[:, -length:], logp_BC, tolerance)
    assert (trace.logp_BL[:, :-length] == 0).all()


def assert_same(found: Rollouts, expected: Rollouts, tolerance: float = 1e-12) -> None:
    """Traces and branches in everything they say; how far they are padded says nothing."""
    assert_same_trace(found.trace, expected.trace, tolerance)
    assert (found.branches is None) == (expected.branches is None)
    if found.branches is not None:
        assert len(found.branches) > 1
        assert_same_trace(found.branches, expected.branches, tolerance)


def assert_same_trace(found: Trace, expected: Trace, tolerance: float) -> None:
    real_BL = expected.attended_BL
    assert (found.sampling, found.steps, found.seen.keys()) == (expected.sampling, expected.steps, expected.seen.keys())
    for name in ("step_BL", "block_BL", "attended_BL", "counted_BL", "group_B"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert torch.equal(found.tokens_BL[real_BL], expected.tokens_BL[real_BL])
    assert_close(found.logp_BL, expected.logp_BL, tolerance)
    for name, value in expected.seen.items():
        if name == "kept":
            assert sets(found.seen[name]) == sets(value)
        elif value.is_floating_point():
            assert_close(found.seen[name], value, tolerance)
        else:
            assert torch.equal(found.seen[name], value), name


def sets(kept_BCK: Tensor) -> list[list[set[int]]]:
    return [[set(ids) - {-1} for ids in row] for row in kept_BCK.tolist()]
