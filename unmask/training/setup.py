"""From a configuration to models on their devices: what is trained, what it is compared with, among which processes."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from unmask.config import Config
from unmask.config.defaults import LARGE, device_of, micro_batch_sizes, rollout_shape
from unmask.config.schema import TrainingConfig
from unmask.core.options import LoraOptions
from unmask.core.order import ORDERS
from unmask.core.schedule import SCHEDULES
from unmask.core.token_sampling import TokenSampling
from unmask.distributed.processes import Ranks, join_processes
from unmask.distributed.sharding import shard
from unmask.models import Model, Policy, Tiny, load_model
from unmask.models.decoder import Decoder
from unmask.models.lora import ReferencePolicy, add_adapter, has_adapter, merge, unfreeze_adapter
from unmask.rollout.cache import cache_of
from unmask.rollout.decoding import Decoding
from unmask.tasks import Task
from unmask.training.run.folder import checkpoint_of
from unmask.util.micro_batch import MicroBatch


@dataclass(frozen=True)
class Setup:
    policy: Model
    reference: Policy | None
    """The policy as it was, where a method asks for it."""
    device: str
    ranks: Ranks
    rollout_batch: MicroBatch
    update_batch: MicroBatch


@contextmanager
def set_up(config: Config, needs_reference: bool) -> Iterator[Setup]:
    """The policy ready to be trained. With a new adapter the reference costs nothing: it is the policy without it."""
    with join_processes(device_of(config)) as (ranks, device):
        check_shares(config, ranks)
        policy = trainable_policy(config, device)
        reference: Policy | None = None
        if has_adapter(policy):
            reference = ReferencePolicy(policy, alike=config.compile) if needs_reference else None
        else:
            # Compiled layers round differently where nothing takes a gradient, so the reference's do too.
            reference = copy.deepcopy(policy).requires_grad_(config.compile) if needs_reference else None
            if ranks.size > 1:
                if config.compile:
                    raise ValueError("compile: not with full training in several processes, whose layers are sharded")
                ranks = shard(policy, _layers(policy), ranks)
                if reference is not None:
                    shard(reference, _layers(reference), ranks)
        if config.compile:
            for compiled in (policy, reference):
                if compiled is not None and not isinstance(compiled, ReferencePolicy):
                    decoder_of(compiled, "compile").compile_layers()
        rollout_batch, update_batch = micro_batches(config, policy)
        yield Setup(policy, reference, device, ranks, rollout_batch, update_batch)


def trainable_policy(config: TrainingConfig, device: str) -> Model:
    """The model on its device with what is trained set free: all weights, or an adapter, a new one if it has none."""
    dtype = None if config.dtype is None else getattr(torch, config.dtype)
    policy = load_model(checkpoint_of(config.model), dtype=dtype, device=device)
    full = config.full if config.full is not None else isinstance(policy, Tiny) and not has_adapter(policy)
    if config.lora != LoraOptions() and (full or has_adapter(policy)):
        why = "all weights are trained" if full else "the adapter that is trained further has its own"
        raise ValueError(f"lora: has options, but {why}; leave them out")
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
    return policy


def is_large(policy: Model) -> bool:
    return _weight_count(policy) >= LARGE


def micro_batches(config: Config, policy: Model) -> tuple[MicroBatch, MicroBatch]:
    """Of rollouts and of updates, as configured or by the size of the model."""
    sizes = micro_batch_sizes(config, _weight_count(policy))
    return MicroBatch(sizes.rollout), MicroBatch(sizes.update)


def _weight_count(policy: Model) -> int:
    return sum(weight.numel() for weight in policy.parameters())


def check_shares(config: Config, ranks: Ranks) -> None:
    """ValueError where a process would have nothing to roll out."""
    rollouts = config.prompts * config.group
    if rollouts < ranks.size:
        raise ValueError(
            f"prompts x group: {rollouts} rollouts cannot be shared among {ranks.size} processes; raise one of them"
        )


def decoding_of(config: Config, task: Task) -> Decoding:
    """How the configuration has completions made."""
    rollout = config.rollout
    length, steps, block = rollout_shape(config, task)
    return Decoding(
        length,
        steps,
        block,
        sampling=TokenSampling(rollout.temperature, rollout.top_k, rollout.top_p, rollout.guidance),
        order=ORDERS[rollout.order],
        schedule=SCHEDULES[rollout.schedule],
        threshold=rollout.threshold,
        cache=cache_of(rollout.cache, rollout.refresh),
    )


def decoder_of(policy: object, wish: str) -> Decoder:
    """The policy, where it is of the kind for which the wish has been built."""
    if not isinstance(policy, Decoder):
        raise ValueError(f"{wish} has been built for decoders (LLaDA, Dream, Llama, Qwen), not for encoders")
    return policy


def _layers(policy: object) -> nn.ModuleList:
    """The layers over which full training in several processes spreads a model."""
    return decoder_of(policy, "full training in several processes").lm.model.layers
