"""Static steps: they draw what other steps draw, wait for nothing, and captured they do the same."""

import pytest
import torch
from mixtures import mixture
from test_engine import Calls, Waits

import unmask.rollout.sample
from naive import assert_same, decoder
from unmask.core.order import low_confidence, random, surest_position
from unmask.core.specs import Branch, Record, RolloutRequest
from unmask.core.token_sampling import TokenSampling
from unmask.models.decoder import Decoder, TransformersPolicy
from unmask.models.tiny import TinyShape, tiny_policy
from unmask.rollout.cache import Cache
from unmask.rollout.decoding import Decoding
from unmask.rollout.denoiser import Denoiser
from unmask.rollout.graphs import Graphs, columns_of, obstacle, positions_of, reach_of, rows_of
from unmask.rollout.sample import row_seeds
from unmask.util.metering import Meter, count_passes
from unmask.util.micro_batch import MicroBatch

PADDED = [[3, 4], [5], [3, 21, 6, 4], [6, 6], [4, 5, 3], [6] * 6, [9, 8, 7]]
GROUPS = [[3, 4], [5], [3, 4], [3, 21, 6, 4], [3, 4], [5], [3, 21, 6, 4]]
PROMPTS = {"padded": PADDED, "one length": [prompt[:1] * 5 for prompt in PADDED], "groups": GROUPS}
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
CAUSAL = {
    "blocks of 4": {"length": 8, "steps": 4, "record": Record(3, True, True, choice=True)},
    "blocks of 4, whole passes": {"length": 8, "steps": 4, "cache": None},
    "blocks of 32": {"length": 32, "steps": 8, "order": random},
    "parts of blocks": {"length": 8, "steps": 8, "block": 2},
    "threshold": {"length": 12, "threshold": 0.2, "order": surest_position},
    "guided": {"length": 8, "steps": 4, "sampling": TokenSampling(guidance=0.7)},
    "continuous": {"length": 12, "steps": 6, "micro_batch": 3, "record": Record(3, True, True, choice=True)},
    "continuous, threshold": {"length": 12, "threshold": 0.3, "micro_batch": 5, "sampling": TokenSampling(top_k=6)},
}
"""Of block-causal models; the prompts end at all places of a block."""


def causal_model(name: str, **facts):
    return model("qwen3", causal_block=32 if name == "blocks of 32" else 4, **facts)


def model(kind: str = "llama", **facts):
    return decoder(kind, dtype=torch.float64, **facts)


def rolled(policy, prompts, graphs: Graphs, seed: int = 3, record: Record = Record(), branch=None, **settings):
    """Rollouts on the device of the policy."""
    device = next(policy.parameters()).device
    seed_B, request = row_seeds(seed, len(prompts)).to(device), RolloutRequest(record=record, branch=branch)
    micro_batch = settings.pop("micro_batch", None)
    decoding = Decoding(**settings, graphs=graphs)
    return unmask.rollout.sample.sample(policy, prompts, seed_B, decoding, request=request, micro_batch=micro_batch)


@pytest.mark.parametrize(("prompts", "shift"), [("padded", False), ("one length", True), ("groups", True)])
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


@pytest.mark.parametrize(("name", "shift"), [*zip(CAUSAL, [False, True] * 4, strict=True)])
def test_so_it_does_with_a_block_causal_model_and_waits_for_nothing(monkeypatch, name, shift):
    """Also if the columns that are attended to are rounded up less, and whatever an earlier rollout has left."""
    policy, graphs, passes = causal_model(name, shift=shift), Graphs(True), {}
    plain, noted = rolled(policy, PADDED, Graphs(False), **CAUSAL[name]), watch_steps(monkeypatch)
    for reach in (256, 4):
        monkeypatch.setattr(unmask.rollout.graphs, "REACH", reach)
        for memory in graphs.memories.values():
            for part in (*memory.keys, *memory.values):
                part.fill_(torch.nan)
        assert_same(rolled(policy, PADDED, graphs, **CAUSAL[name]), plain, 1e-9)
        passes[reach] = {shape[-1] for _, shape in graphs.steps}
    one_length = [prompt[:1] * 5 for prompt in PADDED[:3]]
    plain = rolled(policy, one_length, Graphs(False), 4, **CAUSAL[name])
    assert_same(rolled(policy, one_length, graphs, 4, **CAUSAL[name]), plain, 1e-9)
    assert noted == []
    assert passes[4] > passes[256] or name in ("blocks of 32", "blocks of 4, whole passes")


