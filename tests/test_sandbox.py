"""The sandbox: honest programs get the verdicts that they should, and there is no other way to run one."""

import contextlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from unmask import sandbox
from unmask.sandbox import jail
from unmask.sandbox.filter import MACHINES, seccomp_program
from unmask.sandbox.tests import free_names, with_guards
from unmask.sandbox.verdicts import _probe
from unmask.sandbox.wire import DEEPEST, LARGEST, ProtocolError, pack, unpack
from unmask.util.json_process import Process

needs_sandbox = pytest.mark.skipif(bool(sandbox.problem()), reason=sandbox.problem() or "programs can be run")


def passes(program: str, *tests: str, timeout: float = 5.0, **options) -> list[bool]:
    return [verdict.passed for verdict in sandbox.run(program, tests, timeout=timeout, **options)]


# The codec


def opaque(value):
    raise TypeError(f"not plain: {value!r}")


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters(codec=None))
    | st.binary()
    | st.fractions()
    | st.decimals(allow_nan=False)
    | st.just(range(2, 9, 3))
    | st.sampled_from([int, str, frozenset]),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.lists(inner).map(deque)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.sets(st.integers() | st.text())
        | st.frozensets(st.integers())
    ),
    max_leaves=20,
)


@given(plain)
def test_a_plain_value_comes_back_as_it_went(value):
    again = unpack(pack(value, opaque), opaque)
    assert again == value and type(again) is type(value)


def test_numbers_that_are_easily_lost():
    for value in (float("inf"), -0.0, 2**5000, -(2**5000), True, 1, 1.0, Decimal("1e-30"), Fraction(1, 3), 1j):
        again = unpack(pack(value, opaque), opaque)
        assert again == value and type(again) is type(value)
    assert str(unpack(pack(-0.0, opaque), opaque)) == "-0.0"
    nan = unpack(pack(float("nan"), opaque), opaque)
    assert nan != nan and type(nan) is float


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_foul(data):
    with contextlib.suppress(ProtocolError):
        unpack(data, lambda number, name: None)


def test_values_without_end_are_refused():
    endless: list = []
    endless.append(endless)
    with pytest.raises(ValueError, match="deep"):
        pack(endless, opaque)
    with pytest.raises(ValueError, match="large"):
        pack(["x" * LARGEST, 1], opaque)
    with pytest.raises(ProtocolError):
        unpack(b"l\0\0\0\1" * (DEEPEST + 1) + b"N", opaque)


# Tests as text


def test_what_a_test_takes_from_the_program():
    tests = ("import math\nfor i in range(3):\n    assert math.isclose(f(i), g[i])", "assert sorted(f(1)) == h(x=1)")
    assert free_names("def h(x): return x", tests) == ("f", "g")
    assert "with __held__:" in with_guards("if x:\n    assert f(x)")
    with pytest.raises(ValueError, match="not Python"):
        with_guards("assert assert")


# Honest programs


@needs_sandbox
def test_a_verdict_for_every_test_and_the_reason():
    verdicts = sandbox.run(
        "def f(x):\n    if x > 5:\n        raise ValueError('too much')\n    return x + 1",
        ["assert f(1) == 2", "assert f(1) == 3, 'three'", "assert f(9) == 10", "assert g(1)"],
    )
    assert [verdict.passed for verdict in verdicts] == [True, False, False, False]
    assert verdicts[0].reason == "passed"
    assert "three" in verdicts[1].reason
    assert "ValueError: too much" in verdicts[2].reason
    assert "does not define" in verdicts[3].reason
    assert sandbox.run("x = 1", []) == []


