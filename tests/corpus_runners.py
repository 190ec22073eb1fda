"""How the inputs of tests/corpus are given to the library, and what is compared. Kinds, in the files of that folder:

    configs      the text of a configuration and overrides          -> what the error names
    rows         a data file, for a task that reads one             -> what the error names
    models       a small checkpoint, and what is damaged in it      -> what the error names
    completions  a task's row and what a model wrote                -> the points
    commands     a command line, in a folder of odd files           -> what the error names, and exit code 2

A case lists the keys, values, files and fields that its message must name, so that the wording is free to improve.
Only the `golden` cases, about a hundred, fix a whole message.
"""

import json
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file

from checkpoints import DREAM, LLADA_SPECIALS, LLADA_TEXT, QWEN_SPECIALS, QWEN_TEXT, bert, llada, qwen, with_tokenizer
from unmask.config import read_config
from unmask.models import load_model, save, tiny_policy
from unmask.models.tiny import TinyShape
from unmask.tasks import TASKS
from wording import mentions

FOLDER = Path(__file__).parent / "corpus"
KINDS = ("configs", "rows", "models", "completions", "commands")
Case = Mapping[str, Any]


@cache
def content(kind: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"{kind}.yaml").read_text())


def cases(kind: str) -> list[Case]:
    return golden(kind) + content(kind)["cases"]


def golden(kind: str) -> list[Case]:
    """The cases whose whole message is fixed."""
    return content(kind).get("golden", [])


def named(case: Case) -> str:
    """A case as the name of a test: its input, as far as a line goes."""
    return json.dumps(given(case), sort_keys=True).encode("ascii", "replace").decode()[:100]


def given(case: Case) -> Case:
    """The input of a case, without what is expected of it."""
    return {key: value for key, value in case.items() if key not in ("names", "says", "points")}


def text(value: Any) -> str:
    """A text; or pieces of one, where [piece, n] is the piece n times."""
    return value if isinstance(value, str) else "".join(p if isinstance(p, str) else p[0] * p[1] for p in value)


def data(case: Case) -> bytes:
    """The bytes of a case's file: `hex`, or `text` in UTF-8, halves of surrogate pairs included."""
    return bytes.fromhex(case["hex"]) if "hex" in case else text(case["text"]).encode("utf-8", "surrogatepass")


def agrees(said: str, case: Case) -> bool:
    """Whether a message names what it must; where a case is golden, also whether it is worded so."""
    says = case.get("says", said)
    whole = said.startswith(says.removesuffix(" ...")) if says.endswith(" ...") else said == says
    return whole and mentions(said, *case.get("names", ()))


# --- what each kind does ------------------------------------------------------------------------------------


def configured(case: Case, folder: Path) -> None:
    path = None
    if "text" in case or "hex" in case:
        path = Path("run.yaml")
        path.write_bytes(data(case))
    read_config(path, case.get("overrides", ()))


def rows_read(case: Case, folder: Path) -> None:
    """As far as a run would go with the first row: prompt, solution, reward."""
    name = case.get("name", "rows.jsonl")
    Path(name).write_bytes(data(case))
    Path("my_task.py").write_text("def reward(prompt, completion, row): return 1.0\n")
    own = {"file": "my_task.py"} if case["task"] == "own" else {}
    task = TASKS[case["task"]](data=name, test_data=name, **own, **case.get("options", {}))
    for row in task.rows("test", 1, 0):
        task.prompt(row), task.solution(row), task.reward(row, "")


def model_loaded(case: Case, folder: Path) -> None:
    load_model(case["name"] if "name" in case else damaged(case, folder))


def points(case: Case) -> float:
    task = TASKS[case["task"]](**case.get("options", {}))
    row = content("completions")["rows"].get(case["task"]) or task.about.example or task.rows("test", 1, 0)[0]
    completion = text(case["text"])
    grade, outcome = task.grade(row, completion), task.outcome(row, completion)
    assert outcome.solved == (grade.points == grade.out_of) and outcome.reward == float(outcome.solved)
    return grade.points


# --- models -------------------------------------------------------------------------------------------------


def whole_models(folder: Path) -> None:
    """A small checkpoint of each kind, undamaged, in a folder of its name."""
    one, several = (llada(folder / name, shards=n, **LLADA_TEXT)[0] for name, n in (("llada", 1), ("shards", 3)))
    dream = qwen(folder / "dream", DREAM, **QWEN_TEXT)[0]
    for made, specials in ((one, LLADA_SPECIALS), (several, LLADA_SPECIALS), (dream, QWEN_SPECIALS)):
        with_tokenizer(made, specials)
    save(tiny_policy(TinyShape(width=16, layers=1, heads=2, hidden=16, max_length=64), seed=1), folder / "tiny")
    (folder / "tiny" / "SHA256SUMS").unlink()  # as others write them
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").touch()
    bert(folder / "bert")


def damaged(case: Case, folder: Path) -> Path:
    """A copy of the case's checkpoint in "model", with the damage done."""
    made = Path("model").absolute()
    shutil.copytree(folder / case["base"], made)
    path = made / case.get("file", "config.json")
    if "set" in case:
        path.write_text(json.dumps({**json.loads(path.read_text()), **case["set"]}))
    if "tensors" in case:
        path = made / "model.safetensors"
        save_file(changed(load_file(path), case["tensors"]), path)
    if "keep" in case:
        path.write_bytes(path.read_bytes()[: case["keep"]])
    if "add" in case:
        path.write_bytes(path.read_bytes() + bytes.fromhex(case["add"]))
    if "header" in case:
        header = case["header"].encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    if "text" in case or "hex" in case:
        path.write_bytes(data(case))
    if "gone" in case:
        path.unlink()
    if "beside" in case:
        (made / case["beside"]).touch()
    return made


def changed(weights: dict[str, torch.Tensor], how: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The first tensor whose name contains `of` changed; or dropped, renamed, or another beside it."""
    name = next(name for name in weights if how["of"] in name)
    weight = weights.pop(name)
    if "fill" in how:
        weight = torch.full_like(weight, float(how["fill"]))
    if "dtype" in how:
        weight = weight.to(getattr(torch, how["dtype"]))
    if "shape" in how:
        weight = torch.zeros(how["shape"])
    return weights if "drop" in how else {**weights, how.get("name", name): weight}
