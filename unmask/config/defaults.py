"""Defaults that depend on the machine, task or model: device, rollout shape, micro-batch sizes."""

from typing import NamedTuple

from unmask.config.schema import Config, TrainingConfig
from unmask.models.known import EMBEDDED
from unmask.tasks import Task

LARGE = 10_000_000
"""A model with this many weights, frozen ones included, counts as large."""


class MicroBatchSizes(NamedTuple):
    rollout: int
    """Rollouts in one forward pass."""
    update: int
    """Masked states in one forward pass of an update."""


def micro_batch_sizes(config: Config, weights: int) -> MicroBatchSizes:
    """As configured, or by the number of weights, adapter included."""
    large = weights >= LARGE
    rollout, update = config.rollout.micro_batch_size, config.micro_batch_size
    return MicroBatchSizes(rollout or (32 if large else 512), update or (8 if large else 512))


def rollout_shape(config: Config, task: Task) -> tuple[int, int, int]:
    """(length, steps, block), the defaults filled in."""
    length = config.rollout.length or task.length
    block = config.rollout.block or length
    if config.rollout.threshold is not None:
        return length, length // block * -(-block // config.rollout.min_per_step), block
    usual = length if config.rollout.preset is not None else max(1, length // 2)
    return length, config.rollout.steps or usual, block


def device_of(config: TrainingConfig) -> str:
    """The device that `auto` means here."""
    if config.device != "auto":
        return config.device
    import torch

    return "cuda" if config.model not in EMBEDDED and torch.cuda.is_available() else "cpu"


def check_device(name: str) -> None:
    """ValueError for a device that cannot be used here."""
    import torch

    try:
        device = torch.device(name)
        if device.type == "cuda" and torch.cuda.device_count() <= (device.index or 0):  # without a context on it
            raise RuntimeError(f"there are {torch.cuda.device_count()} GPUs")
        if device.type != "cuda":
            torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0]
        raise ValueError(f"device: {name!r} cannot be used here: {reason}") from None
