"""Programs that reach for the machine, for other processes, for their test or for its verdict: none gets hold of it.

The programs are in tests/corpus/programs.yaml; tests/test_sandbox_attacks.py has those that need something set up.
"""

import gc
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from test_sandbox_attacks import EXHAUSTIONS, EXPECTED, FORGERIES, leftovers

from unmask import sandbox
from unmask.sandbox import ProgramJob, Verdict

pytestmark = pytest.mark.skipif(bool(sandbox.problem()), reason=sandbox.problem() or "programs can be run")

LISTED = yaml.safe_load((Path(__file__).parent / "corpus" / "programs.yaml").read_text())
PROGRAMS = {each["name"]: each for each in LISTED}
HERE = {name for name, each in PROGRAMS.items() if each.get("machine") in (None, platform.machine())}
TEST = f"assert answer(3) in (True, {EXPECTED})"
MISTAKES = ("SyntaxError", "IndentationError", "NameError", "ImportError", "ModuleNotFoundError", "AttributeError")


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdict]:
    jobs = [ProgramJob(PROGRAMS[name]["program"], [TEST], timeout=2) for name in sorted(HERE)]
    return {name: verdict for name, [verdict] in zip(sorted(HERE), sandbox.run_many(jobs), strict=True)}


@pytest.mark.parametrize("name", sorted(HERE))
def test_what_is_reached_for_is_not_had(name: str, verdicts: dict[str, Verdict]) -> None:
    assert not verdicts[name].passed
    assert not any(mistake in verdicts[name].reason for mistake in MISTAKES), verdicts[name].reason  # it did try


def test_all_that_was_started_is_gone(verdicts: dict[str, Verdict]) -> None:
    assert leftovers() == 0


@pytest.mark.parametrize("name", [name for name, each in PROGRAMS.items() if each.get("outside")])
def test_without_a_sandbox_it_would_be_had(name: str) -> None:
    ask = "\nimport os\nos._exit(0 if answer(3) is True else 1)"
    done = subprocess.run([sys.executable, "-c", PROGRAMS[name]["program"] + ask], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_there_are_many_of_them() -> None:
    texts = {*FORGERIES.values(), *EXHAUSTIONS.values(), *(PROGRAMS[name]["program"] for name in HERE)}
    assert len(texts) >= 100


# --- many in a row ------------------------------------------------------------------------------------------


def handles() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_a_queue_of_programs_is_worked_off_and_leaves_nothing() -> None:
    """Sixty: right, wrong, crashing, forking and hanging ones; `make soak` has a thousand."""
    kinds = {
        "def answer(x): return x": True,
        "def answer(x): return x + 1": False,
        "import os\ndef answer(x): os._exit(0)": False,
        "import os\ndef answer(x): return os.fork()": False,
        "def answer(x": False,
        "import os\ndef answer(x):\n    while True: os.pipe()": False,
    }
    sandbox.run("x = 1", ["assert True"])
    before = handles()
    jobs = [ProgramJob(program, ["assert answer(3) == 3"], timeout=5) for program in [*kinds] * 10]
    found = [verdict.passed for [verdict] in sandbox.run_many(jobs, workers=4)]
    assert found == [*kinds.values()] * 10
    assert handles() == before and leftovers() == 0
