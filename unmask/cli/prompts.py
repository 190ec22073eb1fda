"""What `unmask generate` reads and writes: prompts, and what a model made of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unmask.core.trace import Trace
from unmask.models import Model
from unmask.tasks.support.data import read_rows


def read_prompts(path: Path) -> list[dict[str, Any]]:
    return read_rows(path, {"prompt": str})


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
