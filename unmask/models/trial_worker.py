"""A process that runs what a checkpoint brings along and that may not end: a chat template, or patterns of an adapter.

It runs as a file, so it imports neither unmask nor torch. Its arguments are folders of packages. It bounds its memory,
and its CPU time for each request. Its first line is `true`. Then it answers every line of JSON with one: {"seconds":
..., "template": text, "conversations": [[...], ...], "values": {...}, "longest": [...]} or {"seconds": ...,
"patterns": [...], "names": [...]}. The answer has `texts`, one of each conversation; or, of the first conversation
without a text, `length` if the text is longer than its `longest`, or `error`; or `missing` if jinja2 is not there. If
a request needs more memory or CPU time, the process ends without an answer.
"""

import json
import re
import resource
import signal
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any

MEMORY = 2**29
SAFE_JINJA = (3, 1, 6)
"""Programs can leave the sandbox of older versions."""
# Every form in which peft uses a pattern: target and exclude, rank and alpha, layers.
FORMS = ("{}", r"(.*\.)?({})$", r"(?:^|.*?\.){}\.(?P<idx>\d+)\.")


@lru_cache(maxsize=8)
def compiled(template: str) -> Any:
    """A chat template in the environment that transformers gives to it."""
    import jinja2
    from jinja2.ext import Extension
    from jinja2.nodes import CallBlock
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if tuple(map(int, re.findall(r"\d+", jinja2.__version__)[:3])) < SAFE_JINJA:
        raise ImportError(f"jinja2 {jinja2.__version__} is too old: pip install 'jinja2>=3.1.6'")

    class Generation(Extension):
        """transformers' own tag, which marks what the assistant has written and renders as its content."""

        tags = {"generation"}  # noqa: RUF012 (as the base class has it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return CallBlock(self.call_method("content"), [], [], body).set_lineno(line)

        def content(self, caller: Any) -> Any:
            return caller()

    def raise_exception(message: str) -> None:
        raise ValueError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment.from_string(template)


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


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


def answer(request: dict[str, Any]) -> dict[str, Any]:
    if "template" not in request:
        match_all(request["patterns"], request["names"])
        return {}
    template, texts = compiled(request["template"]), list[str]()
    for messages, longest in zip(request["conversations"], request["longest"], strict=True):
        text = template.render(messages=messages, **request["values"])
        if len(text) > longest:
            return {"length": len(text)}
        texts.append(text)
    return {"texts": texts}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.path += sys.argv[1:]
    print("true", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])  # without a handler, its signal ends the process
        try:
            reply = answer(request)
        except (MemoryError, OverflowError):  # a string with more characters than an index can count
            return
        except ImportError as error:
            reply = {"missing": str(error)}
        except Exception as error:
            reply = {"error": str(error)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
