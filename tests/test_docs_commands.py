"""Every command line in the documentation is one that the program takes.

Commands of ours run for real as far as the door where work would begin: options, keys, values and their combination are
checked by the code that checks a user's. Commands of others name files, targets and extras that exist. Commands that
need a GPU stand under a comment <!-- gpu -->. The batch script of slurm.md runs with stand-ins for Slurm, and the
tutorial for real, in test_tutorial.py.
"""

import os
import re
import shlex
import signal
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from unmask.cli.main import UsageError, app, main
from unmask.config import read_config
from unmask.training.run.folder import RunFolder

UNMASK: Any = typer.main.get_command(app)
ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = ("unmask ", "torchrun ", "make ", "python ", "pip ", "pytest ", "for ")
BY_HAND = ("source", "sbatch", "docker", "hf", "cd", "git")  # nothing of ours to check
DOORS = {
    "unmask.training.loop": ("train", "resume"),
    "unmask.studies.cost.estimate": ("estimate",),
    "unmask.models": ("load_model",),
    "unmask.studies.compare.compare": ("_lock",),
    "unmask.studies.compare.report": ("redraw",),
    "unmask.studies.credit.study": ("measure_credit",),
    "unmask.studies.credit.benchmark": ("run_benchmark",),
    "unmask.training.setup": ("set_up",),  # after the modules that import it
    "unmask.studies.audit.report": ("read_audit",),
    "unmask.evaluation.grade": ("grade_file",),
    "unmask.sft.pretrain": ("pretrain",),
    "unmask.sft.adapt": ("source_folder",),
    "unmask.sft.finetune": ("finetune",),
}
"""Where the commands' work begins."""
PARSED = ("doctor", "view", "fetch", "push")  # nothing but options and folders
GYM = "reasoning_gym"  # an extra: without it its commands are parsed only
LARGE = re.compile(r"GSAI-ML/|/models/|runs/llada|torchrun")
FILES = {
    "my.yaml": "task: sudoku\n",
    "my_mixture.yaml": (ROOT / "unmask" / "config" / "recipes" / "pretrain_tiny.yaml").read_text(),
    "my_task.py": "def correct(prompt, completion, row):\n    return 1.0\ndef short(completions, **columns):\n"
    "    return [0.0] * len(completions)\nrewards = [correct, short]\n",
    "sums.py": "length = 8\ndef reward(completion, row):\n    return float(completion == row['answer'])\n",
    "my_method.py": (ROOT / "examples" / "own_method.py").read_text(),
    "my_rule.py": (ROOT / "examples" / "own_rule.py").read_text(),
    "rows.jsonl": "".join(f'{{"prompt": "{n}+2=", "answer": "{n + 2}", "completion": "{n + 2}"}}\n' for n in range(20)),
}
FILES |= {name: FILES["rows.jsonl"] for name in ("sums.jsonl", "prompts.jsonl", "generations.jsonl", "FILE.jsonl")}
PLACEHOLDERS = {"RUN": "runs/first", "MODEL": "tiny", "NAME": "sudoku", "TASK": "sudoku", "SEED": "0", "$seed": "0"}


class Command(NamedTuple):
    line: int
    text: str
    gpu: bool = False
    """Marked as needing one."""
    inline: bool = False
    """Between backticks in a sentence, where a mention will do."""
    answer: str | None = None
    """What it prints, where the page shows that: `$ command` and a line."""


class Closed(Exception):
    """A command has come to its door."""


def commands(page: Path) -> Iterator[Command]:
    """In fenced blocks, in indented ones, and between backticks."""
    lines, language, marked, begun, values = page.read_text().splitlines(), None, False, "", dict[str, str]()
    for number, line in enumerate(lines, 1):
        if fence := re.match(r" *```(\w*)", line):
            language = fence[1] if language is None else None
            marked = language is not None and lines[number - 2].startswith("<!-- gpu")
        elif language is None:
            if line.startswith("    ") and line.strip().startswith(PROGRAMS):
                yield Command(number, line.strip(), gpu=True)
            for span in re.findall(r"`((?:unmask|torchrun|make|python benchmarks/\S+) [^`]+)`", line):
                yield Command(number, span, gpu=True, inline=True)
        elif line.endswith("\\"):
            begun += line[:-1]
        else:
            told, begun = re.sub(r"\$(\w+)", lambda name: values.get(name[1], name[0]), begun + line).strip(), ""
            if given := re.fullmatch(r"([A-Z]+)=(\S+)", told):
                values[given[1]] = given[2]
            elif told.startswith("$ "):
                yield Command(number, told[2:], answer=lines[number])
            elif (language == "sh" and told[:1] not in ("", "#")) or (language == "" and told.startswith(PROGRAMS)):
                yield Command(number, told, marked)


