"""A real language model made a masked diffusion model in minutes, on one GPU.

    python benchmarks/adapt_study.py smollm2.gguf --work runs/study --out benchmarks/results/adapt.json --minutes 4
    python benchmarks/adapt_study.py part.0 part.1 --work runs/study --out adapt.json --stages adapt --seconds 540

The model is a folder with a checkpoint, or a GGUF file, whole or in pieces. Stages, each taken up where it was left:

    speed   tokens a second and share of the matrix peak, compiled and not, by tokens of a pass
    adapt   masked-diffusion fine-tuning on generated text Sudoku, Countdown and word problems; solve rates at the end

Solve rates are sampled at temperature 1 and greedy, with as many denoising steps as half the positions, a quarter and
an eighth. How decoding can be faster, and what reinforcement learning adds, is then for decoding.py and for
`unmask compare recipe:smollm2_rl`.
"""

import argparse
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

LESSONS = {"countdown_text": 64, "sudoku_text": 96, "word_problems": 64}
"""Tasks, and the positions of a completion."""
SHARES = (1, 2, 4)


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def written(out: Path, **found: Any) -> None:
    """Add to the result file."""
    held = json.loads(out.read_text()) if out.is_file() else {}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**held, **found}, indent=1) + "\n")


# --- the start ----------------------------------------------------------------------------------------------


def start_of(pieces: list[Path], work: Path) -> Path:
    """The checkpoint that adaptation starts from."""
    from unmask.sft.adapt import adapt
    from unmask.sft.fetch import convert

    start = work / "start"
    if (start / "config.json").is_file():
        return start
    source = pieces[0]
    if not source.is_dir():
        joined = work / "model.gguf"
        with joined.open("wb") as file:
            for piece in pieces:
                with piece.open("rb") as part:
                    shutil.copyfileobj(part, file)
        source = work / "source"
        shutil.rmtree(source, ignore_errors=True)
        convert(joined, source, {"file": pieces[0].name})
    print("adapted", adapt(source, start), flush=True)
    return start


# --- speed --------------------------------------------------------------------------------------------------


def peak(size: int = 8192) -> float:
    """Operations a second of a large matrix product: bf16 on a GPU."""
    import torch

    gpu = device() == "cuda"
    kind, size = (torch.bfloat16, size) if gpu else (torch.float32, 512)
    a, b = (torch.randn(size, size, device=device()).to(kind) for _ in range(2))
    seconds = timed(lambda: a @ b, 20)
    return 2 * size**3 / seconds


