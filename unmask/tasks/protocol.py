"""Protocols: a task's prompt, what answers begin with, and its grader, under one name.

Numbers of this field compare only inside one protocol, so a protocol is an object and never a mixture of switches.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from unmask.tasks.answers import in_form
from unmask.tasks.task import Grade, Row, Task

PREFILL = "<reasoning>"

SKELETON = "<reasoning>\n{reasoning}\n</reasoning>\n<answer>\n{answer}\n</answer>"


@dataclass(frozen=True)
class Protocol:
    prompt: Callable[[Row], str]
    grade: Callable[[Row, str], Grade]
    prefill: str = PREFILL


def chosen(protocols: Mapping[str, Protocol], name: str) -> Protocol:
    if name not in protocols:
        raise ValueError(f"there is no protocol {name!r}; known: {', '.join(protocols)}")
    return protocols[name]


def written_out(reasoning: str, answer: str) -> str:
    """A completion in the form that the prompts ask for; its opening tag is the prefill."""
    return SKELETON.format(reasoning=reasoning, answer=answer).removeprefix(PREFILL)


def text_task(
    name: str,
    summary: str,
    rows: Callable[[str, int, int], list[Row]],
    solution: Callable[[Row], str],
    protocol: Protocol,
    format: float,
    credit: Callable[[Row, str], float] | None = None,
) -> Task:
    """A Task in natural language: solved where the grader gives all points.

    The reward is 1 for a solution, else `credit` of the completion (0 if not given); `format` of it is earned by the
    four tags instead, so that the whole stays in [0, 1].
    """
    if not 0.0 <= format < 1.0:
        raise ValueError(f"format must be at least 0 and below 1, not {format}")

    def solved(row: Row, completion: str) -> bool:
        grade = protocol.grade(row, completion)
        return 0 < grade.out_of == grade.points

    def reward(row: Row, completion: str) -> float:
        earned = 1.0 if solved(row, completion) else credit(row, completion) if credit else 0.0
        return (1 - format) * earned + format * in_form(protocol.prefill + completion)

    return Task(
        name=name,
        summary=summary,
        length=256,
        rows=rows,
        prompt=protocol.prompt,
        solution=solution,
        reward=reward,
        solved=solved,
        prefill=protocol.prefill,
        text=True,
        grade=protocol.grade,
    )
