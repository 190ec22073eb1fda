"""The sections of a configuration."""

from typing import Annotated, Literal

from pydantic import Field

from unmask.util.strict_model import Strict


class RolloutConfig(Strict):
    preset: (
        Literal[
            "auto",
            "llada",
            "illada",
            "dream",
            "sdar",
            "sdar_static",
            "llada2",
            "llada2_quality",
            "llada2_speed",
            "fast_dllm",
        ]
        | None
    ) = None
    """Decode as a released model does; auto: as the release of this model's family. Sets steps, block, append, order,
    schedule, threshold and min_per_step; those that you set yourself take precedence."""
    length: int | None = Field(None, ge=1, lt=2**17)
    """Positions to denoise; the task's own length if not given."""
    steps: int | None = Field(None, ge=1)
    """Denoising steps; if not given half the length, or with a preset as many as positions."""
    block: int | None = Field(None, ge=1)
    """Positions of a semi-autoregressive block; if not given one block, or a block-causal model's own."""
    append: bool = False
    """Put a block on the canvas when the one before it is finished (iLLaDA); masks after it are never seen."""
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    """Temperature of sampling and of scoring; 0 is greedy, which training rejects: methods need samples."""
    top_k: int = Field(0, ge=0)
    """Sample from the k likeliest tokens; 0: from all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with this probability."""
    order: str = "low_confidence"
    """The order in which positions are committed."""
    schedule: Literal["even", "timestep"] = "even"
    """How many positions a step commits: the same number every step, or by Dream's timesteps."""
    threshold: float | None = Field(None, allow_inf_nan=False)
    """Commit every position whose score reaches this, else the first of the order; `steps` is then ignored."""
    min_per_step: int = Field(1, ge=1)
    """With a threshold: commit at least this many positions a step, the first of the order."""
    guidance: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Classifier-free guidance, for evaluation and generation; a guided rollout cannot be trained on."""
    cache: Literal["auto", "none", "prefix", "dual"] = "auto"
    """What is cached between the steps of a block: nothing, the columns before the block, or all but the block. auto:
    all but the block for a block-causal model, for which this is exact, and nothing for others."""
    refresh: int = Field(1, ge=1)
    """Blocks between full passes that renew the cache."""
    precision: Literal["model", "fp8"] = "model"
    """Linear layers of the blocks in rollouts and evaluations: in the model's dtype, or in fp8 on GPUs that have it."""
    mismatch: float = Field(0.05, ge=0, le=1)
    """Share of rollouts scored again without the cache and fp8, to measure their effect; 0: none."""
    correction: float = Field(0.0, ge=0)
    """Limit of the importance weights that correct for cache and fp8; 0: no weights. Scores every rollout again."""
    graphs: bool | None = None
    """Capture rollout steps as CUDA graphs; if not given, on a GPU where it is possible. It keeps memory for them."""
    merge_adapter: bool = True
    """Add a low-rank adapter to the weights during rollouts and evaluations, which needs a copy of its layers."""
    micro_batch_size: int | None = Field(None, ge=1)
    """Rollouts in one forward pass; 512 for a small model, 32 for a large one if not given."""


class OptimizerConfig(Strict):
    lr: float = Field(1e-4, gt=0, le=10)
    """The learning rate of AdamW, for the adapter or for all weights."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """How the learning rate changes; cosine and linear fall to zero over `updates`."""
    warmup: int = Field(0, ge=0)
    """Updates over which the learning rate rises from 0."""
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Weight decay of AdamW, decoupled from the gradient."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.99)
    """AdamW's decay rates of the averages of gradient and squared gradient."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to this norm."""
    max_skipped_updates: int = Field(5, ge=1)
    """An update that is not finite is skipped; the run stops after this many in a row."""


class EvalSchedule(Strict):
    every: int = Field(0, ge=0)
    """Updates between evaluations; 0 evaluates before and after only."""


class EvalConfig(EvalSchedule):
    prompts: int = Field(256, ge=1, lt=2**24)
    """Held-out problems."""
    samples: int = Field(4, ge=1, lt=2**16)
    """Sampled completions of each; pass@k is reported for k = 1, 2, 4, ... up to this."""
    split: Literal["test", "validation"] = "test"
    """The problems: the test split, or a part of the training split that is held out, for model selection."""
    best: bool = False
    """Also save the weights of the best evaluation, by the sampled solve rate."""
    early_stop: int = Field(0, ge=0)
    """The run ends with the best weights after this many evaluations in a row without a new best; 0: never."""
    collapse: float = Field(0.0, ge=0, le=1)
    """The run ends with the best weights when the solve rate falls this far below the best, as a share; 0: never."""
