"""Tasks in natural language, and protocols: a prompt, a prefill, a grader and a decoding under one name.

Scores compare only inside one protocol, so a protocol is one object and not a set of switches.

The reward of a task in natural language has parts, each with a weight: `gsm8k.weights={correctness: 1, format: 0.2}`.

    correctness  1 for a solution, else the task's partial credit
    format       1 if the completion has the form that the prompt asks for
    length       max(0, 1 - characters / budget) for a solution, 0 for any other completion

Only a solution is rewarded for being short; else an empty answer would be best for a hard problem. The unit is
characters because a reward sees text; the budget is four for each token of the task's usual length.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeVar

from unmask.tasks.support.answers import in_form, text_before_end
from unmask.tasks.support.data import DataTask
from unmask.tasks.task import FIELD_DECODING, Grade, ProtocolDecoding, RewardPart, Row, Task, Weights, valid_partial

PREFILL = "<reasoning>"
SKELETON = "<reasoning>\n{reasoning}\n</reasoning>\n<answer>\n{answer}\n</answer>"
HELD_OUT = 256  # generated test puzzles, if a protocol has its own training puzzles
CHARACTERS = 4  # of a token, about, in English and in code

D1_DECODING = ProtocolDecoding(batch=lambda length: 4 if length >= 512 else 8, attend_padding=True, stops=False)
JUSTGRPO_DECODING = ProtocolDecoding(steps=lambda length: length, batch=lambda length: 1)

Rewards = Literal["unmask", "d1"]
"""The parts of the reward: correctness, format and length, or those of unmask.tasks.support.d1_rewards."""


@dataclass(frozen=True)
class Protocol:
    prompt: Callable[[Row], str]
    grade: Callable[[Row, str], Grade]
    prefill: str = PREFILL
    system: str = ""
    tag: str = "reasoning"
    """The tag around the reasoning."""
    decoding: ProtocolDecoding = FIELD_DECODING
    sets: Mapping[str, Callable[[], Sequence[Row]]] = field(default_factory=dict)
    """The rows of a split, if the protocol has its own."""

    def completion(self, text: str) -> str:
        """A `tagged_completion` with this protocol's tag and without its prefill."""
        return (PREFILL + text).replace("reasoning>", f"{self.tag}>").removeprefix(self.prefill)


AnyProtocol = TypeVar("AnyProtocol")


def protocol_named(protocols: Mapping[str, AnyProtocol], name: str) -> AnyProtocol:
    if name not in protocols:
        raise ValueError(f"unknown protocol {name!r}; known: {', '.join(protocols)}")
    return protocols[name]


def answer_form(answer: str, reasoning: str = "your reasoning, step by step") -> str:
    """The form that a prompt asks for."""
    return SKELETON.format(reasoning=reasoning, answer=answer)


def tagged_completion(reasoning: str, answer: str) -> str:
    """A completion in the form that the prompts ask for; its opening tag is the prefill."""
    return answer_form(answer, reasoning).removeprefix(PREFILL)


def think_protocol(
    prompt: Callable[[Row], str],
    grade: Callable[[Row, str], Grade],
    instruction: str,
    answer: str,
    sets: Mapping[str, Callable[[], Sequence[Row]]] | None = None,
) -> Protocol:
    """A protocol like AGRPO's: the instruction is a system turn, and reasoning is in <think>. The wording and the
    grader are ours: AGRPO's are not known here."""
    form = answer_form(answer).replace("reasoning>", "think>")
    system = f"{instruction} Write your answer in exactly this form:\n{form}"
    return Protocol(prompt, grade, prefill="", system=system, tag="think", sets=sets or {})


def boxed_prompt(problem: str, content: str) -> str:
    r"""Our prompt for GSM8K and MATH500; `content` describes what the \boxed{...} must contain."""
    form = answer_form(f"\\boxed{{{content}}}")
    return f"{problem}\n\nSolve this problem. Write your answer in exactly this form:\n{form}"


def d1_boxed_prompt(problem: str, stray: str = "") -> str:
    """Reconstructed from a description of d1's prompt, not copied: its hash differs from d1's. `stray` follows the
    sentence about the box."""
    return (
        "You are a math expert. You will be given a question to solve. Solve it step by step. "
        f"Wrap the final answer in a \\boxed{{}}.{stray} \nRespond in the following format:\n"
        + answer_form("\\boxed{...}", "Your reasoning here")
        + f"\n\n{problem}"
    )


def brevity(completion: str, budget: int) -> float:
    """1 for an empty completion, 0 from `budget` characters, counted up to the first end token."""
    return max(0.0, 1 - len(text_before_end(completion).strip()) / budget)


