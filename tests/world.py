"""An enumerable world: every trajectory of a tiny policy with its exact probability. float64, CPU.

Truth is found by listing what a sampler can do, not by a formula of the library: at each step every masked
position of the block draws a token (a draft), the order says which draws are kept, and the drafts that lead
to the same outcome are added up. Probabilities carry gradients; ranks and truncation sets are constants, as
they are almost everywhere. What is listed becomes a real Trace, and the library's own code sees nothing else.

    C  positions of the completion     D  drafts of a state     P  groups of traces (pairs, triples, ...)
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, combinations_with_replacement, product
from math import comb, factorial, inf, log, prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unmask.core.schedule import even
from unmask.core.shapes import GIVEN, NEVER
from unmask.core.token_sampling import TokenSampling
from unmask.core.trace import TokenRule, Trace, all_tokens, select_traces
from unmask.training.update import LossTerm, accumulate

NO_EOS = -7  # an id no canvas holds


class _Words(nn.Module):
    """Words are 0 .. words - 1, then MASK. Padding is a word: only not attending to it makes it harmless."""

    pad_id, max_length, tokenizer = 0, 16, None

    def __init__(self, words: int, length: int, eos: int = NO_EOS) -> None:
        super().__init__()
        self.words, self.length, self.mask_id, self.eos_id = words, length, words, eos
        self.vocabulary = words + 1

    def head(self, logits_QV: Tensor) -> Tensor:
        return logits_QV

    def forward(self, tokens_SL: Tensor, attended_SL: Tensor | None, at_Q: Tensor) -> Tensor:
        return self.hidden(tokens_SL, attended_SL, at_Q)


class TablePolicy(_Words):
    """Free logits for every state and position: a gradient moves only the states it was asked at."""

    def __init__(self, words: int, length: int, seed: int = 0, scale: float = 1.0, eos: int = NO_EOS) -> None:
        super().__init__(words, length, eos)
        self.table = nn.Parameter(scale * noise(seed, (words + 1) ** length, length, words + 1))

    def hidden(self, tokens_SL: Tensor, attended_SL: Tensor | None, at_Q: Tensor) -> Tensor:
        row_Q, column_Q = at_Q // tokens_SL.shape[1], at_Q % tokens_SL.shape[1]
        state_S = number(tokens_SL[:, -self.length :], self.words + 1)
        return self.table[state_S[row_Q], column_Q - (tokens_SL.shape[1] - self.length)]


class NetPolicy(_Words):
    """One hidden layer over the whole canvas: parameters are shared and positions strongly coupled."""

    def __init__(self, words: int, length: int, seed: int = 0, scale: float = 2.0, eos: int = NO_EOS) -> None:
        super().__init__(words, length, eos)
        hidden = 8
        self.read = nn.Parameter(noise(seed, self.max_length, words + 1, hidden))
        self.say = nn.Parameter(scale * noise(seed + 1, length, hidden, words + 1) / hidden**0.5)

    def hidden(self, tokens_SL: Tensor, attended_SL: Tensor | None, at_Q: Tensor) -> Tensor:
        attended_SL = torch.ones_like(tokens_SL, dtype=torch.bool) if attended_SL is None else attended_SL
        width = tokens_SL.shape[1]
        # Every canvas and every question once: a world has few, and asks each of them thousands of times.
        _, first_C, canvas_S = distinct(number((tokens_SL + 1) * attended_SL, self.words + 2))
        ask_U, _, answer_Q = distinct(canvas_S[at_Q // width] * width + at_Q % width)
        place_L = torch.arange(self.max_length - width, self.max_length)  # counted from the end
        heard_CLH = self.read[place_L, tokens_SL[first_C]] * attended_SL[first_C, :, None]
        hidden_CH = heard_CLH.sum(1).tanh()
        say_UHV = self.say[ask_U % width - (width - self.length)]
        return (hidden_CH[ask_U // width, :, None] * say_UHV).sum(1)[answer_Q]


def joint_policy(words: int, length: int, seed: int = 0, scale: float = 2.0) -> tuple[TablePolicy, Tensor]:
    """A table whose conditionals come from one joint distribution, and that distribution (of texts)."""
    joint = (scale * noise(seed, *[words] * length)).flatten().softmax(0).view([words] * length)
    return table_of(joint), joint.flatten()


def table_of(joint: Tensor) -> TablePolicy:
    """The conditionals of a joint distribution, a dimension a position."""
    words, length = len(joint), joint.dim()
    policy = TablePolicy(words, length)
    with torch.no_grad():
        for state, place in product(product(range(words + 1), repeat=length), range(length)):
            visible = [slice(None) if token == words else token for token in state]
            index = number(torch.tensor(state), words + 1)
            for word in range(words):
                fixed = tuple(visible[:place] + [word] + visible[place + 1 :])
                policy.table[index, place, word] = joint[fixed].sum().log()
    return policy


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def number(tokens_BC: Tensor, base: int) -> Tensor:
    """A canvas as one integer, first position most significant."""
    return (tokens_BC * base ** torch.arange(tokens_BC.shape[-1] - 1, -1, -1)).sum(-1)


def distinct(number_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The different numbers, where each is found, and which of them every number is."""
    number_U, which_N = number_N.unique(return_inverse=True)
    where_U = torch.empty_like(number_U).index_copy(0, which_N, torch.arange(len(number_N)))
    return number_U, where_U, which_N


