"""A process that compares answers in LaTeX; unmask/tasks/support/verifier.py starts and kills it.

It bounds its memory. One line of JSON in: [gold, answer, seconds]. One line out: true or false. A comparison that takes
more seconds of CPU time ends the process: an exception could be caught inside sympy. So a child compares the answers.
Its parent, which has everything imported, writes one reply to each request: false if the child ends before its verdict.
It forks another child before the next request, also if the child was killed in between.
"""

import json
import os
import re
import resource
import select
import signal
import socket
import sys
from collections.abc import Sequence
from itertools import pairwise

from unmask.tasks.support.math_forms import Form, form, word
from unmask.tasks.support.math_values import near, proportional, same_value, value

MEMORY = 2 * 2**30
RIGHT, WRONG = b"1", b"0"  # what a child writes


def equal(gold: str, answer: str) -> bool:
    """Whether two answers have the same form and equal values; ValueError if one cannot be read."""
    one, other = form(gold), form(answer)
    if "word" not in (one.kind, other.kind):
        return same_form(one, other)
    if one.name and other.name and one.name != other.name:
        return False
    words = [each.text if each.kind == "word" else word(text) for each, text in ((one, gold), (other, answer))]
    if one.kind == "word":  # else the letters are variables
        words = [letters.lower() for letters in words]
    return words[0] == words[1] != ""


def same_form(gold: Form, answer: Form) -> bool:
    if answer.kind == "rounded":
        exact, rounded = answer.parts
        return same_form(gold, exact) and near(value(exact.text), value(rounded.text))
    if answer.kind == "chain":  # 2 + 3 = 5: every side must be right
        return all(same_form(gold, side) for side in answer.parts)
    if gold.kind == "chain":
        return same_form(gold.parts[-1], answer)
    if "equation" in (gold.kind, answer.kind):
        return _same_equation(gold, answer)
    if not _names_fit(gold, answer):
        return gold.kind == answer.kind == "expression" and _same_equation(gold, answer)
    kinds = {gold.kind, answer.kind}
    if kinds in ({"list"}, {"set"}, {"list", "set"}, {"union"}):
        gold_parts, parts = (_distinct(one.parts) if one.kind == "set" else list(one.parts) for one in (gold, answer))
        return _same_parts(gold_parts, parts)
    if len(kinds) > 1 or len(gold.parts) != len(answer.parts):
        return False
    if gold.kind == "expression":
        return _same_expression(gold, answer)
    return gold.text.lower() == answer.text.lower() and all(map(same_form, gold.parts, answer.parts))


def _names_fit(gold: Form, answer: Form) -> bool:
    """Whether the names are equal, or one is missing, or they are y and f(x)."""
    if answer.name.startswith("(") and not gold.name:  # (x,y) = (3,5); not (y,x), since the gold order is not known
        return _in_order(re.findall("[a-z]", answer.name))
    if not gold.name or not answer.name or gold.name == answer.name:
        return True
    function, other = sorted((gold.name, answer.name), key=lambda name: not name.endswith(")"))
    arguments = re.findall("[a-z]", function.partition("(")[2])
    return bool(arguments) and "(" not in other and not function.startswith("(") and other not in arguments


def _in_order(names: Sequence[str]) -> bool:
    return all(one < other for one, other in pairwise(names))


def _same_parts(gold: list[Form], answer: list[Form]) -> bool:
    """Whether the parts are the same in some order; in the same order if only one side has several names."""
    gold_names = {one.name for one in gold}
    names = [one.name.partition("_")[0] for one in answer if one.name]
    if gold_names == {""} and len(set(names)) > 1:
        return len(gold) == len(answer) and _in_order(names) and all(map(same_form, gold, answer))
    if len(gold_names - {""}) > 1 and not all(one.name for one in answer):
        return len(gold) == len(answer) and all(map(same_form, gold, answer))
    for one in gold:
        place = next((place for place, other in enumerate(answer) if same_form(one, other)), None)
        if place is None:
            return False
        del answer[place]
    return not answer


def _distinct(parts: Sequence[Form]) -> list[Form]:
    result: list[Form] = []
    for part in parts:
        if not any(same_form(part, other) for other in result):
            result.append(part)
    return result


def _same_equation(gold: Form, answer: Form) -> bool:
    """Equations with the same solutions: y = 2x + 3 and 2x - y = -3."""
    differences = []
    for one in (gold, answer):
        if one.kind == "equation":
            differences.append(value(one.parts[0].text) - value(one.parts[1].text))
        elif one.kind == "expression" and one.name and "(" not in one.name:
            differences.append(value(one.name) - value(one.text))
        else:
            return False
    return proportional(*differences)


def _same_expression(gold: Form, answer: Form) -> bool:
    units = {gold.unit, answer.unit}
    if len(units) > 1 and ("" not in units or any("?" in unit for unit in units)):
        return False
    one, other = value(gold.text), value(answer.text)
    if gold.unit == answer.unit or "percent" not in (gold.unit, answer.unit):
        return same_value(one, other) and (answer.unit != "degree" or bool(gold.unit) or one.is_Rational)
    if gold.unit == "percent":
        return same_value(one / 100, other) or same_value(one, other)
    # 50 % is 1/2; it also answers "how many percent?", whose gold answer is a number above 1 without a sign
    return same_value(one, other / 100) or bool(one.is_Rational and one > 1 and same_value(one, other))


def serve(parent: socket.socket) -> None:
    for line in parent.makefile():
        gold, answer, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # without a handler, its signal ends the process
        try:
            right = equal(gold, answer)
        except Exception:  # of any kind: an answer that cannot be compared is wrong
            right = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        parent.sendall(RIGHT if right else WRONG)


def start_child() -> socket.socket:
    """The socket of a new child, which reads requests from it and writes verdicts."""
    here, there = socket.socketpair()
    if os.fork():
        there.close()
        return here
    here.close()
    serve(there)
    os._exit(0)


def verdict(child: socket.socket, request: str) -> bool:
    """Of the child; False if it ends."""
    try:
        child.sendall(request.encode())
        return child.recv(1) == RIGHT
    except OSError:
        return False


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that end are reaped
    equal("\\sqrt{8}", "2\\sqrt{2}")  # imports what sympy imports late
    print("true", flush=True)
    child = start_child()
    for request in sys.stdin:
        if select.select([child], [], [], 0)[0]:  # a child without a request writes nothing, so it has ended
            child = start_child()
        print(json.dumps(verdict(child, request)), flush=True)
