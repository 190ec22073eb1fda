"""A run beside its updates: pausing, evaluations, saved states and checkpoints. RL and fine-tuning share it.

Every process has a run and calls it alike; the first one has the run folder.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from unmask.config.schema import TrainingConfig
from unmask.distributed.processes import Ranks
from unmask.distributed.sharding import unsharded
from unmask.models import Model
from unmask.training.batch import Batch, Experiment
from unmask.training.optim import Optimizer
from unmask.training.run.folder import RunFolder, provenance
from unmask.training.run.progress import Skips
from unmask.training.run.state import State, restore, state_tensors, write_state
from unmask.util.micro_batch import MicroBatch
from unmask.util.signals import Paused

EVAL_SEED = -1
"""Every evaluation draws the same noise, and no training batch has it: theirs have seeds from 0."""

MakeFolder = Callable[[], RunFolder]


@dataclass(frozen=True)
class Hooks:
    """What a caller sees of a run and may ask of it. The first process alone calls the first two."""

    on_metrics: Callable[[int, dict[str, float]], None] = lambda step, metrics: None
    """Called with every line of metrics.jsonl; and with no metrics as soon as the model is loaded."""
    on_batch: Callable[[Experiment, Batch], None] = lambda experiment, batch: None
    """Called with every batch of rollouts."""
    should_stop: Callable[[], bool] = lambda: False
    """Asked after every update. Once it is true the state is saved and Paused is raised."""


class Measured(Protocol):
    """An evaluation."""

    def metrics(self) -> dict[str, float]: ...
    def data(self) -> dict[str, Any]: ...


E = TypeVar("E", bound=Measured)


class BaseRun(ABC, Generic[E]):
    config: TrainingConfig
    config_file = "config.yaml"
    micro_batches: tuple[MicroBatch, ...]
    before: E
    """The evaluation before training."""
    last: E | None = None
    """The last evaluation after an update."""
    folder: RunFolder | None = None
    step, evaluated, saved, skips, ended = 0, 0, 0, Skips(), ""
    """Updates done, the last one evaluated, the last one saved, updates skipped, why the run ends early."""

    def __init__(
        self,
        config: TrainingConfig,
        policy: Model,
        optimizer: Optimizer,
        rng: torch.Generator,
        device: str,
        ranks: Ranks,
        hooks: Hooks,
    ) -> None:
        self.config, self.policy, self.optimizer, self.rng = config, policy, optimizer, rng
        self.device, self.ranks, self.hooks = device, ranks, hooks
        self.started, self.times = time.perf_counter(), dict[str, float]()

    @abstractmethod
    def _measure(self, step: int) -> E:
        """Evaluate the policy as it is after `step`."""

    @abstractmethod
    def _log_evaluation(self, step: int, evaluation: E) -> None: ...

    @abstractmethod
    def _evaluation_of(self, data: Mapping[str, Any]) -> E:
        """An evaluation from its `data`."""

    def _facts(self) -> dict[str, Any]:
        """What a saved state holds beside what every run stores."""
        return {}

    def _restore(self, facts: Mapping[str, Any]) -> None:
        """Set what `_facts` stored."""

    def start(self, make_folder: MakeFolder, start: State | E | None) -> None:
        """Evaluate the model before training, unless `start` is that evaluation; or restore a saved state."""
        if self.ranks.first:
            self.hooks.on_metrics(0, {})
        if isinstance(start, State):
            self._resume(make_folder, start)
            return
        self.before = start or self._measure(0)
        self.folder = make_folder() if self.ranks.first else None
        self._log_evaluation(0, self.before)

    def _resume(self, make_folder: MakeFolder, state: State) -> None:
        restore(self.policy, self.optimizer, self.rng, state.tensors)
        self.folder = make_folder() if self.ranks.first else None
        facts, self.step, self.saved = state.facts, state.step, state.step
        # Fine-tuning in 0.1 did not store the last evaluation. It evaluated before it saved, except at the end.
        self.evaluated = facts.get("looked", min(state.step, self.config.updates - 1))
        self.before, self.skips = self._evaluation_of(facts["before"]), Skips(*facts["skips"])
        self.last = self._evaluation_of(facts["last"]) if facts.get("last") else None
        sizes = facts["rows"] if isinstance(facts["rows"][0], list) else [facts["rows"]]  # fine-tuning in 0.1 had one
        for micro_batch, (size, halvings) in zip(self.micro_batches, sizes, strict=True):
            micro_batch.size, micro_batch.halvings = size, halvings
        self._restore(facts)
        if self.eval_due(state.step):  # a run that was asked to stop is saved before it is evaluated
            self.evaluate(state.step)

    def remaining_steps(self) -> Iterator[int]:
        """The updates that are left, from 1; none after the run has been ended early."""
        while self.step < self.config.updates and not self.ended:
            yield self.step + 1

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.times[f"time/{what}"] = time.perf_counter() - start

    def pause_if_requested(self, step: int) -> None:
        """Save and raise Paused where the caller or a file `stop` in the run folder asks for it."""
        requested = self.hooks.should_stop() or (self.folder is not None and self.folder.take_stop_request())
        if self.ranks.any(requested, self.device):
            self.save(step)
            raise Paused(None if self.folder is None else self.folder.path, step)

    def eval_due(self, step: int) -> bool:
        every, last = self.config.eval.every, self.config.updates
        return self.evaluated < step and (step == last or bool(every and step % every == 0))

    def evaluate(self, step: int) -> None:
        """Evaluate after an update. A state that is due is saved first: an evaluation that is cut off loses nothing."""
        if BaseRun.save_due(self, step):
            self.save(step)
        self.last, self.evaluated = self._measure(step), step
        self._log_evaluation(step, self.last)

    def save_due(self, step: int) -> bool:
        every = self.config.save_every
        return self.saved != step and (step == self.config.updates or bool(every and step % every == 0))

    def save(self, step: int) -> None:
        """Save the state after `step`, from which the run can be resumed, and the weights for others to use."""
        tensors = state_tensors(self.policy, self.optimizer, self.rng, wanted=self.ranks.first)
        if self.folder is not None:
            facts = {  # under the names of 0.1, whose states can still be resumed
                "before": self.before.data(),
                "looked": self.evaluated,
                "last": None if self.last is None else self.last.data(),
                "skips": self.skips,
                "rows": [[each.size, each.halvings] for each in self.micro_batches],
                **self._facts(),
                "made_by": provenance(self.folder.path, self.config.user_files, self.config_file),
                "lengths": self.folder.log_lengths(),
            }
            write_state(self.folder.path / "state", step, tensors, facts)
        with unsharded(self.policy, self.ranks):
            if self.folder is not None:
                self.folder.save(self.policy)
        self.ranks.barrier()
        self.saved = step

    @property
    def too_many_skips(self) -> bool:
        """Whether so many updates in a row were not finite that the run ends with an error."""
        return self.skips.in_a_row >= self.config.optimizer.patience

    def _log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        if self.folder is not None:
            self.folder.log(step, metrics)
            self.hooks.on_metrics(step, metrics)
