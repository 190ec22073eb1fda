"""Rollouts with a memory: exact where attention is block-causal, and elsewhere as far off as it is said to be."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from helpers import Net, assert_close, generator, sample
from naive import MASK, assert_by_hand, assert_same, by_hand, decoder
from unmask.core.order import ORDERS, left_to_right, low_confidence, random
from unmask.core.policy import Memory
from unmask.core.shapes import NEVER
from unmask.core.specs import Branch, Record
from unmask.core.token_sampling import TokenSampling
from unmask.core.trace import Trace, select_traces
from unmask.models.decoder import Decoder
from unmask.rollout.cache import Cache, cache_of
from unmask.rollout.engine import Engine
from unmask.rollout.sample import row_seeds
from unmask.training.mismatch import mismatch_metrics, random_share, replay_logprobs, truncated_weights
from unmask.util.metering import Meter, count_passes
from unmask.util.micro_batch import MicroBatch

PROMPTS = {
    "aligned": [[3, 4, 5, 6], [5] * 8, [3, 1, 6, 4], [9, 8, 7, 6, 5, 4, 3, 2]],
    "one length": [[3, 4, 5, 6], [5] * 4, [3, 1, 6, 4]],
    "misaligned": [[3, 4, 5], [5], [3, 1, 6, 4, 2], [6, 6], [9] * 8],
    "one length, misaligned": [[3, 4, 5], [6, 6, 9], [1, 2, 3]],
}


class Counting(Decoder):
    """Notes which columns every pass computes: all for nobody, all to remember, or a window."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.passes: list[tuple] = []
        self.rows: list[int] = []
        """Of the passes over whole canvases that fill a memory, or a window of it."""

    def hidden(self, tokens_SL: Tensor, attended_SL: Tensor | None, at_Q: Tensor) -> Tensor:
        self.passes.append(("all", len(tokens_SL)))
        return super().hidden(tokens_SL, attended_SL, at_Q)

    def remember(self, tokens_SL: Tensor, attended_SL: Tensor | None, at_Q: Tensor, last=None) -> tuple[Tensor, Memory]:
        self.passes.append(("remembered", len(tokens_SL) if last is None else last))
        self.rows.append(len(tokens_SL))
        return super().remember(tokens_SL, attended_SL, at_Q, last)

    def hidden_blocks(self, memory: Memory, tokens_SL: Tensor, column_SW: Tensor, reach: int, at_Q: Tensor) -> Tensor:
        self.passes.append(("blocks", column_SW[:, 0].tolist(), reach, column_SW.shape[1]))
        assert len(memory.keys[0]) == len(tokens_SL)
        return super().hidden_blocks(memory, tokens_SL, column_SW, reach, at_Q)

    def hidden_window(self, memory: Memory, tokens_SL: Tensor, first: int, last: int, at_Q: Tensor) -> Tensor:
        self.passes.append((first, last))
        self.rows.append(len(tokens_SL))
        assert len(memory.keys[0]) == len(tokens_SL)
        column_Q = at_Q % tokens_SL.shape[1]
        assert first <= column_Q.min() and column_Q.max() < last
        return super().hidden_window(memory, tokens_SL, first, last, at_Q)


@cache
def policy_of(kind: str, **facts) -> Counting:
    return decoder(kind, made=Counting, **facts)


def rolled(policy: Decoder, prompts: list[list[int]], cached: Cache | None, seed: int = 5, **settings):
    return sample(policy, prompts, row_seeds(seed, len(prompts)), cache=cached, **settings)


# Block-causal: exact

