"""Tasks whose answers are programs: the program in a completion, which runs in the sandbox only, and its verdicts."""

import ast
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from unmask import sandbox
from unmask.sandbox import ProgramJob, Verdict
from unmask.sandbox.tests import free_names, names_in, parse
from unmask.tasks.support.protocol import TextTask, protocol_named
from unmask.tasks.task import FIELD_DECODING, Grade, ProtocolDecoding, Row, Weights

LONGEST = 20_000  # characters of a completion that are read
MEMORY = 8192  # programs whose verdicts are cached for reward, solved and grade

FENCED = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
CODE_LINE = re.compile(r"^(?:def|class|import|from|async def|@\w)\b", re.MULTILINE)
# HumanEval's rule for the end of a function's continuation, and the end marks of a chat turn
STOP = re.compile(r"\n(?=class\b|def\b|#|if\b|print\b|```)")
TURN_END = re.compile(r"<\|[a-z_]{1,40}\|>|\[DONE\]")


def fenced_block(text: str, name: str) -> str | None:
    """The first fenced block that defines `name`, else the first block; None without any."""
    blocks = FENCED.findall(text)
    return next((block for block in blocks if defines(block, name)), blocks[0] if blocks else None)


def defines(text: str, name: str) -> bool:
    return re.search(rf"^(?:async )?(?:def|class)[ \t]+{re.escape(name)}\b", text, re.MULTILINE) is not None


def first_turn(completion: str) -> str:
    """The first turn of a completion, of bounded length: the part that is read."""
    return TURN_END.split(completion[:LONGEST], maxsplit=1)[0]


def program_of(completion: str, name: str) -> str:
    """The program in an answer: a fenced block, or the text from its first line of code; empty if there is neither."""
    text = first_turn(completion)
    if (block := fenced_block(text, name)) is not None:
        return block
    start = CODE_LINE.search(text)
    return text[start.start() :] if start else ""


def require_sandbox(task: str) -> None:
    """Raise if programs cannot be run, before anything is trained or sampled."""
    if problem := sandbox.problem():
        raise sandbox.SandboxUnavailable(f"{task}: {problem}")


@cache
def interface(code: str, setup: str, tests: tuple[str, ...]) -> tuple[dict[str, str], str]:
    """(names, set-up): the names that the tests take from a program such as the reference `code`, and their set-up.

    The reference decides which names are the program's, even `sum`; a program cannot replace `abs` or `math` in its
    tests. Modules that the reference imports and the tests use are imported for the tests.
    """
    used = names_in(setup, *tests)
    defined: set[str] = set()
    imports: dict[str, str] = {}
    for statement in parse(code).body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(statement.name)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                imports[(alias.asname or alias.name).split(".")[0]] = ast.unparse(statement)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
            defined |= {node.id for node in targets if isinstance(node.ctx, ast.Store)}
    needed = list(dict.fromkeys(imports[name] for name in used if name in imports and name not in defined))
    setup = "\n".join([*needed, setup])
    free = free_names(setup, tests)
    names = {name: name for name in used if name in defined or name in free}
    return names, with_seed(setup, tests)


def with_seed(setup: str, tests: Iterable[str]) -> str:
    """The set-up, with a fixed seed if tests draw random numbers, so a program always gets the same verdict."""
    return f"import random\nrandom.seed(0)\n{setup}" if any("random" in text for text in (setup, *tests)) else setup


class ProgramRunner:
    """Runs the programs in completions in parallel and caches the verdicts."""

    def __init__(self, job: Callable[[Row, str], ProgramJob]) -> None:
        self.job = job
        self.known: dict[tuple[str, tuple[str, ...], str], list[Verdict]] = {}

    def verdicts(self, rows: Sequence[Row], completions: Sequence[str]) -> list[list[Verdict]]:
        jobs = [self.job(row, completion) for row, completion in zip(rows, completions, strict=True)]
        keys = [(job.program, tuple(job.tests), job.setup) for job in jobs]
        new = {key: job for key, job in zip(keys, jobs, strict=True) if key not in self.known}
        fresh = dict(zip(new, sandbox.run_many(new.values()), strict=True)) if new else {}
        verdicts = [self.known.get(key) or fresh[key] for key in keys]
        if len(self.known) + len(fresh) > MEMORY:
            self.known.clear()
        self.known.update(fresh)
        return verdicts

    def passed(self, row: Row, completion: str) -> tuple[int, int]:
        """The number of tests that pass, and of all tests; none passes without a program."""
        job = self.job(row, completion)
        if not job.program.strip():
            return 0, len(job.tests)
        verdicts = self.verdicts([row], [completion])[0]
        return sum(verdict.passed for verdict in verdicts), len(verdicts)

    def summary(self, row: Row, completion: str) -> str:
        """The number of tests that pass, and the reason of the first failure."""
        passed, total = self.passed(row, completion)
        if not self.job(row, completion).program.strip():
            return "no program was found"
        reasons = [verdict.reason for verdict in self.verdicts([row], [completion])[0] if not verdict.passed]
        return f"{passed} of {total} tests pass" + (f"; {reasons[0]}" if reasons else "")


@dataclass(frozen=True)
class ProgramProtocol:
    """The prompt of a row, the program in a completion, and a right completion."""

    prompt: Callable[[Row], str]
    program: Callable[[Row, str], str]
    solution: Callable[[Row], str]
    decoding: ProtocolDecoding = FIELD_DECODING


class ProgramTask(TextTask):
    """A task whose answers are programs: solved if all tests pass; `partial` rewards the share of passed tests."""

    protocols: ClassVar[Mapping[str, ProgramProtocol]]

    def __init__(
        self, data: str, test_data: str, protocol: str, partial: bool, timeout: float, weights: Weights
    ) -> None:
        if not 0 < timeout <= 3600:
            raise ValueError(f"timeout must be a number of seconds above 0 and at most 3600, not {timeout}")
        super().__init__(data, test_data)
        self.protocol, self.rules = protocol, protocol_named(self.protocols, protocol)
        self.decoding, self.partial = self.rules.decoding, partial
        self.runner = ProgramRunner(lambda row, completion: self.job(row, self.rules.program(row, completion), timeout))
        self.set_reward_parts(self.standard_parts(), weights)

    @staticmethod
    def job(row: Row, program: str, timeout: float) -> ProgramJob:
        """The program with the row's tests."""
        raise NotImplementedError

    def rows(self, split: str, n: int, seed: int) -> list[Row]:
        require_sandbox(self.name)
        return super().rows(split, n, seed)

    def prompt(self, row: Row) -> str:
        return self.rules.prompt(row)

    def solution(self, row: Row) -> str:
        return self.rules.solution(row)

    def solved(self, row: Row, completion: str) -> bool:
        passed, total = self.runner.passed(row, completion)
        return passed == total > 0

    def credit(self, row: Row, completion: str) -> float:
        passed, total = self.runner.passed(row, completion)
        return passed / total if self.partial and total else 0.0

    def in_form(self, completion: str) -> bool:
        """Whether there is exactly one fenced block, closed and not empty."""
        text = first_turn(completion)
        block = FENCED.search(text)
        return text.count("```") == 2 and block is not None and bool(block[1].strip())

    def grade(self, row: Row, completion: str) -> Grade:
        return Grade(float(self.solved(row, completion)), 1.0, self.rules.program(row, completion))

    def verdict(self, row: Row, completion: str) -> str:
        return self.runner.summary(row, completion)

    def prepare(self, rows: Sequence[Row], completions: Sequence[str]) -> None:
        self.runner.verdicts(rows, completions)
