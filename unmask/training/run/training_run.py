"""`BaseRun` for RL: adds logs, health checks, the best weights, and early stopping."""

import math
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unmask.config import Config
from unmask.distributed.sharding import unsharded
from unmask.evaluation.evaluate import Evaluation, Evaluator, evaluation_of
from unmask.methods import BASES, PLUGINS
from unmask.rollout.sample import canvas
from unmask.tasks.scoring import RewardError, RewardFailure
from unmask.training.batch import Batch, Experiment, PromptTooLong, batch_metrics, samples_of
from unmask.training.optim import Optimizer
from unmask.training.run.base_run import EVAL_SEED, BaseRun, Hooks
from unmask.training.run.broken import store_broken
from unmask.training.run.card import Training, arxiv_ids, task_arguments
from unmask.training.run.file_names import BEST
from unmask.training.run.folder import MakeFolder, RunFolder, read_metrics
from unmask.training.run.health import REACH, StepMetrics, health_warnings, recent_updates
from unmask.training.run.progress import Best, best_of, keeps_best, reason_to_end
from unmask.training.run.recorder import TraceRecorder
from unmask.training.run.state import State, state_tensors
from unmask.training.update import BrokenUpdate, UpdateResult
from unmask.util.metering import Meter, count_passes


@dataclass(frozen=True)
class TrainingResult:
    before: Evaluation
    after: Evaluation
    run: RunFolder | None
    """None except in the first process."""
    seconds: float
    ended: str = ""
    """Why the run ended before its last update; `after` is then its best evaluation."""


