"""A task's score under a named protocol, with a card that says how each number was measured.

Numbers are comparable only if their cards agree: `unmask eval MODEL --task gsm8k --protocol d1 --lengths 128,256,512`.
"""

import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from unmask.core.options import RewardConfig
from unmask.core.shapes import GIVEN, NEVER
from unmask.core.token_sampling import TokenSampling
from unmask.core.trace import Trace
from unmask.evaluation.evaluate import Completions, pass_shares
from unmask.evaluation.grade import GradeReport, grade_report
from unmask.models import Model
from unmask.rollout.cache import CacheSetting
from unmask.rollout.decoding import Decoding
from unmask.rollout.sample import canvas, completions, row_seeds, sample_in_turn
from unmask.tasks.scoring import RewardFailure, failure_summary, grades, score
from unmask.tasks.task import ProtocolDecoding, Row, Task
from unmask.util.micro_batch import MicroBatch
from unmask.util.statistics import Proportion
from unmask.util.versions import versions


@dataclass(frozen=True)
class Benchmark:
    """The settings that all lines of a table share."""

    policy: Model
    rows: Sequence[Row]
    device: str = "cpu"
    samples: int = 0
    """Sampled completions of each problem, for pass@k; 0: none."""
    sampling: TokenSampling = TokenSampling()
    """The distribution they are sampled from."""
    seed: int = 0
    reward: RewardConfig | None = None
    """What to do if the reward of a user's own task fails."""


@dataclass(frozen=True)
class BenchmarkCase:
    """One line of a table before it is measured: the task with its prompt, and the decoding."""

    task: Task
    decoding: Decoding
    micro_batch: MicroBatch
    variant: str = ""
    """The name of the prompt variant."""


@dataclass(frozen=True)
class BenchmarkResult:
    case: BenchmarkCase
    report: GradeReport
    passes: float
    """Mean number of forward passes for a problem."""
    tokens: float
    """Mean number of tokens before the end of an answer."""
    seconds: float
    """Mean time for a problem."""
    card: dict[str, Any]
    prompts: tuple[str, ...]
    texts: tuple[str, ...]
    sampled: dict[int, Proportion] = field(default_factory=dict)
    """pass@k of sampled completions."""
    failures: tuple[RewardFailure, ...] = ()
    """Completions, greedy or sampled, whose reward failed: they count as wrong."""
    rounds: tuple[Completions, ...] = ()
    """The sampled completions: one of every problem a round."""

    @property
    def score(self) -> Proportion:
        return self.report.score

    def data(self) -> dict[str, Any]:
        variant = {"wording": self.case.variant} if self.case.variant else {}
        shape = {"length": self.case.decoding.length, "steps": self.case.decoding.steps}
        figures = {"passes": self.passes, "tokens": self.tokens, "seconds": self.seconds, "errors": len(self.failures)}
        sampled = {f"pass@{k}": share._asdict() for k, share in self.sampled.items()}
        others = {name: share._asdict() for name, share in self.report.other_scores.items()}
        value, low, high = self.score
        scores = {"score": value, "low": low, "high": high, **others}
        return {**variant, **shape, **scores, **figures, **sampled, "card": self.card}


def protocol_decoding(protocol: ProtocolDecoding, length: int, cache: CacheSetting = "auto") -> Decoding:
    """The decoding of a protocol at a length; in one block if the protocol's blocks do not divide the length."""
    return Decoding(
        length,
        protocol.steps(length),
        protocol.block if length % protocol.block == 0 else length,
        sampling=TokenSampling(temperature=0.0),
        cache=cache,
        attend_padding=protocol.attend_padding,
        stops=protocol.stops,
    )


def cases_by_length(
    task: Task, lengths: Sequence[int], cache: CacheSetting, micro_batch: MicroBatch
) -> list[BenchmarkCase]:
    """The usual table of papers: the task under its protocol, at every length."""
    largest = task.decoding.batch
    sizes = [micro_batch if largest is None else MicroBatch(largest(length)) for length in lengths]
    decodings = [protocol_decoding(task.decoding, length, cache) for length in lengths]
    return [BenchmarkCase(task, decoding, size) for decoding, size in zip(decodings, sizes, strict=True)]


