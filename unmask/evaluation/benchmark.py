"""A task's score under a named protocol, line by line, with a card that says how each number was measured.

Numbers compare only where the cards agree: `unmask eval MODEL --task gsm8k --protocol d1 --lengths 128,256,512`.
"""

import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from unmask.core.options import RewardConfig
from unmask.core.shapes import GIVEN, NEVER
from unmask.core.token_sampling import TokenSampling
from unmask.core.trace import Trace
from unmask.evaluation.evaluate import Proportion, pass_shares
from unmask.evaluation.grade import Graded, summary
from unmask.models import Model
from unmask.rollout.cache import Cache
from unmask.rollout.decoding import Decoding
from unmask.rollout.sample import canvas, completions, row_seeds, sample_in_turn
from unmask.tasks.scoring import RewardFailure, failure_summary, grades, score
from unmask.tasks.task import ProtocolDecoding, Row, Task
from unmask.util.micro_batch import MicroBatch
from unmask.util.versions import versions


@dataclass(frozen=True)
class Bench:
    """What all lines of a table have in common."""

    policy: Model
    rows: Sequence[Row]
    device: str = "cpu"
    samples: int = 0
    """Sampled completions of each problem, for pass@k; 0: none."""
    sampling: TokenSampling = TokenSampling()
    """What they are sampled from."""
    seed: int = 0
    reward: RewardConfig | None = None
    """What a verdict that cannot be had does, of a task of one's own."""


@dataclass(frozen=True)
class Case:
    """A line before it is measured: the task as it is asked, and how answers are made."""

    task: Task
    how: Decoding
    batch: MicroBatch
    wording: str = ""


@dataclass(frozen=True)
class ScoreLine:
    case: Case
    graded: Graded
    passes: float
    """Forward passes that a problem needed, mean."""
    tokens: float
    """Tokens before the end of an answer, mean."""
    seconds: float
    """For a problem, mean."""
    card: dict[str, Any]
    texts: tuple[str, ...]
    sampled: dict[int, Proportion] = field(default_factory=dict)
    """pass@k of sampled completions."""
    failures: tuple[RewardFailure, ...] = ()
    """Completions, greedy or sampled, whose reward failed: they count as wrong."""

    @property
    def score(self) -> Proportion:
        return self.graded.score

    def data(self) -> dict[str, Any]:
        named = {"wording": self.case.wording} if self.case.wording else {}
        shape = {"length": self.case.how.length, "steps": self.case.how.steps}
        figures = {"passes": self.passes, "tokens": self.tokens, "seconds": self.seconds, "errors": len(self.failures)}
        sampled = {f"pass@{k}": share._asdict() for k, share in self.sampled.items()}
        beside = {name: share._asdict() for name, share in self.graded.beside.items()}
        value, low, high = self.score
        scores = {"score": value, "low": low, "high": high, **beside}
        return {**named, **shape, **scores, **figures, **sampled, "card": self.card}


def decoding_by(protocol: ProtocolDecoding, length: int, cache: Cache | None = None) -> Decoding:
    """How a protocol makes answers of a length; where its blocks do not divide the length, in one block."""
    return Decoding(
        length,
        protocol.steps(length),
        protocol.block if length % protocol.block == 0 else length,
        sampling=TokenSampling(temperature=0.0),
        cache=cache,
        attend_padding=protocol.attend_padding,
        stops=protocol.stops,
    )


def cases_by_length(task: Task, lengths: Sequence[int], cache: Cache | None, batch: MicroBatch) -> list[Case]:
    """The field's table: the task as its protocol has it, at every length."""
    most = task.decoding.batch
    return [
        Case(task, decoding_by(task.decoding, length, cache), batch if most is None else MicroBatch(most(length)))
        for length in lengths
    ]


def hashed(value: Any) -> str:
    """The first twelve digits of a hash of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


def prompt_hash(task: Task, row: Row) -> str:
    """Of what the model is given for a row. On a task's example, where it has one, it depends on the wording alone."""
    return hashed([task.system, task.prompt(row), task.prefill])