def digits(base: int, length: int) -> Tensor:
    """All canvases in the order of their numbers."""
    return torch.tensor(list(product(range(base), repeat=length)))


@dataclass(frozen=True)
class World:
    policy: _Words
    order: str = "random"
    steps: int = 0  # 0: one token a step
    block: int = 0  # 0: one block
    sampling: TokenSampling = TokenSampling()
    prompt: tuple[int, ...] = ()
    threshold: float = inf  # of a probability: what reaches it is committed too

    @property
    def length(self) -> int:
        return self.policy.length

    @property
    def commits(self) -> list[tuple[int, int]]:
        """(block, positions committed) of every step."""
        sizes = even(self.length, self.steps or self.length, self.block or self.length)
        return [(n, size) for n, block in enumerate(sizes) for size in block]

    @property
    def min_per_step(self) -> int:
        """By threshold: the positions that a step commits at least."""
        return self.commits[0][1] if self.threshold < inf else 1

    @property
    def width(self) -> int:
        return self.block or self.length


def laws(world: World) -> tuple[Tensor, Tensor]:
    """Of every state and position: log-probabilities at temperature 1 and the law drawn from, (S, C, V)."""
    tokens_SC = digits(world.policy.words + 1, world.length)
    tokens_SL = torch.cat([torch.tensor(world.prompt).long().expand(len(tokens_SC), -1), tokens_SC], 1)
    place_SL = torch.arange(tokens_SL.numel()).view_as(tokens_SL)
    attended_SL, at_Q = torch.ones_like(tokens_SL).bool(), place_SL[:, -world.length :].flatten()
    logits_QV = world.policy(tokens_SL, attended_SL, at_Q)
    logits_SCV = logits_QV.view(*tokens_SC.shape, -1)[..., : world.policy.words]
    drawn_SCV = (logits_SCV / world.sampling.temperature).softmax(-1)
    if world.sampling.truncated:
        kept = [kept_by_hand(p_V, world.sampling) for p_V in drawn_SCV.flatten(0, 1).tolist()]
        drawn_SCV = drawn_SCV * torch.tensor(kept).view_as(drawn_SCV)
        drawn_SCV = drawn_SCV / drawn_SCV.sum(-1, keepdim=True)
    return logits_SCV.log_softmax(-1), drawn_SCV


def kept_by_hand(probability_V: list[float], law: TokenSampling) -> list[bool]:
    kept, mass = set(), 0.0
    for v in sorted(range(len(probability_V)), key=lambda v: -probability_V[v]):
        if mass < law.top_p and len(kept) < (law.top_k or inf):
            kept.add(v)
            mass += probability_V[v]
    return [v in kept for v in range(len(probability_V))]


