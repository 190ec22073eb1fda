"""The state from which an interrupted run is resumed."""

import warnings
from collections.abc import Mapping
from pathlib import Path

from unmask.config.keys import FINGERPRINT, RESOLVED
from unmask.models import Model
from unmask.models.known import EMBEDDED
from unmask.training.run.file_names import FINISHED, LAST, STARTS
from unmask.training.run.provenance import provenance
from unmask.training.run.state import State, newest_state
from unmask.util.parsing import read_keys


def last_state(folder: Path, user_files: Mapping[str, str], config: str = "config.yaml") -> State | None:
    """The last saved state, None if nothing has been saved; ValueError if the run cannot be resumed to the same result.
    `user_files` are the user's files with their current digests."""
    if (folder / FINISHED).is_file():
        raise ValueError(f"{folder} is finished: there is nothing to resume")
    state, unusable = newest_state(folder / "state")
    if state is None and (unusable or (folder / LAST).exists()):
        why = unusable[0] if unusable else "no saved training state"
        raise ValueError(f"{folder} cannot be resumed: {why}. To continue from its weights, pass --model {folder}")
    for problem in unusable:
        warnings.warn(f"{problem}: resuming from an earlier one", stacklevel=3)
    if state is not None:
        _check_provenance(folder, state.facts["made_by"], provenance(folder, user_files, config), config)
    return state


def check_start(folder: Path, policy: Model, config: str = "config.yaml") -> None:
    """ValueError if the run started from other weights than these. Runs of 0.2 and before did not record that."""
    content, now = read_keys(folder / config), policy.fingerprint
    recorded = content.get(RESOLVED, {}).get(FINGERPRINT, now)
    if recorded == now:
        return
    name = content.get("model", policy.home)
    remedy = f"install the version of unmask in {folder / STARTS}" if name in EMBEDDED else "restore them"
    raise ValueError(
        f"{folder} cannot be resumed: the weights of the model {name} have changed since the run started (fingerprint "
        f"{str(recorded)[:12]} then, {now[:12]} now): {remedy}, or start a new run with {folder / config}"
    )


def _check_provenance(folder: Path, before: Mapping[str, str], now: Mapping[str, str], config: str) -> None:
    if before[config] != now[config]:
        raise ValueError(
            f"{folder / config} has changed since the state was saved: restore it, or train its weights in a new run: "
            f"unmask train {folder / config} --model {folder}"
        )
    for what in now:
        if before.get(what, now[what]) != now[what]:
            problem = f"{what} was {before[what]} and is {now[what]}: results may be rounded differently"
            if what.endswith(".py"):
                problem = f"{what} has changed since the state was saved: the new file is used from here"
            warnings.warn(problem, stacklevel=4)
