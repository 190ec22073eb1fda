"""Programs that attack their tests, the sandbox or the machine: each fails, and harms nothing."""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from unmask import sandbox
from unmask.sandbox.filter import MACHINES, REFUSED

pytestmark = pytest.mark.skipif(bool(sandbox.problem()), reason=sandbox.problem() or "programs can be run")

EXPECTED = 918273645  # what an attacker does not know
TEST = f"assert answer(3) == {EXPECTED}"
HERE = Path(__file__)


def passes(program: str, *tests: str, timeout: float = 5.0, **options) -> list[bool]:
    return [verdict.passed for verdict in sandbox.run(program, tests, timeout=timeout, **options)]


FORGERIES = {
    "prints the verdict": "print('passed')\nprint('end 0 passed', flush=True)\ndef answer(x): print('passed')",
    "exits when loaded": "import sys\nsys.exit(0)",
    "exits when called": "import sys\ndef answer(x): sys.exit(0)",
    "ends the process when loaded": "import os\nos._exit(0)",
    "ends the process when called": "import os\ndef answer(x): os._exit(0)",
    "replaces what is built in": (
        "import builtins\nfor name in ('AssertionError', 'Exception'): setattr(builtins, name, SystemExit)\n"
        "builtins.isinstance = lambda *_: True\nbuiltins.exec = builtins.compile = lambda *_: None\n"
        "def answer(x): return True"
    ),
    "replaces the codec": (
        "import sys\nwire = sys.modules['unmask.sandbox.wire']\nrole = sys.modules['unmask.sandbox.role']\n"
        "for module in (wire, role):\n    module.pack = lambda value, opaque: b'T'\n"
        "role.Worker.do_call = lambda *_: True\ndef answer(x): return True"
    ),
    "says that it is equal": (
        "class Liar(int):\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
        "    __hash__ = int.__hash__\ndef answer(x): return Liar(0)"
    ),
    "is an object that is equal to all": (
        "class Liar:\n    def __eq__(self, other): return True\n    def __bool__(self): return True\n"
        "def answer(x): return Liar()"
    ),
    "pretends to be of another class": (
        "class Liar:\n    __class__ = int\n    def __eq__(self, other): return True\n    def __int__(self): return 0\n"
        "    def __ge__(self, other): return True\ndef answer(x): return Liar()"
    ),
    "raises to end the iteration": "def answer(x): raise StopIteration",
    "raises what is no Exception": "def answer(x): raise KeyboardInterrupt",
    "raises something that cannot be shown": (
        "class E(BaseException):\n    def __str__(self): raise SystemExit\ndef answer(x): raise E"
    ),
    "writes verdicts to every open file": (
        "import os\nsaid = b'end 0 passed'\n"
        "def spray():\n    for fd in range(64):\n        for data in (said, len(said).to_bytes(4, 'big') + said):\n"
        "            try: os.write(fd, data)\n            except OSError: pass\nspray()\ndef answer(x): spray()"
    ),
    "answers ahead of the questions": (
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'\\0\\0\\0\\2=T' * 20)\n    except OSError: pass\n"
        "def answer(x): return True"
    ),
    "promises more than it sends": (
        "import os\ndef answer(x):\n    for fd in range(3, 64):\n        try: os.write(fd, b'\\0\\x10\\0\\0=')\n"
        "        except OSError: pass\n    os._exit(0)"
    ),
    "closes everything": "import os\nos.closerange(0, 64)\ndef answer(x): return True",
    "crashes": "import ctypes\ndef answer(x): return ctypes.string_at(0)",
    "recurses without end": "import sys\nsys.setrecursionlimit(10**9)\ndef answer(x): return answer(x)",
    "returns a value nested without end": "def answer(x):\n    y = []\n    y.append(y)\n    return y",
    "returns too much": "def answer(x): return 'x' * (100 << 20)",
    "leaves a trace function and an exit handler": (
        "import sys, atexit, os\natexit.register(os._exit, 0)\nsys.settrace(lambda *a: sys.exit(0))\n"
        "def answer(x): return True"
    ),
    "is not Python": "def answer(x) return",
    "is a number": "answer = 5",
}


