"""`unmask.credit_audit`: the credit audit as one function call."""

from pathlib import Path
from typing import Any

from unmask.config import DEMO, read_config
from unmask.models.known import check_model_name
from unmask.studies.credit.report import credit_data, write_credit
from unmask.studies.credit.rules import CreditFunction, checked_rule, own_rule
from unmask.studies.credit.study import DRAWS, CreditAudit, measure_credit
from unmask.training.api import keyword_overrides
from unmask.util.files import check_folder


def credit_audit(
    task: str = "sudoku",
    model: str | Path = "tiny-two",
    rule: CreditFunction | str | Path | None = None,
    draws: int = DRAWS,
    out: str | Path | None = None,
    **config: Any,
) -> CreditAudit:
    """Judge credit rules by the true credit of every step, as `unmask audit MODEL --credit` does.

    rule     your own: a function Trace -> weights (B, L), or a file with a function `credit`; the last of the result
    draws    completions of each state in each half
    out      a folder for credit.json, credit.png and the rollouts, which `unmask view` shows with their values
    config   keys of the configuration: prompts=8, group=8, seed=1, rollout={"steps": 16}
    """
    if out is not None:
        check_folder(Path(out))
    check_model_name(str(model))
    named = {"task": task, "model": str(model), "method": "diffu_grpo", "with": []}
    settings = read_config(DEMO, keyword_overrides({"prompts": 8, "group": 8} | config), **named)
    own = {}
    if callable(rule):
        own[getattr(rule, "__name__", "your rule")] = checked_rule(rule, getattr(rule, "__name__", "your rule"))
    elif rule is not None:
        own[str(rule)] = own_rule(Path(rule))
    measured = measure_credit(settings, own, draws)
    if out is not None:
        write_credit(Path(out), credit_data(measured), measured)
    return measured.audit
