"""Supervised fine-tuning of a masked diffusion model, or of a checkpoint that `unmask.sft.adapt` wrote.

    data -> canvases of few widths -> batch -> noise -> loss -> backward -> step -> log -> evaluate -> save

The order of the data is a function of the seed and of the number of the update, and the generator of the noise is part
of the saved state. A resumed run therefore gives the same result as an uninterrupted one: bit for bit on a CPU.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from unmask.config.defaults import device_of
from unmask.models import Model
from unmask.sft.config import CONFIG, SftConfig, read_sft_config
from unmask.sft.data import load_sft_data
from unmask.sft.diffusion_loss import NoisedBatch, add_noise, bound, quarter_metrics, quarter_sums, token_losses
from unmask.sft.packing import Batches, PackedBatch, width_buckets, width_step
from unmask.sft.sft_run import SftExperiment, SftResult, SftRun
from unmask.training.optim import Optimizer, learning_rate, make_optimizer, set_learning_rate
from unmask.training.run.base_run import Hooks
from unmask.training.run.folder import MakeFolder, RunFolder, lock_run, lock_when_made, with_config
from unmask.training.run.resume import check_start, last_state
from unmask.training.run.state import State
from unmask.training.setup import decoder_of, is_large, trainable_policy
from unmask.util.micro_batch import MicroBatch


def finetune(
    config: SftConfig, make_folder: MakeFolder, hooks: Hooks = Hooks(), weights: Path | None = None
) -> SftResult:
    """Train as configured. The run folder is created after the model and data are loaded and the first evaluation.

    weights   the folder to load the model from, if it is not at `config.model` before the run folder is created
    """
    with lock_when_made(make_folder) as make:
        return _finetune(set_up_sft(config, weights), make, hooks, None)


def resume(folder: Path, hooks: Hooks = Hooks()) -> SftResult:
    """Resume an interrupted run from its last saved state, or from the beginning if there is none."""
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} is not the folder of a fine-tuning run: there is no {CONFIG} in it")
    with lock_run(folder):
        config = read_sft_config(folder / CONFIG)
        state = last_state(folder, config.user_files, CONFIG)
        lengths = state.facts["lengths"] if state is not None else {}
        experiment = set_up_sft(config)
        check_start(folder, experiment.policy, CONFIG)
        return _finetune(experiment, lambda: RunFolder.reopen(folder, lengths), hooks, state)


def _finetune(experiment: SftExperiment, make_folder: MakeFolder, hooks: Hooks, state: State | None) -> SftResult:
    """The training loop, starting from `state` if given."""
    config = experiment.config
    policy, batches, micro_batch = experiment.policy, experiment.batches, experiment.micro_batch
    optimizer, rng = make_optimizer(policy, config.optimizer), torch.Generator().manual_seed(config.seed)
    run = SftRun(experiment, optimizer, rng, hooks)
    block = getattr(policy, "causal_block", None)
    run.start(make_folder if state is not None else with_config(make_folder, experiment.settings(), CONFIG), state)
    for step in run.remaining_steps():
        with run.timed("update"):
            set_learning_rate(optimizer, learning_rate(config, step))
            batch = batches.batch(step)
            noise = add_noise(batch, policy.mask_id, rng, block)
            with annealed_attention(policy, step, config.attention_annealing, batch.width):
                metrics = sft_update(policy, optimizer, batch, noise, micro_batch, config.optimizer.max_grad_norm)
        run.log(step, batch, metrics)
        run.pause_if_requested(step)
        if run.eval_due(step):
            run.evaluate(step)
        if run.save_due(step):
            run.save(step)
    return run.finish()


def set_up_sft(config: SftConfig, weights: Path | None = None) -> SftExperiment:
    """The model ready to be trained, and the data as batches of its tokens."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("fine-tuning runs in one process: start it without torchrun")
    device = device_of(config)
    policy = trainable_policy(config if weights is None else config.model_copy(update={"model": str(weights)}), device)
    if config.attention_annealing and decoder_of(policy, "attention_annealing").causal_block is not None:
        raise ValueError("attention_annealing: this model is block-causal and remains so; leave it out")
    if config.compile:
        decoder_of(policy, "compile").compile_layers()
    data = [
        load_sft_data(source, policy, config.seed, config.max_examples, config.eval.prompts, config.behaviours)
        for source in config.data
    ]
    examples = [example for each in data for example in each.examples]
    step = width_step(examples, policy.max_length, config.batch_tokens)
    buckets = width_buckets(examples, policy.eos_id, policy.max_length, step)
    micro_batch = MicroBatch(config.micro_batch_tokens or (16_384 if is_large(policy) else 65_536))
    batches = Batches(buckets, config.batch_tokens, config.seed)
    return SftExperiment(config, policy, device, data, batches, micro_batch)


@contextmanager
def annealed_attention(policy: Model, step: int, updates: int, width: int) -> Iterator[None]:
    """In the first `updates` updates attention is block-causal, with blocks that double from 1; then it is full."""
    if step > updates:
        yield
        return
    decoder = decoder_of(policy, "attention_annealing")
    decoder.causal_block = block_length(step, updates, width)
    try:
        yield
    finally:
        decoder.causal_block = None


def block_length(step: int, updates: int, width: int) -> int:
    """Powers of 2 below the width, starting with 1, each for the same number of updates."""
    doublings = (width - 1).bit_length()
    return int(2 ** min((step - 1) * doublings // updates, doublings - 1)) if doublings else 1


def sft_update(
    policy: Model,
    optimizer: Optimizer,
    batch: PackedBatch,
    noise: NoisedBatch,
    micro_batch: MicroBatch,
    max_grad_norm: float,
) -> dict[str, float]:
    """One optimiser step; no step if the loss or its gradient is not finite, which the metrics show.

    If memory runs out, the gradient is dropped and computed again in smaller passes.
    """
    device, width = next(policy.parameters()).device, batch.width
    while True:
        optimizer.zero_grad(set_to_none=True)
        try:
            losses = []
            for piece in noise.pieces(max(1, micro_batch.size // width)):
                loss_Q = token_losses(policy, piece, device)
                loss = bound(loss_Q, piece) / batch.full
                loss.backward()
                losses.append(loss_Q.detach())
            break
        except torch.OutOfMemoryError as error:
            if micro_batch.size <= width:
                raise
            micro_batch.halve(error, tried=batch.tokens_BW.numel())
    loss_Q = torch.cat(losses).float().cpu()
    total = float(bound(loss_Q, noise)) / len(batch.given_B)
    parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm))
    if math.isfinite(total) and math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    quarters = {f"train/{name}": value for name, value in quarter_metrics(quarter_sums(loss_Q, noise)).items()}
    return {"train/loss": total, **quarters, "train/grad_norm": norm}
