"""Repeat an update that was not finite, from RUN/broken/STEP (broken.py)."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from unmask.config.parse import read_run_config
from unmask.training.mismatch import replay_logprobs, sampled_logp
from unmask.training.optim import make_optimizer
from unmask.training.run.broken import FOLDER, read_broken
from unmask.training.setup import set_up
from unmask.training.update import NotFinite, update


def replay(folder: Path) -> dict[str, float]:
    """The metrics of the update, repeated with its weights, in one process, on the device of the run's configuration.
    If the rollouts were not finite, there was no update: the mean of the sampled log-probabilities, and of the same
    tokens scored again."""
    if folder.absolute().parent.name != FOLDER:
        raise ValueError(f"{folder} is not a stored update: pass RUN/{FOLDER}/STEP")
    # The rate does not matter here, and a run of 0.1 may have one that is refused now.
    config = read_run_config(folder.absolute().parent.parent, ["optimizer.lr=1"])
    method = config.build_method()
    with set_up(config, needs_reference=False, needs_teacher=method.needs_teacher) as setup:
        policy, stored = setup.policy, read_broken(folder, method, setup.device)
        trained = {name: weight for name, weight in policy.named_parameters() if weight.requires_grad}
        if setup.teacher is not None:
            _set(trained, stored.teacher)
            setup.teacher.refresh()
        _set(trained, stored.weights)
        if not stored.terms:
            trace = next(trace for trace in stored.traces if not trace.logp_BL.isfinite().all())
            scored_BL = replay_logprobs(policy, trace, setup.rollout_batch)
            return {"sampled_logp": sampled_logp(trace), "scored_logp": float(scored_BL[trace.filled_BL].mean())}
        terms = [replace(term, teacher=setup.teacher_model if term.distillation else None) for term in stored.terms]
        optimizer = make_optimizer(policy, config.optimizer)  # gradients of half-precision weights are in fp32
        try:
            metrics = update(policy, optimizer, terms, setup.update_batch, config.optimizer.max_grad_norm)
        except NotFinite as error:
            return error.metrics
        return {name: float(value) for name, value in metrics.items()}


@torch.no_grad()
def _set(weights: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, weight in weights.items():
        weight.copy_(values[name])
