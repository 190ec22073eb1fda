"""A small float64 policy, rollouts of it, and random Probes: what the unit tests feed the library with; and runs that
are cut off."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import count

import pytest
import torch
from torch import Tensor, nn

import unmask.rollout.sample
import unmask.training.loop
import unmask.training.run.base_run
import unmask.training.update
from unmask.core.method import Method
from unmask.core.objective import Objective, reward_divergence
from unmask.core.order import Order, random
from unmask.core.probes import Probes, ask
from unmask.core.shapes import GIVEN, NEVER
from unmask.core.specs import Branch, Record, RolloutRequest
from unmask.core.token_sampling import TokenSampling
from unmask.core.trace import TokenRule, Trace, until_eos
from unmask.evaluation.evaluate import Evaluator
from unmask.methods import BASES
from unmask.models.tiny import TinyShape
from unmask.rollout.decoding import Decoding
from unmask.rollout.sample import Rollouts
from unmask.training.update import LossTerm, term_loss

PAD, EOS, MASK, WORDS = 0, 1, 2, 7
PROMPTS = [[3, 4], [5], [3, 1, 6, 4], [6, 6]]  # of different lengths; one holds an end token
SIZES = (3, 2, 4, 2)  # traces of each prompt: groups differ in size
SMALL = TinyShape(width=16, layers=1, heads=2, hidden=16, max_length=48)  # conftest.py's `model`


class Net(nn.Module):
    """One attention layer, every logit a function of the whole canvas; what is not attended changes nothing."""

    mask_id, eos_id, pad_id, max_length, tokenizer = MASK, EOS, PAD, 24, None

    def __init__(self, seed: int = 0, ends: float = 0.0, sharp: float = 1.5) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(seed)

        def weights(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=rng, dtype=torch.float64))

        self.word_VD, self.place_LD, self.mix_DD = weights(WORDS, 5), weights(24, 5), weights(5, 5)
        self.query_DD, self.out_DV, self.bias_V = weights(5, 5), weights(5, WORDS), weights(WORDS)
        self.ends, self.sharp = ends, sharp
        self.calls: list[Tensor] = []

    vocabulary = WORDS

    def head(self, logits_QV: Tensor) -> Tensor:
        return logits_QV

    def forward(self, tokens_SL: Tensor, attended_SL: Tensor | None, at_Q: Tensor) -> Tensor:
        return self.hidden(tokens_SL, attended_SL, at_Q)

    def hidden(self, tokens_SL: Tensor, attended_SL: Tensor | None, at_Q: Tensor) -> Tensor:
        attended_SL = torch.ones_like(tokens_SL, dtype=torch.bool) if attended_SL is None else attended_SL
        self.calls.append(tokens_SL.clone())
        place_SL = (attended_SL.cumsum(1) - 1).clamp(min=0)
        x_SLD = self.word_VD[tokens_SL] + self.place_LD[place_SL]
        score_SLL = (x_SLD @ self.query_DD @ x_SLD.mT / 3).masked_fill(~attended_SL[:, None], -torch.inf)
        y_SLD = torch.tanh(score_SLL.softmax(-1) @ x_SLD @ self.mix_DD + x_SLD)
        logits_QV = (y_SLD @ self.out_DV + self.bias_V).flatten(0, 1)[at_Q] * self.sharp
        end_V = torch.zeros_like(self.bias_V)
        end_V[EOS] = self.ends
        return logits_QV + end_V


def moved(policy: Net, by: float = 0.1, seed: int = 9) -> Net:
    """A policy near another one: what it was some updates ago."""
    rng = torch.Generator().manual_seed(seed)
    other = Net(ends=policy.ends, sharp=policy.sharp)
    for mine, theirs in zip(other.parameters(), policy.parameters(), strict=True):
        mine.data = theirs.data + by * torch.randn(theirs.shape, generator=rng, dtype=torch.float64)
    return other


def sample(policy, prompts, seed_B, *, group_B=None, micro_batch=None, **settings) -> Rollouts:
    """`unmask.sample` with the fields of RolloutRequest and Decoding as keywords; None stands for a default, except for
    the cache."""
    given = {name: value for name, value in settings.items() if value is not None or name == "cache"}
    request = RolloutRequest(**{name: given.pop(name) for name in ("counted", "record", "branch") if name in given})
    decoding = Decoding(**given)
    return unmask.rollout.sample.sample(
        policy, prompts, seed_B, decoding, group_B=group_B, request=request, micro_batch=micro_batch
    )


def rolled(
    policy: Net,
    *,
    seed: int = 0,
    length: int = 6,
    steps: int | None = None,
    block: int | None = None,
    sampling: TokenSampling = TokenSampling(),
    order: Order = random,
    threshold: float | None = None,
    counted: TokenRule = until_eos,
    record: Record = Record(),
    branch: Branch | None = None,
    sizes: tuple[int, ...] = SIZES,
) -> Rollouts:
    """Groups of different size, prompts of different length."""
    prompts = [prompt for prompt, size in zip(PROMPTS, sizes, strict=False) for _ in range(size)]
    group_B = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    seed_B = torch.arange(len(prompts)) + 1000 * seed
    settings = {"sampling": sampling, "order": order, "counted": counted, "record": record, "branch": branch}
    settings |= {"length": length, "steps": steps, "block": block, "threshold": threshold}
    return sample(policy, prompts, seed_B, group_B=group_B, **settings)


ON_ROLLOUTS = {name: base for name, base in BASES.items() if name not in ("fork", "vine")}
"""The bases whose loss needs rollouts of any kind and their rewards only."""


def rewards(trace: Trace, seed: int = 0) -> Tensor:
    """A reward for every trace, a function of what it wrote."""
    code_B = (trace.tokens_BL * torch.arange(trace.tokens_BL.shape[1]).flip(0)).sum(-1) + seed
    return torch.sin(code_B.double()) + 0.3


def random_trace(seed: int, sizes: tuple[int, ...] = (3, 2, 4), width: int = 7) -> Trace:
    """Tokens, steps, blocks and counts at random: uneven lengths, padding, retired rows."""
    rng = torch.Generator().manual_seed(seed)
    batch, steps = sum(sizes), 4
    column_L = torch.arange(width)
    prompt_B1 = torch.randint(1, 3, (batch, 1), generator=rng)
    given_BL = column_L < 2
    step_BL = torch.randint(0, steps, (batch, width), generator=rng)
    step_BL = step_BL.masked_fill(torch.rand(batch, width, generator=rng) < 0.1, NEVER).masked_fill(given_BL, GIVEN)
    tokens_BL = torch.randint(3, WORDS, (batch, width), generator=rng).masked_fill(step_BL == NEVER, MASK)
    filled_BL = (step_BL != GIVEN) & (step_BL != NEVER)
    return Trace(
        tokens_BL=tokens_BL,
        step_BL=step_BL,
        block_BL=((column_L - 2) // 3).masked_fill(column_L < 2, GIVEN).repeat(batch, 1),
        attended_BL=column_L >= 2 - prompt_B1,
        counted_BL=filled_BL & (torch.rand(batch, width, generator=rng) < 0.8),
        logp_BL=-torch.rand(batch, width, generator=rng, dtype=torch.float64) * filled_BL,
        group_B=torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)),
        mask_id=MASK,
        eos_id=EOS,
        steps=steps,
    )


def random_probes(seed: int, units: int = 3, rows: int = 2, passed: bool = False) -> Probes:
    """1..units units a trace, 1..rows rows a unit, in shuffled order, with shares and weights at random."""
    trace, rng = random_trace(seed), torch.Generator().manual_seed(seed + 1)
    unit_count_B = torch.randint(1, units + 1, (len(trace),), generator=rng)
    trace_M = torch.arange(len(trace)).repeat_interleave(unit_count_B)
    trace_M = trace_M[torch.randperm(len(trace_M), generator=rng)]
    row_count_M = torch.randint(1, rows + 1, (len(trace_M),), generator=rng)
    unit_N = torch.arange(len(trace_M)).repeat_interleave(row_count_M)
    unit_N = unit_N[torch.randperm(len(unit_N), generator=rng)]
    tokens_NL, filled_NL = trace.tokens_BL[trace_M[unit_N]], trace.filled_BL[trace_M[unit_N]]
    asked_NL = filled_NL & (torch.rand(filled_NL.shape, generator=rng) < 0.6)
    asked_NL &= torch.rand(len(unit_N), 1, generator=rng) < 0.85  # some rows, and so some units, ask nothing
    passed_NL = filled_NL & ~asked_NL & (torch.rand(filled_NL.shape, generator=rng) < 0.5) if passed else None
    share_NL = 0.3 + torch.rand(filled_NL.shape, generator=rng, dtype=torch.float64)
    return Probes(
        trace=trace,
        states_SL=tokens_NL.masked_fill(filled_NL, MASK),
        attended_SL=trace.attended_BL[trace_M[unit_N]],
        state_N=torch.arange(len(unit_N)),
        unit_N=unit_N,
        asked_NL=asked_NL,
        share_NL=share_NL if passed_NL is None else share_NL.masked_fill(passed_NL, 1.0),
        trace_M=trace_M,
        weight_M=0.2 + torch.rand(len(trace_M), generator=rng, dtype=torch.float64),
        passed_NL=passed_NL,
    )


def random_answers(probes: Probes, seed: int, spread: float = 0.4) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities by the new, the old and the reference policy: zero where nothing is asked."""
    rng = torch.Generator().manual_seed(seed + 2)
    looked_NL = probes.asked_NL if probes.passed_NL is None else probes.asked_NL | probes.passed_NL
    base_NL = -2 * torch.rand(looked_NL.shape, generator=rng, dtype=torch.float64)
    moved = [base_NL + spread * torch.randn(base_NL.shape, generator=rng, dtype=torch.float64) for _ in range(3)]
    new_NL, old_NL, reference_NL = (m * looked_NL for m in moved)
    return new_NL.requires_grad_(), old_NL, reference_NL


