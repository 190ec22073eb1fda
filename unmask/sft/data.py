"""The examples of a fine-tuning source as tokens."""

import random
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unmask.core.policy import Policy, Tokenizer
from unmask.models.tokenizer import encode_all, prompt_all
from unmask.sft.behaviours import CAREFUL, answer_of, drawn_behaviour, mixture_rows
from unmask.sft.packing import Example, next_multiple, width_of
from unmask.sft.sources import SftSource, sft_row, task_of
from unmask.tasks import Row, Task
from unmask.tasks.support.data import read_rows


@dataclass(frozen=True)
class SftData:
    """The examples of a source as tokens of a policy."""

    name: str
    examples: list[Example]
    held_out: list[Example]
    canvas: int
    """Positions that are enough for every completion."""
    task: Task | None
    """None for a file: its completions cannot be graded."""
    behaviours: dict[str, int] = field(default_factory=dict)
    """Examples of each behaviour, and `redrawn` rows; empty if the source has only solutions."""


def load_sft_data(
    source: SftSource,
    policy: Policy,
    seed: int,
    max_examples: int,
    held_out: int,
    behaviours: Mapping[str, float] = {},
) -> SftData:
    """The examples of a source. `held_out` examples of a file, at most a tenth, are not trained on.

    behaviours   the shares of the wrong behaviours of a source that has none of its own; held-out answers are solutions
    """
    count, shares = source.max_examples or max_examples, source.shares(behaviours)
    task = task_of(source) if source.task is not None else None
    shown, redrawn = list[str](), 0
    if task is not None:
        rows, redrawn = mixture_rows(task, shares, count, seed)
        rng = random.Random(f"unmask behaviours {source.name} {seed}")
        shown = [drawn_behaviour(shares, rng) for _ in rows]
        train = _task_pairs(policy.tokenizer, task, rows, shown)
        test_rows = task.rows("test", held_out, 0)
        test = _task_pairs(policy.tokenizer, task, test_rows, [CAREFUL] * len(test_rows))
    else:
        train, test = _file_pairs(policy, source, seed, count, held_out)
    if any(policy.mask_id in ids for pair in (*train, *test) for ids in pair):
        raise ValueError(f"{source.name}: a text contains the MASK token, which training cannot use; remove it")
    room = policy.max_length
    fits, fits_test = ([pair for pair in pairs if _fits(pair, room)] for pairs in (train, test))
    taught = Counter(name for name, pair in zip(shown, train, strict=False) if _fits(pair, room))
    if not fits:
        raise ValueError(f"{source.name}: no example fits into the {room} tokens of this model")
    if dropped := len(train) - len(fits):
        share = f"{dropped:,} of {len(train):,} examples are left out"
        warnings.warn(f"{source.name}: {share}: they exceed the {room} tokens of this model", stacklevel=2)
    longest = 1 + max(len(completion) for _, completion in fits)
    canvas = source.canvas or next_multiple(longest)
    if canvas < longest:
        problem = f"{canvas} positions are too few for completions of up to {longest}; evaluation uses {longest}"
        warnings.warn(f"{source.name}: canvas: {problem}", stacklevel=2)
    train_examples, test_examples = (
        [Example(prompt, text, canvas) for prompt, text in pairs] for pairs in (fits, fits_test)
    )
    counts = {"redrawn": redrawn, **{name: taught[name] for name in (CAREFUL, *shares)}} if shares else {}
    return SftData(source.name, train_examples, test_examples, max(canvas, longest), task, counts)


Pair = tuple[list[int], list[int]]


def _task_pairs(tokenizer: Tokenizer, task: Task, rows: Sequence[Row], behaviours: Sequence[str]) -> list[Pair]:
    answers = [answer_of(task, row, behaviour) for row, behaviour in zip(rows, behaviours, strict=True)]
    return list(zip(task.all_prompt_ids(tokenizer, rows), encode_all(tokenizer, answers), strict=True))


def _fits(pair: Pair, room: int) -> bool:
    prompt, text = pair
    return width_of(Example(prompt, text, 1), room) is not None


def _file_pairs(
    policy: Policy, source: SftSource, seed: int, count: int, held_out: int
) -> tuple[list[Pair], list[Pair]]:
    rows = read_rows(str(source.file), {}, sft_row)
    random.Random(f"unmask lesson {source.name} {seed}").shuffle(rows)
    held_out = min(held_out, len(rows) // 10)
    train, test = rows[held_out : held_out + count], rows[:held_out]
    return _row_pairs(policy.tokenizer, train), _row_pairs(policy.tokenizer, test)


def _row_pairs(tokenizer: Tokenizer, rows: Sequence[Row]) -> list[Pair]:
    prompts = prompt_all(tokenizer, [(row["prompt"], row["system"]) for row in rows])
    return list(zip(prompts, encode_all(tokenizer, [row["completion"] for row in rows]), strict=True))
