"""Two processes of which one falls silent: what ranks_worker.py has beside its cases and checks."""

import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import unmask.training.loop

OPTIONS = ["--task", "toy", "updates=2", "prompts=2", "group=2", "save_every=1", "eval.prompts=3", "eval.samples=1"]
SILENT = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
"""What happens to the second of two processes in its second update."""
LONGEST = 15.0
"""Seconds that the first waits for it."""


def left_alone(name: str, folder: Path) -> None:
    """Two processes, the second of which is heard no more: how the first ends, and when."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    (folder / name).mkdir()
    (folder / name / "silent").touch()
    children = []
    for rank in range(2):
        children.append(os.fork())
        if not children[-1]:
            os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=port)
            os.environ["UNMASK_TIMEOUT"] = str(LONGEST)
            _alone(name, rank, folder)
    _, status = os.waitpid(children[0], 0)
    seconds = time.time() - (folder / name / "silent").stat().st_mtime
    os.kill(children[1], signal.SIGKILL)
    os.waitpid(children[1], 0)
    (folder / f"{name}.alone").write_text(f"{os.waitstatus_to_exitcode(status)} {seconds}")


def _alone(name: str, rank: int, folder: Path) -> NoReturn:
    from unmask.cli.main import main as command

    os.chdir(folder / name)
    with (folder / f"{name}-{rank}.txt").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    plain = unmask.training.loop.collect

    def collect(source: Any, step: int) -> Any:
        if rank and step == 2:
            Path("silent").touch()
            os.kill(os.getpid(), SILENT[name])
        return plain(source, step)

    unmask.training.loop.collect = collect
    sys.argv = ["unmask", "train", *OPTIONS, "--out", "run"]
    try:
        command()
    except SystemExit as error:
        sys.stdout.flush()
        os._exit(int(error.code or 0))
    os._exit(99)