def random_credit(probes: Probes, seed: int) -> tuple[Tensor, Tensor]:
    """Advantages of both signs, and credit that differs from token to token."""
    rng = torch.Generator().manual_seed(seed + 3)
    advantage_B = torch.randn(len(probes.trace), generator=rng, dtype=torch.float64)
    return advantage_B, 0.2 + 2 * torch.rand(probes.trace.tokens_BL.shape, generator=rng, dtype=torch.float64)


def loss_and_slope(loss: Tensor, logp_NL: Tensor, probes: Probes) -> tuple[Tensor, Tensor]:
    """A loss and its gradient at the answers; elsewhere the answer is a constant zero and has none."""
    looked_NL = probes.asked_NL if probes.passed_NL is None else probes.asked_NL | probes.passed_NL
    return loss.detach(), torch.autograd.grad(loss, logp_NL)[0] * looked_NL


def objective_and_slope(
    objective: Objective, logp_NL: Tensor, old_NL: Tensor, probes: Probes, *credit: Tensor
) -> tuple[Tensor, Tensor]:
    return loss_and_slope(objective(logp_NL, old_NL, probes, *credit)[0], logp_NL, probes)


class Plain:
    """Probes as Python lists, for straight-line references."""

    def __init__(self, probes: Probes) -> None:
        self.trace, self.weight = probes.trace_M.tolist(), probes.weight_M.tolist()
        self.units, self.batch = range(len(self.trace)), len(probes.trace)
        unit, self.asked, self.share = probes.unit_N.tolist(), probes.asked_NL.tolist(), probes.share_NL.tolist()
        counted = probes.trace.counted_BL.tolist()
        self.rows = [[n for n, u in enumerate(unit) if u == m] for m in self.units]
        self.tokens = [
            [i for i, yes in enumerate(counted[b]) if yes and any(self.asked[n][i] for n in rows)]
            for b, rows in zip(self.trace, self.rows, strict=True)
        ]
        """For every unit, the positions it asks about that count in its trace."""

    def likelihood(self, cells: list[list[Tensor]], m: int, i: int) -> Tensor:
        """The share-weighted sum over unit m's rows that ask about position i."""
        return sum(self.share[n][i] * cells[n][i] for n in self.rows[m] if self.asked[n][i])


