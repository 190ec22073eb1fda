"""Masked-diffusion fine-tuning: of a model that is one already, or of one that `unmask.sft.adapt` has just made one.

    lessons -> canvases of few widths -> batch -> noise -> loss -> backward -> step -> records

The order of the data is a function of the seed and of the update's number, and the generator of the noise is part of
the state, so a run that was cut off goes on as if it had not been: bit for bit on a CPU.
"""

import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from unmask.config.defaults import device_of
from unmask.core.options import LoraOptions
from unmask.evaluation.evaluate import Evaluator
from unmask.models import Model, Tiny, load_model
from unmask.models.lora import add_adapter, has_adapter, merge, unfreeze_adapter
from unmask.rollout.decoding import Decoding
from unmask.rollout.sample import completions, row_seeds, sample_in_turn
from unmask.sft.config import SftConfig, read_sft_config
from unmask.sft.data import SftData, load_sft_data
from unmask.sft.diffusion_loss import QUARTERS, Noised, bound, by_quarter, named_quarters, noised, token_losses
from unmask.sft.packing import Batches, PackedBatch, bucketed, coarseness
from unmask.training.optim import Optimizer, learning_rate, make_optimizer, set_learning_rate
from unmask.training.run.folder import RunFolder, checkpoint_of, lock_run, lock_when_made, provenance
from unmask.training.run.progress import Skips
from unmask.training.run.resume import last_state
from unmask.training.run.state import State, restore, state_tensors, write_state
from unmask.training.setup import decoder_of, is_large
from unmask.util.micro_batch import MicroBatch
from unmask.util.signals import Paused

CONFIG = "sft.yaml"
EVAL_SEED = -1
SHOWN = 4
"""Held-out examples of each lesson whose greedy completions are written down."""

ROLLOUTS = 256
"""Completions that are made at a time."""

Report = Callable[[int, dict[str, float]], None]
Stop = Callable[[], bool]


@dataclass(frozen=True)
class SftResult:
    before: dict[str, float]
    after: dict[str, float]
    run: RunFolder
    seconds: float


def finetune(
    config: SftConfig,
    run_folder: Callable[[], RunFolder],
    report: Report = lambda step, metrics: None,
    stop: Stop = lambda: False,
) -> SftResult:
    """Train as configured. The run folder is made once the model is loaded, the data is read and the model evaluated.

    Once `stop` says so, the update is finished, its state is kept, and Paused is raised.
    """
    with lock_when_made(run_folder) as made:
        return _finetuned(config, made, report, None, stop)


def resume(folder: Path, report: Report = lambda step, metrics: None, stop: Stop = lambda: False) -> SftResult:
    """Go on with a run that was cut off, from the last state it has kept, or from the beginning if it has kept none."""
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} is no folder of a fine-tuning run: there is no {CONFIG} in it")
    with lock_run(folder):
        config = read_sft_config(folder / CONFIG)
        state = last_state(folder, config.user_files, CONFIG)
        lengths = state.facts["lengths"] if state is not None else {}
        return _finetuned(config, lambda: RunFolder.reopen(folder, lengths), report, state, stop)


