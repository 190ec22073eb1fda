"""`unmask bench credit`: the credit audit with everything fixed. Change a number here only with the version."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from unmask.config import read_config
from unmask.studies.audit.audit import OnProgress
from unmask.studies.credit.report import credit_data, draw_credit, interval_cell
from unmask.studies.credit.rules import CreditFunction
from unmask.studies.credit.study import MeasuredCredit, measure_credit
from unmask.util.files import write_whole

VERSION = "credit-1"
MODELS = ("tiny-two", "tiny")
DRAWS = 32
SETTINGS = (
    "task=sudoku",
    "method=diffu_grpo",
    "with=[]",
    "seed=0",
    "prompts=32",
    "group=8",
    "idle_groups=keep",
    "device=cpu",
    "rollout.length=16",
    "rollout.steps=8",
    "rollout.block=16",
    "rollout.order=low_confidence",
    "rollout.schedule=even",
    "rollout.temperature=1",
    "rollout.top_k=0",
    "rollout.top_p=1",
    "rollout.guidance=0",
    "rollout.cache=none",
)


class ModelResult(NamedTuple):
    measured: MeasuredCredit
    data: dict[str, Any]


def run_benchmark(own: Mapping[str, CreditFunction], on_progress: OnProgress) -> dict[str, ModelResult]:
    """The results of every model, by name."""
    results = {}
    for model in MODELS:
        config = read_config(None, [f"model={model}", *SETTINGS])
        measured = measure_credit(config, own, DRAWS, partial(_report, on_progress, model))
        results[model] = ModelResult(measured, credit_data(measured))
    return results


def _report(on_progress: OnProgress, model: str, stage: str, share: float) -> None:
    on_progress(f"{model}: {stage}", share)


def citation(results: Mapping[str, ModelResult]) -> str:
    """One line for each model about the last rule: your own, or the last built-in one."""
    lines = [VERSION]
    for model, result in results.items():
        rule = result.measured.audit.rules[-1]
        lines.append(f"{model}: {rule.name} r = {interval_cell(rule.correlation)}, AUROC {interval_cell(rule.auroc)}")
    return "; ".join(lines)


def write_benchmark(folder: Path, data: dict[str, Any], results: Mapping[str, ModelResult]) -> list[Path]:
    """Write credit.json and, if matplotlib is installed, a figure of each model; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "credit.json"]
    write_whole(files[0], json.dumps(data) + "\n")
    for model, result in results.items():
        picture = folder / f"{model}.png"
        files += [picture] if draw_credit(result.measured.audit, picture) else []
    return files
