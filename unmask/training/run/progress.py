"""What a run remembers between updates beside tensors and logs: evaluations, the best of them, updates it skipped."""

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
    """The evaluation with the highest sampled solve rate, the first of equals; the one before training counts."""

    step: int
    found: Evaluation
    since: int = 0
    """Evaluations since then."""

    def after(self, step: int, found: Evaluation) -> "Best":
        """With one evaluation more."""
        if found.sampled.value > self.found.sampled.value:
            return Best(step, found)
        return replace(self, since=self.since + 1)


@dataclass
class RunProgress:
    before: Evaluation
    best: Best
    looked: int
    """The update after which the last evaluation was made."""
    skips: Skips

    def data(self) -> dict[str, Any]:
        """For JSON."""
        best = {"step": self.best.step, "found": self.best.found.data(), "since": self.best.since}
        return {"before": self.before.data(), "best": best, "looked": self.looked, "skips": self.skips}


def progress_of(data: Mapping[str, Any]) -> RunProgress:
    """A Progress from what `Progress.data` says of it."""
    best = Best(data["best"]["step"], evaluation_of(data["best"]["found"]), data["best"]["since"])
    return RunProgress(evaluation_of(data["before"]), best, data["looked"], Skips(*data["skips"]))


def keeps_best(settings: EvalConfig) -> bool:
    """Whether the weights of the best evaluation are kept: where that is asked for, or a run may end with them."""
    return settings.best or settings.early_stop > 0 or settings.collapse > 0


def ending(best: Best, step: int, found: Evaluation, settings: EvalConfig) -> str:
    """Why the run ends with this evaluation, in a sentence; nothing where it goes on. `best` has seen it."""
    fall = best.found.sampled.value - found.sampled.value
    if settings.collapse and fall > settings.collapse:
        return f"ended after update {step}: it solves {100 * fall:.1f} points less than after update {best.step}"
    if settings.early_stop and best.since >= settings.early_stop:
        return f"ended after update {step}: no better than after update {best.step} in {best.since} evaluations"
    return ""
