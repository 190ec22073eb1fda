"""TRL's GRPOTrainer with our rollouts, probes and loss. See docs/trl.md.

    trainer = DiffusionGRPOTrainer(
        policy, unmask.daca(unmask.diffu_grpo()), Decoding(length=16, steps=8, block=16),
        reward_funcs=correct, args=GRPOConfig("out", bf16=False), train_dataset=prompts,
    )
    trainer.train()

TRL does the data, the reward functions, the optimiser and its schedule, the logs and the checkpoints. This file
overrides private methods of TRL, so it works with one release of it (the extra `trl`).
"""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from unmask.core.method import Method
from unmask.core.policy import Policy, Tokenizer
from unmask.core.probes import ask, at_states, empty
from unmask.core.trace import Trace, until_eos
from unmask.models import Model, save
from unmask.models.lora import ReferencePolicy, has_adapter, save_adapter
from unmask.models.tiny import CHARACTERS, EOS, MASK, PAD, SPECIALS, Tiny, transformers_network
from unmask.models.tokenizer import HubTokenizer
from unmask.rollout.decoding import Decoding
from unmask.rollout.sample import Rollouts, completions, row_seeds, sample
from unmask.training.loss_terms import ScoredRollouts, Scorer, loss_terms
from unmask.training.setup import decoder_of
from unmask.training.update import LossTerm, term_loss
from unmask.util.micro_batch import MicroBatch
from unmask.util.turns import Turns, checked_turns

HONOURED = {
    "learning_rate", "num_generations", "num_generations_eval", "num_iterations", "shuffle_dataset", "reward_weights",
    "remove_unused_columns", "generation_batch_size", "steps_per_generation", "log_completions",
    "num_completions_to_print", "log_unique_prompts", "log_completions_hub_repo", "pad_to_multiple_of",
}  # fmt: skip
"""The options of GRPOConfig, beyond those of TrainingArguments, that this trainer supports. The others belong to the
method, to the decoding, or to causal models."""


