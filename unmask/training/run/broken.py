"""An update that was not finite, stored for replay (`unmask.replay`): RUN/broken/STEP/.

tensors.safetensors   the traces, the terms of the loss, and the weights before the update, also of a teacher
batch.json            the step and the inner step, its metrics, and every completion with its problem and reward
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple

from safetensors.torch import load_file
from torch import Tensor

from unmask.core.method import Method
from unmask.core.probes import Probes
from unmask.core.token_sampling import TokenSampling
from unmask.core.trace import Trace
from unmask.training.batch import Batch
from unmask.training.run.state import TEACHER, WEIGHT
from unmask.training.update import BrokenUpdate, LossTerm
from unmask.util.files import save_tensors

FOLDER, TENSORS, FACTS = "broken", "tensors.safetensors", "batch.json"
PLAIN = bool | int | float | str
RENAMED = {"dead_when_idle": "skip_zero_advantage"}
"""Fields of a LossTerm under the names that 0.1 wrote."""


class StoredUpdate(NamedTuple):
    """The content of a folder under broken/."""

    step: int
    inner_step: int
    metrics: dict[str, float]
    rows: list[dict[str, Any]]
    traces: list[Trace]
    terms: list[LossTerm]
    weights: dict[str, Tensor]
    teacher: dict[str, Tensor]
    """Empty without a teacher."""


def store_broken(run: Path, step: int, batch: Batch, broken: BrokenUpdate, state: Mapping[str, Tensor]) -> Path:
    """Write an update, and the weights among a state's tensors (state.state_tensors), to RUN/broken/STEP."""
    final, aside = run / FOLDER / str(step), run / FOLDER / f".{step}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    traces = [trace for trace in batch.rollouts if trace is not None]
    kinds = (f"{WEIGHT} ", f"{TEACHER} ")
    tensors = {key.replace(" ", "/", 1): value for key, value in state.items() if key.startswith(kinds)}
    for number, trace in enumerate(traces):
        seen = {f"seen/{name}": value for name, value in trace.seen.items()}
        tensors |= {f"trace/{number}/{name}": value for name, value in (_fields(trace, Tensor) | seen).items()}
    terms = []
    for number, term in enumerate(broken.terms):  # "part" is what 0.1 called a term
        probes = {f"probes/{name}": value for name, value in _fields(term.probes, Tensor).items()}
        tensors |= {f"part/{number}/{name}": value for name, value in (_fields(term, Tensor) | probes).items()}
        index = next(i for i, trace in enumerate(traces) if trace is term.probes.trace)
        terms.append({**_fields(term, PLAIN), "visited": term.probes.visited, "trace": index})
    completions = zip(batch.rows, batch.texts, batch.reward_B.tolist(), strict=True)
    facts = {
        "step": step,
        "turn": broken.inner_step,
        "error": str(broken.error),
        "metrics": {name: str(value) for name, value in broken.error.metrics.items()},  # JSON has no nan
        "traces": [{**_fields(trace, PLAIN), "law": asdict(trace.sampling)} for trace in traces],
        "parts": terms,
        "rows": [{"row": row, "completion": text, "reward": reward} for row, text, reward in completions],
    }
    save_tensors({name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}, aside / TENSORS)
    (aside / FACTS).write_text(json.dumps(facts, indent=1) + "\n")
    shutil.rmtree(final, ignore_errors=True)
    return aside.rename(final)


def read_broken(folder: Path, method: Method, device: str = "cpu") -> StoredUpdate:
    """Read what `store_broken` wrote; the method supplies the objectives."""
    if not (folder / FACTS).is_file():
        raise ValueError(f"{folder} is not a stored update: it has no {FACTS}. Pass RUN/{FOLDER}/STEP")
    facts, tensors = json.loads((folder / FACTS).read_text()), load_file(folder / TENSORS, device)

    def under(prefix: str) -> dict[str, Tensor]:
        return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}

    traces = []
    for number, plain in enumerate(facts["traces"]):
        values: dict[str, Any] = {name: v for name, v in under(f"trace/{number}/").items() if "/" not in name}
        seen = under(f"trace/{number}/seen/")
        sampling = TokenSampling(**plain.pop("law"))
        traces.append(Trace(**{**plain, **values, "sampling": sampling, "seen": seen}))
    terms = [_term(plain, traces, under(f"part/{n}/"), method) for n, plain in enumerate(facts["parts"])]
    metrics = {name: float(value) for name, value in facts["metrics"].items()}
    weights, teacher = under(f"{WEIGHT}/"), under(f"{TEACHER}/")
    return StoredUpdate(facts["step"], facts["turn"], metrics, facts["rows"], traces, terms, weights, teacher)


def _term(plain: dict[str, Any], traces: Sequence[Trace], tensors: dict[str, Tensor], method: Method) -> LossTerm:
    source = next(term for term in method.terms if term.label == plain["label"])
    probe_tensors: dict[str, Any] = {key.removeprefix("probes/"): value for key, value in tensors.items() if "/" in key}
    probes = Probes(trace=traces[plain["trace"]], visited=plain["visited"], **probe_tensors)
    values: dict[str, Any] = {key: value for key, value in tensors.items() if "/" not in key}
    rest = {RENAMED.get(key, key): value for key, value in plain.items() if key not in ("visited", "trace")}
    functions = {name: getattr(source, name) for name in ("objective", "divergence", "cross_entropy")}
    return LossTerm(probes=probes, **functions, **values, **rest)


def _fields(thing: Trace | Probes | LossTerm, kinds: type | UnionType) -> dict[str, Any]:
    """The fields of some types."""
    values = {field.name: getattr(thing, field.name) for field in fields(thing)}
    return {name: value for name, value in values.items() if isinstance(value, kinds)}
