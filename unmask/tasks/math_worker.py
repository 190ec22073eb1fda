"""A process of its own that compares answers with math-verify: unmask/tasks/math500.py starts and ends it.

It is run as a file, so that it imports neither unmask nor torch, and it bounds its own memory. One line of JSON in,
[gold, answer, seconds]; one line out, true or false. A comparison that takes more seconds of computing ends the whole
process: math-verify's own time limit raises an exception, which not every computation notices.
"""

import json
import logging
import resource
import signal
import sys

MEMORY = 2 * 2**30


def equal(gold: str, answer: str) -> bool:
    from math_verify import parse, verify

    pair = [parse(f"${text}$", parsing_timeout=None) for text in (gold, answer)]
    return all(pair) and bool(verify(*pair, timeout_seconds=None))


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    logging.disable(logging.CRITICAL)  # it tells of what it cannot parse, which is most of what a model writes
    replies = sys.stdout
    sys.stdout = sys.stderr  # whatever sympy prints is no verdict
    equal("1", "1")  # imports and builds the parser
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        gold, answer, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # without a handler, its signal ends the process
        try:
            verdict = equal(gold, answer)
        except Exception:  # of whatever kind: an answer that cannot be compared is not right
            verdict = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(verdict), file=replies, flush=True)


if __name__ == "__main__":
    main()
