"""Forward passes of a run, counted without its model.

A stand-in for the model goes through the real sampler and the real update on a few traces, and counts the passes. So
a new method needs no code here.
"""

import re
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from unmask.config import Config
from unmask.config.defaults import micro_batch_sizes
from unmask.core.order import negative_entropy
from unmask.core.policy import Memory
from unmask.core.trace import select_traces
from unmask.models.load import Outline
from unmask.rollout.decoding import Decoding
from unmask.rollout.sample import Rollouts, row_seeds, sample
from unmask.rollout.step_values import continue_steps, with_state_values
from unmask.studies.cost.network import network_of
from unmask.tasks import Task
from unmask.tasks.support.data import HubUnavailable
from unmask.training.batch import RESAMPLES
from unmask.training.loss_terms import ScoredRollouts, Scorer, loss_terms
from unmask.training.mismatch import replay_logprobs
from unmask.training.update import update
from unmask.util.micro_batch import MicroBatch

TEMPLATE = 16
"""Tokens that a chat template adds to a prompt, approximately."""
ASSUMED = 200
"""Tokens of a prompt whose row cannot be read, template included."""
PIECES = re.compile(r"[^\W\d_]+|[^\s]")  # words, digits and signs


@dataclass
class Tally:
    """Passes of one kind."""

    states: int = 0
    """Canvases that were computed."""
    columns: int = 0
    """Columns that were computed."""
    positions: int = 0
    """Positions at which logits were computed."""
    most: int = 0
    """Canvases in the largest pass."""
    asked: int = 0
    """Positions of logits in the pass with the most."""
    sizes: dict[int, float] = field(default_factory=dict)
    """The number of passes, by the canvases in them."""

    @property
    def width(self) -> float:
        """Columns that are computed for a canvas, in the mean."""
        return self.columns / self.states if self.states else 0.0

    def add(self, states: int, columns: int, positions: int) -> None:
        self.states, self.columns = self.states + states, self.columns + states * columns
        self.positions, self.asked = self.positions + positions, max(self.asked, positions)
        self.most, self.sizes[states] = max(self.most, states), self.sizes.get(states, 0) + 1

    def times(self, factor: float) -> "Tally":
        states, columns, positions = (round(factor * count) for count in (self.states, self.columns, self.positions))
        sizes = {size: factor * passes for size, passes in self.sizes.items()}
        return replace(self, states=states, columns=columns, positions=positions, sizes=sizes)

    def together(self, factor: float, most: int) -> "Tally":
        """`factor` times as much, with `most` canvases in every pass."""
        total = self.times(factor)
        if not total.states:
            return total
        return replace(total, most=most, asked=round(self.asked * most / self.most), sizes={most: total.states / most})


class StandIn(nn.Module):
    """A Policy without weights: counts its passes, and never samples an end token."""

    mask_id, eos_id, pad_id, vocabulary = 0, 1, 1, 4
    tokenizer: Any = None

    def __init__(self, model: Outline) -> None:
        super().__init__()
        self.max_length, self.causal_block, self.shift = model.max_length, model.causal_block, model.family.shift
        self.weight = nn.Parameter(torch.zeros(1))
        self.counts: dict[str, Tally] = defaultdict(Tally)

    def count(self, kind: str, states: int, columns: int, at_Q: Tensor) -> Tensor:
        self.counts["gradient" if torch.is_grad_enabled() else kind].add(states, columns, len(at_Q))
        return self.weight.expand(len(at_Q), 1)

    def hidden(self, tokens_SL: Tensor, attended_SL: Tensor | None, at_Q: Tensor) -> Tensor:
        return self.count("whole", len(tokens_SL), tokens_SL.shape[1], at_Q)

    def head(self, hidden_QD: Tensor) -> Tensor:
        return hidden_QD + torch.tensor([0.0, -1e4, 0.0, 0.0])

    def forward(self, tokens_SL: Tensor, attended_SL: Tensor | None, at_Q: Tensor) -> Tensor:
        return self.head(self.hidden(tokens_SL, attended_SL, at_Q))


