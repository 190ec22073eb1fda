"""The state from which a run is resumed as if it had not been interrupted, saved between two updates.

    RUN/state/40/tensors.safetensors   the trainable weights, Adam's moments, the generator of the probes, and the
                                       weights of a teacher
    RUN/state/40/state.json            the update, the cost so far, the lengths of the logs, checksums of both files

The order of the data and the noise of rollouts are functions of the seed and the number of the update: they need no
state. A state is written under a temporary name, synced and renamed, so it is complete or absent; the last two stay.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from unmask.distributed.sharding import placed_like, whole
from unmask.training.optim import MasterAdamW, Optimizer
from unmask.training.teacher import Teacher
from unmask.util.files import digest, fsync, save_tensors

STATES = 2
"""How many stay."""
TENSORS, FACTS = "tensors.safetensors", "state.json"
SUM = "sum"
"""The checksum of the rest of state.json."""
GENERATOR, WEIGHT, TEACHER = "generator", "weight", "teacher"


class State(NamedTuple):
    step: int
    """Finished updates."""
    tensors: Mapping[str, Tensor]
    """Mapped from the file: pages are read when they are used."""
    facts: dict[str, Any]


def state_tensors(
    policy: nn.Module, optimizer: Optimizer, rng: torch.Generator, teacher: Teacher | None = None, wanted: bool = True
) -> dict[str, Tensor]:
    """What training has changed. Every process has to call this, to gather sharded tensors; a process without `wanted`
    holds one tensor at a time."""
    tensors = {GENERATOR: rng.get_state()}
    inner, named = _inside(policy, optimizer)
    for number, (name, weight) in enumerate(named.items()):
        kept = {TEACHER: teacher.copies[number]} if teacher is not None else {}
        for kind, value in {WEIGHT: weight, **kept, **inner.state.get(weight, {})}.items():
            tensor = whole(value)
            if wanted:
                tensors[f"{kind} {name}"] = tensor.detach().cpu().contiguous()
    return tensors


@torch.no_grad()
def restore(
    policy: nn.Module,
    optimizer: Optimizer,
    rng: torch.Generator,
    tensors: Mapping[str, Tensor],
    teacher: Teacher | None = None,
) -> None:
    """The inverse of `state_tensors`."""
    inner, named = _inside(policy, optimizer)
    weights = {WEIGHT} if teacher is None else {WEIGHT, TEACHER}
    kinds = {key.partition(" ")[0] for key in tensors} - {GENERATOR, WEIGHT, TEACHER}
    known = {f"{kind} {name}" for kind in kinds | weights for name in named} | {GENERATOR}
    if strange := (known ^ tensors.keys()):
        raise ValueError(f"the saved state is of another model or other options: {min(strange)!r} is in one only")
    for number, (name, weight) in enumerate(named.items()):
        value = tensors[f"{WEIGHT} {name}"]
        if value.shape != weight.shape:
            shapes = f"{name} is {list(value.shape)} there and {list(weight.shape)} here"
            raise ValueError(f"the saved state is of another model or other options: {shapes}")
        weight.copy_(placed_like(value, weight))
        if teacher is not None:
            copy = teacher.copies[number]
            copy.copy_(placed_like(tensors[f"{TEACHER} {name}"], copy))
        moments = {kind: tensors[f"{kind} {name}"] for kind in kinds}
        if moments:
            step = moments.pop("step")  # on the device of the weight only for fused steps
            inner.state[weight] = {kind: placed_like(value, weight) for kind, value in moments.items()}
            home = weight.device if inner.defaults.get("fused") else step.device
            inner.state[weight]["step"] = step.to(home, copy=True)
    if isinstance(optimizer, MasterAdamW):
        optimizer.round_weights()
    rng.set_state(tensors[GENERATOR])


def _inside(policy: nn.Module, optimizer: Optimizer) -> tuple[torch.optim.Optimizer, dict[str, Tensor]]:
    """The optimiser that has the moments, and its parameters by name: the weights, or their fp32 copies."""
    names = [name for name, weight in policy.named_parameters() if weight.requires_grad]
    inner = optimizer.inner if isinstance(optimizer, MasterAdamW) else optimizer
    return inner, dict(zip(names, inner.param_groups[0]["params"], strict=True))


def write_state(folder: Path, step: int, tensors: dict[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Save a state, complete or not at all, and remove all but the last ones."""
    aside, final = folder / f".{step}.partial", folder / str(step)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        save_tensors(tensors, aside / TENSORS)
        plain = json.loads(json.dumps({"step": step, **facts, "sha256": digest(aside / TENSORS)}))
        (aside / FACTS).write_text(json.dumps({**plain, SUM: _sum(plain)}) + "\n")
        for path in (aside / FACTS, aside):
            fsync(path)
        if final.exists():  # it was unusable, or saved when a reward failed
            final.rename(folder / f".{step}.partial.old")
        aside.rename(final)
        fsync(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    shutil.rmtree(folder / f".{step}.partial.old", ignore_errors=True)
    for old in [*_states(folder).values()][:-STATES]:
        shutil.rmtree(old, ignore_errors=True)


def newest_state(folder: Path) -> tuple[State | None, list[str]]:
    """The last complete state, and why each later one cannot be used."""
    unusable: list[str] = []
    for path in reversed(_states(folder).values()):
        try:
            return _read(path), unusable
        except (OSError, ValueError, RecursionError, SafetensorError) as error:
            unusable.append(f"{path} cannot be used ({type(error).__name__}: {error})")
    return None, unusable


def _read(folder: Path) -> State:
    facts = json.loads((folder / FACTS).read_text())
    if not isinstance(facts, dict) or facts.pop(SUM, None) != _sum(facts):
        raise ValueError(f"{FACTS} does not match its checksum")
    if digest(folder / TENSORS) != facts["sha256"]:
        raise ValueError(f"{TENSORS} does not match its checksum")
    return State(facts["step"], load_file(folder / TENSORS), facts)


def _sum(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _states(folder: Path) -> dict[int, Path]:
    """By number. A state that was being replaced when the process was killed still exists under its other name."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    replaced = {name.strip(".").removesuffix(".partial.old"): name for name in names if name.endswith(".partial.old")}
    states = replaced | {name: name for name in names}
    return {int(step): folder / states[step] for step in sorted(filter(str.isdecimal, states), key=int)}