def plain(text: str) -> list[str]:
    """The words of a command: no comment, no redirection or pipe, no loop, no placeholder."""
    text = re.sub(r"\s+[#|>]\s.*$", "", text)
    text = re.sub(r"^for .*; do (.*); done$", r"\1", text)
    words = shlex.split(text)
    if words[0] == "torchrun" and "-m" in words:
        words = words[words.index("-m") + 1 :]
    named = "|".join(map(re.escape, PLACEHOLDERS))
    return [re.sub(rf"^({named})(?=/|$)", lambda found: PLACEHOLDERS[found[1]], word) for word in words]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as the pages have it: files of one's own beside the checkout's."""
    for name in ("benchmarks", "examples", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def doors(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*args: object, **kwargs: object) -> None:
        raise Closed

    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)  # a page may name a GPU; none is touched
    for module in ("unmask.cli.train", "unmask.cli.sft", "unmask.cli.audit", "unmask.models.known"):
        monkeypatch.setattr(f"{module}.check_model_name", lambda name: None)  # a page names models that are not here
    for module, names in DOORS.items():
        for name in names:
            monkeypatch.setattr(f"{module}.{name}", closed)


def checked(text: str, folder: Path, inline: bool = False) -> None:
    """ValueError, a usage error or AssertionError where the command is not one that the program takes."""
    words = plain(text)
    program, rest = words[0], words[1:]
    if program == "unmask" and ((inline and len(words) <= 3) or "[--" in text):
        mentioned(rest)
    elif program == "unmask":
        ours(rest, folder)
    elif program == "make":
        for target in [word for word in rest if "=" not in word]:
            assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
    elif program in ("python", "pytest"):
        script = next((word for word in rest if word.endswith(".py")), None)
        assert script is None or (ROOT / script).is_file(), script
        source = (ROOT / script).read_text() if script else ""
        if "study_parser(" in source:  # the options that the studies share
            source += (
                (ROOT / "benchmarks/choosing.py").read_text().partition("def study_parser(")[2].partition("\n\n\n")[0]
            )
        for option in [word.partition("=")[0] for word in rest if script and word.startswith("--")]:
            assert f'"{option}"' in source, option
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for named in re.findall(r"\[([\w,]+)\]", " ".join(rest)):
            assert set(named.split(",")) <= set(extras), named
    else:
        assert program in BY_HAND, f"no program of ours: {program}"


def mentioned(words: list[str]) -> None:
    """A command or an option of one that is only named."""
    if words[0] in ("--help", "--version", "COMMAND"):
        return
    known = spelled(UNMASK.commands[words[0]])
    for word in words[1:]:
        assert not word.startswith(("--", "[--")) or word.strip("[]") in known, word


def spelled(command: Any) -> set[str]:
    return {"--help", *(name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts))}


def ours(words: list[str], folder: Path) -> None:
    """Run one of our commands up to its door, in a folder that has the runs it reads."""
    name, rest = words[0], words[1:]
    UNMASK.commands[name].make_context(name, list(rest))
    goes_on = name in ("adapt", "sft") and "--resume" in rest  # in a folder that only such a run makes
    if name in PARSED or goes_on or "--help" in rest or (GYM in words and find_spec(GYM) is None):
        return
    written = {rest[place + 1] for place, word in enumerate(rest) if word == "--out"}
    for word in rest:
        run = Path(word).parent if word.endswith("/config.yaml") else Path(word)
        if run.parts[:1] == ("runs",) and not run.suffix and str(run) not in written and not run.exists():
            RunFolder(run, read_config(None, ["task=sudoku"]).dump())
    with suppress(Closed, typer.Exit):
        UNMASK.main(words, prog_name="unmask", standalone_mode=False)


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_command_of_a_page_is_taken(page: Path, folder: Path, doors: None, capsys: pytest.CaptureFixture) -> None:
    wrong = []
    for command in commands(page):
        if command.answer is not None:
            continue
        if LARGE.search(command.text) and not command.gpu:
            wrong.append(f"line {command.line}: needs a GPU, and no <!-- gpu --> is above it: {command.text}")
        try:
            checked(command.text, folder, command.inline)
        except Exception as error:  # whatever it is, it is told with its line, beside those of the other commands
            wrong.append(f"line {command.line}: {command.text}\n    {type(error).__name__}: {error}")
    assert not wrong, "\n".join([str(page), *wrong])


def test_a_wrong_option_key_value_target_or_file_is_noticed(folder: Path, doors: None) -> None:
    for text in (
        "unmask train --strata 4",
        "unmask train daca.starta=3",
        "unmask eval tiny --task sudoky",
        "unmask audit tiny --methods agrppo",
        "unmask compare --methods diffu_grpo --with dacca --out x",
        "unmask view --exprot page.html runs/first",
        "torchrun --nproc-per-node 8 -m unmask train my.yaml --ful",
        "make demmo",
        "python benchmarks/spead.py",
        "python benchmarks/surprise.py --only x",
        "python benchmarks/soak.py train --update 3",
        "pip install 'unmask[plots]'",
        "conda install unmask",
    ):
        with pytest.raises((ValueError, UsageError, KeyError, AssertionError)):
            checked(text, folder)


SHOWN = [(page, command) for page in PAGES for command in commands(page) if command.answer is not None]


@pytest.mark.parametrize(("page", "command"), SHOWN, ids=[command.text for _, command in SHOWN])
def test_an_error_is_told_as_the_page_has_it(
    page: Path, command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("sys.argv", shlex.split(command.text))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.strip() == command.answer


STAND_INS = {
    "srun": 'exec "$@"',
    "scontrol": 'if [ "$1" = show ]; then echo node1; echo node2; else echo "$@" >> requeued; fi',
    # the launcher: a fresh run makes its folder and goes on until it is asked to stop; a resumed one finishes
    "torchrun": 'echo "$@" >> launched\n'
    'case "$*" in\n'
    "  *--resume*) touch runs/my-run/finished.json ;;\n"
    "  *) mkdir -p runs/my-run; touch runs/my-run/config.yaml\n"
    "     while [ ! -e runs/my-run/stop ]; do sleep 0.02; done ;;\n"
    "esac",
}


@pytest.fixture
def slurm(folder: Path) -> Callable[..., subprocess.Popen]:
    """Starts the page's script where Slurm's commands are stand-ins."""
    (script,) = re.findall(r"```bash\n(#!.*?)```", (ROOT / "docs" / "slurm.md").read_text(), re.DOTALL)
    assert script == (ROOT / "examples" / "slurm" / "train.sbatch").read_text()
    (folder / "train.sbatch").write_text(script)
    (folder / "bin").mkdir()
    for name, body in STAND_INS.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / "bin" / name).chmod(0o755)
    given = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8"}
    surroundings = {**os.environ, **given, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    return lambda **more: subprocess.Popen(["bash", "train.sbatch"], cwd=folder, env={**surroundings, **more})


def test_the_batch_script_starts_stops_requeues_and_resumes(
    folder: Path, slurm: Callable[..., subprocess.Popen]
) -> None:
    job, waited = slurm(), time.monotonic() + 20
    while not (folder / "runs" / "my-run" / "config.yaml").exists():
        assert time.monotonic() < waited and job.poll() is None
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(20) == 0
    assert (folder / "requeued").read_text() == "requeue 7\n"
    assert slurm().wait(20) == 0  # what Slurm does then
    assert slurm().wait(20) == 0  # and once more: it is finished
    first, second = (folder / "launched").read_text().splitlines()
    assert first.endswith("--rdzv-endpoint node1:29500 -m unmask train my.yaml --out runs/my-run")
    assert second.endswith("-m unmask train --resume runs/my-run")
    assert first.startswith("--nnodes 2 --nproc-per-node 8 ")
    assert (folder / "requeued").read_text() == "requeue 7\n"  # nothing that is finished comes back
    assert not (folder / "runs" / "my-run" / "stop").exists()
    for line in (first, second):  # and what it launches is a command of ours
        assert plain(f"torchrun {line}")[:2] == ["unmask", "train"]


def test_the_batch_script_gives_a_failure_back_and_does_not_requeue_it(
    folder: Path, slurm: Callable[..., subprocess.Popen]
) -> None:
    (folder / "bin" / "torchrun").write_text("#!/bin/bash\nexit 2\n")
    assert slurm().wait(20) == 2
    assert not (folder / "requeued").exists()
