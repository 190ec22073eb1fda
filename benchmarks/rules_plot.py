"""The tables and figures of the study of the two rules (docs/studies/rules.md), from the results of rules.py.

python benchmarks/rules_plot.py benchmarks/results/rules.json --figures docs/figures
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from unmask.util.plots import new_figure

RULE_1 = ("fully masked", "mask pair", "SML", "ELBO", "visited")
RULE_2 = ("4 masked", "3 masked", "2 masked", "1 masked")
SIGNS = ("both signs", "wrong x 0.3", "wrong x 0.1", "positive part", "correct only", "negative part")
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "0.55"
UPDATES = 200
COLOURS = dict(zip(SIGNS, (ORANGE, "#e69f00", PURPLE, BLUE, GREEN, GREY), strict=True))


def line_of(world: dict[str, Any], likelihood: str, sign: str) -> dict[str, Any]:
    return next(line for line in world["lines"] if (line["likelihood"], line["sign"]) == (likelihood, sign))


def table(
    world: dict[str, Any], rows: tuple[str, ...], signs: tuple[str, ...], cell: Callable[[dict[str, Any]], str]
) -> str:
    head = f"| | {' | '.join(signs)} |\n|{'---|' * (len(signs) + 1)}\n"
    return head + "\n".join(
        f"| {name} | {' | '.join(cell(line_of(world, name, sign)) for sign in signs)} |" for name in rows
    )


def print_tables(results: dict[str, Any]) -> None:
    def sampled(line: dict[str, Any]) -> str:
        return " / ".join(f"{100 * line['curve'][update]:.1f}" for update in (20, 50, UPDATES))

    def end(line: dict[str, Any]) -> str:
        return f"{100 * line['greedy']:.1f} / {100 * line['pass@4']:.1f}"

    def cosine(line: dict[str, Any]) -> str:
        return f"{fmean(line['cosine']):.3f}"

    for name, world in results.items():
        start = ", ".join(f"{key} {100 * value:.1f}" for key, value in world["start"].items())
        print(f"\n## {name} (start: {start})")
        for title, cell in (
            (f"sampled after 20 / 50 / {UPDATES} updates", sampled),
            (f"greedy / pass@4 after {UPDATES}", end),
            ("cosine with the true gradient at the start", cosine),
        ):
            print(f"\n{title}\n\n{table(world, RULE_1, SIGNS[:-1], cell)}")
            print(f"\n{table(world, RULE_2, ('both signs', 'positive part', 'negative part'), cell)}")
        shares = ", ".join(f"{key} {100 * value['decides']:.0f}" for key, value in world["decisive"].items())
        drift = ", ".join(f"{key} {[round(value, 2) for value in each]}" for key, each in world["drift"].items())
        print(
            f"\nlength of the gradient of all samples over that of the right ones, after 0, 5, 20, 50 updates: {drift}"
        )
        print(f"\nshare of the gradient on tokens that decide, %: {shares}")


def draw_signs(results: dict[str, Any], path: Path) -> None:
    """Rule 1: learning curves, a row a world, a column a likelihood."""
    figure = new_figure(12, 1.65 * len(results))
    assert figure is not None
    axes_WR = figure.subplots(len(results), len(RULE_1), sharey=True, sharex=True)
    for row, (name, world) in zip(axes_WR, results.items(), strict=True):
        for axes, likelihood in zip(row, RULE_1, strict=True):
            for sign in SIGNS[:-1]:
                style = "--" if sign == "correct only" else "-"
                axes.plot(
                    line_of(world, likelihood, sign)["curve"], style, color=COLOURS[sign], label=sign, linewidth=1.3
                )
            axes.set(ylim=(0.15, 1.02), xlim=(0, UPDATES))
        row[0].set_ylabel(name.replace(", ", ",\n"))
    for axes, likelihood in zip(axes_WR[0], RULE_1, strict=True):
        axes.set_title(likelihood, fontsize=10)
    axes_WR[0, 0].legend(fontsize=8, loc="lower right")
    figure.supxlabel("updates", fontsize=10)
    figure.suptitle("solved, sampled", fontsize=10)
    figure.savefig(path, dpi=110)


def draw_places(results: dict[str, Any], path: Path) -> None:
    """Rule 2: the end of the curves by masked positions, and the share of the gradient on tokens that decide."""
    figure = new_figure(12, 4.6)
    assert figure is not None
    sizes = [int(name[0]) for name in RULE_2]
    for column, (name, world) in zip(figure.subplots(2, len(results), sharey="row").T, results.items(), strict=True):
        for sign in ("both signs", "positive part", "negative part"):
            ends = [line_of(world, name, sign)["sampled"] for name in RULE_2]
            column[0].plot(range(len(sizes)), ends, marker="o", color=COLOURS[sign], label=sign)
        column[0].axhline(world["start"]["sampled"], color="0.7", linewidth=0.8)
        names = [*RULE_2, "visited"]
        heights = [world["decisive"][likelihood]["decides"] for likelihood in names]
        column[1].bar(range(len(names)), heights, color=[BLUE] * len(sizes) + [GREEN])
        column[0].set_title(name, fontsize=10)
        column[0].set(ylim=(0, 1.02), xticks=range(len(sizes)), xticklabels=[*sizes], xlabel="masked positions")
        column[1].set(ylim=(0, 1), xticks=range(len(names)), xticklabels=[*sizes, "visited"], xlabel="masked positions")
        if name == next(iter(results)):
            column[0].set_ylabel(f"solved after {UPDATES} updates")
            column[1].set_ylabel("gradient on tokens that decide")
            column[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="draw the two figures there")
    given = parser.parse_args()
    results = json.loads(given.results.read_text())
    print_tables(results)
    if given.figures:
        draw_signs(results, given.figures / "rule_signs.png")
        shown = {name: results[name] for name in results if "," not in name}
        draw_places(shown, given.figures / "rule_places.png")


if __name__ == "__main__":
    main()