def choices(
    world: World, plain_MV: list[list[float]], law_MV: list[list[float]], draft: tuple[int, ...], size: int
) -> Iterator[tuple]:
    """Which of the masked positions a step keeps, given its draft: (probability, places)."""
    sure = [row[word] >= log(world.threshold) for row, word in zip(plain_MV, draft, strict=True)]
    if world.order == "left_to_right" and world.threshold < inf:  # the leftmost only if no draw reaches the threshold
        yield 1.0, tuple(j for j, reached in enumerate(sure) if reached) or (0,)
        return
    if world.order == "random":
        for places in combinations(range(len(draft)), size):
            yield 1 / comb(len(draft), size), places
        return
    score = {
        "left_to_right": [0.0] * len(draft),
        "surest_position": [max(row) for row in plain_MV],
        "low_confidence": [row[word] for row, word in zip(plain_MV, draft, strict=True)],
        "drawn_confidence": [row[word] for row, word in zip(law_MV, draft, strict=True)],
        "margin": [first - second for *_, second, first in map(sorted, law_MV)],
        "negative_entropy": [sum(p * log(p + 1e-10) for p in row) for row in law_MV],
    }[world.order]
    first = sorted(range(len(draft)), key=lambda j: (-score[j], j))[:size]
    yield 1.0, tuple(sorted({*first} | {j for j, found in enumerate(score) if found >= log(world.threshold)}))


class Outcomes(NamedTuple):
    """What one step can do to one state: the positions and tokens it commits, with their probabilities."""

    committed: list[tuple[tuple[int, int], ...]]
    probability_O: Tensor


def outcomes(world: World, plain_CV: Tensor, drawn_CV: Tensor, masked: list[int], size: int) -> Outcomes:
    """Every draft of the masked positions, sorted by what is kept of it."""
    possible = [[v for v in range(world.policy.words) if drawn_CV[i, v] > 0] for i in masked]
    drafts, plain_MV = list(product(*possible)), plain_CV[masked].tolist()
    law_MV = drawn_CV[masked].tolist()
    draft_D = drawn_CV[masked].gather(1, torch.tensor(drafts).T).prod(0)
    index: dict[tuple, int] = {}
    rows = [
        (index.setdefault(tuple((masked[j], draft[j]) for j in places), len(index)), d, weight)
        for d, draft in enumerate(drafts)
        for weight, places in choices(world, plain_MV, law_MV, draft, size)
    ]
    outcome, source, weight = zip(*rows, strict=True)
    part = draft_D[list(source)] * torch.tensor(weight, dtype=torch.float64)
    nothing_O = torch.zeros(len(index), dtype=torch.float64)
    return Outcomes(list(index), nothing_O.index_add(0, torch.tensor(outcome), part))


def ended(state: tuple[int, ...], policy: _Words) -> bool:
    """Nothing is masked before the end, be it an end token or the edge of the canvas."""
    for token in state:
        if token in (policy.mask_id, policy.eos_id):
            return token == policy.eos_id
    return True


class Paths(NamedTuple):
    """Every trajectory: as traces, with its probability and that of each of its steps (1 where nothing is written)."""

    trace: Trace
    probability_B: Tensor
    step_BT: Tensor


def enumerated(world: World, counted: TokenRule = all_tokens) -> Paths:
    plain_SCV, drawn_SCV = laws(world)
    base, blank = world.policy.words + 1, (world.policy.mask_id,) * world.length
    live, done, known, flat, total = [(blank, (NEVER,) * world.length, ())], [], {}, [], 0
    for step, (block, size) in enumerate(world.commits):
        grown = []
        for state, when, route in live:
            inside = range(block * world.width, (block + 1) * world.width)
            masked = [i for i in inside if state[i] == world.policy.mask_id]
            if not masked:  # by threshold: the block is done
                grown.append((state, when, route + (-1,)))
                continue
            if state not in known:
                s = number(torch.tensor(state), base)
                found = outcomes(world, plain_SCV[s].detach(), drawn_SCV[s], masked, size)
                known[state] = (total, found.committed)
                flat.append(found.probability_O)
                total += len(found.committed)
            first, committed = known[state]
            for k, cells in enumerate(committed):
                tokens, filled = list(state), list(when)
                for i, word in cells:
                    tokens[i], filled[i] = word, step
                grown.append((tuple(tokens), tuple(filled), route + (first + k,)))
        done += [path for path in grown if ended(path[0], world.policy)]
        live = [path for path in grown if not ended(path[0], world.policy)]
    assert not live
    flat_O = torch.cat(flat + [torch.ones(1, dtype=torch.float64)])
    tokens, when, routes = zip(*done, strict=True)
    steps = len(world.commits)
    step_BT = flat_O[torch.tensor([route + (total,) * (steps - len(route)) for route in routes])]
    trace = traced(world, torch.tensor(tokens), torch.tensor(when), counted)
    return Paths(trace, step_BT.prod(-1), step_BT)


