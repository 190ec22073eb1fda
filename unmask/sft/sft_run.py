"""A fine-tuning run: `BaseRun` with the held-out loss and the solve rate of each source."""

import json
import math
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from unmask.config.keys import with_resolved
from unmask.distributed.processes import ALONE
from unmask.evaluation.evaluate import Evaluator
from unmask.models import Model
from unmask.models.lora import has_adapter
from unmask.rollout.decoding import Decoding
from unmask.rollout.graphs import Graphs
from unmask.rollout.sample import completions, row_seeds, sample_in_turn
from unmask.sft.adapt import ADAPTED
from unmask.sft.config import CONFIG, SftConfig
from unmask.sft.data import SftData
from unmask.sft.diffusion_loss import QUARTERS, add_noise, bound, quarter_metrics, quarter_sums, token_losses
from unmask.sft.packing import Batches, PackedBatch, width_buckets
from unmask.sft.sources import SftSource
from unmask.training.optim import Optimizer, learning_rate
from unmask.training.run.base_run import EVAL_SEED, BaseRun, Hooks
from unmask.training.run.card import Training, task_arguments
from unmask.training.run.folder import RunFolder
from unmask.util.micro_batch import MicroBatch

SHOWN = 4
"""Held-out examples of each source whose greedy completions are logged."""

ROLLOUTS = 256
"""Completions that are sampled at a time."""


@dataclass(frozen=True)
class SftExperiment:
    config: SftConfig
    policy: Model
    device: str
    data: list[SftData]
    batches: Batches
    micro_batch: MicroBatch
    """Counts tokens."""

    def settings(self) -> dict[str, Any]:
        """The configuration with the values that were decided for keys without one."""
        decided = {"device": self.device, "micro_batch_tokens": self.micro_batch.size}
        decided |= {"full": not has_adapter(self.policy)}
        return with_resolved(self.config.dump(), decided, self.policy.fingerprint)


@dataclass(frozen=True)
class SftResult:
    before: dict[str, float]
    after: dict[str, float]
    run: RunFolder
    seconds: float
    behaviours: dict[str, dict[str, int]]
    """Of each source with behaviours: examples of each, and `redrawn` rows."""


@dataclass(frozen=True)
class SftEvaluation:
    values: dict[str, float]
    samples: list[dict[str, str]] = field(default_factory=list)
    """A few completions, for people to read."""

    def metrics(self) -> dict[str, float]:
        return self.values

    def data(self) -> dict[str, Any]:
        """For JSON; without samples, which have their own file."""
        return self.values