def _finetuned(
    config: SftConfig, run_folder: Callable[[], RunFolder], report: Report, state: State | None, stop: Stop
) -> SftResult:
    """From the state on, if there is one."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("fine-tuning runs in one process: start it without torchrun")
    start, device = time.perf_counter(), device_of(config)
    policy = trained_policy(config, device)
    lessons = [load_sft_data(lesson, policy, config.seed, config.rows, config.eval.prompts) for lesson in config.data]
    examples = [example for lesson in lessons for example in lesson.examples]
    coarse = coarseness(examples, policy.max_length, config.tokens)
    batches = Batches(bucketed(examples, policy.eos_id, policy.max_length, coarse), config.tokens, config.seed)
    optimizer = make_optimizer(policy, config.optimizer)
    rng, rows = torch.Generator().manual_seed(config.seed), MicroBatch(_pass_tokens(config, policy))
    keeper = _SftRun(config, policy, optimizer, rng, rows, lessons, report, device)
    step = keeper.begin(run_folder, state)
    while step < config.updates:
        step, clock = step + 1, time.perf_counter()
        rate = learning_rate(config, step)
        set_learning_rate(optimizer, rate)
        batch = batches.batch(step)
        with growing(policy, step, config.grow, batch.tokens_BW.shape[1]):
            found = learn(policy, optimizer, batch, noised(batch, policy.mask_id, rng), rows, config, device)
        seconds = time.perf_counter() - clock
        times = {"time/update": seconds, "time/tokens_per_s": batch.tokens_BW.numel() / seconds}
        keeper.took(step, found, {"train/lr": rate, "train/epoch": step / batches.count, **times}, stop)
    return keeper.finish(time.perf_counter() - start)


def trained_policy(config: SftConfig, device: str) -> Model:
    """The model with what is to be trained set free."""
    dtype = None if config.dtype is None else getattr(torch, config.dtype)
    policy = load_model(checkpoint_of(config.model), dtype=dtype, device=device)
    full = config.full if config.full is not None else isinstance(policy, Tiny) and not has_adapter(policy)
    if config.lora != LoraOptions() and (full or has_adapter(policy)):
        why = "all weights are trained" if full else "the adapter that is trained further has its own"
        raise ValueError(f"lora: has options, but {why}; leave them out")
    if config.grow and decoder_of(policy, "grow").causal_block is not None:
        raise ValueError("grow: this model is block-causal and stays so; leave it out")
    if config.gradient_checkpointing:
        decoder_of(policy, "gradient_checkpointing").gradient_checkpointing = True
    if full:
        if has_adapter(policy):
            merge(policy)
        policy.requires_grad_(True)
    elif has_adapter(policy):
        unfreeze_adapter(policy)
    else:
        add_adapter(policy, config.lora, config.seed)
    if config.compile:
        decoder_of(policy, "compile").compile_layers()
    return policy


def _pass_tokens(config: SftConfig, policy: Model) -> int:
    return config.pass_tokens or (16_384 if is_large(policy) else 65_536)


@contextmanager
def growing(policy: Model, step: int, updates: int, width: int) -> Iterator[None]:
    """Under it attention reaches as far ahead as it may in this update: to the end of a block, which doubles from 1."""
    if step > updates:
        yield
        return
    decoder = decoder_of(policy, "grow")
    decoder.causal_block = block_at(step, updates, width)
    try:
        yield
    finally:
        decoder.causal_block = None


def block_at(step: int, updates: int, width: int) -> int:
    """1 in the first of so many updates, then powers of 2 below the width, each for as many updates."""
    doublings = (width - 1).bit_length()
    return int(2 ** min((step - 1) * doublings // updates, doublings - 1)) if doublings else 1


def learn(
    policy: Model,
    optimizer: Optimizer,
    batch: PackedBatch,
    noise: Noised,
    rows: MicroBatch,
    config: SftConfig,
    device: str,
) -> dict[str, float]:
    """One optimiser step; none where the loss or its gradient is not finite, which is in what it returns.

    When memory runs out, what was found is thrown away and found again in smaller passes.
    """
    width = batch.tokens_BW.shape[1]
    while True:
        optimizer.zero_grad(set_to_none=True)
        try:
            heard = []
            for piece in noise.pieces(max(1, rows.size // width)):
                loss_Q = token_losses(policy, piece, device)
                loss = bound(loss_Q, piece) / batch.full
                loss.backward()
                heard.append(loss_Q.detach())
            break
        except torch.OutOfMemoryError as error:
            if rows.size <= width:
                raise
            rows.halve(error, tried=batch.tokens_BW.numel())
    loss_Q = torch.cat(heard).float().cpu()
    total = float(bound(loss_Q, noise)) / len(batch.given_B)
    parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, config.optimizer.max_grad_norm))
    if math.isfinite(total) and math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    quarters = {f"train/{name}": value for name, value in named_quarters(by_quarter(loss_Q, noise)).items()}
    return {"train/loss": total, **quarters, "train/grad_norm": norm}


class _SftRun:
    """What a run does beside learning: evaluates, logs, keeps states and weights, and ends."""

    def __init__(
        self,
        config: SftConfig,
        policy: Model,
        optimizer: Optimizer,
        rng: torch.Generator,
        rows: MicroBatch,
        lessons: list[SftData],
        report: Report,
        device: str,
    ) -> None:
        self.config, self.policy, self.optimizer, self.rng, self.rows = config, policy, optimizer, rng, rows
        self.lessons, self.report, self.device = lessons, report, device
        self.before, self.skips = dict[str, float](), Skips()

    def begin(self, run_folder: Callable[[], RunFolder], state: State | None) -> int:
        """Evaluate what is to be trained, or put everything where it was; returns the updates that have been done."""
        if state is not None:
            restore(self.policy, self.optimizer, self.rng, state.tensors)
            self.rows.size, self.rows.halvings = state.facts["rows"]
            self.before, self.skips = state.facts["before"], Skips(*state.facts["skips"])
            self.run = run_folder()
            return state.step
        self.before, samples = self._measured()
        self.run = run_folder()
        self._record(0, self.before, samples)
        return 0

    def took(self, step: int, found: dict[str, float], rest: dict[str, float], stop: Stop) -> None:
        """Log an update; evaluate and keep its state where that is due. Too many in a row that are skipped end it."""
        ill = [key for key, value in found.items() if not math.isfinite(value)]
        self.skips = self.skips.after(bool(ill))
        told = {key: value for key, value in found.items() if key not in ill}
        self._log(step, {**told, "train/skipped": float(self.skips.total), **rest})
        if ill:
            warnings.warn(f"update {step} was skipped: {_not_finite(found)}", stacklevel=2)
        every, last = self.config.eval.every, step == self.config.updates
        if every and step % every == 0 and not last:
            self._looked(step)
        hopeless = self.skips.in_a_row >= self.config.optimizer.patience
        stopping = stop() or self.run.take_stop_request()
        if hopeless or stopping or last or (self.config.save_every and step % self.config.save_every == 0):
            self._save(step)
        if hopeless:
            many = self.skips.in_a_row
            raise ValueError(f"{many} updates in a row were skipped, the last because {_not_finite(found)}")
        if stopping and not last:
            raise Paused(self.run.path, step)

    def finish(self, seconds: float) -> SftResult:
        after = self._looked(self.config.updates)
        self.run.finish(self.before, after, {"canvas": {lesson.name: lesson.canvas for lesson in self.lessons}})
        return SftResult(self.before, after, self.run, seconds)

    def _save(self, step: int) -> None:
        tensors = state_tensors(self.policy, self.optimizer, self.rng)
        facts = {"before": self.before, "skips": self.skips, "rows": [self.rows.size, self.rows.halvings]}
        facts |= {
            "made_by": provenance(self.run.path, self.config.user_files, CONFIG),
            "lengths": self.run.log_lengths(),
        }
        write_state(self.run.path / "state", step, tensors, facts)
        self.run.save(self.policy)

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log(step, metrics)
        self.report(step, metrics)

    def _looked(self, step: int) -> dict[str, float]:
        found, samples = self._measured()
        self._record(step, found, samples)
        return found

    def _record(self, step: int, found: dict[str, float], samples: list[dict[str, str]]) -> None:
        self.run.log_samples(step, samples)
        self._log(step, found)

    @torch.no_grad()
    def _measured(self) -> tuple[dict[str, float], list[dict[str, str]]]:
        """Held-out loss of every lesson, solve rates of its task; and a few completions to read."""
        found, samples = dict[str, float](), list[dict[str, str]]()
        self.policy.eval()
        for lesson in self.lessons:
            if not lesson.held_out:
                continue
            told = self._held_out_loss(lesson)
            how = Decoding(lesson.canvas, max(1, lesson.canvas // 2), lesson.canvas)
            if lesson.task is not None:
                rows = lesson.task.rows("test", self.config.eval.prompts, 0)
                evaluator = Evaluator(
                    self.policy,
                    lesson.task,
                    how,
                    self.config.eval.samples,
                    EVAL_SEED,
                    self.device,
                    MicroBatch(ROLLOUTS),
                )
                solved = evaluator.evaluate(rows).metrics()
                told |= {key.removeprefix("eval/"): value for key, value in solved.items()}
            found |= {f"eval/{lesson.name}/{key}": value for key, value in told.items()}
            samples += self._samples(lesson, how)
        return found, samples

    def _held_out_loss(self, lesson: SftData) -> dict[str, float]:
        """By the same noise every time."""
        rng, total, sums_24 = torch.Generator().manual_seed(0), 0.0, torch.zeros(2, QUARTERS, dtype=torch.float64)
        for bucket in bucketed(lesson.held_out, self.policy.eos_id, self.policy.max_length):
            batch = PackedBatch(bucket.tokens_NW.long(), bucket.given_N, len(bucket.given_N))
            for piece in noised(batch, self.policy.mask_id, rng).pieces(max(1, self.rows.size // bucket.width)):
                loss_Q = token_losses(self.policy, piece, self.device)
                total += float(bound(loss_Q, piece))
                sums_24 += by_quarter(loss_Q, piece)
        return {"loss": total / len(lesson.held_out), **named_quarters(sums_24)}

    def _samples(self, lesson: SftData, how: Decoding) -> Iterator[dict[str, str]]:
        some = lesson.held_out[:SHOWN]
        seeds = row_seeds(EVAL_SEED, len(some)).to(self.device)
        traces = sample_in_turn(self.policy, [example.prompt for example in some], seeds, how.greedy())
        texts = [text for trace in traces for text in completions(self.policy, trace, how.length)]
        for example, text in zip(some, texts, strict=True):
            prompt, wanted = (self.policy.tokenizer.raw(ids) for ids in (example.prompt, example.completion))
            yield {"lesson": lesson.name, "prompt": prompt, "completion": text, "wanted": wanted}


def _not_finite(found: dict[str, float]) -> str:
    loss, norm = found["train/loss"], found["train/grad_norm"]
    return f"the loss ({loss:.4g}) or its gradient ({norm:.4g}) is not finite: lower optimizer.lr"
