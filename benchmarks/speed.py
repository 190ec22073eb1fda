"""Speed and memory on LLaDA-8B's shapes with random weights, each figure beside a baseline of the same run.

    python benchmarks/speed.py peak trunk rollout --out benchmarks/results/speed.json       (one GPU)
    python benchmarks/speed.py fp8 --out fp8.json                                           (or threshold, updates, ...)
    python benchmarks/speed.py all --toy --out toy.json                                     (a CPU, to try the script)

    git worktree add before COMMIT; python benchmarks/speed.py graphs --baseline before --out graphs.json
    python benchmarks/speed.py graphs --rows 32 --baseline before --out graphs.json         (only 32 rows)
    python benchmarks/speed.py graphs --rows 32 --copies 8 --baseline before --out graphs.json     (in groups of 8)
    python benchmarks/speed.py peers --peers FOLDER --out peers.json      (beside other projects: see speed_peers.py)

Prompt 200, completion 256, 128 steps, blocks of 32, unless a section says otherwise. The baseline is `plain_step` in
speed_rollout.py: what the field's first implementations do. Where a full run would only repeat one step or block, some
are timed and the rest is reckoned; such rows say so under "reckoned".
"""

import argparse
from pathlib import Path

from speed_bench import SpeedBench
from speed_fp8 import fp8
from speed_graphs import graphs
from speed_peers import check_peers, peers
from speed_products import products
from speed_rollout import early, peak, rollout, trunk, waiting
from speed_scale import scale, scale_full, updates
from speed_steps import attention, steps
from speed_threshold import threshold
from speed_training import adapter, agreement, growth, memory, methods, step

from unmask.rollout.graphs import Graphs

# The first without an adapter, the others with one, which `adapter` adds; the last replaces the model.
BARE = (peak, trunk, rollout, early, waiting, fp8, threshold, graphs, steps, attention, products, peers)
ADAPTED = (adapter, agreement, memory, step, methods, growth, updates, scale, scale_full)
SECTIONS = {section.__name__: section for section in (*BARE, *ADAPTED)}


def wanted_sections(named: list[str], folder: Path | None) -> list[str]:
    """In the order of SECTIONS; "all" has the peers only if there is a folder of them."""
    wanted = [name for name in SECTIONS if name in named or ("all" in named and (name != "peers" or folder))]
    if "peers" in wanted:
        check_peers(folder)
    return wanted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="+", choices=[*SECTIONS, "all"])
    parser.add_argument("--toy", action="store_true", help="a model of two small layers")
    parser.add_argument("--eager", action="store_true", help="do not compile the layers for rollouts")
    parser.add_argument(
        "--baseline", type=Path, help="graphs: a checkout of an earlier commit, timed in turns with this one"
    )
    parser.add_argument("--rows", type=int, help="graphs: only whole dual-cache rollouts of so many rows")
    parser.add_argument("--copies", type=int, default=1, help="graphs --rows: rows with the same prompt, as in a group")
    parser.add_argument("--peers", type=Path, help="peers: a folder with checkouts of d1 and Fast-dLLM")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    wanted = wanted_sections(arguments.sections, arguments.peers)
    if arguments.copies > 1 and (arguments.rows is None or arguments.rows % arguments.copies):
        parser.error("--copies needs --rows, and divides it")
    bench = SpeedBench(arguments.toy, arguments.out)
    bench.baseline, bench.peers, bench.graphs = arguments.baseline, arguments.peers, Graphs()
    bench.rows, bench.copies = arguments.rows, arguments.copies
    if "trunk" not in wanted and not arguments.eager:
        bench.policy.compile_layers()
    for name in wanted:
        SECTIONS[name](bench)


if __name__ == "__main__":
    main()
