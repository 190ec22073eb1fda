"""`unmask.train`: the run of `unmask train` as a function call."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from test_compare_processes import untimed

import unmask
from unmask.models import Model, load_model, save, tiny_policy
from unmask.models.tiny import TinyShape
from unmask.training import api

FEW = {"updates": 2, "prompts": 2, "group": 2, "eval": {"prompts": 4, "samples": 2}, "sudoku": {"partial": 0.5}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    save(tiny_policy(TinyShape(width=16, layers=1, heads=2, hidden=16, max_length=64), seed=1), folder)
    return str(folder)


def test_it_trains_silently_leaves_nothing_and_returns_policy_metrics_and_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = unmask.train("sudoku", method="agrpo", agrpo={"draws": 2}, seed=1, **FEW)
    assert capsys.readouterr() == ("", "") and not list(tmp_path.iterdir()) and run.folder is None
    assert [row["step"] for row in run.metrics if "train/reward" in row] == [1, 2]
    assert {"row", "completion", "reward", "step"} == {*run.samples[0]} and len(run.samples) == 4
    assert (run.config.plugins, run.config.dump()["agrpo"]["draws"]) == ((), 2)
    assert run.config.optimizer.schedule == "linear"  # the demo's, as without a file on the command line
    start = load_model("tiny-two")
    assert any(not torch.equal(a, b) for a, b in zip(run.policy.parameters(), start.parameters(), strict=True))
    assert repr(run) == f"TrainedRun(sudoku, agrpo: sampled {run.before.sampled} -> {run.after.sampled})"
    assert run.policy.home == "tiny-two"


def test_it_is_the_run_of_the_command(unmask, model: str, tmp_path: Path) -> None:
    import unmask as library

    keys = ["updates=2", "prompts=2", "group=2", "eval.prompts=4", "eval.samples=2", "sudoku.partial=0.5"]
    assert unmask("train", "--model", model, "--with", "daca", "--seed", "3", *keys, "--out", "one")[0] == 0
    run = library.train(model=model, plugins="daca", seed=3, out="two", **FEW)
    assert run.folder == Path("two") and untimed(Path("one/metrics.jsonl")) == untimed(Path("two/metrics.jsonl"))
    weights = load_model("one/checkpoint").state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in run.policy.state_dict().items())


def test_with_is_a_key_of_the_configuration_and_the_policy_is_on_the_device_of_the_run(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = []

    def load(name: str, device: str) -> Model:
        devices.append(device)
        return load_model(name)

    monkeypatch.setattr(api, "load_model", load)
    monkeypatch.setattr(api, "device_of", lambda config: "cuda:1")
    run = unmask.train(method="agrpo", model=model, **FEW, **{"with": ["dispo"]})
    assert run.config.plugins == ("dispo",) and "agrpo with dispo:" in repr(run)
    assert devices == ["cuda:1"] and run.policy.home == model


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"updats": 3}, "updats: unknown key; did you mean updates?"),
        ({"method": "agrop"}, "method: there is no 'agrop'; did you mean agrpo?"),
        ({"method": "daca"}, "method: daca is a plug-in, not a base method; write --with daca"),
        ({"optimizer": {"rate": 3}}, "optimizer.rate: unknown key"),
        ({"model": "runs/nosuch"}, "there is no folder runs/nosuch"),
        ({"model": SimpleNamespace()}, "model: expected the name or the folder of a model, got an object of"),
        ({"plugins": "daca", "with": ["dispo"]}, "plugins and with are the same key"),
        ({"out": "taken"}, "taken already exists and is not an empty folder"),
    ],
)
def test_a_mistake_is_the_sentence_of_the_command(
    given: dict, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("")
    with pytest.raises(ValueError) as error:
        unmask.train(**given)
    assert str(error.value).startswith(message)


def test_show_prints_lines_outside_a_notebook(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    unmask.train(model=model, show=True, **FEW)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("update 0/2  solved_sampled ") and lines[1].startswith("update 1/2  reward ")


def test_show_redraws_one_plot_in_a_notebook(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    shown, updated = [], []

    def display(image: SimpleNamespace, display_id: bool) -> SimpleNamespace:
        shown.append((image.data[:4], display_id))
        return SimpleNamespace(update=lambda image: updated.append(image.data[:4]))

    ipython, module = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython, ipython.version_info = lambda: object(), (9, 0)  # matplotlib looks at the version
    module.display, module.Image = display, lambda data: SimpleNamespace(data=data)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    run = unmask.train(model=model, show=True, **FEW)
    assert shown == [(b"\x89PNG", True)] and set(updated) == {b"\x89PNG"}
    assert len(updated) + 1 >= len(run.metrics)


def test_every_method_and_formula_is_a_public_name() -> None:
    for table in (unmask.BASES, unmask.PLUGINS, unmask.ADVANTAGES, unmask.NORMALISERS, unmask.KLS):
        for name, function in table.items():
            assert getattr(unmask, name) is function
