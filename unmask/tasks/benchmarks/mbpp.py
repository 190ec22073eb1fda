"""MBPP (arXiv:2108.07732): write a Python function from a sentence and its three assertions.

A row is {text, code, test_list, test_setup_code, task_id}, in the sanitized set {prompt, code, test_list, test_imports,
task_id}. The splits are the authors', if a file names them; three training problems that repeat a test problem (602,
704, 872) are left out. The prompt shows the assertions, like the authors': they have the name of the function.
"""

from collections.abc import Sequence
from dataclasses import replace

from unmask.sandbox import ProgramJob
from unmask.tasks.support.data import hub_rows
from unmask.tasks.support.programs import ProgramProtocol, ProgramTask, interface, program_of
from unmask.tasks.support.protocol import JUSTGRPO_DECODING
from unmask.tasks.support.split import hashed_split
from unmask.tasks.task import About, Row, Weights

HUB = "google-research-datasets/mbpp"
ASKED_IN_THE_TEST = (602, 704, 872)  # training problems with the text of 217, 248 and 216


def _question(row: Row) -> str:
    return row["prompt"] if "prompt" in row else row["text"]


def program_job(row: Row, program: str, timeout: float) -> ProgramJob:
    setup = "\n".join([row.get("test_setup_code", ""), *row.get("test_imports", [])])
    tests = tuple(row["test_list"])
    names, setup = interface(row["code"], setup, tests)
    return ProgramJob(program, tests, names, setup, timeout)


def _name(row: Row) -> str:
    """The function that the first test calls: the first name in it that comes from the program."""
    names, _ = interface(row["code"], "", tuple(row["test_list"]))
    return min(names, key=lambda name: row["test_list"][0].find(name), default="")


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
        prompt=lambda row: (
            f"You are an expert Python programmer, and here is your task: {_question(row)} "
            "Your code should pass these tests:\n\n" + "\n".join(row["test_list"]) + "\n[BEGIN]\n"
        ),
        program=lambda row, completion: program_of(completion, _name(row)),
        solution=lambda row: f"{row['code'].strip()}\n[DONE]",
    ),
}
PROTOCOLS["justgrpo"] = replace(PROTOCOLS["unmask"], decoding=JUSTGRPO_DECODING)

ABOUT = About(
    source=f"the hub: {HUB}; or JSONL files in the shape of the published ones",
    separation="as published; three training problems that are also in the test are left out",
    example={
        "text": "Write a function to add two numbers.",
        "prompt": "Write a function to add two numbers.",
        "code": "def add(a, b):\n    return a + b",
        "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(-1, 1) == 0"],
    },
    protocols=tuple(PROTOCOLS),
    needs=("unmask[data], for the hub", "the sandbox (unmask doctor)"),
)


class Mbpp(ProgramTask):
    """Functions to write, run in the sandbox. `sanitized` selects the 427 rows that were checked by hand; `timeout` is
    the seconds of a test (problem 123's reference needs several); `partial` rewards the share of passed tests;
    `weights` weighs the parts of the reward.
    """

    name = "mbpp"
    length = 256
    protocols = PROTOCOLS
    job = staticmethod(program_job)

    def __init__(
        self,
        data: str = "",
        test_data: str = "",
        sanitized: bool = False,
        protocol: str = "unmask",
        partial: bool = False,
        timeout: float = 10.0,
        weights: Weights = None,
    ) -> None:
        super().__init__(data, test_data, protocol, partial, timeout, weights)
        self.sanitized = sanitized
        self.row_fields = {"prompt" if sanitized else "text": str, "code": str, "test_list": list}
        title = "MBPP, sanitized" if sanitized else "MBPP"
        self.summary = f"{title}: write a Python function; graded by its tests in the sandbox"
        self.about = replace(ABOUT, sizes={"train": 119, "test": 257} if sanitized else {"train": 371, "test": 500})

    def parse_row(self, row: Row) -> Row:
        if not row["test_list"] or not all(isinstance(test, str) and "assert" in test for test in row["test_list"]):
            raise ValueError("its test_list must be a list of assertions")
        setup, imports = row.get("test_setup_code", ""), row.get("test_imports", [])
        if not isinstance(setup, str) or not isinstance(imports, list) or any(type(one) is not str for one in imports):
            raise ValueError("its test_setup_code must be a string and its test_imports a list of strings")
        program_job(row, "", 1.0)  # parses all of them as Python
        return row

    def key(self, row: Row) -> str:
        return _question(row)

    def split_of(self, row: Row) -> str | None:
        """The authors' split if the row names it."""
        if row.get("split") == "train" and row.get("task_id") in ASKED_IN_THE_TEST:
            return None
        return row["split"] if "split" in row else hashed_split(_question(row))

    def published_rows(self, split: str) -> Sequence[Row]:
        rows = hub_rows(HUB, "sanitized" if self.sanitized else "full", split)
        return [row for row in rows if split == "test" or row["task_id"] not in ASKED_IN_THE_TEST]
