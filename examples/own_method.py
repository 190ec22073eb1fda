"""Your own method in one file: where to ask, and what each token is worth.

    python examples/own_method.py                                          # trains the embedded model with both
    unmask train --method examples/own_method.py:halves                    # the base alone, from the command line
    unmask train --with examples/own_method.py:early early.strength=0.5    # the plug-in, on diffu-GRPO

The file is run as your program, with your rights. docs/own_method.md goes through it line by line.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from unmask.core.advantage import Advantage, leave_one_out
from unmask.core.method import Method, check_range, each_inner_step
from unmask.core.objective import Normaliser, token_clip, token_mean
from unmask.core.probes import Probes, views
from unmask.core.trace import Trace

UPDATES, PROMPTS, GROUP, PROBLEMS = 20, 8, 8, 64


def halves_masked(trace: Trace, rng: torch.Generator) -> Probes:
    """Where do we ask? About the first half of a completion with only that masked; then about the second."""
    place_BL = trace.canvas_BL.cumsum(-1)
    first_BL = trace.canvas_BL & (place_BL <= place_BL[:, -1:] // 2)
    masked_KBL = torch.stack([first_BL, trace.canvas_BL & ~first_BL])
    return views(trace, masked_KBL, masked_KBL)  # masked there, asked there


def halves(
    low: float = 0.2, high: float = 0.2, advantage: Advantage = leave_one_out, normaliser: Normaliser = token_mean
) -> Method:
    """A base: half of the completion masked at a time, token ratios."""
    check_range(0, 1, low=low)
    return Method(
        name="halves",
        probe=each_inner_step(halves_masked),
        advantage=advantage,
        objective=partial(token_clip, low=low, high=high, normaliser=normaliser),
    )


def early(base: Method, strength: float = 0.3) -> Method:
    """A plug-in: tokens written in the first half of the steps are worth more, those after it less."""
    check_range(0, 1, strength=strength)

    def credit(trace: Trace) -> Tensor:
        late_BL = (trace.step_BL >= trace.steps / 2).to(trace.logp_BL.dtype)
        weight_BL = base.credit(trace) * (1 + strength * (1 - 2 * late_BL)) * trace.counted_BL
        mean_B1 = weight_BL.sum(-1, keepdim=True) / trace.counted_BL.sum(-1, keepdim=True).clamp(min=1)
        return weight_BL / mean_B1.clamp(min=1e-9)  # mean one, so that it moves no learning rate

    return replace(base, name=f"{base.name}+early", credit=credit)


def main() -> None:
    from unmask.config import DEMO, read_config
    from unmask.training.loop import train
    from unmask.training.run.folder import RunFolder, fresh_folder

    sizes = [f"updates={UPDATES}", f"prompts={PROMPTS}", f"group={GROUP}", f"eval.prompts={PROBLEMS}"]
    named = {"method": f"{__file__}:halves", "with": [f"{__file__}:early"]}
    config = read_config(DEMO, [*sizes, "early.strength=0.5"], **named)
    result = train(config, lambda: RunFolder(fresh_folder("own-method"), config.dump()))
    print(f"{config.build_method().name}: solved {result.before.sampled} -> {result.after.sampled}")


if __name__ == "__main__":
    main()
