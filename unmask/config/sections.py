"""The sections of a configuration that do not depend on what is trained with what."""

from typing import Annotated, Literal, Protocol

from pydantic import Field

from unmask.core.options import LoraOptions
from unmask.util.strict_model import Strict


class RolloutConfig(Strict):
    length: int | None = Field(None, ge=1, lt=2**17)
    """Positions to denoise; the task's own length if not given."""
    steps: int | None = Field(None, ge=1)
    """Denoising steps; half the length if not given."""
    block: int | None = Field(None, ge=1)
    """Positions of a semi-autoregressive block; one block if not given."""
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    """Of sampling, and so of scoring; 0 is greedy, which training refuses: methods learn from samples."""
    top_k: int = Field(0, ge=0)
    """Draw from the k likeliest tokens; 0 cuts nothing."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Draw from the smallest set of tokens with this mass."""
    order: str = "low_confidence"
    """The order in which positions are committed."""
    schedule: Literal["even", "timestep"] = "even"
    """How many positions a step commits: as many as every other, or by Dream's timesteps."""
    threshold: float | None = Field(None, allow_inf_nan=False)
    """Commit every position whose score in the order reaches this, at least one a step; `steps` then says nothing."""
    guidance: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Classifier-free guidance, for evaluation and generation; a guided rollout cannot be trained on."""
    cache: Literal["none", "prefix", "dual"] = "none"
    """What is remembered between the steps of a block: nothing, what is before the block, or all but the block."""
    refresh: int = Field(1, ge=1)
    """Blocks between full passes that renew the cache."""
    mismatch: float = Field(0.05, ge=0, le=1)
    """The share of rows replayed without the cache to measure what it changes; 0 measures nothing."""
    correction: float = Field(0.0, ge=0)
    """The limit of importance weights that make up for the cache; 0 applies none. Replays every row."""
    micro_batch_size: int | None = Field(None, ge=1)
    """Rollouts in one forward pass; 512 for a small model, 32 for a large one if not given."""


class OptimizerConfig(Strict):
    lr: float = Field(1e-4, gt=0, allow_inf_nan=False)
    """The learning rate of AdamW, over what is trained: the adapter, or all weights."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """How the learning rate moves, once an update; the last two fall to zero over `updates`."""
    warmup: int = Field(0, ge=0)
    """Updates over which the learning rate rises from 0."""
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    """AdamW's, decoupled from the gradient."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.99)
    """AdamW's averages of gradient and squared gradient."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to this norm."""
    patience: int = Field(5, ge=1)
    """An update that is not finite is skipped; the run stops after so many in a row."""


class EvalConfig(Strict):
    prompts: int = Field(256, ge=1, lt=2**24)
    """Held-out problems."""
    samples: int = Field(4, ge=1, lt=2**16)
    """Sampled completions of each; pass@k is reported for k = 1, 2, 4, ... up to this."""
    every: int = Field(0, ge=0)
    """Updates between evaluations; 0 evaluates before and after only."""
    split: Literal["test", "validation"] = "test"
    """Whose problems: the test split's, or a part of the training split that is then not trained on, to choose by."""
    best: bool = False
    """Keep the weights of the best evaluation, by the sampled solve rate, beside the last."""
    early_stop: int = Field(0, ge=0)
    """Evaluations in a row without a new best after which the run ends with the best weights; 0: it goes on."""
    collapse: float = Field(0.0, ge=0, le=1)
    """How far the solve rate may lie below the best before the run ends with the best weights, as a share; 0: any."""


class EvalSchedule(Protocol):
    @property
    def every(self) -> int: ...


class RunConfig(Protocol):
    """What reinforcement learning and fine-tuning both configure: the weights that are trained, and the run."""

    @property
    def model(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str | None: ...
    @property
    def full(self) -> bool | None: ...
    @property
    def lora(self) -> LoraOptions: ...
    @property
    def gradient_checkpointing(self) -> bool: ...
    @property
    def seed(self) -> int: ...
    @property
    def updates(self) -> int: ...
    @property
    def optimizer(self) -> OptimizerConfig: ...
    @property
    def eval(self) -> EvalSchedule: ...
    @property
    def save_every(self) -> int: ...
    @property
    def user_files(self) -> dict[str, str]: ...
