"""The configuration of `unmask sft` and `unmask adapt`: YAML and key=value overrides in, a frozen model out."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import Field

from unmask.config.defaults import check_device, device_of
from unmask.config.keys import apply_overrides, validate, with_current_keys
from unmask.config.schema import TrainingConfig
from unmask.config.sections import EvalSchedule
from unmask.sft.behaviours import Shares
from unmask.sft.sources import Sources, check_sources
from unmask.util.parsing import read_keys
from unmask.util.user_file import run_file

CONFIG = "sft.yaml"
"""The configuration's file in a run folder."""

RENAMED = {
    "rows": "max_examples",
    "tokens": "batch_tokens",
    "pass_tokens": "micro_batch_tokens",
    "grow": "attention_annealing",
    "checkpointing": "gradient_checkpointing",
    "optimizer.max_norm": "optimizer.max_grad_norm",
    "optimizer.patience": "optimizer.max_skipped_updates",
}
"""Keys that had another name in 0.1."""


class SftEval(EvalSchedule):
    prompts: int = Field(128, ge=0, lt=2**20)
    """Held-out examples of each source; 0: nothing is evaluated."""
    samples: int = Field(1, ge=1, lt=2**10)
    """Sampled completions of each problem of a task, in addition to the greedy one."""


class SftConfig(TrainingConfig):
    model: str = Field(min_length=1)
    """tiny, a folder with a checkpoint or an adapter, or an id on the hub."""
    data: Sources
    """Files and tasks to train on, by name or as {task, file, options, behaviours, max_examples, canvas}."""
    behaviours: Shares = Field(default_factory=dict)
    """Share of the answers that each of these behaviours gives, for every task without its own `behaviours`."""
    max_examples: int = Field(20_000, ge=1, lt=2**32)
    """Largest number of training examples of each source, unless the source sets its own limit."""
    attention_annealing: int = Field(0, ge=0)
    """Updates over which attention goes from causal to full, in blocks of doubling length; 0: full from the start."""
    updates: int = Field(1000, ge=1, lt=2**24)
    """Optimiser steps."""
    batch_tokens: int = Field(16_384, ge=1, lt=2**24)
    """Tokens of a batch, prompts included."""
    micro_batch_tokens: int | None = Field(None, ge=1)
    """Tokens in one forward pass, which bounds memory; gradients do not depend on it. Halved when memory runs out."""
    save_every: int = Field(200, ge=0)
    """Updates between checkpoints, from which an interrupted run resumes; 0 saves only the last."""
    eval: SftEval = SftEval()
    """Evaluation during training."""

    def dump(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


def read_sft_config(path: Path | None = None, overrides: Iterable[str] = (), **named: Any) -> SftConfig:
    """The configuration of a file, if given, then `key=value` overrides, then keyword arguments."""
    config = read_sft_without_torch(path, overrides, **named)
    check_device(device_of(config))
    return config


def read_sft_without_torch(path: Path | None = None, overrides: Iterable[str] = (), **named: Any) -> SftConfig:
    """As `read_sft_config`, without the check of the device, which needs torch."""
    data = with_current_keys(read_keys(path) if path else {}, RENAMED)
    apply_overrides(data, overrides, RENAMED)
    data.update(with_current_keys({key: value for key, value in named.items() if value is not None}, RENAMED))
    for key in ("model", "data"):
        if not data.get(key):
            raise ValueError(f"{key}: is missing; give it on the command line or in the configuration")
    config = validate(SftConfig, data)
    check_sources(config.data, config.behaviours)
    if config.optimizer.warmup > config.updates or config.attention_annealing > config.updates:
        key = "attention_annealing" if config.attention_annealing > config.updates else "optimizer.warmup"
        raise ValueError(f"{key}: is larger than the number of updates, {config.updates}")
    files = [source.options.get("file") for source in config.data if source.task == "own"]
    config._user_files = {file: run_file(Path(file)).digest for file in files if file}
    return config