class TextTask(DataTask):
    """A task in natural language: solved if the grader gives all points."""

    text = True
    length = 256

    def solved(self, row: Row, completion: str) -> bool:
        grade = self.grade(row, completion)
        return 0 < grade.out_of == grade.points

    def credit(self, row: Row, completion: str) -> float:
        """The partial credit of a wrong completion."""
        return 0.0

    def in_form(self, completion: str) -> bool:
        """Whether a completion has the form that the prompt asks for."""
        raise NotImplementedError

    def correctness(self, row: Row, completion: str) -> float:
        return 1.0 if self.solved(row, completion) else self.credit(row, completion)

    def standard_parts(self) -> dict[str, RewardPart]:
        """Correctness, format and length; by default correctness alone counts."""

        def length(row: Row, completion: str) -> float:
            return brevity(completion, CHARACTERS * self.length) if self.solved(row, completion) else 0.0

        return {
            "correctness": RewardPart(self.correctness, 1.0),
            "format": RewardPart(lambda row, completion: float(self.in_form(completion)), 0.0),
            "length": RewardPart(length, 0.0),
        }


class ProtocolTask(TextTask):
    """A task in natural language with protocols and tagged answers."""

    protocols: ClassVar[Mapping[str, Protocol]]
    d1_parts: ClassVar[Mapping[str, RewardPart]]
    """The parts of d1's reward; they read the prefill too."""

    def __init__(
        self,
        data: str = "",
        test_data: str = "",
        protocol: str = "unmask",
        rewards: Rewards = "unmask",
        weights: Weights = None,
    ) -> None:
        self.protocol, self.rules = protocol, protocol_named(self.protocols, protocol)
        if rewards == "d1" and "d1_train" in self.protocols and protocol != "d1_train":
            raise ValueError(
                f"{self.name}.rewards=d1 rewards an answer without a box, and only {self.name}.protocol=d1_train "
                f"asks for one; set that, or {self.name}.rewards=unmask"
            )
        super().__init__(data, test_data)
        self.prefill, self.system, self.decoding = self.rules.prefill, self.rules.system, self.rules.decoding
        self.rewards = rewards

        def with_prefill(part: RewardPart) -> RewardPart:
            return part._replace(value=lambda row, completion: part.value(row, self.prefill + completion))

        d1_parts = {name: with_prefill(part) for name, part in self.d1_parts.items()}
        self.set_reward_parts(d1_parts if rewards == "d1" else self.standard_parts(), weights)

    def prompt(self, row: Row) -> str:
        return self.rules.prompt(row)

    def grade(self, row: Row, completion: str) -> Grade:
        return self.rules.grade(row, completion)

    def solution(self, row: Row) -> str:
        return self.rules.completion(self.tagged_solution(row))

    def tagged_solution(self, row: Row) -> str:
        """The solution of a row as a `tagged_completion`."""
        raise NotImplementedError

    def behaviour(self, row: Row, completion: str, solved: bool) -> str:
        """As in `Task`, by the answers that the grader reads; the reasoning may differ."""
        if solved or not self.behaviours:
            return super().behaviour(row, completion, solved)
        answer = self.grade(row, completion).answer
        names = (name for name, wrong in self.behaviours.items() if self.grade(row, wrong(row)).answer == answer)
        return next(names, "other")

    def in_form(self, completion: str) -> bool:
        return in_form((self.prefill + completion).replace(f"{self.rules.tag}>", "reasoning>"))

    def published_rows(self, split: str) -> Sequence[Row]:
        return self.rules.sets[split]() if split in self.rules.sets else self.default_rows(split)

    def default_rows(self, split: str) -> Sequence[Row]:
        """The rows of a split without a file or rows of the protocol."""
        raise NotImplementedError


class TextPuzzle(ProtocolTask):
    """A puzzle in words: generated, or from files.

    With a test file only, generated training rows that share a key with one of its rows are left out.
    """

    generator: Task

    def __init__(
        self, data: str, test_data: str, protocol: str, partial: float, rewards: Rewards, weights: Weights
    ) -> None:
        self.partial = valid_partial(self.name, partial)
        if partial and rewards == "d1":
            raise ValueError("partial: d1's rewards define the credit of a wrong answer; remove partial")
        super().__init__(data, test_data, protocol, rewards, weights)
        self.fixed = bool(data or test_data or self.rules.sets)

    def set_generator(self, generator: Task) -> None:
        """Set the generator of the puzzles. Its behaviours become worked solutions in the task's form."""

        def in_words(answer: Callable[[Row], str]) -> Callable[[Row], str]:
            return lambda row: self.solution({**row, "solution": answer(self.generator_row(row))})

        self.generator = generator
        self.behaviours = {name: in_words(answer) for name, answer in generator.behaviours.items()}

    def generator_row(self, row: Row) -> Row:
        """The row as the generator makes it."""
        return row

    def generated_rows(self, split: str, n: int, seed: int) -> list[Row]:
        return self.generator.rows(split, n, seed)

    def default_rows(self, split: str) -> Sequence[Row]:
        return self.generated_rows(split, HELD_OUT, 0)

    def rows(self, split: str, n: int, seed: int) -> list[Row]:
        if self.data or self.rules.sets:
            return super().rows(split, n, seed)
        if not self.test_data:
            return self.generated_rows(split, n, seed)
        if split == "test":
            return self.split_rows(split)[:n]
        count = max(n, 16)
        while True:
            rows = self.without_test_keys(self.generated_rows(split, count, seed))
            if len(rows) >= n:
                return rows[:n]
            if count > 64 * max(n, 16):
                raise ValueError(f"{self.test_data} leaves too few puzzles to train on: set data=FILE.jsonl")
            count *= 2
