"""What RL gains from a start with two behaviours: docs/studies/choosing.md. One stage after the other:

    unmask pretrain benchmarks/starts/NAME.yaml --out runs/starts/NAME --device cuda        # every file there
    python benchmarks/choosing.py rates  --device cuda --jobs 22    # a learning rate for each line
    python benchmarks/choosing.py long   --device cuda --jobs 22    # every line, 300,000 forwards
    python benchmarks/choosing.py signs  --device cuda --jobs 22    # five likelihoods, five ways to use the signs
    python benchmarks/choosing.py worlds --device cuda --jobs 22    # other tasks, starts, orders and sizes
    python benchmarks/choosing.py worlds --only "random order" ...  # one part of a stage
    python benchmarks/choosing.py tables > tables.md

Every stage writes benchmarks/results/choosing_STAGE.json; a part of a stage replaces its entry there. Forwards are
those spent. A line is written as for `unmask compare --methods`. With many processes on one GPU, start the CUDA MPS
daemon first.
"""

import argparse
import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from unmask.studies.compare.cells import SharedSettings, cost_of, method_grid
from unmask.studies.compare.compare import Comparison, compare
from unmask.util.statistics import t_interval, t_within

RESULTS = Path(__file__).parent / "results"
RATES = (1e-4, 2e-4, 4e-4)
OLD = "anchor=0.5:kl=0.05:negative=1"
"""DACA and SML as in 0.1.0 and 0.2.0."""

BASES = ("diffu_grpo", "unigrpo", "coupled_grpo", "wd1", "spg", "gspo", "espo", "reinforce_pp", "agrpo")
PLUGINS = {"sml": "sml:anchor=0", "dps": "dps", "daca": "daca:anchor=0", "daca 0.1": f"daca:{OLD}", "dispo": "dispo"}
LINES: dict[str, str] = {
    **{base: base for base in BASES},
    **{
        f"{base}+{name}": f"{base}+{plugin}"
        for base in ("diffu_grpo", "coupled_grpo", "spg")
        for name, plugin in PLUGINS.items()
    },
    "agrpo+dps": "agrpo+dps",
    "agrpo+dispo": "agrpo+dispo",
    "diffu_grpo+daca, exact negative": "diffu_grpo+daca:anchor=0:exact_negative=1",
    "raft, SML": "diffu_grpo:advantage=correct_only+sml:anchor=0",
    "raft, fully masked": "diffu_grpo:kl=0:prompt_masking=0:advantage=correct_only",
    "own samples, SML": "diffu_grpo:advantage=every_sample+sml:anchor=0",
    "diffu_grpo, no KL": "diffu_grpo:kl=0",
    "diffu_grpo, whole prompt": "diffu_grpo:prompt_masking=0",
    "diffu_grpo+positive, no KL": "diffu_grpo:kl=0+positive",
    "diffu_grpo+dps, shuffled": "diffu_grpo+dps:shuffled=true",
    "agrpo+dps, shuffled": "agrpo+dps:shuffled=true",
}

LIKELIHOODS = {
    "fully masked": ("diffu_grpo:kl=0:prompt_masking=0", "positive"),
    "mask pair": ("diffu_grpo", "sml:strata=2:anchor=0"),
    "SML": ("diffu_grpo", "sml:anchor=0"),
    "ELBO": ("unigrpo:kl=0:advantage=group_mean", "positive"),
    "visited": ("agrpo", "positive"),
}
"""A base, and the plug-in that weighs its negative advantages."""
SIGNS = {"both": 1.0, "0.3": 0.3, "0.1": 0.1, "positive": 0.0}
"""The weight of negative advantages."""

