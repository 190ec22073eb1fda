"""The keys of a configuration, with their types and defaults. Unknown keys are errors.

    model: tiny-two
    task: sudoku
    method: diffu_grpo
    with: [daca]
    daca: {strata: 8}          # options live in a section named after the method, plug-in or task they belong to

On the command line the same is `--task sudoku --method diffu_grpo --with daca daca.strata=8`.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr

from unmask.config.sections import EvalConfig, EvalSchedule, OptimizerConfig, RolloutConfig
from unmask.core.options import LoraOptions, RewardConfig
from unmask.core.words import section_of
from unmask.util.strict_model import Strict

if TYPE_CHECKING:
    from unmask.core.method import Method
    from unmask.tasks import Task

DEMO = Path(__file__).parent / "demo.yaml"


def as_list(value: Any) -> Any:
    """One name as a list of one."""
    return [value] if isinstance(value, str) else value


class TrainingConfig(Strict):
    """The keys that reinforcement learning and supervised fine-tuning share."""

    model: str = Field("tiny-two", min_length=1)
    """tiny-two, tiny, a folder with a checkpoint or an adapter, or an id on the hub."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """The type of the weights; the checkpoint's if not given."""
    causal_block: int | None = Field(None, ge=1, lt=2**20)
    """The block length of a block-causal model (SDAR, TraDo) that neither its config.json nor its name states."""
    full: bool | None = None
    """Train all weights instead of a low-rank adapter. Default: true for the embedded model, false for others."""
    lora: LoraOptions = LoraOptions()
    """The low-rank adapter."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them."""
    compile: bool = False
    """Compile the model's layers: seconds at the start, then faster on a large GPU."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of everything random: the order of the data, rollouts, masks, a new adapter."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto: a GPU if there is one, but the embedded model stays on the CPU."""
    updates: int = Field(80, ge=1, lt=2**24)
    """Batches of rollouts, each followed by `inner_steps` optimiser steps."""
    save_every: int = Field(50, ge=0)
    """Updates between checkpoints, from which an interrupted run resumes; 0 saves the last only."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW."""
    eval: EvalSchedule = EvalSchedule()
    """Evaluation during training."""
    _user_files: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def user_files(self) -> dict[str, str]:
        """The user's own Python files by name, with the sha256 of what was run."""
        return self._user_files


class Config(TrainingConfig):
    task: str = "sudoku"
    """The task (unmask tasks), or the Python file of your own."""
    method: str = "raft"
    """The base method (unmask methods), or FILE.py:NAME, a function of your own."""
    plugins: Annotated[tuple[str, ...], BeforeValidator(as_list)] = Field((), alias="with")
    """Plug-ins, applied in this order."""
    prompts: int = Field(12, ge=1, lt=2**20)
    """Prompts in a batch."""
    group: int = Field(8, ge=2, lt=2**16)
    """Rollouts of each prompt."""
    max_forwards: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Stop once this many forward passes are spent (cost/forwards), even if updates are left. The learning-rate
    schedule then follows the share that is spent."""
    inner_steps: int = Field(1, ge=1, le=2**12)
    """Optimiser steps on each batch of rollouts (mu)."""
    micro_batch_size: int | None = Field(None, ge=1)
    """Masked states in one forward pass of an update, which bounds its memory; gradients do not depend on it. Default:
    512 for a small model, 8 for a large one. Halved when memory runs out."""
    idle_groups: Literal["keep", "skip", "resample"] = "keep"
    """Groups with identical rewards: kept, left out, or replaced by other prompts."""
    track: Annotated[tuple[Literal["tensorboard", "wandb", "trackio"], ...], BeforeValidator(as_list)] = ()
    """Trackers that receive the metrics, in addition to metrics.jsonl."""
    trace_every: int = Field(10, ge=0)
    """Updates between groups of rollouts that are saved for `unmask view`, from the first update on. Some problems of
    every evaluation are saved too. 0: none."""
    rollout: RolloutConfig = RolloutConfig()
    """How completions are sampled."""
    eval: EvalConfig = EvalConfig()
    """Evaluation during training."""
    reward: RewardConfig = RewardConfig()
    """Rewards that fail."""
    options: dict[str, dict[str, Any]] = Field(default_factory=dict, exclude=True)
    """Option sections by the name of a method, plug-in or task."""

    @property
    def method_name(self) -> str:
        """The base and its plug-ins, e.g. `diffu_grpo+daca`."""
        return "+".join(map(section_of, (self.method, *self.plugins)))

    def dump(self) -> dict[str, Any]:
        """The resolved configuration as a YAML file has it, defaults written out."""
        from unmask.config.options import resolved_options

        return self.model_dump(mode="json", by_alias=True) | resolved_options(self)

    def build_task(self) -> "Task":
        from unmask.config.arguments import build_task

        return build_task(self)

    def build_method(self) -> "Method":
        from unmask.config.options import build_method

        return build_method(self)
