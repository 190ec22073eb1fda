"""The study of position choice (benchmarks/position_choice.py): its scores, and the table that its page has."""

import importlib.util
import json
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
import torch
from test_exact_agrpo import TOKENS, expected_update

from unmask.core.advantage import leave_one_out
from unmask.core.probes import every_step
from world import NetPolicy, World, enumerated, reward_of

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def study() -> Any:
    spec = importlib.util.spec_from_file_location("position_choice", ROOT / "benchmarks" / "position_choice.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_exact_score_has_no_bias_and_the_tokens_are_those_of_agrpo(study: Any) -> None:
    for shape in ("one token a step", "blocks of two"):
        (world,) = study.worlds(shape, 2.0, networks=1)
        found = study.measured(world)
        assert found["exact"]["error"] < 1e-9 and found["exact"]["mean_score"] < 1e-9
        assert all(found[name]["error"] > 0.01 for name in found if name != "exact")
        paths = enumerated(world)
        probability_B, reward_B = paths.probability_B.detach(), reward_of(world, paths.trace)
        pull_B = probability_B * (reward_B - probability_B @ reward_B)
        update = pull_B @ study.trace_slopes(world, paths, study.SCORES["tokens"])
        agrpo = expected_update(
            world, paths, [(every_step(paths.trace, torch.Generator()), 1.0)], TOKENS, leave_one_out
        )
        torch.testing.assert_close(update, agrpo, rtol=0, atol=1e-12)


@pytest.mark.parametrize("whole", [True, False])
def test_the_assumed_law_is_its_loop(study: Any, whole: bool) -> None:
    world = World(NetPolicy(2, 4, seed=3), "low_confidence", steps=4, block=2)
    trace = enumerated(world).trace
    probes = every_step(trace, torch.Generator(), choice=True)
    with torch.no_grad():
        found_N = study.assumed_law(world, probes, whole)
        for n in range(0, len(found_N), 7):
            b, state_L = int(probes.trace_N[n]), probes.states_SL[n]
            z = world.policy.hidden(state_L[None], None, torch.arange(4))[:, :2].tolist()
            (i,) = probes.asked_NL[n].nonzero().flatten().tolist()
            rest = [
                j for j in range(4) if state_L[j] == world.policy.mask_id and j != i and (whole or j // 2 == i // 2)
            ]
            own = z[i][int(trace.tokens_BL[b, i])]
            expected = own - log(exp(own) + sum(exp(max(z[j])) for j in rest))
            assert float(found_N[n]) == pytest.approx(expected, abs=1e-12)


def test_the_page_has_the_numbers_of_the_file() -> None:
    page = (ROOT / "docs" / "studies" / "position_choice.md").read_text()
    for row in json.loads((ROOT / "benchmarks" / "results" / "position_choice.json").read_text()):
        if row["score"] != "exact":
            assert "{error:.3f} / {cosine:.3f}".format(**row) in page, row
        else:
            assert row["largest_error"] < 1e-9
