"""Static steps: they draw what other steps draw, wait for nothing, and captured they do the same."""

import pytest
import torch
from test_engine import Calls, Waits

import unmask.rollout.sample
from naive import assert_same, decoder
from unmask.core.order import low_confidence, random, surest_position
from unmask.core.specs import Branch, Record, RolloutRequest
from unmask.core.token_sampling import TokenSampling
from unmask.models.tiny import TinyShape, tiny_policy
from unmask.rollout.cache import Cache
from unmask.rollout.decoding import Decoding
from unmask.rollout.denoiser import Denoiser
from unmask.rollout.graphs import Graphs, columns_of, positions_of, rows_of
from unmask.rollout.sample import row_seeds
from unmask.util.metering import Meter, count_passes
from unmask.util.micro_batch import MicroBatch

PADDED = [[3, 4], [5], [3, 21, 6, 4], [6, 6], [4, 5, 3], [6] * 6, [9, 8, 7]]
PROMPTS = {"padded": PADDED, "one length": [prompt[:1] * 5 for prompt in PADDED]}
SETTINGS = {
    "exact": {"length": 8, "steps": 6},
    "exact, random": {"length": 12, "steps": 6, "block": 4, "order": random},
    "blocks": {"length": 15, "steps": 9, "block": 5, "sampling": TokenSampling(0.8, top_k=6)},
    "greedy": {"length": 8, "steps": 8, "block": 4, "sampling": TokenSampling(0.0)},
    "guided": {"length": 8, "block": 4, "sampling": TokenSampling(guidance=0.7), "cache": Cache()},
    "appended": {"length": 8, "block": 4, "append": True},
    "dual": {"length": 16, "steps": 8, "block": 4, "cache": Cache()},
    "dual, random": {"length": 16, "block": 4, "cache": Cache(), "order": random},
    "dual, refreshed at times": {"length": 16, "block": 4, "cache": Cache(refresh=3)},
    "prefix": {"length": 16, "steps": 8, "block": 4, "cache": Cache(suffix=False)},
    "prefix, refreshed at times": {"length": 16, "block": 4, "cache": Cache(suffix=False, refresh=2)},
    "threshold": {"length": 16, "block": 8, "order": surest_position, "threshold": 0.2},
    "threshold, dual": {"length": 16, "block": 8, "threshold": 0.2, "cache": Cache(refresh=2)},
}


def model(kind: str = "llama", **facts):
    return decoder(kind, dtype=torch.float64, **facts)


def rolled(policy, prompts, graphs: Graphs, seed: int = 3, record: Record = Record(), branch=None, **settings):
    """Rollouts on the device of the policy."""
    device = next(policy.parameters()).device
    seed_B, request = row_seeds(seed, len(prompts)).to(device), RolloutRequest(record=record, branch=branch)
    micro_batch = settings.pop("micro_batch", None)
    decoding = Decoding(**settings, graphs=graphs)
    return unmask.rollout.sample.sample(policy, prompts, seed_B, decoding, request=request, micro_batch=micro_batch)


@pytest.mark.parametrize(("prompts", "shift"), [("padded", False), ("one length", True)])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_static_step_draws_what_other_steps_draw(name, prompts, shift):
    """Tokens, steps, log-probabilities and records, in a first rollout and in later ones of other sizes."""
    policy, graphs, settings = model(shift=shift), Graphs(True), dict(SETTINGS[name])
    settings["record"] = Record(3, True, True, choice=settings.get("order", low_confidence) is low_confidence)
    for seed, rows in ((3, 7), (4, 3), (5, 7)):
        part = PROMPTS[prompts][:rows]
        found = rolled(policy, part, graphs, seed, **settings)
        assert_same(found, rolled(policy, part, Graphs(False), seed, **settings), 1e-9)
        assert found.trace.tokens_BL.shape[1] == max(map(len, part)) + settings["length"]


def test_among_those_rows_some_end_and_others_stay_to_fill_a_round_number(monkeypatch):
    kept, plain = [], Denoiser._kept
    monkeypatch.setattr(
        Denoiser, "_kept", lambda walk, going: (kept.append((going, plain(walk, going))), kept[-1][1])[1]
    )
    for settings in SETTINGS.values():
        rolled(model(), PADDED, Graphs(True), **settings)
    assert {len(stay) for _, stay in kept} <= {0, 1, 2, 3, 4, 6, 7}
    assert any(0 < len(going) < len(stay) for going, stay in kept)
    assert all(set(going) <= set(stay) for going, stay in kept)


@pytest.mark.parametrize("cache", [None, Cache()])
@pytest.mark.parametrize("order", [low_confidence, random])
def test_in_fp32_on_the_embedded_network_too(order, cache):
    policy = tiny_policy(TinyShape(width=32, layers=2, hidden=64), seed=1)
    settings = {"length": 24, "steps": 12, "block": 8, "order": order, "cache": cache}
    plain, static = (rolled(policy, PADDED, graphs, **settings) for graphs in (Graphs(False), Graphs(True)))
    assert_same(static, plain, 1e-4)


