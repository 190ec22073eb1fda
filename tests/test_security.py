"""What the library never does: run what it reads, unpickle, fetch code, or hand the user's keys on."""

import ast
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from unmask import sandbox
from unmask.tasks.support import verifier
from unmask.util.json_process import Process

PACKAGE = Path(__file__).resolve().parents[1] / "unmask"
SECRET = "hunter2-a-key-of-the-user"

# Calls by name, and modules that deserialise into code or run it.
CALLS = re.compile(
    r"(builtins\.)?(eval|exec|compile|__import__)|os\.(system|popen|exec\w+|spawn\w+|posix_spawnp?)"
    r"|(pickle|marshal|shelve|dill|cloudpickle|joblib)\.\w+|(torch|np|numpy)\.(load|loads)|torch\.(hub|package|jit)\.\w+"
    r"|yaml\.(load|load_all|full_load|unsafe_load\w*)|subprocess\.(getoutput|getstatusoutput)"
    r"|importlib\.(import_module|util\.spec_from_file_location)|runpy\.\w+|ctypes\.\w+"
)
MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "runpy", "ctypes", "code", "imp"}
KEYWORDS = {"trust_remote_code", "allow_pickle", "weights_only", "shell"}

ALLOWED = {
    ("cli/doctor.py", "importlib.import_module"): "asks whether an optional package of ours can be imported",
    ("util/user_file.py", "importlib.util.spec_from_file_location"): "the user's own task or method, named by the user",
    ("sandbox/judge.py", "exec"): "runs a benchmark's tests, inside a sandbox",
    ("sandbox/judge.py", "compile"): "the same",
    ("sandbox/worker.py", "exec"): "runs the program, inside a sandbox",
    ("sandbox/worker.py", "compile"): "the same",
    ("sandbox/start.py", "import marshal"): "the first lines inside a sandbox: our own files, compiled outside",
    ("sandbox/start.py", "marshal.loads"): "the same",
    ("sandbox/start.py", "exec"): "the same",
}


def doings(tree: ast.AST) -> Iterator[str]:
    """What a source does that is on the lists."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if CALLS.fullmatch(called):
                yield called
            yield from (f"{called}({word.arg}=)" for word in node.keywords if word.arg in KEYWORDS)
        elif isinstance(node, ast.Import):
            yield from (f"import {alias.name}" for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield f"import {node.module}"


def test_the_source_runs_and_unpickles_nothing_but_what_is_listed() -> None:
    found = {
        (path.relative_to(PACKAGE).as_posix(), what)
        for path in PACKAGE.rglob("*.py")
        for what in doings(ast.parse(path.read_text()))
    }
    assert found == set(ALLOWED)


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("eval(x)", "eval"),
        ("import pickle", "import pickle"),
        ("from pickle import loads", "import pickle"),
        ("import torch\ntorch.load(p)", "torch.load"),
        ("yaml.load(t, Loader=L)", "yaml.load"),
        ("os.system('ls')", "os.system"),
        ("subprocess.run(c, shell=True)", "subprocess.run(shell=)"),
        ("AutoModel.from_pretrained(p, trust_remote_code=True)", "AutoModel.from_pretrained(trust_remote_code=)"),
    ],
)
def test_the_search_would_find_it(source: str, what: str) -> None:
    assert what in set(doings(ast.parse(source)))


def test_python_given_to_a_process_as_text_is_what_is_known() -> None:
    """It is not in the trees above."""

    def programs(path: Path) -> int:
        written = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        return sum(isinstance(text, str) and "import " in text and "sys.argv" in text for text in written)

    texts = {path.relative_to(PACKAGE).as_posix(): programs(path) for path in PACKAGE.rglob("*.py")}
    assert {name: count for name, count in texts.items() if count} == {
        "sandbox/jail.py": 2,
        "tasks/own.py": 1,
        "tasks/support/verifier.py": 1,
    }


RUN = """
import sys
unpickled = []
sys.addaudithook(lambda event, arguments: unpickled.append(arguments) if event == "pickle.find_class" else None)
from unmask.cli.main import main
for line in ({train}, ["train", "--resume", "run"], ["eval", "run", "--problems", "2", "--samples", "1"]):
    sys.argv = ["unmask", *line]
    try:
        main()
    except SystemExit as stopped:
        assert not stopped.code, stopped.code