def short_hash(value: Any) -> str:
    """The first twelve hex digits of a hash of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


def prompt_hash(task: Task, row: Row) -> str:
    """A hash of the model's input for a row. On a task's example it depends on the wording alone."""
    return short_hash([task.system, task.prompt(row), task.prefill])


def sampling_of(bench: Benchmark, case: BenchmarkCase) -> TokenSampling:
    """The distribution of sampled completions, with the guidance of the case."""
    return replace(bench.sampling, guidance=case.decoding.sampling.guidance)


def card(bench: Benchmark, case: BenchmarkCase) -> dict[str, Any]:
    """How a number was measured: every setting that is known to change it."""
    policy, task, decoding, rows = bench.policy, case.task, case.decoding, bench.rows
    example, settings = task.about.example or rows[0], {**asdict(sampling_of(bench, case)), "seed": bench.seed}
    sampled = f"{bench.samples} at " + ", ".join(f"{name} {value}" for name, value in settings.items())
    cache = decoding.for_policy(policy).used_cache
    return {
        "model": policy.home,
        "task": task.name,
        "protocol": task.protocol,
        "prompt": prompt_hash(task, example),
        "template": short_hash(task.prompt_ids(policy.tokenizer, example)),
        "split": short_hash(list(rows)),
        "problems": len(rows),
        **task.facts(rows),
        "length": decoding.length,
        "steps": decoding.steps,
        "block": decoding.block,
        "order": decoding.order.__name__,
        "schedule": _schedule(decoding),
        "temperature": 0.0,
        "sampled": sampled if bench.samples else "none",
        "guidance": decoding.sampling.guidance,
        "cache": "none" if cache is None else f"{'dual' if cache.suffix else 'prefix'}, refresh {cache.refresh}",
        "ends": "at the end token" if decoding.stops else "never",
        "batch": case.micro_batch.size,
        "padding": "attended" if decoding.attend_padding else "masked",
        "dtype": str(next(policy.parameters()).dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(bench.device) if bench.device.startswith("cuda") else bench.device,
        "versions": versions(),
    }


def forward_passes(trace: Trace) -> list[int]:
    """The forward passes of each row: the steps until it was done, twice that with guidance."""
    each = 2 if trace.sampling.guidance else 1
    return [each * len({*steps} - {GIVEN, NEVER}) for steps in trace.step_BL.tolist()]


def completion_lengths(trace: Trace, eos_id: int) -> list[int]:
    """The tokens of each row before its first end token."""
    ended_BL = (trace.tokens_BL == eos_id) & trace.canvas_BL
    return (trace.filled_BL & (ended_BL.long().cumsum(-1) == 0)).sum(-1).tolist()


def measure(bench: Benchmark, case: BenchmarkCase) -> BenchmarkResult:
    """The task's greedy score by its own grader, and pass@k if there are samples."""
    task, rows, decoding = case.task, bench.rows, case.decoding.greedy()
    if not rows:
        raise ValueError(f"{task.name}: there are no problems to evaluate on")
    prompts = [task.prompt_ids(bench.policy.tokenizer, row) for row in rows]
    start, texts, passes, counts = time.perf_counter(), list[str](), list[int](), list[int]()
    for trace in _traces(bench, case, prompts, decoding, row_seeds(bench.seed, len(rows))):
        texts += completions(bench.policy, trace, decoding.length)
        passes += forward_passes(trace)
        counts += completion_lengths(trace, bench.policy.eos_id)
    seconds = (time.perf_counter() - start) / len(rows)
    task_grades, failures = grades(task, rows, texts, bench.reward)
    rounds = _sample_rounds(bench, case, prompts) if bench.samples else ()
    hits_P = sum((each.scores.solved_B.long() for each in rounds), torch.zeros(len(rows), dtype=torch.long))
    sample_failures = [failure for each in rounds for failure in each.scores.failures]
    return BenchmarkResult(
        case=case,
        report=grade_report(task, rows, texts, task_grades),
        passes=sum(passes) / len(rows),
        tokens=sum(counts) / len(rows),
        seconds=seconds,
        card=card(bench, case),
        prompts=tuple(map(task.prompt, rows)),
        texts=tuple(texts),
        sampled=pass_shares(hits_P, bench.samples),
        failures=(*failures, *sample_failures),
        rounds=rounds,
    )