@pytest.mark.parametrize("attack", FORGERIES)
def test_a_verdict_cannot_be_forged(attack):
    started = time.monotonic()
    tests = [TEST, f"assert all(map(lambda x: answer(x) == {EXPECTED}, [1]))"]
    verdicts = sandbox.run(FORGERIES[attack], tests, timeout=2)
    assert [verdict.passed for verdict in verdicts] == [False, False]
    assert time.monotonic() - started < 30


SNOOPING = f"""
import gc, sys
def numbers(thing, seen):
    if id(thing) in seen: return
    seen.add(id(thing))
    if type(thing) is int: yield thing
    elif type(thing) is dict:
        for pair in list(thing.items()): yield from numbers(pair, seen)
    elif type(thing) in (list, tuple, set, frozenset):
        for part in list(thing): yield from numbers(part, seen)
    elif hasattr(thing, 'co_consts'): yield from numbers(thing.co_consts, seen)
def answer(x):
    found, frame, seen = [], sys._getframe(1), set()
    while frame:
        found += numbers([dict(frame.f_locals), dict(frame.f_globals)], seen)
        frame = frame.f_back
    found += numbers([thing for thing in gc.get_objects() if thing is not found], seen)
    for path in ('/proc/1/cmdline', '/proc/self/environ', '/proc/self/mem', '/proc/2/environ', {str(HERE)!r}):
        try: found += [int(word) for word in open(path).read().split() if word.isdigit()]
        except OSError: pass
    return [n for n in found if 9 * 10**8 < n < 10**9]
"""


def test_the_expected_value_is_nowhere_to_be_found():
    test = f"assert {EXPECTED} in answer(3)"
    [verdict] = sandbox.run(SNOOPING, [test])
    assert not verdict.passed and verdict.reason == "AssertionError"
    [verdict] = sandbox.run(f"{SNOOPING}\nhidden = [{EXPECTED}]\n", [test])
    assert verdict.passed  # what is there is found


def test_names_that_are_not_its_own_cannot_be_replaced():
    program = "def abs(x): return 0\ndef sorted(x): return []\ndef helper(x): return 0\ndef f(x): return []"
    tests = ["assert abs(len(f(1)) - 5) < 1", "assert f(1) == sorted([1])", "assert helper(3) == 0"]
    names = {"f": "f"}
    assert passes(program, *tests, names=names, setup="def helper(x): return x") == [False] * 3
    assert passes(program, tests[1], names={"f": "f", "sorted": "sorted"}) == [True]


def tries(*lines: str) -> str:
    """A program whose answer is what came of each line: its value, or the name of the exception."""
    source = "import os, socket, ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    source += "def call(*a):\n    ctypes.set_errno(0)\n    libc.syscall(*a)\n    return ctypes.get_errno()\n"
    source += "def outcome(act):\n    try: return act()\n    except Exception as e: return type(e).__name__\n"
    return source + "def outcomes(): return [" + ", ".join(f"outcome(lambda: {line})" for line in lines) + "]"


def outcomes(*lines: str) -> str:
    return sandbox.run(tries(*lines), ["assert 0, outcomes()"])[0].reason.removeprefix("AssertionError: ")


def test_files_of_the_machine_cannot_be_seen(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o644)
    paths = ["/etc/passwd", str(Path.home()), str(HERE), str(secret), "/proc/1/environ", "/sys"]
    assert eval(outcomes(*(f"open({path!r}).read()" for path in paths))) == ["FileNotFoundError"] * len(paths)
    view = outcomes("sorted(os.listdir('/'))", "os.listdir('/dev')", "os.environ.get('HOME')")
    assert "work" not in view and "home" not in view and "['null']" in view and "None" in view
    packages = "sum((os.listdir(p) for p in __import__('glob').glob('/usr/lib/python3*/*-packages')), [])"
    assert outcomes(packages) == "[[]]"