@pytest.mark.parametrize(("prompts", "eos"), [(PADDED + PADDED[:4], -5), (PADDED * 2, 20)])
def test_rows_that_fill_a_round_number_keep_no_prompt_waiting_and_what_they_recorded(monkeypatch, prompts, eos):
    """Six rows at a time: in the first batch one row is replaced before the others, and later one stays with five new
    ones, after its last step."""
    policy, taken, plain = model("qwen3", causal_block=4, eos_id=eos), list[tuple[int, int]](), Denoiser.step

    def noted(denoiser, number, *rest) -> None:
        taken.append((number, len(denoiser.live_R)))
        plain(denoiser, number, *rest)

    monkeypatch.setattr(Denoiser, "step", noted)
    rollouts, blocks = [], []
    for graphs in (Graphs(False), Graphs(True)):
        taken.clear()
        rollouts.append(
            rolled(policy, prompts, graphs, length=12, steps=6, micro_batch=6, record=Record(3, True, True))
        )
        blocks.append({number for number, _ in taken})
    assert_same(rollouts[1], rollouts[0], 1e-9)
    assert blocks[0] == blocks[1] and len(blocks[0]) > 5
    assert {rows for _, rows in taken} <= {1, 2, 3, 4, 6}


@pytest.mark.parametrize(("family", "cache"), [("LLaDA-MoE", Cache()), ("LLaDA-MoE", None), ("SDAR-MoE", Cache())])
def test_so_it_does_with_a_mixture_of_experts_and_waits_for_nothing(monkeypatch, tmp_path, family, cache):
    policy, settings = mixture(tmp_path, family), {"length": 8, "steps": 4, "block": 4, "cache": cache}
    plain, noted = rolled(policy, PADDED, Graphs(False), **settings), watch_steps(monkeypatch)
    graphs = Graphs(True)
    assert_same(rolled(policy, PADDED, graphs, **settings), plain, 1e-4)
    assert graphs.steps and noted == []


def watch_steps(monkeypatch) -> list[str]:
    """What steps call that waits for a device."""
    noted, plain = [], Denoiser._step

    def watched(*arguments, **more) -> None:
        with Calls(noted), Waits(noted):
            plain(*arguments, **more)

    monkeypatch.setattr(Denoiser, "_step", watched)
    return noted


def test_among_those_rows_some_end_and_others_stay_to_fill_a_round_number(monkeypatch):
    kept, plain = [], Denoiser._kept
    monkeypatch.setattr(
        Denoiser, "_kept", lambda walk, going, *more: (kept.append((going, plain(walk, going, *more))), kept[-1][1])[1]
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


class CastsLogits(Decoder):
    """Its head returns fp32 in rollouts too."""

    head = TransformersPolicy.head


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SETTINGS)
def test_logits_in_the_dtype_of_the_model_draw_bit_for_bit_what_they_draw_in_fp32(monkeypatch, name, dtype):
    """Tokens, steps, log-probabilities, records and branches."""
    settings, dtypes = dict(SETTINGS[name]), set()
    settings["record"] = Record(3, True, True, choice=settings.get("order", low_confidence) is low_confidence)
    settings["branch"] = None if settings.get("append") else Branch(2, 1.0)
    monkeypatch.setattr(Denoiser, "_draw", noting_dtype(dtypes))
    for graphs in (False, True):
        found, wanted = (
            rolled(decoder(dtype=dtype, made=made), PADDED, Graphs(graphs), **settings)
            for made in (Decoder, CastsLogits)
        )
        assert_same(found, wanted, 0)
    assert dtypes == {dtype, torch.float32}


def noting_dtype(dtypes: set[torch.dtype]):
    """`Denoiser._draw` that notes the dtype of the head's logits."""
    plain = Denoiser._draw

    def noting(denoiser, hidden, *more):
        dtypes.add(denoiser.engine.policy.head(hidden[0][:1]).dtype)
        return plain(denoiser, hidden, *more)

    return noting


