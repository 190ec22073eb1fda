"""A typo is reported before torch is imported; the embedded model needs neither transformers nor FSDP."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_config import BAD

from unmask.config import parse, parse_config
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
LOAD = """
import sys
from unmask.models import load_model
load_model("tiny")
print(*sorted({"transformers", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo"} & {*sys.modules}))
"""


def python(folder: Path, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def test_a_mistake_is_reported_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    seen = json.loads(python(tmp_path, RUN, json.dumps(list(WRONG))))
    assert {line: code for line, (code, _, _) in seen.items()} == dict.fromkeys(WRONG, 2)
    assert not [line for line, (_, message, _) in seen.items() if WRONG[line] not in message]
    assert not [line for line, (_, _, torch) in seen.items() if torch]


def test_the_embedded_model_is_loaded_without_transformers_and_fsdp(tmp_path: Path) -> None:
    assert python(tmp_path, LOAD) == "\n"


@pytest.mark.parametrize("message", BAD)
def test_the_check_before_torch_says_what_the_full_check_says(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError) as full:
        parse_config(BAD[message])
    monkeypatch.setattr(parse, "sys", type(sys)("sys_without_torch"))
    monkeypatch.setattr(parse.sys, "modules", {}, raising=False)
    with pytest.raises(ValueError) as early:
        parse_config(BAD[message])
    assert str(early.value) == str(full.value)


def test_a_run_says_what_it_does_before_the_model_is_loaded(unmask, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("no model yet")

    monkeypatch.setattr(loop, "train", refuse)
    code, out, err = unmask("train", "updates=3")
    assert (code, err) == (2, "unmask: no model yet\n")
    assert out.startswith("sudoku-diffu_grpo+daca-seed0: 3 updates of 12 prompts x 8 rollouts")
