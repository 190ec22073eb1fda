"""Checks of a whole configuration, without a model: keys that must fit together, the method's probes."""

from dataclasses import replace

import torch

from unmask.config.arguments import check_known, check_method
from unmask.config.defaults import check_device, device_of, rollout_shape
from unmask.config.options import CHOICES
from unmask.config.schema import Config
from unmask.core.advantage import correct_only
from unmask.core.order import ORDERS, score_threshold
from unmask.core.schedule import SCHEDULES, one_by_one
from unmask.core.shapes import GIVEN
from unmask.core.token_sampling import TokenSampling
from unmask.core.trace import Trace, all_tokens
from unmask.core.words import section_of
from unmask.methods import BASES, PLUGINS
from unmask.methods.own import own_method
from unmask.tasks import TASKS


def check_names(config: Config) -> None:
    """ValueError for an unknown method or order, or a function whose name is taken."""
    check_known("rollout.order", config.rollout.order, ORDERS)
    taken = dict.fromkeys([*BASES, *PLUGINS, *TASKS, *Config.model_fields, "with"], "")
    for key, word in [("method", config.method), *(("with", word) for word in config.plugins)]:
        if own_method(key, word, CHOICES) is None:
            check_method(key, word, BASES, PLUGINS)
        elif taken.setdefault(name := section_of(word), word) != word:
            raise ValueError(f"{key}: {word}: {name} is the name of something else; rename the function")


def check_combination(config: Config) -> None:
    """ValueError for keys that do not fit together, and for a method whose probes do not fit the canvas."""
    check_device(device_of(config))
    for key, names in (("with", config.plugins), ("track", config.track)):
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"{key}: {twice} is named twice")
    if "daca" in config.plugins and (both := {"sml", "dps"} & set(config.plugins)):
        raise ValueError(f"with: daca is sml and dps together; leave out {' and '.join(sorted(both))}")
    task = config.build_task()
    length, steps, block = rollout_shape(config, task)
    if length < task.length and not task.text:
        raise ValueError(f"rollout.length: an answer of {config.task} takes {task.length} positions, not {length}")
    if config.optimizer.warmup > config.updates:
        raise ValueError(f"optimizer.warmup: {config.optimizer.warmup} is more than the {config.updates} updates")
    if not config.eval.every and (config.eval.early_stop or config.eval.collapse):
        raise ValueError("eval.every: set how often to evaluate; eval.early_stop and eval.collapse need it")
    try:
        if config.rollout.threshold is None:
            SCHEDULES[config.rollout.schedule](length, steps, block)
        else:
            one_by_one(length, steps, block)
            score_threshold(ORDERS[config.rollout.order], config.rollout.threshold)
    except ValueError as error:
        raise ValueError(f"rollout: {error}") from None
    if config.rollout.cache == "none" and config.rollout.correction:
        raise ValueError("rollout.correction: without a cache there is nothing to correct; set rollout.cache")
    if config.rollout.cache == "none" and config.rollout.refresh != 1:
        raise ValueError("rollout.refresh: without a cache there is nothing to renew; set rollout.cache")
    if 0 < config.rollout.correction < 1:
        raise ValueError("rollout.correction: the limit of the weights must be at least 1, or 0 for no weights")
    method = config.build_method()
    if method.advantage is correct_only and (task.reward_range is None or task.reward_range[1] != 1):
        raise ValueError(
            f"{config.method}.advantage: correct_only counts a reward of 1 as correct, and a solution of {config.task} "
            "can earn another one; use rewards whose largest value is 1"
        )
    if method.order is not None and ORDERS[config.rollout.order] is not method.order:
        raise ValueError(
            f"rollout.order: {method.name} scores the choice of positions of {method.order.__name__}, "
            f"not of {config.rollout.order}"
        )
    if method.order is not None and config.rollout.correction:
        raise ValueError(f"rollout.correction: {method.name} scores the choice of positions, which has no weight")
    if method.order is not None and config.rollout.threshold is not None:
        raise ValueError(f"rollout.threshold: {method.name} scores the choice of a fixed number of positions")
    try:
        method.probe(blank_trace(length, steps, block), torch.Generator().manual_seed(0), 1)
    except ValueError as error:
        raise ValueError(f"{method.name}: {error}") from None


def blank_trace(length: int, steps: int, block: int) -> Trace:
    """Two traces of one group, after a prompt of one token, filled left to right with token 1."""
    column_L = torch.arange(length + 1) - 1
    step_L = torch.where(column_L < 0, GIVEN, column_L * steps // length)
    entropy_BC = torch.ones(2, length, dtype=torch.float64)
    trace = Trace(
        tokens_BL=torch.ones(2, length + 1, dtype=torch.long),
        step_BL=step_L.repeat(2, 1),
        block_BL=torch.where(column_L < 0, GIVEN, column_L // block).repeat(2, 1),
        attended_BL=torch.ones(2, length + 1, dtype=torch.bool),
        counted_BL=torch.zeros(2, length + 1, dtype=torch.bool),
        logp_BL=torch.zeros(2, length + 1, dtype=torch.float64),
        group_B=torch.zeros(2, dtype=torch.long),
        mask_id=0,
        eos_id=2,
        steps=steps,
        sampling=TokenSampling(),
        seen={"entropy": entropy_BC},
    )
    return replace(trace, counted_BL=all_tokens(trace))
