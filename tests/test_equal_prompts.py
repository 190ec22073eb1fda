"""Rollouts with a cache whose first pass computes equal prompts once."""

import pytest
import torch
from test_cache import ENDS, PROMPTS, policy_of
from test_graphs import GROUPS

import unmask.rollout.sample
from helpers import sample
from naive import assert_same
from unmask.core.specs import Branch
from unmask.core.token_sampling import TokenSampling
from unmask.rollout.cache import Cache
from unmask.rollout.graphs import Graphs
from unmask.rollout.sample import row_seeds
from unmask.util.metering import Meter, count_passes

SHARED = {
    "dual": {"cache": Cache()},
    "prefix, refreshed at times": {"cache": Cache(suffix=False, refresh=2)},
    "guided": {"cache": Cache(), "sampling": TokenSampling(0.8, guidance=0.7)},
    "threshold": {"cache": Cache(), "threshold": 0.3, "steps": None},
    "branches": {"cache": Cache(), "branch": Branch(2, 0.0)},
}


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("shift", [False, True])
def test_the_first_pass_computes_equal_prompts_once(monkeypatch, name, static, shift):
    """Tokens, log-probabilities and counts are those of a pass for every row, in later rollouts of other groups too."""
    policy = policy_of("llama", dtype=torch.float64, eos_id=ENDS["llama"], shift=shift)
    settings = {"length": 16, "steps": 8, "block": 4} | SHARED[name]
    kept = {shared: Graphs(static) for shared in (True, False)}
    for graphs in kept.values():  # makes the buffers
        sample(policy, GROUPS, row_seeds(4, len(GROUPS)), graphs=graphs, **settings)
    for prompts in (GROUPS, GROUPS[::-1], [[3, 4]] * 3 + [[5, 5]] * 2 + [[6, 4]] * 2, PROMPTS["misaligned"]):
        found, rows, counts = [], [], []
        for shared in (True, False):
            with monkeypatch.context() as patch, count_passes(meter := Meter(), policy):
                if not shared:
                    patch.setattr(unmask.rollout.sample, "prompt_rows", lambda prompts, device: None)
                policy.rows.clear()
                found.append(sample(policy, prompts, row_seeds(5, len(prompts)), graphs=kept[shared], **settings))
            counts.append(meter.forwards)
            rows.append(policy.rows[0])
        assert_same(*found, 1e-9)
        assert counts[0] == pytest.approx(counts[1])
        assert rows == [len({*map(tuple, prompts)}), len(prompts)]
