"""A process that runs what a checkpoint brings along and that may not end: a chat template, or patterns of an adapter.

It runs as a file, so it imports neither unmask nor torch, and it bounds its memory and its CPU time. One line of JSON
in: {"seconds": ..., "template": text, "conversations": [...], "values": {...}} or {"seconds": ..., "patterns": [...],
"names": [...]}. One line out: an object with `length`, that of the longest text that the template makes, or with
`error`. A process that needs more memory or CPU time ends without a line.
"""

import json
import re
import resource
import signal
import sys
from datetime import datetime
from typing import Any

MEMORY = 2**29
# Every form in which peft uses a pattern: target and exclude, rank and alpha, layers.
FORMS = ("{}", r"(.*\.)?({})$", r"(?:^|.*?\.){}\.(?P<idx>\d+)\.")


def rendered_length(template: str, conversations: list[Any], values: dict[str, Any]) -> int:
    """The length of the longest rendering, in the environment that transformers gives to a template.

    A template may refuse any conversation but the first.
    """
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise ValueError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=raise_exception, strftime_now=datetime.now().strftime)
    template = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)  # transformers' own tag, which renders nothing
    compiled = environment.from_string(template)
    lengths = [len(compiled.render(messages=conversations[0], **values))]
    for messages in conversations[1:]:
        try:
            lengths.append(len(compiled.render(messages=messages, **values)))
        except (MemoryError, OverflowError):
            raise
        except Exception:
            continue
    return max(lengths)


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def match_all(patterns: list[str], names: list[str]) -> None:
    for pattern in patterns:
        for name in names:
            re.fullmatch(pattern, name)
            for form in FORMS:
                re.match(form.format(pattern), name)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    request = json.loads(sys.stdin.readline())
    reply: dict[str, Any] = {}
    signal.setitimer(signal.ITIMER_PROF, request["seconds"])  # without a handler, its signal ends the process
    try:
        if "template" in request:
            reply["length"] = rendered_length(request["template"], request["conversations"], request["values"])
        else:
            match_all(request["patterns"], request["names"])
    except (MemoryError, OverflowError):  # a string with more characters than an index can count
        return
    except Exception as error:
        reply["error"] = str(error)
    print(json.dumps(reply))


if __name__ == "__main__":
    main()
