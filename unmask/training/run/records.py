"""The parts of a line of traces.jsonl: a group of rollouts as plain data. docs/viewer.md explains each key.

Positions count from the start of the completion. Tensors include the prompt. Nothing here calls a model.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache

from torch import Tensor

from unmask.core.probes import Probes
from unmask.core.shapes import GIVEN, NEVER
from unmask.core.trace import Trace
from unmask.models.tokenizer import SHOWN_END
from unmask.tasks import Task
from unmask.tasks.support.answers import last_answer, last_box
from unmask.tasks.task import Row
from unmask.training.update import LossTerm, live_questions
from unmask.util.trace_lines import TraceLine

Show = Callable[[list[int]], str]

COLUMNS = ("tokens", "step", "block", "counted", "logp")
LONGEST = 200
"""The most characters of an answer or a verdict that are stored."""


def trace_due(step: int, every: int) -> bool:
    """Whether rollouts of this update are recorded: of the first, and of every `every`-th; 0: never."""
    return every > 0 and (step == 1 or step % every == 0)


def short_number(value: float, digits: int = 4) -> float | None:
    """Rounded to significant digits; None if not finite, because JSON has no such numbers."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def short_text(text: str) -> str:
    """The text as one line of bounded length."""
    text = " ".join(text[: 2 * LONGEST].split())
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def expected_answer(task: Task, row: Row) -> str | None:
    """The expected answer, without the reasoning that a solution may start with; None if the task knows none."""
    try:
        text = task.solution(row)
    except ValueError:  # a problem from a file may lack a solution
        return None
    return short_text(last_answer(text) or last_box(text) or text) or None


def rollout_lines(trace: Trace, length: int, show: Show, pad_id: int) -> list[TraceLine]:
    """Each trace, position by position: the token, the step that filled it, and its probability."""
    text_of = cache(lambda token: show([token]))
    columns = {name: getattr(trace, f"{name}_BL")[:, -length:].tolist() for name in COLUMNS}
    blocks = (trace.block_BL[:, -length:] > 0).any().item()
    lines = []
    for row in range(len(trace)):
        tokens, steps, block, counted, logp = (columns[name][row] for name in COLUMNS)
        texts = [text_of(token) for token in tokens]
        lines.append(
            {
                "tokens": texts,
                "special": [i for i, text in enumerate(texts) if text == SHOWN_END or tokens[i] == pad_id],
                "filled": [None if step == NEVER else step for step in steps],
                "block": block if blocks else None,
                "p": [
                    None if step in (GIVEN, NEVER) else short_number(math.exp(value), 3)
                    for step, value in zip(steps, logp, strict=True)
                ],
                "counted": [int(truth) for truth in counted],
            }
        )
    return lines


def probe_lines(probes: Probes, logp_NL: Tensor, trace: int, length: int) -> list[TraceLine]:
    """The probes of one trace: each with its state, the tokens asked there, and their log-probabilities."""
    units = (probes.trace_M == trace).nonzero().squeeze(1).tolist()
    lines = []
    for question in (probes.trace_N == trace).nonzero().squeeze(1).tolist():
        unit = int(probes.unit_N[question])
        state_C = probes.states_SL[probes.state_N[question], -length:]
        asked_C = probes.asked_NL[question, -length:]
        lines.append(
            {
                "term": units.index(unit),
                "masked": positions(state_C == probes.trace.mask_id),
                "asked": positions(asked_C),
                "share": [short_number(value) for value in probes.share_NL[question, -length:][asked_C].tolist()],
                "logp": [short_number(value) for value in logp_NL[question, -length:][asked_C].tolist()],
                "weight": short_number(float(probes.weight_M[unit])),
            }
        )
    return lines


def branch_lines(
    branches: Trace, numbers: Sequence[int], step_C: Tensor, reward_B: Tensor, advantage_B: Tensor | None, show: Show
) -> list[TraceLine]:
    """The branches of one state of a trace with the steps `step_C`: the state before the first step that filled one of
    the positions of the branch."""
    lines = []
    for number in numbers:
        filled_C = branches.filled_BL[number, -len(step_C) :]
        tokens_C = branches.tokens_BL[number, -len(step_C) :]
        if filled_C.any():  # a schedule may leave the state of its last steps without masks
            lines.append(
                {
                    "at": int(step_C[filled_C].min()),
                    "reward": short_number(float(reward_B[number])),
                    "advantage": None if advantage_B is None else short_number(float(advantage_B[number])),
                    "filled": {str(place): show([int(tokens_C[place])]) for place in positions(filled_C)},
                }
            )
    return lines


def add_training_info(rollouts: list[TraceLine], term: LossTerm, logp_NL: Tensor, length: int, updated: bool) -> None:
    """Add credit, advantage, probes and log-probabilities to the rollouts, which are the first traces of the term.
    Traces without a gradient have no probes."""
    first = slice(0, len(rollouts))
    credit_BL, counted_BL = term.credit_BL[first], term.probes.trace.counted_BL[first]
    uneven, live_N = bool((credit_BL[counted_BL] != 1).any()), live_questions(term)
    for i, rollout in enumerate(rollouts):
        asked = bool(live_N[term.probes.trace_N == i].any())
        rollout |= {
            "weight": [short_number(value) for value in credit_BL[i, -length:].tolist()] if uneven else None,
            "advantage": short_number(float(term.advantage_B[i])),
            "probes": probe_lines(term.probes, logp_NL, i, length) if asked else None,
            "taught": updated and asked,
        }


def positions(truth_C: Tensor) -> list[int]:
    return truth_C.nonzero().squeeze(1).tolist()
