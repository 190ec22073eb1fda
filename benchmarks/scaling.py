"""The same comparison at three sizes of the model and on two sizes of board.

    python benchmarks/scaling.py --device cuda --jobs 20 --out scaling

Models of about 0.2, 2 and 20 M parameters are pre-trained alike (unless they are there), on 4 x 4 and on 6 x 6 Sudoku;
then `unmask compare` chooses a rate for every base, and trains each alone, with DACA as it was until 0.2.0, and with
DiSPO. The same command resumes a call that was interrupted.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

SHAPES = {"0.2M": (64, 4), "2M": (192, 6), "20M": (448, 10)}
BOARDS: dict[str, dict[str, Any]] = {
    "4x4": {"task": "sudoku", "options": {"holes": [9, 12]}, "wrong": 0.95, "noise": 0.325},
    "6x6": {"task": "sudoku_large", "options": {"size": 6, "holes": [10, 16]}, "wrong": 0.95, "noise": 0.27},
}
RATES = {"0.2M": 2e-3, "2M": 1e-3, "20M": 5e-4}
DACA = "daca:strata=4:anchor=0.5:kl=0.05:negative=1"
"""Its default until 0.2.0, with four strata."""


def recipe(size: str, board: str, steps: int) -> dict[str, Any]:
    """A configuration of `unmask pretrain`."""
    width, layers = SHAPES[size]
    shape = {"width": width, "layers": layers, "heads": width // 16, "hidden": 2 * width, "max_length": 128}
    common = {"seed": 0, "threads": 1, "steps": steps, "learning_rate": RATES[size], "warmup": 50}
    return {**common, "weight_decay": 0.01, "shape": shape, "mixture": [{**BOARDS[board], "batch": 128}]}


def plugin_lines(rates: dict[str, Any]) -> str:
    """Every base at its rate: alone, with DACA (on agrpo DPS alone) and with DiSPO."""
    bases = {base: f"{base}:optimizer.lr={choice['chosen']}" for base, choice in rates.items()}
    plugins = {base: ("", "+daca" if base == "agrpo" else f"+{DACA}", "+dispo") for base in bases}
    return ",".join(line + plugin for base, line in bases.items() for plugin in plugins[base])


def unmask(*words: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-m", "unmask", *words])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3000, help="of pre-training")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--budget", default="forwards=100000")
    parser.add_argument("--lr", default="1e-4,2e-4,4e-4,8e-4")
    parser.add_argument("--methods", default="diffu_grpo,coupled_grpo,agrpo")
    parser.add_argument("--sizes", default=",".join(SHAPES))
    parser.add_argument("--boards", default=",".join(BOARDS))
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    cases = [(size, board) for size in given.sizes.split(",") for board in given.boards.split(",")]
    making = []
    for size, board in cases:
        home = given.out / f"{size}-{board}"
        home.mkdir(parents=True, exist_ok=True)
        if not (home / "model" / "config.json").is_file():
            (home / "pretrain.yaml").write_text(yaml.safe_dump(recipe(size, board, given.steps)))
            words = ["pretrain", str(home / "pretrain.yaml"), "--out", str(home / "model"), "--device", given.device]
            making.append(unmask(*words))
    for process in making:
        if process.wait():
            sys.exit("a model could not be made")
    for size, board in cases:
        home, lesson = given.out / f"{size}-{board}", BOARDS[board]
        task = [f"{lesson['task']}.{key}={value}".replace(" ", "") for key, value in lesson["options"].items()]
        words = ["compare", f"model={home / 'model'}", "full=true", "eval.every=0", *task, "--task", lesson["task"]]
        words += ["--seeds", str(given.seeds), "--budget", given.budget, "--device", given.device]
        words += ["--jobs", str(given.jobs)]
        alone = unmask(*words, "--methods", given.methods, "--lr", given.lr, "--out", str(home / "alone"))
        if not alone.wait():
            lines = plugin_lines(json.loads((home / "alone" / "results.json").read_text())["rates"])
            if not unmask(*words, "--methods", lines, "--out", str(home / "compared")).wait():
                continue
        sys.exit(f"the comparison of {size} on {board} ended early; the same command resumes it")


if __name__ == "__main__":
    main()
