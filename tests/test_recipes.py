"""Recipes: each is read, can be trained with, and says where every value comes from."""

import json
import re
import socket
from functools import cache
from pathlib import Path

import pytest
import yaml

from unmask.config import DEMO, read_config
from unmask.config.recipes import FOLDER, recipes, summary
from unmask.methods import BASES, PLUGINS
from unmask.models.load import Outline, outline
from unmask.sft.pretrain import read_pretrain_config
from unmask.studies.cost import estimate as estimate_module
from unmask.studies.cost.estimate import estimate
from unmask.tasks import TASKS
from unmask.tasks.benchmarks import gsm8k, math500
from unmask.tasks.support.data import HubUnavailable

ROOT = Path(__file__).parent.parent
OURS = ("adapt_", "llada_", "pretrain_", "smollm2_")
"""Files that are no paper's."""
RECIPES = sorted(path for path in FOLDER.glob("*.yaml") if not path.name.startswith(OURS))
NAMES = [path.stem for path in RECIPES]
FOR_LLADA = [*RECIPES, *FOLDER.glob("llada_*.yaml")]
SOURCE = re.compile(r"  # (paper (?:\d{4}\.\d{5}|ForkGRPO)|code [\w-]+/[\w-]+|inferred: |ours\b)")


@cache
def once(name: str, causal_block: int | None) -> Outline:
    """The network of a model is built once for all recipes."""
    return outline(name, causal_block)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise HubUnavailable("the data set cannot be read from the hub: no test reaches it")

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


@pytest.mark.parametrize("path", FOR_LLADA, ids=lambda path: path.stem)
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


@pytest.mark.parametrize("path", FOR_LLADA, ids=lambda path: path.stem)
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
    assert f"unmask train recipe:{path.stem} --dry-run" in text


def _flowing(text: str) -> str:
    return re.sub(r"\n# ?", " ", text)


def test_the_page_and_the_command_list_every_recipe_with_a_line(unmask) -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert {*recipes()} <= {*re.findall(r"`(\w+)`", page)}
    code, out, _ = unmask("recipes")
    assert code == 0 and [line.split()[2] for line in out.splitlines()] == [f"recipe:{name}" for name in recipes()]
    assert all(20 < len(summary(path)) < 110 and summary(path).endswith(".") for path in recipes().values())


@pytest.mark.parametrize(
    "line", ["train recipe:d1_gsm8k updates=0", "train updates=0 recipe:d1_gsm8k", "compare recipe:d1_gsm8k updates=0"]
)
def test_a_recipe_is_used_where_a_file_is(unmask, line: str) -> None:
    more = ["--methods", "wd1", "--out", "x"] if line.startswith("compare") else []
    code, _, err = unmask(*line.split(), *more)
    assert code == 2 and "updates: input should be greater than or equal to 1" in err
    assert read_config("recipe:d1_gsm8k", device="cpu") == read_config(FOLDER / "d1_gsm8k.yaml", device="cpu")


def test_an_unknown_recipe_is_refused_with_a_suggestion(unmask) -> None:
    for line in ("train recipe:d1_gsm", "sft tiny recipe:d1_gsm", "pretrain recipe:d1_gsm --out x"):
        code, _, err = unmask(*line.split())
        assert code == 2 and "there is no recipe 'd1_gsm'; did you mean d1_gsm8k?" in err


def test_the_schema_is_printed_and_accepts_every_recipe(unmask) -> None:
    code, out, _ = unmask("schema")
    validator = pytest.importorskip("jsonschema_rs").Draft202012Validator(json.loads(out))
    assert code == 0
    for path in [*RECIPES, DEMO]:
        validator.validate(yaml.safe_load(path.read_text()))
    wrong = [{"updats": 3}, {"daca": {"starta": 8}}, {"method": "agrop"}, {"with": ["agrpo"]}]
    wrong += [{"gsm8k": {"protocol": "d2"}}, {"humaneval": {"protocol": "d1_train"}}]
    assert not [data for data in wrong if validator.is_valid(data)]
    sections = json.loads(out)["properties"]
    assert {*BASES, *PLUGINS, *TASKS} <= {*sections} and sections["agrpo"]["properties"]["draws"]["default"] == 4


