"""The rollout engine: what it does fast is what plain loops do slowly, however it is cut, and in the memory it has."""

from functools import cache, partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import unmask.core.answers
import unmask.rollout.engine
from helpers import Net, assert_close, generator, sample
from naive import BRANCH, VOCABULARY, assert_by_hand, assert_same, by_hand, decoder, ended, guided, looked
from unmask.core.order import ORDERS, low_confidence, surest_position
from unmask.core.probes import ask, every_step, one_shot
from unmask.core.schedule import timestep
from unmask.core.shapes import GIVEN, NEVER
from unmask.core.specs import Branch, Record
from unmask.core.token_sampling import TokenSampling, uniforms
from unmask.core.trace import state_before
from unmask.rollout.cache import Cache
from unmask.rollout.denoiser import Denoiser
from unmask.rollout.engine import Engine
from unmask.rollout.sample import Rollouts, row_seeds
from unmask.util.metering import Meter, count_passes
from unmask.util.micro_batch import MicroBatch

PROMPTS = [[3, 4], [5], [3, 1, 6, 4], [6, 6], [4, 5, 3], [6] * 6]
SEED_B = row_seeds(3, len(PROMPTS))
SHAPES = {
    "one a step": {"length": 6},
    "all at once": {"length": 5, "steps": 1, "sampling": TokenSampling(1.3)},
    "remainder": {"length": 8, "steps": 3, "sampling": TokenSampling(0.7)},
    "blocks": {"length": 8, "steps": 4, "block": 4, "sampling": TokenSampling(0.8, top_p=0.7)},
    "blocks with a remainder": {"length": 10, "steps": 4, "block": 5, "sampling": TokenSampling(1.5, top_k=4)},
    "blocks of one": {"length": 4, "steps": 4, "block": 1, "sampling": TokenSampling(1.2, top_k=5, top_p=0.6)},
    "by timestep": {"length": 8, "steps": 5, "schedule": timestep},
    "greedy": {"length": 8, "steps": 6, "block": 4, "sampling": TokenSampling(0.0)},
    "greedy, cut": {"length": 6, "steps": 4, "sampling": TokenSampling(0.0, top_k=4, top_p=0.8)},
}


@cache
def policy_of(name: str):
    return {"decoder": partial(decoder, dtype=torch.float64), "net": partial(Net, 1, ends=2.5)}[name]()


def test_on_a_cpu_equal_canvases_go_through_the_model_once_and_each_is_counted(monkeypatch):
    policy, found = decoder(dtype=torch.float64), []
    prompts, plain = [[3, 4, 5]] * 6 + [[6]] * 6, policy.hidden
    for free in (True, False):
        passed, meter = [], Meter()
        if not free:
            monkeypatch.setattr(Engine, "_merges_for_free", False)
        monkeypatch.setattr(
            policy, "hidden", lambda tokens_SL, *more, p=passed: (p.append(len(tokens_SL)), plain(tokens_SL, *more))[1]
        )
        with count_passes(meter, policy):
            trace = sample(policy, prompts, row_seeds(0, 12), length=4).trace
        found.append((trace, meter.forwards, passed))
    (merged, counted, few), (apart, wanted, many) = found
    assert few[0] == 2 and many[0] == 12 and sum(few) < sum(many)
    assert counted == wanted == sum(many)
    assert torch.equal(merged.tokens_BL, apart.tokens_BL) and torch.equal(merged.step_BL, apart.step_BL)
    assert_close(merged.logp_BL, apart.logp_BL)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("name", "tolerance"), [("decoder", 1e-9), ("net", 1e-12)])
def test_a_batch_is_what_a_plain_sampler_does_with_every_row_alone(name, tolerance, order, shape):
    """Prompts of six lengths, padded on the left in the batch and not in the loop; some rows retire."""
    policy = policy_of(name)
    rows = [
        by_hand(policy, prompt, seed, order=order, **SHAPES[shape])
        for prompt, seed in zip(PROMPTS, SEED_B.tolist(), strict=True)
    ]
    trace = sample(policy, PROMPTS, SEED_B, order=ORDERS[order], **SHAPES[shape]).trace
    assert_by_hand(trace, rows, tolerance)


