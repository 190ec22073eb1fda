"""Where each method asks: one rollout of the embedded model, and the masked states at which its tokens are scored.

    python benchmarks/asked_plot.py --out docs/figures/methods

A picture a method: a line is one question. Grey cells are hidden and not asked about; blue ones are asked, the paler
the surer the model is of the token; the rest is what the model sees. Left of the line is the prompt. On top is the
completion, the later a token was written the bluer. (gspo, wd1 and reinforce_pp ask where diffu_grpo does.)
"""

import argparse
import copy
from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from unmask import Decoding, ScoredRollouts, Scorer, daca, dispo, load_model, loss_terms, row_seeds, sample
from unmask.core.method import Method
from unmask.core.probes import Probes, ask
from unmask.methods import BASES
from unmask.models import Model
from unmask.rollout.sample import Rollouts

PROMPT = "1...2..4...3.2..="
METHODS = {
    **{name: BASES[name]() for name in ("diffu_grpo", "unigrpo", "coupled_grpo", "spg", "espo", "agrpo")},
    "daca": daca(BASES["diffu_grpo"]()),
    "dispo": dispo(BASES["agrpo"](), branches=3, lateness=1.0),
}


def roll_out(policy: Model, method: Method) -> Rollouts:
    prompt = policy.tokenizer.prompt(PROMPT)
    group_B, decoding = torch.zeros(8, dtype=torch.long), Decoding(length=16, steps=8)
    return sample(policy, [prompt] * 8, row_seeds(1, 8), decoding, group_B=group_B, request=method.request)


def questions(policy: Model, method: Method, rollouts: Rollouts) -> list[tuple[Probes, list[int], torch.Tensor]]:
    """Of the first rollout, and then of its branches: the probes, which of their rows, and the log-probabilities."""
    reward_B = 1 - torch.arange(8) % 2.0  # the first rollout is a good one: SML asks about these only
    branch_reward_B = None if rollouts.branches is None else torch.arange(len(rollouts.branches)).double() % 2
    batch, rng = ScoredRollouts(rollouts, reward_B, branch_reward_B), torch.Generator().manual_seed(5)
    with torch.no_grad():
        (terms,) = loss_terms(method, batch, Scorer(policy, copy.deepcopy(policy)), rng)
        asked = []
        for probes in (term.probes for term in terms):
            mine_B = probes.trace.group_B == 0 if probes.trace is rollouts.branches else torch.arange(8) == 0
            asked.append((probes, mine_B[probes.trace_N].nonzero().flatten().tolist(), ask(policy, probes)))
        return asked


def row(axes: Axes, place: float, policy: Model, ids: list[int], fills: list[str], bold: bool = False) -> None:
    for column, (token, fill) in enumerate(zip(ids, fills, strict=True)):
        axes.add_patch(matplotlib.patches.Rectangle((column, place), 0.94, 0.9, color=fill, linewidth=0))
        if token != policy.mask_id:
            text = policy.tokenizer.show([token])
            weight = "bold" if bold else "normal"
            axes.text(column + 0.47, place + 0.47, text, ha="center", va="center", fontsize=6.5, weight=weight)


def draw(policy: Model, method: Method, path: Path) -> None:
    rollouts = roll_out(policy, method)
    trace, asked = rollouts.trace, questions(policy, method, rollouts)
    steps, blues = matplotlib.colormaps["YlGnBu"], matplotlib.colormaps["Blues"]
    lines = []
    for probes, rows, logp_NL in asked:
        for n in rows:
            state_L, asked_L = probes.states_SL[probes.state_N[n]], probes.asked_NL[n]
            hidden_L = state_L == policy.mask_id
            ids = torch.where(asked_L, probes.trace.tokens_BL[probes.trace_N[n]], state_L).tolist()
            shades = (0.15 + 0.6 * (1 - logp_NL[n].exp())).tolist()
            fills = [
                matplotlib.colors.to_hex(blues(shades[i])) if asked_L[i] else "#b8b8b0" if hidden_L[i] else "#f4f4f0"
                for i in range(len(ids))
            ]
            lines.append((ids, fills))
    width = trace.tokens_BL.shape[1]
    figure = Figure(figsize=(0.19 * width + 0.3, 0.23 * (len(lines) + 1.6) + 0.15), layout="constrained")
    axes = figure.subplots()
    when = trace.step_BL[0].tolist()
    written = [matplotlib.colors.to_hex(steps(0.06 + t / 16)) if t >= 0 else "#f4f4f0" for t in when]
    row(axes, 0, policy, trace.tokens_BL[0].tolist(), written, bold=True)
    for number, (ids, fills) in enumerate(lines):
        row(axes, number + 1.5, policy, ids, fills)
    axes.axvline(width - 16 - 0.03, color="0.2", linewidth=0.8)
    axes.set(xlim=(0, width), ylim=(len(lines) + 1.6, -0.1))
    axes.axis("off")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    policy = load_model("tiny")
    for name, method in METHODS.items():
        draw(policy, method, given.out / f"{name}.png")


if __name__ == "__main__":
    main()
