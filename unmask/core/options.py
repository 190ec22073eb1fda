"""Options that rooms below the configuration take as an object. Importing them costs no torch."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from unmask.util.strict_model import Strict

Targets = Literal["all"] | tuple[str, ...]


class LoraOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: PositiveInt = 128
    """Columns of A and B."""
    alpha: float = Field(64.0, gt=0, allow_inf_nan=False)
    """B A x is multiplied by alpha / rank."""
    targets: Targets = Field("all", min_length=1)
    """Linear layers of the blocks, by their last name in transformers or in the released model; never the LM head."""


class RewardConfig(Strict):
    on_error: Literal["stop", "zero"] = "stop"
    """What happens when a reward fails: stop the run, which saves its state; or score 0 and log the failure."""
    timeout: float | None = Field(60.0, gt=0, allow_inf_nan=False)
    """Seconds for one completion in a user's own task, whose reward runs in a separate process; null: no limit, in
    this process."""
