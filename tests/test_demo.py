"""The demo: what `unmask train` does with no arguments, in the three places that state it, and what it gains."""

import inspect
import json
from pathlib import Path
from statistics import mean

import yaml

import unmask
from unmask.config import DEMO, parse_config, read_config

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
RESULTS = json.loads((BENCHMARKS / "results" / "demo.json").read_text())


def test_the_demo_a_file_without_keys_and_the_function_have_the_same_model_and_method() -> None:
    demo, empty = read_config(DEMO), parse_config({})
    assert (demo.model, demo.task, demo.method_name) == (empty.model, empty.task, empty.method_name)
    assert inspect.signature(unmask.train).parameters["model"].default == demo.model


def test_the_stored_runs_are_those_of_the_file_and_the_first_cell_is_the_demo() -> None:
    """Keys that are added later have no value in the stored configurations."""
    study = yaml.safe_load((BENCHMARKS / "demo.yaml").read_text())
    assert RESULTS.keys() == study["cells"].keys()
    assert parse_config({**study["common"], **study["cells"]["demo"]}).dump() == read_config(DEMO).dump()
    for name, change in study["cells"].items():
        for seed, run in RESULTS[name].items():
            now = parse_config({**study["common"], **change, "seed": int(seed)}).dump()
            assert run["config"] == {key: _of_keys(now[key], value) for key, value in run["config"].items()}, name


def _of_keys(value: object, stored: object) -> object:
    """A section without the keys that the stored one does not have."""
    return {key: value[key] for key in stored} if isinstance(value, dict) and isinstance(stored, dict) else value


def gains(cell: str, kind: str) -> list[float]:
    runs = [run["curve"] for _, run in sorted(RESULTS[cell].items())]
    assert len(runs) == 5
    return [100 * (curve[-1][f"eval/solved_{kind}"] - curve[0][f"eval/solved_{kind}"]) for curve in runs]


def test_the_claims_about_the_demo_hold() -> None:
    """As LOG.md states them."""
    for kind in ("sampled", "greedy"):
        assert min(gains("demo", kind)) >= 58
        assert abs(mean(gains("demo", kind)) - mean(gains("raft with SML", kind))) < 2
        assert min(gains("daca, no anchor", kind)) >= 40
    for kind, low, high in (("sampled", 62, 64), ("greedy", 63, 66)):  # README
        assert (round(min(gains("daca", kind))), round(max(gains("daca", kind)))) == (low, high)
    better = zip(gains("countdown", "sampled"), gains("countdown, raft with SML", "sampled"), strict=True)
    assert mean([uniform - sml for uniform, sml in better][:3]) >= 4