class DiffusionGRPOTrainer(GRPOTrainer):
    """GRPO for a masked diffusion model with any Method that has no branches.

    One batch of rollouts gives `num_iterations` optimiser steps, each on the whole batch. The loss is normalised over
    the whole batch also with several micro-batches (`gradient_accumulation_steps`).
    """

    def __init__(
        self,
        policy: Model,
        method: Method,
        decoding: Decoding,
        *,
        args: GRPOConfig,
        micro_batch_size: int = 32,
        **trainer: Any,
    ) -> None:
        """`micro_batch_size` is the largest number of canvases in one pass without gradient: rollouts, and the
        log-probabilities of the old and the reference policy. `trainer` are arguments of GRPOTrainer: reward_funcs,
        train_dataset, eval_dataset, callbacks, optimizers."""
        check(method, args)
        decoder_of(policy, "training inside TRL").to(args.device)
        self.policy, self.method, self.decoding = policy, method, decoding
        self.micro_batch = MicroBatch(micro_batch_size)
        self.reference: Policy | None = None
        if method.needs_reference:
            adapted = has_adapter(policy)
            self.reference = ReferencePolicy(policy) if adapted else deepcopy(policy).requires_grad_(False)
        self._trace: Trace | None = None
        self._reward_B: Tensor | None = None
        self._terms: dict[str, list[LossTerm]] = {}
        self._logprobs: dict[str, list[tuple[Tensor, Tensor]]] = {"train": [], "eval": []}
        if isinstance(policy, Tiny):
            policy.lm = transformers_network(policy)
        super().__init__(model=policy.lm, args=args, processing_class=fast_tokenizer(policy.tokenizer), **trainer)
        self.rollout_func = self._roll_out  # as an argument of the constructor it would give a warning

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def _roll_out(self, prompts: list[Any], _: GRPOTrainer) -> dict[str, Any]:
        """Rollouts in TRL's format. The seed of a step depends on its number, the seed of an evaluation on its prompts,
        so that two evaluations differ only by the weights."""
        ids = [prompt_ids(self.policy.tokenizer, prompt) for prompt in prompts]
        training = self._mode == "train"
        number = self.args.seed * 2**24 + self.state.global_step if training else crc32(str(ids).encode())
        group_B = torch.arange(len(ids)) // (self.num_generations if training else self.num_generations_eval)
        self._trace = trace = sample(
            self.policy,
            ids,
            row_seeds(number, len(ids)).to(self.args.device),
            self.decoding,
            group_B=group_B.to(self.args.device),
            request=self.method.request,
            micro_batch=self.micro_batch,
        ).trace
        counted_BL = until_eos(trace)
        written = [row_L[counted_L].tolist() for row_L, counted_L in zip(trace.tokens_BL, counted_BL, strict=True)]
        return {"prompt_ids": ids, "completion_ids": written, "logprobs": None}

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: list[Any], _: list[Any], completion_ids: list[list[int]]
    ) -> Tensor:
        """TRL's rewards for the texts up to the first token that ends a turn."""
        assert self._trace is not None
        texts: list[Any] = completions(self.policy, self._trace, self.decoding.length)
        if isinstance(prompts[0], list):
            texts = [[{"role": "assistant", "content": text}] for text in texts]
        reward_BF: Tensor = super()._calculate_rewards(inputs, prompts, texts, completion_ids)
        if (unscored_B := reward_BF.isnan().all(-1)).any():
            row = int(unscored_B.nonzero()[0])
            raise ValueError(f"every reward function returned None or NaN for {texts[row]!r}; return a number")
        self._reward_B = (reward_BF.double() * self.reward_weights.to(reward_BF.device)).nansum(-1)
        return reward_BF

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's batch with the index of each row, because TRL shuffles and splits it; and the terms of our loss."""
        done = self.state.global_step
        if self._mode == "train" and done % self.num_iterations:
            raise ValueError(
                f"checkpoint-{done} is in the middle of a batch of rollouts, which TRL does not save: resume from a "
                f"multiple of num_iterations={self.num_iterations}, and set save_steps to a multiple of it"
            )
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        assert self._trace is not None and self._reward_B is not None
        steps = loss_terms(
            self.method,
            ScoredRollouts(Rollouts(self._trace, None), self._reward_B),
            Scorer(self.policy, self.reference, self.micro_batch),
            torch.Generator().manual_seed(self.args.seed * 2**24 + self.state.global_step),
            self.num_iterations if self._mode == "train" else 1,
        )
        self._terms[self._mode] = [term for (term,) in steps]
        self._logprobs[self._mode].clear()
        return {**batch, "row": torch.arange(len(inputs), device=self.args.device)}

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *_: Any, **__: Any
    ) -> tuple[Tensor, None, None]:
        """Zeros: TRL computes these from left to right, which a diffusion model does not use."""
        return torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device), None, None

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        mode, inner_step = self._mode, 0
        if mode == "train":
            inner_step = self._step // self.args.steps_per_generation % self.num_iterations
        term, logprobs = self._terms[mode][inner_step], self._logprobs[mode]
        loss, number_N, logp_NL = rows_loss(self.policy, term, inputs["row"])
        logprobs.append((number_N, logp_NL.detach()))
        if sum(len(number_N) for number_N, _ in logprobs) == len(term.probes.state_N):  # metrics of the whole batch
            whole_NL = torch.zeros_like(term.probes.share_NL, dtype=logp_NL.dtype)
            for number_N, piece_NL in logprobs:
                whole_NL[number_N] = piece_NL
            logprobs.clear()
            with torch.no_grad():
                metrics = term_loss(term, whole_NL)[1]
            for name in metrics.keys() - {"loss"}:  # TRL logs the loss
                self._metrics[mode][name].append(float(metrics[name]))
        return loss

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """A checkpoint that `load_model` and the family's own tools read. The checkpoints that TRL resumes from are in
        its own format."""
        if _internal_call:
            super().save_model(output_dir, _internal_call=True)
            return
        folder = Path(output_dir or self.args.output_dir)
        if has_adapter(self.policy):
            save_adapter(self.policy, folder, self.policy.home)
        else:
            save(self.policy, folder)


