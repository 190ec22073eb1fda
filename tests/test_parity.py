"""Our pass through checkpoints in the released layouts, against what the authors' own code computed from them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from unmask.models import load_checkpoint
from unmask.models.tiny import CharacterTokenizer

PARITY = Path(__file__).parents[2] / "shared/data/parity"
FULL = ["plain", "masked", "ones_mask", "one_token", "left_pad", "right_pad", "pads_attended", "block_causal"]
LLADA, DREAM = [*FULL, "past_max_length"], [*FULL, "left_pad_absolute", "odd_positions"]
ILLADA = [*FULL, "odd_positions", "past_max_length"]
SDAR = ["plain", "masked", "within_block", "one_token", "block_4", "odd_positions", "two_streams"]
FAST = ["plain", "masked", "block_causal", "block_8", "one_token", "odd_positions"]
MODELS = {
    **dict.fromkeys(("llada/released_shape", "llada/gqa", "llada/padded_vocab"), LLADA),
    **dict.fromkeys(("dream/released_shape", "dream/mha"), DREAM),
    **dict.fromkeys(("illada-1", "illada-2"), ILLADA),
    **dict.fromkeys(("sdar-1", "sdar-2"), SDAR),
    **dict.fromkeys(("fastdllm2-1", "fastdllm2-2"), FAST),
}
CASES = [(model, case) for model, cases in MODELS.items() for case in cases]
SHIFTED = ("dream", "fastdllm2")
# The authors' logits are fp32. Ours are computed in float64, so the distance is their rounding alone: 4e-5 at most.
ROUNDED = {"rtol": 0, "atol": 5e-5}

pytestmark = pytest.mark.skipif(not PARITY.is_dir(), reason=f"the reference outputs are not at {PARITY}")


def loaded(model: str, dtype: torch.dtype | None = None):
    """These folders hold no tokenizer, and one no block length."""
    block = 16 if model == "sdar-2" else None
    return load_checkpoint(PARITY / model, dtype, tokenizer=CharacterTokenizer(), causal_block=block)


def expected(model: str) -> tuple[dict[str, Tensor], dict]:
    folder = PARITY / model
    return load_file(folder / "expected.safetensors"), json.loads((folder / "expected.json").read_text())


@torch.no_grad()
def logits(policy, tokens_SL: Tensor, attended_SL: Tensor | None = None) -> Tensor:
    return policy(tokens_SL, attended_SL, torch.arange(tokens_SL.numel())).view(*tokens_SL.shape, -1)


def block_of(seen_S1LL: Tensor) -> int:
    """The block length of a block-causal mask."""
    return int(seen_S1LL[0, 0, 0].sum())


def test_all_the_cases_are_looked_at():
    for model, cases in MODELS.items():
        assert {*cases} == expected(model)[1]["cases"].keys()


@pytest.mark.parametrize(("model", "case"), CASES)
def test_logits_are_the_authors(model, case):
    policy, stored = loaded(model, torch.float64), expected(model)[0]
    tokens_SL, looked_SL = stored[f"cases/{case}/inputs/input_ids"], stored[f"cases/{case}/rows"]
    attended = stored.get(f"cases/{case}/inputs/attention_mask")
    if case in ("odd_positions", "two_streams"):
        positions_SL, seen = stored[f"cases/{case}/inputs/position_ids"], attended
        policy._place = lambda *_: (positions_SL, seen)
    elif case.startswith("block_"):  # as a fact of the model, not as a mask
        policy.causal_block = block_of(attended)
    attended_SL = attended.bool() if attended is not None and attended.dim() == 2 else None
    policy.facts = replace(policy.facts, shift=False)  # the files hold what the network says, before any shift
    ours_SLV = logits(policy, tokens_SL, attended_SL)
    torch.testing.assert_close(ours_SLV[looked_SL], stored[f"cases/{case}/logits"][looked_SL].double(), **ROUNDED)


@pytest.mark.parametrize("model", MODELS)
def test_the_shift_is_dreams_and_fast_dllms_alone(model):
    policy, stored = loaded(model, torch.float64), expected(model)[0]
    assert policy.facts.shift == model.startswith(SHIFTED)
    tokens_SL, theirs_SLV = stored["cases/masked/inputs/input_ids"], stored["cases/masked/logits"]
    if policy.facts.shift:  # row 0 says nothing; row i is what position i - 1 said
        theirs_SLV = torch.cat([theirs_SLV[:, :1], theirs_SLV[:, :-1]], dim=1)
    torch.testing.assert_close(logits(policy, tokens_SL), theirs_SLV.double(), **ROUNDED)


@pytest.mark.parametrize("model", MODELS)
def test_loss_and_gradient_are_the_authors(model):
    policy = loaded(model)
    stored, noted = expected(model)
    asked_SL, tokens_SL = stored["grad/where"], stored["grad/input_ids"]
    if "grad/attention_mask" in stored:
        policy.causal_block = block_of(stored["grad/attention_mask"])
    logits_QV = policy(tokens_SL, None, asked_SL.flatten().nonzero().squeeze(1))
    loss = torch.nn.functional.cross_entropy(logits_QV, stored["grad/target"][asked_SL])
    slopes = torch.autograd.grad(loss, list(policy.parameters()))
    norm = torch.sqrt(sum(slope.double().square().sum() for slope in slopes))
    assert loss.item() == pytest.approx(noted["grad"]["loss"], abs=1e-4)
    assert norm.item() == pytest.approx(noted["grad"]["norm"], abs=1e-4)


@pytest.mark.parametrize("model", MODELS)
def test_bf16_logits_are_the_authors_in_the_precision_their_family_rotates_in(model):
    """Sums that another CPU rounds elsewhere differ by 0.02 (root mean square); the other rotation by twice that."""
    policy, stored = loaded(model, torch.bfloat16), expected(model)[0]
    tokens_SL, theirs_SLV = stored["bf16/input_ids"], stored["bf16/logits"]
    assert policy.facts.rotary_fp32 == model.startswith("llada/")
    if "bf16/attention_mask" in stored:
        policy.causal_block = block_of(stored["bf16/attention_mask"])
    policy.facts = replace(policy.facts, shift=False)
    own = (logits(policy, tokens_SL) - theirs_SLV).square().mean().sqrt()
    policy.facts = replace(policy.facts, rotary_fp32=not policy.facts.rotary_fp32)
    other = (logits(policy, tokens_SL) - theirs_SLV).square().mean().sqrt()
    assert own < 0.03 and own < 0.7 * other