def timed(work: Any, times: int) -> float:
    """Seconds of one of them, the median; once before for nothing."""
    import torch

    spent = []
    for _ in range(times + 1):
        clock = time.perf_counter()
        work()
        if device() == "cuda":
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - clock)
    return sorted(spent[1:])[times // 2]


def operations(policy: Any, width: int, rows: int, masked: int) -> float:
    """Of an update, forward and backward, without what is computed twice."""
    lm = policy.lm
    trunk = sum(weight.numel() for layer in lm.model.layers for weight in layer.parameters())
    attention = 2 * width * lm.config.num_attention_heads * lm.model.layers[0].self_attn.head_dim
    head = lm.lm_head.weight.numel()
    return 6.0 * (rows * width * (trunk + len(lm.model.layers) * attention) + masked * head)


def speed(start: Path, arguments: argparse.Namespace) -> list[dict[str, float]]:
    import torch

    from unmask.sft.diffusion_loss import add_noise
    from unmask.sft.finetune import sft_update
    from unmask.sft.packing import PackedBatch
    from unmask.training.optim import make_optimizer
    from unmask.training.setup import decoder_of, trainable_policy
    from unmask.util.micro_batch import MicroBatch

    found, best = [], peak()
    width, canvas = (176, 48) if device() == "cuda" else (48, 16)
    for compiled in (False, True) if device() == "cuda" else (False,):
        config = sft_config(start, arguments, compiled, updates=10**6)
        policy = trainable_policy(config, device())
        if compiled:
            decoder_of(policy, "compile").compile_layers()
        optimizer = make_optimizer(policy, config.optimizer)
        for tokens in arguments.pass_tokens:
            rows = tokens // width
            rng = torch.Generator().manual_seed(0)
            ids_BW = torch.randint(0, policy.mask_id, (rows, width), generator=rng)
            batch = PackedBatch(ids_BW, torch.full((rows,), width - canvas), rows)
            noise = add_noise(batch, policy.mask_id, rng)
            state = policy, optimizer, batch, noise, MicroBatch(tokens), config.optimizer.max_grad_norm
            if device() == "cuda":
                torch.cuda.reset_peak_memory_stats()
            seconds = timed(lambda state=state: sft_update(*state), 5)
            rate = operations(policy, width, rows, int(noise.masked_BW.sum())) / seconds
            memory = torch.cuda.max_memory_allocated() / 2**30 if device() == "cuda" else 0.0
            told = {"tokens_per_s": rows * width / seconds, "share_of_peak": rate / best, "peak_gib": memory}
            found.append({"compiled": compiled, "tokens": rows * width, "width": width, "seconds": seconds, **told})
            print(found[-1], flush=True)
        del policy, optimizer
    return [{"matrix_peak": best}, *found]


# --- adaptation ---------------------------------------------------------------------------------------------


def sft_config(start: Path, arguments: argparse.Namespace, compiled: bool, updates: int) -> Any:
    from unmask.sft.config import read_sft_config

    return read_sft_config(
        model=str(start),
        data=[{"task": task, "canvas": canvas} for task, canvas in LESSONS.items()],
        max_examples=arguments.rows,
        full=True,
        dtype="bfloat16" if device() == "cuda" else "float32",
        compile=compiled,
        attention_annealing=min(arguments.grow, updates),
        batch_tokens=arguments.tokens,
        micro_batch_tokens=max(arguments.pass_tokens),
        updates=updates,
        save_every=max(1, updates // 8),
        optimizer={"lr": arguments.adapt_lr, "schedule": "cosine", "warmup": min(50, updates), "betas": (0.9, 0.95)},
        eval={"every": max(1, updates // 4), "prompts": min(64, arguments.problems), "samples": 1},
    )


def adapted(start: Path, arguments: argparse.Namespace, rate: float, until: float) -> Path | None:
    """The folder of the finished adaptation, as long as `minutes` at this rate; None where the time ran out first."""
    from unmask.sft.config import CONFIG
    from unmask.sft.finetune import finetune, resume
    from unmask.training.run.base_run import Hooks
    from unmask.training.run.folder import FINISHED, RunFolder
    from unmask.util.signals import Paused

    folder = arguments.work / "adapt"
    if (folder / FINISHED).is_file():
        return folder

    def report(step: int, metrics: dict[str, float]) -> None:
        if step % 50 == 0 or any(key.endswith("solved_greedy") for key in metrics):
            print(step, {key: round(value, 4) for key, value in metrics.items() if "_low" not in key}, flush=True)

    hooks = Hooks(on_metrics=report, should_stop=lambda: time.time() > until)
    try:
        if (folder / CONFIG).is_file():
            resume(folder, hooks)
            return folder
        updates = arguments.adapt_updates or max(10, int(60 * arguments.minutes * rate / arguments.tokens))
        config = sft_config(start, arguments, device() == "cuda", updates)
        finetune(config, lambda: RunFolder(folder, config.dump(), CONFIG), hooks)
    except Paused as paused:
        print(f"{paused}; run the same again to go on", flush=True)
        return None
    return folder


def solve_rates(model: Path, problems: int, samples: int) -> dict[str, Any]:
    """Sampled and greedy, by task and by steps."""
    import torch

    from unmask.evaluation.evaluate import Evaluator
    from unmask.models import load_model
    from unmask.rollout.decoding import Decoding
    from unmask.tasks import TASKS
    from unmask.util.micro_batch import MicroBatch

    policy = load_model(model, dtype=torch.bfloat16 if device() == "cuda" else torch.float32, device=device())
    found: dict[str, Any] = {}
    for name, length in LESSONS.items():
        task = TASKS[name]()
        rows = task.rows("test", problems, 0)
        for share in SHARES:
            how = Decoding(length, max(1, length // 2 // share), length)
            with torch.no_grad():
                evaluation = Evaluator(policy, task, how, samples, 0, device(), MicroBatch(256)).evaluate(rows)
            found.setdefault(name, {})[f"1/{share}"] = evaluation.data()
            print(name, f"1/{share}", evaluation.sampled, evaluation.greedy, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="+", help="a folder, a GGUF file, or its pieces in order")
    parser.add_argument("--work", type=Path, required=True, help="checkpoints and runs, to go on from")
    parser.add_argument("--out", type=Path, required=True, help="figures, JSON")
    parser.add_argument("--stages", default="speed,adapt")
    parser.add_argument("--seconds", type=float, default=540.0, help="after which everything stops and can go on")
    parser.add_argument("--minutes", type=float, default=4.0, help="of adaptation")
    parser.add_argument("--adapt-updates", type=int, help="instead of minutes")
    parser.add_argument("--adapt-lr", type=float, default=3e-4)
    parser.add_argument("--grow", type=int, default=0, help="updates over which attention grows to both sides")
    parser.add_argument("--rows", type=int, default=16_000, help="examples of each task")
    parser.add_argument("--tokens", type=int, default=32_768, help="of a batch")
    parser.add_argument("--pass-tokens", type=int, nargs="+", default=[16_384, 32_768])
    parser.add_argument("--problems", type=int, default=256)
    arguments = parser.parse_args()
    until = time.time() + arguments.seconds
    arguments.work.mkdir(parents=True, exist_ok=True)
    stages, rate = arguments.stages.split(","), 100_000.0
    start = start_of(arguments.model, arguments.work)
    if "speed" in stages:
        table = speed(start, arguments)
        written(arguments.out, speed=table, device=device())
    if arguments.out.is_file() and (known := json.loads(arguments.out.read_text()).get("speed")):
        rate = max(row["tokens_per_s"] for row in known[1:])
    if "adapt" in stages and (folder := adapted(start, arguments, rate, until)):
        from unmask.training.run.folder import read_metrics

        ended = json.loads((folder / "finished.json").read_text())
        solved = solve_rates(folder / "checkpoint", arguments.problems, 2)
        written(arguments.out, adapt={**ended, "solved": solved, "curve": read_metrics(folder)})


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
