"""Block-causal originals: SDAR's pass over two streams, and the greedy decodes of LLaDA2, token for token."""

from itertools import product

import pytest
import torch
from test_parity import PARITY, expected, loaded

import unmask.rollout.decoding
import unmask.rollout.draws
from helpers import sample
from unmask.core.schedule import even
from unmask.core.token_sampling import TokenSampling
from unmask.models import load_checkpoint
from unmask.models.tiny import CharacterTokenizer
from unmask.rollout.cache import Cache

pytestmark = pytest.mark.skipif(not PARITY.is_dir(), reason=f"the reference outputs are not at {PARITY}")


@pytest.mark.parametrize("model", ["sdar-1", "sdar-2"])
@torch.no_grad()
def test_two_streams_are_the_layout_that_sdar_is_trained_in(model):
    policy, (stored, _) = loaded(model, torch.float64), expected(model)
    noisy_SL, clean_SL = stored["cases/two_streams/inputs/input_ids"].chunk(2, dim=1)
    theirs_SLV = stored["cases/two_streams/logits"].chunk(2, dim=1)[0]
    every_Q = torch.arange(noisy_SL.numel())
    hidden_QD = policy.hidden_two_streams(noisy_SL, clean_SL, None, every_Q, policy.causal_block)
    torch.testing.assert_close(policy.head(hidden_QD), theirs_SLV.flatten(0, 1).double(), rtol=0, atol=5e-5)


MASK_MATTERS = {("llada2-2", 3)}
"""The original leaves MASK among the words; ours has probability zero."""


@pytest.mark.parametrize(("model", "number"), [*product(["llada2-1", "llada2-2"], range(5))])
def test_greedy_decodes_of_llada2_are_the_authors(monkeypatch, model, number):
    """All but the sixth, which edits tokens. The original has at most as many steps in a block as tokens to write, so
    the fourth, 30 tokens in blocks of 32, commits at least two at its first two steps, then at least one."""
    stored, noted = expected(model)
    theirs = noted["samplers"][number]["settings"]
    assert "editing_threshold" not in theirs or theirs["editing_threshold"] > 0.5  # nothing reaches it
    steps = min(theirs.get("steps", theirs["gen_length"]), theirs["gen_length"], theirs["block_length"])
    if theirs["block_length"] % steps == 2:
        counts = even(theirs["block_length"], steps, theirs["block_length"])
        monkeypatch.setattr(unmask.rollout.decoding, "at_least", lambda length, least, block: counts)
    policy = load_checkpoint(PARITY / model, torch.float32, tokenizer=CharacterTokenizer())
    policy.causal_block, policy.eos_id = theirs["block_length"], -1
    prompt, wanted = (stored[f"samplers/{number}/{name}"][0].tolist() for name in ("prompt", "sequence"))
    length = -(len(prompt) + theirs["gen_length"]) // theirs["block_length"] * -theirs["block_length"] - len(prompt)
    shape = {"length": length, "threshold": theirs["threshold"], "sampling": TokenSampling(0.0)}
    shape["min_per_step"] = -(-theirs["block_length"] // steps)

    def decoded(cache: Cache | None) -> list[int]:
        trace = sample(policy, [prompt], torch.zeros(1, dtype=torch.long), **shape, cache=cache).trace
        return trace.tokens_BL[0].tolist()[: len(wanted)]

    assert (decoded(None) == wanted) == ((model, number) not in MASK_MATTERS)
    monkeypatch.setattr(unmask.rollout.draws, "token_logprobs", lambda logits_QV, mask_id: logits_QV.log_softmax(-1))
    assert decoded(None) == decoded(Cache()) == wanted