WORLDS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "countdown": ("tiny-two", "countdown", ()),
    "sharpening": ("tiny", "sudoku", ()),
    "mixed": ("runs/starts/mixed", "sudoku", ()),
    "60 % careless": ("runs/starts/two_60", "sudoku", ()),
    "pre-training seed 1": ("runs/starts/two_seed1", "sudoku", ()),
    "pre-training seed 2": ("runs/starts/two_seed2", "sudoku", ()),
    "2 M parameters": ("runs/starts/two_2m", "sudoku", ()),
    "arithmetic": (
        "runs/starts/minis_two",
        "arithmetic",
        ("arithmetic.terms=2", "arithmetic.largest=99", "arithmetic.signs=+"),
    ),
    "json_mini": ("runs/starts/minis_two", "json_mini", ("json_mini.fields=2",)),
    "last row, blocks of a row": ("runs/starts/last_row", "sudoku", ("rollout.block=4",)),
    "careless rows": ("runs/starts/rows", "sudoku", ()),
    "random order": ("tiny-two", "sudoku", ("rollout.order=random",)),
    "blocks of a row": ("tiny-two", "sudoku", ("rollout.block=4",)),
}
"""The start, the task and its settings."""
OWN_RATES = ("countdown", "2 M parameters", "arithmetic", "json_mini")
"""Worlds of another task or size. A rate for each line is chosen there; the others take that of tiny-two's Sudoku."""
WORLD_LINES = (
    "diffu_grpo",
    "coupled_grpo",
    "spg",
    "agrpo",
    "diffu_grpo+daca 0.1",
    "diffu_grpo+daca",
    "diffu_grpo+daca, exact negative",
    "diffu_grpo+positive, no KL",
    "raft, SML",
)


def sign_lines() -> dict[str, str]:
    lines = {}
    for likelihood, (base, plugin) in LIKELIHOODS.items():
        for name, negative in SIGNS.items():
            lines[f"{likelihood}, {name}"] = f"{base}+{plugin}:negative={negative}"
        correct = base.replace(":advantage=group_mean", "") + ":advantage=correct_only"
        lines[f"{likelihood}, correct"] = correct + (f"+{plugin}" if plugin != "positive" else "")
    return lines


class Study:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.out, self.device, self.jobs = arguments.out, arguments.device, arguments.jobs

    def settings(self, model: str, task: str, *more: str) -> SharedSettings:
        return SharedSettings(overrides=(f"model={model}", *more), task=task, device=self.device)

    def run(self, name: str, lines: dict[str, str], settings: SharedSettings, **plan: Any) -> dict[str, Any]:
        """Train the lines; the curve of every seed, by the name of the line."""
        comparison = Comparison(list(lines.values()), ["none"], settings=settings, **plan)
        results = compare(comparison, self.out / name.replace(" ", "_"), self.jobs)
        runs = {}
        for label, cell in zip(lines, results["cells"], strict=True):
            curves = {seed: run["curve"] for seed, run in cell["runs"].items()}
            runs[label] = {"line": lines[label], "curves": curves, "failed": cell["failed"]}
        return {"budget": results["budget"], "problems": results["problems"], "rates": results["rates"], "lines": runs}


def with_options(line: str, *options: str) -> str:
    """A line with further options of its base."""
    base, *plugins = line.split("+")
    return "+".join([":".join([base, *options]), *plugins])


def chosen_rates() -> dict[str, float]:
    rates = json.loads((RESULTS / "choosing_rates.json").read_text())["rates"]
    labels = {spec.label: name for name, spec in zip(LINES, method_grid(list(LINES.values()), ["none"]), strict=True)}
    return {labels[label]: choice["chosen"] for label, choice in rates.items()}


def rates(study: Study) -> dict[str, Any]:
    settings = study.settings("tiny-two", "sudoku", "eval.every=0")
    return study.run("rates", LINES, settings, seeds=1, budget="forwards=4e4", rates=RATES)


def long(study: Study) -> dict[str, Any]:
    """About nine evaluations on the way: the value at 100,000 forwards is interpolated between two of them."""
    settings, lines = study.settings("tiny-two", "sudoku"), {}
    for (name, line), spec in zip(LINES.items(), method_grid(list(LINES.values()), ["none"]), strict=True):
        every = max(1, round(3e5 / cost_of(settings.config(spec)).update / 9))
        lines[name] = with_options(line, f"optimizer.lr={chosen_rates()[name]}", f"eval.every={every}")
    return study.run("long", lines, settings, seeds=5, budget="forwards=3e5")


