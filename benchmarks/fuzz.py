"""Coverage-guided fuzzing of everything that reads what we did not write: `make fuzz`, or

    python benchmarks/fuzz.py --seconds 600 [--only config] [--found DIR]

A reader of configurations or data may refuse by ValueError and by nothing else; a grader never raises, and what a
completion earns lies within the reward's range. What breaks that is left in DIR as a file, and is kept as a case of
tests/corpus once it is mended. Begins from the inputs of tests/corpus. Needs atheris: pip install 'unmask[fuzz]'.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests")]
os.environ["HF_HUB_OFFLINE"] = "1"

with atheris.instrument_imports(include=["unmask", "yaml"]):
    from corpus_runners import cases, content, text
    from unmask.config import read_config
    from unmask.evaluation.grade import grade_lines
    from unmask.evaluation.prompt_variants import template_text
    from unmask.sandbox.wire import ProtocolError, pack, unpack
    from unmask.tasks import TASKS
    from unmask.tasks.benchmarks import math500
    from unmask.tasks.support.data import read_rows
    from unmask.tasks.support.programs import fenced_block, first_turn, program_of
    from unmask.tasks.task import Task
    from unmask.util.parsing import parse_yaml

GRADERS = {  # not those that run programs or compare formulas, which have processes of their own
    (name, protocol): TASKS[name](**({"protocol": protocol} if protocol else {}))
    for name in TASKS.keys() - {"humaneval", "mbpp", "code_mini", "reasoning_gym", "own"}
    for protocol in TASKS[name]().about.protocols or [None]
    if not (name == "math500" and protocol != "d1")
}
READERS = ("gsm8k", "math500", "humaneval", "mbpp", "countdown_text", "sudoku_text", "json_schema", "multiple_choice")
FILE = Path(tempfile.mkdtemp()) / "rows.jsonl"


def row_of(name: str, task: Task) -> dict:
    return content("completions")["rows"].get(name) or task.about.example


def refusing(read: Callable[..., object], *arguments: object) -> None:
    try:
        read(*arguments)
    except ValueError as error:
        assert str(error), repr(error)


def config(data: bytes) -> None:
    written = data.decode("utf-8", "surrogateescape")
    refusing(parse_yaml, written, "run.yaml")
    if "own" not in written and ".py" not in written:  # a task of one's own is a program, and is run
        refusing(read_config, None, written.split("\n"))


def rows(data: bytes) -> None:
    FILE.write_bytes(data[1:])
    name = READERS[data[0] % len(READERS)]
    refusing(TASKS[name](data=str(FILE), test_data=str(FILE)).rows, "test", 1, 0)
    refusing(read_rows, FILE, {})


def completion(data: bytes) -> None:
    written = data.decode("utf-8", "surrogateescape")
    for (name, _), task in GRADERS.items():
        row = row_of(name, task)
        grade, outcome = task.grade(row, written), task.outcome(row, written)
        assert task.reward_range is not None and 0 <= grade.points <= grade.out_of
        assert task.reward_range[0] <= outcome.reward <= task.reward_range[1], (name, outcome)
    math500.answer(written), math500.normal(written), math500.words(written)
    program_of(written, "add"), fenced_block(written, "add"), first_turn(written)
    refusing(template_text, written, {"puzzle": "1", "own_prompt": "2"})


def stored(data: bytes) -> None:
    FILE.write_bytes(data[1:])
    name = sorted(GRADERS.keys(), key=str)[data[0] % len(GRADERS)]

    def read() -> None:
        grade_lines(GRADERS[name], [("line", line) for line in read_rows(FILE, {"generation": str})])

    refusing(read)


def wire(data: bytes) -> None:
    """What a sandboxed program answers: a value, which packs again, or a foul."""
    try:
        value = unpack(data, lambda number, name: (number, name))
    except ProtocolError:
        return
    pack(value, lambda other: (0, ""))


TARGETS = {"config": config, "rows": rows, "completion": completion, "stored": stored, "wire": wire}


def seeds(folder: Path) -> None:
    """The corpus as files, each with the number of its target in front."""
    places = {"config": cases("configs"), "rows": cases("rows"), "completion": cases("completions")}
    number = 0
    for target, found in places.items():
        for case in found:
            if "hex" in case or ("text" not in case and "overrides" not in case):
                continue
            body = text(case["text"]) if "text" in case else "\n".join(case["overrides"])
            reader = bytes([READERS.index(case["task"])]) if target == "rows" and case["task"] in READERS else b""
            data = bytes([list(TARGETS).index(target)]) + reader + body[:4000].encode("utf-8", "surrogatepass")
            (folder / f"{number:04}").write_bytes(data)
            number += 1
    for value in ([1, "a", None], {"a": (1.5, b"x")}, {1, 2}, 10**30, complex(1, 2), range(3)):
        (folder / f"{number:04}").write_bytes(bytes([4]) + pack(value, lambda other: (0, "")))
        number += 1


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seconds", type=int, default=600)
    options.add_argument("--only", choices=TARGETS)
    options.add_argument("--found", default="fuzz", help="a folder for inputs that break something")
    chosen = options.parse_args()
    names = [chosen.only] if chosen.only else list(TARGETS)

    def one(data: bytes) -> None:
        if len(data) > 2:
            TARGETS[names[data[0] % len(names)]](data[1:])

    folder = Path(tempfile.mkdtemp())
    seeds(folder)
    Path(chosen.found).mkdir(exist_ok=True)
    flags = [f"-max_total_time={chosen.seconds}", "-max_len=4096", "-timeout=20", "-rss_limit_mb=4096"]
    flags += [f"-artifact_prefix={chosen.found}/", "-print_final_stats=1", "-reload=0"]
    atheris.Setup([sys.argv[0], *flags, str(folder)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
