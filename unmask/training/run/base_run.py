"""What RL and fine-tuning share around their updates: pausing, evaluations, saved states and checkpoints.

Every process has a run and makes the same calls; only the first process has the run folder.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from unmask.config.schema import TrainingConfig
from unmask.distributed.processes import Ranks
from unmask.distributed.sharding import unsharded
from unmask.models import Model
from unmask.models.lora import has_adapter
from unmask.training.batch import Batch, Experiment
from unmask.training.optim import Optimizer
from unmask.training.run.card import CardFacts, Training, model_card
from unmask.training.run.folder import MakeFolder, RunFolder
from unmask.training.run.progress import Skips
from unmask.training.run.provenance import provenance
from unmask.training.run.state import State, restore, state_tensors, write_state
from unmask.training.teacher import Teacher
from unmask.util.micro_batch import MicroBatch
from unmask.util.signals import Paused

EVAL_SEED = -1
"""All evaluations use the same noise, and no training batch uses it: batches have seeds from 0."""


@dataclass(frozen=True)
class Hooks:
    """Callbacks of a run. Only the first process calls the first two."""

    on_metrics: Callable[[int, dict[str, float]], None] = lambda step, metrics: None
    """Called with every line of metrics.jsonl, and with no metrics once the model is loaded."""
    on_batch: Callable[[Experiment, Batch], None] = lambda experiment, batch: None
    """Called with every batch of rollouts."""
    should_stop: Callable[[], bool] = lambda: False
    """Called after every update. If it returns true, the run saves its state and raises Paused."""


class EvaluationResult(Protocol):
    """An evaluation."""

    def metrics(self) -> dict[str, float]: ...
    def data(self) -> dict[str, Any]: ...


E = TypeVar("E", bound=EvaluationResult)


class BaseRun(ABC, Generic[E]):
    config: TrainingConfig
    config_file = "config.yaml"
    micro_batches: tuple[MicroBatch, ...]
    before: E
    """The evaluation before training."""
    last: E | None = None
    """The last evaluation after an update."""
    teacher: Teacher | None = None
    folder: RunFolder | None = None
    step, evaluated, saved, skips, ended = 0, 0, 0, Skips(), ""
    """Finished updates, the last evaluated one, the last saved one, skipped updates, why the run ends early."""

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
        """Evaluate the policy after `step`."""

    @abstractmethod
    def _log_evaluation(self, step: int, evaluation: E) -> None: ...

    @abstractmethod
    def _evaluation_of(self, data: Mapping[str, Any]) -> E:
        """An evaluation from its `data`."""

    @abstractmethod
    def _training(self) -> Training:
        """What the model card says about the training."""

    def _card(self, step: int, evaluation: E | None, evaluated: int) -> str:
        assert self.folder is not None
        metadata, home = self.policy.card, self.policy.home
        on_hub = "/" in home and not Path(home).is_absolute()
        return model_card(
            CardFacts(
                name=self.folder.path.name,
                base_model=home if on_hub else str(metadata.get("base_model", "")),
                license=str(metadata.get("license", "")),
                adapter=has_adapter(self.policy),
                training=self._training(),
                config=(self.folder.path / self.config_file).read_text(),
                seed=self.config.seed,
                step=step,
                before=self.before.metrics(),
                after=None if evaluation is None else evaluation.metrics(),
                evaluated=evaluated,
            )
        )

    def _facts(self) -> dict[str, Any]:
        """What a subclass adds to a saved state."""
        return {}

    def _restore(self, facts: Mapping[str, Any]) -> None:
        """Restore what `_facts` stored."""

    def start(self, make_folder: MakeFolder, start: State | E | None) -> None:
        """Restore a saved state; or evaluate the model before training, unless `start` is that evaluation."""
        if self.ranks.first:
            self.hooks.on_metrics(0, {})
        if isinstance(start, State):
            self._resume(make_folder, start)
            return
        self.before = start or self._measure(0)
        self._open(make_folder)
        self._log_evaluation(0, self.before)

    def _resume(self, make_folder: MakeFolder, state: State) -> None:
        restore(self.policy, self.optimizer, self.rng, state.tensors, self.teacher)
        self._open(make_folder)
        facts, self.step, self.saved = state.facts, state.step, state.step
        # Fine-tuning in 0.1 did not store the last evaluation. It evaluated before it saved, except at the end.
        self.evaluated = facts.get("looked", min(state.step, self.config.updates - 1))
        self.before, self.skips = self._evaluation_of(facts["before"]), Skips(*facts["skips"])
        self.last = self._evaluation_of(facts["last"]) if facts.get("last") else None
        sizes = facts["rows"] if isinstance(facts["rows"][0], list) else [facts["rows"]]  # fine-tuning in 0.1 had one
        for micro_batch, (size, halvings) in zip(self.micro_batches, sizes, strict=True):
            micro_batch.size, micro_batch.halvings = size, halvings
        self._restore(facts)
        if self.eval_due(state.step):  # a paused run is saved before it is evaluated
            self.evaluate(state.step)

    def _open(self, make_folder: MakeFolder) -> None:
        if self.ranks.first:
            self.folder = make_folder()
            self.folder.log_start(self.policy.fingerprint)

    def remaining_steps(self) -> Iterator[int]:
        """The numbers of the remaining updates; stops when the run ends early."""
        while not self._is_last(self.step) and not self.ended:
            yield self.step + 1

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.times[f"time/{what}"] = time.perf_counter() - start

    def pause_if_requested(self, step: int) -> None:
        """Save and raise Paused if the caller or a file `stop` in the run folder requests it."""
        requested = self.hooks.should_stop() or (self.folder is not None and self.folder.take_stop_request())
        if self.ranks.any(requested, self.device):
            self.save(step)
            raise Paused(None if self.folder is None else self.folder.path, step)

    def eval_due(self, step: int) -> bool:
        return self.evaluated < step and self._due(step, self.config.eval.every)

    def evaluate(self, step: int) -> None:
        """Evaluate after an update. If a save is due it comes first, so an interrupted evaluation loses nothing."""
        if BaseRun.save_due(self, step):
            self.save(step)
        self.last, self.evaluated = self._measure(step), step
        self._log_evaluation(step, self.last)

    def save_due(self, step: int) -> bool:
        return self.saved != step and self._due(step, self.config.save_every)

    def _due(self, step: int, every: int) -> bool:
        return self._is_last(step) or bool(every and step % every == 0)

    def _is_last(self, step: int) -> bool:
        return step >= self.config.updates

    def save(self, step: int) -> None:
        """Save the state after `step`, for resuming, and the checkpoint, for use."""
        tensors = state_tensors(self.policy, self.optimizer, self.rng, self.teacher, wanted=self.ranks.first)
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
                self.folder.save(self.policy, self._card(step, self.last, self.evaluated))
        self.ranks.barrier()
        self.saved = step

    @property
    def too_many_skips(self) -> bool:
        """Whether optimizer.max_skipped_updates updates in a row were not finite, which ends the run with an error."""
        return self.skips.in_a_row >= self.config.optimizer.max_skipped_updates

    def _log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        if self.folder is not None:
            self.folder.log(step, metrics)
            self.hooks.on_metrics(step, metrics)
