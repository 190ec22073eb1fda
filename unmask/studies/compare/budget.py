"""The budget of a comparison. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """What every cell may spend: updates, forward passes or seconds of training."""

    kind: str
    amount: float

    def __str__(self) -> str:
        return f"{self.amount:,.10g} {self.kind}"


def budget_of(text: str) -> Budget:
    """The budget of a text such as forwards=2e5."""
    kind, _, amount = text.partition("=")
    try:
        value = float(amount)
    except ValueError:
        value = 0.0
    whole = kind == "seconds" or value == int(value if abs(value) < 1e18 else 0)
    if kind not in ("updates", "forwards", "seconds") or not 0 < value < 1e18 or not whole:
        raise ValueError(f"--budget: {text!r} is not updates=N, forwards=N or seconds=S with a number above 0")
    return Budget(kind, value)
