"""A pool of processes, each of which trains one cell after the other."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue, SimpleQueue
from threading import Event as Flag, Thread
from typing import Any

import unmask
from unmask.studies.compare.cells import outcome_of, write_json
from unmask.util.processes import start_process


@dataclass(frozen=True)
class CellJob:
    """A cell to train in its folder."""

    label: str
    seed: int
    folder: Path
    config: dict[str, Any]
    weight: float
    """Its estimated cost in forward passes."""

    def result(self) -> dict[str, Any]:
        return outcome_of(self.folder)


@dataclass(frozen=True)
class JobEvent:
    """The progress or the end of a job."""

    job: CellJob
    share: float = 1.0
    """The part that is done."""
    error: str = ""


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_of(workers: int) -> int:
    """Threads per process: the cores divided by the workers, unless OMP_NUM_THREADS is set."""
    return int(os.environ.get("OMP_NUM_THREADS") or max(1, cores() // workers))


def run_jobs(jobs: Sequence[CellJob], workers: int, keep: bool) -> Iterator[JobEvent]:
    """Train all jobs, `workers` at a time, and yield their events. A failed job does not stop the others. Closing the
    iterator stops all."""
    waiting: Queue[CellJob] = Queue()
    events: SimpleQueue[JobEvent | BaseException | None] = SimpleQueue()
    running: list[subprocess.Popen[str]] = []
    over, threads = Flag(), list[Thread]()
    for job in jobs:
        waiting.put(job)

    def serve() -> None:
        try:
            process: subprocess.Popen[str] | None = None
            while not over.is_set():
                try:
                    job = waiting.get_nowait()
                except Empty:
                    break
                if process is None:
                    process = _start_worker(threads_of(workers))
                    running.append(process)
                    if over.is_set():  # it may have started after the others were killed
                        process.kill()
                for event in _run_job(process, job, keep, over):
                    events.put(event)
                if process.poll() is not None:
                    process = None
            if process is not None and process.stdin is not None:
                process.stdin.close()
            events.put(None)
        except BaseException as error:  # the main thread raises it
            events.put(error)

    count = min(workers, len(jobs))
    try:
        for _ in range(count):
            threads.append(Thread(target=serve, daemon=True))
            threads[-1].start()
        while count:
            event = events.get()
            if isinstance(event, BaseException):
                raise event
            if event is None:
                count -= 1
            else:
                yield event
    finally:
        over.set()
        for process in running:
            process.kill()
        for thread in threads:
            if thread.ident is not None:  # a signal may come before its start
                thread.join()
        for process in running:
            with suppress(BrokenPipeError), process:  # closes its pipes and waits for it
                pass


def _start_worker(threads: int) -> "subprocess.Popen[str]":
    home = str(Path(unmask.__file__).parents[1])
    path = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}
    command = [sys.executable, "-m", "unmask.studies.compare.worker"]
    # It ignores the signals of a job: they stop the parent, which then ends the workers.
    return start_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True)


def _run_job(process: "subprocess.Popen[str]", job: CellJob, keep: bool, over: Flag) -> Iterator[JobEvent]:
    """Send a job to a process and yield its events until it ends or dies. If `over` is set, it was killed."""
    assert process.stdin is not None and process.stdout is not None
    order = {"folder": str(job.folder.resolve()), "config": job.config, "keep": keep}
    try:
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            message = json.loads(line)
            if "share" in message:
                yield JobEvent(job, min(0.99, message["share"]))
                continue
            yield JobEvent(job, error=message.get("error", ""))
            return
    except BrokenPipeError:
        pass
    if over.is_set():
        return
    message = f"its process ended with code {process.wait()}: see {job.folder / 'log.txt'}"
    job.folder.mkdir(parents=True, exist_ok=True)
    write_json(job.folder / "error.json", {"error": message})
    yield JobEvent(job, error=message)
