"""The sandbox: a bubblewrap command, and what it requires.

Inside there are a Python with its standard library and the shared libraries of the system, read-only, and /dev/null: no
user files, nothing writable, no /proc, no network, no other process. If root starts it, it runs as nobody.
"""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import IO

from unmask.sandbox.filter import seccomp_program
from unmask.util.processes import start_process

MEMORY = 1 << 30  # bytes of address space
THREADS = 16  # in one sandbox, including the process of bubblewrap
FILES = 64  # open at a time

# setpriv instead of Popen(user=), with which Python copies the page tables of a large process
TO_NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--")
AS_NOBODY = TO_NOBODY if os.geteuid() == 0 else ()
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONSAFEPATH": "1", "LC_ALL": "C.UTF-8"}  # the seed: reproducible verdicts
HERE = Path(__file__).parent


def interpreters() -> Iterator[Path]:
    """The Pythons that may run programs: this one, without its packages, or the system's if nobody cannot read it."""
    own = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    for path in dict.fromkeys([own, Path("/usr/bin/python3")]):
        if path.exists():
            yield path.resolve()


@cache
def confinement(interpreter: Path) -> tuple[str, ...]:
    """bubblewrap's arguments for this interpreter, except the filter."""
    prefix, libraries = interpreter.parent.parent, Path(f"/usr/lib/{platform.machine()}-linux-gnu")
    own = ["lib", "lib64"] if prefix != Path("/usr") else [f"lib/{interpreter.name}"]
    shared = [libraries if libraries.is_dir() else Path("/usr/lib"), Path("/usr/lib64")]  # Debian's, and others'
    folders = [*shared, *(prefix / name for name in own)]
    view: list[str] = []
    for path in (Path("/lib"), Path("/lib64")):
        if path.is_symlink():
            view += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            folders.append(path)
    seen = [path for path in dict.fromkeys(folders) if path.is_dir() and not path.is_symlink()]
    for path in [*seen, interpreter]:
        view += ["--ro-bind", str(path), str(path)]
    # installed packages may contain a data set with its answers
    places = [place for path in seen for place in (path, *path.glob("python3*"))]
    packages = [p for place in places for kind in ("site", "dist") if (p := place / f"{kind}-packages").is_dir()]
    for path in packages:
        view += ["--tmpfs", str(path), "--remount-ro", str(path)]
    settings = [word for name, value in ENVIRONMENT.items() for word in ("--setenv", name, value)]
    return (
        *("--unshare-user", "--unshare-all", "--disable-userns", "--die-with-parent"),
        *("--cap-drop", "ALL", "--clearenv", "--hostname", "sandbox"),
        *view,
        *("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--dev-bind", "/dev/null", "/dev/null"),
        *("--chdir", "/", "--remount-ro", "/"),
        *settings,
    )


COMPILE_SCRIPT = """
import binascii, marshal, sys
texts = [marshal.dumps(compile(text, "sandbox", "exec")) for text in sys.argv[1:]]
print(*(binascii.b2a_base64(text, newline=False).decode() for text in texts))
"""
START_SCRIPT = """
import binascii, marshal, sys
exec(marshal.loads(binascii.a2b_base64(sys.argv[1])))
"""


@cache
def inner_code(interpreter: Path, role: str) -> list[str]:
    """The files that run inside, compiled by the interpreter that runs them: this saves a third of the start-up time,
    and the sandbox does not contain them as files."""
    texts = [(HERE / f"{name}.py").read_text() for name in ("start", "wire", role)]
    command = [*AS_NOBODY, str(interpreter), "-S", "-s", "-c", COMPILE_SCRIPT, *texts]
    process = start_process(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd="/", env=ENVIRONMENT
    )
    return str(process.communicate()[0]).split()


def start(
    interpreter: Path,
    role: str,
    cpu: int,
    stdin: int,
    stdout: int,
    fds: Sequence[int] = (),
    stderr: int | IO[bytes] = subprocess.DEVNULL,
) -> "subprocess.Popen[bytes]":
    """Start a sandbox for a role, in its own process group. It also ends with the thread that started it."""
    rules = os.memfd_create("seccomp")
    try:
        os.write(rules, seccomp_program(platform.machine()))
        os.lseek(rules, 0, os.SEEK_SET)
        command = [
            *AS_NOBODY,
            *("bwrap", *confinement(interpreter), "--seccomp", str(rules), "--"),
            *(str(interpreter), "-S", "-s", "-c", START_SCRIPT, *inner_code(interpreter, role)),
            *map(str, (MEMORY, THREADS, FILES, cpu, *fds)),
        ]
        return start_process(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=(rules, *fds),
            start_new_session=True,
            env={"PATH": os.environ.get("PATH", os.defpath)},  # no secrets of the user, also not in bubblewrap
        )
    finally:
        os.close(rules)


def missing_requirement() -> str:
    """What has to be installed, as a sentence; empty if nothing is missing."""
    if sys.platform != "linux":
        return f"the sandbox needs bubblewrap, which runs on Linux only, not on {sys.platform}"
    if shutil.which("bwrap") is None:
        return "the sandbox needs bubblewrap (bwrap): apt-get install bubblewrap, or dnf install bubblewrap"
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        return "the sandbox needs setpriv when root starts it: apt-get install util-linux"
    try:
        seccomp_program(platform.machine())
    except ValueError as error:
        return str(error)
    return ""


@cache
def bwrap_version() -> str:
    return subprocess.run(["bwrap", "--version"], capture_output=True, text=True).stdout.strip()
