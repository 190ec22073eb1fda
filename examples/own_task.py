"""Your own task in one file: eight digits that never fall, such as 11234468.

    python examples/own_task.py                  # trains the embedded model on it: fifteen seconds on one core
    unmask train --task examples/own_task.py --method agrpo optimizer.lr=3e-3      # from the command line

The names below are all that a task needs; docs/own_task.md has the rest.
"""

from itertools import pairwise

UPDATES, PROMPTS, GROUP, PROBLEMS = 30, 8, 8, 64

length = 8


def rows():
    """What is asked. A row may hold more, and then the reward is given it as `row`."""
    return [{"prompt": f"{number}="} for number in range(400)]


def reward(completion):
    """The share of steps from digit to digit that do not fall; 1 counts as solved."""
    text = completion.ljust(length)
    return sum(a.isdigit() and b.isdigit() and a <= b for a, b in pairwise(text)) / (len(text) - 1)


def main():
    from unmask.config import DEMO, read_config
    from unmask.training.loop import train
    from unmask.training.run.folder import RunFolder, fresh_folder

    sizes = [f"updates={UPDATES}", f"prompts={PROMPTS}", f"group={GROUP}", f"eval.prompts={PROBLEMS}"]
    config = read_config(DEMO, [*sizes, "method=agrpo", "with=[]", "optimizer.lr=3e-3"], task=__file__)
    result = train(config, lambda: RunFolder(fresh_folder("own-task"), config.dump()))
    print(f"reward {result.before.reward:.2f} -> {result.after.reward:.2f}")
    print(f"solved {result.before.sampled} -> {result.after.sampled}")
    print(f"{result.run.path} has the weights and the log")


if __name__ == "__main__":
    main()
