"""Trials of what a checkpoint brings along and that may not end, in a process with bounds (trial_worker.py)."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from unmask.util.processes import start_process

WORKER = Path(__file__).with_name("trial_worker.py")
SECONDS = 2.0
LONGEST = 100_000
"""Characters that a chat template may make of each conversation in TRIED, and that patterns may have together."""
TRIED = tuple(
    [{"role": ("user", "assistant")[number % 2], "content": "a" * letters} for number in range(turns)]
    for turns, letters in ((1, 1), (1, 1000), (9, 1000))
) + ([{"role": "system", "content": "a" * 1000}, {"role": "user", "content": "a" * 1000}],)


def check_template(template: str, values: Mapping[str, Any]) -> None:
    """ValueError for a chat template that makes a huge text of a short conversation, or takes for ever.

    values   the special tokens and settings that the template reads
    """
    length = _rendered_length(template, json.dumps(values, sort_keys=True, default=str))
    if length > LONGEST:
        what = f"makes {length} characters" if length < sys.maxsize else f"takes more than {SECONDS:g} s or 512 MB"
        raise ValueError(f"The chat template of this tokenizer {what} for at most 9 short turns; fix chat_template.")


@lru_cache(maxsize=64)
def _rendered_length(template: str, values: str) -> int:
    """0 if the template fails: the tokenizer says why."""
    known = {"tools": None, "documents": None, "add_generation_prompt": True}
    reply = _reply({"template": template, "conversations": TRIED, "values": {**known, **json.loads(values)}})
    return sys.maxsize if reply is None else reply.get("length", 0)


def is_plain(pattern: str) -> bool:
    """Whether a pattern is the name of a module."""
    return re.fullmatch(r"[\w.]+", pattern) is not None


def check_patterns(patterns: Sequence[str], names: Sequence[str]) -> None:
    """ValueError for a regular expression that is invalid or takes for ever on one of these names."""
    # \\d+ between dots and escaped characters cannot backtrack; without repeats and groups nothing else can.
    risky = [pattern for pattern in patterns if re.search(r"[*+?{(]", re.sub(r"\\d\+\\.|\\[^dwsDWS]", "", pattern))]
    others = [pattern for pattern in patterns if not is_plain(pattern)]
    if (length := sum(map(len, others))) > LONGEST:
        raise ValueError(f"its regular expressions have {length} characters, more than {LONGEST}; shorten them.")
    for pattern in others:
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{pattern!r:.300} is not a regular expression: {error}.") from None
    if risky and _reply({"patterns": risky, "names": list(names)}) is None:
        what = (
            f"the pattern {risky[0]!r:.300} takes" if len(risky) == 1 else f"the patterns {risky!r:.300} together take"
        )
        raise ValueError(f"{what} more than {SECONDS:g} s on this model; simplify it.")


def _reply(request: Mapping[str, Any]) -> dict[str, Any] | None:
    """The worker's answer; None if it needed more than its time or memory."""
    process = start_process(
        [sys.executable, "-I", str(WORKER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        line, _ = process.communicate(json.dumps({**request, "seconds": SECONDS}) + "\n")
    return json.loads(line) if line.strip() else None
