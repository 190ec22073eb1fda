"""The log-likelihood of a given completion of C tokens under a masked diffusion model, by a named estimator.

    exact          log of the mean, over all orders, of the probability of writing the completion in that order, one
                   token a step: the likelihood of random-order decoding; 2^C - 1 states, so for short completions only
    elbo           the mean over all orders of that log-probability, a lower bound of `exact`; Monte Carlo with
                   2 * draws states, drawn for each prompt from the seed and the prompt: other requests and the batch
                   size do not matter, and completions of one length share the draws of their prompt
    left_to_right  the log-probability of writing the completion from left to right; C states
    fully_masked   mean field: every token is asked with the whole completion masked; one state

Exact when the conditionals of the model come from one joint distribution: exact, elbo and left_to_right then agree, and
with independent tokens fully_masked too.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from unmask.core.policy import Policy
from unmask.core.probes import Probes, ask, fully_masked, left_to_right_views, rank, unit_likelihood, views
from unmask.core.shapes import GIVEN
from unmask.core.states import elbo_views, stratified_sizes
from unmask.core.trace import Trace
from unmask.rollout.sample import canvas

LONGEST = 10
"""Tokens of the longest completion that `exact` takes: 1,023 states."""

Pair = tuple[list[int], list[int]]
"""The tokens of a prompt and of its completion."""


def given_trace(policy: Policy, pairs: Sequence[Pair], device: torch.device | str) -> Trace:
    """Completions of one length as a trace: all of it is canvas, and the order in which it was written is unknown."""
    length = len(pairs[0][1])
    tokens_BL, attended_BL = canvas([prompt for prompt, _ in pairs], length, policy, device)
    tokens_BL[:, -length:] = torch.tensor([completion for _, completion in pairs], device=device)
    step_BL = torch.full_like(tokens_BL, GIVEN)
    step_BL[:, -length:] = 0
    return Trace(
        tokens_BL=tokens_BL,
        step_BL=step_BL,
        block_BL=step_BL,
        attended_BL=attended_BL,
        counted_BL=step_BL == 0,
        logp_BL=torch.zeros(tokens_BL.shape, device=device),
        group_B=torch.arange(len(pairs), device=device),
        mask_id=policy.mask_id,
        eos_id=policy.eos_id,
        steps=1,
        causal_block=getattr(policy, "causal_block", None),
    )


@dataclass(frozen=True)
class LikelihoodSettings:
    estimator: str = "elbo"
    draws: int = 64
    """Of the ELBO: complementary pairs of masked states."""
    seed: int = 0
    micro_batch: int = 32
    """Masked states in one forward pass, and completions at a time."""


def _elbo(policy: Policy, trace: Trace, settings: LikelihoodSettings) -> Tensor:
    length, device = int(trace.canvas_BL[0].sum()), trace.tokens_BL.device
    noise_KB = torch.empty(settings.draws, len(trace), dtype=torch.float64)
    key_KBL = torch.full((settings.draws, *trace.tokens_BL.shape), 2.0, dtype=torch.float64)  # the prompt comes last
    prompt_BL = trace.attended_BL & ~trace.canvas_BL
    for number, tokens_L in enumerate(trace.tokens_BL):
        rng = _prompt_rng(settings.seed, tokens_L[prompt_BL[number]].tolist())
        noise_KB[:, number] = torch.rand(settings.draws, generator=rng, dtype=torch.float64)
        key_KBL[:, number, -length:] = torch.rand(settings.draws, length, generator=rng, dtype=torch.float64)
    return _asked(policy, elbo_views(trace, rank(key_KBL).to(device), stratified_sizes(trace, noise_KB)), settings)


def _prompt_rng(seed: int, prompt: list[int]) -> torch.Generator:
    digest = hashlib.sha256(repr((seed, prompt)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def _left_to_right(policy: Policy, trace: Trace, settings: LikelihoodSettings) -> Tensor:
    return _asked(policy, left_to_right_views(trace, torch.Generator()), settings)


def _fully_masked(policy: Policy, trace: Trace, settings: LikelihoodSettings) -> Tensor:
    return _asked(policy, fully_masked(trace, torch.Generator()), settings)


def _asked(policy: Policy, probes: Probes, settings: LikelihoodSettings) -> Tensor:
    return unit_likelihood(ask(policy, probes, settings.micro_batch), probes).double().sum(-1)


def _exact(policy: Policy, trace: Trace, settings: LikelihoodSettings) -> Tensor:
    """By recursion over the sets of masked positions: total[S] is the log-probability of reaching the state S."""
    length = int(trace.canvas_BL[0].sum())
    if length > LONGEST:
        raise ValueError(f"exact: a completion has {length} tokens, more than {LONGEST}; choose another estimator")
    device, count = trace.tokens_BL.device, 2**length
    set_K = torch.arange(1, count, device=device)  # bit i: position i is masked
    masked_KBL = torch.zeros(count - 1, *trace.tokens_BL.shape, dtype=torch.bool, device=device)
    masked_KBL[..., -length:] = (set_K[:, None, None] >> torch.arange(length, device=device)) & 1 == 1
    logp_NL = ask(policy, views(trace, masked_KBL, masked_KBL), settings.micro_batch).double()
    logp_KBC = logp_NL.view(count - 1, len(trace), -1)[..., -length:]
    total = [torch.full((len(trace),), -torch.inf, dtype=torch.float64, device=device) for _ in range(count)]
    total[-1] = torch.zeros_like(total[-1])
    for masked in range(count - 1, 0, -1):
        for i in range(length):
            if masked >> i & 1:
                step_B = logp_KBC[masked - 1, :, i] - log(masked.bit_count())
                total[masked ^ 1 << i] = torch.logaddexp(total[masked ^ 1 << i], total[masked] + step_B)
    return total[0]


ESTIMATORS: dict[str, Callable[[Policy, Trace, LikelihoodSettings], Tensor]] = {
    "elbo": _elbo,
    "exact": _exact,
    "left_to_right": _left_to_right,
    "fully_masked": _fully_masked,
}


@torch.no_grad()
def log_likelihoods(
    policy: Policy, pairs: Sequence[Pair], settings: LikelihoodSettings, device: torch.device | str
) -> list[float]:
    """The log-likelihood of every completion after its prompt."""
    values = [0.0] * len(pairs)
    for length in sorted({len(completion) for _, completion in pairs} - {0}):
        numbers = [number for number, (_, completion) in enumerate(pairs) if len(completion) == length]
        for start in range(0, len(numbers), settings.micro_batch):
            chunk = numbers[start : start + settings.micro_batch]
            trace = given_trace(policy, [pairs[number] for number in chunk], device)
            value_B = ESTIMATORS[settings.estimator](policy, trace, settings)
            for number, value in zip(chunk, value_B.tolist(), strict=True):
                values[number] = value
    return values