def _schedule(decoding: Decoding) -> str:
    if decoding.threshold is None:
        return decoding.schedule.__name__
    least = f", at least {decoding.min_per_step} a step" if decoding.min_per_step > 1 else ""
    return f"threshold {decoding.threshold:g}{least}"


def _sample_rounds(bench: Benchmark, case: BenchmarkCase, prompts: list[list[int]]) -> tuple[Completions, ...]:
    """Sampled completions. A round samples every problem once, in the batches of greedy answers."""
    task, rows, decoding = case.task, list(bench.rows), replace(case.decoding, sampling=sampling_of(bench, case))
    seed_PN, rounds = row_seeds(bench.seed, len(rows) * bench.samples).view(len(rows), -1), list[Completions]()
    for seed_P in seed_PN.unbind(1):
        traces = _traces(bench, case, prompts, decoding, seed_P)
        texts = [text for trace in traces for text in completions(bench.policy, trace, decoding.length)]
        rounds.append(Completions(texts, score(task, rows, texts, bench.reward)))
    return tuple(rounds)


def _traces(
    bench: Benchmark, case: BenchmarkCase, prompts: list[list[int]], decoding: Decoding, seed_P: torch.Tensor
) -> Iterator[Trace]:
    return sample_in_turn(bench.policy, prompts, seed_P.to(bench.device), decoding, case.micro_batch)


def parse_numbers(text: str, option: str, example: str) -> list[int]:
    """The numbers of a command line option, in order."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option}: {text!r} is not a list of numbers like {example}") from None
    if min(numbers) < 1:
        raise ValueError(f"{option}: {min(numbers)} is less than 1")
    return numbers


def check_prompts(bench: Benchmark, case: BenchmarkCase) -> None:
    """ValueError if a prompt does not fit the model."""
    prompts = [case.task.prompt_ids(bench.policy.tokenizer, row) for row in bench.rows]
    canvas(prompts, case.decoding.length, bench.policy, "cpu")


def run_benchmark(bench: Benchmark, cases: Sequence[BenchmarkCase], column: str, quiet: bool) -> list[BenchmarkResult]:
    """Measure every case and print its line, then the card of the first. The cases differ in `column`."""
    results, task = list[BenchmarkResult](), cases[0].task
    for case in cases:
        check_prompts(bench, case)
    wide = max(len(column), *(len(_label(case, column)) for case in cases)) + 2
    if not quiet:
        passes = "".join(f" {name:>8}" for name in task.other_scores)
        passes += "".join(f" {f'pass@{k}':>8}" for k in pass_shares(torch.zeros(1), bench.samples))
        print(f"{task.name}, protocol {task.protocol}, {len(bench.rows)} problems, greedy score, 95 % intervals")
        print(f"{column:>{wide}} {'score':>22}{passes} {'passes':>8} {'tokens':>8} {'seconds':>8}")
    for case in cases:
        result = measure(bench, case)
        results.append(result)
        if result.failures:
            print(f"{column} {_label(case, column)}: {failure_summary(result.failures)}", file=sys.stderr, flush=True)
        if not quiet:
            shares = [*result.report.other_scores.values(), *result.sampled.values()]
            passes = "".join(f" {100 * share.value:>6.1f} %" for share in shares)
            figures = f"{result.passes:>8.1f} {result.tokens:>8.1f} {result.seconds:>8.3f}"
            print(f"{_label(case, column):>{wide}} {result.score!s:>22}{passes} {figures}", flush=True)
    if not quiet:
        shared = {key: value for key, value in results[0].card.items() if key not in ("length", "steps", "versions")}
        print("card: " + ", ".join(f"{key} {value}" for key, value in shared.items()))
    return results


def _label(case: BenchmarkCase, column: str) -> str:
    return str({"length": case.decoding.length, "steps": case.decoding.steps, "wording": case.variant}[column])
