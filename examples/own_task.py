"""Your own task in one file: Latin squares.

    python examples/own_task.py                  # trains the embedded model on it: 10 to 30 seconds on one core
    unmask train --task examples/own_task.py updates=20                            # from the command line

The names below are all that a task needs; docs/own_task.md has the rest.
"""

import random

UPDATES, PROMPTS, GROUP, PROBLEMS = 20, 12, 8, 64

length = 16


def rows():
    """4 x 4 grids with six holes. Every row and every column must have 1, 2, 3 and 4."""
    rng = random.Random(0)

    def draw():
        down, across, digits = (rng.sample(range(4), 4) for _ in range(3))
        grid = [str(1 + digits[(i + j) % 4]) for i in down for j in across]
        for cell in rng.sample(range(16), 6):
            grid[cell] = "."
        return {"prompt": "".join(grid) + "="}

    return [draw() for _ in range(1000)]


def reward(prompt, completion):
    """The share of correct rows and columns; 0 for an answer that changes a given digit. 1 counts as solved."""
    kept = all(given in (".", digit) for given, digit in zip(prompt, completion, strict=False))
    if len(completion) != length or not kept:
        return 0.0
    lines = [completion[4 * i : 4 * i + 4] for i in range(4)] + [completion[i::4] for i in range(4)]
    return sum(sorted(line) == list("1234") for line in lines) / len(lines)


def main():
    from unmask.config import DEMO, read_config
    from unmask.training.loop import train
    from unmask.training.run.folder import RunFolder, fresh_folder

    sizes = [f"updates={UPDATES}", f"prompts={PROMPTS}", f"group={GROUP}", f"eval.prompts={PROBLEMS}"]
    config = read_config(DEMO, sizes, task=__file__)
    result = train(config, lambda: RunFolder(fresh_folder("own-task"), config.dump()))
    print(f"reward {result.before.reward:.2f} -> {result.after.reward:.2f}")
    print(f"solved {result.before.sampled} -> {result.after.sampled}")
    print(f"{result.run.path} has the weights and the log")


if __name__ == "__main__":
    main()
