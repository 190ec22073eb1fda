"""Hostile and odd inputs, each with what it gets: tests/corpus holds them, tests/corpus_runners.py says how to read it.

A refusal is a ValueError of one line that names the offending key, value, file or line, and no path of the machine.
"""

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from corpus_runners import (
    KINDS,
    Case,
    agrees,
    cases,
    configured,
    content,
    data,
    given,
    golden,
    model_loaded,
    named,
    points,
    rows_read,
    text,
    whole_models,
)
from unmask import sandbox
from unmask.tasks import TASKS
from wording import mentions

PATIENCE = 20  # seconds for a case on a busy machine; most take milliseconds
RUN = {"humaneval", "mbpp", "code_mini"}  # tasks whose answers are run
OPTIONAL = {"reasoning_gym", "own"}  # a package that is not there, and no grader of ours


def each(kind: str) -> Any:
    return pytest.mark.parametrize("case", cases(kind), ids=[named(case) for case in cases(kind)])


@pytest.fixture(autouse=True)
def soon() -> Iterator[None]:
    """A case that hangs fails instead."""

    def late(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"more than {PATIENCE} seconds")

    assert threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(PATIENCE)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    whole_models(folder)
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def programs_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with a sandbox: what these cases get comes before any program is run."""
    monkeypatch.setattr(sandbox, "problem", lambda: "")


def check(said: str, case: Case, here: Path) -> None:
    """That a message is one line that names what it must, and no place of the machine."""
    said = said.replace(f"{here}/", "").replace(str(here), ".")
    assert agrees(said, case), said
    assert len(said) > 15 and "\n" not in said and "Traceback" not in said
    places = (str(Path(__file__).parents[1]), str(Path.home()), "/home", "/tmp", "site-packages")
    assert not any(place in said for place in places), said


def refused(call: Callable[[Case, Path], None], case: Case, folder: Path, here: Path) -> None:
    with pytest.raises(ValueError) as caught:
        call(case, folder)
    assert caught.type is ValueError, "an error of another library"
    check(str(caught.value), case, here)


@each("configs")
def test_a_configuration_is_refused(case: Case, here: Path) -> None:
    refused(configured, case, here, here)


@each("rows")
def test_a_data_file_is_refused(case: Case, here: Path, programs_run: None) -> None:
    refused(rows_read, case, here, here)


@each("models")
def test_a_model_is_refused(case: Case, here: Path, models: Path) -> None:
    refused(model_loaded, case, models, here)


@each("completions")
def test_a_completion_earns_what_it_is_worth(case: Case) -> None:
    try:
        earned = points(case)
    except sandbox.SandboxUnavailable as missing:
        pytest.skip(str(missing))
    assert earned == case["points"]


@pytest.mark.parametrize("task", sorted(TASKS.keys() - OPTIONAL - RUN))
def test_hostile_completions_earn_nothing_from_any_grader(task: str) -> None:
    protocols = TASKS[task]().about.protocols or [None]
    for protocol in protocols:
        options = {} if protocol is None else {"options": {"protocol": protocol}}
        for hostile in content("completions")["hostile"]:
            assert points({"task": task, "text": hostile, **options}) == 0, (protocol, str(hostile)[:80])


@pytest.mark.skipif(bool(sandbox.problem()), reason=sandbox.problem() or "programs can be run")
@pytest.mark.parametrize("task", sorted(RUN))
def test_hostile_completions_are_no_programs_either(task: str) -> None:
    built = TASKS[task]()
    row = content("completions")["rows"].get(task) or built.about.example
    texts = [text(hostile) for hostile in content("completions")["hostile"]]
    built.prepare([row] * len(texts), texts)
    assert [built.grade(row, each).points for each in texts] == [0] * len(texts)


@each("commands")
def test_a_command_line_is_refused(
    case: Case,
    unmask: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    programs_run: None,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as without the extra, also where TRL has brought it
    for name, written in content("commands")["files"].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data(written if isinstance(written, dict) else {"text": written}))
    before = sorted(tmp_path.rglob("*"))
    code, out, err = unmask(*case["line"].split(" "))
    header = out.count("\n") <= 2 and out.startswith("training ")  # of a run whose model or task is then refused
    assert code == 2 and (not out or (header and case["line"].startswith("train"))) and err.startswith("unmask")
    check(err.removesuffix("\n"), case, tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_corpus_is_as_large_as_it_should_be() -> None:
    distinct = {kind: len({json.dumps(given(case)) for case in cases(kind)}) for kind in KINDS}
    assert distinct == {kind: len(cases(kind)) for kind in KINDS}
    assert sum(distinct.values()) >= 1200 and min(distinct.values()) >= 180, distinct


def test_only_golden_cases_fix_a_whole_message_and_the_others_name_something() -> None:
    fixed = sum(len(golden(kind)) for kind in KINDS)
    assert 80 <= fixed <= 120
    assert fixed == sum("says" in case for kind in KINDS for case in cases(kind))
    assert all(case.get("names") or "says" in case for kind in KINDS for case in cases(kind) if "points" not in case)


def test_a_name_is_a_word_of_the_message_and_not_a_part_of_one() -> None:
    assert mentions("rollout.steps: 17 is too many", "steps") and mentions("steps=-1.0 must be above 0", "-1")
    assert not mentions("the steps", "step") and not mentions("got 117", "17")
    assert mentions("rows.jsonl line 3 is not JSON", "rows.jsonl:3") and mentions("rows.jsonl:3: no", "rows.jsonl:3")
    assert not mentions("rows.jsonl line 13 is not JSON", "rows.jsonl:3")
