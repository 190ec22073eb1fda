"""A typo is reported before torch is imported; the embedded model needs neither transformers nor FSDP."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from unmask.training import loop

WRONG = {
    "train updats=3": "updats",
    "train updates=many": "updates",
    "train nosuch.yaml": "nosuch.yaml",
    "train --task sudokku": "sudokku",
    "train --task nosuch.py": "nosuch.py",
    "train --task gsm8k --data nosuch.jsonl": "nosuch.jsonl",
    "train --method agrop": "agrop",
    "train --method nosuch.py:f": "nosuch.py",
    "train --method agrpo agrpo.drws=2": "agrpo.drws",
    "train --method agrpo agrpo.draws=x": "agrpo.draws",
    "train --with daca daca.layout=x": "daca.layout",
    "train rollout.order=x": "rollout.order",
    "train --model runs/nosuch": "runs/nosuch",
    "train --out taken": "taken",
    "compare --methods agrop --out x": "agrop",
    "audit tiny --methods agrpo,wd1+slm:strata=2": "slm",
    "eval runs/nosuch": "runs/nosuch",
    "eval tiny rollout.stepz=3": "rollout.stepz",
    "sample runs/nosuch 12=": "runs/nosuch",
    "generate tiny nosuch.jsonl": "nosuch.jsonl",
    "grade nosuch.jsonl --task gsm8k": "nosuch.jsonl",
    "merge runs/nosuch --out x": "runs/nosuch",
    "sft tiny --data nosuch.jsonl": "nosuch.jsonl",
    "view runs/nosuch": "runs/nosuch",
    "train missing_model.yaml": "runs/nosuch",
    "train --resume nosuch": "nosuch",
    "train --dry-run --hardware nosuch": "nosuch",
    "train with=[daca,daca]": "daca is named twice",
    "train optimizer.warmup=100": "optimizer.warmup",
    "compare --methods agrpo --out x --budget nosuch=3": "nosuch=3",
    "push nosuch a/b": "nosuch",
    "tasks sudok": "sudoku",
    "train rollout.temperature=0": "rollout.temperature",
    "compare --methods agrpo,wd1 --out x agrpo.draws=2 updats=3": "updats",
    "compare missing_model.yaml --methods agrpo --with none,daca --out x": "runs/nosuch",
    "audit tiny agrpo.draws=2 nosuch=1": "nosuch",
    "pretrain nosuch.yaml --out x": "nosuch.yaml",
}
RUN = """
import contextlib, io, json, sys
from unmask.cli.main import main
seen = {}
for line in json.loads(sys.argv[1]):
    sys.argv[1:], err = line.split(), io.StringIO()
    try:
        with contextlib.redirect_stderr(err):
            main()
    except SystemExit as stopped:
        seen[line] = [stopped.code, err.getvalue(), "torch" in sys.modules]
print(json.dumps(seen))
"""
START = """
import json, sys
from unmask.cli.main import main
class NoTorch:
    def find_spec(self, name, *rest):
        if name == "torch":
            raise ValueError(name)
sys.meta_path.insert(0, NoTorch())
for sys.argv[1:] in json.loads(sys.argv[1]):
    try:
        main()
    except SystemExit:
        pass
"""
LOAD = """
import sys
from unmask.models import load_model
from unmask.models.load import outline
outline("tiny")
load_model("tiny")
print(*sorted({"transformers", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo"} & {*sys.modules}))
"""


def python(folder: Path, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def test_a_mistake_is_reported_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    (tmp_path / "missing_model.yaml").write_text("model: runs/nosuch\n")
    seen = json.loads(python(tmp_path, RUN, json.dumps(list(WRONG))))
    assert {line: code for line, (code, _, _) in seen.items()} == dict.fromkeys(WRONG, 2)
    assert not [line for line, (_, message, _) in seen.items() if WRONG[line] not in message]
    assert not [line for line, (_, _, torch) in seen.items() if torch]


def test_the_embedded_model_is_loaded_without_transformers_and_fsdp(tmp_path: Path) -> None:
    assert python(tmp_path, LOAD) == "\n"


def test_the_first_line_of_a_run_is_printed_before_torch_is_imported(tmp_path: Path) -> None:
    lines = [["train", "--method", "agrpo", "--seed", "3", "--out", "runs/new"], ["train", "--resume", "stopped"]]
    (tmp_path / "stopped").mkdir()
    (tmp_path / "stopped" / "config.yaml").write_text("model: tiny\nmethod: diffu_grpo\nwith: [daca]\n")
    lines += [["sft", "tiny", "--data", "sudoku", "--out", "sft"]]
    assert python(tmp_path, START, json.dumps(lines)).splitlines() == [
        "training tiny-two on sudoku with agrpo, seed 3; run folder: runs/new",
        "training tiny on sudoku with diffu_grpo+daca, seed 0; run folder: stopped",
        "fine-tuning tiny on sudoku, seed 0; run folder: sft",
    ]


def test_a_run_says_what_it_does_before_the_model_is_loaded(unmask, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("no model yet")

    monkeypatch.setattr(loop, "train", refuse)
    code, out, err = unmask("train", "updates=3")
    assert (code, err) == (2, "unmask: no model yet\n")
    first, second = out.splitlines()
    name = "sudoku-raft-seed0"
    assert first == f"training tiny-two on sudoku with raft, seed 0; run folder: runs/{name}"
    assert second.startswith(f"{name}: 3 updates of 12 prompts x 8 rollouts")
