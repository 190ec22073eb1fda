"""Which sign goes with which likelihood, and where to ask: exact learning curves in small worlds.

    python benchmarks/rules.py --out benchmarks/results/rules.json
    python benchmarks/rules_plot.py benchmarks/results/rules.json --figures docs/figures

Nine prompts of two words, answers of four positions, three words. A small network in float64 is fitted to a mixture of
right and wrong answers. Every trajectory, every masked state and every mask of an estimator is enumerated, so nothing
is sampled: the expected gradient of each likelihood and sign is exact, and so is the solve rate after each update. The
questions come from the product's own estimators. A group is infinite: its mean reward is the prompt's solve rate.
Every update has the same length. A quarter of an hour on one core (docs/studies/rules.md).

    P  prompts     C  positions of the answer     B  traces (texts, or texts with an order)     R  questions
"""

import argparse
import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from itertools import islice, permutations, product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unmask.core.probes import Probes, every_step, fully_masked, views
from unmask.core.shapes import GIVEN, NO_TOKEN
from unmask.core.states import elbo_views
from unmask.core.strata import strata_views
from unmask.core.token_sampling import token_logprobs
from unmask.core.trace import Trace
from unmask.methods.positive import scaled_negatives

GIVEN_TOKENS, LENGTH, WORDS, HIDDEN = 2, 4, 3, 16
WIDTH, MASK, PROMPTS = GIVEN_TOKENS + LENGTH, WORDS, WORDS**GIVEN_TOKENS
FIRST_P, SECOND_P = torch.arange(PROMPTS) // WORDS, torch.arange(PROMPTS) % WORDS
SUM_P, PRODUCT_P = FIRST_P + SECOND_P, FIRST_P * SECOND_P
RIGHT_PC = torch.stack([SUM_P, FIRST_P - SECOND_P, PRODUCT_P + 1, SUM_P + 2], 1) % WORDS
"""The right answer to each prompt, which depends on both of its words."""
WRONG_PC = torch.stack([FIRST_P + 1, SECOND_P + 1, FIRST_P, SECOND_P], 1) % WORDS
"""The answer of the other behaviour: each position copies one word of the prompt, shifted or not."""
SHARE_P = torch.linspace(0.3, 0.6, PROMPTS, dtype=torch.float64)
"""The share of right behaviour in the demonstrations of each prompt."""
SHARP, NOISY = 0.01, 0.2
"""The probability that a position of a demonstration is replaced by another word."""
UPDATES, STEP = 200, 0.05
"""The number of updates and the length of each, in the space of all weights."""
STARTS = 3
"""Networks to start from. They differ in the weights that the fit begins with."""
DRIFT_AT = (0, 5, 20, 50)
"""Updates after which `Study.drift` is measured."""
DECISIVE = 0.2
"""A token decides if it moves the probability of a right answer by more than this."""


