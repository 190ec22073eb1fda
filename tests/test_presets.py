"""Presets of released decodings: by name and by family, in Python and in a configuration, and what takes precedence."""

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from checkpoints import llada
from unmask.cli.arguments import load
from unmask.config import read_config
from unmask.config.sections import RolloutConfig
from unmask.core.order import drawn_confidence, negative_entropy
from unmask.core.schedule import timestep
from unmask.models import load_checkpoint
from unmask.models.families import FAMILIES
from unmask.models.known import KNOWN
from unmask.models.load import family_name
from unmask.models.tiny import CharacterTokenizer, tiny_policy
from unmask.rollout.decoding import Decoding
from unmask.rollout.presets import PRESETS, RELEASED, Preset, decoding_preset, preset_of_family
from unmask.training.setup import decoding_of
from wording import naming


def decoding(**rollout: Any) -> Decoding:
    """Of a configuration with completions of 96 positions."""
    config = read_config({"task": "countdown_text", "method": "agrpo", "rollout": {"length": 96, **rollout}})
    return decoding_of(config, config.build_task())


def test_the_names_of_the_configuration_are_the_presets() -> None:
    named = {name for part in get_args(RolloutConfig.model_fields["preset"].annotation) for name in get_args(part)}
    assert named == {"auto", *PRESETS}
    assert {*RELEASED.values()} <= {*PRESETS} and {*RELEASED} <= {family.name for family in FAMILIES}
    assert {*Preset().settings()} < {*RolloutConfig.model_fields}


@pytest.mark.parametrize("name", PRESETS)
def test_a_configuration_and_python_mean_the_same(name: str) -> None:
    found, made = decoding(preset=name), decoding_preset(name, 96)
    if found.threshold is not None:  # these steps have no effect
        made = decoding_preset(name, 96, steps=found.steps)
    assert found == made
    assert found.threshold is not None or found.steps == 96  # one position a step


def test_what_the_releases_do() -> None:
    """A list of its own, as in docs/rollouts.md."""
    one = {"llada": 32, "illada": 32, "dream": 96, "sdar_static": 96}
    for name, block in one.items():
        found = decoding_preset(name, 96)
        assert (found.block, found.steps, found.threshold) == (block, 96, None)
        assert found.append == (name == "illada")
    levels = {"sdar": 0.85, "llada2": 0.95, "llada2_quality": 0.7, "llada2_speed": 0.5, "fast_dllm": 0.9}
    for name, level in levels.items():
        assert decoding_preset(name, 96).threshold == level
    assert decoding_preset("fast_dllm", 96).block == 8
    dream = decoding_preset("dream", 96)
    assert dream.order is negative_entropy and dream.schedule is timestep
    assert decoding_preset("sdar", 96).order is drawn_confidence


@pytest.mark.parametrize("model", KNOWN)
def test_auto_is_the_preset_of_the_family(model: str) -> None:
    rollout = {"length": 64, "preset": "auto"}
    config = read_config({"task": "countdown_text", "method": "agrpo", "model": model, "rollout": rollout})
    assert config.rollout.preset == RELEASED[family_name(model)]
    known = {"SDAR": "sdar", "TraDo": "sdar", "iLLaDA": "illada", "LLaDA2": "llada2", "Fast_dLLM": "fast_dllm"}
    known |= {"LLaDA-": "llada", "Dream": "dream", "DiffuCoder": "dream"}
    assert config.rollout.preset == next(preset for part, preset in known.items() if part in model)


def test_a_policy_has_the_preset_of_its_family(tmp_path: Path) -> None:
    folder, *_ = llada(tmp_path / "model")
    policy = load_checkpoint(folder, tokenizer=CharacterTokenizer())
    assert decoding_preset(policy, 64) == decoding_preset("llada", 64)
    changed = decoding_preset("llada", 64, steps=32, threshold=0.9)
    assert (changed.steps, changed.threshold, changed.block) == (32, 0.9, 32)


def test_your_keys_take_precedence_over_a_preset_and_a_later_preset_over_the_file(tmp_path: Path) -> None:
    own = decoding(preset="sdar", threshold=0.6)
    assert own.threshold == 0.6 and own.order is drawn_confidence
    file = tmp_path / "config.yaml"
    rollout = {"length": 96, "steps": 24, "block": 48, "order": "random", "temperature": 0.7}
    file.write_text(yaml.safe_dump({"task": "countdown_text", "rollout": rollout}))
    plain = read_config(file).rollout
    assert (plain.steps, plain.block, plain.order) == (24, 48, "random")
    late = read_config(file, ["rollout.steps=48", "rollout.preset=llada"]).rollout
    assert (late.steps, late.block, late.order, late.temperature) == (48, 32, "low_confidence", 0.7)
    none = read_config(file, ["rollout.preset=null"]).rollout
    assert none == plain
    written = read_config(file, ["rollout.preset=fast_dllm"])
    again = read_config(written.dump(), ["rollout.threshold=0.8"]).rollout
    assert again == written.rollout.model_copy(update={"threshold": 0.8})


@pytest.mark.parametrize(
    ("data", "names"),
    [
        ({"rollout": {"preset": "auto"}}, ["rollout.preset", "embedded model", "llada2"]),
        ({"rollout": {"preset": "llama"}}, ["rollout.preset", "llama"]),
        ({"rollout": {"preset": ["llada"]}}, ["rollout.preset"]),
        ({"rollout": {"preset": "llada"}}, ["block", 32, 16, "rollout.preset=llada"]),  # Sudoku has 16 positions
        ({"rollout": {"preset": "auto"}, "model": "nowhere"}, ["rollout.preset", "nowhere"]),
        ({"rollout": {"preset": "illada", "length": 32}, "method": "diffu_grpo", "task": "countdown_text"}, ["append"]),
    ],
)
def test_presets_that_cannot_be_used_are_refused(data: dict[str, Any], names: list[Any]) -> None:
    with pytest.raises(ValueError, match=naming(*names)):
        read_config(data)


def test_a_policy_without_a_release_needs_a_name() -> None:
    with pytest.raises(ValueError, match=naming("embedded model", "llada")):
        decoding_preset(tiny_policy(), 16)
    with pytest.raises(ValueError, match=naming("object", "preset")):
        decoding_preset(object(), 16)
    with pytest.raises(ValueError, match=naming("sdra", "sdar")):
        decoding_preset("sdra", 16)
    with pytest.raises(ValueError, match=naming("A2D", "llada")):
        preset_of_family("A2D")


def test_commands_that_do_not_train_take_every_preset() -> None:
    for name in PRESETS:
        config, _ = load("tiny", ["rollout.preset=" + name, "rollout.length=96"])
        assert config.rollout.preset == name
