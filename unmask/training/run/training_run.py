"""What a run does beside learning: evaluates, logs, keeps states and weights, and ends.

Every process has one and asks it the same; the first one has the run folder.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from unmask.distributed.sharding import unsharded
from unmask.evaluation.evaluate import Evaluation, evaluate
from unmask.rollout.sample import canvas
from unmask.tasks.scoring import RewardError, RewardFailure
from unmask.tasks.task import prompt_ids
from unmask.training.batch import Batch, Experiment, PromptTooLong, batch_metrics, samples_of
from unmask.training.run.broken import BrokenUpdate, keep
from unmask.training.run.folder import BEST, RunFolder, provenance, read_metrics
from unmask.training.run.health import REACH, Update, health_warnings, updates_of
from unmask.training.run.progress import Best, RunProgress, Skips, ending, keeps_best, progress_of
from unmask.training.run.recorder import Recorder
from unmask.training.run.state import Optimizer, State, restore, tensors_of, write
from unmask.training.setup import Setup
from unmask.util.metering import Meter, count_passes
from unmask.util.micro_batch import MicroBatch
from unmask.util.signals import Paused

EVAL_SEED = -1
"""Every evaluation draws the same noise, and no training batch has it: theirs have seeds from 0."""

Report = Callable[[int, dict[str, float]], None]
Stop = Callable[[], bool]
Look = Callable[[Experiment, Batch], None]
"""Shown every batch, by the first process."""


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
        self,
        source: Experiment,
        optimizer: Optimizer,
        rng: torch.Generator,
        meter: Meter,
        report: Report,
        stop: Stop,
        look: Look,
    ) -> None:
        self.source, self.config, self.setup = source, source.config, source.setup
        self.policy, self.ranks = source.setup.policy, source.setup.ranks
        self.optimizer, self.rng, self.meter = optimizer, rng, meter
        self.report, self.stop, self.look, self.start = report, stop, look, time.perf_counter()
        self.held_out = source.task.rows("test", self.config.eval.prompts, 0)
        prompts = [prompt_ids(self.policy, source.task, row) for row in self.held_out]
        canvas(prompts, source.decoding.length, self.policy, "cpu")  # says now if one is too long
        self.recorder = Recorder(source)
        self.run: RunFolder | None = None
        self.spent, self.why, self.history = 0.0, "", list[Update]()
        if self.ranks.first:
            report(0, {})

    def begin(self, run_folder: Callable[[], RunFolder], start: State | Evaluation | None) -> int:
        """Put everything where it was, or evaluate what is to be trained where nobody has; returns the updates done."""
        if isinstance(start, State):
            state = start
            restore(self.policy, self.optimizer, self.rng, state.tensors)
            self.run = run_folder() if self.ranks.first else None
            self.history = updates_of(read_metrics(self.run.folder)) if self.run is not None else []
            self.so_far, self.spent = progress_of(state.facts), state.facts["forwards"]
            self.meter.forwards = self.spent if self.ranks.first else 0.0
            for rows, kept in zip(_rows(self.setup), state.facts["rows"], strict=True):
                rows.most, rows.halved = kept
            self._check_best(state.step)
            return state.step
        before = start or self._measured(0)
        self.so_far = RunProgress(before, Best(0, before), 0, Skips())
        self.run = run_folder() if self.ranks.first else None
        self._record(0, before.metrics(), before.failures)
        self._save_best()
        return 0

    @contextmanager
    def safe(self, step: int, done: int) -> Iterator[None]:
        """Problems or a reward that stop the run in a step cost nothing that has been learnt in those that are done."""
        try:
            yield
        except (RewardError, PromptTooLong) as error:
            if done:
                self._save(done)
            if self.run is not None and isinstance(error, RewardError):
                self.run.log_errors(step, error.failures)
            raise

    def took(
        self, step: int, batch: Batch, found: dict[str, float], rest: dict[str, float], broken: BrokenUpdate | None
    ) -> None:
        """Log an update, warn, and keep its state where that is due. `rest` is what no warning is about."""
        self.spent = self.ranks.total(self.meter.forwards, self.setup.device)
        skips = self.so_far.skips = self.so_far.skips.after(broken is not None)
        told = {**batch_metrics(batch), **found, "train/skipped": float(skips.total)}
        told = told if broken is None else {key: value for key, value in told.items() if math.isfinite(value)}
        counts, begun = health_warnings([*self.history, told])
        self.history = [*self.history, {**told, **counts}][-REACH:]
        self.recorder.took(step, batch, learnt=broken is None or broken.turn > 0)
        self._record(step, {**told, "cost/forwards": self.spent, **rest, **counts}, batch.failures)
        if self.run is not None:
            self.run.log_samples(step, samples_of(batch, self.config.group))
            self.run.log_warnings(step, begun)
            self.look(self.source, batch)
        if broken is not None and skips.in_a_row >= self.config.optimizer.patience:
            self._give_up(step, batch, broken)
        wished = self.stop() or (self.run is not None and self.run.wished_to_stop())
        stopping, every = self.ranks.any(wished, self.setup.device), self.config.save_every
        if stopping or step == self.config.updates or (every and step % every == 0):
            self._save(step)
        if stopping:
            raise Paused(None if self.run is None else self.run.folder, step)

    def over(self, step: int) -> bool:
        """Whether nothing is left to do after so many updates. Evaluates between updates, where that is due."""
        every, last = self.config.eval.every, self.config.updates
        if every and step % every == 0 and self.so_far.looked < step < last:
            found = self._looked(step)
            self.why = ending(self.so_far.best, step, found, self.config.eval)
        return step == last or bool(self.why)

    def finish(self) -> TrainingResult:
        """The end; before the last update, with the best weights."""
        after = self.so_far.best.found if self.why else self._looked(self.config.updates)
        before = self.so_far.before
        if self.run is not None:
            if self.why:
                self.run.take_best()
            best = {"best": self.so_far.best.step} if keeps_best(self.config.eval) else {}
            self.run.finish(before.metrics(), after.metrics(), **best, **({"ended": self.why} if self.why else {}))
            self.run.draw()
        return TrainingResult(before, after, self.run, time.perf_counter() - self.start, self.why)

    def _measured(self, step: int) -> Evaluation:
        # What is measured is no part of what it costs to learn.
        with self.safe(step, step), unsharded(self.policy, self.ranks), count_passes(None):
            asked = self.source.task, self.held_out, self.source.decoding, self.config.eval.samples, EVAL_SEED
            how = self.setup.device, self.setup.rollout_batch, self.ranks, self.config.reward
            return evaluate(self.policy, *asked, *how, self.recorder.watch(step, self.held_out))

    def _looked(self, step: int) -> Evaluation:
        """Evaluate after an update. The best weights so far are kept if configured, and with them the state."""
        found = self._measured(step)
        self._record(step, found.metrics(), found.failures)
        self.so_far.looked, self.so_far.best = step, self.so_far.best.after(step, found)
        if self.so_far.best.step == step and keeps_best(self.config.eval):
            self._save_best()
            if step < self.config.updates:
                self._save(step)
        return found

    def _record(self, step: int, metrics: dict[str, float], failures: Sequence[RewardFailure]) -> None:
        if self.run is not None:
            self.run.log(step, metrics)
            self.run.log_errors(step, failures)
            self.run.log_traces(self.recorder.lines())
            self.report(step, metrics)

    def _save(self, step: int) -> None:
        """The state after `step` to go on from, and the weights for others to use."""
        tensors = tensors_of(self.policy, self.optimizer, self.rng, wanted=self.ranks.first)
        if self.run is not None:
            rows = [[each.most, each.halved] for each in _rows(self.setup)]
            facts = {**self.so_far.data(), "forwards": self.spent, "rows": rows, "made_by": provenance(self.run.folder)}
            write(self.run.folder / "state", step, tensors, {**facts, "lengths": self.run.lengths()})
        with unsharded(self.policy, self.ranks):
            if self.run is not None:
                self.run.save(self.policy)
        self.ranks.barrier()

    def _save_best(self) -> None:
        if keeps_best(self.config.eval):
            with unsharded(self.policy, self.ranks):
                if self.run is not None:
                    self.run.save(self.policy, BEST)

    def _check_best(self, step: int) -> None:
        """Of a run that is gone on with: where the best weights are lost, those of now are the best that there are."""
        lost = keeps_best(self.config.eval) and self.run is not None and not self.run.has_best()
        if self.ranks.any(lost, self.setup.device):
            warnings.warn(f"{BEST} is damaged or gone: the best from update {step} on is kept instead", stacklevel=2)
            self.so_far.best = Best(step, self._measured(step))
            self._save_best()

    def _give_up(self, step: int, batch: Batch, broken: BrokenUpdate) -> None:
        tensors = tensors_of(self.policy, self.optimizer, self.rng, wanted=self.ranks.first)
        where = keep(self.run.folder, step, batch, broken, tensors) if self.run is not None else "the run folder"
        self._save(step)
        raise ValueError(
            f"{self.so_far.skips.in_a_row} updates in a row were skipped, the last because {broken.error}. "
            f"It is in {where}; unmask.training.run.replay does it again"
        )


def _rows(setup: Setup) -> tuple[MicroBatch, MicroBatch]:
    return setup.rollout_batch, setup.update_batch
