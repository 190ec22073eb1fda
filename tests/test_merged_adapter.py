"""An adapter that is merged for rollouts: the same policy inside, the same bytes of all weights afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from mixtures import mixture
from torch import nn
from transformers import BertConfig, BertForMaskedLM

import unmask.models.lora
import unmask.training.batch
from adapters import FACTS, OPTIONS, adapted, canvas, move, small
from unmask.config import parse_config
from unmask.core.options import LoraOptions
from unmask.models.checkpoint import Origin
from unmask.models.encoder import Bert
from unmask.models.lora import add_adapter, merged_adapter, trainable_parameters
from unmask.rollout.cache import Cache
from unmask.rollout.decoding import Decoding
from unmask.rollout.sample import sample
from unmask.training.batch import Experiment, collect
from unmask.training.loop import train
from unmask.training.mismatch import scorer_gap
from unmask.training.run.folder import RunFolder, read_metrics
from unmask.training.setup import decoding_of, set_up


def decoder(tmp_path: Path) -> Any:
    return small(kind="qwen2", tie_word_embeddings=True)


def encoder(tmp_path: Path) -> Any:
    config = BertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return Bert(BertForMaskedLM(config).eval(), FACTS, tokenizer=None, origin=Origin({}))


def experts(tmp_path: Path) -> Any:
    return mixture(tmp_path, "LLaDA-MoE")


MODELS = {
    decoder: OPTIONS,
    encoder: OPTIONS,
    experts: LoraOptions(rank=2, alpha=3.0, targets=("q_proj", "experts")),
}


def weights_of(policy: nn.Module) -> dict[str, tuple[int, bytes]]:
    """The address and the bytes of every weight, adapter included."""
    return {
        name: (weight.data_ptr(), weight.detach().view(torch.uint8).numpy().tobytes())
        for name, weight in policy.named_parameters()
    }


@pytest.mark.parametrize("kind", MODELS)
def test_a_merged_policy_is_the_same_function_and_its_weights_come_back(kind: Any, tmp_path: Path) -> None:
    policy = kind(tmp_path).double()
    add_adapter(policy, MODELS[kind], seed=5)
    move(policy)
    before, trainable = weights_of(policy), trainable_parameters(policy)
    with torch.no_grad():
        apart_QV = policy(*canvas())
        with merged_adapter(policy):
            inside, addresses = weights_of(policy), {name: address for name, (address, _) in before.items()}
            assert {name: address for name, (address, _) in inside.items()} == {
                name.replace(".base_layer", ""): address for name, address in addresses.items() if ".lora_" not in name
            }
            torch.testing.assert_close(policy(*canvas()), apart_QV, rtol=0, atol=1e-11)
        assert torch.equal(policy(*canvas()), apart_QV)
    assert weights_of(policy) == before
    assert [id(weight) for weight in trainable_parameters(policy)] == [id(weight) for weight in trainable]


def test_bf16_weights_come_back_bit_for_bit_after_an_error_which_subtracting_would_not_do() -> None:
    policy = adapted().bfloat16()
    before = weights_of(policy)
    layer = policy.lm.model.layers[0].mlp.up_proj
    product = 1.5 * layer.lora_B["default"].weight.float() @ layer.lora_A["default"].weight.float()
    base = layer.base_layer.weight.clone()
    with pytest.raises(KeyboardInterrupt), merged_adapter(policy):
        merged = layer.base_layer.weight.clone()
        assert torch.equal(merged, (base + product).bfloat16())
        raise KeyboardInterrupt
    assert weights_of(policy) == before
    assert not torch.equal((merged - product).bfloat16(), base)


@pytest.mark.parametrize("cache", [None, Cache()])
def test_rollouts_are_the_same_merged_and_apart(cache: Cache | None) -> None:
    policy = adapted().double()
    prompts, decoding = [[5, 6, 7], [8]] * 3, Decoding(length=8, steps=4, block=4, cache=cache)
    apart = sample(policy, prompts, torch.arange(6), decoding).trace
    with merged_adapter(policy):
        merged = sample(policy, prompts, torch.arange(6), decoding).trace
    assert torch.equal(merged.tokens_BL, apart.tokens_BL) and torch.equal(merged.step_BL, apart.step_BL)
    torch.testing.assert_close(merged.logp_BL, apart.logp_BL, rtol=0, atol=1e-10)


def test_without_memory_for_the_copy_the_adapter_stays_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = adapted()
    before, apart_QV, real, calls = weights_of(policy), policy(*canvas()), unmask.models.lora._add_to_weight, []

    def scarce(layer: Any) -> None:
        calls.append(layer)
        if len(calls) == 5:
            raise torch.OutOfMemoryError("no memory")
        real(layer)

    monkeypatch.setattr(unmask.models.lora, "_add_to_weight", scarce)
    with pytest.warns(UserWarning, match="rollout.merge_adapter=false"), merged_adapter(policy):
        assert weights_of(policy) == before and torch.equal(policy(*canvas()), apart_QV)
    assert weights_of(policy) == before


# --- in training ----------------------------------------------------------------------------------------------------


def config_for(model: str, dtype: str = "float32", **rollout: Any) -> Any:
    return parse_config(
        {
            "model": model,
            "method": "diffu_grpo",
            "full": False,
            "lora": {"rank": 2, "alpha": 4.0},
            "dtype": dtype,
            "updates": 2,
            "prompts": 2,
            "group": 4,
            "optimizer": {"lr": 3e-2},
            "eval": {"prompts": 2, "samples": 1},
            "sudoku": {"partial": 0.5},
            "rollout": rollout,
        }
    )


@contextmanager
def experiment(config: Any) -> Iterator[Experiment]:
    """With an adapter that matters."""
    task, method = config.build_task(), config.build_method()
    with set_up(config, method.needs_reference) as setup:
        move(setup.policy, by=0.2)
        yield Experiment(setup, task, method, config, decoding_of(config, task))


def test_the_gap_of_a_batch_is_that_of_the_merged_sampler_to_the_policy_apart(model: str) -> None:
    gaps = {}
    for dtype in ("float32", "bfloat16"):
        for merge in (False, True):
            config = config_for(model, dtype, merge_adapter=merge)
            with experiment(config) as found:
                before = weights_of(found.setup.policy)
                batch = collect(found, 1)
                assert weights_of(found.setup.policy) == before
                rng = torch.Generator().manual_seed(config.seed * 2**24 + 1)
                gap = batch.mismatch["train/scorer_gap"]
                assert gap == scorer_gap(found.setup.policy, batch.trace, rng)
                gaps[dtype, merge] = gap
    assert gaps["float32", False] <= gaps["float32", True] < 1e-5
    assert gaps["bfloat16", True] < 0.1


def test_training_and_evaluation_are_merged_and_end_as_without(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rollouts still have the tokens of the run that does not merge, which fp32 rounds differently."""
    entered, real = [], unmask.training.batch.merged_adapter

    def counted(policy: Any) -> Any:
        entered.append(policy)
        return real(policy)

    monkeypatch.setattr(unmask.training.batch, "merged_adapter", counted)
    runs = []
    for merge in (True, False):
        config, folder = config_for(model, merge_adapter=merge), tmp_path / str(merge)
        train(config, lambda config=config, folder=folder: RunFolder(folder, config.dump()))
        runs.append(((folder / "samples.jsonl").read_text(), read_metrics(folder)))
        assert len(entered) == 4  # two updates and two evaluations
    assert runs[0][0] == runs[1][0]
    for merged, apart in zip(runs[0][1], runs[1][1], strict=True):
        for name in merged.keys() & {"train/loss", "train/grad_norm", "train/sampled_logp", "eval/reward"}:
            assert merged[name] == pytest.approx(apart[name], abs=1e-4)
