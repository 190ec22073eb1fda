"""Whole greedy decodes of iLLaDA, SDAR and Fast-dLLM v2: those of the authors' samplers, token for token."""

from functools import cache

import pytest
import torch
from test_parity import PARITY, expected, loaded
from torch import Tensor

import unmask.rollout.draws
from helpers import sample
from unmask.core.order import ORDERS
from unmask.core.token_sampling import TokenSampling

DECODES = {"illada-1": 5, "illada-2": 5, "sdar-1": 5, "sdar-2": 5, "fastdllm2-1": 5, "fastdllm2-2": 5}
CASES = [(model, number) for model, count in DECODES.items() for number in range(count)]
"""Of Fast-dLLM v2 without the last two: an approximate cache, and a prompt that the original never shows the model."""
MASK_MATTERS = {
    ("illada-1", 1),
    ("illada-1", 3),
    ("illada-1", 4),
    ("sdar-2", 2),
    ("fastdllm2-2", 2),
    ("fastdllm2-2", 3),
}
"""The originals leave MASK among the words, and confidences include it; ours has probability zero."""
SDAR_ORDERS = {"low_confidence_static": "low_confidence", "low_confidence_dynamic": "low_confidence"}
SDAR_ORDERS["sequential"] = "left_to_right"

pytestmark = pytest.mark.skipif(not PARITY.is_dir(), reason=f"the reference outputs are not at {PARITY}")
reference = cache(expected)


def decode(policy, prompts: list[list[int]], length: int, **settings) -> list[list[int]]:
    shape = {"sampling": TokenSampling(0.0), "order": ORDERS["low_confidence"], **settings}
    return sample(policy, prompts, torch.arange(len(prompts)), length=length, **shape).trace.tokens_BL.tolist()


def illada(policy, prompts: list[list[int]], theirs: dict, width: int) -> list[list[int]]:
    block, steps = theirs["block_length"], theirs["steps"]
    if not theirs.get("variable_length"):
        return decode(policy, prompts, theirs["gen_length"], block=block, steps=steps)
    length = width - len(prompts[0])
    return decode(policy, prompts, length, block=block, steps=steps * length // block, append=True)


def sdar(policy, prompts: list[list[int]], theirs: dict, width: int) -> list[list[int]]:
    """The canvas ends with a whole block. With top_k 1 every token has confidence 1."""
    order, threshold = SDAR_ORDERS[theirs["remasking_strategy"]], theirs.get("confidence_threshold")
    if theirs.get("top_k") and threshold:
        ones = {"order": ORDERS["drawn_confidence"], "sampling": TokenSampling(1.0, top_k=1)}
        return decode(policy, prompts, width - len(prompts[0]), threshold=threshold, **ones)
    return decode(policy, prompts, width - len(prompts[0]), order=ORDERS[order], threshold=threshold)


def fast_dllm(policy, prompts: list[list[int]], theirs: dict, width: int) -> list[list[int]]:
    """The first token of a block is decided alone, then the others by sub-blocks that see the whole block."""
    size, small = theirs["block_size"], theirs["small_block_size"]
    policy.causal_block = size
    while len(prompts[0]) < width:
        inside = len(prompts[0]) % size
        prompts = decode(policy, prompts, size - inside if inside else 1, block=small, threshold=theirs["threshold"])
    return prompts


@pytest.mark.parametrize(("model", "number"), CASES)
def test_greedy_decodes_are_the_authors(monkeypatch, model, number):
    """Those that differ do so because of MASK alone."""
    policy, (files, noted) = loaded(model), reference(model)
    policy.eos_id = -1  # the sequences go on after it, or are cut there
    prompts, theirs_BL = files[f"samplers/{number}/prompt"].tolist(), files[f"samplers/{number}/sequence"]
    decoder = {"i": illada, "s": sdar, "f": fast_dllm}[model[0]]

    def decoded() -> Tensor:
        whole = decoder(policy, prompts, noted["samplers"][number]["settings"], theirs_BL.shape[1])
        return torch.tensor(whole)[:, : theirs_BL.shape[1]]

    assert torch.equal(decoded(), theirs_BL) == ((model, number) not in MASK_MATTERS)
    monkeypatch.setattr(unmask.rollout.draws, "token_logprobs", lambda logits_QV, mask_id: logits_QV.log_softmax(-1))
    assert torch.equal(decoded(), theirs_BL)


def test_every_decode_is_looked_at_or_left_out_for_a_reason():
    for model, count in DECODES.items():
        rest = [each["settings"] for each in reference(model)[1]["samplers"][count:]]
        assert [each["use_block_cache"] or "never shows it" in each["note"] for each in rest] == [True] * len(rest)
        assert len(rest) == (2 if model.startswith("fast") else 0)
