"""DTM, Discrete Tilt Matching (arXiv 2604.18739).

    s      a block of which a random part A is masked, clean blocks before it, masked blocks after it
    loss   = mean over states of 1/|A| sum_{i in A} L_i
    L_i    = - sum_v [ c p_teacher(v | s) + (exp(h r_g) - c) 1{v = o_i} ] log p(v | s),          r_g at least 0
           = c H(p_teacher, p) + (exp(h r_g) - c) (- log p(o_i | s))

The teacher is an earlier policy, refreshed after every `teacher_every` updates. If it wrote the rollouts, and its
conditionals are those of what it writes, the minimiser is the posterior under p_teacher(o) exp(h r) / Z for every c: c
is a control variate. With c = 1 a rollout with reward 0 says "stay", and with h = 6 one with reward 1 weighs 402
against 1 for the teacher. All positions count, the tail of end tokens too. No group, no ratio, no clip.

While teacher and policy are the same, the cross-entropy has no gradient. So with teacher_every = 1 and one inner step
the teacher does nothing, except that it costs a pass. In the paper the teacher writes the rollouts, and they are
replayed; here the policy writes them, and each is used in one update (docs/methods/dtm.md).

Exact when every block has one position, the order is left_to_right and the teacher is the policy: it is then the
policy gradient of the mean of exp(h r), divided by the length; c and the teacher cancel on average. Reduces to
fine-tuning on all own samples with c = h = 0, bit for bit (with c = 0 there is no teacher). If the teacher is the
policy, to policy_gradient with the advantage exp(h r) - c; with c = 1 and rewards of 0 and 1 that is raft at these
states times exp(h) - 1, each rollout with the same weight.
"""

from functools import partial
from math import inf

from torch import Tensor

from unmask.core.method import MOST, Method, check_range, each_inner_step
from unmask.core.objective import policy_gradient, token_cross_entropy, unit_mean
from unmask.core.states import semi_autoregressive
from unmask.core.trace import all_tokens

TEACHER_EVERY = 16


def tilt(reward_B: Tensor, group_B: Tensor, *, h: float = 6.0, c: float = 1.0) -> Tensor:
    """A = exp(h r) - c, with negative rewards as 0. Rollouts are not compared."""
    if reward_B.isnan().any():
        raise ValueError("dtm: a reward is nan; rewards must be finite numbers")
    weight_B = (h * reward_B.double().clamp(min=0)).exp() - c
    if not weight_B.float().isfinite().all():
        raise ValueError(f"dtm: h={h}: exp(h r) overflows with a reward of {float(reward_B.max()):g}; lower h")
    return weight_B.to(reward_B.dtype) if reward_B.dtype.is_floating_point else weight_B


def dtm(h: float = 6.0, c: float = 1.0, teacher_every: int = TEACHER_EVERY, draws: int = 1) -> Method:
    """Likelihood weighted by the exponential of the reward, and cross-entropy to a teacher."""
    check_range(0, inf, h=h)
    check_range(1, inf, teacher_every=teacher_every)
    check_range(1, MOST + 1, draws=draws)
    if not 0 <= c <= 1:
        raise ValueError(f"c={c} must lie in [0, 1]: above 1 the loss has no minimum")
    if c == 0 and teacher_every != TEACHER_EVERY:
        raise ValueError("teacher_every has no effect with c=0, which has no teacher: leave it out")
    return Method(
        name="dtm",
        probe=each_inner_step(partial(semi_autoregressive, draws=draws)),
        advantage=partial(tilt, h=h, c=c),
        objective=partial(policy_gradient, normaliser=unit_mean),
        counted=all_tokens,
        uses_old_logprobs=False,
        distillation=c,
        cross_entropy=partial(token_cross_entropy, normaliser=unit_mean),
        teacher_every=teacher_every,
    )