def signs(study: Study, world: str) -> dict[str, Any]:
    model, task, more = WORLDS.get(world, ("tiny-two", "sudoku", ()))
    settings = study.settings(model, task, "optimizer.lr=2e-4", "eval.every=0", *more)
    return study.run(f"signs {world}", sign_lines(), settings, seeds=3, budget="forwards=1e5")


def worlds(study: Study, world: str) -> dict[str, Any]:
    model, task, more = WORLDS[world]
    settings = study.settings(model, task, "eval.every=0", *more)
    lines, rates, chosen = {name: LINES[name] for name in WORLD_LINES}, RATES, chosen_rates()
    if world not in OWN_RATES:
        lines = {name: with_options(line, f"optimizer.lr={chosen[name]}") for name, line in lines.items()}
        rates = ()
    return study.run(f"worlds {world}", lines, settings, seeds=5, budget="forwards=1e5", rates=rates)


STAGES_IN_PARTS = {signs: ("choosing", "mixed", "sharpening", "careless rows"), worlds: tuple(WORLDS)}


def value_at(curve: list[dict[str, float]], forwards: float, measure: str) -> float:
    """A measure at a number of forwards, on the line between the two evaluations around it."""
    for before, after in pairwise(curve):
        if before["forwards"] <= forwards <= after["forwards"]:
            share = (forwards - before["forwards"]) / (after["forwards"] - before["forwards"])
            return before[measure] + share * (after[measure] - before[measure])
    raise ValueError(f"no evaluation after {forwards:,.0f} forwards")


def percent(values: list[float]) -> str:
    """The mean with Student's 95 % interval over seeds."""
    mean, low, high = t_interval(values)
    return f"{100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def ends(world: dict[str, Any], line: str, measure: str = "sampled") -> list[float]:
    """A measure at the end of every run of a line, by seed."""
    return [curve[-1][measure] for _, curve in sorted(world["lines"][line]["curves"].items())]


def points(values: list[float], others: list[float]) -> str:
    """The mean of the differences, paired by seed, in points, with Student's 95 % interval."""
    middle, low, high = (100 * x for x in t_interval([a - b for a, b in zip(values, others, strict=True)]))
    return f"{middle:+.1f} [{low:+.1f}, {high:+.1f}]"


def heading(first: str, found: Iterable[str]) -> str:
    """The first two lines of a table with a column for each world."""
    columns = [first, *found]
    return "| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|"


def print_ends(found: dict[str, Any], lines: Iterable[str]) -> None:
    """Every line in every world, sampled and greedy."""
    print("\n" + heading("sampled / greedy", found))
    for line in lines:
        cells = (both([curve[-1] for curve in world["lines"][line]["curves"].values()]) for world in found.values())
        print(f"| {line} | " + " | ".join(cells) + " |")


def print_differences(found: dict[str, Any], pairs: Iterable[tuple[str, str]]) -> None:
    """One line minus another in every world, sampled, and Holm's p-values over all of them."""
    print("\n" + heading("sampled", found))
    p_values = {}
    for line, other in pairs:
        both_ends = {name: (ends(world, line), ends(world, other)) for name, world in found.items()}
        p_values |= {f"{line} - {other}, {name}": paired_p(*pair) for name, pair in both_ends.items()}
        print(f"| {line}, minus {other} | " + " | ".join(points(*pair) for pair in both_ends.values()) + " |")
    print("\nHolm's p below 0.1:", {name: round(p, 4) for name, p in holm(p_values).items() if p < 0.1})


def study_parser(text: str | None, out: str) -> argparse.ArgumentParser:
    """The options that the studies share."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--tables", action="store_true")
    return parser


def holm(p_values: dict[str, float]) -> dict[str, float]:
    """Holm's adjusted p-values."""
    adjusted, largest = {}, 0.0
    for rank, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = largest
    return adjusted


