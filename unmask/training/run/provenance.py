"""What a run ran on: RUN/run.jsonl has a line for every start, resumed ones included; a saved state has a summary."""

import hashlib
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from unmask.config.keys import FINGERPRINT
from unmask.util.versions import versions


def start_line(fingerprint: str) -> dict[str, Any]:
    """The command, the time, the hardware, the versions, and the fingerprint of the weights before training. GPUs are
    listed if this process uses one."""
    program = Path(sys.argv[0]).name.replace("__main__.py", "unmask")
    gpus = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([program, *sys.argv[1:]]),
        "hardware": {
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "gpus": [torch.cuda.get_device_name(number) for number in gpus],
        },
        **_processes(),
        "versions": versions(),
        FINGERPRINT: fingerprint,
    }


def provenance(folder: Path, user_files: Mapping[str, str], config: str = "config.yaml") -> dict[str, str]:
    """What the results of a run depend on besides model and data: configuration, user files, versions, processes and
    threads."""
    digest = hashlib.sha256((folder / config).read_bytes()).hexdigest()
    return {config: digest, **_processes(), **user_files, **versions()}


def _processes() -> dict[str, str]:
    return {"processes": os.environ.get("WORLD_SIZE", "1"), "threads": str(torch.get_num_threads())}


def _cpu_name() -> str:
    """As Linux names it, or the architecture."""
    facts = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    names = [line.partition(":")[2].strip() for line in facts if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
