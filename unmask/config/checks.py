"""Checks of a whole configuration, without a model, that need torch: device, orders, the method's probes."""

from dataclasses import replace

import torch

from unmask.config.defaults import check_device, device_of, rollout_shape
from unmask.config.options import CHOICES, resolved_options
from unmask.config.schema import Config
from unmask.core.advantage import every_sample
from unmask.core.order import ORDERS, score_threshold
from unmask.core.schedule import SCHEDULES, at_least
from unmask.core.shapes import GIVEN
from unmask.core.strata import STRATA
from unmask.core.token_sampling import TokenSampling
from unmask.core.trace import Trace, all_tokens
from unmask.core.words import section_of
from unmask.methods import BASES, PLUGINS
from unmask.methods.own import own_method
from unmask.tasks import TASKS


def check_own_methods(config: Config) -> None:
    """ValueError for a function of the user that cannot be used, or whose name is taken."""
    taken = dict.fromkeys([*BASES, *PLUGINS, *TASKS, *Config.model_fields, "with"], "")
    for key, word in [("method", config.method), *(("with", word) for word in config.plugins)]:
        if own_method(key, word, CHOICES) is not None and taken.setdefault(name := section_of(word), word) != word:
            raise ValueError(f"{key}: {word}: {name} is the name of something else; rename the function")


def check_combination(config: Config) -> None:
    """ValueError for a device, schedule, order or reward that cannot be used, and for probes that do not fit."""
    check_device(device_of(config))
    task = config.build_task()
    length, steps, block = rollout_shape(config, task)
    try:
        if config.rollout.threshold is None:
            SCHEDULES[config.rollout.schedule](length, steps, block)
        else:
            at_least(length, config.rollout.min_per_step, block)
            score_threshold(ORDERS[config.rollout.order], config.rollout.threshold)
    except ValueError as error:
        preset = config.rollout.preset
        hint = (
            "" if preset is None else f"; it is rollout.preset={preset}: set rollout.length, or another rollout.block"
        )
        raise ValueError(f"rollout: {error}{hint}") from None
    method = config.build_method()
    if method.counts_ones and task.reward_range is not None and task.reward_range[1] != 1:
        raise ValueError(
            f"{method.name} counts a reward of at least 1 as correct, and the largest reward of {config.task} is "
            f"{task.reward_range[1]:g}; use rewards whose largest value is 1, or another method, for example --method "
            "diffu_grpo --with daca"
        )
    if method.uses_equal_rewards and config.idle_groups != "keep":
        raise ValueError(
            f"idle_groups: {method.name} learns from groups with equal rewards too, which {config.idle_groups} would "
            "drop; leave it out"
        )
    if method.order is not None and not method.scores_order(config.rollout.order, config.rollout.threshold):
        order, wanted = config.rollout.order, method.order.__name__
        or_threshold = f" or, to keep {order}, rollout.threshold" if method.scores_order(order, 0.9) else ""
        raise ValueError(
            f"rollout.order: {method.name} scores the choice of positions of {wanted}, not of {order}; "
            f"set rollout.order={wanted}{or_threshold}"
        )
    if method.order is not None and config.rollout.correction:
        raise ValueError(f"rollout.correction: {method.name} scores the choice of positions, which has no weight")
    if method.values is not None and config.rollout.cache in ("prefix", "dual"):
        raise ValueError(
            f"rollout.cache: {method.name} completes states of its rollouts again, which needs rollout.cache=none"
        )
    trace = replace(
        blank_trace(length, steps, block),
        order=config.rollout.order,
        threshold=config.rollout.threshold,
        min_per_step=config.rollout.min_per_step,
        appended=config.rollout.append,
    )
    if config.rollout.append and any(term.branch is not None for term in method.terms):
        raise ValueError("rollout.append: dispo fills later blocks too, which are not on the canvas")
    try:
        for term in method.terms:
            if term.branch is None:
                term.probe(trace, torch.Generator().manual_seed(0), 1)
    except ValueError as error:
        raise ValueError(f"{method.name}: {error}") from None


def unlimited_push(config: Config) -> str | None:
    """A warning if SML or raft lowers the likelihood of wrong answers at states that are not visited, and neither a KL
    nor an anchor limits that; else None."""
    name = next((word for word in (config.method, *config.plugins) if word in ("raft", "sml", "daca")), None)
    method = config.build_method()
    if name is None or method.trajectory or method.kl or method.reward_kl:
        return None
    advantage_B = method.advantage(torch.tensor([1.0, 0.0]), torch.zeros(2, dtype=torch.long))
    if resolved_options(config)[name].get("anchor") or not (advantage_B < 0).any():
        return None
    change = f"{name}.negative=0, or {name}.kl or {name}.anchor above 0"
    return (
        f"{name} without KL and anchor pushes wrong answers down at states that rollouts do not visit, and long runs "
        f"can get worse (docs/studies/rules.md); set {'raft.advantage=correct_only' if name == 'raft' else change}"
    )


SML_DEFAULTS = {"strata": STRATA, "layout": "random"}


def sml_on_raft(config: Config) -> str | None:
    """A note if `sml` or `daca` gives raft the likelihood that it has already, or replaces its strata; else None."""
    name = next((word for word in config.plugins if word in ("sml", "daca")), None)
    options = resolved_options(config)
    if config.method != "raft" or name is None or options["raft"]["states"] != "sml":
        return None
    if any(options["raft"][key] not in (default, options[name][key]) for key, default in SML_DEFAULTS.items()):
        return f"{name} has strata and a layout of its own, which replace raft.strata and raft.layout"
    if any(options[name][key] != options["raft"].get(key, 0) for key in ("strata", "layout", "anchor", "kl")):
        return None
    does = "daca adds only its weights of tokens, DPS" if name == "daca" else "sml changes nothing"
    return (
        f"raft.states=sml is SML already, so {does}; the published form has a group baseline: --method diffu_grpo "
        f"--with {name}"
    )


def no_selection(config: Config) -> str | None:
    """A warning of an advantage that counts every rollout; else None."""
    if config.build_method().advantage is not every_sample:
        return None
    return (
        f"{config.method}.advantage=every_sample is the control without selection: wrong answers count too, and solve "
        "rates collapse (docs/methods/raft.md)"
    )


def idle_positive(config: Config) -> str | None:
    """A note if `positive` has no negative advantage to scale; else None."""
    others = tuple(word for word in config.plugins if word != "positive")
    if len(others) == len(config.plugins):
        return None
    method = config.model_copy(update={"plugins": others}).build_method()
    if (method.advantage(torch.tensor([1.0, 0.0]), torch.zeros(2, dtype=torch.long)) < 0).any():
        return None
    return f"positive changes nothing: {method.name} has no negative advantages"


NOTES = (unlimited_push, sml_on_raft, no_selection, idle_positive)
"""What is printed before a run about a choice that is allowed."""


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
        seen={
            "entropy": entropy_BC,
            "confidence": -entropy_BC,
            "value_step": torch.zeros(2, 1, dtype=torch.long),
            "value_weight": torch.ones(2, 1, dtype=torch.float64),
            "state_value": torch.arange(steps + 1, dtype=torch.float64).repeat(2, 1),
        },
    )
    return replace(trace, counted_BL=all_tokens(trace))