class CachingStandIn(StandIn):
    def remember(
        self, tokens_SL: Tensor, attended_SL: Tensor | None, at_Q: Tensor, last: int | None = None
    ) -> tuple[Tensor, Memory]:
        if last is None:
            return self.hidden(tokens_SL, attended_SL, at_Q), Memory([], [], attended_SL)
        return self.count("window", len(tokens_SL), last, at_Q), Memory([], [], attended_SL)

    def rollout(self, even: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def hidden_window(self, memory: Memory, tokens_SL: Tensor, first: int, last: int, at_Q: Tensor) -> Tensor:
        return self.count("window", len(tokens_SL), last - max(0, first - int(self.shift)), at_Q)

    def hidden_blocks(self, memory: Memory, tokens_SL: Tensor, column_SW: Tensor, reach: int, at_Q: Tensor) -> Tensor:
        return self.count("window", len(tokens_SL), column_SW.shape[1] + int(self.shift), at_Q)

    def hidden_two_streams(
        self, states_SL: Tensor, clean_SL: Tensor, attended_SL: Tensor | None, at_Q: Tensor, block: int
    ) -> Tensor:
        width = states_SL.shape[1]
        first = max(0, int((at_Q % width).min()) - block + 1) if len(at_Q) else width
        return self.count("whole", len(states_SL), 2 * width - first, at_Q)


def planned_passes(config: Config, decoding: Decoding, model: Outline, prompt: int) -> dict[str, Tally]:
    """Passes of one update and of one evaluation, by kind; "update, no gradient" counts the policy only.

    prompt   tokens of the longest prompt
    """
    method, network = config.build_method(), network_of(config, model)
    sizes = micro_batch_sizes(config, network.parameters + network.adapter)
    stand_in = StandIn if model.family.encoder else CachingStandIn
    sampler, policy, reference, teacher, replayer, evaluated = (stand_in(model) for _ in range(6))
    if decoding.threshold is not None:  # the upper bound: no draw of a stand-in reaches these
        decoding = replace(decoding, threshold=0.0 if decoding.order is negative_entropy else 1.0)
    groups = min(config.prompts, -(sizes.update // -config.group))  # enough to fill a pass
    count, everything = groups * config.group, config.prompts * config.group
    seed_B, group_B = row_seeds(_first_batch(config), everything)[:count], torch.arange(count) // config.group
    rollouts = sample(
        sampler,
        [[2] * prompt] * count,
        seed_B,
        decoding,
        group_B=group_B,
        request=method.request,
        micro_batch=MicroBatch(sizes.rollout),
    )
    if method.request.branch is None:  # a row of an evaluation is decoded as a rollout
        evaluated.counts |= {kind: tally.times(1 / count) for kind, tally in sampler.counts.items()}
    else:
        sample(evaluated, [[2] * prompt], torch.zeros(1, dtype=torch.long), decoding.greedy())

    rng = torch.Generator().manual_seed(config.seed)
    reward_B = (torch.arange(count) % 2).double()  # half of each group is correct
    branches, branch_reward_B = rollouts.branches, None
    if branches is not None:
        branch_reward_B = (torch.arange(len(branches)) % 2).double()
    if method.values is not None:
        seeds = row_seeds(-1 - _first_batch(config), everything)[:count]
        trace, continued = continue_steps(
            sampler, rollouts.trace, seeds, method.values, decoding, MicroBatch(sizes.rollout)
        )
        wrong_N = (torch.arange(len(continued)) // method.values.completions % 2).double()  # no two states are equal
        rollouts = Rollouts(with_state_values(trace, continued, reward_B, wrong_N), branches)
    scorer = Scorer(policy, reference, MicroBatch(sizes.update), teacher=teacher)
    batch = ScoredRollouts(rollouts, reward_B, branch_reward_B)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    for terms in loss_terms(method, batch, scorer, rng, config.inner_steps):
        update(policy, optimizer, terms, sizes.update, 1.0)

    replays = everything if config.rollout.correction else max(1, round(config.rollout.mismatch * everything))
    approximate = config.rollout.cache in ("prefix", "dual") or config.rollout.precision != "model"
    if not approximate or not (config.rollout.correction or config.rollout.mismatch):
        replays = 0
    if replays:
        replay_logprobs(replayer, select_traces(rollouts.trace, torch.tensor([0])), MicroBatch(sizes.rollout))

    scale, solved = config.prompts / groups, config.eval.prompts * (config.eval.samples + 1)
    drawn, evaluations = min(everything, sizes.rollout), min(solved, sizes.rollout)
    return {
        "rollout, whole": sampler.counts["whole"].together(scale, drawn),
        "rollout, window": sampler.counts["window"].together(scale, drawn),
        "cache check": replayer.counts["whole"].together(replays, sizes.rollout),
        "update, no gradient": policy.counts["whole"].times(scale),
        "update, reference": reference.counts["whole"].times(scale),
        "update, teacher": teacher.counts["whole"].times(scale),
        "update, gradient": policy.counts["gradient"].times(scale),
        "evaluation, whole": evaluated.counts["whole"].together(solved, evaluations),
        "evaluation, window": evaluated.counts["window"].together(solved, evaluations),
    }


def _first_batch(config: Config) -> int:
    """The seed of a run's first batch (training/batch.py)."""
    return (config.seed * 2**24 + 1) * (1 + RESAMPLES)


def prompt_tokens(config: Config, task: Task, model: Outline) -> tuple[int, list[str]]:
    """The longest prompt of the first batch and of the evaluation, and what had to be assumed about it."""
    try:
        rows = task.rows("train", config.prompts, _first_batch(config)) + task.rows("test", config.eval.prompts, 0)
    except HubUnavailable:
        note = f"prompts are assumed to have {ASSUMED} tokens; for the real length set {task.name}.data=FILE.jsonl"
        return ASSUMED, [f"the rows of {task.name} cannot be read from the hub: {note}"]
    if model.tokenizer is not None:
        return max(len(task.prompt_ids(model.tokenizer, row)) for row in rows), []
    split, unit = (PIECES.findall, "word, digit or sign") if task.text else (list, "character")
    longest = max(len(split(task.system + task.prompt(row) + task.prefill)) for row in rows) + TEMPLATE
    return longest, [f"there is no tokenizer: prompts are assumed to have a token per {unit} and {TEMPLATE} more"]
