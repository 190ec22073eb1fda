"""Programs that a checkpoint brings along, in a process with bounds (trial_worker.py): its chat template, and the
patterns of an adapter. They never run in this process."""

import json
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unmask.util.json_process import Process, ProcessEnded, ProcessNotStarted
from unmask.util.portions import portions
from unmask.util.turns import Turns

WORKER = Path(__file__).with_name("trial_worker.py")
SECONDS = 2.0
"""Of CPU time, for a request: one or several conversations, or the patterns of an adapter."""
WAIT = 120.0
"""Of wall time. A busy machine can take many times the CPU time."""
LONGEST = 100_000
"""Characters that a chat template may add to a conversation, and that patterns may have together."""
GROWTH = 4
"""How many times a chat template may write a conversation."""
TOGETHER = 2**15
"""Characters of the conversations in a request. A request costs as much time as a few short conversations."""
TRIED = tuple(
    [{"role": ("user", "assistant")[number % 2], "content": "a" * letters} for number in range(turns)]
    for turns, letters in ((1, 1), (1, 1000), (9, 1000))
) + ([{"role": "system", "content": "a" * 1000}, {"role": "user", "content": "a" * 1000}],)


class TemplateFailure(ValueError):
    """The template itself ends with an error: it may refuse a conversation."""


def render(template: str, turns: Turns, values: Mapping[str, Any]) -> str:
    """The text that a chat template makes of a conversation; ValueError if it fails or goes beyond a bound.

    values   the special tokens and settings that the template reads
    """
    size, reply = _size(turns), _reply(_request(template, [turns], values))
    what = "The chat template of this tokenizer"
    if reply is None:
        bound = f"{SECONDS:g} s or 512 MB"
        raise ValueError(f"{what} takes more than {bound} for a conversation of {size} characters; fix chat_template.")
    if "missing" in reply:
        raise ValueError(f"Chat templates cannot be rendered: {reply['missing']}")
    if "error" in reply:
        message = " ".join(reply["error"].split()).rstrip(".")
        raise TemplateFailure(f"{what} fails: {message}; fix chat_template.")
    if "length" in reply:
        raise ValueError(f"{what} makes {reply['length']} characters of a conversation of {size}; fix chat_template.")
    (text,) = reply["texts"]
    return text


def render_all(template: str, conversations: Sequence[Turns], values: Mapping[str, Any]) -> list[str]:
    """`render` of every conversation, many in a request. If a request goes beyond a bound or fails, its conversations
    are rendered one by one, each within its own bound, so the error is that of the first one that fails."""
    texts = list[str]()
    for some in portions(conversations, _size, TOGETHER):
        reply = _reply(_request(template, some, values)) or {}
        texts += reply["texts"] if "texts" in reply else [render(template, turns, values) for turns in some]
    return texts


def _request(template: str, conversations: Sequence[Turns], values: Mapping[str, Any]) -> dict[str, Any]:
    known = {"tools": None, "documents": None, "add_generation_prompt": True}
    return {
        "template": template,
        "conversations": [list(turns) for turns in conversations],
        "values": {**known, **values},
        "longest": [LONGEST + GROWTH * _size(turns) for turns in conversations],
    }


def _size(turns: Turns) -> int:
    """The characters of a conversation as JSON."""
    return len(json.dumps(list(turns)))


def check_template(template: str, values: Mapping[str, Any]) -> None:
    """ValueError for a chat template that goes beyond a bound for a short conversation: better now than in a run."""
    _check_once(template, json.dumps(values, sort_keys=True))


@lru_cache(maxsize=64)
def _check_once(template: str, values: str) -> None:
    for turns in TRIED:
        with suppress(TemplateFailure):
            render(template, turns, json.loads(values))


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
    """The worker's answer; None if the request exceeds its time or memory. If something else ends the worker, the
    request is sent once more."""
    try:
        try:
            return _ask(request)
        except ProcessEnded:
            return _ask(request)
    except ProcessEnded as error:
        raise ValueError(f"The process that runs chat templates and patterns {error}") from error


def _ask(request: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        return _worker().ask({**request, "seconds": SECONDS}, WAIT)
    except ProcessNotStarted:
        raise
    except ProcessEnded as error:
        if error.code in (None, 0, -signal.SIGPROF):  # too long, out of memory, or too much CPU time
            return None
        raise


@cache
def _worker() -> Process:
    """One for all tokenizers. It starts with the first request, and again after it has ended.

    With -I Python ignores PYTHONPATH and the user's packages, so the command has the folders of jinja2."""
    found = [spec.origin for name in ("jinja2", "markupsafe") if (spec := find_spec(name)) and spec.origin]
    folders = dict.fromkeys(str(Path(origin).parent.parent) for origin in found)
    return Process([sys.executable, "-I", str(WORKER), *folders], starting=WAIT, bare=True)
