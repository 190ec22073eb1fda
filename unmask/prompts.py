"""What `unmask generate` reads and writes: prompts, and what a model made of them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unmask.models import Model
from unmask.trace import Trace


def read_prompts(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} line {number} is not JSON: {error}") from None
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
            raise ValueError(f'{path} line {number} has no text "prompt"')
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} holds no prompts")
    return rows


def entries(policy: Model, trace: Trace, length: int, whole: bool) -> Iterator[dict[str, Any]]:
    """The completion of every trace, and with `whole` how it came about."""
    for i in range(len(trace)):
        ids, logp = trace.tokens_BL[i, -length:].tolist(), trace.logp_BL[i, -length:].tolist()
        entry: dict[str, Any] = {"completion": policy.tokenizer.decode(ids)}
        if whole:
            filled, step = trace.filled_BL[i, -length:].tolist(), trace.step_BL[i, -length:].tolist()
            steps = [s if f else None for s, f in zip(step, filled, strict=True)]
            entry["trace"] = {"tokens": ids, "step": steps, "logp": logp}
        yield entry
