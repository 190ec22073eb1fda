"""Options that rooms below the configuration take as an object. Importing them does not import torch."""

from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator

from unmask.util.strict_model import Strict

Targets = Literal["all"] | tuple[str, ...]


class LoraOptions(Strict):
    rank: PositiveInt = 128
    """Columns of A and B."""
    alpha: float = Field(64.0, gt=0, allow_inf_nan=False)
    """B A x is multiplied by alpha / rank."""
    targets: Targets = Field("all", min_length=1)
    """Linear layers of the blocks, by their last name in transformers or in the released model; never the LM head.
    Routed experts only by the name `experts`."""

    @field_validator("targets", mode="before")
    @classmethod
    def check_list(cls, value: Any) -> Any:
        if isinstance(value, str) and value != "all":
            raise ValueError(f"names of layers are a list: write [{value}]")
        return value


class RewardConfig(Strict):
    on_error: Literal["stop", "zero"] = "stop"
    """What happens when a reward fails: the run stops and keeps its checkpoints; or it scores 0 and is recorded."""
    timeout: float | None = Field(60.0, gt=0, allow_inf_nan=False)
    """Seconds to score a completion of your own task, in a process that is killed after them; null: in the process of
    the run, without a limit."""
