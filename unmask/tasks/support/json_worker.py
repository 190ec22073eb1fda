"""A process that checks JSON against schemas; unmask/tasks/benchmarks/json_schema.py starts and kills it.

It runs as a file, so it imports neither unmask nor torch, and it bounds its memory. One line of JSON in: [schema as
text, whether formats are asserted, the document as text or null, whether to explain, seconds]. One line out: an object
with `problem` if the schema cannot be used, else with `valid` and `error`. A check that takes more seconds of CPU time
ends the process.
"""

import json
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

import jsonschema_rs

MEMORY = 2 * 2**30
PATTERN_STEPS = 100_000
PATTERN_BYTES = 10_000_000
ENGINES = (
    jsonschema_rs.RegexOptions(size_limit=PATTERN_BYTES),
    jsonschema_rs.FancyRegexOptions(backtrack_limit=PATTERN_STEPS, size_limit=PATTERN_BYTES),
)


@lru_cache(maxsize=4096)
def compiled(schema: str, formats: bool) -> Any:
    """The validator, of the draft that `$schema` names or 2020-12; or why there is none."""
    problem = ""
    for engine in ENGINES:
        try:
            return jsonschema_rs.validator_for(
                json.loads(schema), validate_formats=formats, pattern_options=engine, offline=True
            )
        except (ValueError, jsonschema_rs.ReferencingError) as error:
            problem = str(error).split("\n")[0]
    return problem


def check(schema: str, formats: bool, document: str | None, explain: bool) -> dict[str, Any]:
    validator = compiled(schema, formats)
    if isinstance(validator, str):
        return {"problem": validator}
    if document is None:
        return {}
    value = json.loads(document)
    valid = bool(validator.is_valid(value))
    if valid or not explain:
        return {"valid": valid}
    errors = validator.iter_errors(value)
    return {"valid": False, "error": next((error.message for error in errors), "a pattern takes too long")}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("true", flush=True)
    for line in sys.stdin:
        *request, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # without a handler, its signal ends the process
        reply = check(*request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
