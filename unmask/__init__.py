"""unmask: reinforcement-learning post-training for masked diffusion language models.

Everything named here is usable alone, in somebody else's loop (examples/own_loop.py). The imports below are what type
checkers read; at run time a name is imported on first use, so that `import unmask` costs nothing.
"""

import ast
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unmask.util.version import __version__ as __version__

if TYPE_CHECKING:
    from unmask.core.advantage import (
        ADVANTAGES as ADVANTAGES,
    )
    from unmask.core.advantage import (
        batch_z_score as batch_z_score,
    )
    from unmask.core.advantage import (
        group_mean as group_mean,
    )
    from unmask.core.advantage import (
        group_mean_batch_std as group_mean_batch_std,
    )
    from unmask.core.advantage import (
        leave_one_out as leave_one_out,
    )
    from unmask.core.advantage import (
        varied as varied,
    )
    from unmask.core.advantage import (
        z_score as z_score,
    )
    from unmask.core.method import (
        BranchTerm as BranchTerm,
    )
    from unmask.core.method import (
        Method as Method,
    )
    from unmask.core.method import (
        each_turn as each_turn,
    )
    from unmask.core.method import (
        uniform_credit as uniform_credit,
    )
    from unmask.core.objective import (
        KLS as KLS,
    )
    from unmask.core.objective import (
        NORMALISERS as NORMALISERS,
    )
    from unmask.core.objective import (
        canvas_mean as canvas_mean,
    )
    from unmask.core.objective import (
        k1 as k1,
    )
    from unmask.core.objective import (
        k2 as k2,
    )
    from unmask.core.objective import (
        k3 as k3,
    )
    from unmask.core.objective import (
        policy_gradient as policy_gradient,
    )
    from unmask.core.objective import (
        reward_divergence as reward_divergence,
    )
    from unmask.core.objective import (
        sequence_clip as sequence_clip,
    )
    from unmask.core.objective import (
        sequence_divergence as sequence_divergence,
    )
    from unmask.core.objective import (
        sequence_mean as sequence_mean,
    )
    from unmask.core.objective import (
        step_clip as step_clip,
    )
    from unmask.core.objective import (
        step_mean as step_mean,
    )
    from unmask.core.objective import (
        token_clip as token_clip,
    )
    from unmask.core.objective import (
        token_divergence as token_divergence,
    )
    from unmask.core.objective import (
        token_mean as token_mean,
    )
    from unmask.core.objective import (
        trace_sum as trace_sum,
    )
    from unmask.core.order import (
        ORDERS as ORDERS,
    )
    from unmask.core.order import (
        left_to_right as left_to_right,
    )
    from unmask.core.order import (
        low_confidence as low_confidence,
    )
    from unmask.core.order import (
        surest_position as surest_position,
    )
    from unmask.core.probes import (
        Probes as Probes,
    )
    from unmask.core.probes import (
        ask as ask,
    )
    from unmask.core.probes import (
        every_step as every_step,
    )
    from unmask.core.probes import (
        fully_masked as fully_masked,
    )
    from unmask.core.probes import (
        left_to_right_views as left_to_right_views,
    )
    from unmask.core.probes import (
        one_shot as one_shot,
    )
    from unmask.core.probes import (
        segmented as segmented,
    )
    from unmask.core.probes import (
        unit_likelihood as unit_likelihood,
    )
    from unmask.core.probes import (
        views as views,
    )
    from unmask.core.probes import (
        visited as visited,
    )
    from unmask.core.specs import Branch as Branch
    from unmask.core.specs import Record as Record
    from unmask.core.token_sampling import (
        Law as Law,
    )
    from unmask.core.trace import (
        Trace as Trace,
    )
    from unmask.core.trace import (
        everything as everything,
    )
    from unmask.core.trace import (
        joined as joined,
    )
    from unmask.core.trace import (
        selected as selected,
    )
    from unmask.core.trace import (
        state_before as state_before,
    )
    from unmask.core.trace import (
        until_eos as until_eos,
    )
    from unmask.methods import (
        BASES as BASES,
    )
    from unmask.methods import (
        PLUGINS as PLUGINS,
    )
    from unmask.methods import (
        agrpo as agrpo,
    )
    from unmask.methods import (
        coupled_grpo as coupled_grpo,
    )
    from unmask.methods import (
        daca as daca,
    )
    from unmask.methods import (
        diffu_grpo as diffu_grpo,
    )
    from unmask.methods import (
        dispo as dispo,
    )
    from unmask.methods import (
        dps as dps,
    )
    from unmask.methods import (
        espo as espo,
    )
    from unmask.methods import (
        gspo as gspo,
    )
    from unmask.methods import (
        reinforce_pp as reinforce_pp,
    )
    from unmask.methods import (
        sml as sml,
    )
    from unmask.methods import (
        spg as spg,
    )
    from unmask.methods import (
        unigrpo as unigrpo,
    )
    from unmask.methods import (
        wd1 as wd1,
    )
    from unmask.methods.agrpo import (
        entropy_steps as entropy_steps,
    )
    from unmask.methods.agrpo import (
        sampled_steps as sampled_steps,
    )
    from unmask.methods.agrpo import (
        uniform_steps as uniform_steps,
    )
    from unmask.methods.coupled_grpo import (
        coupled as coupled,
    )
    from unmask.methods.daca import (
        agreement_progress as agreement_progress,
    )
    from unmask.methods.daca import (
        batch_scope as batch_scope,
    )
    from unmask.methods.daca import (
        confidence_progress as confidence_progress,
    )
    from unmask.methods.daca import (
        decode_order_strata as decode_order_strata,
    )
    from unmask.methods.daca import (
        group_scope as group_scope,
    )
    from unmask.methods.daca import (
        likelihood_progress as likelihood_progress,
    )
    from unmask.methods.daca import (
        own_progress as own_progress,
    )
    from unmask.methods.daca import (
        progress_credit as progress_credit,
    )
    from unmask.methods.daca import (
        random_strata as random_strata,
    )
    from unmask.methods.daca import (
        rollout_scope as rollout_scope,
    )
    from unmask.methods.daca import (
        stratified as stratified,
    )
    from unmask.methods.daca import (
        strided_strata as strided_strata,
    )
    from unmask.methods.espo import (
        elbo as elbo,
    )
    from unmask.methods.spg import (
        block_random as block_random,
    )
    from unmask.methods.spg import (
        sandwich as sandwich,
    )
    from unmask.methods.unigrpo import (
        random_ratio as random_ratio,
    )
    from unmask.methods.wd1 import (
        preference_weight as preference_weight,
    )
    from unmask.models import (
        Policy as Policy,
    )
    from unmask.models import (
        load_model as load_model,
    )
    from unmask.rollout.sample import (
        Rollouts as Rollouts,
    )
    from unmask.rollout.sample import (
        row_seeds as row_seeds,
    )
    from unmask.rollout.sample import (
        sample as sample,
    )
    from unmask.tasks import (
        TASKS as TASKS,
    )
    from unmask.tasks import (
        Task as Task,
    )
    from unmask.training.loss_terms import (
        parts_of as parts_of,
    )
    from unmask.training.update import (
        Part as Part,
    )
    from unmask.training.update import (
        accumulate as accumulate,
    )


@cache
def _homes() -> dict[str, str]:
    """Where each public name lives, read from the imports above."""
    tree = ast.parse(Path(__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


if not TYPE_CHECKING:  # a module with __getattr__ has every name, to a type checker

    def __getattr__(name: str) -> Any:
        home = _homes().get(name)
        if home is None:
            raise AttributeError(f"module 'unmask' has no attribute {name!r}")
        globals()[name] = value = getattr(import_module(home), name)
        return value


def __dir__() -> list[str]:
    return sorted([*_homes(), "__version__"])
