"""A method in a file of one's own: found, checked like the shelf's, written down, and refused in one sentence."""

import json
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

import unmask as library
from unmask.config import read_config
from unmask.config.method_names import MethodSpec, method_spec
from unmask.core.words import label_of, piece_of
from unmask.models import TinyShape, save, tiny_policy
from unmask.studies.compare.cells import SharedSettings, key_of, method_grid, own_sections, reference_of

GOOD = """
from __future__ import annotations
from dataclasses import replace
import unmask
from unmask.core.advantage import Advantage, z_score

def loud(kl: float = 0.1, advantage: Advantage = z_score, sizes: tuple[int, ...] = (1, 2)) -> unmask.Method:
    return replace(unmask.diffu_grpo(kl=kl, advantage=advantage), name=f"loud{sum(sizes)}")

def twice(base: unmask.Method, factor: float = 2.0) -> unmask.Method:
    return replace(base, name=f"{base.name} x {factor:g}", credit=lambda trace: factor * base.credit(trace))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text(GOOD)
    return tmp_path


def test_a_base_and_a_plug_in_take_options_like_any_other_and_are_read_back(folder):
    named = {"method": "my.py:loud", "with": ["dps", "my.py:twice"]}
    config = read_config(None, ["loud.advantage=leave_one_out", "loud.sizes=[3, 4]", "twice.factor=3"], **named)
    method = config.build_method()
    assert (method.name, method.kl, method.advantage) == ("loud7+dps x 3", 0.1, library.leave_one_out)
    Path("run.yaml").write_text(yaml.safe_dump(config.dump()))
    again = read_config(Path("run.yaml"))
    assert again.dump() == config.dump() and again.method == "my.py:loud"
    assert again.dump()["loud"] == {"kl": 0.1, "advantage": "leave_one_out", "sizes": [3, 4]}
    replaced = read_config(Path("run.yaml"), method="wd1", **{"with": ["sml"]}).dump()  # their options go with them
    assert "loud" not in replaced and "twice" not in replaced and "dps" not in replaced


def test_a_file_that_has_changed_is_run_again(folder):
    assert read_config(method="my.py:loud").build_method().name == "loud3"
    Path("my.py").write_text(GOOD.replace("loud{", "LOUD{"))
    assert read_config(method="my.py:loud").build_method().name == "LOUD3"


WRONG = {
    "no file": ("--method your.py:loud", "method: there is no file your.py"),
    "a folder": ("--method sub.py:loud", "method: there is no file sub.py"),
    "no name": ("--method my.py", "method: my.py: name the function too, as my.py:NAME"),
    "an empty name": ("--method my.py:", "method: my.py: name the function too"),
    "no such function": ("--method my.py:quiet", "method: my.py: there is no function quiet in it"),
    "nearly a function": ("--method my.py:laud", "there is no function laud in it; did you mean loud?"),
    "no function": ("--method bad.py:number", "method: bad.py: there is no function number in it"),
    "a plug-in as a base": ("--method my.py:twice", "method: my.py: twice: it takes a `base`, so it is a plug-in"),
    "a base as a plug-in": ("--with my.py:loud", "with: my.py: loud: a plug-in takes a `base` first"),
    "a syntax error": ("--method broken.py:f", "broken.py cannot be run: SyntaxError"),
    "a file that exits": ("--method exits.py:f", "exits.py cannot be run: SystemExit: 3"),
    "an option without a type": ("--method bad.py:bare", "the option x needs a type and a default"),
    "an option without a default": ("--method bad.py:needy", "the option x needs a type and a default"),
    "an unknown type": ("--method bad.py:typed", "the type of an option is unknown: name 'Nothing' is not defined"),
    "options without names": ("--method bad.py:loose", "more cannot be set by name"),
    "a formula without a name": ("--method bad.py:formula", "the option advantage must default to one of group_mean, "),
    "a default that no file can hold": ("--method bad.py:odd", "the option x must default to a number"),
    "no method returned": ("--method bad.py:three", "three: bad.py: it returned 3, not a Method"),
    "a function that raises": ("--method bad.py:falls", "falls: bad.py: it raised KeyError: 'x'"),
    "a name of ours": ("--method bad.py:daca", "method: bad.py:daca: daca is the name of something else"),
    "a key's name": ("--method bad.py:rollout", "method: bad.py:rollout: rollout is the name of something else"),
    "a wrong value": ("--method my.py:loud loud.kl=much", "loud.kl: expected a number"),
    "a wrong option": ("--method my.py:loud loud.k=1", "loud.k: unknown option; did you mean kl?"),
    "an unused section": ("--method wd1 loud.kl=1", "loud: unknown key"),
    "the same twice": ("--method wd1 --with my.py:twice,my.py:twice", "with: my.py:twice is named twice"),
    "a wrong probe": ("--method bad.py:mute", "mute: nothing to ask"),
}
BAD = """
from dataclasses import replace
import unmask
number = 3
def bare(x=1): return unmask.wd1()
def needy(x: int): return unmask.wd1()
def typed(x: "Nothing" = 1): return unmask.wd1()
def loose(**more: int): return unmask.wd1()
def formula(advantage: unmask.Method = lambda r, g: r): return unmask.wd1()
def odd(x: object = object()): return unmask.wd1()
def three(): return 3
def falls(): return {}["x"]
def daca(): return unmask.wd1()
def rollout(): return unmask.wd1()
def silent(trace, rng, turns): raise ValueError("nothing to ask")
def mute(): return replace(unmask.wd1(), name="mute", probe=silent)
"""


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_a_file_is_one_sentence(case, folder, unmask):
    Path("bad.py").write_text(BAD)
    Path("broken.py").write_text("def f(:\n")
    Path("exits.py").write_text("import sys\nsys.exit(3)\n")
    Path("sub.py").mkdir()
    words, told = WRONG[case]
    code, out, err = unmask("train", *words.split(" "), "--out", "run")
    assert code == 2 and len(out.splitlines()) <= 1 and len(err.splitlines()) == 1  # out: the first line of a run
    assert told in err and "Traceback" not in err
    assert not Path("run").exists()


def test_nothing_is_run_for_a_name_of_the_shelf(folder, monkeypatch):
    """Not even a file that is called like it."""
    Path("wd1.py").write_text("raise AssertionError")
    Path("wd1").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(str(folder))
    assert read_config(method="wd1").build_method().name == "wd1"
    assert "wd1" not in sys.modules and "unmask_own_wd1" not in sys.modules


EVIL = """
from pathlib import Path
Path("ran").touch()
length = 8
def f(base=None): return base
def reward(completion): return 1
"""
NAMING = {
    "a method": {"method": "dl/m.py:f", "f": {"x": 1}},
    "a plug-in": {"with": ["daca", "dl/m.py:f"], "daca": {"strata": 2}},
    "a task": {"task": "dl/m.py"},
    "a task spelled out": {"task": "own", "own": {"file": "dl/m.py"}},
    "a task that is not asked for": {"task": "sudoku", "own": {"file": "dl/m.py"}},
}
FOREIGN = {
    "sample": "sample dl 1=",
    "generate": "generate dl prompts.jsonl",
    "eval": "eval dl --problems 1 --samples 1",
    "audit": "audit dl --methods diffu_grpo --problems 1 --group 2 --draws 2 --states 0",
    "view": "view dl --export view.html",
    "merge": "merge dl --out merged",
}


@pytest.fixture
def foreign(folder):
    """A folder from somewhere else, with a program in it: a model's, or with `checkpoint` a run's."""

    def made(settings, kind):
        save(tiny_policy(TinyShape(width=16, layers=1, heads=2, hidden=16, max_length=48)), Path(kind))
        Path("dl/config.yaml").write_text(yaml.safe_dump({"rollout": {"steps": 4}, **settings}))
        Path("dl/m.py").write_text(EVIL)
        Path("prompts.jsonl").write_text('{"prompt": "1="}\n')
        if kind != "dl":
            Path("dl/metrics.jsonl").write_text('{"step": 0}\n')

    return made


@pytest.mark.parametrize("command", FOREIGN)
@pytest.mark.parametrize("naming", NAMING)
def test_a_run_that_is_looked_at_runs_no_file_that_it_names(naming, command, foreign, unmask):
    foreign(NAMING[naming], "dl/checkpoint")
    code, _, err = unmask(*FOREIGN[command].split(" "))
    assert not Path("ran").exists()
    if NAMING[naming].get("task") in (None, "sudoku") or command in ("view", "merge"):
        assert code == 0, err
    else:
        assert code == 2 and "Python file" in err and "--task" in err


@pytest.mark.parametrize("command", ["sample", "generate", "eval", "audit", "merge"])
def test_a_model_that_is_looked_at_has_no_configuration(command, foreign, unmask):
    foreign({"method": "dl/m.py:f", "task": "dl/m.py", "rollout": {"steps": 77}}, "dl")  # more than there are positions
    code, _, err = unmask(*FOREIGN[command].split(" "))
    assert code == 0 and not Path("ran").exists(), err


def test_a_task_that_a_run_names_is_run_once_the_user_names_it_too(foreign, unmask):
    Path("rows.jsonl").write_text('{"prompt": "1=", "split": "test"}\n')
    foreign({"task": "own", "own": {"file": "dl/m.py", "data": "rows.jsonl"}}, "dl/checkpoint")
    command = [*FOREIGN["eval"].split(" "), "--json", "reward.timeout=null"]
    for more in ["--task", "own", "own.data=rows.jsonl"], ["--task", "sudoku", "task=own"]:
        unmask(*command, *more)
        assert not Path("ran").exists()
    code, out, err = unmask(*command, "--task", "./dl/m.py")
    assert code == 0 and Path("ran").exists() and '"task": "m"' in out, err  # with the run's rows, the file has none


# --- in compare and audit -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "word", "options", "label"),
    [
        ("agrpo", "agrpo", [], "agrpo"),
        ("agrpo:draws=2:steps=entropy", "agrpo", ["draws=2", "steps=entropy"], "agrpo:draws=2:steps=entropy"),
        ("my.py:loud", "my.py:loud", [], "loud"),
        (
            "a/b.c/my.py:loud:kl=0.2:inner_steps=2",
            "a/b.c/my.py:loud",
            ["kl=0.2", "inner_steps=2"],
            "loud:kl=0.2:inner_steps=2",
        ),
        ("my.py:kl=0.2", "my.py", ["kl=0.2"], "my.py:kl=0.2"),
        (
            "wd1:own.file=my.py:inner_steps=2",
            "wd1",
            ["own.file=my.py", "inner_steps=2"],
            "wd1:own.file=my.py:inner_steps=2",
        ),
        ("wd1:own.file=my.py:inner", "wd1", ["own.file=my.py", "inner"], "wd1:own.file=my.py:inner"),
        ("wd1:model=m.py:x", "wd1", ["model=m.py", "x"], "wd1:model=m.py:x"),
        ("", "", [], ""),
    ],
)
def test_a_word_of_a_grid_is_a_method_and_its_options(text, word, options, label):
    assert piece_of(text) == (word, options) and label_of(text) == label


def test_a_grid_calls_a_function_by_its_name_and_gives_it_its_own_options(folder):
    grid = method_grid(["wd1", "my.py:loud:kl=0.2:inner_steps=2"], ["none", "dps+my.py:twice:factor=3"])
    assert [variant.label for variant in grid] == [
        "wd1", "wd1+dps+twice:factor=3", "loud:kl=0.2:inner_steps=2", "loud:kl=0.2:inner_steps=2+dps+twice:factor=3",
    ]  # fmt: skip
    settings = SharedSettings(overrides=("loud.advantage=leave_one_out", "twice.factor=4"), own=own_sections(grid))
    settings.check(grid)
    first, *_, last = (settings.config(variant) for variant in grid)
    assert (first.method, first.plugins, first.options) == ("wd1", (), {})
    assert (last.method, last.plugins, last.inner_steps) == ("my.py:loud", ("dps", "my.py:twice"), 2)
    assert last.options == {"loud": {"advantage": "leave_one_out", "kl": 0.2}, "twice": {"factor": 3}}
    assert reference_of(grid[3], grid) == grid[2] and reference_of(grid[2], [MethodSpec("my.py:loud")]) is not None
    keys = [key_of(config.dump()) for config in (first, last)]
    Path("my.py").write_text(GOOD + "# new\n")
    assert [key_of(config.dump()) == key for config, key in zip((first, last), keys, strict=True)] == [True, False]
    Path("your.py").write_text(GOOD)
    with pytest.raises(ValueError, match=r"loud .*twice"):
        method_grid(["my.py:loud", "your.py:loud"], ["none"])


MISNAMED = {"my.py": "name the function too", "my.py:quiet": "no function quiet in it", "no.py:f": "no file no.py"}


def test_a_comparison_trains_functions_in_files_and_goes_on_until_they_change(folder, unmask, monkeypatch, cells_here):
    monkeypatch.setattr("unmask.studies.compare.report.draw", lambda *_: None)  # which takes longer than the cells
    save(tiny_policy(TinyShape(width=16, layers=1, heads=2, hidden=16, max_length=48)), Path("model"))
    few = ("model=model", "prompts=1", "group=2", "rollout.steps=4", "eval.prompts=1", "eval.samples=1", "eval.every=0")
    grid = ("--methods", "diffu_grpo,my.py:loud", "--with", "none,my.py:twice", "--out", "out")
    command = ("compare", *grid, "--seeds", "1", "--jobs", "1", "--budget", "updates=1", *few)
    code, out, err = unmask(*command)
    assert code == 0 and err.count("cells ") == 4 and "FAILED" not in err, err
    rows = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("|")]
    assert rows[2:] == ["start", "diffu_grpo", "diffu_grpo+twice", "loud", "loud+twice"] and "my.py" not in out
    tried = []
    run_jobs = "unmask.studies.compare.compare.run_jobs"
    monkeypatch.setattr(run_jobs, lambda jobs, *how: tried.extend(job.label for job in jobs) or ())
    assert unmask(*command)[:2] == (0, out) and not tried
    Path("my.py").write_text(GOOD + "# new\n")
    assert unmask(*command)[0] == 0 and tried == ["diffu_grpo+twice", "loud", "loud+twice"]
    for words, told in MISNAMED.items():
        code, _, err = unmask("compare", "--methods", words, "--out", "other", *few)
        assert code == 2 and told in err and len(err.splitlines()) == 1 and not Path("other").exists()


def test_an_audit_measures_functions_in_files(folder, unmask):
    words = "my.py:loud:kl=0.2+my.py:twice,my.py:twice:factor=3,diffu_grpo"
    few = ("--task", "countdown", "--problems", "1", "--group", "2", "--draws", "2", "--states", "0")
    code, out, err = unmask("audit", "tiny", "--methods", words, *few, "loud.sizes=[4]", "--json")
    assert code == 0, err
    names = [one["name"] for one in json.loads(out)["estimators"]]
    assert names == ["loud:kl=0.2+twice", "twice:factor=3", "diffu_grpo"]
    spec = method_spec("my.py:twice:factor=3")
    assert (spec.label, spec.words) == ("twice:factor=3", ["diffu_grpo", "my.py:twice"])
    assert list(spec.overrides()) == ["twice.factor=3"]
    for words, told in MISNAMED.items():
        code, _, err = unmask("audit", "tiny", "--methods", words, *few)
        assert code == 2 and told in err and len(err.splitlines()) == 1


def test_the_page_shows_the_file_that_is_tested(tmp_path):
    """Every definition on the page stands in the example, word by word."""
    root = Path(__file__).parent.parent
    page, example = (root / name for name in ("docs/own_method.md", "examples/own_method.py"))
    blocks = page.read_text().split("```python\n")[1:]
    shown = [block.partition("```")[0] for block in blocks]
    shown = [block for block in shown if block.startswith("# examples/own_method.py\n")]
    assert shown
    for block in shown:
        for piece in textwrap.dedent(block.partition("\n")[2]).strip().split("\n\n\n"):
            assert piece in example.read_text()