def paired_p(values: list[float], others: list[float]) -> float:
    """The two-sided p-value of Student's test on differences paired by seed."""
    differences = [a - b for a, b in zip(values, others, strict=True)]
    if not any(differences):
        return 1.0
    t = mean(differences) / (stdev(differences) / len(differences) ** 0.5)
    return 1 - t_within(abs(t), len(differences) - 1)


def tables() -> None:
    """Print the tables of docs/studies/choosing.md."""
    lines = json.loads((RESULTS / "choosing_long.json").read_text())["lines"]
    rate = chosen_rates()
    ends = {name: [curve[-1] for curve in line["curves"].values()] for name, line in lines.items()}
    sampled = {name: [end["sampled"] for end in values] for name, values in ends.items()}
    best = max(sampled, key=lambda name: mean(sampled[name]))
    p_values = holm({name: paired_p(sampled[best], values) for name, values in sampled.items() if name != best})
    print("| line | rate | updates | sampled | greedy | pass@4 | sampled at 100,000 | Holm's p against the first |")
    print("|---|---|---|---|---|---|---|---|")
    for name in sorted(sampled, key=lambda name: -mean(sampled[name])):
        curves = list(lines[name]["curves"].values())
        cells = [name, f"{rate[name]:g}", f"{mean(end['updates'] for end in ends[name]):.0f}", percent(sampled[name])]
        cells += [percent([end[measure] for end in ends[name]]) for measure in ("greedy", "pass@4")]
        cells += [f"{100 * mean(value_at(curve, 1e5, 'sampled') for curve in curves):.1f}"]
        cells += [f"{p_values[name]:.2g}" if name in p_values else ""]
        print("| " + " | ".join(cells) + " |")
    print_worlds(json.loads((RESULTS / "choosing_worlds.json").read_text()))
    print_signs(json.loads((RESULTS / "choosing_signs.json").read_text()))


def both(points: list[dict[str, float]]) -> str:
    return " / ".join(f"{100 * mean(point[measure] for point in points):.1f}" for measure in ("sampled", "greedy"))


def print_worlds(worlds: dict[str, Any]) -> None:
    print("\n| sampled / greedy | start | " + " | ".join(WORLD_LINES) + " |\n|---|" + "---|" * (len(WORLD_LINES) + 1))
    for name, world in worlds.items():
        curves = [list(world["lines"][line]["curves"].values()) for line in WORLD_LINES]
        cells = [name, both(curves[0][0][:1]), *(both([curve[-1] for curve in runs]) for runs in curves)]
        print("| " + " | ".join(cells) + " |")


def print_signs(worlds: dict[str, Any]) -> None:
    for name, world in worlds.items():
        print(f"\n| {name} | " + " | ".join([*SIGNS, "correct"]) + " |\n|---|" + "---|" * (len(SIGNS) + 1))
        for likelihood in LIKELIHOODS:
            runs = [world["lines"][f"{likelihood}, {sign}"]["curves"].values() for sign in (*SIGNS, "correct")]
            print(f"| {likelihood} | " + " | ".join(both([curve[-1] for curve in curves]) for curves in runs) + " |")


def main() -> None:
    stages = {stage.__name__: stage for stage in (rates, long, *STAGES_IN_PARTS)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=[*stages, "tables"])
    parser.add_argument("--only", nargs="+", metavar="PART", help="parts of signs or worlds")
    parser.add_argument("--out", type=Path, default=Path("runs/choosing"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int)
    arguments = parser.parse_args()
    if arguments.stage == "tables":
        return tables()
    stage, study = stages[arguments.stage], Study(arguments)
    path = RESULTS / f"choosing_{arguments.stage}.json"
    if stage not in STAGES_IN_PARTS:
        path.write_text(json.dumps(stage(study)) + "\n")
        return None
    found = json.loads(path.read_text()) if arguments.only and path.exists() else {}
    for part in arguments.only or STAGES_IN_PARTS[stage]:
        found[part] = stage(study, part)
        path.write_text(json.dumps({name: found[name] for name in STAGES_IN_PARTS[stage] if name in found}) + "\n")


if __name__ == "__main__":
    main()