def test_nothing_can_be_written():
    places = ["/x", "/dev/x", "/usr/lib/x", "/tmp/x", "/dev/shm/x", "/etc/x", "x"]
    acts = [f"open({place!r}, 'w').write('x')" for place in places] + [f"os.mkdir({place!r})" for place in places]
    refused = "{'OSError', 'FileNotFoundError', 'PermissionError'}"
    assert passes(tries(*acts), f"assert len(outcomes()) == 14 and set(outcomes()) <= {refused}") == [True]


def test_refused_system_calls_are_refused():
    column = MACHINES[os.uname().machine][0]
    numbers = [each[column] for each in REFUSED.values() if each[column] is not None]
    # fork and vfork would return twice if they were allowed; all are called with arguments that do nothing
    calls = [f"call({number}, 0, 0, 0, 0, 0, 0)" for number in numbers]
    assert passes(tries(*calls), f"assert outcomes() == [1] * {len(numbers)}") == [True]
    assert outcomes("os.fork()", "os.posix_spawn('/bin/sh', ['sh'], {})", "call(435, 0, 0)") == str(
        ["PermissionError", "PermissionError", 38]
    )


def test_new_namespaces_and_tracing_are_out_of_reach():
    told = outcomes("libc.unshare(0x10000000)", "libc.unshare(0x20000)", "libc.ptrace(16, 1, 0, 0)", "libc.setuid(0)")
    assert told == "[-1, -1, -1, -1]"
    assert outcomes("os.getuid()") in ("[65534]", f"[{os.getuid()}]") and outcomes("os.getuid()") != "[0]"


def test_the_network_is_out_of_reach():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        told = outcomes(f"socket.create_connection(('127.0.0.1', {port}))", "socket.socket(socket.AF_UNIX)")
        assert told == str(["PermissionError"] * 2)
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize("target", ["os.getppid()", "1", "-1", "0", "os.getpid()"])
def test_killing_harms_nobody_else(target):
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        assert passes(f"import os\ndef answer(x): return os.kill({target}, {signal.SIGKILL:d})", TEST) == [False]
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
    assert passes("def f(): return 1", "assert f() == 1") == [True]


EXHAUSTIONS = {
    "loops": "def answer(x):\n    while True: pass",
    "loops when loaded": "while True: pass",
    "sleeps, deaf to signals": (
        "import signal, time\nfor s in (2, 15, 14): signal.signal(s, signal.SIG_IGN)\ndef answer(x): time.sleep(1000)"
    ),
    "forks": "import os\ndef answer(x):\n    while True:\n        try: os.fork()\n        except OSError: pass",
    "starts threads": (
        "import threading, time\ndef answer(x):\n    while True:\n"
        "        try: threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
        "        except RuntimeError: pass"
    ),
    "takes memory": "def answer(x):\n    y = []\n    while True: y.append(bytearray(10 << 20))",
    "takes memory at once": "def answer(x): return len([0] * 10**12)",
    "takes memory by numbers": "def answer(x): return 10 ** (10 ** 10)",
    "opens files": "import os\ndef answer(x):\n    while True: os.pipe()",
}


@pytest.mark.parametrize("attack", EXHAUSTIONS)
def test_what_takes_without_end_is_stopped(attack):
    started = time.monotonic()
    assert passes(EXHAUSTIONS[attack], TEST, timeout=1) == [False]
    assert time.monotonic() - started < 10
    assert leftovers() == 0


def leftovers() -> int:
    """Sandboxes of this process that are still there, a moment after."""
    for _ in range(50):
        mine = subprocess.run(["ps", "-o", "args=", "--ppid", str(os.getpid())], capture_output=True, text=True).stdout
        count = sum("bwrap" in line for line in mine.splitlines())
        if not count:
            break
        time.sleep(0.1)
    return count


def test_a_program_as_large_as_can_be_is_a_verdict_too():
    assert passes("x = '" + "y" * (1 << 20) + "'", TEST) == [False]
