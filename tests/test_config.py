"""Bad configurations get one sentence that names the key, and nothing is created on disk."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from unmask.cli.runs import split_settings
from unmask.config import DEMO, Config, parse_config, read_config
from unmask.config.defaults import micro_batch_sizes
from unmask.config.keys import ADDED, RENAMED, RESOLVED, validate, with_current_keys, with_old_keys
from unmask.config.parse import read_run_config
from unmask.core.strata import strided_strata
from unmask.sft.config import SftConfig
from wording import naming

BAD = {
    "learning_rate: unknown key": {"learning_rate": 1e-3},
    "optimizer.warm_up: unknown key; did you mean warmup?": {"optimizer": {"warm_up": 3}},
    "updates: expected a whole number": {"updates": "many"},
    "group: input should be greater than or equal to 2, got 1": {"group": 1},
    "rollout.top_p: input should be greater than 0": {"rollout": {"top_p": 0}},
    "rollout.order: there is no 'entropy'": {"rollout": {"order": "entropy"}},
    "rollout.temperature: input should be a finite number": {"rollout": {"temperature": float("inf")}},
    "device: 'abacus' cannot be used here": {"device": "abacus"},
    "optimizer.betas.0: input should be less than 1": {"optimizer": {"betas": [2, 3]}},
    "seed: input should be a number, not true or false": {"seed": True},
    "1: keys must be text": {1: 2},
    "dps: shuffled permutes the scores of steps": {"with": ["dps"], "dps": {"variant": "own", "shuffled": True}},
    "espo: draws=0 must be at least 1": {"method": "espo", "espo": {"draws": 0}},
    "diffu_grpo.kl_kind: there is no 'k4'": {"method": "diffu_grpo", "diffu_grpo": {"kl_kind": "k4"}},
    "rollout: steps=7 must be a multiple of the number of blocks (2)": {"rollout": {"steps": 7, "block": 8}},
    "rollout: block=5 must divide": {"rollout": {"block": 5}},
    "rollout: steps=17": {"rollout": {"steps": 17}},
    "task: there is no 'sudokku'; did you mean sudoku?": {"task": "sudokku"},
    "method: there is no 'grpo'": {"method": "grpo"},
    "with: there is no 'dsp'": {"with": ["dsp"]},
    "daca.stratum: unknown option; did you mean strata?": {"with": ["daca"], "daca": {"stratum": 8}},
    "daca.strata: expected a whole number": {"with": ["daca"], "daca": {"strata": "a lot"}},
    "daca.layout: there is no 'diagonal'": {"with": ["daca"], "daca": {"layout": "diagonal"}},
    "raft+sml: strata=17 must lie between 1 and the 16 positions": {"with": ["sml"], "sml": {"strata": 17}},
    "anchor=1.0 must lie in [0, 1)": {"with": ["sml"], "sml": {"anchor": 1.0}},
    "sml: agrpo is defined by the states it asks at": {"method": "agrpo", "with": ["sml"]},
    "dispo: branches=1 must be at least 2": {"with": ["dispo"], "dispo": {"branches": 1}},
    "dispo: has options, but is not used; add --with dispo": {"dispo": {"weight": 0.5}},
    "agrpo: has options, but is not used; add --method agrpo": {"agrpo": {"draws": 2}},
    "countdown: has options, but is not used; add --task countdown": {"countdown": {"numbers": 3}},
    "daca: expected options such as daca.key=value": {"with": ["daca"], "daca": 8},
    "with: daca is sml and dps together; leave out sml": {"with": ["daca", "sml"]},
    "with: dps is named twice": {"with": ["dps", "dps"]},
    "sudoku: holes": {"sudoku": {"holes": [12, 9]}},
    "options: unknown key": {"options": 3},
    "agrpo scores the choice of positions of low_confidence, not of random; set rollout.order=low_confidence": {
        "method": "agrpo",
        "agrpo": {"choice": True},
        "rollout": {"order": "random"},
    },
    "set rollout.order=low_confidence or, to keep left_to_right, rollout.threshold": {
        "method": "agrpo",
        "agrpo": {"choice": True},
        "rollout": {"order": "left_to_right"},
    },
    "diffu_grpo: kl=-1.0 must be at least 0": {"method": "diffu_grpo", "diffu_grpo": {"kl": -1}},
    "diffu_grpo: kl=nan must be at least 0": {"method": "diffu_grpo", "diffu_grpo": {"kl": float("nan")}},
    "diffu_grpo: low=-1.0 must be at least 0": {"method": "diffu_grpo", "diffu_grpo": {"low": -1}},
    "diffu_grpo: prompt_masking=2.0 must be at least 0 and below 1": {
        "method": "diffu_grpo",
        "diffu_grpo": {"prompt_masking": 2},
    },
    "spg: beta=0.0 must be above 0": {"method": "spg", "spg": {"beta": 0}},
    "daca: top=0 must be at least 1": {"with": ["daca"], "daca": {"top": 0}},
    "dps: strength=-0.1 must be at least 0": {"with": ["dps"], "dps": {"strength": -0.1}},
    "dispo: weight=-1.0 must be at least 0": {"with": ["dispo"], "dispo": {"weight": -1}},
    "daca: on agrpo daca is DPS alone": {"method": "agrpo", "with": ["daca"], "daca": {"strata": 8}},
}


@pytest.mark.parametrize(("sentence", "data"), BAD.items(), ids=list(BAD))
def test_a_bad_configuration_is_one_sentence_that_names_the_key(sentence: str, data: dict) -> None:
    with pytest.raises(ValueError) as caught:
        parse_config(data)
    message = str(caught.value)
    assert sentence in message
    assert "\n" not in message


def test_overrides_go_over_the_file_and_names_over_both(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("with: [daca]\nseed: 1\ndaca: {strata: 2, kl: 0.1}\noptimizer: {lr: 2e-6}\n")
    config = read_config(path, ["daca.strata=8", "seed=2", "rollout.steps=4"], seed=3)
    assert config.options["daca"] == {"strata": 8, "kl": 0.1}
    assert (config.seed, config.rollout.steps) == (3, 4)
    assert config.optimizer.lr == 2e-6  # PyYAML reads this as text


def test_options_reach_the_functions_they_belong_to() -> None:
    data = {"with": ["daca", "dispo"], "daca": {"strata": 8, "layout": "strided"}, "dispo": {"branches": 3}}
    method = parse_config(data).build_method()
    assert method.request.branch is not None and method.request.branch.fillings == 3
    estimator = method.probe.__closure__[0].cell_contents  # each_turn's estimator
    assert estimator.keywords["strata"] == 8 and estimator.keywords["layout"] is strided_strata


def test_the_dump_of_a_configuration_reads_back_as_itself() -> None:
    config = read_config(DEMO, ["raft.states=sml", "raft.layout=strided", "sudoku.holes=[8, 10]", "rollout.block=8"])
    again = parse_config(yaml.safe_load(yaml.safe_dump(config.dump())))
    assert again.dump() == config.dump()
    assert again.dump()["raft"]["layout"] == "strided"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("a: [1", "broken.yaml.*YAML"), ("- 1\n- 2\n", "broken.yaml.* list")],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        read_config(path)


def test_an_override_without_a_value_or_into_a_value_is_refused() -> None:
    with pytest.raises(ValueError, match=r"seed.*key=value"):
        read_config(DEMO, ["seed"])
    with pytest.raises(ValueError, match=r"daca.strata: not YAML"):
        read_config(DEMO, ["daca.strata=[1"])
    with pytest.raises(ValueError, match="seed"):
        read_config(DEMO, ["seed=1", "seed.more=2"])
    with pytest.raises(ValueError, match=r"nowhere\.yaml"):
        read_config(Path("nowhere.yaml"))


def test_naming_another_method_leaves_the_options_of_the_old_one_behind(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(read_config(DEMO).dump()))
    config = read_config(path, ["agrpo.draws=2"], method="agrpo", **{"with": ["dispo"]})
    assert set(config.options) == {"sudoku", "agrpo"}
    assert set(read_config(path, ["method=wd1", "with=dps"]).options) == {"sudoku"}
    with pytest.raises(ValueError, match=r"^daca: "):
        read_config(path, ["daca.strata=2"], **{"with": ["dispo"]})
    path.write_text("with: daca\ndaca: {strata: 2}\n")
    assert read_config(path, task="sudoku").options["daca"] == {"strata": 2}


def test_numbers_that_yaml_reads_as_text_are_written_back_as_numbers() -> None:
    assert read_config(None, ["method=diffu_grpo", "diffu_grpo.kl=1e-3"]).dump()["diffu_grpo"]["kl"] == 1e-3


def test_a_configuration_may_stand_anywhere_among_the_overrides(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("updates: 3\n")
    for words in ([str(file), "a=1", "b=2"], ["a=1", str(file), "b=2"], ["a=1", "b=2", str(file)]):
        assert split_settings(words) == (file, ["a=1", "b=2"])
    assert split_settings(["a=1", "b"]) == (None, ["a=1", "b"])  # which is then refused as no key=value
    assert split_settings(["none.yaml", "a=1"]) == (Path("none.yaml"), ["a=1"])  # which is then said not to be there


# --- keys and defaults ------------------------------------------------------------------------------------------------


def test_the_schema_is_imported_without_torch() -> None:
    code = "import sys, unmask.config.schema; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_old_key_names_are_those_of_0_1_in_the_same_order() -> None:
    data = read_config(overrides=["inner_steps=3", "rollout.micro_batch_size=7", "raft.states=sml"]).dump()
    old = with_old_keys(data)
    for key, value in ADDED.items():  # later keys that change nothing are left out
        section, _, name = key.rpartition(".")
        keys = data.get(section, {}) if section else data
        if name in keys:
            assert keys.pop(name) == value
    assert (data["rollout"]["cache"], old["rollout"]["cache"]) == ("auto", "none")  # the same run, another default
    data["rollout"]["cache"] = "none"
    assert (old["inner"], old["rollout"]["rows"]) == (3, 7) and {"rows", "checkpointing"} <= old.keys()
    assert "max_norm" in old["optimizer"] and not {"inner_steps", "micro_batch_size"} & old.keys()
    with pytest.warns(FutureWarning) as warned:
        current = with_current_keys(old)
    assert list(current) == list(data) and current == data and len(warned) == len(RENAMED)


@pytest.mark.parametrize(
    ("weights", "configured", "sizes"),
    [
        (9_999_999, {}, (512, 512)),
        (10_000_000, {}, (32, 8)),
        (10_000_000, {"micro_batch_size": 3}, (32, 3)),
        (1, {"rollout": {"micro_batch_size": 5}}, (5, 512)),
    ],
)
def test_micro_batches_are_as_configured_or_by_the_number_of_weights(weights: int, configured: dict, sizes) -> None:
    assert micro_batch_sizes(parse_config(configured), weights) == sizes


@pytest.mark.parametrize(
    ("data", "names"),
    [
        ({"optimizer": {"max_grad_nrm": 1}}, ("optimizer.max_grad_nrm", "max_grad_norm")),
        ({"lr": 1}, ("lr", "optimizer.lr")),
        ({"modle": "tiny"}, ("modle", "model")),
        ({3: 1}, ("3", "keys must be text")),
    ],
)
def test_every_configuration_names_the_wrong_key_and_the_likely_one(data: dict, names: tuple[str, str]) -> None:
    for model in (Config, SftConfig):
        with pytest.raises(ValueError, match=naming(*names)):
            validate(model, {"model": "tiny", "data": ["sudoku"], **data} if model is SftConfig else data)


@pytest.mark.parametrize(("text", "value"), [("1e3", 1000), ("2.5e2", 250), ("1E+2", 100), ("7", 7)])
def test_a_whole_number_may_be_written_with_an_exponent(text: str, value: int) -> None:
    config = read_config(None, [f"updates={text}", f"daca.top={text}", "with=daca"])
    assert (config.updates, config.dump()["daca"]["top"]) == (value, value)


def test_a_fraction_with_an_exponent_is_not_a_whole_number() -> None:
    with pytest.raises(ValueError, match=naming("updates", "1.5e0")):
        read_config(None, ["updates=1.5e0"])


SML_OF_0_2 = {"strata": 3, "layout": "random", "anchor": 0.5, "kl": 0.05}


@pytest.mark.parametrize(
    ("method", "plugin", "changed", "base_options", "kl"),
    [
        ("diffu_grpo", "sml", {}, {"kl": 0.04}, 0.05),
        ("diffu_grpo", "daca", {}, {"kl": 0.1}, 0.1),
        ("reinforce_pp", "sml", {"kl": 0.0}, {"kl": 0.01, "baseline": False}, 0.0),  # its KL is on the reward
        ("reinforce_pp", "sml", {"kl": 0.0}, {"kl": 0.01, "baseline": True}, 0.01),
        ("diffu_grpo", "daca", {}, {"kl": 0.0, "advantage": "correct_only"}, 0.05),  # without negative advantages
        ("agrpo", "daca", {}, {"kl": 0.0}, 0.0),  # DPS alone: the options of SML had no effect
    ],
)
def test_a_run_of_0_2_keeps_both_signs_and_the_larger_kl(
    tmp_path: Path, method: str, plugin: str, changed: dict, base_options: dict, kl: float
) -> None:
    data = {"method": method, "with": [plugin], method: base_options, plugin: {**SML_OF_0_2, **changed}, RESOLVED: {}}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(data))
    reward_B, group_B = torch.tensor([1.0, 0.0]), torch.zeros(2, dtype=torch.long)
    for config in (read_run_config(tmp_path), read_config(file)):
        built = config.build_method()
        assert built.kl == kl and (built.advantage(reward_B, group_B) < 0).any() == ("advantage" not in base_options)
    file.write_text(yaml.safe_dump({key: data[key] for key in data if key != RESOLVED}))  # as a user writes it
    if method == "diffu_grpo":
        assert read_config(file).build_method().kl == 0.05
        assert not (read_config(file).build_method().advantage(reward_B, group_B) < 0).any()
