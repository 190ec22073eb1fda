"""From a configuration to models on their devices: the policy, the reference policy, and the processes."""

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
from unmask.core.policy import Policy
from unmask.core.schedule import SCHEDULES
from unmask.core.token_sampling import TokenSampling
from unmask.distributed.processes import Ranks, join_processes
from unmask.distributed.sharding import shard
from unmask.models import Model, Tiny, load_model
from unmask.models.checkpoint import fingerprint_of
from unmask.models.decoder import Decoder
from unmask.models.earlier import EarlierPolicy
from unmask.models.fp8 import Fp8Layers
from unmask.models.lora import (
    ReferencePolicy,
    add_adapter,
    has_adapter,
    merge,
    trainable_parameters,
    unfreeze_adapter,
)
from unmask.rollout.cache import cache_of
from unmask.rollout.decoding import Decoding
from unmask.rollout.graphs import Graphs
from unmask.tasks import Task
from unmask.training.run.folder import checkpoint_of
from unmask.training.teacher import Teacher
from unmask.util.micro_batch import MicroBatch


@dataclass(frozen=True)
class Setup:
    policy: Model
    reference: Policy | None
    """The policy before training, if the method needs it."""
    teacher: Teacher | None
    """An earlier policy, if the method needs it."""
    device: str
    ranks: Ranks
    rollout_batch: MicroBatch
    update_batch: MicroBatch
    fp8: Fp8Layers | None = None
    """The policy's layers in fp8, if rollouts use them."""

    @property
    def teacher_model(self) -> Policy | None:
        return None if self.teacher is None else self.teacher.model


@contextmanager
def set_up(config: Config, needs_reference: bool, needs_teacher: bool = False) -> Iterator[Setup]:
    """The policy, ready for training. A policy with an adapter needs no copy of its base, which is the reference; the
    teacher has a copy of the adapter."""
    with join_processes(device_of(config)) as (ranks, device):
        rollouts = config.prompts * config.group
        if rollouts < ranks.size:
            raise ValueError(f"prompts x group: {rollouts} rollouts are fewer than {ranks.size} processes; raise one")
        policy = trainable_policy(config, device)
        reference: EarlierPolicy | Model | None = None
        earlier: EarlierPolicy | Model | None = None
        if has_adapter(policy):
            reference = ReferencePolicy(policy, alike=config.compile) if needs_reference else None
            earlier = EarlierPolicy(policy, trainable_parameters(policy)) if needs_teacher else None
        else:
            # Compiled layers round differently without gradients, so copies take gradients as well.
            reference, earlier = (
                copy.deepcopy(policy).requires_grad_(config.compile) if needed else None
                for needed in (needs_reference, needs_teacher)
            )
            if ranks.size > 1:
                if config.compile:
                    raise ValueError("compile: cannot be combined with full training in several processes (sharding)")
                ranks = shard(policy, _layers(policy), ranks)
                for other in (reference, earlier):
                    if other is not None:
                        shard(other, _layers(other), ranks)
        if config.compile:
            for compiled in (policy, reference, earlier):
                if isinstance(compiled, nn.Module):
                    decoder_of(compiled, "compile").compile_layers()
        teacher = Teacher(policy, earlier) if earlier is not None else None
        rollout_batch, update_batch = micro_batches(config, policy)
        fp8 = Fp8Layers(policy) if config.rollout.precision == "fp8" else None
        yield Setup(policy, reference, teacher, device, ranks, rollout_batch, update_batch, fp8)


def trainable_policy(config: TrainingConfig, device: str) -> Model:
    """The model on its device. Trainable are all its weights, or its adapter; a model without one gets a new one."""
    dtype = None if config.dtype is None else getattr(torch, config.dtype)
    policy = load_model(checkpoint_of(config.model), dtype, device, causal_block=config.causal_block)
    policy.fingerprint = fingerprint_of(policy)
    full = config.full if config.full is not None else isinstance(policy, Tiny) and not has_adapter(policy)
    if config.lora != LoraOptions() and (full or has_adapter(policy)):
        why = "all weights are trained" if full else "the model already has an adapter with its own options"
        raise ValueError(f"lora: these options have no effect because {why}; remove them")
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
    """The micro-batches of rollouts and of updates, as configured or by the size of the model."""
    sizes = micro_batch_sizes(config, _weight_count(policy))
    return MicroBatch(sizes.rollout), MicroBatch(sizes.update)


def _weight_count(policy: Model) -> int:
    return sum(weight.numel() for weight in policy.parameters())


def decoding_of(config: Config, task: Task) -> Decoding:
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
        min_per_step=rollout.min_per_step,
        cache=cache_of(rollout.cache, rollout.refresh),
        append=rollout.append,
        graphs=Graphs(rollout.graphs),
    )


def decoder_of(policy: object, feature: str) -> Decoder:
    """The policy as a Decoder; ValueError for an encoder, which does not have the feature."""
    if not isinstance(policy, Decoder):
        raise ValueError(f"{feature} works with decoders (LLaDA, Dream, Llama, Qwen), not with encoders")
    return policy


def _layers(policy: object) -> nn.ModuleList:
    """The layers that are sharded in full training with several processes."""
    return decoder_of(policy, "full training in several processes").lm.model.layers
