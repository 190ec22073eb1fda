"""Several processes, one batch.

Every process rolls out its share of the prompts and scores its share of the probes. Traces, rewards and
log-probabilities are gathered, so all processes see the same batch, loss and slopes, and differ only in the states they
backpropagate. Losses, ratios and normalisers are therefore those of one process by construction.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unmask.core.token_sampling import pad_ids
from unmask.core.trace import Trace, pad_traces


@dataclass(frozen=True)
class Ranks:
    """This process among `size`."""

    rank: int = 0
    size: int = 1
    sharded: bool = False
    """Weights are sharded (FSDP2): all processes run a pass together, and gradients are averaged."""

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, count: int) -> range:
        """This process's contiguous part of 0..count - 1."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def total(self, value: float, device: torch.device | str) -> float:
        """The sum of a number over all processes."""
        if self.size == 1:
            return value
        return float(self.sum(torch.tensor(value, dtype=torch.float64, device=device)))

    def max(self, value: int, device: torch.device) -> int:
        if self.size == 1:
            return value
        largest = torch.tensor(value, device=device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def gather(self, value: Tensor, dim: int = 0) -> Tensor:
        """The shares of all processes, concatenated along `dim`; their other sizes must be equal."""
        if self.size == 1:
            return value
        value = value.movedim(dim, 0).contiguous()
        counts = [torch.zeros((), dtype=torch.long, device=value.device) for _ in range(self.size)]
        dist.all_gather(counts, torch.tensor(len(value), device=value.device))
        most = int(max(counts))
        sent = value.to(torch.uint8) if value.dtype == torch.bool else value
        sent = torch.cat([sent, sent.new_zeros(most - len(sent), *sent.shape[1:])])
        parts = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(parts, sent)
        whole = torch.cat([part[: int(count)] for part, count in zip(parts, counts, strict=True)])
        return whole.to(value.dtype).movedim(0, dim)

    def gather_trace(self, trace: Trace, width: int) -> Trace:
        """The traces of all processes, padded on the left to `width` columns. Their group numbers must differ."""
        if self.size == 1:
            return trace
        trace = pad_traces(trace, width)
        rows: dict[str, Any] = {
            f.name: self.gather(getattr(trace, f.name)) for f in fields(trace) if f.name.endswith(("_B", "_BL"))
        }
        seen = {}
        for name, value in trace.seen.items():
            if value.dim() > 1:
                value = pad_ids(value, self.max(value.shape[-1], value.device))
            seen[name] = self.gather(value, dim=int(name.startswith("step_")))
        return replace(trace, **rows, seen=seen)

    def sum_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Sum the gradients of all processes in one message; FSDP does so in the backward pass. A parameter without
        a gradient in any process keeps None, so the optimiser skips it."""
        if self.size == 1 or self.sharded:
            return
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        touched = gradients[0].new_tensor([p.grad is not None for p in parameters], dtype=torch.float32)
        flat = torch.cat([touched, *(gradient.flatten().float() for gradient in gradients)])
        dist.all_reduce(flat)
        counts, *parts = flat.split([len(parameters), *(p.numel() for p in parameters)])
        for p, count, part in zip(parameters, counts.tolist(), parts, strict=True):
            p.grad = part.view_as(p).to(p.dtype) if count else None

    def any(self, truth: bool, device: torch.device | str) -> bool:
        """Whether it is true in some process; every process has to call this."""
        return truth if self.size == 1 else bool(self.sum(torch.tensor(float(truth), device=device)))

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


ALONE = Ranks()


TIMEOUT = "UNMASK_TIMEOUT"


def timeout_seconds() -> float:
    """Seconds that a process waits for the others before it stops: half an hour, or UNMASK_TIMEOUT."""
    text = os.environ.get(TIMEOUT, "1800")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise ValueError(f"{TIMEOUT}: expected a number of seconds, got {text!r}")
    return seconds


@contextmanager
def join_processes(device: str) -> Iterator[tuple[Ranks, str]]:
    """This process among those that torchrun started, and its device; alone without torchrun. Communication with a
    process that has ended, or does not answer in time, raises ConnectionError."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE, device
        return
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    patience = timedelta(seconds=timeout_seconds())
    try:
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo", timeout=patience)
        yield Ranks(dist.get_rank(), size), device
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "/gloo/" not in str(error):  # gloo raises plain RuntimeErrors
            raise
        raise ConnectionError(
            f"another process has ended, or has not answered for {patience.total_seconds():g} s ({TIMEOUT}), so this "
            "one stops too; unmask train --resume continues from the last saved state"
        ) from error
    # Not after an error: NCCL leaves the group together, and the others are waiting elsewhere.
    dist.destroy_process_group()