def sampled_law(bench: Bench, case: Case) -> TokenSampling:
    """What completions are sampled from: guided as the case is."""
    return replace(bench.sampling, guidance=case.how.sampling.guidance)


def card(bench: Bench, case: Case) -> dict[str, Any]:
    """How a number was measured: everything that has been seen to change one."""
    policy, task, how, rows = bench.policy, case.task, case.how, bench.rows
    shown, law = task.about.example or rows[0], {**asdict(sampled_law(bench, case)), "seed": bench.seed}
    sampled = f"{bench.samples} at " + ", ".join(f"{name} {value}" for name, value in law.items())
    kept = "none" if how.cache is None else f"{'dual' if how.cache.suffix else 'prefix'}, refresh {how.cache.refresh}"
    return {
        "model": policy.home,
        "task": task.name,
        "protocol": task.protocol,
        "prompt": prompt_hash(task, shown),
        "template": hashed(task.prompt_ids(policy.tokenizer, shown)),
        "split": hashed(list(rows)),
        "problems": len(rows),
        **task.facts(rows),
        "length": how.length,
        "steps": how.steps,
        "block": how.block,
        "order": how.order.__name__,
        "schedule": how.schedule.__name__ if how.threshold is None else f"threshold {how.threshold:g}",
        "temperature": 0.0,
        "sampled": sampled if bench.samples else "none",
        "guidance": how.sampling.guidance,
        "cache": kept,
        "ends": "at the end token" if how.stops else "never",
        "batch": case.batch.size,
        "padding": "attended" if how.attend_padding else "masked",
        "dtype": str(next(policy.parameters()).dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(bench.device) if bench.device.startswith("cuda") else bench.device,
        "versions": versions(),
    }


def passes_made(trace: Trace) -> list[int]:
    """The forward passes that each row needed: the steps it took part in until it was done, twice over if guided."""
    each = 2 if trace.sampling.guidance else 1
    return [each * len({*steps} - {GIVEN, NEVER}) for steps in trace.step_BL.tolist()]


def tokens_said(trace: Trace, eos_id: int) -> list[int]:
    """The tokens that each row wrote before its first end token."""
    ended_BL = (trace.tokens_BL == eos_id) & trace.canvas_BL
    return (trace.filled_BL & (ended_BL.long().cumsum(-1) == 0)).sum(-1).tolist()


def measure(bench: Bench, case: Case) -> ScoreLine:
    """The task's greedy score, by its own grader, and with samples its pass@k."""
    task, rows, how = case.task, bench.rows, case.how.greedy()
    if not rows:
        raise ValueError(f"{task.name}: there are no problems to evaluate on")
    prompts = [task.prompt_ids(bench.policy.tokenizer, row) for row in rows]
    start, texts, passes, counts = time.perf_counter(), list[str](), list[int](), list[int]()
    for trace in _traces(bench, case, prompts, how, row_seeds(bench.seed, len(rows))):
        texts += completions(bench.policy, trace, how.length)
        passes += passes_made(trace)
        counts += tokens_said(trace, bench.policy.eos_id)
    seconds = (time.perf_counter() - start) / len(rows)
    found, failures = grades(task, rows, texts, bench.reward)
    sampled, more = _sampled(bench, case, prompts) if bench.samples else ({}, [])
    return ScoreLine(
        case=case,
        graded=summary(task, rows, texts, found),
        passes=sum(passes) / len(rows),
        tokens=sum(counts) / len(rows),
        seconds=seconds,
        card=card(bench, case),
        texts=tuple(texts),
        sampled=sampled,
        failures=(*failures, *more),
    )


def _sampled(bench: Bench, case: Case, prompts: list[list[int]]) -> tuple[dict[int, Proportion], list[RewardFailure]]:
    """pass@k, every problem once a round: so are the batches those of the greedy answers."""
    task, rows, how = case.task, list(bench.rows), replace(case.how, sampling=sampled_law(bench, case))
    seed_PN = row_seeds(bench.seed, len(rows) * bench.samples).view(len(rows), bench.samples)
    hits_P, failures = torch.zeros(len(rows), dtype=torch.long), list[RewardFailure]()
    for seed_P in seed_PN.unbind(1):
        traces = _traces(bench, case, prompts, how, seed_P)
        texts = [text for trace in traces for text in completions(bench.policy, trace, how.length)]
        found = score(task, rows, texts, bench.reward)
        hits_P += found.solved_B
        failures += found.failures
    return pass_shares(hits_P, bench.samples), failures


def _traces(bench: Bench, case: Case, prompts: list[list[int]], how: Decoding, seed_P: torch.Tensor) -> Iterator[Trace]:
    return sample_in_turn(bench.policy, prompts, seed_P.to(bench.device), how, case.batch)


def numbers_in(text: str, option: str, example: str) -> list[int]:
    """The numbers that a command line names, in their order."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option}: {text!r} is not a list of numbers such as {example}") from None
    if min(found) < 1:
        raise ValueError(f"{option}: {min(found)} is not a number from 1 on")
    return found


def check_place(path: Path | None) -> None:
    """ValueError if there is no folder to write a file in."""
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} to write {path.name} in")
    if path is not None and path.is_dir():
        raise ValueError(f"{path} is a folder; name a file to write")


def check_prompts(bench: Bench, case: Case) -> None:
    """ValueError for rows that the model cannot be asked."""
    prompts = [case.task.prompt_ids(bench.policy.tokenizer, row) for row in bench.rows]
    canvas(prompts, case.how.length, bench.policy, "cpu")


def measured(bench: Bench, cases: Sequence[Case], column: str, quiet: bool) -> list[ScoreLine]:
    """Every case's line, printed as it comes, the card of the first behind them; `column` says what they differ in."""
    found, task = list[ScoreLine](), cases[0].task
    for case in cases:
        check_prompts(bench, case)
    wide = max(len(column), *(len(_told(case, column)) for case in cases)) + 2
    if not quiet:
        passes = "".join(f" {name:>8}" for name in task.other_scores)
        passes += "".join(f" {f'pass@{k}':>8}" for k in pass_shares(torch.zeros(1), bench.samples))
        print(f"{task.name}, protocol {task.protocol}, {len(bench.rows)} problems, greedy score, 95 % intervals")
        print(f"{column:>{wide}} {'score':>22}{passes} {'passes':>8} {'tokens':>8} {'seconds':>8}")
    for case in cases:
        line = measure(bench, case)
        found.append(line)
        if line.failures:
            print(f"{column} {_told(case, column)}: {failure_summary(line.failures)}", file=sys.stderr, flush=True)
        if not quiet:
            shares = [*line.graded.beside.values(), *line.sampled.values()]
            passes = "".join(f" {100 * share.value:>6.1f} %" for share in shares)
            figures = f"{line.passes:>8.1f} {line.tokens:>8.1f} {line.seconds:>8.3f}"
            print(f"{_told(case, column):>{wide}} {line.score!s:>22}{passes} {figures}", flush=True)
    if not quiet:
        shown = {key: value for key, value in found[0].card.items() if key not in ("length", "steps", "versions")}
        print("card: " + ", ".join(f"{key} {value}" for key, value in shown.items()))
    return found


def _told(case: Case, column: str) -> str:
    return str({"length": case.how.length, "steps": case.how.steps, "wording": case.wording}[column])


def written(lines: Sequence[ScoreLine], data: Sequence[dict[str, Any]], out: Path | None, as_json: bool) -> None:
    """Lines as data: printed if so wished, and with `out` written there, answers included."""
    if as_json:
        print(json.dumps(list(data), indent=2))
    if out is not None:
        whole = [{**about, "answers": list(line.texts)} for about, line in zip(data, lines, strict=True)]
        out.write_text(json.dumps(whole, indent=1) + "\n")