class SftRun(BaseRun[SftEvaluation]):
    config: SftConfig
    config_file = CONFIG

    def __init__(self, experiment: SftExperiment, optimizer: Optimizer, rng: torch.Generator, hooks: Hooks) -> None:
        self.experiment, self.micro_batches = experiment, (experiment.micro_batch,)
        super().__init__(experiment.config, experiment.policy, optimizer, rng, experiment.device, ALONE, hooks)

    def _training(self) -> Training:
        names = [data.name for data in self.experiment.data]
        sources = [_described(source, self.config.behaviours) for source in self.config.data]
        adapted = Path(self.config.model) / ADAPTED
        base = json.loads(adapted.read_text())["model"] if adapted.is_file() else self.config.model
        first = self.config.data[0]
        return Training(
            command=f"unmask {'adapt' if adapted.is_file() else 'sft'} {base} {CONFIG}",
            base=base,
            method="supervised fine-tuning with the masked diffusion loss",
            tasks=names,
            graded_by="" if first.task is None else task_arguments(first.task, first.options),
            data=", ".join(sources),
            tags=("sft", *names),
            papers=("2502.09992",),
        )

    def _evaluation_of(self, data: Mapping[str, Any]) -> SftEvaluation:
        return SftEvaluation(dict(data))

    def log(self, step: int, batch: PackedBatch, metrics: dict[str, float]) -> None:
        """Log an update. Too many updates in a row that are not finite end the run with an error."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self.step, skipped = step, len(finite) < len(metrics)
        self.skips = self.skips.after(skipped)
        rates = {"train/lr": learning_rate(self.config, step), "train/epoch": step / self.experiment.batches.count}
        speed = {"time/tokens_per_s": batch.tokens_BW.numel() / self.times["time/update"]}
        self._log_metrics(step, {**finite, "train/skipped": float(self.skips.total), **rates, **self.times, **speed})
        if skipped:
            loss, norm = metrics["train/loss"], metrics["train/grad_norm"]
            why = f"the loss ({loss:.4g}) or its gradient ({norm:.4g}) is not finite: lower optimizer.lr"
            warnings.warn(f"update {step} was skipped: {why}", stacklevel=2)
            if self.too_many_skips:
                self.save(step)
                raise ValueError(f"{self.skips.in_a_row} updates in a row were skipped, the last because {why}")

    def finish(self) -> SftResult:
        before, after = self.before.metrics(), (self.last or self._measure(self.step)).metrics()
        assert self.folder is not None  # fine-tuning runs in one process
        canvas = {each.name: each.canvas for each in self.experiment.data}
        card = self._card(self.step, SftEvaluation(after), self.step)
        behaviours = {each.name: each.behaviours for each in self.experiment.data if each.behaviours}
        facts = {"canvas": canvas, **({"behaviours": behaviours} if behaviours else {})}
        self.folder.finish(before, after, facts, card)
        return SftResult(before, after, self.folder, time.perf_counter() - self.started, behaviours)

    def _log_evaluation(self, step: int, evaluation: SftEvaluation) -> None:
        if self.folder is not None:
            self.folder.log_samples(step, evaluation.samples)
        self._log_metrics(step, evaluation.metrics())

    @torch.no_grad()
    def _measure(self, step: int) -> SftEvaluation:
        """The held-out loss of every source, the solve rates of its task, and a few completions."""
        evaluation = SftEvaluation({})
        self.policy.eval()
        for data in self.experiment.data:
            if not data.held_out:
                continue
            values = self._held_out_loss(data)
            decoding = _two_a_step(data.canvas, self.policy)
            if data.task is not None:
                rows = data.task.rows("test", self.config.eval.prompts, 0)
                samples, micro_batch = self.config.eval.samples, MicroBatch(ROLLOUTS)
                evaluator = Evaluator(self.policy, data.task, decoding, samples, EVAL_SEED, self.device, micro_batch)
                solved = evaluator.evaluate(rows).metrics()
                values |= {key.removeprefix("eval/"): value for key, value in solved.items()}
            evaluation.values.update({f"eval/{data.name}/{key}": value for key, value in values.items()})
            evaluation.samples.extend(self._samples(data, decoding))
        return evaluation

    def _held_out_loss(self, data: SftData) -> dict[str, float]:
        """With the same noise every time."""
        rng, total, sums_24 = torch.Generator().manual_seed(0), 0.0, torch.zeros(2, QUARTERS, dtype=torch.float64)
        for bucket in width_buckets(data.held_out, self.policy.eos_id, self.policy.max_length):
            batch = PackedBatch(bucket.tokens_NW.long(), bucket.given_N, len(bucket.given_N))
            noise = add_noise(batch, self.policy.mask_id, rng, getattr(self.policy, "causal_block", None))
            for piece in noise.pieces(max(1, self.experiment.micro_batch.size // bucket.width)):
                loss_Q = token_losses(self.policy, piece, self.device)
                total += float(bound(loss_Q, piece))
                sums_24 += quarter_sums(loss_Q, piece)
        return {"loss": total / len(data.held_out), **quarter_metrics(sums_24)}

    def _samples(self, data: SftData, decoding: Decoding) -> Iterator[dict[str, str]]:
        examples = data.held_out[:SHOWN]
        seeds = row_seeds(EVAL_SEED, len(examples)).to(self.device)
        prompts = [example.prompt for example in examples]
        traces = sample_in_turn(self.policy, prompts, seeds, decoding.greedy())
        texts = [text for trace in traces for text in completions(self.policy, trace, decoding.length)]
        for example, text in zip(examples, texts, strict=True):
            prompt, wanted = (self.policy.tokenizer.raw(ids) for ids in (example.prompt, example.completion))
            yield {"lesson": data.name, "prompt": prompt, "completion": text, "wanted": wanted}


def _described(source: SftSource, behaviours: Mapping[str, float]) -> str:
    """For the model card: wrong answers that were taught on purpose are part of it."""
    shares = [f"{share:.0%} {name}" for name, share in source.shares(behaviours).items() if share]
    answers = f" with {' and '.join(shares)} answers, wrong on purpose" if shares else ""
    return source.file or f"the task {source.task}{answers}"


def _two_a_step(length: int, policy: Model) -> Decoding:
    """Two positions a step; one in the blocks of a block-causal model that such steps do not fill."""
    block = getattr(policy, "causal_block", None)
    whole = block is None or (length % 2 == 0 and block % 2 == 0)
    # Not captured: every evaluation would capture anew.
    return Decoding(length, max(1, length // 2) if whole else length, graphs=Graphs(False))
