"""A process of its own that asks the rewards of a user's file: unmask/tasks/own.py starts and ends it.

One line of JSON in, [row, completion]; one line out: the Outcome as an object, or a text that says what went wrong.
What the user's program prints goes to standard error, and there is nothing for it to read: its words are no answers.
"""

import json
import os
import sys

from unmask.tasks import own

LONGEST = 4000  # characters of an error; a line must fit the pipe, or half of one would be waited for


def main() -> None:
    _, _, file, weights = sys.argv
    requests, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def say(reply: object) -> None:
        print(json.dumps(reply), file=replies, flush=True)

    try:
        task = own.task(file, weights=json.loads(weights))
    except ValueError as error:
        say(str(error)[:LONGEST])
        return
    say(True)
    for line in requests:
        row, completion = json.loads(line)
        try:
            say(task.outcome(row, completion)._asdict())
        except Exception as error:
            say((str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")[:LONGEST])
