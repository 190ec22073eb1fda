"""The commands as a user types them."""

import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import get_args

import pytest
from typer.models import OptionInfo

from unmask.cli import doctor as doctor_module
from unmask.cli.doctor import EXTRAS, _extra
from unmask.cli.examples import EXAMPLES
from unmask.cli.main import COMMANDS, main
from unmask.config.options import meaning, option_defaults
from unmask.config.recipes import FOLDER
from unmask.methods import BASES, PLUGINS
from unmask.methods.meanings import MEANINGS
from unmask.models import save, tiny_policy
from unmask.models.known import EMBEDDED
from unmask.models.tiny import TinyShape
from unmask.tasks import TASKS
from unmask.tasks.meanings import TASK_MEANINGS
from wording import mentions

SHORT = ["updates=2", "prompts=2", "group=2", "eval.prompts=4", "eval.samples=2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    save(tiny_policy(TinyShape(width=16, layers=1, heads=2, hidden=16, max_length=64), seed=1), folder)
    return str(folder)


def test_train_eval_sample_and_generate_follow_on_from_each_other(unmask, model: str, tmp_path: Path) -> None:
    options = ["--with", "daca", "daca.strata=8", "daca.kl=0.05", "--seed", "3"]
    code, out, _ = unmask("train", "--model", model, *options, *SHORT)
    assert code == 0
    folder = "runs/sudoku-raft+daca-seed3"
    assert folder in out and "before" in out and "after" in out
    assert out.count("KL 0.05") == 1
    assert re.search(r"update +1/2 .*  \d:\d\d:\d\d, \d:\d\d:\d\d left\n", out)
    assert "strata: 8" in (tmp_path / folder / "config.yaml").read_text()

    code, out, _ = unmask("eval", folder, "--task", "sudoku", "--problems", "5", "--samples", "2", "--json")
    found = json.loads(out)
    assert code == 0 and found["problems"] == 5
    assert {"eval/solved_sampled", "eval/solved_sampled_low", "eval/solved_greedy", "eval/pass@2"} <= set(found)
    code, out, _ = unmask("eval", folder, "--task", "countdown", "countdown.partial=0.1", "--problems", "5", "--json")
    assert code == 0 and json.loads(out)["task"] == "countdown"
    code, out, _ = unmask("eval", folder, "--problems", "5", "--samples", "2")
    assert code == 0 and "pass@1 greedy" in out and "2 samples differ" in out and "[" in out

    code, out, _ = unmask("sample", folder, "1.2.3.4.........=", "--steps", "rollout.steps=4")
    lines = out.rstrip("\n").split("\n")
    canvases = [line[6:] for line in lines[:5]]
    assert code == 0 and canvases[0] == "·" * 16
    masked = [canvas.count("·") for canvas in canvases]
    assert masked == sorted(masked, reverse=True) and (masked[-1] == 0 or "¶" in canvases[-1])

    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1.=", "id": 7}\n\n{"prompt": "2..3="}\n')
    code, _, _ = unmask("generate", folder, "prompts.jsonl", "--out", "made.jsonl", "--traces", "--seed", "5")
    rows = [json.loads(line) for line in (tmp_path / "made.jsonl").read_text().splitlines()]
    assert code == 0 and [row["seed"] for row in rows] == [5, 6] and rows[0]["id"] == 7
    assert len(rows[0]["trace"]["tokens"]) == len(rows[0]["trace"]["step"]) == 16
    assert max(s for s in rows[1]["trace"]["step"] if s is not None) <= 7
    code, out, _ = unmask("sample", folder, "2..3=", "--seed", "6")
    assert out.rstrip("\n") == rows[1]["completion"]  # a row depends on its seed, not on the file it is in


def test_naming_a_method_starts_without_plugins_and_a_second_run_gets_a_folder_of_its_own(unmask, model: str) -> None:
    for folder in ("runs/countdown-agrpo-seed0", "runs/countdown-agrpo-seed0-2"):
        code, out, _ = unmask("train", "--model", model, "--method", "agrpo", "--task", "countdown", *SHORT)
        assert code == 0 and folder in out.replace("\n", "")


@pytest.mark.parametrize(
    ("words", "name"),
    [(["method=agrpo", "with=[dps]"], "agrpo+dps"), (["--method", "agrpo", "with=[dps]"], "agrpo+dps"),
     (["method=agrpo"], "agrpo"), (["with=[dps]"], "raft+dps"),
     (["--with", "dps+dispo"], "raft+dps+dispo")],
)  # fmt: skip
def test_plugins_that_an_override_names_stay(unmask, words: list[str], name: str) -> None:
    code, out, err = unmask("train", *words, "--dry-run", "--json")
    assert code == 0 and json.loads(out)["name"] == f"sudoku-{name}-seed0", err


def test_a_configuration_file_and_stacked_plugins(unmask, model: str, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(f"model: {model}\nmethod: wd1\nwith: [sml, dps]\nupdates: 1\n")
    code, _, _ = unmask("train", "my.yaml", "--with", "sml", "--with", "dispo", "--out", "here", *SHORT[1:])
    assert code == 0
    written = (tmp_path / "here" / "config.yaml").read_text()
    assert "- sml\n- dispo" in written and "method: wd1" in written


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["train", "--method", "grpo"], ["method", "grpo"]),
        (["train", "rollout.temperature=0"], ["rollout.temperature", 0]),
        (["train", "nothing.yaml"], ["nothing.yaml", "unmask recipes"]),
        (["train", "--method", "agrpo", "--with", "sml"], ["agrpo", "sml", "--with dps"]),
        (["train", "--model", "nowhere"], ["nowhere"]),
        (["train", "lr=1e-4"], ["lr", "optimizer.lr"]),
        (["train", "rollout.length=8"], ["rollout.length", "sudoku", 16, 8]),
        (["train", "optimizer.warmup=99"], ["optimizer.warmup", 99, 80]),
        (["eval", "unfinished"], ["unfinished", "checkpoint"]),
        (["eval", "nowhere"], ["nowhere"]),
        (["eval", "./unfinishd"], ["./unfinishd", "unfinished"]),
        (["eval", "runs/unfinished"], ["runs/unfinished"]),
        (["view", "unfinishd"], ["unfinishd", "unfinished"]),
        (["view", "nowhere"], ["nowhere", "give a run folder"]),
        (["train", "--resume", "nowhere"], ["nowhere", "give the run folder"]),
        (["train", "--resume", "unfinishd"], ["unfinishd", "unfinished"]),
        (["train", "optimizer.lr", "1e-4"], ["optimizer.lr", "key=value"]),
        (["eval", "tiny", "eval.prompts=16"], ["eval.prompts", "--problems"]),
        (["eval", "tiny", "eval.every=2"], ["eval.every"]),
        (["train", "rollout.length=200"], [200, 128]),
        (["train", "--out", "bad.jsonl", *SHORT], ["bad.jsonl", "--out"]),
        (["generate", "tiny", "one.jsonl", "--out", "no/where.jsonl"], ["no", "where.jsonl"]),
        (["sample", "tiny", "é"], ["é", "ASCII"]),
        (["sample", "tiny", "1" * 200], [200, 128]),
        (["generate", "tiny", "nothing.jsonl"], ["nothing.jsonl"]),
        (["generate", "tiny", "bad.jsonl"], ["bad.jsonl:2", "JSON"]),
        (["generate", "tiny", "empty.jsonl"], ["empty.jsonl"]),
        (["generate", "tiny", "blank.jsonl"], ["blank.jsonl:1", "prompt"]),
    ],
)
def test_what_a_user_can_put_right_is_one_line_and_leaves_nothing(unmask, tmp_path, arguments, names) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1"}\n{"prompt"\n')
    (tmp_path / "one.jsonl").write_text('{"prompt": "1"}\n')
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "blank.jsonl").write_text('{"text": "1"}\n')
    before = sorted(path.name for path in tmp_path.iterdir())
    code, out, err = unmask(*arguments)
    assert code == 2 and (not out or (arguments[0] == "train" and out.count("\n") <= 2))  # the header of a run
    assert mentions(err, *names) and err.startswith("unmask: ") and err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_the_catalogues_list_everything_with_a_line_each(unmask) -> None:
    _, out, _ = unmask("methods", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert set(rows) == {*BASES, *PLUGINS} and all(row["summary"] for row in rows.values())
    assert rows["daca"]["options"]["strata"] == 3 and rows["agrpo"]["options"]["steps"] == "uniform"
    assert [name for name, row in rows.items() if row["default"]] == ["raft"]
    _, out, _ = unmask("methods")
    out, _, advice = out.partition("\n\n")
    assert len(out.splitlines()) == len(rows)
    named = re.findall(r"--(?:method|with) (\w+)", advice)
    assert {"raft", "agrpo", "daca"} <= {*named} <= {*rows}
    assert all(option in rows[method]["options"] for method, option in re.findall(r"(\w+)\.(\w+)=", advice))
    assert [line.split()[0] for line in out.splitlines() if line.endswith("(the default)")] == ["raft"]
    _, out, _ = unmask("tasks", "--json")
    assert {row["name"] for row in json.loads(out)} == set(TASKS)
    _, out, _ = unmask("tasks")
    assert len(out.splitlines()) == len(TASKS)


def test_doctor_checks_every_extra_peft_first_and_says_what_it_is_for(unmask, monkeypatch) -> None:
    pyproject = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    assert {*EXTRAS} == {*pyproject["project"]["optional-dependencies"]} and next(iter(EXTRAS)) == "lora"
    installed = {"peft": "0.99", "gguf": "0.19.0"}

    def version_of(package: str) -> str:
        if package not in installed:
            raise PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(doctor_module, "version", version_of)
    monkeypatch.setattr(doctor_module, "requires", lambda _: ["peft<0.22,>=0.21; extra == 'lora'"])
    findings = {extra: _extra(extra) for extra in EXTRAS}
    assert not findings["lora"].ok and "0.99 is installed" in findings["lora"].detail
    assert findings["gguf"].ok and not findings["trl"].ok and "unmask[trl]" in findings["trl"].detail
    assert all(EXTRAS[extra][1] in finding.detail for extra, finding in findings.items())


def tools(out: str) -> set[str]:
    """State and name of the lines under the last heading of `unmask doctor`."""
    return {" ".join(line.split()[:2]) for line in out.partition("Tools for developers:\n")[2].splitlines()}


def test_doctor_fails_only_for_what_is_needed(unmask, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, out, _ = unmask("doctor", "--json")
    findings = {finding["what"]: finding for finding in json.loads(out)}
    assert code == 0 and findings["torch"]["ok"] and findings["tiny-two"]["ok"]
    monkeypatch.setenv("PATH", str(tmp_path))
    code, out, _ = unmask("doctor")
    assert code == 0 and {"no chromium", "no npm"} <= tools(out)
    monkeypatch.setitem(EMBEDDED, "tiny-two", tmp_path)
    code, out, _ = unmask("doctor")
    assert code == 1 and re.search("  missing tiny-two", out) and re.search("  ok +tiny ", out)


# --- help, hints and completion --------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [command.__name__ for command in COMMANDS])
def test_every_help_has_examples_and_no_python_type(unmask, command) -> None:
    code, out, _ = unmask(command, "-h")
    assert code == 0 and "Examples:" in out and EXAMPLES[command][0].split()[1] in out
    assert not re.search(r"<(bool|str|int|float|list|file|path|Path)\b|\b(TEXT|INTEGER|FLOAT)\b", out)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("train --updates 3", "write updates=3"),
        ("train --optimizer.lr=1e-4", "write optimizer.lr=1e-4"),
        ("eval tiny --rollout.steps 4", "write rollout.steps=4"),
        ("train --inner-steps --seed 1", "write inner_steps=VALUE"),
        ("train --method DACA", "write --with daca"),
        ("train --with agrpo", "write --method agrpo"),
        ("train --method AGRPO", "did you mean agrpo?"),
        ("compare --methods dispo --out x", "write --with dispo"),
        ("eval tiny --task countdown --protocol d1", "--task countdown_text"),
        ("train optimizer.lr=1e38", "optimizer.lr: input should be less than or equal to 10"),
        ("methods agrop", "did you mean agrpo?"),
        ("train --seed x", "'--seed': expected a whole number; see"),
        ("train --metod agrpo", "Did you mean --method?"),
        ("eval tiny foo=1", "foo: unknown key; docs/reference/keys.md lists the keys"),
        ("eval tiny temprature=1", "did you mean rollout.temperature?"),
        ("sample tiny", "PROMPT is missing: write it after the model"),
        ("recipes d1_gsm8", "did you mean d1_gsm8k?"),
    ],
)
def test_a_mistake_is_answered_with_what_to_write(unmask, line, hint) -> None:
    code, out, err = unmask(*line.split())
    assert (code, out) == (2, "") and hint in err