@needs_sandbox
def test_all_kinds_of_values_go_through():
    value = "[1, (2.5, None, True), {'a': {3}, 4: b'5'}, frozenset({6}), 1j, 2**200, range(3), 'é\\ud800', {}, ()]"
    assert (
        passes(
            "def same(x): return x\ndef kind(x): return type(x).__name__",
            f"x = {value}\nassert same(x) == x and [type(a) for a in same(x)] == [type(a) for a in x]",
            "from fractions import Fraction\nassert same(Fraction(1, 3)) == Fraction(1, 3)",
            "from decimal import Decimal\nassert same([Decimal('0.1')]) == [Decimal('0.1')]",
            "from collections import deque\nassert same(deque([1])) == deque([1]) and kind(deque()) == 'deque'",
            "assert same(float('nan')) != same(float('nan'))",
            "assert kind(True) == 'bool' and kind(1.0) == 'float' and same(int) is int",
            "assert same(x=3) == 3",
        )
        == [True] * 7
    )


@needs_sandbox
def test_subclasses_of_plain_data_count_as_what_they_are():
    program = (
        "from collections import Counter, OrderedDict, defaultdict, namedtuple\nfrom enum import IntEnum\n"
        "E = IntEnum('E', 'A B')\nP = namedtuple('P', 'x y')\n"
        "def f(): return [Counter('aab'), OrderedDict(a=1), defaultdict(int, b=2), P(1, 2), E.B]"
    )
    assert passes(program, "assert f() == [{'a': 2, 'b': 1}, {'a': 1}, {'b': 2}, (1, 2), 2]") == [True]


@needs_sandbox
def test_objects_of_the_program_can_be_used_but_not_compared():
    program = (
        "class Node:\n    def __init__(self, data): self.data, self.left = data, None\n"
        "    def __str__(self): return f'<{self.data}>'\n"
        "    def __eq__(self, other): return True\n"
        "def depth(node): return 0 if node is None else 1 + depth(node.left)\n"
        "def count(n):\n    for i in range(n): yield i\n"
        "items = [4, 5]\n"
        "class Bag:\n    def __len__(self): return 2\n    def __getitem__(self, i): return items[i]\n"
    )
    assert (
        passes(
            program,
            "root = Node(1)\nroot.left = Node(2)\nroot.left.left = Node(3)\n"
            "assert depth(root) == 3 == root.left.data + 1",
            "assert str(Node(7)) == '<7>' and Node(1)",
            "assert list(count(3)) == [0, 1, 2] and next(count(2)) == 0 and sum(count(4)) == 6",
            "assert items == [4, 5] and len(Bag()) == 2 and list(Bag()) == [4, 5] and Bag()[1] == 5",
            "assert Node(1) == 5",
            "assert count(2) == [0, 1]",
            "assert {Node(1): 1}",
        )
        == [True] * 4 + [False] * 3
    )


@needs_sandbox
def test_exceptions_that_a_test_expects():
    program = "class Mine(KeyError): pass\ndef f(kind): raise {'k': Mine, 'v': ValueError, 'a': AssertionError}[kind]()"
    expects = "try:\n    f('{}')\nexcept {}:\n    pass\nelse:\n    assert False"
    assert passes(
        program, expects.format("k", "KeyError"), expects.format("v", "KeyError"), expects.format("a", "AssertionError")
    ) == [True, False, False]


@needs_sandbox
def test_changed_arguments_are_seen_after_the_assertion_and_not_in_it():
    program = (
        "def arrange(x, *, more=()):\n    x.sort()\n"
        "def empty(x):\n    x.clear()\n    return x\n"
        "def put(d, s, b):\n    d['k'] = 1\n    s.add(2)\n    b.extend(b'c')\n"
    )
    assert passes(
        program,
        "x = [3, 1, 2]\narrange(x)\nassert x == [1, 2, 3]",
        "x = [3, 1]\nassert arrange(x=x) is None\nassert x == [1, 3]",
        "d, s, b = {}, {1}, bytearray(b'a')\nput(d, s, b)\nassert (d, s, b) == ({'k': 1}, {1, 2}, b'ac')",
        "x = [3, 1, 2]\nassert empty(x) == sorted(x)",
    ) == [True, True, True, False]


