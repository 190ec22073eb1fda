"""The base of every section of a configuration: unknown keys are errors, and nothing is changed afterwards."""

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from unmask.util.parsing import number_or_not


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def numbers(cls, value: Any, info: ValidationInfo) -> Any:
        return number_or_not(value, cls.model_fields[str(info.field_name)].annotation)