def test_an_option_that_is_no_key_is_refused_as_before(unmask) -> None:
    _, _, err = unmask("train", "--updats", "3")
    assert "--updats" in err and "write" not in err


def test_a_method_is_described_with_its_options(unmask) -> None:
    _, out, _ = unmask("methods", "agrpo")
    assert out.startswith("agrpo: a base method, --method agrpo")
    assert re.search(r"draws +4 +steps of each rollout that are scored\n", out)
    assert re.search(r"kl_kind +k3 +estimator of the KL: k1, k2, k3\n", out) and re.search(r"truncate +false ", out)


@pytest.mark.parametrize(("catalogue", "meanings"), [(BASES | PLUGINS, MEANINGS), (TASKS, TASK_MEANINGS)])
def test_every_option_has_a_meaning_and_every_meaning_an_option(catalogue, meanings) -> None:
    options = [(name, option) for name, factory in catalogue.items() for option in option_defaults(factory)]
    assert not [f"{name}.{option}" for name, option in options if not meaning(name, option)]
    assert not {*meanings} - {f"{name}.{option}" for name, option in options} - {option for _, option in options}


def test_a_task_is_described_with_its_options(unmask) -> None:
    _, out, _ = unmask("tasks", "sudoku")
    assert re.search(r"holes +\[9, 12\] +fewest and most empty cells of a puzzle\n", out)
    assert re.search(r"unique +false +puzzles with one solution only\n", out)