@needs_sandbox
def test_every_test_begins_anew_and_random_numbers_are_the_same_each_time():
    program = "import random\ndef draw(): return random.random()\ndef order(): return list({'a', 'b', 'c', 'd', 'e'})"
    told = [sandbox.run(program, ["assert 0, (draw(), order())"])[0].reason for _ in range(2)]
    assert told[0] == told[1] and "0.8444" in told[0]
    assert passes("def f(x): return x", "y = 1\nassert f(y) == 1", "assert f(y) == 1") == [True, False]


@needs_sandbox
def test_a_program_that_hangs_or_ends_is_begun_again_for_its_other_tests():
    program = "import os\ndef f(x):\n    while x == 1: pass\n    if x == 2: os._exit(0)\n    return x"
    tests = [f"assert f({x}) == {x}" for x in (0, 1, 2, 3)]
    verdicts = sandbox.run(program, tests, timeout=1)
    assert [verdict.passed for verdict in verdicts] == [True, False, False, True]
    assert "within 1 s" in verdicts[1].reason and "ended its process" in verdicts[2].reason
    verdicts = sandbox.run(program, [tests[2]] * 5)
    assert not any(verdict.passed for verdict in verdicts) and "not run" in verdicts[4].reason


def descendants(process: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(OSError):
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *descendants(child)]
    return found


@needs_sandbox
def test_a_signal_to_all_of_a_job_is_no_verdict():
    before = set(descendants(os.getpid()))
    with ThreadPoolExecutor(1) as pool:
        judged = pool.submit(sandbox.run, "import time\ndef f():\n    time.sleep(2)\n    return 1", ["assert f() == 1"])
        deadline = time.monotonic() + 20
        while len(jails := set(descendants(os.getpid())) - before) < 4 and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.5)
        for process in jails:
            for number in (signal.SIGTERM, signal.SIGINT):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)
        assert [verdict.passed for verdict in judged.result(30)] == [True]


@needs_sandbox
def test_many_programs_keep_their_order():
    jobs = [sandbox.ProgramJob(f"def f(): return {i}", [f"assert f() == {i}", "assert f() == 3"]) for i in range(6)]
    assert [[v.passed for v in each] for each in sandbox.run_many(jobs, 3)] == [[True, i == 3] for i in range(6)]


@needs_sandbox
def test_threads_are_allowed_and_modules_are_there():
    program = (
        "import re, math, itertools, functools, heapq, bisect, string, datetime, dataclasses, typing, statistics\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "@dataclasses.dataclass\nclass P:\n    x: int\n"
        "def f(n):\n    with ThreadPoolExecutor(4) as pool: return list(pool.map(lambda i: P(i).x ** 2, range(n)))"
    )
    assert passes(program, "assert f(5) == [0, 1, 4, 9, 16]") == [True]


# Where there is no sandbox


def test_it_refuses_where_bubblewrap_is_missing_or_does_not_work(monkeypatch, tmp_path):
    try:
        _probe.cache_clear()
        monkeypatch.setattr(jail.shutil, "which", lambda name: None)
        assert "apt-get install bubblewrap" in sandbox.problem() == sandbox.description()
        with pytest.raises(sandbox.SandboxUnavailable, match="bubblewrap"):
            sandbox.run("x = 1", ["assert x == 1"])
        with pytest.raises(sandbox.SandboxUnavailable, match="bubblewrap"):
            sandbox.run_many([])
        _probe.cache_clear()
        broken = tmp_path / "bwrap"
        broken.write_text("#!/bin/sh\necho 'bwrap: no namespaces for you' >&2\nexit 1\n")
        broken.chmod(0o755)
        tmp_path.chmod(0o755)
        monkeypatch.undo()
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        assert "does not work here" in sandbox.problem()
    finally:
        monkeypatch.undo()
        _probe.cache_clear()


