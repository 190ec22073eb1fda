"""The files under configs/: each is read, can be trained with, and says where every value comes from."""

import re
import socket
from functools import cache
from pathlib import Path

import pytest

from unmask.config import read_config
from unmask.models.load import Outline, outline
from unmask.sft.pretrain import read_pretrain_config
from unmask.studies.cost import estimate as estimate_module
from unmask.studies.cost.estimate import estimate
from unmask.tasks.benchmarks import gsm8k, math500

CONFIGS = Path(__file__).parent.parent / "configs"
OURS = ("adapt_", "pretrain_", "smollm2_")
"""Files that are no paper's."""
RECIPES = sorted(path for path in CONFIGS.glob("*.yaml") if not path.name.startswith(OURS))
NAMES = [path.stem for path in RECIPES]
SOURCE = re.compile(r"  # (paper \d{4}\.\d{5}|code [\w-]+/[\w-]+|inferred: |ours\b)")


@cache
def once(name: str) -> Outline:
    """The network of a model is built once for all recipes."""
    return outline(name)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise ValueError("the data set cannot be read from the hub: no test reaches it")

    def unplugged(*_: object) -> None:
        raise AssertionError("a connection was tried")

    for module in (gsm8k, math500):
        monkeypatch.setattr(module, "hub_rows", refused)
    monkeypatch.setattr(socket.socket, "connect", unplugged)


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_reading_a_recipe_asks_for_no_rows(path: Path, monkeypatch: pytest.MonkeyPatch, no_network: None) -> None:
    def asked(*_: object) -> None:
        raise AssertionError("rows were asked for")

    for module in (gsm8k, math500):
        monkeypatch.setattr(module, "hub_rows", asked)
    config = read_config(path, device="cpu")
    assert config.build_task().text and config.options[config.task]["protocol"] in ("d1", "d1_train", "spg_3shot")


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_a_recipe_is_read_and_can_be_estimated(path: Path, monkeypatch: pytest.MonkeyPatch, no_network: None) -> None:
    monkeypatch.setattr(estimate_module, "outline", once)
    config = read_config(path, device="cpu")
    found = estimate(config)
    assumed = any("assumed to have 200 tokens" in note for note in found.notes)
    assert assumed == (found.prompt == 200) == (config.task in ("gsm8k", "math500"))
    assert found.network.parameters == 8_015_581_184 and found.passes["update, gradient"].states > 0
    (time,) = [time for time in found.times if time.hardware == "NVIDIA H200"]
    assert 0 < time.run_h < 10_000
    assert max(parts["peak"] for parts in found.memory_gib.values()) < 80  # as the papers' GPUs have


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_every_value_has_a_source(path: Path) -> None:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        section = re.fullmatch(r"\w+:", line)
        assert line.startswith("#") or section or SOURCE.search(line), f"{path.name}:{number}: {line}"


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_a_recipe_says_what_it_is_not_and_how_to_see_its_cost(path: Path) -> None:
    text = path.read_text()
    assert (
        "Not the paper's task" not in text and len(re.findall(r"\bStill differs from the paper\. Prompt: ", text)) == 1
    )
    assert {"Reward: ", "Data: "} <= set(re.findall("Reward: |Data: ", _flowing(text)))
    assert f"unmask train configs/{path.name} --dry-run" in text


def _flowing(text: str) -> str:
    return re.sub(r"\n# ?", " ", text)


def test_the_page_lists_every_recipe() -> None:
    page = (CONFIGS.parent / "docs" / "recipes.md").read_text()
    assert RECIPES and set(re.findall(r"`(\w+)\.yaml`", page)) == {path.stem for path in CONFIGS.glob("*.yaml")}


def test_the_embedded_model_has_its_own_reader() -> None:
    assert read_pretrain_config(CONFIGS / "pretrain_tiny.yaml").steps == 4000


def test_the_numbers_of_a_recipe_are_the_published_ones() -> None:
    """The few that the rest hangs on: sequences an optimiser step, and optimiser steps in all."""
    published = {
        "d1_diffu_grpo_sudoku": (96, 3800),
        "d1_diffu_grpo_countdown": (96, 5000),
        "dispo_sudoku": (96, 3800),
        "dispo_countdown": (96, 5000),
        "dispo_spg_sudoku": (96, 4000),
        "dispo_spg_countdown": (96, 4600),
        "agrpo_countdown": (128, 6250),
        "d1_diffu_grpo_gsm8k": (96, 7704),  # 7700 of inner 12, rounded up
        "d1_diffu_grpo_math500": (96, 6600),
        "dispo_gsm8k": (96, 7704),
        "dispo_math500": (96, 6600),
        "agrpo_gsm8k": (128, 2335),
    }
    for name, expected in published.items():
        config = read_config(CONFIGS / f"{name}.yaml", device="cpu")
        assert (config.prompts * config.group, config.updates * config.inner_steps) == expected, name


def test_agrpo_on_gsm8k_has_the_lengths_and_draws_of_the_paper() -> None:
    config = read_config(CONFIGS / "agrpo_gsm8k.yaml", device="cpu")
    assert (config.rollout.length, config.rollout.steps, config.options["agrpo"]["draws"]) == (384, 128, 24)


def test_rewards_are_those_of_d1_where_the_head_says_so_and_fit_the_prompt() -> None:
    for path in RECIPES:
        config = read_config(path, device="cpu")
        section, d1 = config.options[config.task], "Reward: d1's" in _flowing(path.read_text())
        assert d1 == (section.get("rewards") == "d1") == (not path.stem.startswith("agrpo")), path.name
        # d1's rewards of these two want the answer in <answer> and without a box, which the prompt must then ask for
        assert (section["protocol"] == "d1_train") == (d1 and config.task in ("gsm8k", "countdown_text")), path.name
        task = config.build_task()
        row = task.about.example
        assert row is not None and task.solved(row, task.solution(row)) and task.reward(row, task.solution(row)) >= 1


def test_worked_examples_are_shown_where_the_split_is_that_of_spg() -> None:
    shown = {
        path.stem
        for path in RECIPES
        if "spg_3shot" in read_config(path, device="cpu").options.get("sudoku_text", {}).values()
    }
    assert shown == {"spg_sudoku", "agrpo_sudoku"}
