"""What the tasks that ask for programs share: rows, the program in a completion, and its verdicts.

A completion is text from a model. It is searched for a program here, and never executed but in the sandbox.
"""

import ast
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from unmask import sandbox
from unmask.sandbox import ProgramJob, Verdict
from unmask.sandbox.tests import names_read, names_wanted, parsed
from unmask.tasks.support.composite import Weights, composite, standard
from unmask.tasks.support.protocol import Rules
from unmask.tasks.support.sources import Rows
from unmask.tasks.task import About, Grade, Row, Task

LONGEST = 20_000  # characters of a completion that are read
KEPT = 8192  # programs whose verdicts are remembered: reward, solved and grade ask for the same

FENCED = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
CODE_LINE = re.compile(r"^(?:def|class|import|from|async def|@\w)\b", re.MULTILINE)
# HumanEval's own rule for where the continuation of a function ends, and the marks of a chat around it
STOP = re.compile(r"\n(?=class\b|def\b|#|if\b|print\b|```)")
TURN_END = re.compile(r"<\|[a-z_]{1,40}\|>|\[DONE\]")


@dataclass(frozen=True)
class ProgramProtocol(Rules):
    """How a row is asked, which program a completion is, and a completion that is right."""

    prompt: Callable[[Row], str]
    program: Callable[[Row, str], str]
    solution: Callable[[Row], str]


def checked_timeout(timeout: float) -> float:
    if not 0 < timeout <= 3600:
        raise ValueError(f"timeout must be a number of seconds above 0 and at most 3600, not {timeout}")
    return timeout


def fenced_block(text: str, name: str) -> str | None:
    """The first block between fences that defines `name`, or else the first; None without any."""
    blocks = FENCED.findall(text)
    return next((block for block in blocks if defines(block, name)), blocks[0] if blocks else None)


def one_block(completion: str) -> bool:
    """Whether there is one block between fences, closed and with something in it, and no other."""
    text = read(completion)
    block = FENCED.search(text)
    return text.count("```") == 2 and block is not None and bool(block[1].strip())


def defines(text: str, name: str) -> bool:
    return re.search(rf"^(?:async )?(?:def|class)[ \t]+{re.escape(name)}\b", text, re.MULTILINE) is not None


def read(completion: str) -> str:
    """As much of a completion as is read: one turn, of bounded length."""
    return TURN_END.split(completion[:LONGEST], maxsplit=1)[0]


def program_of(completion: str, name: str) -> str:
    """The program in an answer: a fenced block, or the text from its first line of code on; empty where neither is."""
    text = read(completion)
    block = fenced_block(text, name)
    if block is not None:
        return block
    start = CODE_LINE.search(text)
    return text[start.start() :] if start else ""


def continuation(text: str) -> str:
    """A function's body as it goes on from its header, up to where something else begins."""
    return STOP.split(text, maxsplit=1)[0]


def refusing(rows: Rows, task: str) -> Rows:
    """Rows that are not to be had where programs cannot be run: refused before anything is trained or asked."""

    def checked(split: str, n: int, seed: int) -> list[Row]:
        if told := sandbox.problem():
            raise sandbox.Unavailable(f"{task}: {told}")
        return rows(split, n, seed)

    return checked


@cache
def interface(code: str, setup: str, tests: tuple[str, ...]) -> tuple[dict[str, str], str]:
    """(names, set-up): what these tests take from a program such as the reference `code`, and what they need besides.

    The reference tells which names are the program's, also where one is called `sum`; a program cannot bring another
    `abs` or `math` into its tests. Modules that the reference imports and the tests use are imported for the tests.
    """
    used = names_read(setup, *tests)
    defined: set[str] = set()
    imports: dict[str, str] = {}
    for statement in parsed(code).body:
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
    wanted = names_wanted(setup, tests)
    names = {name: name for name in used if name in defined or name in wanted}
    return names, seeded(setup, tests)


def seeded(setup: str, tests: Iterable[str]) -> str:
    """The set-up with random numbers begun anew where tests draw some: the same program gets the same verdict."""
    return f"import random\nrandom.seed(0)\n{setup}" if any("random" in text for text in (setup, *tests)) else setup


class ProgramRunner:
    """Judges completions, many at a time, and remembers what it judged."""

    def __init__(self, job: Callable[[Row, str], ProgramJob]) -> None:
        self.job = job
        self.known: dict[tuple[str, tuple[str, ...], str], list[Verdict]] = {}

    def verdicts(self, rows: Sequence[Row], completions: Sequence[str]) -> list[list[Verdict]]:
        jobs = [self.job(row, completion) for row, completion in zip(rows, completions, strict=True)]
        keys = [(job.program, tuple(job.tests), job.setup) for job in jobs]
        new = {key: job for key, job in zip(keys, jobs, strict=True) if key not in self.known}
        found = dict(zip(new, sandbox.run_many(new.values()), strict=True)) if new else {}
        answer = [self.known.get(key) or found[key] for key in keys]
        if len(self.known) + len(found) > KEPT:
            self.known.clear()
        self.known.update(found)
        return answer

    def share(self, row: Row, completion: str) -> tuple[int, int]:
        """(passed, all) tests; none where there is no program."""
        job = self.job(row, completion)
        if not job.program.strip():
            return 0, len(job.tests)
        verdicts = self.verdicts([row], [completion])[0]
        return sum(verdict.passed for verdict in verdicts), len(verdicts)

    def told(self, row: Row, completion: str) -> str:
        """How many tests pass, and why the first that does not fails."""
        passed, total = self.share(row, completion)
        if not self.job(row, completion).program.strip():
            return "no program was found"
        failed = [verdict.reason for verdict in self.verdicts([row], [completion])[0] if not verdict.passed]
        return f"{passed} of {total} tests pass" + (f"; {failed[0]}" if failed else "")


def program_task(
    *,
    name: str,
    summary: str,
    length: int,
    rows: Rows,
    protocol: ProgramProtocol,
    tests: Callable[[Row, str], ProgramJob],
    partial: bool,
    weights: Weights,
    about: About,
    stored: Callable[[Row], Row],
) -> Task:
    """A task whose answers are programs: solved if all tests pass, partly rewarded by their share if asked for.

    tests(row, program) is the job of a row. The format is one block of code.
    """
    bench = ProgramRunner(lambda row, completion: tests(row, protocol.program(row, completion)))

    def solved(row: Row, completion: str) -> bool:
        passed, total = bench.share(row, completion)
        return passed == total > 0

    def reward(row: Row, completion: str) -> float:
        passed, total = bench.share(row, completion)
        return passed / total if partial and total else float(passed == total > 0)

    def grade(row: Row, completion: str) -> Grade:
        return Grade(float(solved(row, completion)), 1.0, protocol.program(row, completion))

    task = Task(
        name=name,
        summary=summary,
        length=length,
        rows=refusing(rows, name),
        prompt=protocol.prompt,
        solution=protocol.solution,
        reward=reward,
        solved=solved,
        text=True,
        fixed=True,
        grade=grade,
        verdict=bench.told,
        ahead=bench.verdicts,
        stored=stored,
        protocol=protocol.name,
        manner=protocol.manner,
        about=about,
    )
    return composite(task, standard(task, one_block), weights)