def test_the_filter_is_made_for_known_machines_only():
    for machine in MACHINES:
        assert len(seccomp_program(machine)) % 8 == 0
    with pytest.raises(ValueError, match="riscv64"):
        seccomp_program("riscv64")


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan")])
def test_a_timeout_is_a_number_of_seconds(timeout):
    if not sandbox.problem():
        with pytest.raises(ValueError, match="timeout"):
            sandbox.run("x = 1", ["assert x"], timeout=timeout)


@needs_sandbox
def test_only_python_and_shared_libraries_are_visible():
    interpreter = next(path for path in jail.interpreters() if str(path) in sandbox.description())
    stdlib, libraries = f"lib/{interpreter.name}", f"{platform.machine()}-linux-gnu"
    tests = [
        "assert names('/dev') == ['null'] and names('/etc') in ([], ['ld.so.cache'])",
        f"assert set(names('/')) <= { {'dev', 'etc', 'lib', 'lib64', 'usr', interpreter.parts[1]} }",
        f"assert names({str(interpreter.parent)!r}) == [{interpreter.name!r}]",
        f"assert names({str(interpreter.parents[1] / stdlib / 'site-packages')!r}) == []",
        f"assert names({str(interpreter.parents[1] / stdlib / 'dist-packages')!r}) == []",
    ]
    if Path("/usr/lib", libraries).is_dir() and interpreter.parents[1] == Path("/usr"):  # Debian's own Python
        tests.append(f"assert names('/usr/lib') == {sorted([interpreter.name, libraries])}")
    program = "import os\ndef names(path): return sorted(os.listdir(path)) if os.path.isdir(path) else []"
    assert [verdict.reason for verdict in sandbox.run(program, tests)] == ["passed"] * len(tests)


@needs_sandbox
def test_asyncio_works():
    program = "import asyncio\nasync def later(): return 3\ndef answer(): return asyncio.run(later())"
    assert sandbox.run(program, ["assert answer() == 3"])[0].passed


AS_PID_1 = """
import os
from unmask import sandbox
from unmask.sandbox import ProgramJob

programs = ["def f(x): return x", "def f(x): return 0", "import os; f = os._exit", "def f(x):\\n    while True: pass"]
jobs = [ProgramJob(program, ["assert f(1) == 1"], timeout=0.5) for program in programs]
passed = [verdict.passed for [verdict] in sandbox.run_many(jobs, workers=4)]
own = os.spawnlp(os.P_NOWAIT, "true", "true")
stats = [open(f"/proc/{name}/stat").read() for name in os.listdir("/proc") if name.isdigit() and int(name) != own]
print(os.getpid(), passed, [stat.rpartition(")")[2].split()[0] for stat in stats].count("Z"), os.waitpid(own, 0)[1])
"""


@needs_sandbox
def test_as_the_first_process_of_a_container_it_leaves_no_zombies():
    namespace = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], capture_output=True).returncode:
        pytest.skip("a PID namespace cannot be made here: unshare --pid --fork --mount-proc")
    done = subprocess.run([*namespace, sys.executable, "-c", AS_PID_1], capture_output=True, text=True, timeout=120)
    assert done.stdout == "1 [True, False, False, False] 0 0\n", done.stderr


@needs_sandbox
def test_a_limit_on_processes_is_a_sentence(monkeypatch):
    def full(*_, **options):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    sandbox.problem()
    monkeypatch.setattr("unmask.sandbox.verdicts.RETRY", 0.0)
    monkeypatch.setattr("unmask.util.processes.subprocess.Popen", full)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(sandbox.SandboxUnavailable, match="too many processes; raise the limit"):
        sandbox.run("x = 1", ["assert True"])
    with pytest.raises(ValueError, match="too many processes"):
        Process(["true"], 1.0).ask("x", 1.0)
    assert len(os.listdir("/proc/self/fd")) == before
