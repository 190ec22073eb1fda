"""What a line of traces.jsonl is made of: a group of rollouts as plain data (docs/viewer.md says what each key means).

Positions are those of the completion, from 0. Tensors come in whole, prompt included, and nothing here asks a model.
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
WORDS = 200
"""Characters of an answer or a verdict that are written down."""


def rounded(value: float, digits: int = 4) -> float | None:
    """To so many significant digits; None for what is no finite number, which JSON has none of."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def short(text: str) -> str:
    """In one line of bounded length."""
    text = " ".join(text[: 2 * WORDS].split())
    return text if len(text) <= WORDS else text[: WORDS - 3] + "..."


def answer_of(task: Task, row: Row) -> str | None:
    """What was wanted, without the reasoning that a solution may begin with; None where the task knows none."""
    try:
        text = task.solution(row)
    except ValueError:  # a problem from a file may come without a solution
        return None
    return short(last_answer(text) or last_box(text) or text) or None


def written(trace: Trace, length: int, show: Show, pad_id: int) -> list[TraceLine]:
    """What each trace wrote, position by position: the token, the step that filled it, and how sure the sampler was."""
    text_of = cache(lambda token: show([token]))
    columns = {name: getattr(trace, f"{name}_BL")[:, -length:].tolist() for name in COLUMNS}
    blocks = (trace.block_BL[:, -length:] > 0).any().item()
    found = []
    for row in range(len(trace)):
        tokens, steps, block, counted, logp = (columns[name][row] for name in COLUMNS)
        texts = [text_of(token) for token in tokens]
        found.append(
            {
                "tokens": texts,
                "special": [i for i, text in enumerate(texts) if text == SHOWN_END or tokens[i] == pad_id],
                "filled": [None if step == NEVER else step for step in steps],
                "block": block if blocks else None,
                "p": [
                    None if step in (GIVEN, NEVER) else rounded(math.exp(value), 3)
                    for step, value in zip(steps, logp, strict=True)
                ],
                "counted": [int(truth) for truth in counted],
            }
        )
    return found


def probes_of(probes: Probes, logp_NL: Tensor, trace: int, length: int) -> list[TraceLine]:
    """Where one trace was asked: each question's state, the tokens asked there, and what the policy said of them."""
    units = (probes.trace_M == trace).nonzero().squeeze(1).tolist()
    found = []
    for question in (probes.trace_N == trace).nonzero().squeeze(1).tolist():
        unit = int(probes.unit_N[question])
        state_C = probes.states_SL[probes.state_N[question], -length:]
        asked_C = probes.asked_NL[question, -length:]
        found.append(
            {
                "term": units.index(unit),
                "masked": places(state_C == probes.trace.mask_id),
                "asked": places(asked_C),
                "share": [rounded(value) for value in probes.share_NL[question, -length:][asked_C].tolist()],
                "logp": [rounded(value) for value in logp_NL[question, -length:][asked_C].tolist()],
                "weight": rounded(float(probes.weight_M[unit])),
            }
        )
    return found


def branches_of(
    branches: Trace, numbers: Sequence[int], step_C: Tensor, reward_B: Tensor, advantage_B: Tensor | None, show: Show
) -> list[TraceLine]:
    """The fillings of one state of a trace, whose steps are `step_C`: the state is the one before the step that filled
    the first of the positions that the filling filled."""
    found = []
    for number in numbers:
        filled_C = branches.filled_BL[number, -len(step_C) :]
        tokens_C = branches.tokens_BL[number, -len(step_C) :]
        if filled_C.any():  # a state that a schedule's last steps left full has nothing to fill
            found.append(
                {
                    "at": int(step_C[filled_C].min()),
                    "reward": rounded(float(reward_B[number])),
                    "advantage": None if advantage_B is None else rounded(float(advantage_B[number])),
                    "filled": {str(place): show([int(tokens_C[place])]) for place in places(filled_C)},
                }
            )
    return found


def taught_of(rollouts: list[TraceLine], part: LossTerm, logp_NL: Tensor, length: int, learnt: bool) -> None:
    """Tell the rollouts, the first of the part's, what it made of them, where it asked, and what was answered. One that
    cannot teach anything was not asked."""
    first = slice(0, len(rollouts))
    credit_BL, counted_BL = part.credit_BL[first], part.probes.trace.counted_BL[first]
    weighed, live_N = bool((credit_BL[counted_BL] != 1).any()), live_questions(part)
    for i, rollout in enumerate(rollouts):
        asked = bool(live_N[part.probes.trace_N == i].any())
        rollout |= {
            "weight": [rounded(value) for value in credit_BL[i, -length:].tolist()] if weighed else None,
            "advantage": rounded(float(part.advantage_B[i])),
            "probes": probes_of(part.probes, logp_NL, i, length) if asked else None,
            "taught": learnt and asked,
        }


def places(truth_C: Tensor) -> list[int]:
    return truth_C.nonzero().squeeze(1).tolist()