def test_a_recipe_is_printed(unmask) -> None:
    text = (FOLDER / "d1_gsm8k.yaml").read_text()
    assert unmask("recipes", "d1_gsm8k") == unmask("recipes", "recipe:d1_gsm8k") == (0, text, "")
    assert json.loads(unmask("recipes", "d1_gsm8k", "--json")[1])["text"] == text


def test_names_are_completed_in_a_shell(tmp_path) -> None:
    """By typer's own protocol, in a process of its own, which imports no torch to do so."""
    code = "import sys; from unmask.cli.main import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    asked = {"_UNMASK_COMPLETE": "complete_bash", "COMP_WORDS": "unmask train --method a", "COMP_CWORD": "3"}
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True)
    assert done.stdout.split() == ["agrpo"] and not done.stderr


def test_a_path_that_cannot_be_written_is_refused_before_anything_runs(unmask, monkeypatch, tmp_path) -> None:
    (tmp_path / "g.jsonl").write_text('{"prompt": "1"}\n')
    monkeypatch.setattr(os, "access", lambda path, mode, **_: not mode & os.W_OK)
    monkeypatch.setattr("unmask.models.load_model", None)
    for line in (
        "eval tiny --steps 4 --out x.json", "eval tiny --steps 4 --plot x.png", "grade g.jsonl --task gsm8k --out x",
        "generate tiny g.jsonl --out x", "train --out x", "compare --methods wd1 --out x", "audit tiny --out x",
        "merge tiny --out x", "sft tiny --data sudoku --out x", "view g.jsonl --export x.html",
    ):  # fmt: skip
        code, out, err = unmask(*line.split())
        assert (code, out) == (2, "") and "cannot be written" in err, line


