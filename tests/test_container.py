"""The container image: what its definition names exists, and its versions are those of constraints.txt."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
TEXT = re.sub(r"^#.*\n", "", (ROOT / "Containerfile").read_text(), flags=re.MULTILINE)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_python_is_one_that_the_project_supports() -> None:
    (version,) = re.findall(r"^FROM python:(\d+\.\d+)-slim-\w+$", TEXT, re.MULTILINE)
    assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"]


def test_all_that_is_copied_exists_and_reaches_the_build() -> None:
    sources = [name for line in re.findall(r"^COPY (.*) \S+$", TEXT, re.MULTILINE) for name in line.split()]
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(sources) == kept and all((ROOT / name).exists() for name in sources)
    needed = {"pyproject.toml", PROJECT["readme"], *PROJECT["license-files"], "constraints.txt", "unmask"}
    assert needed <= set(sources)


def test_every_package_that_is_asked_for_is_pinned_to_a_version_that_the_project_takes() -> None:
    (extras,) = re.findall(r"^RUN pip install --no-cache-dir '\.\[(.*)\]' -c constraints.txt$", TEXT, re.MULTILINE)
    assert set(extras.split(",")) == {"plot", "data", "lora", "gguf", "json", "math", "tensorboard"}
    names = [name for extra in extras.split(",") for name in PROJECT["optional-dependencies"][extra]]
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pinned = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}
    for requirement in map(Requirement, [*PROJECT["dependencies"], *names]):
        version = pinned[re.sub(r"[-_.]+", "-", requirement.name).lower()]
        assert version in requirement.specifier, requirement


@pytest.mark.parametrize("package", re.findall(r"--no-install-recommends (.*?) &&", TEXT))
def test_system_packages_are_those_of_make_system(package: str) -> None:
    (packages,) = re.findall(r"^PACKAGES \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert package in packages.split()
