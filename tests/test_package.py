"""The package as users get it: the wheel, the command, the metadata, and the rules the source keeps."""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from packaging.utils import canonicalize_name

import unmask
from unmask.util.version import __version__

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "unmask"
SOURCES = sorted(PACKAGE.rglob("*.py"))


def finished(args: list[str], cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """`python ARGS` in another process; fails with its output unless it exits with 0."""
    done = subprocess.run([sys.executable, *args], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, f"python {' '.join(args)}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built from the source distribution, which lies beside it."""
    folder = tmp_path_factory.mktemp("wheel")
    finished(["-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)], cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder outside the checkout that holds the installed wheel and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    finished([*pip, "--target", str(folder), str(wheel)], cwd=folder)
    return folder


# --- the wheel ----------------------------------------------------------------------------------------------


def test_wheel_holds_the_whole_package_and_nothing_else(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == wanted
    assert "unmask/py.typed" in held
    assert any(name.startswith("unmask/models/assets/") and name.endswith(".safetensors") for name in held)
    assert {"unmask/config/recipes/d1_gsm8k.yaml", "unmask/config/schema.json"} <= set(held)


def test_both_distributions_have_the_version_and_the_source_has_what_the_tests_need(wheel: Path) -> None:
    (source,) = wheel.parent.glob("*.tar.gz")
    assert wheel.name == f"unmask-{__version__}-py3-none-any.whl" and source.name == f"unmask-{__version__}.tar.gz"
    with tarfile.open(source) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"tests/world.py", "docs/index.md", "examples/own_loop.py", "constraints.txt", "web/package.json"} <= held


def test_installed_command_answers_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    answer = finished(["-m", "unmask", "--version"], cwd=tmp_path, PYTHONPATH=str(installed)).stdout
    assert answer.strip() == __version__
    usage = finished(["-m", "unmask", "--help"], cwd=tmp_path, PYTHONPATH=str(installed)).stdout
    assert "train" in usage
    listing = finished(["-m", "unmask", "methods", "--json"], cwd=tmp_path, PYTHONPATH=str(installed)).stdout
    methods = json.loads(listing)
    names = set(methods) if isinstance(methods, dict) else {method["name"] for method in methods}
    assert {"diffu_grpo", "agrpo", "wd1", "spg", "daca", "dispo"} <= names


def test_installed_package_loads_its_embedded_model(installed: Path, tmp_path: Path) -> None:
    script = "import unmask; from unmask.models import load_model; load_model('tiny'); print(unmask.__file__)"
    printed = finished(["-c", script], cwd=tmp_path, PYTHONPATH=str(installed)).stdout
    assert Path(printed.splitlines()[-1]).is_relative_to(installed)


def test_help_imports_nothing_heavy(installed: Path, tmp_path: Path) -> None:
    """What makes `unmask --help` quick, without a stopwatch."""
    args = ["-X", "importtime", "-m", "unmask", "--help"]
    report = finished(args, cwd=tmp_path, PYTHONPATH=str(installed)).stderr
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in report.splitlines()}
    assert "unmask" in imported and "typer" in imported  # the report was read right
    assert not imported & {"torch", "transformers", "matplotlib"}


# --- the metadata -------------------------------------------------------------------------------------------


def test_extras_have_normalised_names() -> None:
    """pip before 23.3 finds an extra only by the name in the metadata, which has dashes for underscores."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert all(name == canonicalize_name(name) for name in extras)


def test_versions_agree() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    changelog = (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## \[(\d+\.\d+\.\d+)\]", changelog, flags=re.MULTILINE)
    assert newest is not None, "CHANGELOG.md has no section headed '## [X.Y.Z] - ...'"
    assert __version__ == str(citation["version"]) == newest[1]


# --- the source ---------------------------------------------------------------------------------------------


def imported_names(path: Path) -> Iterator[str]:
    """Every module, and every name taken from one, that a source file imports; absolute, dotted."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def calls_backward(path: Path) -> bool:
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward"
        for node in ast.walk(ast.parse(path.read_text()))
    )


@pytest.mark.parametrize(("old", "new"), unmask.RENAMED.items())
def test_an_old_public_name_works_with_a_warning(old: str, new: str) -> None:
    with pytest.warns(FutureWarning, match=f"unmask.{old} is now unmask.{new}"):
        value = getattr(unmask, old)
    assert value is getattr(unmask, new) and new in dir(unmask) and old not in dir(unmask)


def test_files_are_at_most_400_lines() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_a_method_file_imports_nothing_of_another_but_its_method() -> None:
    """A method can build on another one. What several share otherwise is in core."""
    shelf = [path for path in (PACKAGE / "methods").rglob("*.py") if path.name != "__init__.py"]
    assert shelf
    crossed = {
        f"{path.name} imports {name}"
        for path in shelf
        for name in imported_names(path)
        if f"{name}.".startswith("unmask.methods.") and len(set(name.split(".")[2:])) > 1
    }
    assert crossed == set()


def test_only_the_trainers_call_backward() -> None:
    callers = {path.relative_to(PACKAGE).as_posix() for path in SOURCES if calls_backward(path)}
    assert callers == {"training/update.py", "sft/finetune.py", "sft/pretrain.py"}


SCRIPTS = [path for folder in ("benchmarks", "docs", "examples") for path in sorted((ROOT / folder).glob("*.py"))]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_a_script_imports_is_there(path: Path) -> None:
    """Scripts that no test runs must not rot when a function moves."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "unmask":
            try:
                module = importlib.import_module(node.module)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] == "unmask":
                    raise
                pytest.skip(f"{path.name} needs {error.name}, an extra")
            missing = [name.name for name in node.names if not hasattr(module, name.name)]
            assert not [name for name in missing if find_spec(f"{node.module}.{name}") is None], node.module
