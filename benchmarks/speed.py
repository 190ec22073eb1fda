"""Speed and memory on LLaDA-8B's shapes with random weights, each figure beside a baseline of the same run.

    python benchmarks/speed.py peak trunk rollout --out benchmarks/results/speed.json       (one GPU)
    python benchmarks/speed.py fp8 --out fp8.json                                           (or threshold, updates, ...)
    python benchmarks/speed.py all --toy --out toy.json                                     (a CPU, to try the script)

    git worktree add before COMMIT; python benchmarks/speed.py graphs --baseline before --out graphs.json

Prompt 200, completion 256, 128 steps, blocks of 32, unless a section says otherwise. The baseline is `plain_step` in
speed_rollout.py: what the field's first implementations do. Where a full run would only repeat one step or block, some
are timed and the rest is reckoned; such rows say so under "reckoned".
"""

import argparse
from pathlib import Path

from speed_bench import SpeedBench
from speed_fp8 import fp8
from speed_graphs import graphs
from speed_rollout import early, peak, rollout, trunk, waiting
from speed_scale import scale, scale_full, updates
from speed_threshold import threshold
from speed_training import adapter, agreement, growth, memory, methods, step

from unmask.rollout.graphs import Graphs

# The first without an adapter, the others with one, which `adapter` adds; the last replaces the model.
BARE = (peak, trunk, rollout, early, waiting, fp8, threshold, graphs)
ADAPTED = (adapter, agreement, memory, step, methods, growth, updates, scale, scale_full)
SECTIONS = {section.__name__: section for section in (*BARE, *ADAPTED)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="+", choices=[*SECTIONS, "all"])
    parser.add_argument("--toy", action="store_true", help="a model of two small layers")
    parser.add_argument("--eager", action="store_true", help="do not compile the layers for rollouts")
    parser.add_argument(
        "--baseline", type=Path, help="graphs: a checkout of an earlier commit, timed in turns with this one"
    )
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    wanted = [name for name in SECTIONS if name in arguments.sections or "all" in arguments.sections]
    bench = SpeedBench(arguments.toy, arguments.out)
    bench.baseline, bench.graphs = arguments.baseline, Graphs()
    if "trunk" not in wanted and not arguments.eager:
        bench.policy.compile_layers()
    for name in wanted:
        SECTIONS[name](bench)


if __name__ == "__main__":
    main()