def traced(world: World, tokens_BC: Tensor, when_BC: Tensor, counted: TokenRule = all_tokens) -> Trace:
    """A real Trace of given canvases and step maps, with all that a rollout would have recorded."""
    plain_SCV, drawn_SCV = (law.detach() for law in laws(world))
    batch, length = tokens_BC.shape
    prompt_BP = torch.tensor(world.prompt).long().expand(batch, -1)
    given_BP = torch.full_like(prompt_BP, GIVEN)
    policy, base = world.policy, world.policy.words + 1
    block_BC = (torch.arange(length) // world.width).expand(batch, -1)

    state_BCC = tokens_BC[:, None].masked_fill(when_BC[:, None] >= when_BC[:, :, None], policy.mask_id)
    law_BCV = drawn_SCV[number(state_BCC, base), torch.arange(length)]  # the law each token was drawn from
    filled_BC = (when_BC != NEVER) & (when_BC != GIVEN)
    word_BC = tokens_BC.masked_fill(~filled_BC, 0)
    logp_BC = law_BCV.gather(-1, word_BC[..., None]).squeeze(-1).masked_fill(~filled_BC, 1.0).log()
    spread_BC = -torch.where(law_BCV > 0, law_BCV * law_BCV.log(), 0.0).sum(-1)
    score_BC = plain_SCV[number(state_BCC, base), torch.arange(length)].gather(-1, word_BC[..., None]).squeeze(-1)
    seen = {"entropy": spread_BC * filled_BC, "confidence": score_BC * filled_BC} | _top(
        world, plain_SCV, tokens_BC, when_BC
    )
    if world.sampling.truncated:
        seen["kept"] = kept_by_id(law_BCV).masked_fill(~filled_BC[..., None], -1)
    trace = Trace(
        tokens_BL=torch.cat([prompt_BP, tokens_BC], 1),
        step_BL=torch.cat([given_BP, when_BC], 1),
        block_BL=torch.cat([given_BP, block_BC], 1),
        attended_BL=torch.ones(batch, len(world.prompt) + length, dtype=torch.bool),
        counted_BL=torch.zeros(batch, len(world.prompt) + length, dtype=torch.bool),
        logp_BL=torch.cat([torch.zeros(prompt_BP.shape, dtype=torch.float64), logp_BC], 1),
        group_B=torch.zeros(batch, dtype=torch.long),
        mask_id=policy.mask_id,
        eos_id=policy.eos_id,
        steps=len(world.commits),
        sampling=world.sampling,
        order=world.order,
        threshold=None if world.threshold == inf else world.threshold,
        min_per_step=world.min_per_step,
        seen=seen,
    )
    return replace(trace, counted_BL=counted(trace))


def kept_by_id(law_BCV: Tensor) -> Tensor:
    ids = torch.arange(law_BCV.shape[-1]).expand_as(law_BCV)
    return torch.where(law_BCV > 0, ids, -1)


def _top(world: World, plain_SCV: Tensor, tokens_BC: Tensor, when_BC: Tensor) -> dict[str, Tensor]:
    """All words at the masked positions of the block before every step, likeliest first; else -1."""
    ids, logps = [], []
    for step, (block, _) in enumerate(world.commits):
        here = slice(block * world.width, (block + 1) * world.width)
        state_BC = tokens_BC.masked_fill(when_BC >= step, world.policy.mask_id)
        live_B = ((when_BC >= step) & (when_BC != NEVER)).any(-1)
        plain_BWV = plain_SCV[number(state_BC, world.policy.words + 1)][:, here]
        logp_BWK, id_BWK = plain_BWV.sort(-1, descending=True)
        masked_BW1 = (state_BC[:, here] == world.policy.mask_id)[..., None] & live_B[:, None, None]
        ids.append(id_BWK.masked_fill(~masked_BW1, -1))
        logps.append(logp_BWK.masked_fill(~live_B[:, None, None], 0.0))
    return {"step_top_id": torch.stack(ids), "step_top_logp": torch.stack(logps)}


# Rewards, gradients, expectations


def reward_of(world: World, trace: Trace, seed: int = 3) -> Tensor:
    """An arbitrary reward for every text: what stands after the first end token is not part of it."""
    tokens_BC, base = trace.tokens_BL[:, -world.length :], world.policy.words + 1
    end_BC = (tokens_BC == world.policy.eos_id).long()
    text_BC = tokens_BC.masked_fill(end_BC.cumsum(-1) > end_BC, world.policy.mask_id)
    return noise(seed, base**world.length)[number(text_BC, base)]


def gradient(policy: nn.Module, value: Tensor) -> Tensor:
    """d value / d parameters, as one vector."""
    parts = torch.autograd.grad(value, list(policy.parameters()), retain_graph=True, materialize_grads=True)
    return torch.cat([part.flatten() for part in parts])


def step_of(policy: nn.Module, parts: list[LossTerm]) -> Tensor:
    """The direction the library would move the parameters in: minus the accumulated gradient of its loss."""
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for part in parts:
        accumulate(policy, part, micro_batch=10**9)
    return -torch.cat([p.grad.flatten() for p in policy.parameters()])


def expected_advantage(
    advantage: Callable[[Tensor, Tensor], Tensor], reward_B: Tensor, probability_B: Tensor
) -> Tensor:
    """E[A | trace] over the other member of a group of two, through the library's own advantage."""
    batch = len(reward_B)
    pair_P2 = torch.cartesian_prod(torch.arange(batch), torch.arange(batch))
    group_P2 = torch.arange(len(pair_P2)).repeat_interleave(2)
    value_BB = advantage(reward_B[pair_P2].flatten(), group_P2)[::2].view(batch, batch)
    return value_BB @ probability_B.detach()


def grouped(trace: Trace, probability_B: Tensor, size: int) -> tuple[Trace, Tensor]:
    """Every group of `size` traces (sorted); at each trace, (probability of its group) * (number of groups).

    A loss that is a mean over groups becomes its expectation when advantages are multiplied by that weight.
    """
    member_PG = torch.tensor(list(combinations_with_replacement(range(len(trace)), size)))
    ways = [factorial(size) / prod(map(factorial, Counter(group).values())) for group in member_PG.tolist()]
    weight_P = torch.tensor(ways) * probability_B.detach()[member_PG].prod(-1) * len(member_PG)
    group_B = torch.arange(len(member_PG)).repeat_interleave(size)
    return replace(select_traces(trace, member_PG.flatten()), group_B=group_B), weight_P[group_B]


def relative_error(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


def cosine(found: Tensor, truth: Tensor) -> float:
    return float((found @ truth) / (found.norm() * truth.norm()))


def chance_of_worse(count_X: Tensor, probability_X: Tensor) -> float:
    """The p-value of Pearson's chi-square; cells that expect fewer than 10 are one cell."""
    expected_X = probability_X.detach().double() * count_X.sum()
    assert not count_X[expected_X == 0].any(), "something happened that has probability zero"
    small_X = expected_X < 10
    count = torch.cat([count_X[~small_X].double(), count_X[small_X].sum().double()[None]])
    expected = torch.cat([expected_X[~small_X], expected_X[small_X].sum()[None]])
    count, expected = count[expected > 0], expected[expected > 0]
    freedom = torch.tensor((len(count) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, ((count - expected) ** 2 / expected).sum() / 2).item()


def value_gradient(world: World, paths: Paths) -> Tensor:
    """The exact gradient of J: by autograd through the probability of every trajectory."""
    return gradient(world.policy, (paths.probability_B * reward_of(world, paths.trace)).sum())
