"""The examples of a fine-tuning source as tokens."""

import random
import warnings
from dataclasses import dataclass

from unmask.core.policy import Policy
from unmask.sft.packing import Example, next_multiple, width_of
from unmask.sft.sources import SftSource, sft_row, task_of
from unmask.tasks import Task
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


def load_sft_data(source: SftSource, policy: Policy, seed: int, max_examples: int, held_out: int) -> SftData:
    """The examples of a source. `held_out` examples of a file, at most a tenth, are not trained on."""
    count = source.max_examples or max_examples
    task = task_of(source) if source.task is not None else None
    if task is not None:
        train, test = (
            [(task.prompt_ids(policy.tokenizer, row), policy.tokenizer.encode(task.solution(row))) for row in rows]
            for rows in (task.rows("train", count, seed), task.rows("test", held_out, 0))
        )
    else:
        train, test = _file_pairs(policy, source, seed, count, held_out)
    if any(policy.mask_id in ids for pair in (*train, *test) for ids in pair):
        raise ValueError(f"{source.name}: a text contains the MASK token, which training cannot use; remove it")
    room = policy.max_length
    fits, fits_test = (
        [(prompt, text) for prompt, text in pairs if width_of(Example(prompt, text, 1), room) is not None]
        for pairs in (train, test)
    )
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
    return SftData(source.name, train_examples, test_examples, max(canvas, longest), task)


Pair = tuple[list[int], list[int]]


def _file_pairs(
    policy: Policy, source: SftSource, seed: int, count: int, held_out: int
) -> tuple[list[Pair], list[Pair]]:
    rows = read_rows(str(source.file), {}, sft_row)
    random.Random(f"unmask lesson {source.name} {seed}").shuffle(rows)
    held_out = min(held_out, len(rows) // 10)
    encode, prompt = policy.tokenizer.encode, policy.tokenizer.prompt
    train, test = (
        [(prompt(row["prompt"], row["system"]), encode(row["completion"])) for row in part]
        for part in (rows[held_out : held_out + count], rows[:held_out])
    )
    return train, test