class Net(nn.Module):
    """One hidden layer over the one-hot prompt and positions: all states share the weights."""

    mask_id, eos_id, pad_id, max_length, vocabulary, tokenizer = MASK, NO_TOKEN, 0, WIDTH, WORDS + 1, None

    def __init__(self, seed: int = 0, hidden: int = HIDDEN) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> nn.Parameter:
            return nn.Parameter(0.5 * torch.randn(*shape, generator=rng, dtype=torch.float64))

        self.read, self.bias = normal(WIDTH * (WORDS + 1), hidden), normal(hidden)
        self.say, self.prior = normal(LENGTH, hidden, WORDS + 1), normal(LENGTH, WORDS + 1)

    def logits(self, seen_SX: Tensor) -> Tensor:
        return logits_of(dict(self.named_parameters()), seen_SX)

    def hidden(self, tokens_SL: Tensor, attended_SL: Tensor | None, at_Q: Tensor) -> Tensor:
        return self.logits(one_hot(tokens_SL))[at_Q // WIDTH, at_Q % WIDTH - GIVEN_TOKENS]

    def head(self, logits_QV: Tensor) -> Tensor:
        return logits_QV

    def forward(self, tokens_SL: Tensor, attended_SL: Tensor | None, at_Q: Tensor) -> Tensor:
        return self.hidden(tokens_SL, attended_SL, at_Q)


def logits_of(weights: dict[str, Tensor], seen_SX: Tensor) -> Tensor:
    """For every position of one-hot canvases, (S, C, V)."""
    hidden_SH = (seen_SX @ weights["read"] + weights["bias"]).tanh()
    return torch.einsum("sh,chv->scv", hidden_SH, weights["say"]) + weights["prior"]


def one_hot(tokens_SL: Tensor) -> Tensor:
    return nn.functional.one_hot(tokens_SL, WORDS + 1).double().flatten(1)


POWER_C = (WORDS + 1) ** torch.arange(LENGTH - 1, -1, -1)


def number(tokens_SL: Tensor) -> Tensor:
    """A canvas as one integer: the prompt first."""
    return prompt_of(tokens_SL) * (WORDS + 1) ** LENGTH + (tokens_SL[:, GIVEN_TOKENS:] * POWER_C).sum(-1)


def prompt_of(tokens_SL: Tensor) -> Tensor:
    return tokens_SL[:, 0] * WORDS + tokens_SL[:, 1]


STATES_SL = torch.tensor(list(product(*[range(WORDS)] * GIVEN_TOKENS, *[range(WORDS + 1)] * LENGTH)))
"""All states of all prompts, in the order of their numbers."""
SEEN_SX = one_hot(STATES_SL)
MASKED_SC = STATES_SL[:, GIVEN_TOKENS:] == MASK
PLACE_C, WORD_V = torch.arange(LENGTH), torch.arange(WORDS)
AFTER_SCV = number(STATES_SL)[:, None, None] + (WORD_V - MASK) * POWER_C[:, None]
"""The state after a word is written at a masked position."""
TEXTS_BL = STATES_SL[~MASKED_SC.any(1)]
START_P, PROMPT_B = MASKED_SC.all(1).nonzero().flatten(), prompt_of(TEXTS_BL)


def logprob_table(policy: Net) -> Tensor:
    """The log-probability of every word at every position of every state, (S, C, V)."""
    return token_logprobs(policy.logits(SEEN_SX), MASK)[..., :WORDS]


# Worlds


class World(NamedTuple):
    joint_B: Tensor
    """The probability of every text of TEXTS_BL given its prompt, in the demonstrations."""
    order: str = "random"


def demonstrations(spans: list[slice], noise: float, wrong_PC: Tensor = WRONG_PC) -> Tensor:
    """Each span of positions is written by the right or the other behaviour, then words are replaced by noise."""

    def chance(answer_PC: Tensor) -> Tensor:
        same_BC = TEXTS_BL[:, GIVEN_TOKENS:] == answer_PC[PROMPT_B]
        return torch.where(same_BC, 1 - noise, noise / (WORDS - 1)).double()

    right_BC, wrong_BC, share_B = chance(RIGHT_PC), chance(wrong_PC), SHARE_P[PROMPT_B]
    parts = [share_B * right_BC[:, span].prod(1) + (1 - share_B) * wrong_BC[:, span].prod(1) for span in spans]
    return torch.stack(parts).prod(0)


ALL, HALVES = [slice(0, LENGTH)], [slice(0, 2), slice(2, LENGTH)]
LATE_PC = torch.where(PLACE_C < 2, RIGHT_PC, (RIGHT_PC + 1) % WORDS)
WORLDS: dict[str, Callable[[], World]] = {
    "sharpening": lambda: World(demonstrations(ALL, NOISY, RIGHT_PC)),
    "choosing": lambda: World(demonstrations(ALL, SHARP)),
    "mixed": lambda: World(demonstrations(ALL, NOISY)),
    "per-row": lambda: World(demonstrations(HALVES, SHARP)),
    "late": lambda: World(demonstrations(ALL, SHARP, LATE_PC), "left_to_right"),
}


def fitted(policy: Net, world: World, iterations: int) -> Net:
    """Maximum likelihood with every mask equally likely: the masked conditionals of the demonstrations."""
    mass_SCV = torch.zeros(len(STATES_SL), LENGTH, WORDS, dtype=torch.float64)
    for masked_C in map(torch.tensor, product([False, True], repeat=LENGTH)):
        state_B = number(torch.where(torch.cat([torch.zeros(GIVEN_TOKENS) > 0, masked_C]), MASK, TEXTS_BL))
        for place in masked_C.nonzero().flatten():
            mass_SCV.index_put_((state_B, place, TEXTS_BL[:, GIVEN_TOKENS + place]), world.joint_B, accumulate=True)
    optimizer = torch.optim.LBFGS(policy.parameters(), max_iter=iterations, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = -(mass_SCV * logprob_table(policy)).sum() / mass_SCV.sum()
        value.backward()
        return value

    optimizer.step(loss)
    return policy


# Trajectories


def transitions(logp_SCV: Tensor, order: str, greedy: bool = False) -> Tensor:
    """The probability that a step writes a word at a position, (S, C, V): one token a step."""
    law_SCV = logp_SCV.exp()
    if greedy:
        law_SCV = nn.functional.one_hot(logp_SCV.argmax(-1), WORDS).double()
    law_SCV = law_SCV * MASKED_SC[..., None]
    if order == "random":
        return law_SCV / MASKED_SC.sum(1).clamp(min=1)[:, None, None]
    if order == "left_to_right":
        return law_SCV * (MASKED_SC & (MASKED_SC.cumsum(1) == 1))[..., None]
    # Every masked position draws a word, and the likeliest draw is written; ties go to the left.
    mine_SCV11, other_S11CV = logp_SCV.detach()[..., None, None], logp_SCV.detach()[:, None, None]
    tie_C1C1 = (PLACE_C[:, None] < PLACE_C)[:, None, :, None]
    loses_SCVCV = (other_S11CV < mine_SCV11) | ((other_S11CV == mine_SCV11) & tie_C1C1)
    below_SCVC = (loses_SCVCV * law_SCV[:, None, None]).sum(-1)
    alone_SC1C = ~MASKED_SC[:, None, None] | torch.eye(LENGTH, dtype=torch.bool)[:, None]
    return law_SCV * torch.where(alone_SC1C, 1.0, below_SCVC).prod(-1)


def values(step_SCV: Tensor) -> Tensor:
    """The probability of ending in the right answer from every state, (S,)."""
    value_S = (STATES_SL[:, GIVEN_TOKENS:] == RIGHT_PC[prompt_of(STATES_SL)]).all(1).double()
    for masked in range(1, LENGTH + 1):
        from_S = MASKED_SC.sum(1) == masked
        here_S = (step_SCV[from_S] * value_S[AFTER_SCV[from_S].clamp(min=0)]).sum((1, 2))
        value_S = value_S.masked_scatter(from_S, here_S)
    return value_S


def all_traces(order: str) -> Trace:
    """Every text with every order in which it can be written: 24, or one from left to right."""
    orders = list(permutations(range(LENGTH))) if order != "left_to_right" else [tuple(range(LENGTH))]
    step_BC = torch.tensor(orders).repeat_interleave(len(TEXTS_BL), 0)
    tokens_BL = TEXTS_BL.repeat(len(orders), 1)
    given_BP, whole_BL = torch.full((len(tokens_BL), GIVEN_TOKENS), GIVEN), torch.ones_like(tokens_BL, dtype=torch.bool)
    canvas_BL = torch.cat([given_BP, torch.zeros_like(step_BC)], 1)
    return Trace(
        tokens_BL=tokens_BL,
        step_BL=torch.cat([given_BP, step_BC], 1),
        block_BL=canvas_BL,
        attended_BL=whole_BL,
        counted_BL=canvas_BL != GIVEN,
        logp_BL=torch.zeros_like(tokens_BL, dtype=torch.float64),
        group_B=prompt_of(tokens_BL),
        mask_id=MASK,
        eos_id=NO_TOKEN,
        steps=LENGTH,
    )


# Likelihoods: the product's probes with every mask they can draw


class Questions(NamedTuple):
    """The log-likelihood of a trace, in expectation over masks: the sum of share * log p over its rows."""

    trace_R: Tensor
    """A trajectory if there are questions for each order, else a text."""
    state_R: Tensor
    place_R: Tensor
    word_R: Tensor
    share_R: Tensor

    def entries(self, table_SCV: Tensor) -> Tensor:
        """The entry of a table for every question, (R,)."""
        return table_SCV[self.state_R, self.place_R, self.word_R]

    def summed(self, value_R: Tensor) -> Tensor:
        """A table with the sum of the values of all equal questions, (S, C, V)."""
        index_R = (self.state_R * LENGTH + self.place_R) * WORDS + self.word_R
        nothing = torch.zeros(MASKED_SC.numel() * WORDS, dtype=torch.float64)
        return nothing.index_add(0, index_R, value_R).view(-1, LENGTH, WORDS)


def questions(draws: list[Probes]) -> Questions:
    """The rows of equally likely probes; equal rows are added up."""
    keys, shares, sizes = [], [], (len(STATES_SL), LENGTH, WORDS)
    for probes in draws:
        row_R, column_R = probes.asked_NL.nonzero(as_tuple=True)
        trace_R, state_R = probes.trace_N[row_R], number(probes.states_SL)[probes.state_N[row_R]]
        word_R = probes.trace.tokens_BL[trace_R, column_R]
        key_R = trace_R
        for part_R, size in zip((state_R, column_R - GIVEN_TOKENS, word_R), sizes, strict=True):
            key_R = key_R * size + part_R
        keys.append(key_R)
        shares.append(probes.share_NL[row_R, column_R] * probes.weight_M[probes.unit_N[row_R]] / len(draws))
    key_R, which = torch.cat(keys).unique(return_inverse=True)
    share_R = torch.zeros(len(key_R), dtype=torch.float64).index_add(0, which, torch.cat(shares))
    place_R, trace_R = key_R // WORDS % LENGTH, key_R // (WORDS * LENGTH * len(STATES_SL))
    return Questions(trace_R, key_R // (WORDS * LENGTH) % len(STATES_SL), place_R, key_R % WORDS, share_R)


def _masks(trace: Trace, sizes: range) -> list[Tensor]:
    """Every mask of the answer with so many positions, (B, L) each."""
    masks = [mask for mask in product([False, True], repeat=LENGTH) if sum(mask) in sizes]
    return [torch.tensor([*[False] * GIVEN_TOKENS, *mask]).expand(len(trace), -1) for mask in masks]


def masked_at(trace: Trace, size: int) -> Questions:
    """Every token asked once, at the states with `size` masked positions, itself among them."""
    masks = _masks(trace, range(size, size + 1))
    found = questions([views(trace, mask_BL[None], mask_BL[None]) for mask_BL in masks])
    return found._replace(share_R=found.share_R * LENGTH / size)


def likelihoods(order: str) -> dict[str, Questions]:
    trace, rng = all_traces("left_to_right"), torch.Generator()  # the order does not matter, except to `visited`
    ranks = [torch.tensor([*[GIVEN] * GIVEN_TOKENS, *rank]) for rank in permutations(range(LENGTH))]
    orders = [rank_L.expand(len(trace), -1) for rank_L in ranks]
    sizes = [torch.full((len(trace),), size) for size in range(LENGTH + 1)]
    pairs, halves = _masks(trace, range(LENGTH + 1)), _masks(trace, range(2, 3))
    return {
        "fully masked": questions([fully_masked(trace, rng)]),
        "mask pair": questions([strata_views(trace, mask_BL.long(), 2) for mask_BL in pairs]),
        "SML": questions([strata_views(trace, mask_BL.long(), 2) for mask_BL in halves]),
        "ELBO": questions([elbo_views(trace, rank[None], size[None]) for rank in orders for size in sizes]),
        "visited": questions([every_step(all_traces(order), rng)]),
        **{f"{size} masked": masked_at(trace, size) for size in range(1, LENGTH + 1)},
    }


# Advantages, with the mean of an infinite group


def centred(reward_B: Tensor, group_B: Tensor, mean_P: Tensor) -> Tensor:
    return reward_B - mean_P[group_B]


def scaled(reward_B: Tensor, group_B: Tensor, mean_P: Tensor, negative: float) -> Tensor:
    return scaled_negatives(reward_B, group_B, partial(centred, mean_P=mean_P), negative)


def correct_only(reward_B: Tensor, group_B: Tensor, mean_P: Tensor) -> Tensor:
    return reward_B / mean_P[group_B]


def negative_part(reward_B: Tensor, group_B: Tensor, mean_P: Tensor) -> Tensor:
    return centred(reward_B, group_B, mean_P).clamp(max=0)


LimitAdvantage = Callable[[Tensor, Tensor, Tensor], Tensor]
SIGNS: dict[str, LimitAdvantage] = {
    "both signs": centred,
    "wrong x 0.3": partial(scaled, negative=0.3),
    "wrong x 0.1": partial(scaled, negative=0.1),
    "positive part": partial(scaled, negative=0.0),
    "correct only": correct_only,
    "negative part": negative_part,
    "right answers": lambda reward_B, group_B, mean_P: reward_B,
    "every sample": lambda reward_B, group_B, mean_P: torch.ones_like(reward_B),
}
RULE_1 = ("fully masked", "mask pair", "SML", "ELBO", "visited")
RULE_2 = tuple(f"{size} masked" for size in range(LENGTH, 0, -1))
TWINS = {"4 masked": "fully masked", "2 masked": "SML"}
"""Likelihoods with the same questions."""


# Expected gradients and learning curves


class Study:
    """A world with its questions; `value` and `gradient` are exact."""

    def __init__(self, name: str, order: str | None = None, start: Net | None = None, iterations: int = 300) -> None:
        world = WORLDS[name]()
        self.order, self.start = order or world.order, fitted(start or Net(), world, iterations)
        self.trace, self.questions = all_traces(self.order), likelihoods(self.order)
        self.steps_BT = self.questions["visited"].trace_R.argsort(stable=True).view(len(self.trace), LENGTH)
        self.norm_SCV = gradient_norms(self.start)
        self.reward_B = (self.trace.tokens_BL[:, GIVEN_TOKENS:] == RIGHT_PC[self.trace.group_B]).all(1).double()

    def weights(self, table_SCV: Tensor, asked: Questions, sign: LimitAdvantage) -> tuple[Tensor, Tensor]:
        """Of every question, the probability of its trace times its advantage and its share, (R,); the solve rates."""
        with torch.no_grad():
            step_SCV, steps = transitions(table_SCV, self.order), self.questions["visited"]
            chance_B = steps.entries(step_SCV)[self.steps_BT].prod(1)
            mean_P = values(step_SCV)[START_P]
            weight_B = chance_B * sign(self.reward_B, self.trace.group_B, mean_P) / PROMPTS
            if asked is not steps:
                weight_B = weight_B.view(-1, len(TEXTS_BL)).sum(0)
            return weight_B[asked.trace_R] * asked.share_R, mean_P

    def gradient(self, policy: Net, likelihood: str, sign: str) -> tuple[Tensor, Tensor]:
        """The expected gradient of a likelihood with a sign; the solve rates."""
        table_SCV, asked = logprob_table(policy), self.questions[likelihood]
        weight_R, mean_P = self.weights(table_SCV, asked, SIGNS[sign])
        return flat_gradient(policy, (asked.summed(weight_R) * table_SCV).sum()), mean_P

    def true_gradient(self, policy: Net) -> Tensor:
        return flat_gradient(policy, self.solve_rates(policy).mean())

    def solve_rates(self, policy: Net, greedy: bool = False) -> Tensor:
        """The probability of a right answer to each prompt, (P,)."""
        return values(transitions(logprob_table(policy), self.order, greedy))[START_P]

    def scores(self, policy: Net) -> dict[str, float]:
        with torch.no_grad():
            sampled_P, greedy_P = self.solve_rates(policy), self.solve_rates(policy, greedy=True)
        return {
            "sampled": float(sampled_P.mean()),
            "greedy": float(greedy_P.mean()),
            "pass@4": float((1 - (1 - sampled_P) ** 4).mean()),
        }

    def policies(self, likelihood: str, sign: str) -> Iterator[tuple[Net, float]]:
        """The policy and its solve rate after 0, 1, 2, ... updates along the normalised expected gradient."""
        policy = deepcopy(self.start)
        while True:
            gradient, rate_P = self.gradient(policy, likelihood, sign)
            yield policy, float(rate_P.mean())
            vector = nn.utils.parameters_to_vector(policy.parameters()).detach()
            nn.utils.vector_to_parameters(vector + STEP * gradient / gradient.norm(), policy.parameters())

    def curve(self, likelihood: str, sign: str) -> dict[str, Any]:
        """The solve rate after every update, and the scores at the end."""
        path = list(islice(((rate, policy) for policy, rate in self.policies(likelihood, sign)), UPDATES + 1))
        return {"curve": [rate for rate, _ in path], **self.scores(path[-1][1])}

    def drift(self, likelihood: str) -> list[float]:
        """The length of the gradient of all samples over that of the right ones, on the way of both signs."""
        ratios = []
        for update, (policy, _) in enumerate(islice(self.policies(likelihood, "both signs"), DRIFT_AT[-1] + 1)):
            if update in DRIFT_AT:
                every, right = (
                    self.gradient(policy, likelihood, sign)[0] for sign in ("every sample", "right answers")
                )
                ratios.append(float(every.norm() / right.norm()))
        return ratios

    def cosine(self, likelihood: str, sign: str) -> float:
        """The cosine of the expected gradient with that of the solve rate, at the start."""
        (found, _), truth = self.gradient(self.start, likelihood, sign), self.true_gradient(self.start)
        return float(found @ truth / found.norm() / truth.norm())

    def decisive_share(self, likelihood: str) -> dict[str, float]:
        """The share of the length of all single gradients that falls on tokens that decide, and on each mask size."""
        table_SCV, asked = logprob_table(self.start), self.questions[likelihood]
        length_R = self.weights(table_SCV, asked, centred)[0].abs() * asked.entries(self.norm_SCV)
        value_S = values(transitions(table_SCV.detach(), self.order))
        gain_SCV = value_S[AFTER_SCV.clamp(min=0)] - value_S[:, None, None]
        decides_R = asked.entries(gain_SCV).abs() > DECISIVE
        size_R, total = MASKED_SC.sum(1)[asked.state_R], length_R.sum()
        by_size = {str(size): float(length_R[decides_R & (size_R == size)].sum() / total) for size in range(1, 5)}
        return {"decides": float(length_R[decides_R].sum() / total), **by_size}


def flat_gradient(policy: Net, value: Tensor) -> Tensor:
    return torch.cat([part.flatten() for part in torch.autograd.grad(value, list(policy.parameters()))])


def gradient_norms(policy: Net) -> Tensor:
    """The length of the gradient of every log-probability, (S, C, V)."""

    def row(weights: dict[str, Tensor], seen_X: Tensor) -> Tensor:
        return token_logprobs(logits_of(weights, seen_X[None]), MASK)[0, :, :WORDS]

    weights = {name: weight.detach() for name, weight in policy.named_parameters()}
    jacobians = torch.func.vmap(torch.func.jacrev(row), in_dims=(None, 0), chunk_size=256)(weights, SEEN_SX)
    return torch.stack([part.flatten(3).square().sum(3) for part in jacobians.values()]).sum(0).sqrt()


def study(worlds: list[Study]) -> dict[str, Any]:
    """All lines of one world, averaged over starts; `ends` has the solve rate at the end of every start."""
    grid = [(likelihood, sign) for likelihood in RULE_1 for sign in [*SIGNS][:5]]
    grid += [(likelihood, sign) for likelihood in RULE_2 for sign in ("both signs", "positive part", "negative part")]
    lines = dict[tuple[str, str], dict[str, Any]]()
    for likelihood, sign in grid:
        line = dict(lines.get((TWINS.get(likelihood, ""), sign), {}))
        if not line:
            runs = [world.curve(likelihood, sign) for world in worlds]
            line["curve"] = [round(fmean(each), 4) for each in zip(*(run["curve"] for run in runs), strict=True)]
            line["ends"] = [run["sampled"] for run in runs]
            line["cosine"] = [world.cosine(likelihood, sign) for world in worlds]
            line |= {key: fmean(run[key] for run in runs) for key in ("sampled", "greedy", "pass@4")}
        lines[likelihood, sign] = line | {"likelihood": likelihood, "sign": sign}
        print(likelihood, sign, *(line["curve"][at] for at in (20, 50, 100, 200)), sep="\t", flush=True)
    shares = [{name: world.decisive_share(name) for name in (*RULE_1, *RULE_2)} for world in worlds]
    decisive = {name: {k: fmean(each[name][k] for each in shares) for k in shares[0][name]} for name in shares[0]}
    start = [world.scores(world.start) for world in worlds]
    return {
        "order": worlds[0].order,
        "start": {key: fmean(each[key] for each in start) for key in start[0]},
        "lines": [*lines.values()],
        "decisive": decisive,
        "drift": drifts(worlds),
    }


def drifts(worlds: list[Study]) -> dict[str, list[float]]:
    return {
        name: [fmean(each) for each in zip(*(world.drift(name) for world in worlds), strict=True)] for name in RULE_1
    }


def starts(name: str, order: str | None = None, hidden: int = HIDDEN) -> list[Study]:
    return [Study(name, order, Net(seed, hidden)) for seed in range(STARTS)]


STUDIES: dict[str, Callable[[], list[Study]]] = {
    **{name: partial(starts, name) for name in WORLDS},
    "choosing, low confidence": partial(starts, "choosing", "low_confidence"),
    "choosing, 64 hidden units": partial(starts, "choosing", hidden=64),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for name, worlds in STUDIES.items():
        print(name)
        results[name] = study(worlds())
        given.out.write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
