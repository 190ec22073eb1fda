"""The base of every section of a configuration: unknown keys are errors, and nothing is changed afterwards."""

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from unmask.util.parsing import as_number


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def numbers(cls, value: Any, info: ValidationInfo) -> Any:
        return as_number(value, cls.model_fields[str(info.field_name)].annotation)
