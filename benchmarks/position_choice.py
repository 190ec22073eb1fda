"""How much the likelihood of a step's positions matters: expected updates in small worlds against the policy gradient.

    python benchmarks/position_choice.py --out benchmarks/results/position_choice.json

Low-confidence decoding draws a token at every masked position of the block and keeps the surest. Every trajectory of
small networks in float64 is enumerated (tests/world.py), so nothing is sampled. The expected update is

    sum over trajectories of  P (r - mean r) grad S,    S = sum over steps of the score of the step

    tokens          the log-probabilities of the kept tokens, q(o_i)
    assumed         tokens, plus for each kept token the law of Mask-Aware Policy Gradients (arXiv 2607.15200, as read
                    in the released code): z_i(o_i) - log(exp z_i(o_i) + sum over j in R of exp max_v z_j(v)), with
                    logits z and R the positions of the whole completion that are still masked after the step
    assumed, block  the same with the masked positions of the block, which are those the sampler chooses from
    exact           tokens, plus log F at the positions that were passed over (docs/estimators.md)

On-policy the two ratios of the released loss have the gradients of `tokens` and of the law, each divided by the number
of tokens, which is constant here; its segments are single steps, which is the best case. For each score: the relative
error and the cosine of the expected update, and the mean score over its root mean square, which is 0 for the gradient
of a log-probability. Ten seconds on one core (docs/studies/position_choice.md).
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from unmask.core.probes import Probes, ask, every_step

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests")]

from world import NetPolicy, Paths, World, cosine, enumerated, relative_error, reward_of, value_gradient  # noqa: E402

SHAPES = {
    "one token a step": (3, 3, {}),
    "two tokens a step": (2, 4, {"steps": 2}),
    "blocks of two": (2, 4, {"steps": 4, "block": 2}),
}
"""Words, positions and settings of a world."""
SCALES = (1.0, 2.0, 4.0)
"""The scale of the logits: soft to sharp."""
NETWORKS = 10


def assumed_law(world: World, probes: Probes, whole: bool) -> Tensor:
    """The sum over the tokens of each step of the assumed log-probability of their positions, (N,)."""
    policy, (steps, length) = world.policy, probes.asked_NL.shape
    place_Q = torch.arange(steps * length)
    state_SL = probes.states_SL[probes.state_N]
    logits_NLV = policy.hidden(state_SL, None, place_Q).view(steps, length, -1)[..., : policy.words]
    token_NL = probes.trace.tokens_BL[probes.trace_N]
    chosen_NL = logits_NLV.gather(-1, token_NL.clamp(max=policy.words - 1)[..., None]).squeeze(-1)
    rest_NL = (state_SL == policy.mask_id) & ~probes.asked_NL
    if not whole:
        assert probes.passed_NL is not None
        rest_NL = probes.passed_NL
    rivals_N1 = logits_NLV.max(-1).values.masked_fill(~rest_NL, -torch.inf).logsumexp(-1, keepdim=True)
    law_NL = chosen_NL - torch.logaddexp(chosen_NL, rivals_N1)
    return law_NL.masked_fill(~probes.asked_NL, 0.0).sum(-1)


def tokens_only(world: World, probes: Probes) -> Tensor:
    return (ask(world.policy, probes) * probes.asked_NL).sum(-1)


SCORES: dict[str, Callable[[World, Probes], Tensor]] = {
    "tokens": tokens_only,
    "assumed": lambda world, probes: tokens_only(world, probes) + assumed_law(world, probes, whole=True),
    "assumed, block": lambda world, probes: tokens_only(world, probes) + assumed_law(world, probes, whole=False),
    "exact": lambda world, probes: ask(world.policy, probes).sum(-1),
}


def trace_slopes(world: World, paths: Paths, score: Callable[[World, Probes], Tensor]) -> Tensor:
    """The gradient of the score of each trajectory, (B, P)."""
    probes = every_step(paths.trace, torch.Generator(), choice=True)
    step_N, weights = score(world, probes), list(world.policy.parameters())
    total_B = torch.zeros(len(paths.trace), dtype=torch.float64).index_add(0, probes.trace_N, step_N)
    one_BB = torch.eye(len(total_B), dtype=torch.float64)
    slopes = torch.autograd.grad(total_B, weights, one_BB, is_grads_batched=True, materialize_grads=True)
    return torch.cat([slope.flatten(1) for slope in slopes], 1)


def measured(world: World) -> dict[str, dict[str, float]]:
    """Error, cosine and mean score of every score."""
    paths = enumerated(world)
    truth, reward_B, probability_B = value_gradient(world, paths), reward_of(world, paths.trace), paths.probability_B
    probability_B = probability_B.detach()
    pull_B = probability_B * (reward_B - probability_B @ reward_B)
    found = {}
    for name, score in SCORES.items():
        slope_BP = trace_slopes(world, paths, score)
        update, root = pull_B @ slope_BP, (probability_B @ slope_BP.square().sum(-1)).sqrt()
        found[name] = {
            "error": relative_error(update, truth),
            "cosine": cosine(update, truth),
            "mean_score": float((probability_B @ slope_BP).norm() / root),
        }
    return found


def worlds(shape: str, scale: float, networks: int = NETWORKS) -> list[World]:
    words, length, settings = SHAPES[shape]
    policies = (NetPolicy(words, length, seed=100 + 2 * seed, scale=scale) for seed in range(networks))
    return [World(policy, "low_confidence", **settings) for policy in policies]


def study(networks: int = NETWORKS) -> list[dict[str, object]]:
    """A row for every shape, scale and score: means over the networks, the worst, and in how many of them the cosine is
    above that of the tokens alone."""
    rows = []
    for shape in SHAPES:
        for scale in SCALES:
            found = [measured(world) for world in worlds(shape, scale, networks)]
            for name in SCORES:
                value = {key: [each[name][key] for each in found] for key in ("error", "cosine", "mean_score")}
                means = {key: fmean(some) for key, some in value.items()}
                worst = {"largest_error": max(value["error"]), "smallest_cosine": min(value["cosine"])}
                better = sum(each[name]["cosine"] > each["tokens"]["cosine"] for each in found)
                facts = {"shape": shape, "scale": scale, "score": name, "networks": networks}
                rows.append({**facts, **means, **worst, "above_tokens": better})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    rows = study()
    out.write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        numbers = "{error:.3f} / {cosine:.3f} | {mean_score:.3f} | {above_tokens}".format(**row)
        print("| {shape} | {scale:g} | {score} | {numbers} |".format(**row, numbers=numbers))


if __name__ == "__main__":
    main()