def rows_loss(policy: Policy, term: LossTerm, row_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The part of a term's loss that belongs to some traces, normalised over all; the indices of their probes, and
    their log-probabilities. The sum over a partition of the traces is the loss, and likewise for the gradient.

    All other traces get advantage zero and the reference's log-probabilities, so they add nothing. If the term asks
    nothing (fork, if no step of the batch is a fallback), the loss is zero and its backward pass reaches no weight.
    """
    probes, mine_B = term.probes, torch.zeros_like(term.advantage_B, dtype=torch.bool)
    mine_B[row_b] = True
    number_N = mine_B[probes.trace_N].nonzero().squeeze(1)
    own_probes = at_states(probes, probes.state_N[number_N]) if len(number_N) else empty(probes)
    own_NL = ask(policy, own_probes)
    others_NL = term.reference_NL if term.reference_NL is not None else term.old_NL
    others_NL = torch.zeros_like(probes.share_NL) if others_NL is None else others_NL
    logp_NL = others_NL.to(own_NL.dtype).index_put((number_N,), own_NL)
    loss, _ = term_loss(replace(term, advantage_B=term.advantage_B * mine_B), logp_NL)
    return loss if len(probes.state_N) else loss.requires_grad_(), number_N, own_NL


def check(method: Method, args: GRPOConfig) -> None:
    """ValueError for settings that this trainer does not support."""
    if method.request.branch is not None:
        raise ValueError(f"{method.name} branches, and TRL cannot score branches: use `unmask train`")
    if method.values is not None:
        raise ValueError(f"{method.name} completes states again, and TRL cannot score them: use `unmask train`")
    if method.needs_teacher:
        raise ValueError(f"{method.name} follows a teacher, which TRL does not refresh: use `unmask train`")
    if method.further:
        raise ValueError(f"{method.name} has several terms, and inside TRL a loss has one: use `unmask train`")
    if args.world_size > 1:
        raise ValueError("several processes are not supported inside TRL; use `torchrun -m unmask train`")
    if args.bf16 or args.fp16:
        raise ValueError("bf16: rollouts and updates use the dtype the policy was loaded in; set bf16=False")
    if args.steps_per_generation != args.gradient_accumulation_steps:
        raise ValueError(
            f"steps_per_generation={args.steps_per_generation}: an optimiser step uses the whole batch of rollouts, "
            f"so it must equal gradient_accumulation_steps={args.gradient_accumulation_steps}; leave it out"
        )
    for name in GRPOConfig.__annotations__:
        value, default = getattr(args, name), GRPOConfig.__dataclass_fields__[name].default
        if name not in HONOURED and value != default:
            raise ValueError(f"{name}={value!r}: the method and the decoding determine this; leave it out")


def prompt_ids(tokenizer: Tokenizer, prompt: str | Turns) -> list[int]:
    """A string as it is; a conversation in the chat template."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    try:
        return tokenizer.prompt(checked_turns(prompt))
    except ValueError as error:
        raise ValueError(f"a prompt {error}") from None


def fast_tokenizer(tokenizer: Tokenizer) -> Any:
    """The tokenizer for TRL's padding and its logs."""
    if isinstance(tokenizer, HubTokenizer):
        return tokenizer.fast
    from tokenizers import Regex, Tokenizer as Fast, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"<pad>": PAD, "<mask>": MASK, "<eos>": EOS}
    fast = Fast(models.WordLevel({**special, **{c: SPECIALS + place for place, c in enumerate(CHARACTERS)}}))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    fast.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>", mask_token="<mask>", eos_token="<eos>")