def cells_of(value_NL: Tensor) -> list[list[Tensor]]:
    return [list(row_L.unbind()) for row_L in value_NL.unbind()]


def assert_close(a: tuple[Tensor, ...] | Tensor, b: tuple[Tensor, ...] | Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def parts_of(
    method: Method,
    rollouts: Rollouts,
    rng: torch.Generator,
    old: Net | None = None,
    reference: Net | None = None,
    change: Callable[[Probes], Probes] = lambda probes: probes,
) -> list[LossTerm]:
    """One inner update as the training loop puts it together: the base's part and, with branches, theirs."""

    @torch.no_grad()
    def known(policy: Net | None, probes: Probes) -> Tensor | None:
        return None if policy is None else ask(policy, probes)

    def part(
        probes: Probes, reward_B: Tensor, term: object, credit_BL: Tensor, weight: float = 1.0, label: str = ""
    ) -> LossTerm:
        advantage_B = term.advantage(reward_B, probes.trace.group_B)
        answers = known(old, probes), known(reference, probes) if term.kl else None
        return LossTerm(
            probes, advantage_B, credit_BL, term.objective, *answers, term.kl, term.divergence, weight, label
        )

    trace, branches = rollouts
    probes = change(method.probe(trace, rng, 1)[0])
    reward_B = rewards(probes.trace)
    if method.reward_kl:
        price_B = reward_divergence(known(old, probes), known(reference, probes), probes)
        reward_B = reward_B - method.reward_kl * price_B
    parts = [part(probes, reward_B, method, method.credit(probes.trace))]
    for term in method.further:
        further = change(term.probe(trace if term.branch is None else branches, rng, 1)[0])
        further_reward_B = reward_B if term.branch is None else rewards(further.trace)
        credit_BL = term.credit(further.trace)
        parts.append(part(further, further_reward_B, term, credit_BL, term.weight, term.label))
    return parts


def slopes(policy: Net, parts: list[LossTerm]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The sum of the parts' losses and its gradient, parameter by parameter, in one pass."""
    loss = sum(term_loss(part, ask(policy, part.probes))[0] for part in parts)
    return loss.detach(), torch.autograd.grad(loss, list(policy.parameters()))


def assert_identical(one: tuple[Tensor, tuple[Tensor, ...]], other: tuple[Tensor, tuple[Tensor, ...]]) -> None:
    """Loss and gradient bit for bit, and not for want of a gradient."""
    assert torch.equal(one[0], other[0]) and all(map(torch.equal, one[1], other[1]))
    assert max(slope.abs().max() for slope in one[1]) > 0


def positions(yes_L: Tensor) -> set[int]:
    return set(yes_L.nonzero().flatten().tolist())


def rows_of(probes: Probes) -> Iterator[tuple[int, set[int], dict[int, float]]]:
    """Every question as plain data: its trace, the masked positions of its state, the share of each asked one."""
    for n, (b, s) in enumerate(zip(probes.trace_N.tolist(), probes.state_N.tolist(), strict=True)):
        asked = {i: probes.share_NL[n, i].item() for i in positions(probes.asked_NL[n])}
        yield b, positions(probes.states_SL[s] == MASK), asked


def permuted(probes: Probes, rng: torch.Generator) -> Probes:
    """The same questions with traces, units, states and rows in another order."""
    order_B, order_M, order_S, order_N = (
        torch.randperm(n, generator=rng)
        for n in (len(probes.trace), len(probes.trace_M), len(probes.states_SL), len(probes.state_N))
    )
    trace = probes.trace
    rows = {f.name: getattr(trace, f.name)[order_B] for f in fields(trace) if f.name.endswith(("_B", "_BL"))}
    seen = {name: v[:, order_B] if name.startswith("step_") else v[order_B] for name, v in trace.seen.items()}
    return replace(
        probes,
        trace=replace(trace, **rows, seen=seen),
        states_SL=probes.states_SL[order_S],
        attended_SL=probes.attended_SL[order_S],
        state_N=order_S.argsort()[probes.state_N[order_N]],
        unit_N=order_M.argsort()[probes.unit_N[order_N]],
        trace_M=order_B.argsort()[probes.trace_M[order_M]],
        weight_M=probes.weight_M[order_M],
        **{name: v if v is None else v[order_N] for name, v in _questions(probes).items()},
    )


def padded(probes: Probes, by: int) -> Probes:
    """The same questions with `by` more columns of padding on the left."""

    def wider(value: Tensor, fill: float) -> Tensor:
        return torch.cat([value.new_full((len(value), by), fill), value], 1)

    trace, fills = probes.trace, {"tokens_BL": PAD, "step_BL": GIVEN, "block_BL": GIVEN}
    rows = {
        f.name: wider(getattr(trace, f.name), fills.get(f.name, 0)) for f in fields(trace) if f.name.endswith("_BL")
    }
    return replace(
        probes,
        trace=replace(trace, **rows),
        states_SL=wider(probes.states_SL, PAD),
        attended_SL=wider(probes.attended_SL, False),
        **{name: v if v is None else wider(v, 0) for name, v in _questions(probes).items()},
    )


def _questions(probes: Probes) -> dict[str, Tensor | None]:
    return {"asked_NL": probes.asked_NL, "share_NL": probes.share_NL, "passed_NL": probes.passed_NL}


class Cut(BaseException):
    """Nothing in the library catches it."""


@contextmanager
def cut_at(place: str, call: int) -> Iterator[None]:
    """Under it the `call`-th call of a function of the loop does not come back, which ends the run."""
    places = (unmask.training.loop, unmask.training.update, unmask.training.run.base_run, Evaluator)
    where = next(where for where in places if hasattr(where, place))
    plain, calls = getattr(where, place), count(1)

    def counted(*given: object, **named: object) -> object:
        if next(calls) == call:
            raise Cut
        return plain(*given, **named)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Cut):
        patch.setattr(where, place, counted)
        yield
