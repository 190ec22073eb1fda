"""A dry run counts the passes and the weights of a real one."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from estimates import LLADA, llada
from unmask.config import Config, parse_config
from unmask.core.options import LoraOptions
from unmask.models import load_model, save, tiny_policy
from unmask.models.decoder import Decoder
from unmask.models.known import KNOWN
from unmask.models.load import outline
from unmask.models.lora import add_adapter, save_adapter, trainable_parameters
from unmask.models.tiny import TinyShape
from unmask.rollout.engine import Engine
from unmask.studies.cost.counting import Tally
from unmask.studies.cost.estimate import estimate, network_of
from unmask.tasks.scoring import Scores
from unmask.training import batch as batch_module, loop as train_module
from unmask.training.run.folder import RunFolder

# --- passes ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    save(tiny_policy(TinyShape(width=16, layers=1, heads=2, hidden=16, max_length=64), seed=1), folder)
    return str(folder)


def real_passes(config: Config, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tally]:
    """What a training run really asks of its model, by stage; no row ends early and no two rewards are alike."""
    noted: dict[str, Tally] = defaultdict(Tally)
    stage = ["evaluation"]

    def within(name: str, function: Any) -> Any:
        def called(*arguments: Any, **more: Any) -> Any:
            before, stage[0] = stage[0], name
            try:
                return function(*arguments, **more)
            finally:
                stage[0] = before

        return called

    def note(policy: Any, kind: str, states: int, columns: int, at_Q: torch.Tensor) -> None:
        without = any(getattr(module, "_disable_adapters", False) for module in policy.modules())
        key = {"rollout": f"rollout, {kind}", "evaluation": f"evaluation, {kind}"}.get(stage[0], stage[0])
        if stage[0] == "update":
            frozen = without or not any(weight.requires_grad for weight in policy.parameters())
            key = "update, " + ("reference" if frozen else "gradient" if torch.is_grad_enabled() else "no gradient")
        noted[key].add(states, columns, len(at_Q))

    plain = {name: getattr(Decoder, name) for name in ("hidden", "remember", "hidden_window", "head")}

    def whole(name: str) -> Any:
        def asked(policy: Any, tokens_SL: torch.Tensor, attended_SL: Any, at_Q: torch.Tensor) -> Any:
            note(policy, "whole", *tokens_SL.shape, at_Q)
            return plain[name](policy, tokens_SL, attended_SL, at_Q)

        return asked

    def window(policy: Any, memory: Any, tokens_SL: Any, first: int, last: int, at_Q: torch.Tensor) -> Any:
        note(policy, "window", len(tokens_SL), last - first, at_Q)
        return plain["hidden_window"](policy, memory, tokens_SL, first, last, at_Q)

    def head(policy: Any, hidden_QD: torch.Tensor) -> torch.Tensor:
        logits_QV = plain["head"](policy, hidden_QD)
        return logits_QV - 1e4 * (torch.arange(logits_QV.shape[1]) == policy.eos_id)

    def score(task: Any, rows: Any, texts: Any, *_: Any) -> Scores:
        rng = torch.Generator().manual_seed(len(rows))
        reward_B = torch.rand(len(rows), dtype=torch.float64, generator=rng)
        return Scores(reward_B, torch.zeros(len(rows), dtype=torch.bool), {}, [])

    for name, function in (("hidden", whole("hidden")), ("remember", whole("remember"))):
        monkeypatch.setattr(Decoder, name, function)
    monkeypatch.setattr(Decoder, "hidden_window", window)
    monkeypatch.setattr(Decoder, "head", head)
    monkeypatch.setattr(batch_module, "score", score)
    stages = [
        (train_module, "collect", "rollout"), (batch_module, "measure_mismatch", "cache check"),
        (train_module, "loss_terms", "update"), (train_module, "inner_updates", "update"),
    ]  # fmt: skip
    for module, name, called in stages:
        monkeypatch.setattr(module, name, within(called, getattr(module, name)))
    monkeypatch.setattr("unmask.training.setup.load_model", within("loading", load_model))  # which asks a few positions
    monkeypatch.setattr(batch_module, "scorer_gap", lambda *_: 0.0)  # eight states, which a dry run does not count
    train_module.train(config, lambda: RunFolder(folder, config.dump()))
    noted.pop("loading", None)
    return noted


CASES = {
    "diffu_grpo": {"method": "diffu_grpo"},
    "daca, inner updates": {"method": "diffu_grpo", "with": ["daca"], "inner_steps": 3, "daca": {"strata": 3}},
    "agrpo, more draws than a pass holds": {"method": "agrpo", "agrpo": {"draws": 5}, "micro_batch_size": 3},
    "agrpo with choice": {"method": "agrpo", "agrpo": {"choice": True}, "inner_steps": 2},
    "coupled, branches, dual cache": {
        "method": "coupled_grpo", "with": ["dispo"], "rollout": {"block": 4, "cache": "dual"},
    },
    "wd1, prefix cache, rare refresh": {
        "method": "wd1", "with": ["sml", "dps"], "rollout": {"block": 4, "cache": "prefix", "refresh": 2},
    },
    "spg, branches, correction": {
        "method": "spg", "with": ["dispo"], "inner_steps": 2,
        "rollout": {"block": 8, "cache": "dual", "correction": 2.0},
        "dispo": {"branches": 3, "kl": 0.1},
    },
    "reinforce_pp, a price on the reward": {"method": "reinforce_pp", "inner_steps": 2, "micro_batch_size": 4},
    "espo": {"method": "espo", "seed": 3},
    "unigrpo, inner updates": {"method": "unigrpo", "inner_steps": 4},
    "gspo, some steps commit nothing": {"method": "gspo", "rollout": {"schedule": "timestep", "steps": 24}},
    "an adapter": {"method": "diffu_grpo", "full": False, "lora": {"rank": 2}, "inner_steps": 2},
    "small passes": {"method": "coupled_grpo", "micro_batch_size": 2, "prompts": 5, "rollout": {"micro_batch_size": 3}},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_passes_are_those_of_a_real_run(
    case: str, small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = {"updates": 1, "prompts": 3, "group": 2, "eval": {"prompts": 3, "samples": 2}}
    config = parse_config({"model": small, "task": "sudoku", "device": "cpu", **short, **CASES[case]})
    found = estimate(config)
    monkeypatch.setattr(Engine, "_merges_for_free", False)  # a dry run counts every canvas
    monkeypatch.setattr("unmask.rollout.sample.prompt_rows", lambda prompts, device: None)
    real = real_passes(config, tmp_path / "run", monkeypatch)
    for kind, tally in found.passes.items():
        times = found.evaluations if kind.startswith("evaluation") else 1
        expected = tuple(times * count for count in (tally.states, tally.columns, tally.positions))
        assert expected == (real[kind].states, real[kind].columns, real[kind].positions), kind
        assert tally.states == pytest.approx(sum(size * passes for size, passes in tally.sizes.items()))
        if kind.startswith("update"):
            assert tally.most == real[kind].most
            assert tally.sizes == real[kind].sizes or config.micro_batch_size == 4  # there a last pass is not full
    assert set(real) <= set(found.passes)


def test_a_threshold_is_counted_as_one_position_a_step_and_says_so() -> None:
    plain = {"task": "sudoku", "device": "cpu", "rollout": {"steps": 16}}
    exact = estimate(parse_config(plain))
    bound = estimate(parse_config({**plain, "rollout": {"threshold": 0.01, "steps": 4}}))
    assert bound.passes == exact.passes and any("upper bound, with one position" in note for note in bound.notes)
    more = estimate(parse_config({**plain, "method": "diffu_grpo", "idle_groups": "resample"}))
    assert any("up to 5 times" in note for note in more.notes)


def test_evaluations_on_the_way_are_counted() -> None:
    found = estimate(parse_config({"device": "cpu", "updates": 20, "eval": {"every": 5}}))
    assert found.evaluations == 2 + 3  # before, after, and at 5, 10, 15


# --- what is trained ------------------------------------------------------------------------------------------------


def test_weights_are_counted_as_in_the_real_model(small: str, tmp_path: Path) -> None:
    for name in ("tiny", small):
        policy, found = load_model(name), estimate(parse_config({"model": name, "device": "cpu"}))
        assert found.network.parameters == found.network.trained == sum(w.numel() for w in policy.parameters())
    add_adapter(policy, LoraOptions(rank=3, targets=("q_proj", "down_proj")), seed=0)
    count = sum(weight.numel() for weight in trainable_parameters(policy))
    options = {"rank": 3, "targets": ["q_proj", "down_proj"]}
    with pytest.raises(ValueError, match=r"^lora: "):
        estimate(parse_config({"model": small, "lora": options, "device": "cpu"}))
    found = estimate(parse_config({"model": small, "full": False, "lora": options, "device": "cpu"}))
    assert found.network.trained == count
    save_adapter(policy, tmp_path / "adapter", small)
    for full, trained in ((None, count), (True, found.network.parameters)):
        again = estimate(
            parse_config({"model": str(tmp_path / "adapter"), "method": "diffu_grpo", "full": full, "device": "cpu"})
        )
        assert again.network.trained == trained
        assert again.memory_gib["update"]["reference"] == trained * 4 / 2**30  # what it was before this training


@pytest.mark.parametrize(
    ("name", "parameters", "block"),
    [
        ("GSAI-ML/LLaDA-8B-Base", 8_015_581_184, None),
        ("GSAI-ML/iLLaDA-8B-Instruct", 7_615_025_152, None),
        ("Dream-org/Dream-v0-Instruct-7B", 7_615_616_512, None),
        ("apple/DiffuCoder-7B-cpGRPO", 7_615_616_512, None),
        ("JetLM/SDAR-1.7B-Chat", 2_031_739_904, 4),
        ("JetLM/SDAR-4B-Chat-b32", 4_411_424_256, 32),
        ("Gen-Verse/TraDo-8B-Instruct", 8_190_735_360, 4),
        ("Efficient-Large-Model/Fast_dLLM_v2_1.5B", 1_543_714_304, 32),
        ("Efficient-Large-Model/Fast_dLLM_v2_7B", 7_615_616_512, 32),
    ],
)
def test_known_models_have_the_published_number_of_weights(name: str, parameters: int, block: int | None) -> None:
    found = outline(name)
    assert found.parameters == parameters and found.dtype == torch.bfloat16 and name in KNOWN
    assert found.causal_block == block


def test_adapters_of_llada_have_the_sizes_that_peft_gives_them() -> None:
    config, found = llada(), outline(LLADA)
    assert network_of(config, found).adapter == 335_544_320
    named = llada(lora={"targets": ["q_proj", "k_proj", "v_proj", "up_proj"]})
    assert network_of(named, found).adapter == 167_772_160
    assert network_of(llada(full=True), found).trained == 8_015_581_184
