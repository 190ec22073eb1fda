"""unmask doctor"""

import importlib
import json
import os
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Annotated

import typer

from unmask import sandbox
from unmask.cli.arguments import AsJson, BlockLength, block_length_of

NEEDED, FEATURES, MACHINE, TOOLS = "Needed", "Optional features", "This machine", "Tools for developers"


@dataclass(frozen=True)
class Finding:
    what: str
    ok: bool
    needed: bool
    """Without it nothing works."""
    detail: str
    heading: str = FEATURES


EXTRAS = {
    "lora": ("peft", "low-rank adapters: training any model but the embedded one without --full"),
    "plot": ("matplotlib", "curves.png of a run, and the plots of compare, audit and eval"),
    "data": ("datasets", "data sets from the Hugging Face hub: gsm8k, math500, humaneval, mbpp"),
    "math": ("sympy", "equal formulas in math500"),
    "json": ("jsonschema-rs", "the task json_schema"),
    "gym": ("reasoning-gym", "the task reasoning_gym"),
    "gguf": ("gguf", "GGUF files in unmask fetch"),
    "tensorboard": ("tensorboard", "track=tensorboard"),
    "wandb": ("wandb", "track=wandb"),
    "trackio": ("trackio", "track=trackio"),
    "trl": ("trl", "training inside TRL"),
    "lm-eval": ("lm_eval", "lm-evaluation-harness with our models"),
    "docs": ("mkdocs-material", "building the site, make docs"),
    "fuzz": ("atheris", "fuzzing, make fuzz"),
    "dev": ("pytest", "the tests, make test"),
}
"""Extra of pyproject.toml -> the package that it installs, and what that is for."""
OF_DEVELOPERS = ("docs", "fuzz", "dev")


def _extra(name: str) -> Finding:
    """Not imported: some packages take seconds."""
    from packaging.requirements import Requirement

    (package, purpose), install = EXTRAS[name], f"pip install 'unmask[{name}]'"
    heading = TOOLS if name in OF_DEVELOPERS else FEATURES
    try:
        installed = version(package)
    except PackageNotFoundError:
        return Finding(package, False, False, f"{purpose}; {install}", heading)
    try:
        requirements = requires("unmask") or []
    except PackageNotFoundError:  # run from a checkout that is not installed
        requirements = []
    for needed in map(Requirement, requirements):
        if needed.name == package and installed not in needed.specifier:
            problem = f"{installed} is installed, and {needed.specifier} is needed"
            return Finding(package, False, False, f"{problem}: {purpose}; {install}", heading)
    return Finding(package, True, False, f"{installed}: {purpose}", heading)


def _package(name: str, purpose: str) -> Finding:
    """A package without which nothing works, imported."""
    try:
        importlib.import_module(name)
        return Finding(name, True, True, f"{version(name)}: {purpose}", NEEDED)
    except (ImportError, PackageNotFoundError) as error:
        return Finding(name, False, True, f"{purpose}; pip install {name} ({error})", NEEDED)


def examine() -> list[Finding]:
    """One finding for each thing that `unmask` can use."""
    python = ".".join(map(str, sys.version_info[:3]))
    findings = [
        Finding("python", sys.version_info >= (3, 11), True, f"{python}; 3.11 or newer is needed", NEEDED),
        _package("torch", "tensors"),
        _package("transformers", "models"),
        *map(_extra, EXTRAS),
    ]
    if findings[1].ok:
        import torch

        fits = (2, 11) <= tuple(int(part) for part in version("torch").split(".")[:2]) < (2, 14)
        findings.append(Finding("torch release", fits, False, f"{version('torch')}; tested with 2.11 to 2.13", MACHINE))
        gpu = torch.cuda.is_available()
        name = torch.cuda.get_device_name(0) if gpu else "none: training runs on the CPU"
        findings.append(Finding("gpu", gpu, False, name, MACHINE))
    from unmask.models.known import EMBEDDED

    for name, folder in EMBEDDED.items():
        weights = folder / "model.safetensors"
        size = f"{weights.stat().st_size / 2**20:.1f} MB" if weights.is_file() else f"not at {folder}; reinstall"
        findings.append(Finding(name, weights.is_file(), True, f"an embedded model: {size}", NEEDED))
    findings.append(Finding("bubblewrap", not sandbox.problem(), False, f"runs programs: {sandbox.description()}"))
    for program, purpose in (("npm", "builds and tests the viewer's page"), ("chromium", "tests it in a browser")):
        path = shutil.which(program)
        detail = f"{purpose} (make web, make web-test); to look at runs any browser works"
        findings.append(Finding(program, path is not None, False, detail, TOOLS))
    findings.append(Finding("cores", True, False, f"{os.cpu_count()}", MACHINE))
    free = shutil.disk_usage(".").free / 2**30
    findings.append(Finding("disk", free > 1, False, f"{free:.0f} GB free here; a run folder takes a few MB", MACHINE))
    return findings


def doctor(
    model: Annotated[
        str | None, typer.Argument(metavar="[RUN_OR_MODEL]", help="Print what is recognised in this model, and why.")
    ] = None,
    block: BlockLength = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine: what is installed, and what is missing for which feature. Or check a model."""
    if model is not None:
        _describe(model, block_length_of(block), as_json)
        return
    findings = examine()
    if as_json:
        typer.echo(json.dumps([vars(finding) for finding in findings], indent=2))
    else:
        for heading in (NEEDED, FEATURES, MACHINE, TOOLS):
            typer.echo(f"{heading}:")
            for finding in (finding for finding in findings if finding.heading == heading):
                state = "ok" if finding.ok else "missing" if finding.needed else "no"
                typer.echo(f"  {state:8}{finding.what:16} {finding.detail}")
    if any(finding.needed and not finding.ok for finding in findings):
        raise typer.Exit(1)


def _describe(model: str, causal_block: int | None, as_json: bool) -> None:
    """Each fact of a model with its source; an error says why the model is refused."""
    from unmask.models.known import check_model_name

    check_model_name(model)
    from unmask.models.describe import describe_model
    from unmask.training.run.folder import checkpoint_of

    facts = describe_model(checkpoint_of(model), causal_block)
    if as_json:
        typer.echo(json.dumps([fact._asdict() for fact in facts], indent=2))
        return
    for fact in facts:
        typer.echo(f"{fact.what:14}{fact.value}  ({fact.source})")
