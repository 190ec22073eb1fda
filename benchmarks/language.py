"""A real language model that RL makes better: SmolLM2-135M on one GPU, one part at a time. The claims are in LOG.md.

    unmask fetch smollm2 --out runs/smollm2
    python benchmarks/language.py starts runs/smollm2 --out results     # adapt, evaluate checkpoints, choose starts
    python benchmarks/language.py rates  --out results                  # a learning rate for each line
    python benchmarks/language.py rl     --out results                  # the lines, five seeds, equal forwards
    python benchmarks/language.py after  --out results                  # fewer steps, caches, transfer, values
    python benchmarks/language.py tables --out results
    python benchmarks/language.py draw   --out results --figures docs/figures

`--world` names another task or start (`--world long`: completions of 256 positions); `starts --only planted` makes one
start. Models and runs are in --work, where the parts of one day find each other's. Results, JSON, are in --out and are
written after every run. `--toy` tries a part on a CPU with a tiny model. Start the CUDA MPS daemon first.

Time on an H200: `starts` took 344 s with three adaptations of 80 positions side by side, 80 of them before the first
updates were done (imports, data, compilation) and 90 for evaluations; 470 s with `long` as one of three. 14 of 18 runs
of `rates` took 150 s, `rl` with 30 runs of 60,000 forwards 350 s, both with 14 processes. Four processes do nearly as
much in a second as 14. The same commands gave the same models, bit for bit, in another session.
"""

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from choosing import with_options
from language_measure import measure, shown
from language_study import Study, weights_hash
from language_tables import draw, print_rl, tables
from language_worlds import (
    ADAPTATIONS,
    HIGH,
    LINES,
    LORA_RATE,
    LOW,
    RATES,
    STARTS,
    WORLDS,
    World,
    after_asks,
    other_asks,
)

from unmask.config.recipes import config_path
from unmask.studies.compare.cells import SharedSettings
from unmask.studies.compare.compare import Comparison, compare

# --- starts -------------------------------------------------------------------------------------------------