@pytest.mark.parametrize("name", ["decoder", "net"])
def test_among_those_rows_some_retire_and_some_do_not(name):
    rolled = partial(sample, policy_of(name), PROMPTS, SEED_B)
    retired_B = torch.cat([(rolled(**shape).trace.step_BL == NEVER).any(-1) for shape in SHAPES.values()])
    assert 10 < retired_B.sum() < len(retired_B) - 10


@pytest.mark.parametrize(
    "law",
    [TokenSampling(), TokenSampling(1.2, top_k=9, top_p=0.9), TokenSampling(0.9, guidance=0.5), TokenSampling(0.0)],
)
@pytest.mark.parametrize("lateness", [0.0, 2.0])
def test_branches_are_visited_states_filled_in_by_a_plain_loop(law, lateness):
    """The step is drawn in proportion to ((t + 1) / T) ** lateness; rows that have ended by then have no branches."""
    policy, rows = decoder(dtype=torch.float64), []
    settings = {"length": 8, "steps": 6, "block": 4, "sampling": law, "branch": Branch(2, lateness)}
    trace, branches = sample(policy, PROMPTS * 2, seed_B := row_seeds(8, 2 * len(PROMPTS)), **settings)
    weight_T = [((step + 1) / 6) ** lateness for step in range(6)]
    for b, prompt in enumerate(PROMPTS * 2):
        level = uniforms(seed_B[b], BRANCH).item() * sum(weight_T)
        step = next(t for t in range(6) if sum(weight_T[: t + 1]) > level)
        state = state_before(trace, step)[b, -8:].tolist()
        logits_LV = guided(policy, canvas := prompt + state, first := len(prompt), law.guidance)
        for z in range(0 if ended(state, policy) else 2):
            filled, logps = list(state), [0.0] * 8
            for i in (i for i in range(first, len(canvas)) if canvas[i] == policy.mask_id):
                uniform = uniforms(seed_B[b], BRANCH, 1 + z, len(canvas) - i).item()
                filled[i - first], logps[i - first], *_ = looked(
                    logits_LV[i].tolist(), policy.mask_id, law, "random", i, uniform, 0.0
                )
            rows.append((b, filled, [0 if token == policy.mask_id else GIVEN for token in state], logps))
    source, tokens, steps, logps = zip(*rows, strict=True)
    assert branches.group_B.tolist() == list(source)
    assert 3 <= len(set(source)) < 2 * len(PROMPTS)  # some rows had ended
    assert branches.tokens_BL[:, -8:].tolist() == list(tokens) and branches.step_BL[:, -8:].tolist() == list(steps)
    assert_close(branches.logp_BL[:, -8:], torch.tensor(logps, dtype=torch.float64), 1e-9)


# However it is cut

FULL = {
    "length": 8,
    "steps": 6,
    "block": 4,
    "sampling": TokenSampling(1.2, top_k=9, top_p=0.9),
    "order": low_confidence,
    "record": Record(4, True, True, True),
    "branch": Branch(3, 1.0),
}


@pytest.fixture
def exact():
    """A decoder whose rounding is below what the tests allow."""
    return decoder(dtype=torch.float64)


@pytest.mark.parametrize("rows", [1, 2, 4, 6, 100])
def test_the_number_of_rows_at_a_time_changes_nothing(exact, rows):
    group_B = torch.tensor([4, 4, 4, 9, 9, 9])
    whole = sample(exact, PROMPTS, SEED_B, group_B=group_B, **FULL)
    found = sample(exact, PROMPTS, SEED_B, group_B=group_B, micro_batch=MicroBatch(rows), **FULL)
    assert_same(found, whole)
    assert {1, 4, 5} <= set(found.branches.group_B.tolist())


