"""Tables and figures of the study of a real language model: see language.py."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from choosing import both, holm, paired_p, percent
from language_study import Study

from unmask.util.plots import new_figure


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    print("\n| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")


def points(share: Sequence[float] | None) -> str:
    return "" if share is None else f"{100 * share[0]:.1f}"


def start_rows(adaptation: dict[str, Any]) -> Iterator[list[str]]:
    for update, asked in sorted(adaptation["checkpoints"].items(), key=lambda each: int(each[0])):
        for name, each in asked.items():
            shares = [f"{100 * each['behaviours'].get(kind, 0):.0f}" for kind in ("careful", "careless", "other")]
            yield [update, name, points(each["sampled"]), points(each["greedy"]), points(each["mixed"]), *shares]


def print_rl(name: str, found: dict[str, Any]) -> None:
    """Student's intervals over seeds; Holm's p-values against the line with the highest greedy solve rate."""
    lines = {label: line for label, line in found["lines"].items() if line["curves"]}
    ends = {label: [curve[-1] for _, curve in sorted(line["curves"].items())] for label, line in lines.items()}
    first = next(iter(next(iter(lines.values()))["curves"].values()))[0]
    greedy = {label: [end["greedy"] for end in values] for label, values in ends.items()}
    best = max(greedy, key=lambda label: mean(greedy[label]))
    seeds = {label: set(line["curves"]) for label, line in lines.items()}
    paired = {label: values for label, values in greedy.items()
              if seeds[label] == seeds[best] and len(values) > 1 and label != best}  # fmt: skip
    p_values = holm({label: paired_p(greedy[best], values) for label, values in paired.items()})
    print(
        f"\n{name}, start {found['start']}, {found['problems']} problems, {found['budget']}, {found['seconds']:.0f} s"
    )
    last = ("form", "careful", "careless")
    rows = [["start", "", "", f"{100 * first['sampled']:.1f}", f"{100 * first['greedy']:.1f}", *[""] * (3 + len(last))]]
    for label in sorted(ends, key=lambda label: -mean(greedy[label])):
        gains = [100 * (value - first["greedy"]) for value in greedy[label]]
        runs = lines[label]["training"].values()
        shares = [[mean(run[kind][-8:]) for run in runs if run.get(kind)] for kind in last]
        warned = sorted({warning for run in runs for warning in run["warnings"]})
        rows.append([
            label, lines[label]["line"].partition("optimizer.lr=")[2].partition("+")[0],
            f"{mean(end['updates'] for end in ends[label]):.0f}",
            *([percent([end[kind] for end in ends[label]]) for kind in ("sampled", "greedy")] if len(gains) > 1
              else [f"{100 * ends[label][0][kind]:.1f}" for kind in ("sampled", "greedy")]),
            f"{min(gains):+.1f}", f"{p_values[label]:.2g}" if label in p_values else "",
            *(f"{100 * mean(share):.0f}" if share else "" for share in shares), ", ".join(warned),
        ])  # fmt: skip
    head = ["line", "rate", "updates", "sampled", "greedy", "least gain, greedy", "Holm's p"]
    table([*head, *(f"{kind}, last rollouts" for kind in last), "warnings"], rows)


def tables(study: Study) -> None:
    found = study.read("starts")
    for name, each in found.get("adaptations", {}).items():
        speed = f"{each['minutes']:.1f} minutes, {each['tokens_per_s']:,.0f} tokens a second"
        print(f"\n{name}: {speed}, taught {each['behaviours']}")
        head = ["update", "task", "sampled", "greedy", "samples differ", "careful", "careless", "other"]
        table(head, start_rows(each))
        table(head, start_rows({"checkpoints": each.get("others", {})}))
    for name, start in found.get("chosen", {}).items():
        print(f"\nstart {name}: {start}, sha256 {found.get('hashes', {}).get(name)}")
    for name, world in study.by_world("rates").items():
        lines = world["lines"]
        heads = sorted({rate for each in lines.values() for rate in each["solved"]}, key=float)
        rows = ([line, *(" / ".join(f"{100 * x:.1f}" for x in each["solved"].get(rate, ())) for rate in heads),
                 each["chosen"]] for line, each in lines.items())  # fmt: skip
        table([f"{name}, sampled / greedy", *heads, "chosen"], rows)
    for name, world in study.by_world("rl").items():
        print_rl(name, world)
    for name, models in study.by_world("after").items():
        asked = dict.fromkeys(key for each in models.values() for found in each.values() for key in found
                              if "sampled" in found[key])  # fmt: skip
        rows = ([key, *(over_seeds(seeds, key) for seeds in models.values())] for key in asked)
        table([f"{name}, sampled / greedy", *models], rows)


def over_seeds(seeds: dict[str, Any], key: str) -> str:
    found = [each[key] for each in seeds.values() if key in each]
    flat = [{kind: each[kind][0] for kind in ("sampled", "greedy")} for each in found]
    return both(flat) if flat else ""


def draw(study: Study) -> None:
    """language_NAME.png for every world, language_starts.png and language_values.png."""
    folder = study.given.figures
    folder.mkdir(parents=True, exist_ok=True)
    for name, world in study.by_world("rl").items():
        figure = new_figure(8.5, 3.6)
        assert figure is not None
        left, right = figure.subplots(1, 2)
        for number, line in enumerate(world["lines"].values()):
            runs = list(line["training"].values())
            updates = min((len(run["solved"]) for run in runs), default=0)
            solved, forwards = ([mean(run[key][at] for run in runs) for at in range(updates)]
                                for key in ("solved", "forwards"))  # fmt: skip
            smooth = [100 * mean(solved[at - 7 : at + 1]) for at in range(7, updates)]
            left.plot(forwards[7:], smooth, color=f"C{number}")
            for curve in line["curves"].values():
                gain = [100 * point["greedy"] for point in (curve[0], curve[-1])]
                right.plot([number - 0.1, number + 0.1], gain, ".-", color=f"C{number}")
        left.set(xlabel="forwards spent", ylabel="solved in training, %")
        right.set(ylabel="greedy, before and after, %")
        right.set_xticks(range(len(world["lines"])), list(world["lines"]), rotation=30, ha="right", fontsize=8)
        for number, label in enumerate(right.get_xticklabels()):
            label.set_color(f"C{number}")
        for axes in (left, right):
            axes.grid(alpha=0.3)
        figure.savefig(folder / f"language_{name}.png", dpi=110)
    draw_long(study.by_world("rl"), folder / "language_long_runs.png")
    draw_starts(study.read("starts"), folder / "language_starts.png")
    draw_values(study.by_world("after"), folder / "language_values.png")


def draw_long(worlds: dict[str, Any], path: Path) -> None:
    """Runs with completions of 256 positions: length, format and solve rate of the rollouts, means of four updates."""
    worlds = {name: worlds[name] for name in ("long", "long_form", "long_blocks") if name in worlds}
    if not worlds or (figure := new_figure(10, 3.4)) is None:
        return
    titles = {"tokens": "tokens of an answer", "form": "in the format, %", "solved": "solved, %"}
    styles = {"long": (":", ""), "long_form": ("-", ", reward for the format"), "long_blocks": ("--", ", blocks of 32")}
    panels = figure.subplots(1, 3)
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
        for name, world in worlds.items():
            style, words = styles[name]
            for label, line in world["lines"].items():
                for seed, run in line["training"].items():
                    values = [(1 if key == "tokens" else 100) * value for value in run[key]]
                    smooth = [mean(values[max(0, at - 3) : at + 1]) for at in range(len(values))]
                    color = "C0" if label.startswith("raft") else "C1"
                    named = label.partition(",")[0] + words if seed == "0" else None
                    axes.plot(range(1, len(smooth) + 1), smooth, style, color=color, label=named)
        axes.set(xlabel="updates", title=title, ylim=(0, None))
        axes.grid(alpha=0.3)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=7, frameon=False
    )
    figure.savefig(path, dpi=110)


def draw_starts(found: dict[str, Any], path: Path) -> None:
    if not found or (figure := new_figure(8.5, 3.6)) is None:
        return
    for axes, (name, each) in zip(figure.subplots(1, len(found["adaptations"]), squeeze=False, sharey=True)[0],
                                  found["adaptations"].items(), strict=True):  # fmt: skip
        updates = sorted(map(int, each["checkpoints"]))
        asked = [next(iter(each["checkpoints"][str(update)].values())) for update in updates]
        for kind in ("sampled", "greedy", "mixed"):
            axes.plot(
                updates, [100 * one[kind][0] for one in asked], ".-", label={"mixed": "samples differ"}.get(kind, kind)
            )
        for folder, _, update in (start.partition("/") for start in found["chosen"].values()):
            if folder == name:
                axes.axvline(int(update), color="0.7", zorder=0)
        axes.set(title=f"{name}: {100 * each['share']:.0f} % careless", xlabel="updates", ylabel="%")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=110)


def draw_values(found: dict[str, Any], path: Path) -> None:
    """The value along rollouts, and the share of states whose completions all end alike."""
    first: dict[str, Any] = next(iter(found.values()), {})
    models = {label: seeds for label, seeds in first.items() if any("values" in each for each in seeds.values())}
    if not models or (figure := new_figure(8.5, 3.6)) is None:
        return
    for axes, kind in zip(figure.subplots(1, 2), ("value", "decided"), strict=True):
        for number, (label, seeds) in enumerate(models.items()):
            curves = [each["values"][kind] for each in seeds.values() if "values" in each]
            if curves:
                average = [100 * mean(values) for values in zip(*curves, strict=True)]
                axes.plot(average, ".-", color="0.3" if label == "start" else f"C{number - 1}", label=label)
        axes.set(xlabel="step", ylabel={"value": "V, %", "decided": "states that are decided, %"}[kind])
        axes.grid(alpha=0.3)
    axes.legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=110)