class TrainingRun(BaseRun[Evaluation]):
    config: Config
    best: Best

    def __init__(
        self, experiment: Experiment, optimizer: Optimizer, rng: torch.Generator, meter: Meter, hooks: Hooks
    ) -> None:
        self.experiment, self.setup, self.meter = experiment, experiment.setup, meter
        self.micro_batches, self.teacher = (self.setup.rollout_batch, self.setup.update_batch), self.setup.teacher
        policy, device, ranks = self.setup.policy, self.setup.device, self.setup.ranks
        super().__init__(experiment.config, policy, optimizer, rng, device, ranks, hooks)
        task = experiment.task
        self.held_out = task.rows("test", self.config.eval.prompts, 0)
        prompts = [task.prompt_ids(self.policy.tokenizer, row) for row in self.held_out]
        canvas(prompts, experiment.decoding.length, self.policy, "cpu")  # raises now if one is too long
        self.recorder = TraceRecorder(experiment)
        self.forwards, self.history = 0.0, list[StepMetrics]()
        """Forward passes so far, and the metrics for the health checks."""

    def _resume(self, make_folder: MakeFolder, state: State) -> None:
        super()._resume(make_folder, state)
        if self.last is not None and self.evaluated == state.step and not self._is_last(state.step):
            self._decide_end(state.step, self.last)

    def _facts(self) -> dict[str, Any]:
        return {"best": self.best.data(), "forwards": self.forwards}

    def _restore(self, facts: Mapping[str, Any]) -> None:
        self.history = recent_updates(read_metrics(self.folder.path)) if self.folder is not None else []
        self.best, self.forwards = best_of(facts["best"]), facts["forwards"]
        self.meter.forwards = self.forwards if self.ranks.first else 0.0
        self._check_best(self.step)

    def _evaluation_of(self, data: Mapping[str, Any]) -> Evaluation:
        return evaluation_of(data)

    def _training(self) -> Training:
        names = (self.config.method, *self.config.plugins)
        factories = [{**BASES, **PLUGINS}.get(name) for name in names]
        documents = [sys.modules[factory.__module__].__doc__ for factory in factories if factory is not None]
        return Training(
            command=f"unmask train {self.config_file}",
            base=self.config.model,
            method=" with ".join(f"`{name}`" for name in names),
            tasks=[self.experiment.task.name],
            graded_by=task_arguments(self.config.task, self.config.options.get(self.config.task, {})),
            data=self.experiment.task.about.source,
            tags=("reinforcement-learning", *names, self.experiment.task.name),
            papers=list(dict.fromkeys(paper for text in documents for paper in arxiv_ids(text)[:1])),
        )

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
        """Log an update and its health warnings. Too many skipped updates in a row end the run with an error."""
        self.step, broken = step, batch.broken or update.broken
        self.forwards = self.ranks.total(self.meter.forwards, self.device)
        self.skips = self.skips.after(broken is not None)
        metrics = {**batch_metrics(batch), **batch.mismatch, **update.means(), "train/skipped": float(self.skips.total)}
        if broken is not None:
            metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        counts, new_warnings = health_warnings([*self.history, metrics])
        self.history = [*self.history, {**metrics, **counts}][-REACH:]
        self.recorder.record(step, batch, updated=broken is None or broken.inner_step > 0)
        rest = {"cost/forwards": self.forwards, "train/lr": self.optimizer.param_groups[0]["lr"]}
        rest |= _memory_metrics(self.experiment)
        self._record(step, {**metrics, **rest, **self.times, **counts}, batch.failures)
        if self.folder is not None:
            self.folder.log_samples(step, samples_of(batch, self.config.group))
            self.folder.log_warnings(step, new_warnings)
            self.hooks.on_batch(self.experiment, batch)
        if broken is not None and self.too_many_skips:
            self._give_up(step, batch, broken)

    def evaluate(self, step: int) -> None:
        """Evaluate after an update, save the weights if they are the best so far, and decide whether the run ends."""
        super().evaluate(step)
        if self.last is not None and not self._is_last(step):
            self._decide_end(step, self.last)

    def _is_last(self, step: int) -> bool:
        return super()._is_last(step) or self.spent >= 1

    @property
    def spent(self) -> float:
        """The share of `max_forwards` that is spent; 0 without a limit."""
        return self.forwards / self.config.max_forwards if self.config.max_forwards else 0.0

    def _decide_end(self, step: int, evaluation: Evaluation) -> None:
        self.ended = reason_to_end(self.best, step, evaluation, self.config.eval)

    def save_due(self, step: int) -> bool:
        new_best = keeps_best(self.config.eval) and self.best.step == step
        return super().save_due(step) or (self.saved != step and new_best)

    def finish(self) -> TrainingResult:
        """End the run. A run that ended early gets the weights of its best evaluation."""
        before, best = self.before, self.best
        after = best.evaluation if self.ended else self.last or self._measure(self.step)
        if self.folder is not None:
            if self.ended:
                self.folder.take_best()
            facts: dict[str, object] = {"best": best.step} if keeps_best(self.config.eval) else {}
            facts |= {"ended": self.ended} if self.ended else {}
            step = best.step if self.ended else self.step
            self.folder.finish(before.metrics(), after.metrics(), facts, self._card(step, after, step))
            self.folder.draw()
        return TrainingResult(before, after, self.folder, time.perf_counter() - self.started, self.ended)

    def _measure(self, step: int) -> Evaluation:
        evaluator = Evaluator(
            self.policy,
            self.experiment.task,
            self.experiment.decoding,
            samples=self.config.eval.samples,
            seed=EVAL_SEED,
            device=self.device,
            micro_batch=self.setup.rollout_batch,
            ranks=self.ranks,
            reward=self.config.reward,
        )
        # The forward passes of an evaluation do not count as training cost.
        uncounted, sampling = count_passes(None, self.policy), self.experiment.sampling()
        with self.save_on_error(step), unsharded(self.policy, self.ranks), uncounted, sampling:
            return evaluator.evaluate(self.held_out, self.recorder.on_samples(step, self.held_out))

    def _log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        self._record(step, evaluation.metrics(), evaluation.failures)
        self.best = self.best.after(step, evaluation) if step else Best(0, evaluation)
        if self.best.step == step:
            self._save_best()

    def _record(self, step: int, metrics: dict[str, float], failures: Sequence[RewardFailure]) -> None:
        if self.folder is not None:
            self.folder.log_errors(step, failures)
            self.folder.log_traces(self.recorder.take_lines())
        self._log_metrics(step, metrics)

    def _save_best(self) -> None:
        if keeps_best(self.config.eval):
            with unsharded(self.policy, self.ranks):
                if self.folder is not None:
                    card = self._card(self.best.step, self.best.evaluation, self.best.step)
                    self.folder.save(self.policy, card, BEST)

    def _check_best(self, step: int) -> None:
        """After resuming: if the best weights are lost, the current ones replace them."""
        lost = keeps_best(self.config.eval) and self.folder is not None and not self.folder.has_best()
        if self.ranks.any(lost, self.device):
            warnings.warn(
                f"{BEST} is damaged or missing: the best weights from update {step} on are kept", stacklevel=2
            )
            self.best = Best(step, self._measure(step))
            self._save_best()

    def _give_up(self, step: int, batch: Batch, broken: BrokenUpdate) -> None:
        tensors = state_tensors(self.policy, self.optimizer, self.rng, self.teacher, wanted=self.ranks.first)
        where: Path | str = "the run folder"
        if self.folder is not None:
            where = store_broken(self.folder.path, step, batch, broken, tensors)
        self.save(step)
        raise ValueError(
            f"{self.skips.in_a_row} updates in a row were skipped, the last because {broken.error}. "
            f"The last is stored in {where}; unmask.replay(folder) repeats it"
        )


def _memory_metrics(experiment: Experiment) -> Mapping[str, float]:
    """Peak GPU memory of the step, what captured steps keep, and the sizes of micro-batches that were halved."""
    metrics, setup = {}, experiment.setup
    if setup.device.startswith("cuda"):
        metrics["memory/peak_gib"] = torch.cuda.max_memory_allocated(setup.device) / 2**30
        torch.cuda.reset_peak_memory_stats(setup.device)
        if kept := sum(experiment.decoding.graphs.bytes().values()):
            metrics["memory/graphs_gib"] = kept / 2**30
    for name, micro_batch in (("rollout", setup.rollout_batch), ("update", setup.update_batch)):
        if micro_batch.halvings:
            metrics[f"memory/{name}_micro_batch_size"] = float(micro_batch.size)
    return metrics