@pytest.mark.parametrize(
    ("command", "recipes", "right", "wrong"),
    [
        ("sft", ["adapt_smollm2"], {"data": "rows.jsonl"}, [{"data": "chess"}, {"data": [{"task": "chess"}]}]),
        ("pretrain", ["pretrain_tiny", "pretrain_minis"], None, [{"steps": 3}]),
    ],
)  # fmt: skip
def test_the_schemas_of_fine_tuning_and_pre_training_accept_their_recipes(
    unmask, command: str, recipes: list[str], right: object, wrong: list[object]
) -> None:
    code, out, _ = unmask("schema", command)
    validator = pytest.importorskip("jsonschema_rs").Draft202012Validator(json.loads(out))
    files = [yaml.safe_load((FOLDER / f"{name}.yaml").read_text()) for name in recipes]
    assert code == 0 and all(validator.is_valid(data) for data in [*files, right] if data)
    assert not [data for data in [*wrong, {**files[0], "updats": 3}] if validator.is_valid(data)]
    assert "description" in json.loads(out)["properties"]["seed"]


def test_the_embedded_model_has_its_own_reader() -> None:
    assert read_pretrain_config(FOLDER / "pretrain_tiny.yaml").steps == 4000


def test_the_numbers_of_a_recipe_are_the_published_ones() -> None:
    """The few that the rest hangs on: sequences an optimiser step, and optimiser steps in all."""
    published = {
        "d1_sudoku": (96, 3800),
        "d1_countdown": (96, 5000),
        "dispo_sudoku": (96, 3800),
        "dispo_countdown": (96, 5000),
        "dispo_spg_sudoku": (96, 4000),
        "dispo_spg_countdown": (96, 4600),
        "agrpo_countdown": (128, 6250),
        "d1_gsm8k": (96, 7704),  # 7700 of inner 12, rounded up
        "d1_math500": (96, 6600),
        "dispo_gsm8k": (96, 7704),
        "dispo_math500": (96, 6600),
        "agrpo_gsm8k": (128, 2335),
    }
    for name, expected in published.items():
        config = read_config(FOLDER / f"{name}.yaml", device="cpu")
        assert (config.prompts * config.group, config.updates * config.inner_steps) == expected, name


def test_agrpo_on_gsm8k_has_the_lengths_and_draws_of_the_paper() -> None:
    config = read_config(FOLDER / "agrpo_gsm8k.yaml", device="cpu")
    assert (config.rollout.length, config.rollout.steps, config.options["agrpo"]["draws"]) == (384, 128, 24)


def test_rewards_are_those_of_d1_where_the_head_says_so_and_fit_the_prompt() -> None:
    for path in RECIPES:
        config = read_config(path, device="cpu")
        section, d1 = config.options[config.task], "Reward: d1's" in _flowing(path.read_text())
        assert d1 == (section.get("rewards") == "d1") == (not path.stem.startswith(("agrpo", "fork"))), path.name
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


@pytest.mark.parametrize(("name", "command"), [("pretrain_tiny", "pretrain"), ("adapt_smollm2", "adapt")])
def test_a_recipe_of_another_command_is_refused_with_that_command(name: str, command: str) -> None:
    with pytest.raises(ValueError, match=f"write unmask {command} recipe:{name}"):
        read_config(f"recipe:{name}")


def test_the_forecasts_of_llada_best_are_those_of_the_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate_module, "outline", once)
    pages = {name: (ROOT / name).read_text() for name in ("docs/recipes.md", "docs/tutorial.md", "README.md")}
    rows = re.findall(r"^\| (?:one|eight) H200.*?\| (.*) \|$", pages["docs/recipes.md"], re.M)
    for row, change in zip(rows, ([], ["prompts=2", "eval.prompts=16"], ["rollout.cache=none"]), strict=True):
        found = estimate(read_config(FOLDER / "llada_best.yaml", change), "h200")
        (time,), peak = found.times, max(parts["peak"] for parts in found.memory_gib.values())
        update, evaluation, hours, memory = map(float, row.split(" | "))
        assert (update, evaluation) == (round(time.rollout_s + time.update_s, 1), round(time.evaluation_s))
        assert (hours, memory) == (round(time.run_h, 1), round(peak))
        if not change:
            told = f"{memory:.0f} GiB and", f"{hours} hours"
            assert all(words in pages["README.md"] for words in told)
            assert f"about {told[0]}" in pages["docs/tutorial.md"] and told[1] in pages["docs/tutorial.md"]
