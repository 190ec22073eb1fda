"""Models of ours in the lm-evaluation-harness, under the name `unmask`. See docs/lm_eval.md.

    python -m unmask.integrations.lm_eval --model unmask --model_args pretrained=RUN --tasks gsm8k

Version 0.4.13 of lm_eval has no plug-ins, so this module registers the model and then runs lm_eval's own command line.
Later versions find it by the entry point `lm_eval.models`: `lm_eval --model unmask ...`.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from pydantic import Field

from unmask.config.keys import validate
from unmask.core.token_sampling import TokenSampling
from unmask.evaluation.benchmark import protocol_decoding
from unmask.evaluation.likelihood import LikelihoodSettings, Pair, log_likelihoods
from unmask.models import load_model
from unmask.models.tokenizer import HubTokenizer
from unmask.rollout.decoding import Decoding
from unmask.rollout.sample import completions, row_seeds, sample_in_turn
from unmask.tasks.task import FIELD_DECODING
from unmask.training.run.folder import checkpoint_of
from unmask.util.micro_batch import MicroBatch
from unmask.util.strict_model import Strict


class ModelArgs(Strict):
    """The keys of --model_args, with those that lm_eval adds."""

    pretrained: str
    """A run folder, a model folder, tiny, or an id on the hub."""
    estimator: Literal["elbo", "exact", "left_to_right", "fully_masked"] = "elbo"
    """Of log-likelihoods (unmask.evaluation.likelihood)."""
    draws: int = Field(64, ge=1)
    """Of the ELBO: complementary pairs of masked states."""
    length: int = Field(256, ge=1)
    """Tokens of a generation, if the task does not set max_gen_toks."""
    steps: int | None = Field(None, ge=1)
    """Denoising steps of a generation. Default: half its length."""
    block: int | None = Field(None, ge=1)
    """Positions of a semi-autoregressive block. Default: 32, or one block if 32 does not divide the length."""
    seed: int = Field(0, ge=0)
    dtype: Literal["float32", "bfloat16"] | None = None
    causal_block: int | None = Field(None, ge=1)
    """The block length of a block-causal model that neither its config.json nor its name states."""
    batch_size: int | Literal["auto"] = 32
    """Of lm_eval; auto: 32, halved when memory runs out."""
    device: str | None = None


@register_model("unmask")
class UnmaskLM(LM):
    def __init__(self, **model_args: Any) -> None:
        super().__init__()
        args = validate(ModelArgs, model_args)
        device = args.device or "cuda"
        if device.startswith("cuda") and not torch.cuda.is_available():  # lm_eval's default is cuda:0
            device = "cpu"
        dtype = None if args.dtype is None else getattr(torch, args.dtype)
        self.policy = load_model(checkpoint_of(args.pretrained), dtype, device, causal_block=args.causal_block).eval()
        self.args, self._device = args, torch.device(device)
        self.batch_size = 32 if args.batch_size == "auto" else args.batch_size
        self.likelihood = LikelihoodSettings(args.estimator, args.draws, args.seed, self.batch_size)

    @property
    def tokenizer_name(self) -> str:
        return self.policy.home.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        return {"unmask": self.args.model_dump()}

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        tokenizer = self.policy.tokenizer
        return tokenizer.fast.chat_template if isinstance(tokenizer, HubTokenizer) else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        tokenizer = self.policy.tokenizer
        if not isinstance(tokenizer, HubTokenizer) or not tokenizer.fast.chat_template:
            raise ValueError("this model has no chat template: leave out --apply_chat_template")
        text = tokenizer.rendered(chat_history, add_generation_prompt=add_generation_prompt)  # within its bounds
        if add_generation_prompt:
            return text
        settings = {**tokenizer.template, "tokenize": False, "add_generation_prompt": False}
        return tokenizer.fast.apply_chat_template(chat_history, continue_final_message=True, **settings)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy generations, up to the first of the task's stop strings."""
        texts = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        for settings, numbers in groups.items():
            options = json.loads(settings)
            decoding = self._decoding(options)
            room = self.policy.max_length - decoding.length
            prompts = [self.policy.tokenizer.encode(requests[number].args[0])[-room:] for number in numbers]
            seeds = row_seeds(self.args.seed, len(numbers)).to(self._device)
            traces = sample_in_turn(self.policy, prompts, seeds, decoding, MicroBatch(self.batch_size))
            made = [text for trace in traces for text in completions(self.policy, trace, decoding.length)]
            for number, text in zip(numbers, made, strict=True):
                texts[number] = _until(text, options.get("until") or [])
                self.cache_hook.add_partial("generate_until", requests[number].args, texts[number])
        return texts

    def _decoding(self, options: dict[str, Any]) -> Decoding:
        length = int(options.get("max_gen_toks", self.args.length))
        if length >= self.policy.max_length:
            raise ValueError(
                f"a generation of {length} tokens leaves no room for the prompt: this model takes "
                f"{self.policy.max_length} tokens; lower it with --gen_kwargs max_gen_toks=N"
            )
        decoding = protocol_decoding(FIELD_DECODING, length)
        temperature = float(options.get("temperature", 1.0)) if options.get("do_sample") else 0.0
        return replace(
            decoding,
            steps=self.args.steps or decoding.steps,
            block=self.args.block or decoding.block,
            sampling=TokenSampling(temperature=temperature),
        )

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """By the estimator; and whether greedy decoding, the surest position first, writes the continuation."""
        pairs = [self._pair(*request.args) for request in requests]
        results = list(zip(self._log_likelihoods(pairs), self._is_greedy(pairs), strict=True))
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, result)
        return results

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole texts, after an end token; long ones in windows without overlap."""
        values = []
        for request in requests:
            ids, prefix = self.policy.tokenizer.encode(request.args[0]), self.policy.eos_id
            windows = utils.get_rolling_token_windows(ids, prefix, self.policy.max_length - 1, context_len=1)
            values.append(sum(self._log_likelihoods([utils.make_disjoint_window(window) for window in windows])))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, values[-1])
        return values

    def _pair(self, context: str, continuation: str) -> Pair:
        """The tokens of both. Spaces at the end of the context belong to the continuation; a context that does not fit
        is cut on the left; an empty one is an end token."""
        kept = context.rstrip()
        context, continuation = kept, context[len(kept) :] + continuation
        encode = self.policy.tokenizer.encode
        whole, first = encode(context + continuation), len(encode(context))
        room = self.policy.max_length - (len(whole) - first)
        if room < 1:
            raise ValueError(f"a continuation is too long for this model: {len(whole) - first} tokens")
        return whole[:first][-room:] or [self.policy.eos_id], whole[first:]

    def _log_likelihoods(self, pairs: Sequence[Pair]) -> list[float]:
        return log_likelihoods(self.policy, pairs, self.likelihood, self._device)

    def _is_greedy(self, pairs: Sequence[Pair]) -> list[bool]:
        greedy = [True] * len(pairs)
        for length in {len(completion) for _, completion in pairs} - {0}:
            numbers = [number for number, (_, completion) in enumerate(pairs) if len(completion) == length]
            decoding = replace(Decoding(length).greedy(), stops=False)
            seeds = row_seeds(self.args.seed, len(numbers)).to(self._device)
            prompts = [pairs[number][0] for number in numbers]
            traces = sample_in_turn(self.policy, prompts, seeds, decoding, MicroBatch(self.batch_size))
            rows = [row for trace in traces for row in trace.tokens_BL[:, -length:].tolist()]
            for number, row in zip(numbers, rows, strict=True):
                greedy[number] = row == pairs[number][1]
        return greedy


def _until(text: str, stops: str | list[str]) -> str:
    for stop in [stops] if isinstance(stops, str) else stops:
        text = text.split(stop, 1)[0] if stop else text
    return text


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
