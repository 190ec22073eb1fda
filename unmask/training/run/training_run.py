"""A training run beside its updates: evaluation, logs, saved states and checkpoints, early stopping.

Every process has a TrainingRun and calls it alike; the first one has the run folder.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from unmask.distributed.sharding import unsharded
from unmask.evaluation.evaluate import Evaluation, Evaluator
from unmask.rollout.sample import canvas
from unmask.tasks.scoring import RewardError, RewardFailure
from unmask.training.batch import Batch, Experiment, PromptTooLong, batch_metrics, samples_of
from unmask.training.optim import Optimizer, learning_rate
from unmask.training.run.broken import store_broken
from unmask.training.run.folder import BEST, RunFolder, provenance, read_metrics
from unmask.training.run.health import REACH, StepMetrics, health_warnings, recent_updates
from unmask.training.run.progress import Best, RunProgress, Skips, keeps_best, progress_of, reason_to_end
from unmask.training.run.recorder import TraceRecorder
from unmask.training.run.state import State, restore, state_tensors, write_state
from unmask.training.setup import Setup
from unmask.training.update import BrokenUpdate, UpdateResult
from unmask.util.metering import Meter, count_passes
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
    should_stop: Callable[[], bool] = lambda: False
    """Asked after every update. Once it is true the state is saved and Paused is raised."""


@dataclass(frozen=True)
class TrainingResult:
    before: Evaluation
    after: Evaluation
    run: RunFolder | None
    """None in a process that is not the first."""
    seconds: float
    ended: str = ""
    """Why the run ended before its last update; `after` is then its best evaluation."""


class TrainingRun:
    def __init__(
        self, experiment: Experiment, optimizer: Optimizer, rng: torch.Generator, meter: Meter, hooks: Hooks
    ) -> None:
        self.experiment, self.config, self.setup = experiment, experiment.config, experiment.setup
        self.policy, self.ranks = experiment.setup.policy, experiment.setup.ranks
        self.optimizer, self.rng, self.meter, self.hooks = optimizer, rng, meter, hooks
        self.started, self.times = time.perf_counter(), dict[str, float]()
        task = experiment.task
        self.held_out = task.rows("test", self.config.eval.prompts, 0)
        prompts = [task.prompt_ids(self.policy.tokenizer, row) for row in self.held_out]
        canvas(prompts, experiment.decoding.length, self.policy, "cpu")  # raises now if one is too long
        self.recorder = TraceRecorder(experiment)
        self.folder: RunFolder | None = None
        self.step, self.forwards, self.ended, self.history = 0, 0.0, "", list[StepMetrics]()
        """Updates done, forwards spent, why the run ends early, the metrics that health checks look at."""
        if self.ranks.first:
            hooks.on_metrics(0, {})

    def start(self, make_folder: MakeFolder, start: State | Evaluation | None) -> None:
        """Evaluate the model before training, unless `start` is that evaluation; or restore a saved state."""
        if isinstance(start, State):
            self._resume(make_folder, start)
            return
        before = start or self._measure(0)
        self.progress = RunProgress(before, Best(0, before), 0, Skips())
        self.folder = make_folder() if self.ranks.first else None
        self._record(0, before.metrics(), before.failures)
        self._save_best()

    def _resume(self, make_folder: MakeFolder, state: State) -> None:
        restore(self.policy, self.optimizer, self.rng, state.tensors)
        self.folder = make_folder() if self.ranks.first else None
        self.history = recent_updates(read_metrics(self.folder.path)) if self.folder is not None else []
        self.progress, self.step, self.forwards = progress_of(state.facts), state.step, state.facts["forwards"]
        self.meter.forwards = self.forwards if self.ranks.first else 0.0
        for micro_batch, saved in zip(_micro_batches(self.setup), state.facts["rows"], strict=True):
            micro_batch.size, micro_batch.halvings = saved
        self._check_best(state.step)
        if self.eval_due(state.step):  # a run that was asked to stop is saved before it is evaluated
            self.evaluate(state.step)
        elif self.progress.last is not None and state.step < self.config.updates:
            self._decide_end(state.step, self.progress.last)

    def remaining_steps(self) -> Iterator[int]:
        """The updates that are left, from 1; none after the run has been ended early."""
        while self.step < self.config.updates and not self.ended:
            yield self.step + 1

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.times[f"time/{what}"] = time.perf_counter() - start

    @contextmanager
    def save_on_error(self, step: int) -> Iterator[None]:
        """Save the last finished update before re-raising an error."""
        try:
            yield
        except ValueError as error:
            together = isinstance(error, RewardError | PromptTooLong)  # all processes raise these, and save together
            if self.step and (together or self.ranks.size == 1):
                self.save(self.step)
            if self.folder is not None and isinstance(error, RewardError):
                self.folder.log_errors(step, error.failures)
            raise

    def log(self, step: int, batch: Batch, update: UpdateResult) -> None:
        """Log an update and its health warnings. Too many in a row that are not finite end the run with an error."""
        self.step, broken = step, batch.broken or update.broken
        self.forwards = self.ranks.total(self.meter.forwards, self.setup.device)
        skips = self.progress.skips = self.progress.skips.after(broken is not None)
        metrics = {**batch_metrics(batch), **batch.mismatch, **update.means(), "train/skipped": float(skips.total)}
        if broken is not None:
            metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        counts, new_warnings = health_warnings([*self.history, metrics])
        self.history = [*self.history, {**metrics, **counts}][-REACH:]
        self.recorder.record(step, batch, updated=broken is None or broken.inner_step > 0)
        rate = {"train/lr": learning_rate(self.config, step)}
        rest = {"cost/forwards": self.forwards, **rate, **_memory_metrics(self.setup), **self.times, **counts}
        self._record(step, {**metrics, **rest}, batch.failures)
        if self.folder is not None:
            self.folder.log_samples(step, samples_of(batch, self.config.group))
            self.folder.log_warnings(step, new_warnings)
            self.hooks.on_batch(self.experiment, batch)
        if broken is not None and skips.in_a_row >= self.config.optimizer.patience:
            self._give_up(step, batch, broken)

    def pause_if_requested(self, step: int) -> None:
        """Save and raise Paused where the caller or a file `stop` in the run folder asks for it."""
        requested = self.hooks.should_stop() or (self.folder is not None and self.folder.take_stop_request())
        if self.ranks.any(requested, self.setup.device):
            self.save(step)
            raise Paused(None if self.folder is None else self.folder.path, step)

    def eval_due(self, step: int) -> bool:
        every, last = self.config.eval.every, self.config.updates
        return self.progress.evaluated < step and (step == last or bool(every and step % every == 0))

    def evaluate(self, step: int) -> None:
        """Evaluate after an update, save the weights if they are the best so far, and decide whether the run ends."""
        evaluation = self._measure(step)
        self._record(step, evaluation.metrics(), evaluation.failures)
        self.progress.evaluated, self.progress.last = step, evaluation
        self.progress.best = self.progress.best.after(step, evaluation)
        if self.progress.best.step == step:
            self._save_best()
        if step < self.config.updates:
            self._decide_end(step, evaluation)

    def _decide_end(self, step: int, evaluation: Evaluation) -> None:
        self.ended = reason_to_end(self.progress.best, step, evaluation, self.config.eval)

    def save_due(self, step: int) -> bool:
        every = self.config.save_every
        new_best = keeps_best(self.config.eval) and self.progress.best.step == step
        return new_best or step == self.config.updates or bool(every and step % every == 0)

    def save(self, step: int) -> None:
        """Save the state after `step`, from which the run can be resumed, and the weights for others to use."""
        tensors = state_tensors(self.policy, self.optimizer, self.rng, wanted=self.ranks.first)
        if self.folder is not None:
            facts = {
                **self.progress.data(),
                "forwards": self.forwards,
                "rows": [[each.size, each.halvings] for each in _micro_batches(self.setup)],
                "made_by": provenance(self.folder.path, self.config.user_files),
                "lengths": self.folder.log_lengths(),
            }
            write_state(self.folder.path / "state", step, tensors, facts)
        with unsharded(self.policy, self.ranks):
            if self.folder is not None:
                self.folder.save(self.policy)
        self.ranks.barrier()

    def finish(self) -> TrainingResult:
        """End the run; one that was ended early has the weights of its best evaluation."""
        before, best = self.progress.before, self.progress.best
        after = best.evaluation if self.ended else self.progress.last or self._measure(self.step)
        if self.folder is not None:
            if self.ended:
                self.folder.take_best()
            facts: dict[str, object] = {"best": best.step} if keeps_best(self.config.eval) else {}
            facts |= {"ended": self.ended} if self.ended else {}
            self.folder.finish(before.metrics(), after.metrics(), facts)
            self.folder.draw()
        return TrainingResult(before, after, self.folder, time.perf_counter() - self.started, self.ended)

    def _measure(self, step: int) -> Evaluation:
        evaluator = Evaluator(
            self.policy,
            self.experiment.task,
            self.experiment.decoding,
            samples=self.config.eval.samples,
            seed=EVAL_SEED,
            device=self.setup.device,
            micro_batch=self.setup.rollout_batch,
            ranks=self.ranks,
            reward=self.config.reward,
        )
        # The forwards of an evaluation are not part of the cost of training.
        with self.save_on_error(step), unsharded(self.policy, self.ranks), count_passes(None, self.policy):
            return evaluator.evaluate(self.held_out, self.recorder.on_samples(step, self.held_out))

    def _record(self, step: int, metrics: dict[str, float], failures: Sequence[RewardFailure]) -> None:
        if self.folder is not None:
            self.folder.log(step, metrics)
            self.folder.log_errors(step, failures)
            self.folder.log_traces(self.recorder.take_lines())
            self.hooks.on_metrics(step, metrics)

    def _save_best(self) -> None:
        if keeps_best(self.config.eval):
            with unsharded(self.policy, self.ranks):
                if self.folder is not None:
                    self.folder.save(self.policy, BEST)

    def _check_best(self, step: int) -> None:
        """After resuming: where the best weights are lost, the present ones are the best there are."""
        lost = keeps_best(self.config.eval) and self.folder is not None and not self.folder.has_best()
        if self.ranks.any(lost, self.setup.device):
            warnings.warn(f"{BEST} is damaged or gone: the best from update {step} on is kept instead", stacklevel=2)
            self.progress.best = Best(step, self._measure(step))
            self._save_best()

    def _give_up(self, step: int, batch: Batch, broken: BrokenUpdate) -> None:
        tensors = state_tensors(self.policy, self.optimizer, self.rng, wanted=self.ranks.first)
        where: Path | str = "the run folder"
        if self.folder is not None:
            where = store_broken(self.folder.path, step, batch, broken, tensors)
        self.save(step)
        raise ValueError(
            f"{self.progress.skips.in_a_row} updates in a row were skipped, the last because {broken.error}. "
            f"It is stored in {where}; unmask.replay(folder) repeats it"
        )


def _micro_batches(setup: Setup) -> tuple[MicroBatch, MicroBatch]:
    return setup.rollout_batch, setup.update_batch


def _memory_metrics(setup: Setup) -> Mapping[str, float]:
    """Peak memory of the step on a GPU; and whether micro-batches had to be made smaller."""
    metrics = {}
    if setup.device.startswith("cuda"):
        metrics["memory/peak_gib"] = torch.cuda.max_memory_allocated(setup.device) / 2**30
        torch.cuda.reset_peak_memory_stats(setup.device)
    for name, micro_batch in (("rollout", setup.rollout_batch), ("update", setup.update_batch)):
        if micro_batch.halvings:
            metrics[f"memory/{name}_micro_batch_size"] = float(micro_batch.size)
    return metrics
