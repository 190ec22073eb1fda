"""Options that rooms below the configuration take as an object. Importing them costs no torch."""

from typing import Literal

from pydantic import Field, PositiveInt

from unmask.util.strict_model import Strict

Targets = Literal["all"] | tuple[str, ...]


class LoraOptions(Strict):
    rank: PositiveInt = 128
    """Columns of A and B."""
    alpha: float = Field(64.0, gt=0, allow_inf_nan=False)
    """B A x is multiplied by alpha / rank."""
    targets: Targets = Field("all", min_length=1)
    """Linear layers of the blocks, by their last name in transformers or in the released model; never the LM head."""


class RewardConfig(Strict):
    on_error: Literal["stop", "zero"] = "stop"
    """What a reward that fails does: stop the run, which keeps its checkpoints; or score 0 and be recorded."""
    timeout: float | None = Field(60.0, gt=0, allow_inf_nan=False)
    """Seconds for a completion of a task of your own, whose process is killed after them; null: in the process of the
    run, without a limit."""
