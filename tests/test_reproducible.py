"""The same command gives the same metrics on a CPU, bit for bit: every base and plug-in, here and in a new process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks_cases import toy_model, toy_task

from unmask.cli.main import app
from unmask.methods import BASES, PLUGINS
from unmask.models import save
from unmask.tasks import TASKS

SHORT = ["--task", "toy", "--seed", "4", "updates=2", "prompts=3", "group=4", "rollout.steps=4"]
SHORT += ["eval.prompts=2", "eval.samples=1"]
COMMANDS = {
    **{method: ["--method", method] for method in BASES},
    "fork": ["--method", "fork", "rollout.order=left_to_right", "rollout.threshold=0.99"],
    **{plugin: ["--method", "diffu_grpo", "--with", plugin] for plugin in PLUGINS},
    "all": ["--method", "agrpo", "--with", "daca", "--with", "dispo", "inner_steps=2"],
    "adapter": ["--method", "wd1", "full=false", "lora.rank=2"],
    "cache": ["--method", "spg", "rollout.cache=dual", "rollout.block=3"],
}
SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from test_reproducible import run
from unmask.training.run.folder import RunFolder
RunFolder.draw = lambda run: None  # which takes longer than the run
run(sys.argv[2])
"""


def run(model: str) -> None:
    """All commands, in the present folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, "toy", toy_task)
        for name, how in COMMANDS.items():
            app(["train", *how, *SHORT, "--model", model, "--out", name], standalone_mode=False)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """All commands, twice. The seed of Python's own hashes differs between processes, so it may decide nothing."""
    here, there = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("there")
    model = tmp_path_factory.mktemp("toy") / "model"
    save(toy_model(), model)
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), str(model)],
        cwd=there,
        env={**os.environ, "PYTHONHASHSEED": seed},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(here)
            run(str(model))
        _, told = process.communicate()
        assert process.returncode == 0, told
    return here, there


@pytest.mark.parametrize("name", COMMANDS)
def test_the_same_command_gives_the_same_metrics(both: tuple[Path, Path], name: str) -> None:
    lines = [(folder / name / "metrics.jsonl").read_text().splitlines() for folder in both]
    assert len(lines[0]) == len(lines[1]) == 4  # two updates between two evaluations
    timeless = [
        [{key: repr(value) for key, value in json.loads(line).items() if not key.startswith("time/")} for line in some]
        for some in lines
    ]
    assert timeless[0] == timeless[1]
    assert any("'cost/forwards'" in str(row) for row in timeless[0])
    weights = "checkpoint/adapter_model.safetensors" if name == "adapter" else "checkpoint/model.safetensors"
    for file in ("samples.jsonl", weights):
        assert (both[0] / name / file).read_bytes() == (both[1] / name / file).read_bytes()


def test_the_runs_differ_where_their_commands_do(both: tuple[Path, Path]) -> None:
    """So that what is alike above could have been otherwise: every command has learnt something of its own."""
    ends = {name: (both[0] / name / "metrics.jsonl").read_text().splitlines()[2] for name in COMMANDS}
    slopes = {name: json.loads(line)["train/grad_norm"] for name, line in ends.items()}
    assert all(slope > 0 for slope in slopes.values())
    assert len(set(slopes.values())) == len(slopes)
