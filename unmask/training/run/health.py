"""Health checks: signs that a run goes wrong without failing. Pure functions of the metrics of the last few updates.

    counts, warnings = health_warnings(history)        # history: the metrics of the last updates, the newest last

A warning starts when its condition holds and did not hold in the last WINDOW updates, and is shown once; `warn/NAME`
counts the starts. There is no other state, so a resumed run gives the same warnings as an uninterrupted one.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

StepMetrics = Mapping[str, float]
MetricsHistory = Sequence[StepMetrics]

WINDOW = 8
"""Updates over which a share is averaged; also the updates without a warning after which it may start again."""
SHORT = WINDOW // 2
"""Updates over which the share of answers in the format and the length are averaged; both can be lost quickly."""
EARLIER = 32
"""How far back a gradient norm, an NLL, a share of answers in the format or a length is compared."""
REACH = 1 + EARLIER + WINDOW
"""Updates that a check can look at."""
RENAMED = {
    "train/nats": "train/nll",
    "train/late_ends": "train/late_eos",
    "memory/rollout_rows": "memory/rollout_micro_batch_size",
    "memory/update_rows": "memory/update_micro_batch_size",
}
"""Names of metrics in 0.1; also, train/part/NAME became train/reward/NAME."""


class HealthCheck(NamedTuple):
    """A condition: the value is known and above the bound (or below it)."""

    value: Callable[[MetricsHistory], float | None]
    bound: float
    message: str
    """The meaning, and what to do."""
    below: bool = False

    def alarm(self, history: MetricsHistory) -> float | None:
        """The value if the condition holds, else None."""
        value = self.value(history)
        return None if value is None or (value >= self.bound if self.below else value <= self.bound) else value


class HealthWarning(NamedTuple):
    """The start of a warning: a line of warnings.jsonl."""

    name: str
    value: float
    bound: float
    message: str


def current_name(metric: str) -> str:
    return RENAMED.get(metric) or re.sub("^train/part/", "train/reward/", metric)


def health_warnings(history: MetricsHistory) -> tuple[dict[str, float], list[HealthWarning]]:
    """How often each warning has started, `warn/NAME`, and which warnings start with the last update."""
    earlier = [history[:-back] for back in range(1, WINDOW + 1)]
    before = earlier[0][-1] if earlier[0] else {}
    counts, warnings = {key: value for key, value in before.items() if key.startswith("warn/")}, list[HealthWarning]()
    for name, check in CHECKS.items():
        value = check.alarm(history)
        if value is not None and all(check.alarm(then) is None for then in earlier):
            warnings.append(HealthWarning(name, value, check.bound, check.message))
            counts[f"warn/{name}"] = counts.get(f"warn/{name}", 0.0) + 1
    return counts, warnings


def recent_updates(rows: Sequence[Mapping[str, Any]]) -> list[StepMetrics]:
    """The lines of metrics.jsonl of the last updates, as far back as a check looks."""
    return [row for row in rows if "train/reward" in row][-REACH:]


def warning_messages(before: StepMetrics, now: StepMetrics) -> Iterator[str]:
    """A line for each warning that has started between `before` and `now`."""
    for name, check in CHECKS.items():
        if now.get(f"warn/{name}", 0) > before.get(f"warn/{name}", 0):
            yield f"warning: {name}: {check.message}"


def _mean(history: MetricsHistory, key: str, window: int = WINDOW) -> float | None:
    """The mean over the window; None if an update in it lacks the metric."""
    values = [row[key] for row in history[-window:] if key in row]
    return fmean(values) if len(values) == window else None


def mean_of(key: str) -> Callable[[MetricsHistory], float | None]:
    return lambda history: _mean(history, key)


def last_of(key: str) -> Callable[[MetricsHistory], float | None]:
    return lambda history: history[-1].get(key) if history else None


def completion_nll(history: MetricsHistory) -> float | None:
    """The mean NLL of a completion; None if most are solved, because correct completions may be alike."""
    nll, solved = _mean(history, "train/nll"), _mean(history, "train/solved")
    return None if nll is None or solved is None or solved > 0.5 else nll


def nll_growth(history: MetricsHistory) -> float | None:
    """The mean NLL divided by that of the first WINDOW of the last EARLIER updates. None if most are solved, or if it
    is below one nat a completion, where a policy is sharp whatever it was before."""
    first, last = _mean(history[-EARLIER:][:WINDOW], "train/nll"), completion_nll(history)
    return last / first if first and last and last > 1 and len(history) >= 2 * WINDOW else None


def norm_over_median(history: MetricsHistory) -> float | None:
    """The gradient norm divided by the median of the norms before it; None with fewer than WINDOW of them."""
    norms = [row["train/grad_norm"] for row in history[-EARLIER - 1 : -1] if row.get("train/grad_norm")]
    if len(norms) < WINDOW or "train/grad_norm" not in history[-1]:
        return None
    return history[-1]["train/grad_norm"] / median(norms)


def unsolved_format(history: MetricsHistory) -> float | None:
    """The highest reward part with "format" in its name, if the reward is positive and at most 1 % is solved."""
    solved, reward = _mean(history, "train/solved"), _mean(history, "train/reward")
    if solved is None or reward is None or solved > 0.01 or reward <= 0:
        return None
    return max((mean for key in format_parts(history) if (mean := _mean(history, key)) is not None), default=None)


def format_parts(history: MetricsHistory) -> list[str]:
    """The metrics of the reward parts with "format" in their name."""
    return [key for key in (history[-1] if history else ()) if key.startswith("train/reward/") and "format" in key]


def last_and_largest(history: MetricsHistory, key: str) -> tuple[float, float] | None:
    """The mean of a metric over the last SHORT updates, and the largest such mean in the last EARLIER updates; None if
    an update lacks it."""
    ends = range(max(SHORT, len(history) - EARLIER + SHORT), len(history) + 1)
    means = [mean for end in ends if (mean := _mean(history[:end], key, SHORT)) is not None]
    return (means[-1], max(means)) if means and len(means) == len(ends) else None


def format_ratio(history: MetricsHistory) -> float | None:
    """The mean of a format reward part over the last SHORT updates, divided by the largest such mean in the last
    EARLIER updates; of several parts the smallest ratio. Parts whose largest mean is below a quarter do not count; None
    if no part is left."""
    found = [pair for key in format_parts(history) if (pair := last_and_largest(history, key)) is not None]
    return min((last / largest for last, largest in found if largest >= 0.25), default=None)


def length_ratio(history: MetricsHistory) -> float | None:
    """The mean number of tokens up to the first end token over the last SHORT updates, divided by the largest such mean
    in the last EARLIER updates."""
    found = last_and_largest(history, "train/length")
    return found[0] / found[1] if found and found[1] > 0 else None


def unused_rewards(history: MetricsHistory) -> float | None:
    """The mean gradient norm if rewards differ in the groups; None if they hardly do, which is another warning."""
    idle = _mean(history, "train/idle_groups")
    return None if idle is None or idle > 0.9 else _mean(history, "train/grad_norm")


def newly_skipped(history: MetricsHistory) -> float | None:
    """1 if the last update was skipped, else 0."""
    counts = [row.get("train/skipped", 0.0) for row in history[-2:]]
    return counts[-1] - (counts[0] if len(counts) > 1 else 0.0) if counts else None


CHECKS: dict[str, HealthCheck] = {
    "not_finite": HealthCheck(
        newly_skipped,
        0,
        "the loss, the gradient or a sampled log-probability was not finite, and the update was skipped: if it happens "
        "again, lower optimizer.lr or look at the method's options",
    ),
    "idle_groups": HealthCheck(
        mean_of("train/idle_groups"),
        0.9,
        "more than 90 % of the groups have identical rewards, hence no gradient under a group baseline, and none with "
        "raft if no reward is 1: the problems are too hard or too easy, or the reward is too coarse",
    ),
    "no_correct": HealthCheck(
        unused_rewards,
        1e-12,
        "rewards differ, and still there is no gradient: the method learns from rewards of at least 1 only, and no "
        "rollout has one; give a correct answer a reward of 1, or choose another method, for example --method "
        "diffu_grpo --with daca",
        below=True,
    ),
    "empty_completions": HealthCheck(
        mean_of("train/empty"),
        0.25,
        "more than a quarter of the completions are end tokens and nothing else: look at samples.jsonl, the prompt's "
        "template and the reward of an empty text",
    ),
    "long_prompts": HealthCheck(
        last_of("train/long_prompts"),
        0,
        "some prompts leave no room for a completion and were left out: shorten them, or lower rollout.length",
    ),
    "cache_mismatch": HealthCheck(
        last_of("train/cache_mismatch"),
        0.1,
        "the cache or fp8 changes log-probabilities by more than 0.1 nats a token, so the update trains on another "
        "policy than the one that sampled: lower rollout.refresh, shorten rollout.block, set rollout.correction, or "
        "turn the cache or fp8 off",
    ),
    "scorer_gap": HealthCheck(
        last_of("train/scorer_gap"),
        0.1,
        "sampler and scorer differ by more than 0.1 nats a token, so ratios are wrong: the model's passes are not "
        "reproducible, or its precision is too low (for an adapter try rollout.merge_adapter=false)",
    ),
    "entropy_collapse": HealthCheck(
        completion_nll,
        0.2,
        "the rollouts of a prompt are nearly all the same text, and most are wrong: raise the method's kl or "
        "rollout.temperature, or lower optimizer.lr",
        below=True,
    ),
    "entropy_growth": HealthCheck(
        nll_growth,
        2,
        "the rollouts have become twice as uncertain, and most are wrong, so the solve rate may fall: lower "
        "optimizer.lr; if tokens are scored with SML alone (anchor=0, raft.states=sml), set anchor=0.5 or take raft's "
        "default states",
    ),
    "gradient_spike": HealthCheck(
        norm_over_median,
        10,
        "the gradient is more than ten times the median of the updates before it: clipping bounds the step; if it "
        "happens again, lower optimizer.lr",
    ),
    "late_ends": HealthCheck(
        mean_of("train/late_eos"),
        0.8,
        "more than four in five tokens of the later half of the steps are end tokens: the steps are spent on padding; "
        "lower rollout.length, or set rollout.block",
    ),
    "format_only": HealthCheck(
        unsolved_format,
        0.5,
        "the reward for the format is earned while almost nothing is solved: lower its weight, or check the grader",
    ),
    "format_lost": HealthCheck(
        format_ratio,
        0.5,
        "the reward part for the format has fallen below half of what it was: give the format a weight "
        "(with raft and keep_correct so that the weights add up to 1) or lower optimizer.lr",
        below=True,
    ),
    "answers_shrink": HealthCheck(
        length_ratio,
        0.5,
        "answers have less than half of their former length: look in samples.jsonl whether the reasoning or the tags "
        "are missing; if so, give the format a weight, which keeps the tags, or try rollout.order=random",
        below=True,
    ),
}
