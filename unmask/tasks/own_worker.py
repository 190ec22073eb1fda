"""A process that calls the rewards of a user's file; unmask/tasks/own.py starts and kills it.

One line of JSON in: [row, completion]. One line out: the Outcome as an object, or an error message as a string.
What the user's program prints goes to standard error; its standard input is empty.
"""

import json
import os
import sys

from unmask.tasks import own

LONGEST = 4000  # characters of an error; a line must fit into the pipe, or the reader waits for the rest


def main() -> None:
    _, _, file, weights = sys.argv
    requests, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def send(reply: object) -> None:
        print(json.dumps(reply), file=replies, flush=True)

    try:
        task = own.task(file, weights=json.loads(weights))
    except ValueError as error:
        send(str(error)[:LONGEST])
        return
    send(True)
    for line in requests:
        row, completion = json.loads(line)
        try:
            send(task.outcome(row, completion)._asdict())
        except Exception as error:
            send((str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")[:LONGEST])
