"""Whole greedy decodes of SDAR-MoE and LLaDA2.0: those of the authors' samplers, token for token."""

import pytest
import torch
from test_decodes_dense import decode, sdar
from test_parity_experts import PARITY, expected, loaded

from unmask.core.order import ORDERS

CASES = [(model, number) for model in ("sdar_moe-1", "sdar_moe-2") for number in range(5)]
CASES += [("llada2-1", 0), ("llada2-1", 1), ("llada2-1", 3), ("llada2-2", 0), ("llada2-2", 1)]
"""Of LLaDA2 without the two of 2.1, which edit, and without decodes in which a step commits at least two tokens: number
2, and 3 of the second model (the original lowers its 32 steps to the 30 tokens of the answer)."""

pytestmark = pytest.mark.skipif(not PARITY.is_dir(), reason=f"the reference outputs are not at {PARITY}")


def llada2(policy, prompts: list[list[int]], theirs: dict) -> list[list[int]]:
    """The canvas is filled to a whole block, and the answer cut at its length and after the first end token."""
    assert theirs["version"] == "2.0" and theirs["steps"] == theirs["block_length"]
    size, start = theirs["block_length"], len(prompts[0])
    policy.causal_block = size
    whole = -(-(start + theirs["gen_length"]) // size) * size
    order, threshold = ORDERS["low_confidence"], theirs["threshold"]
    return decode(policy, prompts, whole - start, block=size, order=order, threshold=threshold)


@pytest.mark.parametrize(("model", "number"), CASES)
def test_greedy_decodes_are_the_authors(monkeypatch, model, number):
    policy, (files, noted) = loaded(model, torch.float32), expected(model)
    monkeypatch.setattr(policy, "eos_id", -1)  # the sequences go on after it, or are cut there
    monkeypatch.setattr(policy, "causal_block", policy.causal_block)
    prompts, theirs_BL = files[f"samplers/{number}/prompt"].tolist(), files[f"samplers/{number}/sequence"]
    theirs = noted["samplers"][number]["settings"]
    length = theirs_BL.shape[1]
    whole = sdar(policy, prompts, theirs, length) if model.startswith("sdar") else llada2(policy, prompts, theirs)
    assert torch.equal(torch.tensor(whole)[:, :length], theirs_BL)
