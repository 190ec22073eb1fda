"""An update that was not finite, done again: what a run leaves in RUN/broken/STEP when it stops (broken.py)."""

from pathlib import Path

import torch

from unmask.config.config import read_config
from unmask.training.loop import optimizer_of
from unmask.training.mismatch import replayed
from unmask.training.run.broken import FOLDER, read, sampled_logp
from unmask.training.setup import set_up
from unmask.training.update import NotFinite, update


def replay(folder: Path) -> dict[str, float]:
    """What the update measures, by the weights it had: the same that is not finite, or nothing that is not.

    In one process, on the device of the run's configuration. Where the rollouts were not finite, there was no update:
    the mean of the sampled log-probabilities, and of the same tokens asked again.
    """
    if folder.absolute().parent.name != FOLDER:
        raise ValueError(f"{folder} is not of the form RUN/{FOLDER}/STEP")
    config = read_config(folder.absolute().parent.parent / "config.yaml")
    with set_up(config, needs_reference=False) as setup:
        policy, kept = setup.policy, read(folder, config.build_method(), setup.device)
        with torch.no_grad():
            for name, weight in policy.named_parameters():
                if weight.requires_grad:
                    weight.copy_(kept.weights[name])
        if not kept.parts:
            trace = next(trace for trace in kept.traces if not trace.logp_BL.isfinite().all())
            scored_BL = replayed(policy, trace, setup.rollout_batch)
            return {"sampled_logp": sampled_logp(trace), "scored_logp": float(scored_BL[trace.filled_BL].mean())}
        optimizer, _ = optimizer_of(policy, config)  # which has the gradient of half-precision weights in fp32
        try:
            found = update(policy, optimizer, kept.parts, setup.update_batch, config.optimizer.max_norm)
        except NotFinite as error:
            return error.metrics
        return {name: float(value) for name, value in found.items()}