def test_output_that_is_closed_from_the_start_is_no_error(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["unmask", "methods"])
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 0


@pytest.mark.parametrize(
    ("ends_with", "code"), [("sys.exit(0)", 0), ("sys.exit()", 0), ("sys.exit(2)", 2), ("sys.exit('why')", 1)]
)
def test_a_process_of_torchrun_exits_with_its_code_after_its_threads_and_output(
    tmp_path: Path, ends_with, code
) -> None:
    """It skips the interpreter's shutdown, which must lose none of them."""
    script = tmp_path / "start.py"
    script.write_text(
        "import runpy, sys, threading, time, unmask.cli.main as cli\n"
        "def work():\n    time.sleep(0.2)\n    sys.stdout.write('worked ')\n"
        f"def main():\n    sys.stdout.write('began ')\n    threading.Thread(target=work).start()\n    {ends_with}\n"
        "cli.main = main\nrunpy.run_module('unmask', run_name='__main__')\n"
    )
    ended = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "WORLD_SIZE": "2", "PYTHONUNBUFFERED": ""},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout) == (code, "began worked ") and ("why" in ended.stderr) == (code == 1)


def test_an_option_whose_metavar_is_its_name_is_named_explicitly() -> None:
    """typer 0.27 takes the metavar for the option's name otherwise: --TASK instead of --task."""
    given = {
        (command.__name__, name): str(option.default)  # in Annotated the first argument is a name
        for command in COMMANDS
        for name, parameter in inspect.signature(command).parameters.items()
        for option in get_args(parameter.annotation)
        if isinstance(option, OptionInfo) and (option.metavar or "").lower() == name
    }
    assert given[("eval", "task")] == "--task" and all(name.startswith("--") for name in given.values()), given
