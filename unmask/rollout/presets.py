"""How the released models decode: settings of a rollout by the family of the model. Imports no torch at first.

Temperature and truncation are not part of a preset: greedy scores are decoded at temperature 0 anyway, and training
needs samples. docs/rollouts.md has the source of every value.
"""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from unmask.util.parsing import suggestion

if TYPE_CHECKING:
    from unmask.rollout.decoding import Decoding


@dataclass(frozen=True)
class Preset:
    """One position a step, or by threshold."""

    block: int | None = None
    """None: one block, or a block-causal model's own."""
    append: bool = False
    order: str = "low_confidence"
    schedule: str = "even"
    threshold: float | None = None
    min_per_step: int = 1

    def settings(self) -> dict[str, Any]:
        """All keys of the section `rollout` that say which positions a step commits."""
        return {"steps": None, **{field.name: getattr(self, field.name) for field in fields(self)}}


PRESETS = {
    "llada": Preset(block=32),
    "illada": Preset(block=32, append=True),
    "dream": Preset(order="negative_entropy", schedule="timestep"),
    "sdar": Preset(order="drawn_confidence", threshold=0.85),
    "sdar_static": Preset(order="drawn_confidence"),
    "llada2": Preset(threshold=0.95),
    "llada2_quality": Preset(threshold=0.7),
    "llada2_speed": Preset(threshold=0.5),
    "fast_dllm": Preset(block=8, threshold=0.9),
}
RELEASED = {
    "LLaDA": "llada",
    "LLaDA-MoE": "llada",
    "ModernBERT": "llada",
    "iLLaDA": "illada",
    "Dream": "dream",
    "SDAR": "sdar",
    "SDAR-MoE": "sdar",
    "LLaDA2": "llada2",
    "Fast-dLLM v2": "fast_dllm",
}
"""Family -> the preset that `auto` means."""


def preset_of_family(family: str) -> str:
    """The preset of a family; ValueError if its release has none."""
    if family not in RELEASED:
        raise ValueError(f"no release with its own decoding is known for {family}: choose {', '.join(PRESETS)}")
    return RELEASED[family]


def decoding_preset(name_or_policy: object, length: int, **changes: Any) -> "Decoding":
    """The Decoding of a preset by its name, or by the family of a policy that `load_model` returned. `changes` are
    other fields of Decoding, or other values.

        sample(policy, prompts, seeds, decoding_preset(policy, 256, sampling=TokenSampling(0.0)))
    """
    from unmask.core.order import ORDERS
    from unmask.core.schedule import SCHEDULES
    from unmask.models.load import family_name_of
    from unmask.rollout.decoding import Decoding

    name = name_or_policy if isinstance(name_or_policy, str) else preset_of_family(family_name_of(name_or_policy))
    if name not in PRESETS:
        raise ValueError(f"there is no preset {name!r}; {suggestion(name, PRESETS)}")
    keys = {key: value for key, value in PRESETS[name].settings().items() if value is not None}
    keys |= {"order": ORDERS[keys["order"]], "schedule": SCHEDULES[keys["schedule"]]}
    return Decoding(**{"length": length, **keys, **changes})
