"""Whole greedy decodes of SDAR-MoE: those of the authors' sampler. LLaDA2's are in test_decodes_blocks.py."""

import pytest
import torch
from test_decodes_dense import sdar
from test_parity_experts import PARITY, expected, loaded

pytestmark = pytest.mark.skipif(not PARITY.is_dir(), reason=f"the reference outputs are not at {PARITY}")


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("model", ["sdar_moe-1", "sdar_moe-2"])
def test_greedy_decodes_are_the_authors(monkeypatch, model, number):
    policy, (files, noted) = loaded(model, torch.float32), expected(model)
    monkeypatch.setattr(policy, "eos_id", -1)  # the sequences go on after it, or are cut there
    prompts, theirs_BL = files[f"samplers/{number}/prompt"].tolist(), files[f"samplers/{number}/sequence"]
    whole = sdar(policy, prompts, noted["samplers"][number]["settings"], theirs_BL.shape[1])
    assert torch.equal(torch.tensor(whole)[:, : theirs_BL.shape[1]], theirs_BL)
