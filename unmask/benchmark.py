"""A task's score under a named protocol, at several completion lengths, with a card that says how it was measured.

Numbers compare only where the cards agree: `unmask eval MODEL --task gsm8k --protocol d1 --lengths 128,256,512`.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from unmask.engine import Cache
from unmask.evaluate import Decoding, Share, complete, completions, prompt_ids
from unmask.grade import Graded, score
from unmask.law import Law
from unmask.models import Model
from unmask.rollout import row_seeds
from unmask.rows import Rows
from unmask.run import versions
from unmask.tasks.task import Grade, Row, Task

BLOCK = 32
"""The field's block length."""


def field_decoding(length: int) -> Decoding:
    """What d1 and those after it evaluate with: greedy, two tokens a step, blocks of 32, the surest draws first."""
    block = BLOCK if length % BLOCK == 0 else length
    steps = length // 2 if (length // 2) % (length // block) == 0 else length
    return Decoding(length, steps, block, law=Law(temperature=0.0))


@dataclass(frozen=True)
class Line:
    """One length's result."""

    length: int
    score: Share
    tokens: float
    """Tokens before the end of an answer, mean."""
    seconds: float
    """For a problem, mean."""
    card: dict[str, Any]
    graded: Graded
    texts: tuple[str, ...]

    def data(self) -> dict[str, Any]:
        share = {"score": self.score.value, "low": self.score.low, "high": self.score.high}
        return {"length": self.length, **share, "tokens": self.tokens, "seconds": self.seconds, "card": self.card}


def hashed(value: Any) -> str:
    """The first twelve digits of a hash of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


def card(policy: Model, task: Task, protocol: str, rows: Sequence[Row], how: Decoding, device: str, batch: int) -> dict:
    """How a number was measured: everything that has been seen to change one."""
    return {
        "model": policy.home,
        "task": task.name,
        "protocol": protocol,
        "prompt": hashed([task.prompt(rows[0]), task.prefill]),
        "split": hashed(list(rows)),
        "problems": len(rows),
        "length": how.length,
        "steps": how.steps,
        "block": how.block,
        "order": how.order.__name__,
        "temperature": how.law.temperature,
        "batch": batch,
        "padding": "masked",
        "dtype": str(next(policy.parameters()).dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "versions": versions(),
    }


def lines(
    policy: Model,
    task: Task,
    protocol: str,
    rows: Sequence[Row],
    decodings: Sequence[Decoding],
    device: str,
    batch: Rows,
    seed: int = 0,
) -> Iterator[Line]:
    """The task's score at every decoding, by the protocol's own grader."""
    if not rows:
        raise ValueError(f"{task.name}: there are no problems to evaluate on")
    prompts = [prompt_ids(policy, task, row) for row in rows]
    seed_B = row_seeds(seed, len(rows)).to(device)
    for how in decodings:
        start, texts, counts = time.perf_counter(), list[str](), list[int]()
        for trace in complete(policy, prompts, how, seed_B, batch):
            texts += completions(policy, trace, how.length)
            ended_BL = (trace.tokens_BL == trace.eos_id) & trace.canvas_BL
            counts += (trace.filled_BL & (ended_BL.long().cumsum(-1) == 0)).sum(-1).tolist()
        seconds = (time.perf_counter() - start) / len(rows)
        if task.ahead is not None:
            task.ahead(list(rows), texts)
        grades: list[Grade] = [task.graded(row, text) for row, text in zip(rows, texts, strict=True)]
        about = card(policy, task, protocol, rows, how, device, batch.most)
        found = Graded(score(grades), len(grades), tuple(grades))
        yield Line(how.length, found.score, sum(counts) / len(counts), seconds, about, found, tuple(texts))


def lengths_of(text: str) -> list[int]:
    """The completion lengths that a command line names."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--lengths: {text!r} is not a list of numbers such as 128,256,512") from None
    if min(found) < 1:
        raise ValueError(f"--lengths: {min(found)} is no length")
    return found


def show_table(
    policy: Model,
    task: Task,
    protocol: str,
    rows: Sequence[Row],
    lengths: Sequence[int],
    *,
    cache: Cache | None,
    device: str,
    batch: Rows,
    out: Path | None,
    as_json: bool,
) -> None:
    """Print the field's table as it comes, and the card; with `out`, write scores, cards and answers there."""
    if out is not None and not out.parent.is_dir():
        raise ValueError(f"there is no folder {out.parent} to write {out.name} in")
    decodings = [replace(field_decoding(length), cache=cache) for length in lengths]
    if not as_json:
        print(f"{task.name}, protocol {protocol}, {len(rows)} problems, greedy, 95 % intervals")
        print(f"{'length':>7} {'score':>22} {'tokens':>8} {'seconds':>8}")
    found = []
    for line in lines(policy, task, protocol, rows, decodings, device, batch):
        found.append(line)
        if not as_json:
            print(f"{line.length:>7} {line.score!s:>22} {line.tokens:>8.1f} {line.seconds:>8.2f}", flush=True)
    if as_json:
        print(json.dumps([line.data() for line in found], indent=2))
    else:
        shown = {key: value for key, value in found[0].card.items() if key not in ("length", "steps", "versions")}
        print("card: " + ", ".join(f"{key} {value}" for key, value in shown.items()))
    if out is not None:
        whole = [{**line.data(), "answers": list(line.texts)} for line in found]
        out.write_text(json.dumps(whole, indent=1) + "\n")
