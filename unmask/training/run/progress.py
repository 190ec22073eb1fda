"""The best evaluation of a run, the number of skipped updates, and early stopping."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from unmask.config.sections import EvalConfig
from unmask.evaluation.evaluate import Evaluation, evaluation_of


class Skips(NamedTuple):
    """Updates that were skipped because they were not finite."""

    total: int = 0
    in_a_row: int = 0

    def after(self, skipped: bool) -> "Skips":
        return Skips(self.total + 1, self.in_a_row + 1) if skipped else Skips(self.total, 0)


@dataclass(frozen=True)
class Best:
    """The evaluation with the highest sampled solve rate, the first of equals, including the one before training."""

    step: int
    evaluation: Evaluation
    since: int = 0
    """Later evaluations."""

    def after(self, step: int, evaluation: Evaluation) -> "Best":
        if evaluation.sampled.value > self.evaluation.sampled.value:
            return Best(step, evaluation)
        return replace(self, since=self.since + 1)

    def data(self) -> dict[str, Any]:
        """For JSON, with the names of 0.1, whose states can still be resumed."""
        return {"step": self.step, "found": self.evaluation.data(), "since": self.since}


def best_of(data: Mapping[str, Any]) -> Best:
    """The inverse of `Best.data`."""
    return Best(data["step"], evaluation_of(data["found"]), data["since"])


def keeps_best(settings: EvalConfig) -> bool:
    """Whether the weights of the best evaluation are saved: on request, or because a run may end with them."""
    return settings.best or settings.early_stop > 0 or settings.collapse > 0


def reason_to_end(best: Best, step: int, evaluation: Evaluation, settings: EvalConfig) -> str:
    """Why the run ends after this evaluation, which `best` includes; empty if it continues."""
    fall = best.evaluation.sampled.value - evaluation.sampled.value
    if settings.collapse and fall > settings.collapse:
        return f"ended after update {step}: it solves {100 * fall:.1f} points fewer than after update {best.step}"
    if settings.early_stop and best.since >= settings.early_stop:
        return f"ended after update {step}: no better than after update {best.step} in {best.since} evaluations"
    return ""