def adapt_start(name: str, source: Path, folder: Path, toy: bool, device: str) -> dict[str, Any]:
    """Fine-tune a start and keep its checkpoints as FOLDER/UPDATE; minutes, tokens a second and loss."""
    from unmask.sft.adapt import adapt
    from unmask.sft.config import CONFIG, read_sft_config
    from unmask.sft.finetune import finetune
    from unmask.training.run.base_run import Hooks
    from unmask.training.run.folder import RunFolder, read_metrics

    begun, run, plan = time.perf_counter(), folder / "run", ADAPTATIONS[name]
    shutil.rmtree(folder, ignore_errors=True)
    adapt(source, folder / "start")
    small = ["updates=4", "save_every=2", "batch_tokens=1024", "max_examples=32", "compile=false", "dtype=float32"]
    overrides = [f"behaviours.careless={plan.share}", "eval.prompts=0", "full=true"]
    overrides += [f"device={device}", *([*small, "optimizer.warmup=0"] if toy else [])]
    config = read_sft_config(STARTS / plan.file, overrides, model=str(folder / "start"))

    def keep(step: int, metrics: dict[str, float]) -> None:
        """The checkpoint of the update before, which was saved after its metrics."""
        if "train/loss" not in metrics:
            return
        if (step - 1) % config.save_every == 0 and step > 1:
            shutil.copytree(run / "checkpoint", folder / str(step - 1))
        if step % 64 == 0:
            print(name, step, f"loss {metrics['train/loss']:.4f}", f"{time.perf_counter() - begun:.0f} s", flush=True)

    result = finetune(config, lambda: RunFolder(run, config.dump(), CONFIG), Hooks(on_metrics=keep))
    shutil.copytree(run / "checkpoint", folder / str(config.updates))
    rows = [row for row in read_metrics(run) if "train/loss" in row]
    shutil.rmtree(run)
    return {
        "share": plan.share,
        "minutes": (time.perf_counter() - begun) / 60,
        "minutes_of_updates": sum(row["time/update"] for row in rows) / 60,
        "tokens_per_s": median(row["time/tokens_per_s"] for row in rows),
        "loss": {int(row["step"]): row["train/loss"] for row in rows[:: max(1, len(rows) // 48)]},
        "behaviours": result.behaviours,
    }


def pool(jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, get_context("spawn"))


def starts(study: Study) -> None:
    """Adapt, evaluate every checkpoint, choose as `choice` says."""
    given, found = study.given, study.read("starts") if study.given.only else {}
    names = given.only or [name for name in ADAPTATIONS if name != "long"]
    if given.model is None:
        raise SystemExit("starts: give the folder of the model, which `unmask fetch smollm2 --out FOLDER` writes")
    begun = time.perf_counter()
    with pool(given.jobs) as workers:
        waiting: dict[Future[dict[str, Any]], tuple[str, str]] = {}
        for name in names:
            folder = study.work / "starts" / name
            waiting[workers.submit(adapt_start, name, given.model, folder, study.toy, study.device)] = name, ""
        while waiting:
            future = next(as_completed(waiting))
            name, update = waiting.pop(future)
            if not update:
                found.setdefault("adaptations", {})[name] = {**future.result(), "checkpoints": {}}
                if evaluated := study.evaluated_before(name, found["adaptations"][name]["loss"]):
                    found["adaptations"][name] |= evaluated
                    print(
                        name, "is that of benchmarks/results/language_starts.json, byte for byte: not evaluated again"
                    )
                    continue
                ask = study.sized(ADAPTATIONS[name].asks[0])
                for folder in checkpoints(study.work / "starts" / name):
                    waiting[workers.submit(measure, str(folder), [ask], study.device)] = name, folder.name
            else:
                found["adaptations"][name]["checkpoints"][update] = future.result()
                print(name, update, shown(future.result()), f"{time.perf_counter() - begun:.0f} s", flush=True)
            study.write("starts", found)
        found["chosen"] = found.get("chosen", {}) | {name: choice(name, found["adaptations"][name]) for name in names}
        study.write("starts", found)  # where `start` reads it
        found["hashes"] = found.get("hashes", {}) | {name: weights_hash(study.start(name)) for name in names}
        study.write("starts", found)
        last = [checkpoints(study.work / "starts" / name)[-1] for name in names if not ADAPTATIONS[name].share]
        for folder in [] if study.given.no_others else {*map(study.start, names), *last}:
            name = folder.parent.name
            before = found["adaptations"][name].setdefault("others", {}).setdefault(folder.name, {})
            if asks := [ask for ask in other_asks(study, name) if ask.name not in before]:
                waiting[workers.submit(measure, str(folder), asks, study.device)] = name, folder.name
        for future in as_completed(waiting):
            name, update = waiting[future]
            found["adaptations"][name]["others"][update] |= future.result()
            print(name, update, shown(future.result()), flush=True)
    study.write("starts", found)
    print(found["chosen"], found["hashes"], f"{time.perf_counter() - begun:.0f} s", flush=True)


def checkpoints(folder: Path) -> list[Path]:
    return sorted((path for path in folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))


def choice(name: str, adaptation: dict[str, Any]) -> str:
    """The checkpoint to start from, as NAME/UPDATE. Of a planted start the last whose greedy solve rate is in the
    bounds, or else the one nearest to their middle; of another the one with most samples that differ."""
    solved = {int(update): next(iter(asked.values())) for update, asked in adaptation["checkpoints"].items()}
    inside = [update for update, found in solved.items() if LOW <= found["greedy"][0] <= HIGH]
    if not ADAPTATIONS[name].share:
        update = max(solved, key=lambda update: (solved[update]["mixed"][0], update))
    elif inside:
        update = max(inside)
    else:
        update = min(solved, key=lambda update: abs(solved[update]["greedy"][0] - (LOW + HIGH) / 2))
    return f"{name}/{update}"


# --- rates and RL -------------------------------------------------------------------------------------------


def settings_of(study: Study, world: World, *more: str) -> SharedSettings:
    """What all runs of a world share. Curves are those of the training rollouts, so nothing is evaluated on the way."""
    ask = study.sized(world.ask)
    options = [f"{ask.task}.{key}={json.dumps(value)}" for key, value in ask.options.items()]
    shape = [f"rollout.length={ask.length}", f"rollout.steps={ask.steps}", f"rollout.block={ask.block}"]
    small = ["dtype=float32", "compile=false", "prompts=2", "group=2", "eval.prompts=2"]
    overrides = [
        f"model={study.start(world.start)}",
        *("micro_batch_size=64", "rollout.micro_batch_size=128", "save_every=0", "trace_every=0"),
        *("eval.every=0", "eval.prompts=192", "eval.samples=1", *options, *shape),
        "rollout.graphs=false",  # many processes fill the GPU without
    ]
    overrides += [*world.more, *more, *(small if study.toy else [])]
    return SharedSettings(config_path("recipe:smollm2_rl"), tuple(overrides), ask.task, study.device)


def lines_of(study: Study, world: World) -> dict[str, str]:
    return {name: LINES[name] for name in study.given.lines or world.lines}


def forwards_of(study: Study, world: World, share: float = 1.0) -> str:
    ask = study.sized(world.ask)
    toy = 2.0 * 2 * 2 * (ask.steps + 24)
    return f"forwards={toy if study.toy else share * (study.given.forwards or world.forwards):g}"


def rates(study: Study) -> None:
    """One run a rate on validation problems; the best is that with most solved, sampled and greedy."""
    name, folder = study.given.world, runs_of(study, "rates")
    world, start = WORLDS[name], weights_hash(study.start(WORLDS[name].start))
    before = study.read(f"rates_{name}")
    entries = before["lines"] if before.get("start") == start else {}
    lines = lines_of(study, world)
    tried = [(label, rate) for rate in RATES for label in lines]

    def collect() -> None:
        """Write what is finished."""
        for (label, rate), cell in zip(tried, json.loads((folder / "results.json").read_text())["cells"], strict=True):
            for run in cell["runs"].values():
                entry, (first, *_, last) = entries.setdefault(label, {"solved": {}}), run["curve"]
                entry["start"], entry["solved"][f"{rate:g}"] = (
                    [point[kind] for kind in ("sampled", "greedy")] for point in (first, last)
                )
                # the smallest among equals
                entry["chosen"] = max(entry["solved"], key=lambda rate: (sum(entry["solved"][rate]), -float(rate)))
        study.write(f"rates_{name}", {"start": start, "lines": entries})

    texts = [with_options(lines[label], f"optimizer.lr={rate:g}") for label, rate in tried]
    settings = settings_of(study, world, "eval.split=validation", "eval.prompts=128")
    plan = Comparison(texts, ["none"], 1, forwards_of(study, world, 0.42), settings=settings)
    compare(plan, folder, study.given.jobs, on_progress=progress(collect))
    collect()
    print(json.dumps(entries), flush=True)


def chosen_rate(study: Study, name: str) -> float:
    """Of the line in this world, else in the first; without any the middle one."""
    if "full=false" in WORLDS[study.given.world].more:
        return LORA_RATE
    found = study.by_world("rates")
    for world in (study.given.world, next(iter(WORLDS))):
        if name in (lines := found.get(world, {}).get("lines", {})):
            return float(lines[name]["chosen"])
    return RATES[1]


def progress(then: Callable[[], None] = lambda: None) -> Callable[[Any], None]:
    """Prints every finished run."""

    def on_progress(now: Any) -> None:
        if now.event.share == 1.0:
            job, left = now.event.job, f"{now.left:.0f} s left"
            print(f"{now.done}/{now.total} {job.label} seed {job.seed} {now.event.error} {left}", flush=True)
            then()

    return on_progress


def runs_of(study: Study, part: str) -> Path:
    """The folder of a comparison. Its name has the hash of the start: runs from other bytes are not continued."""
    name = study.given.world
    return study.work / part / f"{name}-{weights_hash(study.start(WORLDS[name].start))}"


def rl(study: Study) -> None:
    """Train the lines from one start, at equal forwards spent. The runs are kept for the part `after`."""
    name, begun = study.given.world, time.perf_counter()
    world, found = WORLDS[name], study.read(f"rl_{name}")
    start, folder = study.start(world.start), runs_of(study, "rl")
    before = found.get("lines", {}) if study.given.lines and found.get("start") == weights_hash(start) else {}
    lines = {
        label: with_options(line, f"optimizer.lr={chosen_rate(study, label):g}")
        for label, line in lines_of(study, world).items()
    }

    def collect() -> None:
        """Write what is finished."""
        results = json.loads((folder / "results.json").read_text())
        runs = {label: line_result(folder, line, cell)
                for (label, line), cell in zip(lines.items(), results["cells"], strict=True)}  # fmt: skip
        facts = {key: results[key] for key in ("budget", "problems")} | {"seconds": time.perf_counter() - begun}
        found.update({"start": weights_hash(start), **facts, "lines": before | runs})
        study.write(f"rl_{name}", found)

    print(f"{name}: all runs start from {start}, sha256 {weights_hash(start)}", flush=True)
    seeds = 2 if study.toy else study.given.seeds or world.seeds
    settings = settings_of(study, world)
    plan = Comparison(list(lines.values()), ["none"], seeds, forwards_of(study, world), settings=settings)
    compare(plan, folder, study.given.jobs, keep=True, on_progress=progress(collect))
    collect()
    print_rl(name, found)


def line_result(folder: Path, line: str, cell: dict[str, Any]) -> dict[str, Any]:
    return {
        "line": line,
        "curves": {seed: run["curve"] for seed, run in cell["runs"].items()},
        "training": {seed: training(folder / cell["folders"][seed] / "run") for seed in cell["runs"]},
        "folders": cell["folders"],
        "failed": cell["failed"],
    }


def training(run: Path) -> dict[str, Any]:
    """By update: forwards, solved, form, length, late end tokens, idle groups and behaviours of the training rollouts;
    and the first of each warning."""
    from unmask.training.run.folder import read_metrics

    rows = [row for row in read_metrics(run) if "cost/forwards" in row]
    names = {"forwards": "cost/forwards", "solved": "train/solved", "form": "train/reward/format",
             "tokens": "train/length", "late_eos": "train/late_eos", "idle": "train/idle_groups",
             "nll": "train/nll", "loss": "train/loss", "norm": "train/grad_norm",
             "careful": "train/behaviour/careful", "careless": "train/behaviour/careless"}  # fmt: skip
    warned: dict[str, int] = {}
    if (path := run / "warnings.jsonl").is_file():
        for line in path.read_text().splitlines():
            warned.setdefault(json.loads(line)["name"], json.loads(line)["step"])
    curves = {name: [round(row[key], 4) for row in rows if key in row] for name, key in names.items()}
    seconds = {part: median(row[f"time/{part}"] for row in rows) for part in ("rollout", "update")}
    return {**curves, "seconds": seconds, "warnings": warned}


# --- after training -----------------------------------------------------------------------------------------


def after(study: Study) -> None:
    """The start, its ceiling, and the first seeds of every line, each in a process of its own."""
    name = study.given.world
    world, trained = WORLDS[name], study.read(f"rl_{name}").get("lines", {})
    folder, seeds = runs_of(study, "rl"), study.given.seeds or 2
    models = {("start", ""): study.start(world.start)}
    careful = checkpoints(study.work / "starts" / "careful") if (study.work / "starts" / "careful").is_dir() else []
    if careful and world.start == "planted":
        models["ceiling", ""] = careful[-1]
    for label, line in trained.items():
        if study.given.lines and label not in study.given.lines:
            continue
        for seed, cell in list(line["folders"].items())[:seeds]:
            if (checkpoint := folder / cell / "run" / "checkpoint").is_dir():
                models[label, seed] = checkpoint
    if len(models) < 3 - (not careful):
        raise SystemExit(
            f"there are no trained models of {name} in {folder}: run the part rl first, with the same --work"
        )
    found: dict[str, Any] = {}
    with pool(study.given.jobs) as workers:
        waiting = {
            workers.submit(measure, str(path), after_asks(study, world, key[0] == "ceiling"), study.device): key
            for key, path in models.items()
        }
        for future in as_completed(waiting):
            label, seed = waiting[future]
            found.setdefault(label, {})[seed] = future.result()
            study.write(f"after_{name}", found)
            print(label, seed, shown({"": next(iter(future.result().values()))}), flush=True)


def main() -> None:
    parts = {part.__name__: part for part in (starts, rates, rl, after, tables, draw)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(parts))
    parser.add_argument("model", type=Path, nargs="?", help="starts: the folder of the model to adapt")
    parser.add_argument("--out", type=Path, required=True, help="results, JSON")
    parser.add_argument("--work", type=Path, default=Path("runs/language"), help="models and runs")
    parser.add_argument("--world", choices=list(WORLDS), default=next(iter(WORLDS)))
    parser.add_argument("--only", nargs="+", choices=list(ADAPTATIONS), help="starts: these")
    parser.add_argument("--no-others", action="store_true", help="starts: skip other decodings and tasks")
    parser.add_argument("--lines", nargs="+", choices=list(LINES), help="rates, rl, after: these")
    parser.add_argument("--asks", nargs="+", help="after: these evaluations, by name")
    parser.add_argument("--start", help="another start than the one that was chosen")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--forwards", type=float, help="of a run of rl; one of rates has 42 %% of it")
    parser.add_argument("--jobs", type=int, default=6, help="processes on the GPU; four nearly fill an H200")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--figures", type=Path, default=Path("docs/figures"))
    parser.add_argument("--toy", action="store_true")
    given = parser.parse_args()
    parts[given.part](Study(given))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    main()