def test_branches_and_micro_batches_too():
    policy, settings = model(), {"length": 8, "block": 4, "branch": Branch(2, 1.0)}
    plain = rolled(policy, PADDED, Graphs(False), **settings)
    for rows in (3, 7):
        assert_same(rolled(policy, PADDED, Graphs(True), micro_batch=MicroBatch(rows), **settings), plain, 1e-9)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_static_step_waits_for_nothing(monkeypatch, name):
    """Nor does what goes before it in `step`, but for the first pass, which makes the memory."""
    noted, record = (
        watch_steps(monkeypatch),
        Record(3, True, True, choice=SETTINGS[name].get("order", low_confidence) is low_confidence),
    )
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


def test_so_they_are_with_a_block_causal_model():
    policy, settings = model("qwen3", causal_block=4, eos_id=-5), {"length": 8, "steps": 4}
    counts = []
    for graphs in (Graphs(False), Graphs(True)):
        with count_passes(meter := Meter(), policy):
            rolled(policy, PROMPTS["one length"][:3], graphs, **settings)
        counts.append(meter.forwards)
    assert counts[0] == pytest.approx(counts[1])


def test_rows_and_positions_are_rounded_up_and_never_down():
    assert [rows_of(count) for count in (0, 1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 64, 65)] == [
        *(0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
    ]
    assert [positions_of(count, 32) for count in (1, 8, 9, 31, 32)] == [8, 8, 16, 32, 32]
    assert [positions_of(count, 5) for count in (1, 2, 3, 5)] == [2, 2, 4, 5]
    assert [columns_of(width, 100) for width in (1, 32, 33, 99, 120)] == [32, 32, 64, 100, 120]
    assert [reach_of(reach, 600) for reach in (1, 256, 257, 513, 600)] == [256, 256, 512, 600, 600]


REASONS = {
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


def test_a_mixture_whose_products_are_a_loop_is_not_captured(tmp_path):
    policy = mixture(tmp_path, "LLaDA-MoE")
    assert obstacle(policy, Decoding(8)) is None
    assert "loop" in obstacle(policy.double(), Decoding(8))


def test_on_a_gpu_all_kinds_of_models_are_captured_unless_it_is_turned_off(tmp_path):
    gpu = torch.device("cuda")
    for policy in (model(), model("qwen3", causal_block=4), mixture(tmp_path, "LLaDA-MoE")):
        decoding = Decoding(8).for_policy(policy)
        assert Graphs().apply_to(policy, decoding, gpu) and not Graphs(False).apply_to(policy, decoding, gpu)


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
    check_captured(decoder(dtype=dtype), {"record": Record(3, True, True), **SETTINGS[name]})


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CAUSAL)
def test_so_does_that_of_a_block_causal_model(name, dtype):
    check_captured(causal_model(name).to(dtype), CAUSAL[name])


@on_gpu
@pytest.mark.parametrize(("family", "cache"), [("LLaDA-MoE", Cache()), ("LLaDA-MoE", None), ("SDAR-MoE", Cache())])
def test_so_does_that_of_a_mixture(tmp_path, family, cache):
    policy = mixture(tmp_path, family, torch.bfloat16)
    check_captured(policy, {"length": 8, "steps": 4, "block": 4, "cache": cache})


def check_captured(policy, settings) -> None:
    """Equal tokens and steps; log-probabilities to the rounding of other kernels."""
    policy = policy.cuda().requires_grad_(False)
    captured, plain = Graphs(True), Graphs(True, captures=False)
    for seed, prompts in ((3, PADDED), (4, PADDED), (5, PADDED), (6, GROUPS), (7, GROUPS[::-1]), (8, GROUPS)):
        settings = {**settings, "seed": seed}
        found, wanted = (rolled(policy, prompts, graphs, **settings).trace for graphs in (captured, plain))
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
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # the compiler's advice for fp32
def test_compiled_layers_can_be_captured():
    policy, settings = decoder().cuda().requires_grad_(False), {"length": 16, "block": 4, "cache": Cache()}
    policy.compile_layers()
    graphs, plain = Graphs(), Graphs(True, captures=False)
    for seed in (3, 4):
        found, wanted = (rolled(policy, PADDED, each, seed, **settings).trace for each in (graphs, plain))
        assert torch.equal(found.tokens_BL, wanted.tokens_BL)
    assert any(step.graph is not None for step in graphs.steps.values())
