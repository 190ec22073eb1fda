"""Checks of keys that must fit together. Imports no torch: checks.py has those that need it."""

from unmask.config.defaults import rollout_shape
from unmask.config.schema import Config
from unmask.tasks import Task


def check_keys(config: Config, task: Task) -> None:
    """ValueError for keys that do not fit together."""
    for key, names in (("with", config.plugins), ("track", config.track)):
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"{key}: {twice} is named twice")
    if "daca" in config.plugins and (both := {"sml", "dps"} & set(config.plugins)):
        raise ValueError(f"with: daca is sml and dps together; leave out {' and '.join(sorted(both))}")
    length, _, _ = rollout_shape(config, task)
    if length < task.length and not task.text:
        raise ValueError(f"rollout.length: an answer of {config.task} takes {task.length} positions, not {length}")
    if config.optimizer.warmup > config.updates:
        raise ValueError(f"optimizer.warmup: {config.optimizer.warmup} is more than the {config.updates} updates")
    if not config.eval.every and (config.eval.early_stop or config.eval.collapse):
        raise ValueError("eval.every: set how often to evaluate; eval.early_stop and eval.collapse need it")
    cached = config.rollout.cache in ("prefix", "dual")
    if not cached and config.rollout.precision == "model" and config.rollout.correction:
        raise ValueError(
            "rollout.correction: without a cache or fp8 there is nothing to correct; set rollout.cache or "
            "rollout.precision"
        )
    if not cached and config.rollout.refresh != 1:
        raise ValueError("rollout.refresh: without a cache there is nothing to renew; set rollout.cache")
    if config.rollout.append and cached:
        raise ValueError("rollout.append: rollouts that append their blocks have no cache; leave out rollout.cache")
    if config.rollout.min_per_step != 1 and config.rollout.threshold is None:
        raise ValueError("rollout.min_per_step: it belongs to rollout.threshold; without one, set rollout.steps")
    if config.rollout.min_per_step != 1 and config.rollout.order == "left_to_right":
        raise ValueError("rollout.min_per_step: left_to_right has none; choose an order by confidence, or leave it out")
    if 0 < config.rollout.correction < 1:
        raise ValueError("rollout.correction: the limit of the weights must be at least 1, or 0 for no weights")


def check_trainable(config: Config) -> None:
    """ValueError for rollouts that cannot be trained on."""
    if config.rollout.temperature == 0:
        raise ValueError("rollout.temperature: 0 is greedy, but training needs sampled rollouts; raise it")
    if config.rollout.guidance:
        raise ValueError("rollout.guidance: a guided rollout has no likelihood under the policy; train with 0")
