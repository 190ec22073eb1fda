"""Results of `unmask eval` on the disk: scores, cards, and every graded completion, in one JSON file.

The file is a list with one line of a table each; an evaluation without a table has one line. `unmask view` opens it.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unmask.evaluation.benchmark import Benchmark, BenchmarkCase, BenchmarkResult, card
from unmask.evaluation.evaluate import Completions, Evaluation
from unmask.util.trace_lines import results_file


def write_results(out: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Write the lines to a .json file, or to a folder, which is made."""
    path = results_file(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(list(lines), indent=1) + "\n")


def table_line(data: dict[str, Any], result: BenchmarkResult) -> dict[str, Any]:
    """A line of a table with its prompts, greedy answers, their points, and samples."""
    rounds = [_graded(each) for each in result.rounds]
    return {
        **data,
        "prompts": list(result.prompts),
        "answers": list(result.texts),
        "points": [grade.points / grade.out_of if grade.out_of else None for grade in result.report.grades],
        "samples": [list(samples) for samples in zip(*rounds, strict=True)],
    }


def evaluation_line(
    bench: Benchmark, case: BenchmarkCase, evaluation: Evaluation, sampled: Completions, greedy: Completions
) -> dict[str, Any]:
    """An evaluation without a table, as a line of one: its score is greedy."""
    value, low, high = evaluation.greedy
    samples, count = _graded(sampled), evaluation.samples
    return {
        "length": case.decoding.length,
        "steps": case.decoding.steps,
        "score": value,
        "low": low,
        "high": high,
        "errors": len(evaluation.failures),
        **{f"pass@{k}": share._asdict() for k, share in evaluation.passes.items()},
        "mixed": None if evaluation.mixed is None else evaluation.mixed._asdict(),
        "reward": evaluation.reward,
        "behaviours": evaluation.behaviours,
        "card": card(bench, case),
        "prompts": [case.task.prompt(row) for row in bench.rows],
        "answers": greedy.texts,
        "points": greedy.scores.solved_B.double().tolist(),
        "samples": [samples[start : start + count] for start in range(0, len(samples), count)],
    }


def _graded(completions: Completions) -> list[dict[str, Any]]:
    texts, scores = completions
    graded = zip(texts, scores.reward_B.tolist(), scores.solved_B.tolist(), strict=True)
    return [{"text": text, "reward": reward, "solved": solved} for text, reward, solved in graded]
