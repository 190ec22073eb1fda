"""MBPP (arXiv:2108.07732): write a Python function from a sentence and its three assertions.

A row is {text, code, test_list, test_setup_code, task_id}, of the sanitized set {prompt, code, test_list, test_imports,
task_id}. Splits are those of the authors, where a file says them; three training problems that ask what a test problem
asks (602, 704, 872) are left out. The assertions are shown in the prompt, as the authors do: without them the name of
the function cannot be known.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial as bound

from unmask.sandbox import ProgramJob
from unmask.tasks.support.composite import Weights
from unmask.tasks.support.data import Wanted, hub_rows
from unmask.tasks.support.manner import JUSTGRPO
from unmask.tasks.support.programs import ProgramProtocol, checked_timeout, interface, program_of, program_task
from unmask.tasks.support.protocol import chosen
from unmask.tasks.support.sources import Shape, set_rows
from unmask.tasks.support.split import hashed_split
from unmask.tasks.task import About, Row, Task

HUB = "google-research-datasets/mbpp"
ASKED_IN_THE_TEST = (602, 704, 872)  # training problems with the text of 217, 248 and 216
WANTED: Wanted = {"text": str, "code": str, "test_list": list}
WANTED_SANITIZED: Wanted = {"prompt": str, "code": str, "test_list": list}

ABOUT = About(
    source=f"the hub: {HUB}; or JSONL files in the shape of the published ones",
    apart="as published; three training problems that the test asks too are left out",
    example={
        "text": "Write a function to add two numbers.",
        "prompt": "Write a function to add two numbers.",
        "code": "def add(a, b):\n    return a + b",
        "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(-1, 1) == 0"],
    },
    needs=("unmask[data], for the hub", "the sandbox (unmask doctor)"),
)


def task(
    data: str = "",
    test_data: str = "",
    sanitized: bool = False,
    protocol: str = "unmask",
    partial: bool = False,
    timeout: float = 10.0,
    weights: Weights = None,
) -> Task:
    """Functions to write, run in the sandbox. `sanitized` takes the 427 rows that were checked by hand; `timeout` is
    the seconds of a test, of which problem 123's reference needs several; `partial` rewards the share of tests passed,
    `weights` weighs the parts of the reward.
    """
    shape = Shape(WANTED_SANITIZED if sanitized else WANTED, _checked, _question, _split)
    seconds = checked_timeout(timeout)
    name = "MBPP, sanitized" if sanitized else "MBPP"
    return program_task(
        name="mbpp",
        summary=f"{name}: write a Python function; graded by its tests in the sandbox",
        length=256,
        rows=set_rows("mbpp", data, test_data, shape, bound(_hub, sanitized)),
        protocol=chosen(PROTOCOLS, protocol),
        tests=lambda row, program: job(row, program, seconds),
        partial=partial,
        weights=weights,
        stored=shape.row,
        about=replace(
            ABOUT,
            sizes={"train": 119, "test": 257} if sanitized else {"train": 371, "test": 500},
            protocols=tuple(PROTOCOLS),
        ),
    )


def _hub(sanitized: bool, split: str) -> Sequence[Row]:
    rows = hub_rows(HUB, "sanitized" if sanitized else "full", split)
    return [row for row in rows if split == "test" or row["task_id"] not in ASKED_IN_THE_TEST]


def _question(row: Row) -> str:
    return row["prompt"] if "prompt" in row else row["text"]


def _split(row: Row) -> str | None:
    """The authors' split where the row says it."""
    if row.get("split") == "train" and row.get("task_id") in ASKED_IN_THE_TEST:
        return None
    return row["split"] if "split" in row else hashed_split(_question(row))


def _checked(row: Row) -> Row:
    if not row["test_list"] or not all(isinstance(test, str) and "assert" in test for test in row["test_list"]):
        raise ValueError("its test_list must be a list of assertions")
    setup, imports = row.get("test_setup_code", ""), row.get("test_imports", [])
    if not isinstance(setup, str) or not isinstance(imports, list) or any(type(each) is not str for each in imports):
        raise ValueError("its test_setup_code must be a text and its test_imports a list of texts")
    job(row, "", 1.0)  # reads them all as Python
    return row


def job(row: Row, program: str, timeout: float) -> ProgramJob:
    setup = "\n".join([row.get("test_setup_code", ""), *row.get("test_imports", [])])
    tests = tuple(row["test_list"])
    names, setup = interface(row["code"], setup, tests)
    return ProgramJob(program, tests, names, setup, timeout)


def _name(row: Row) -> str:
    """The function that the first test calls: of the names it takes from the program, the first that it writes."""
    names, _ = interface(row["code"], "", tuple(row["test_list"]))
    return min(names, key=lambda name: row["test_list"][0].find(name), default="")


def _paper_prompt(row: Row) -> str:
    tests = "\n".join(row["test_list"])
    return (
        f"You are an expert Python programmer, and here is your task: {_question(row)} "
        f"Your code should pass these tests:\n\n{tests}\n[BEGIN]\n"
    )


PROTOCOLS = {
    "unmask": ProgramProtocol(
        prompt=lambda row: (
            f"{_question(row).strip()}\nAnswer with Python code in one block. It must pass these tests:\n\n"
            "```python\n" + "\n".join(row["test_list"]) + "\n```"
        ),
        program=lambda row, completion: program_of(completion, _name(row)),
        solution=lambda row: f"```python\n{row['code'].strip()}\n```",
    ),
    # the paper's, without its three examples
    "paper": ProgramProtocol(
        prompt=_paper_prompt,
        program=lambda row, completion: program_of(completion, _name(row)),
        solution=lambda row: f"{row['code'].strip()}\n[DONE]",
    ),
}
PROTOCOLS["justgrpo"] = replace(PROTOCOLS["unmask"], manner=JUSTGRPO)