def test_branches_and_micro_batches_too():
    policy, settings = model(), {"length": 8, "block": 4, "branch": Branch(2, 1.0)}
    plain = rolled(policy, PADDED, Graphs(False), **settings)
    for rows in (3, 7):
        assert_same(rolled(policy, PADDED, Graphs(True), micro_batch=MicroBatch(rows), **settings), plain, 1e-9)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_static_step_waits_for_nothing(monkeypatch, name):
    """Nor does what goes before it in `step`, but for the first pass, which makes the memory."""
    noted, plain = [], Denoiser._step

    def watched(*arguments, **more) -> None:
        with Calls(noted), Waits(noted):
            plain(*arguments, **more)

    monkeypatch.setattr(Denoiser, "_step", watched)
    record = Record(3, True, True, choice=SETTINGS[name].get("order", low_confidence) is low_confidence)
    rolled(model(), PADDED, Graphs(True), record=record, **SETTINGS[name])
    assert noted == []


def test_passes_are_counted_as_those_of_other_steps_that_drop_no_row(monkeypatch):
    policy, settings = model(eos_id=-5), {"length": 16, "steps": 8, "block": 4, "cache": Cache(refresh=2)}
    counts = []
    for graphs in (Graphs(False), kept := Graphs(True), kept):
        with count_passes(meter := Meter(), policy):
            rolled(policy, PROMPTS["one length"], graphs, **settings)
        counts.append(meter.forwards)
    assert counts[0] == pytest.approx(counts[1]) and counts[1] == counts[2]


def test_rows_and_positions_are_rounded_up_and_never_down():
    assert [rows_of(count) for count in (0, 1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 64, 65)] == [
        *(0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
    ]
    assert [positions_of(count, 32) for count in (1, 8, 9, 31, 32)] == [8, 8, 16, 32, 32]
    assert [positions_of(count, 5) for count in (1, 2, 3, 5)] == [2, 2, 4, 5]
    assert [columns_of(width, 100) for width in (1, 32, 33, 99, 120)] == [32, 32, 64, 100, 120]


REASONS = {
    "block-causal": ({"causal_block": 4}, {}),
    "top_p": ({}, {"sampling": TokenSampling(top_p=0.9)}),
    "an order of your own": ({}, {"order": lambda logits: logits.noise_Q}),
}


@pytest.mark.parametrize("why", REASONS)
def test_where_steps_cannot_be_static_a_warning_says_why(why):
    facts, settings = REASONS[why]
    policy, settings = model("qwen3", **facts), {"length": 8, "block": 4, **settings}
    plain = rolled(policy, PADDED, Graphs(False), **settings)
    with pytest.warns(UserWarning, match=f"without CUDA graphs: .*{why}"):
        assert_same(rolled(policy, PADDED, Graphs(True), **settings), plain)


def test_on_a_cpu_the_default_is_the_other_step(recwarn):
    graphs = Graphs()
    rolled(model(), PADDED, graphs, length=4)
    assert not graphs.steps and not recwarn.list


def test_weights_that_are_replaced_drop_the_graphs_and_weights_that_change_in_place_do_not():
    policy, graphs = model(), Graphs(True)
    rolled(policy, PADDED, graphs, length=4)
    before = dict(graphs.steps)
    with torch.no_grad():
        policy.lm.lm_head.weight.mul_(1.1)
    rolled(policy, PADDED, graphs, length=4)
    assert graphs.steps == before and all(graphs.steps[shape] is step for shape, step in before.items())
    policy.lm.lm_head.weight.data = policy.lm.lm_head.weight.data.clone()
    rolled(policy, PADDED, graphs, length=4)
    assert all(graphs.steps[shape] is not step for shape, step in before.items())


# On a GPU

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_captured_step_draws_what_it_draws_uncaptured(name, dtype):
    """Equal tokens and steps; log-probabilities to the rounding of other kernels."""
    policy = decoder(dtype=dtype).cuda()
    policy.requires_grad_(False)
    captured, plain = Graphs(), Graphs(True, captures=False)
    for seed in (3, 4, 5):
        settings = {"seed": seed, "record": Record(3, True, True), **SETTINGS[name]}
        found, wanted = (rolled(policy, PADDED, graphs, **settings).trace for graphs in (captured, plain))
        assert torch.equal(found.tokens_BL, wanted.tokens_BL) and torch.equal(found.step_BL, wanted.step_BL)
        assert (found.logp_BL - wanted.logp_BL).abs().max() < 1e-5
        for key, value in wanted.seen.items():
            assert (found.seen[key].double() - value.double()).abs().max() < 1e-4, key
    assert any(step.graph is not None for step in captured.steps.values())
    assert captured.bytes()["pool"] > 0


@on_gpu
def test_a_captured_step_reads_weights_that_change_in_place():
    policy, settings = decoder().cuda().requires_grad_(False), {"length": 16, "block": 4, "cache": Cache()}
    graphs = Graphs()
    for change in (1.0, 1.3, 0.8):
        for weight in policy.parameters():
            weight.data.mul_(change)
        found, wanted = (rolled(policy, PADDED, each, **settings).trace for each in (graphs, Graphs(False)))
        assert torch.equal(found.tokens_BL, wanted.tokens_BL)


@on_gpu
def test_compiled_layers_can_be_captured():
    policy, settings = decoder().cuda().requires_grad_(False), {"length": 16, "block": 4, "cache": Cache()}
    policy.compile_layers()
    graphs, plain = Graphs(), Graphs(True, captures=False)
    for seed in (3, 4):
        found, wanted = (rolled(policy, PADDED, each, seed, **settings).trace for each in (graphs, plain))
        assert torch.equal(found.tokens_BL, wanted.tokens_BL)
    assert any(step.graph is not None for step in graphs.steps.values())
