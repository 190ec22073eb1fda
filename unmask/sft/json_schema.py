"""The JSON schemas of the configurations of `unmask sft` (and `adapt`) and `unmask pretrain`, for editors."""

from typing import Any

from unmask.config.json_schema import with_heading
from unmask.sft.config import SftConfig
from unmask.sft.pretrain import PretrainConfig
from unmask.sft.sources import ENDINGS
from unmask.tasks import TASKS


def sft_schema() -> dict[str, Any]:
    """Every key with its type, default and description. None is required: model and data may be on the command line."""
    schema = SftConfig.model_json_schema()
    del schema["required"]
    schema["$defs"]["SftSource"]["properties"]["task"]["anyOf"] = [{"enum": list(TASKS)}, {"type": "null"}]
    file = {"type": "string", "pattern": rf"({'|'.join(ENDINGS)})$".replace(".", r"\.")}
    source = {"anyOf": [{"enum": list(TASKS)}, file, {"$ref": "#/$defs/SftSource"}]}
    schema["properties"]["data"] = {
        "description": schema["properties"]["data"]["description"],
        "anyOf": [*source["anyOf"], {"type": "array", "minItems": 1, "items": source}],
    }
    return with_heading(schema, "unmask sft configuration")


def pretrain_schema() -> dict[str, Any]:
    schema = PretrainConfig.model_json_schema()
    schema["$defs"]["PretrainTask"]["properties"]["task"]["enum"] = list(TASKS)
    return with_heading(schema, "unmask pretrain configuration")