print("unpickled", unpickled)
"""


def test_a_run_unpickles_nothing_and_keeps_no_secret(tmp_path: Path) -> None:
    """Training, a state on the way, resuming and evaluating; then every byte of the run folder."""
    short = ["updates=2", "prompts=2", "group=2", "eval.prompts=2", "eval.samples=1", "save_every=1"]
    environment = {**os.environ, "HF_TOKEN": SECRET, "WANDB_API_KEY": SECRET, "MY_PASSWORD": SECRET}
    code = RUN.replace("{train}", repr(["train", "--out", "run", *short]))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "unpickled []"
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"config.yaml", "run.jsonl", "metrics.jsonl"} <= {path.name for path in files}
    assert not any(SECRET.encode() in path.read_bytes() for path in files)
    assert SECRET not in done.stdout + done.stderr
    line = (tmp_path / "run" / "run.jsonl").read_text().splitlines()[0]
    assert not {name.lower() for name in json.loads(line)["versions"]} & {name.lower() for name in os.environ}


# --- processes of ours --------------------------------------------------------------------------------------


def children_with(secret: str) -> int:
    """Descendants of this process whose environment holds the text."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    mine = {os.getpid()}
    while grown := {pid for pid, parent in parents.items() if parent in mine} - mine:
        mine |= grown
    found = 0
    for pid in mine - {os.getpid()}:
        try:
            found += secret.encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
    return found


@pytest.mark.skipif(bool(sandbox.problem()), reason=sandbox.problem() or "programs can be run")
def test_a_sandboxed_program_has_none_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PASSWORD", SECRET)
    [verdict] = sandbox.run("import os\ndef f(): return sorted(os.environ.items())", ["assert 0, f()"])
    told = ast.literal_eval(verdict.reason.removeprefix("AssertionError: "))
    assert {name for name, _ in told} <= {"PYTHONHASHSEED", "PYTHONSAFEPATH", "LC_ALL", "PWD", "LC_CTYPE"}
    assert SECRET not in verdict.reason


@pytest.mark.skipif(bool(sandbox.problem()), reason=sandbox.problem() or "programs can be run")
def test_nor_has_what_makes_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PASSWORD", SECRET)
    program = "import time\ndef f(): time.sleep(1.5)"
    waiting = threading.Thread(target=sandbox.run, args=(program, ["assert f() is None"]))
    waiting.start()
    time.sleep(0.7)
    found = children_with(SECRET)
    waiting.join()
    assert found == 0
    sleeper = subprocess.Popen(["sleep", "60"], env={**os.environ, "X": SECRET})
    try:
        assert children_with(SECRET) == 1  # it would be seen
    finally:
        sleeper.kill()
        sleeper.wait()


ECHO = """
import json, os, sys
print("true", flush=True)
for line in sys.stdin:
    print(json.dumps(dict(os.environ)), flush=True)
"""


def test_the_process_that_reads_formulas_has_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """It parses what a model wrote. A user's own reward is the user's program, and has the user's environment."""
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    command = [sys.executable, "-c", ECHO]
    seen = {bare: Process(command, 60.0, bare=bare).ask(None, 60.0) for bare in (True, False)}
    assert SECRET not in seen[True].values() and "PATH" in seen[True]
    assert seen[False]["HF_TOKEN"] == SECRET
    calls = [node for node in ast.walk(ast.parse(Path(verifier.__file__).read_text())) if isinstance(node, ast.Call)]
    started = [ast.unparse(call) for call in calls if ast.unparse(call.func) == "Process"]
    assert started and all("bare=True" in call for call in started)
