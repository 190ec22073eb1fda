"""unmask: reinforcement-learning post-training for masked diffusion language models.

Everything below is usable alone, in somebody else's loop (examples/own_loop.py). Names are imported on first use,
so that `import unmask` costs nothing.
"""

from importlib import import_module
from typing import Any

from unmask.version import __version__

_HOMES = {
    "law": "Law",
    "trace": "Trace state_before selected joined everything until_eos",
    "rollout": "sample Rollouts Record Branch row_seeds ORDERS left_to_right surest_position low_confidence",
    "probes": "Probes ask fully_masked segmented left_to_right_views visited every_step one_shot unit_likelihood",
    "advantage": "ADVANTAGES group_mean leave_one_out z_score batch_z_score group_mean_batch_std varied",
    "objective": "NORMALISERS token_clip step_clip sequence_clip policy_gradient token_divergence sequence_divergence "
    "k1 k2 k3 token_mean sequence_mean canvas_mean trace_sum step_mean",
    "method": "Method BranchTerm uniform_credit each_turn",
    "update": "Part accumulate",
    "methods": "BASES PLUGINS diffu_grpo unigrpo coupled_grpo wd1 spg gspo espo reinforce_pp agrpo daca sml dps dispo",
    "methods.daca": "stratified random_strata strided_strata decode_order_strata progress_credit likelihood_progress "
    "agreement_progress confidence_progress own_progress rollout_scope group_scope batch_scope",
    "methods.agrpo": "sampled_steps uniform_steps entropy_steps",
    "methods.unigrpo": "random_ratio",
    "methods.coupled_grpo": "coupled",
    "methods.espo": "elbo",
    "methods.spg": "block_random sandwich",
    "methods.wd1": "preference_weight",
    "models": "load_model Policy",
    "tasks": "TASKS Task",
}
_HOME = {name: f"unmask.{home}" for home, names in _HOMES.items() for name in names.split()}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'unmask' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
