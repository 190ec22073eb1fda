"""Choose a recorded rollout of a run and write it as an animated SVG."""

import json
from collections.abc import Sequence
from pathlib import Path

from unmask.util.files import check_output, write_whole
from unmask.util.trace_lines import TraceLine
from unmask.view.denoising_svg import denoising_svg
from unmask.view.index import RunReader


def animate(
    run: Path | str,
    path: Path | str,
    update: int | None = None,
    prompt: str | None = None,
    rollout: int | None = None,
) -> Path:
    """Write an animated SVG of a recorded rollout: its canvas as it is denoised, coloured by credit.

    update    a recorded update. Default: the last one with a training group
    prompt    text that the prompt contains. Default: any prompt; a training group is preferred, because it has credit
    rollout   number of the rollout in its group, from 1. Default: the first with the highest reward
    """
    folder, path = Path(run), Path(path)
    if path.suffix != ".svg":
        raise ValueError(f"--animate writes SVG: name a file that ends in .svg, not {path.name}")
    check_output(path)
    reader = RunReader(folder)
    reader.refresh()
    group = _group(reader, update, prompt)
    number = _rollout_index(group, rollout)
    write_whole(path, denoising_svg(group, number, reader.data(folder.name)["method"]))
    return path


def _group(reader: RunReader, update: int | None, prompt: str | None) -> TraceLine:
    """The last group that fits, training groups first."""
    groups = [group for group in reader.traces if group["step"] is not None]
    if not groups:
        raise ValueError(
            f"{reader.folder} has no recorded rollouts to animate: train with trace_every=10 (0 records nothing)"
        )
    steps = sorted({group["step"] for group in groups})
    if update is not None and update not in steps:
        raise ValueError(f"--update: update {update} is not recorded; recorded are {_shortened(steps)}")
    groups = [group for group in groups if update in (None, group["step"])]
    for group in sorted(groups, key=lambda group: (group["kind"] == "train", group["step"]), reverse=True):
        line: TraceLine = json.loads(reader.trace(group["id"]) or b"{}")  # the index has the beginning of the prompt
        if prompt is None or prompt in str(line.get("prompt")):
            return line
    raise ValueError(f"--prompt: no recorded prompt contains {prompt!r}")


def _rollout_index(group: TraceLine, number: int | None) -> int:
    rewards = [rollout.get("reward") if isinstance(rollout, dict) else None for rollout in group["rollouts"]]
    if number is None:
        known = [reward for reward in rewards if isinstance(reward, int | float)]
        return rewards.index(max(known)) if known else 0
    if not 1 <= number <= len(rewards):
        raise ValueError(f"--rollout: the group has {len(rewards)} rollouts; give 1 to {len(rewards)}, not {number}")
    return number - 1


def _shortened(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps if len(steps) <= 12 else [*steps[:6], "...", *steps[-5:]]))
