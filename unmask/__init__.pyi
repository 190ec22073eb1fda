# The public names of `unmask` and where they live: read by type checkers, and by lazy_loader at run time.
from . import (
    methods as methods,
    models as models,
    view as view,
)
from .core.advantage import (
    ADVANTAGES as ADVANTAGES,
    batch_z_score as batch_z_score,
    best_of_group as best_of_group,
    correct_only as correct_only,
    every_sample as every_sample,
    group_mean as group_mean,
    group_mean_batch_std as group_mean_batch_std,
    leave_one_out as leave_one_out,
    rewards_differ as rewards_differ,
    z_score as z_score,
)
from .core.method import (
    Method as Method,
    Term as Term,
    each_inner_step as each_inner_step,
    uniform_credit as uniform_credit,
)
from .core.objective import (
    KLS as KLS,
    NORMALISERS as NORMALISERS,
    canvas_mean as canvas_mean,
    k1 as k1,
    k2 as k2,
    k3 as k3,
    policy_gradient as policy_gradient,
    reward_divergence as reward_divergence,
    sequence_clip as sequence_clip,
    sequence_divergence as sequence_divergence,
    sequence_mean as sequence_mean,
    step_clip as step_clip,
    step_mean as step_mean,
    token_clip as token_clip,
    token_cross_entropy as token_cross_entropy,
    token_divergence as token_divergence,
    token_mean as token_mean,
    trace_sum as trace_sum,
    unit_mean as unit_mean,
)
from .core.order import (
    ORDERS as ORDERS,
    left_to_right as left_to_right,
    low_confidence as low_confidence,
    surest_position as surest_position,
)
from .core.policy import (
    Policy as Policy,
)
from .core.probes import (
    Probes as Probes,
    ask as ask,
    ask_with_teacher as ask_with_teacher,
    every_step as every_step,
    fully_masked as fully_masked,
    left_to_right_views as left_to_right_views,
    one_shot as one_shot,
    segmented as segmented,
    unit_likelihood as unit_likelihood,
    views as views,
    visited as visited,
)
from .core.schedule import (
    SCHEDULES as SCHEDULES,
)
from .core.specs import (
    Branch as Branch,
    Record as Record,
    RolloutRequest as RolloutRequest,
    StepValues as StepValues,
)
from .core.states import (
    STATES as STATES,
    coupled as coupled,
    elbo as elbo,
    semi_autoregressive as semi_autoregressive,
    uniform_sizes as uniform_sizes,
)
from .core.steps import (
    STEP_DISTRIBUTIONS as STEP_DISTRIBUTIONS,
    entropy_steps as entropy_steps,
    sampled_steps as sampled_steps,
    uniform_steps as uniform_steps,
)
from .core.strata import (
    LAYOUTS as LAYOUTS,
    decode_order_strata as decode_order_strata,
    random_strata as random_strata,
    stratified as stratified,
    strided_strata as strided_strata,
)
from .core.token_sampling import (
    TokenSampling as TokenSampling,
)
from .core.trace import (
    Trace as Trace,
    all_tokens as all_tokens,
    concat_traces as concat_traces,
    select_traces as select_traces,
    state_before as state_before,
    until_eos as until_eos,
)
from .methods import (
    BASES as BASES,
    PLUGINS as PLUGINS,
    agrpo as agrpo,
    coupled_grpo as coupled_grpo,
    daca as daca,
    diffu_grpo as diffu_grpo,
    dispo as dispo,
    dps as dps,
    dtm as dtm,
    ebpo as ebpo,
    espo as espo,
    fork as fork,
    gspo as gspo,
    keep_correct as keep_correct,
    positive as positive,
    raft as raft,
    reinforce_pp as reinforce_pp,
    sml as sml,
    spg as spg,
    step_merge as step_merge,
    surprise as surprise,
    trace_rl as trace_rl,
    unigrpo as unigrpo,
    vine as vine,
    wd1 as wd1,
)
from .methods.daca import (
    SCOPES as SCOPES,
    VARIANTS as VARIANTS,
    agreement_progress as agreement_progress,
    batch_scope as batch_scope,
    confidence_progress as confidence_progress,
    group_scope as group_scope,
    likelihood_progress as likelihood_progress,
    own_progress as own_progress,
    progress_credit as progress_credit,
    rollout_scope as rollout_scope,
)
from .methods.spg import (
    block_random as block_random,
    sandwiched_policy_gradient as sandwiched_policy_gradient,
)
from .methods.surprise import surprise_credit as surprise_credit
from .methods.unigrpo import (
    random_ratio as random_ratio,
)
from .methods.wd1 import (
    preference_weight as preference_weight,
)
from .models import (
    load_model as load_model,
)
from .rollout.cache import (
    Cache as Cache,
)
from .rollout.continuation import (
    continue_from as continue_from,
)
from .rollout.decoding import (
    Decoding as Decoding,
)
from .rollout.graphs import (
    Graphs as Graphs,
)
from .rollout.presets import (
    decoding_preset as decoding_preset,
)
from .rollout.sample import (
    Rollouts as Rollouts,
    row_seeds as row_seeds,
    sample as sample,
)
from .rollout.step_values import (
    continue_steps as continue_steps,
    with_state_values as with_state_values,
)
from .studies.credit.api import (
    credit_audit as credit_audit,
)
from .studies.credit.study import (
    CreditAudit as CreditAudit,
)
from .tasks import (
    TASKS as TASKS,
    Task as Task,
)
from .training.api import (
    TrainedRun as TrainedRun,
    train as train,
)
from .training.loss_terms import (
    ScoredRollouts as ScoredRollouts,
    Scorer as Scorer,
    loss_terms as loss_terms,
)
from .training.mismatch import (
    mismatch_metrics as mismatch_metrics,
    replay_logprobs as replay_logprobs,
    scorer_gap as scorer_gap,
    truncated_weights as truncated_weights,
)
from .training.run.replay import (
    replay as replay,
)
from .training.update import (
    LossTerm as LossTerm,
    NotFinite as NotFinite,
    accumulate as accumulate,
    logprobs as logprobs,
    term_loss as term_loss,
    update as update,
)
from .util.micro_batch import (
    MicroBatch as MicroBatch,
)

__version__: str