@pytest.mark.parametrize("law", [TokenSampling(), FULL["sampling"], TokenSampling(0.0, top_k=3)])
@pytest.mark.parametrize("fitting", [1, 2, 3])
def test_the_number_of_positions_whose_logits_fit_changes_nothing(exact, monkeypatch, law, fitting):
    settings = FULL | {"sampling": law}

    def found() -> tuple[Rollouts, list[Tensor]]:
        rollouts, said = sample(exact, PROMPTS, SEED_B, **settings), []
        if law.temperature:
            for probes in (every_step(rollouts.trace, generator(), choice=True), one_shot(rollouts.branches)):
                answer_NL = ask(exact, probes)
                loss = (answer_NL * torch.linspace(-1, 2, answer_NL.numel()).view_as(answer_NL)).sum()
                said += [answer_NL.detach(), *torch.autograd.grad(loss, list(exact.parameters()))]
        return rollouts, said

    whole, whole_said = found()
    for module in (unmask.rollout.engine, unmask.core.answers):
        monkeypatch.setattr(module, "PIECE", fitting * VOCABULARY + VOCABULARY // 2)
    pieces, pieces_said = found()
    assert_same(pieces, whole)
    for piece, value in zip(pieces_said, whole_said, strict=True):
        assert (piece - value).norm() <= 1e-12 * value.norm()


@pytest.mark.parametrize("law", [TokenSampling(), FULL["sampling"]])
@pytest.mark.parametrize("cached", [None, Cache(True), Cache(False), Cache(True, 2)])
@pytest.mark.parametrize("threshold", [None, 0.3])
def test_when_the_batch_is_compacted_changes_nothing(exact, monkeypatch, law, cached, threshold):
    """On a GPU rows that have ended stay until the block is done. By threshold those that have finished it stay too."""
    widths = [[], []]
    settings = FULL | {"sampling": law, "cache": cached, "threshold": threshold}
    policies = [CountingRows(exact, seen) for seen in widths] if cached is None else [exact, exact]
    early = sample(policies[0], PROMPTS, SEED_B, **settings)
    at_once = Denoiser.open_positions

    def at_block_starts(walk: Denoiser, turn: int, left: int) -> int:
        walk._keep, walk.engine.set_aside = lambda index_R: None, lambda index_R: None
        most, walk.waiting = at_once(walk, turn, left), []
        del walk._keep, walk.engine.set_aside
        return left if most else 0

    monkeypatch.setattr(Denoiser, "open_positions", at_block_starts)
    assert_same(sample(policies[1], PROMPTS, SEED_B, **settings), early)
    assert cached or sum(widths[1]) > sum(widths[0])  # something was there to be compacted


class CountingRows:
    """A policy that notes how many canvases each pass has."""

    def __init__(self, policy, seen: list[int]) -> None:
        self.policy, self.seen = policy, seen

    def __getattr__(self, name):
        return getattr(self.policy, name)

    def hidden(self, tokens_SL: Tensor, *rest) -> Tensor:
        self.seen.append(len(tokens_SL))
        return self.policy.hidden(tokens_SL, *rest)


# What is never done

WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "repeat_interleave", "unique2"}
ASKS = {"item", "tolist", "numpy", "nonzero", "cpu", "__bool__", "__int__", "__float__", "__index__"}


class Calls(TorchFunctionMode):
    """What is called on tensors that would wait for a device."""

    def __init__(self, noted: list[str]) -> None:
        super().__init__()
        self.noted = noted

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in ASKS:
            self.noted.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Waits(TorchDispatchMode):
    """Operations whose result, or its size, only the device knows."""

    def __init__(self, noted: list[str]) -> None:
        super().__init__()
        self.noted = noted

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        by_index = name in ("index", "index_put", "index_put_")
        if name in WAITS or (by_index and any(i is not None and i.dtype == torch.bool for i in args[1])):
            self.noted.append(name)
        return func(*args, **(kwargs or {}))


