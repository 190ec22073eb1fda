"""A process that compares answers with math-verify; unmask/tasks/support/verifier.py starts and kills it.

It runs as a file, so it imports neither unmask nor torch, and it bounds its memory. One line of JSON in:
[gold, answer, seconds]. One line out: true or false. A comparison that takes more seconds of CPU time ends the process,
because math-verify's own time limit raises an exception that some computations catch. So a child compares the answers;
if it ends, its parent, which has everything imported, replies false and forks another.
"""

import json
import logging
import os
import resource
import signal
import sys
from typing import TextIO

MEMORY = 2 * 2**30


def equal(gold: str, answer: str) -> bool:
    from math_verify import parse, verify

    pair = [parse(f"${text}$", parsing_timeout=None) for text in (gold, answer)]
    return all(pair) and bool(verify(*pair, timeout_seconds=None))


def serve(replies: TextIO) -> None:
    for line in sys.stdin:
        gold, answer, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # without a handler, its signal ends the process
        try:
            verdict = equal(gold, answer)
        except Exception:  # of any kind: an answer that cannot be compared is wrong
            verdict = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(verdict), file=replies, flush=True)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)  # it logs every text that it cannot parse
    replies = sys.stdout
    sys.stdout = sys.stderr  # sympy's output is not a verdict
    equal("1", "1")  # imports and builds the parser
    print("true", file=replies, flush=True)
    while child := os.fork():
        if os.waitpid(child, 0)[1] == 0:  # no more requests
            return
        print("false", file=replies, flush=True)
    serve(replies)


if __name__ == "__main__":
    main()
