"""Protocols: a task's prompt, what answers begin with, its grader, and how answers are made, under one name.

Numbers of this field compare only inside one protocol, so a protocol is an object and never a mixture of switches.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from unmask.tasks.support.answers import in_form
from unmask.tasks.support.composite import RewardPart, Rewards, Weights, composite, standard
from unmask.tasks.support.manner import FIELD, Manner
from unmask.tasks.task import About, Grade, Row, Task

PREFILL = "<reasoning>"

SKELETON = "<reasoning>\n{reasoning}\n</reasoning>\n<answer>\n{answer}\n</answer>"


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What protocols of every kind of task say."""

    name: str = ""
    """As it is listed; `chosen` fills it in."""
    manner: Manner = FIELD


@dataclass(frozen=True)
class Protocol(Rules):
    prompt: Callable[[Row], str]
    grade: Callable[[Row, str], Grade]
    prefill: str = PREFILL
    system: str = ""
    """What a system's turn says."""
    tag: str = "reasoning"
    """The tag that reasoning stands in."""
    sets: Mapping[str, Callable[[], Sequence[Row]]] = field(default_factory=dict)
    """The rows of a split, where the protocol has its own."""

    def written(self, completion: str) -> str:
        """What `written_out` wrote in the form that this protocol asks for."""
        return (PREFILL + completion).replace("reasoning>", f"{self.tag}>").removeprefix(self.prefill)

    def source(self, otherwise: Callable[[str], Sequence[Row]]) -> Callable[[str], Sequence[Row]]:
        """The rows of a split: the protocol's own, or `otherwise`."""
        return lambda split: self.sets[split]() if split in self.sets else otherwise(split)


Kind = TypeVar("Kind", bound=Rules)


def chosen(protocols: Mapping[str, Kind], name: str) -> Kind:
    if name not in protocols:
        raise ValueError(f"there is no protocol {name!r}; known: {', '.join(protocols)}")
    return replace(protocols[name], name=name)


def check_d1_rewards(task: str, rewards: Rewards, protocol: Protocol) -> None:
    """ValueError where d1's rewards would punish what the prompt asks for: they want the answer alone in <answer>."""
    if rewards == "d1" and protocol.name != "d1_train":
        raise ValueError(
            f"{task}.rewards=d1 pays for an answer without a box, for which {task}.protocol=d1_train alone asks; "
            f"set that, or {task}.rewards=unmask"
        )


def thinking(prompt: Callable[[Row], str], grade: Callable[[Row, str], Grade], asked: str, answer: str) -> Protocol:
    """A protocol such as AGRPO's: instructions are a system's turn, and reasoning stands in <think>. The wording is
    ours, as is the grader: its own are not known here."""
    form = SKELETON.replace("reasoning>", "think>").format(reasoning="your reasoning, step by step", answer=answer)
    system = f"{asked} Write your answer in exactly this form:\n{form}"
    return Protocol(prompt, grade, prefill="", system=system, tag="think")


def written_out(reasoning: str, answer: str) -> str:
    """A completion in the form that the prompts ask for; its opening tag is the prefill."""
    return SKELETON.format(reasoning=reasoning, answer=answer).removeprefix(PREFILL)


def text_task(
    name: str,
    summary: str,
    rows: Callable[[str, int, int], list[Row]],
    solution: Callable[[Row], str],
    protocol: Protocol,
    about: About,
    weights: Weights = None,
    credit: Callable[[Row, str], float] | None = None,
    parts: Mapping[str, RewardPart] | None = None,
    fixed: bool = True,
    stored: Callable[[Row], Row] = dict,
) -> Task:
    """A Task in natural language: solved where the grader gives all points.

    Its parts are correctness (1 for a solution, else `credit` of the completion, 0 if not given), format (the four
    tags) and length; or else `parts`, which see what the answer begins with too.
    """

    def solved(row: Row, completion: str) -> bool:
        grade = protocol.grade(row, completion)
        return 0 < grade.out_of == grade.points

    def correctness(row: Row, completion: str) -> float:
        return 1.0 if solved(row, completion) else credit(row, completion) if credit else 0.0

    def formed(completion: str) -> bool:
        return in_form((protocol.prefill + completion).replace(f"{protocol.tag}>", "reasoning>"))

    def whole(part: RewardPart) -> RewardPart:
        return part._replace(value=lambda row, completion: part.value(row, protocol.prefill + completion))

    task = Task(
        name=name,
        summary=summary,
        length=256,
        rows=rows,
        prompt=protocol.prompt,
        solution=lambda row: protocol.written(solution(row)),
        reward=correctness,
        solved=solved,
        prefill=protocol.prefill,
        text=True,
        grade=protocol.grade,
        fixed=fixed,
        stored=stored,
        protocol=protocol.name,
        system=protocol.system,
        manner=protocol.manner,
        about=about,
    )
    found = standard(task, formed) if parts is None else {name: whole(part) for name, part in parts.items()}
    return composite(task, found, weights)
