"""The demo: what `unmask train` does with no arguments, in the three places that state it, and what it gains."""

import inspect
import json
from pathlib import Path

import pytest

import unmask
from unmask.config import DEMO, parse_config, read_config

RESULTS = json.loads((Path(__file__).parents[1] / "benchmarks" / "results" / "demo.json").read_text())


def test_the_demo_a_file_without_keys_and_the_function_have_the_same_model_and_method() -> None:
    demo, empty = read_config(DEMO), parse_config({})
    assert (demo.model, demo.task, demo.method_name) == (empty.model, empty.task, empty.method_name)
    assert inspect.signature(unmask.train).parameters["model"].default == demo.model


def test_the_stored_runs_are_of_the_demo() -> None:
    """Keys that are added later have no value in the stored configurations."""
    demo = read_config(DEMO).dump()
    for seed, run in RESULTS["demo"].items():
        stored = {**run["config"], "seed": demo["seed"]}
        now = {key: _of_keys(demo[key], value) for key, value in stored.items()}
        assert stored == now and run["config"]["seed"] == int(seed)


def _of_keys(value: object, stored: object) -> object:
    """A section without the keys that the stored one does not have."""
    return {key: value[key] for key in stored} if isinstance(value, dict) and isinstance(stored, dict) else value


@pytest.mark.parametrize("method", ["demo", "daca"])
def test_sampled_and_greedy_gain_40_points_in_each_of_five_seeds(method: str) -> None:
    runs = RESULTS[method]
    assert sorted(runs) == ["0", "1", "2", "3", "4"]
    for run in runs.values():
        before, after = run["curve"][0], run["curve"][-1]
        assert all(after[key] - before[key] >= 0.4 for key in ("eval/solved_sampled", "eval/solved_greedy"))