class Sizes(TorchDispatchMode):
    """Random operations, and the sizes of results that are as wide as the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.random, self.rows = [], [0]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded in func.tags and "scaled_dot_product" not in name:
            self.random.append(name)
        for value in out if isinstance(out, tuple | list) else [out]:
            # 16 wide: the weights of the head, turned
            if isinstance(value, Tensor) and value.shape[-1:] == (VOCABULARY,) and value.shape != (16, VOCABULARY):
                self.rows.append(value.numel() // VOCABULARY)
        return out


def waits(monkeypatch, policy, **settings) -> list[str]:
    """What a rollout waits for inside its steps."""
    noted, plain = [], Denoiser.step

    def watched(*args) -> None:
        with Calls(noted), Waits(noted):
            plain(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Denoiser, "step", watched)
        patch.setattr(Engine, "_merges_for_free", False)  # as on a GPU
        sample(policy, PROMPTS, SEED_B, **{"length": 4, "block": 2, "record": Record(3, True)} | settings)
    return noted


LAWS = [
    TokenSampling(0.7),
    TokenSampling(0.0),
    TokenSampling(top_k=3),
    TokenSampling(0.0, top_k=99),
    TokenSampling(guidance=0.5),
]


@pytest.mark.parametrize(
    ("order", "law"), [(order, TokenSampling()) for order in ORDERS] + [("low_confidence", law) for law in LAWS]
)
def test_no_step_waits_for_the_device(monkeypatch, order, law):
    policy = policy_of("decoder")
    assert waits(monkeypatch, policy, sampling=law, order=ORDERS[order]) == []
    assert waits(monkeypatch, policy, sampling=law, order=ORDERS[order], cache=Cache(refresh=2)) == []


def test_no_cached_step_of_a_block_causal_model_waits_for_the_device(monkeypatch):
    assert waits(monkeypatch, decoder("qwen3", causal_block=4), cache=Cache()) == []


@pytest.mark.parametrize("cached", [None, Cache(refresh=2)])
def test_by_threshold_the_device_is_asked_once_before_a_step_while_something_is_to_be_done(monkeypatch, cached):
    policy, found, plain = policy_of("decoder"), [(0, 0, [])], Denoiser.open_positions
    shape = {"length": 12, "block": 4, "order": surest_position, "threshold": 0.2, "cache": cached}
    assert waits(monkeypatch, policy, **shape) == []

    def watched(walk: Denoiser, turn: int, left: int) -> int:
        with Calls(noted := []), Waits(noted):
            found.append((turn, plain(walk, turn, left), noted))
        return found[-1][1]

    monkeypatch.setattr(Denoiser, "open_positions", watched)
    sample(policy, PROMPTS, SEED_B, **shape)
    for (_, before, _), (turn, _, noted) in pairwise(found):
        assert noted == (["tolist"] if turn and before else [])
    assert any(turn == 3 and not before for (_, before, _), (turn, *_) in pairwise(found))


def test_waiting_would_be_noticed(monkeypatch):
    policy = policy_of("decoder")
    assert {"_local_scalar_dense"} <= set(waits(monkeypatch, policy, sampling=TokenSampling(top_p=0.5)))
    for order, name in (
        (lambda look: torch.tensor(look.noise_Q.tolist()), "tolist"),
        (lambda look: look.noise_Q if look.noise_Q.sum() >= 0 else look.column_Q, "_local_scalar_dense"),
        (lambda look: look.noise_Q + look.noise_Q[look.noise_Q >= 0], "index"),
    ):
        assert name in waits(monkeypatch, policy, order=order)


@pytest.mark.parametrize("law", [TokenSampling(), FULL["sampling"]])
def test_logits_exist_for_a_piece_of_the_positions_only_and_noise_for_none_of_the_words(monkeypatch, law):
    """In a rollout with branches, and in going back through what it and they are asked."""
    policy = decoder()

    def looked_at() -> Sizes:
        with Sizes() as sizes:
            trace, branches = sample(policy, PROMPTS[:3], SEED_B[:3], **FULL | {"sampling": law, "steps": 4})
            for probes in (every_step(trace, generator(), choice=True), one_shot(branches)):
                ask(policy, probes).sum().backward()
        return sizes

    whole = looked_at()
    for module in (unmask.rollout.engine, unmask.core.answers):
        monkeypatch.setattr(module, "PIECE", 5 * VOCABULARY)
    pieces = looked_at()
    assert max(pieces.rows) == 5 < 12 <= max(whole.rows)
    assert pieces.random == whole.random == []
    with Sizes() as noticed:
        torch.rand(3, VOCABULARY)
    assert noticed.random and max(noticed.rows) == 3


def test_a_graph_holds_no_logits_where_they_came_in_pieces(monkeypatch):
    """The backward pass makes them again, each piece once."""
    policy, made = decoder(), []
    trace = sample(policy, PROMPTS, SEED_B, length=6, steps=2).trace
    plain, probes = policy.head, every_step(trace, generator())
    policy.head = lambda hidden_QD: made.append(len(hidden_QD)) or plain(hidden_QD)
    monkeypatch.setattr(unmask.core.answers, "PIECE", 5 * VOCABULARY)
    answer_NL, before = ask(policy, probes), list(made)
    answer_NL.sum().backward()
    assert made == before + before[::-1] and max(before) == 5 < sum(before) == probes.asked_NL.sum()