ENDS = {"llama": 20, "qwen3": 22}
LENGTHS = {4: 12, 8: 16, 2: 8}  # by block; of the model: 4, and so is 8
CAUSAL = {"sampling": TokenSampling(0.9, top_k=8), "record": Record(3, True)}


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("block", LENGTHS)
def test_a_block_causal_model_is_rolled_out_with_a_cache_as_without_one(kind, prompts, block):
    policy, settings = policy_of(kind, causal_block=4, eos_id=ENDS[kind]), CAUSAL | {"block": block}
    settings |= {"length": LENGTHS[block], "steps": LENGTHS[block] // 2}
    plain = rolled(policy, PROMPTS[prompts], None, **settings)
    assert plain.trace.causal_block == 4
    for cached in (Cache(True, 1), Cache(False, 3)):
        policy.passes.clear()
        assert_same(rolled(policy, PROMPTS[prompts], cached, **settings), plain, 1e-5)
        assert policy.passes[0][0] == "remembered"
        assert all(name == "blocks" for name, *_ in policy.passes[1:])
        assert len(policy.passes) <= plain.trace.steps


@pytest.mark.parametrize(("block", "shift", "threshold"), [(None, False, None), (None, True, 0.3), (2, True, None)])
def test_its_blocks_count_from_the_first_token_of_each_prompt(block, shift, threshold):
    """A prompt that ends inside a block is followed by the rest of it: by loops, one row alone."""
    policy = policy_of("qwen3", dtype=torch.float64, causal_block=4, eos_id=ENDS["qwen3"], shift=shift)
    prompts, order = PROMPTS["misaligned"], "low_confidence" if threshold else "random"
    seed_B, law = row_seeds(5, len(prompts)), TokenSampling(0.9, top_k=8)
    shape = {"length": 16, "steps": None if threshold else 8, "block": block, "sampling": law, "threshold": threshold}
    rows = [
        by_hand(policy, prompt, int(seed), order=order, **shape) for prompt, seed in zip(prompts, seed_B, strict=True)
    ]
    for cached in (None, Cache()):
        trace = rolled(policy, prompts, cached, order=ORDERS[order], **shape).trace
        assert_by_hand(trace, rows, 1e-10)
    width, size = trace.tokens_BL.shape[1], block or 4
    for b, prompt in enumerate(prompts):
        own = [(len(prompt) + i) // size - len(prompt) // size for i in range(16)]
        assert trace.block_BL[b].tolist() == [-1] * (width - 16) + own


@pytest.mark.parametrize("prompts", ["aligned", "misaligned"])
@pytest.mark.parametrize(
    "settings",
    [
        {"threshold": 0.3, "order": low_confidence},
        {"sampling": TokenSampling(guidance=0.5)},
        {"sampling": TokenSampling(0.0), "order": ORDERS["margin"]},
        {"branch": Branch(2, 0.0)},
    ],
)
def test_so_it_is_by_threshold_guided_greedy_and_with_branches(prompts, settings):
    policy = policy_of("qwen3", causal_block=4, eos_id=ENDS["qwen3"])
    settings = {"length": 12, "block": 4} | settings
    plain = rolled(policy, PROMPTS[prompts], None, **settings)
    assert_same(rolled(policy, PROMPTS[prompts], Cache(), **settings), plain, 1e-5)


def test_in_those_rollouts_rows_retire_while_others_go_on():
    for kind, eos in ENDS.items():
        policy, last = policy_of(kind, causal_block=4, eos_id=eos), set()
        for prompts in PROMPTS.values():
            trace = rolled(policy, prompts, Cache(), **CAUSAL, length=12, steps=6, block=4).trace
            last |= {max(step for step in row if step < NEVER) for row in trace.step_BL.tolist()}
        assert 5 in last and len(last) > 2


def test_finished_blocks_of_a_block_causal_model_are_not_computed_again():
    """A first pass up to the first block; then one block, and when it begins also the one before it, now finished."""
    policy = policy_of("llama", causal_block=4, eos_id=-1)
    shape = {"length": 12, "steps": 6, "order": left_to_right}
    for cached in (Cache(True), Cache(False), Cache(False, 2)):
        policy.passes.clear()
        rolled(policy, PROMPTS["one length"], cached, **shape)
        blocks = [("blocks", [4, 4, 4], 8, 4), ("blocks", [4, 4, 4], 12, 8), ("blocks", [8] * 3, 12, 4)]
        blocks += [("blocks", [8, 8, 8], 16, 8), ("blocks", [12, 12, 12], 16, 4)]
        assert policy.passes == [("remembered", 8), *blocks]
    policy.passes.clear()
    rolled(policy, [[3, 4, 5], [5] * 5], Cache(), **shape)  # completions begin in column 5, blocks in columns 2 and 4
    assert policy.passes == [
        ("remembered", 9),
        ("blocks", [2, 4], 9, 4),  # columns 2 to 5 and 4 to 7
        ("blocks", [2, 4], 13, 8),
        ("blocks", [6, 8], 13, 4),
        ("blocks", [6, 8], 17, 8),
        ("blocks", [10, 12], 17, 4),
        ("blocks", [10, 12], 17, 8),  # the last blocks, of three positions and of one
        ("blocks", [14], 17, 4),
    ]
    policy.passes.clear()
    rolled(policy, [[3, 4, 5, 6]], Cache(), length=8, block=2, order=left_to_right)  # two parts of every block
    windows = [("blocks", [4], 8, 4), ("blocks", [0], 10, 8), ("blocks", [4], 10, 4), ("blocks", [4], 12, 8)]
    assert policy.passes[:5] == [("remembered", 8), *windows]


def test_blocks_that_do_not_fit_a_block_causal_model_are_refused():
    policy = policy_of("llama", causal_block=4)
    for settings, words in (({"block": 6}, ("block=6", "4")), ({"steps": 5}, ("steps=5", "12", "multiple of 3"))):
        with pytest.raises(ValueError) as refused:
            rolled(policy, [[3]], None, length=12, **settings)
        assert all(word in str(refused.value) for word in words)


# Bidirectional: what is computed


WINDOWS = {  # completion: columns 4 .. 15 of 16; two steps a block
    ("dual", 1): ["remembered", (4, 8), "remembered", (8, 12), "remembered", (12, 16)],
    ("prefix", 1): ["remembered", (4, 16), "remembered", (8, 16), "remembered", (12, 16)],
    ("dual", 2): ["remembered", (4, 8), (4, 12), (8, 12), "remembered", (12, 16)],
    ("prefix", 2): ["remembered", (4, 16), (4, 16), (8, 16), "remembered", (12, 16)],
    ("dual", 9): ["remembered", (4, 8), (4, 12), (8, 12), (8, 16), (12, 16)],
    ("none", 1): ["all"] * 6,
}


@pytest.mark.parametrize(("kind", "refresh"), WINDOWS)
@pytest.mark.parametrize("guidance", [0.0, 0.5])
def test_which_columns_are_computed(kind, refresh, guidance):
    policy = policy_of("llama", eos_id=-1)
    policy.passes.clear()
    settings = {"length": 12, "block": 4, "steps": 6, "sampling": TokenSampling(guidance=guidance)}
    rolled(policy, PROMPTS["one length"], cache_of(kind, refresh), **settings)
    wanted = [(one, 3) if isinstance(one, str) else one for one in WINDOWS[kind, refresh]]
    # Without a cache equal canvases go through the model once: at first those without their prompts.
    passes = [(name, 3) if name == "all" else (name, last) for name, last in policy.passes]
    assert passes == [one for one in wanted for _ in range(2 if guidance else 1)]


# By threshold

FACTS = [{}, {"shift": True}, {"causal_block": 4}, {"causal_block": 4, "shift": True}]
CACHES = [None, Cache(True), Cache(False), Cache(True, 2), Cache(False, 2), Cache(True, 3)]
CASES = [(cached, facts, 0.0) for cached in CACHES for facts in FACTS] + [(Cache(True, 2), {}, 0.5)]


@pytest.mark.parametrize(("cached", "facts", "guidance"), CASES)
def test_a_row_that_waits_for_the_others_of_its_batch_is_what_it_is_alone(cached, facts, guidance):
    """It has finished a block early, and comes to the next with what is remembered of it."""
    policy = policy_of("llama", dtype=torch.float64, eos_id=ENDS["llama"], **facts)
    prompts, law = PROMPTS["aligned"] + PROMPTS["misaligned"], TokenSampling(0.7, top_k=6, guidance=guidance)
    settings = {"length": 16, "block": 4, "threshold": 0.3, "sampling": law, "cache": cached, "branch": Branch(2, 0.0)}
    seed_B = row_seeds(5, len(prompts))
    trace, branches = sample(policy, prompts, seed_B, **settings)
    steps_BKW = trace.step_BL[:, -16:].view(-1, 4, 4)
    assert len({len({*steps}) for row in steps_BKW.tolist() for steps in row if NEVER not in steps}) >= 3
    for b, prompt in enumerate(prompts):
        alone = sample(policy, [prompt], seed_B[[b]], **settings)
        for row, own in (
            (select_traces(trace, [b]), alone.trace),
            (select_traces(branches, branches.group_B == b), alone[1]),
        ):
            assert torch.equal(row.tokens_BL[:, -16:], own.tokens_BL[:, -16:])
            assert torch.equal(row.step_BL[:, -16:], own.step_BL[:, -16:])
            assert_close(row.logp_BL[:, -16:], own.logp_BL[:, -16:], 1e-12)


def test_caches_by_name_and_those_that_cannot_be():
    assert cache_of("none") is None and cache_of("prefix", 3) == Cache(False, 3) and cache_of("dual") == Cache(True, 1)
    with pytest.raises(ValueError, match=r"^refresh=0 .*1"):
        Cache(refresh=0)
    with pytest.raises(ValueError, match="cache none"):
        sample(Net(), [[3]], torch.arange(1), length=4, cache=Cache())
    assert Engine.__dataclass_fields__["cache"].default is None


# Bidirectional: how far off it is


@pytest.mark.parametrize("facts", [{}, {"shift": True}])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("cached", [Cache(True), Cache(False)])
def test_with_one_step_a_block_every_pass_is_a_full_one_and_nothing_is_off(kind, facts, cached):
    """Also where the logits are one position late (Dream)."""
    policy = policy_of(kind, dtype=torch.float64, **facts)
    settings = {"length": 12, "block": 3, "steps": 4, "branch": Branch(2, 1.0)}
    plain = rolled(policy, PROMPTS["misaligned"], None, **settings)
    policy.passes.clear()
    assert_same(rolled(policy, PROMPTS["misaligned"], cached, **settings), plain, 1e-12)
    assert {name for name, _ in policy.passes} == {"remembered", "all"}  # all: the branches'
    settings |= {"steps": 8}
    late, now = (rolled(policy, PROMPTS["misaligned"], each, **settings).trace for each in (None, cached))
    assert not torch.allclose(late.logp_BL, now.logp_BL)


@pytest.mark.parametrize("facts", [{}, {"shift": True}])
@pytest.mark.parametrize("suffix", [True, False])
def test_a_window_is_a_pass_over_a_canvas_whose_other_columns_are_as_they_were(facts, suffix):
    """Keys and values of old columns come from the old canvas: layer by layer, with both canvases side by side."""
    policy = policy_of("llama", **facts)
    old_L = torch.tensor([3, 4, 5, 6, MASK, MASK, MASK, MASK, MASK, MASK])
    new_L = old_L.clone()
    new_L[4], new_L[6] = 11, 12
    first, last = 4, 8 if suffix else 10
    inside = torch.arange(10)
    inside = (inside >= first - int(policy.facts.shift)) & (inside < last)
    with torch.no_grad():
        _, memory = policy.remember(old_L[None], None, torch.tensor([4]))
        at_Q = torch.arange(first, 8)
        found_QD = policy.hidden_window(memory, new_L[None], first, last, at_Q)
        expected_LD = mixed_pass(policy, old_L, new_L, inside)
        assert_close(found_QD, expected_LD[at_Q - int(policy.facts.shift)], 1e-5)
        full_QD = policy.hidden(new_L[None], None, at_Q)
        assert (found_QD - full_QD).abs().max() > 1e-3  # and that is not the pass over the new canvas


def mixed_pass(policy: Decoder, old_L: Tensor, new_L: Tensor, inside_L: Tensor) -> Tensor:
    """Attention written out: queries of the new canvas, keys and values new inside and old outside."""
    lm, place_L = policy.lm.model, torch.arange(len(old_L))
    angle_LD = place_L[:, None].float() * policy.frequency_D
    cos_LD, sin_LD = angle_LD.cos().repeat(1, 2), angle_LD.sin().repeat(1, 2)
    x = {"old": lm.embed_tokens(old_L), "new": lm.embed_tokens(new_L)}

    def turned(part_LHD: Tensor) -> Tensor:
        half = part_LHD.shape[-1] // 2
        other = torch.cat([-part_LHD[..., half:], part_LHD[..., :half]], -1)
        return part_LHD * cos_LD[:, None] + other * sin_LD[:, None]

    for layer in lm.layers:
        attention, read, keys = layer.self_attn, {}, {}
        for name, x_LD in x.items():
            y_LD = layer.input_layernorm(x_LD)
            q, k, v = (getattr(attention, f"{part}_proj")(y_LD).view(len(y_LD), -1, 4) for part in "qkv")
            read[name], keys[name] = turned(q), (turned(k), v)
        for name in ("new", "old"):
            k, v = keys["old"]
            if name == "new":
                k, v = (torch.where(inside_L[:, None, None], a, b) for a, b in zip(keys["new"], (k, v), strict=True))
            heads = []
            for head in range(4):  # two query heads to a key head
                score_LL = read[name][:, head] @ k[:, head // 2].T / 2.0
                heads.append(score_LL.softmax(-1) @ v[:, head // 2])
            x_LD = x[name] + attention.o_proj(torch.cat(heads, -1))
            x[name] = x_LD + layer.mlp(layer.post_attention_layernorm(x_LD))
    return lm.norm(x["new"])


# The mismatch


CUTS = [TokenSampling(), TokenSampling(0.8), TokenSampling(1.3, top_k=5, top_p=0.9)]


@pytest.mark.parametrize("law", CUTS)
@pytest.mark.parametrize("order", ORDERS)
def test_without_a_cache_a_replay_gives_the_log_probabilities_themselves(order, law):
    policy = policy_of("llama")
    trace = rolled(
        policy, PROMPTS["misaligned"], None, length=8, block=4, steps=6, sampling=law, order=ORDERS[order]
    ).trace
    exact_BL = replay_logprobs(policy, trace, MicroBatch(7))
    assert_close(exact_BL, trace.logp_BL, 2e-6)
    metrics = mismatch_metrics(trace, exact_BL)
    assert 0 <= metrics["train/cache_mismatch"] <= metrics["train/cache_mismatch_max"] < 2e-6
    assert_close(truncated_weights(trace, exact_BL, 5.0), torch.ones_like(exact_BL), 2e-6)


@torch.no_grad()
def log_probability(policy: Decoder, trace: Trace, row: int, column: int) -> float:
    """Of one token at the state it was drawn at: the row alone, without its padding, all logits."""
    first = int((~trace.attended_BL[row]).sum())
    state = [
        MASK if step >= trace.step_BL[row, column] else token
        for token, step in zip(trace.tokens_BL[row].tolist(), trace.step_BL[row].tolist(), strict=True)
    ][first:]
    logits_V = policy(torch.tensor([state]), None, torch.tensor([column - first]))[0].double()
    logits_V[MASK] = -torch.inf
    logq_V = (logits_V / trace.sampling.temperature).log_softmax(-1)
    if trace.sampling.truncated:
        kept = trace.seen["kept"][row, column - trace.tokens_BL.shape[1]]
        logq_V = logq_V - logq_V[kept[kept >= 0]].logsumexp(0)
    return float(logq_V[trace.tokens_BL[row, column]])


@pytest.mark.parametrize("law", CUTS)
@pytest.mark.parametrize("cached", [Cache(True), Cache(False, 2)])
def test_the_mismatch_of_a_cached_rollout_is_what_a_loop_finds(cached, law):
    policy = policy_of("llama")
    trace = rolled(policy, PROMPTS["misaligned"], cached, length=8, block=4, steps=6, sampling=law).trace
    exact_BL, apart = replay_logprobs(policy, trace, MicroBatch(5)), []
    weight_BL, whole_BL = truncated_weights(trace, exact_BL, 1.05), truncated_weights(trace, exact_BL, torch.inf)
    for row, column in trace.filled_BL.nonzero().tolist():
        exact, sampled = log_probability(policy, trace, row, column), float(trace.logp_BL[row, column])
        assert float(exact_BL[row, column]) == pytest.approx(exact, abs=5e-6)
        apart.append(abs(exact - sampled))
        ratio = float(torch.tensor(exact - sampled, dtype=torch.float64).exp())
        assert float(weight_BL[row, column]) == pytest.approx(min(1.05, ratio), abs=1e-5)
        assert float(whole_BL[row, column]) == pytest.approx(ratio, rel=1e-5)
    assert (exact_BL[~trace.filled_BL] == 0).all() and (weight_BL[~trace.filled_BL] == 1).all()
    metrics = mismatch_metrics(trace, exact_BL)
    assert metrics["train/cache_mismatch"] == pytest.approx(sum(apart) / len(apart), abs=2e-6)
    assert metrics["train/cache_mismatch_max"] == pytest.approx(max(apart), abs=5e-6) and max(apart) > 0.01
    assert (whole_BL > 1.05).any() and (whole_BL < 1).any()


@pytest.mark.parametrize("cached", [Cache(True), Cache(False)])
def test_weighted_by_the_ratio_what_a_cache_draws_is_what_the_policy_would(cached):
    """Two positions, five words, from left to right. The first step is a full pass. At the second every word is drawn
    by some row, so its recorded probabilities are all of the cached law; weighted, they add up to the policy's own."""
    policy = decoder(vocabulary=6, mask_id=5, eos_id=-1, seed=2)
    law, value = TokenSampling(2.0), torch.rand(5, 5, generator=generator(), dtype=torch.float64).tolist()
    trace = rolled(policy, [[3, 4, 2]] * 3000, cached, length=2, order=left_to_right, sampling=law).trace
    weight_BL = truncated_weights(trace, replay_logprobs(policy, trace, MicroBatch(6000)), torch.inf)
    cached_of, weight_of = {}, {}
    for row in range(len(trace)):
        pair = tuple(trace.tokens_BL[row, 3:].tolist())
        cached_of[pair], weight_of[pair] = trace.logp_BL[row].sum().exp().item(), weight_BL[row].prod().item()
        assert weight_BL[row, 3].item() == pytest.approx(1.0, abs=1e-5)
    assert len(cached_of) == 25 and sum(cached_of.values()) == pytest.approx(1.0, abs=1e-5)

    def law_at(*canvas: int) -> list[float]:
        with torch.no_grad():
            logits_V = policy(torch.tensor([canvas]), None, torch.tensor([canvas.index(5)]))[0, :5].double()
        return (logits_V / law.temperature).softmax(-1).tolist()

    pairs = [(one, two) for one in range(5) for two in range(5)]
    first, second = law_at(3, 4, 2, 5, 5), [law_at(3, 4, 2, one, 5) for one in range(5)]
    truth = sum(first[one] * second[one][two] * value[one][two] for one, two in pairs)
    weighted = sum(cached_of[pair] * weight_of[pair] * value[pair[0]][pair[1]] for pair in pairs)
    unweighted = sum(cached_of[pair] * value[pair[0]][pair[1]] for pair in pairs)
    assert weighted == pytest.approx(truth, rel=1e-5) and abs(unweighted / truth - 1) > 1e-3


def test_a_share_of_the_rows_is_replayed_and_one_at_least():
    trace = rolled(policy_of("llama"), PROMPTS["misaligned"], None, length=4, order=random).trace
    rng = torch.Generator().manual_seed(0)
    picked = [random_share(replace(trace, seen={}), share, rng) for share in (0.0, 0.2, 0.6, 1.0)]
    assert [len(rows) for rows in picked] == [1, 1, 3, 5]
    assert sorted(picked[-1].group_B.tolist()) == [0, 1, 2, 3, 4]
    for rows in picked:
        assert torch.equal(rows.tokens_BL, trace.tokens_BL[rows.group_B])


# Continuous batches


@pytest.mark.parametrize(
    ("cached", "threshold", "guidance"), [(None, None, 0.0), (Cache(), None, 0.5), (Cache(), 0.3, 0.0)]
)
def test_a_row_that_ends_is_replaced_by_the_next_prompt(cached, threshold, guidance):
    """Every row is what it is in a batch of all; rows at different blocks go through the model together."""
    policy = policy_of("qwen3", dtype=torch.float64, causal_block=4, eos_id=ENDS["qwen3"])
    prompts = PROMPTS["misaligned"] + PROMPTS["aligned"]
    settings = CAUSAL | {"length": 16, "sampling": TokenSampling(0.9, top_k=8, guidance=guidance)}
    settings |= {"threshold": threshold} if threshold else {"steps": 8}
    whole = rolled(policy, prompts, cached, **settings)
    lengths = {sum(step < NEVER for step in row[-16:]) for row in whole.trace.step_BL.tolist()}
    assert len(lengths) >= 3
    for slots in (3, 5):
        policy.passes.clear()
        assert_same(rolled(policy, prompts, cached, micro_batch=slots, **settings), whole, 1e-10)
    if cached is not None:
        starts = [columns for name, columns, *_ in policy.passes if name == "blocks"]
        assert all(len(columns) <= 5 for columns in starts)
        streams = 2 if guidance else 1
        assert sum(name == "remembered" for name, *_ in policy.passes) == 2 * streams  # 5 prompts, and the 4 others
        assert any(max(columns) - min(columns) >= 8 for columns in starts)  # two blocks apart


def test_continuous_batches_count_the_passes_of_a_batch_of_all():
    """Prompts that are computed ahead count as the part of a canvas that they are."""
    policy, prompts, counts = policy_of("qwen3", causal_block=4, eos_id=ENDS["qwen3"]), [[3, 4, 5, 6, 7] * 2] * 12, []
    for slots in (None, 4, 8):
        with count_passes(meter := Meter(), policy):
            rolled(policy, prompts, Cache(), micro_batch=slots, **CAUSAL | {"length": 40, "steps": 40})
        counts.append(meter.forwards)
    assert counts[1:] == pytest.approx(counts[:1] * 2, rel=0.02)
