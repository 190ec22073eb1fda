"""The section of speed.py about other projects: their own code, imported from checkouts, in turns with our rollouts.

    git clone https://github.com/dllm-reasoning/d1 FOLDER/d1
    git clone https://github.com/NVlabs/Fast-dLLM FOLDER/Fast-dLLM
    python benchmarks/speed.py peers --peers FOLDER --out peers.json

All have the same random weights. The `generate` of d1's evaluation takes a network of others and is given ours as it is
written, not compiled; Fast-dLLM's `generate_with_dual_cache` has its own network.
"""

import importlib
import importlib.util
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from statistics import median
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from speed_bench import SpeedBench
from speed_rollout import as_written
from torch import Tensor, nn

from unmask.models.load import Released
from unmask.models.names import LLADA
from unmask.rollout.cache import Cache
from unmask.rollout.graphs import Graphs

HOMES = {"d1": "https://github.com/dllm-reasoning/d1", "Fast-dLLM": "https://github.com/NVlabs/Fast-dLLM"}
FILES = {
    "d1": ("eval/generate.py",),
    "Fast-dLLM": ("v1/llada/generate.py", "v1/llada/model/modeling_llada.py", "v1/llada/model/configuration_llada.py"),
}
BLOCKS = {"exact": 1, "dual cache": 2}
"""The blocks of a completion that are timed, the last ones: every block costs the same."""
REPETITIONS, WARM = 3, 2
TEMPERATURE = 1.0
"""That of our rollouts, unless they are told otherwise."""
OUT_OF_MEMORY = "out of memory"

Roll = Callable[[int, int], Any]
"""Rolls out some rows and some blocks."""


class Way(NamedTuple):
    kind: str
    """A key of BLOCKS."""
    roll: Roll
    peer: bool = True


def peers(bench: SpeedBench) -> None:
    """Rollouts of 8 and 32 rows: d1, Fast-dLLM with its dual cache, ours exact and with the dual cache.

    A peer that does not run with several rows is timed with one.
    """
    folder = check_peers(bench.peers)
    theirs = {"d1": d1(bench, folder), "Fast-dLLM": fast_dllm(bench, folder)}
    bench.note("peers", kind="commits", **{name: commit_of(folder / name) for name in HOMES})
    alone: dict[str, Way] = {}
    for rows in (2, 3) if bench.toy else (8, 32):
        alone |= {name: theirs[name] for name in _cell(bench, theirs, rows)}
    if alone:
        _cell(bench, alone, 1)


# --- what is timed


def _cell(bench: SpeedBench, theirs: dict[str, Way], rows: int) -> list[str]:
    """Time them and us in turns; the first rounds warm up. Returns the peers that need to be alone."""
    ways = {**theirs, **{f"ours, {kind}": _ours(bench, kind) for kind in BLOCKS}}
    failed: dict[str, str] = {}
    rounds = [_round(bench, ways, rows, failed) for _ in range(WARM + REPETITIONS)]
    blocks, tokens = bench.shape["length"] // bench.shape["block"], rows * bench.shape["length"]
    found: dict[str, Any] = {}
    for name, way in ways.items():
        if name in failed:
            found[name] = {"failed": failed[name]}
            continue
        seconds = [each[name] * blocks / BLOCKS[way.kind] for each in rounds[WARM:]]
        middle, spread = median(seconds), {"fastest": min(seconds), "slowest": max(seconds)}
        first = rounds[0][name]
        found[name] = {"tokens_per_second": tokens / middle, "seconds": middle, **spread, "first_round": first}
    faster = {
        our: {name: found[name]["seconds"] / found[our]["seconds"] for name in theirs if name not in failed}
        for our in ways
        if our not in theirs
    }
    reckoned = ", ".join(f"{timed} of {blocks} blocks timed ({kind})" for kind, timed in BLOCKS.items())
    how = {"temperature": TEMPERATURE, "repetitions": REPETITIONS, "reckoned": reckoned}
    bench.note("peers", kind="rollouts", rows=rows, **found, times_as_fast=faster, **how)
    return [name for name, why in failed.items() if rows > 1 and why != OUT_OF_MEMORY]


def _round(bench: SpeedBench, ways: dict[str, Way], rows: int, failed: dict[str, str]) -> dict[str, float]:
    """The seconds of each way; a peer that fails with several rows, or for lack of memory, is left out from then on."""
    taken: dict[str, float] = {}
    for name, way in ways.items():
        if name in failed:
            continue
        try:
            taken[name] = bench.seconds(lambda w=way: w.roll(rows, BLOCKS[w.kind]), warm=False)
        except torch.OutOfMemoryError:
            if not way.peer:
                raise
            failed[name] = OUT_OF_MEMORY
        except (RuntimeError, IndexError) as error:
            if not way.peer or rows == 1:
                raise
            failed[name] = f"does not run with {rows} rows: {str(error).partition(chr(10))[0]}"
    return taken


def _ours(bench: SpeedBench, kind: str) -> Way:
    """Our rollouts, captured on a GPU."""
    graphs, cache = Graphs(True), Cache() if kind == "dual cache" else None
    return Way(kind, lambda rows, blocks: bench.roll_blocks(rows, blocks, cache=cache, graphs=graphs), peer=False)


def asked(bench: SpeedBench, rows: int, blocks: int) -> tuple[Tensor, dict[str, Any]]:
    """The prompts and the settings of the last blocks of a canvas, as the peers call them."""
    length = blocks * bench.shape["block"]
    prompt_BL = torch.tensor(bench.prompts(rows, width=bench.width - length), device=bench.device)
    settings = {
        "steps": length * bench.shape["steps"] // bench.shape["length"],
        "gen_length": length,
        "block_length": bench.shape["block"],
        "temperature": TEMPERATURE,
        "remasking": "low_confidence",
        "mask_id": bench.policy.mask_id,
    }
    return prompt_BL, settings


# --- d1


class PlainNetwork:
    """Our network as d1 calls one: not compiled, the logits of all positions."""

    def __init__(self, policy: Released) -> None:
        self.policy, self.device = policy, policy.lm.device

    def __call__(self, tokens_BL: Tensor) -> SimpleNamespace:
        every_Q = torch.arange(tokens_BL.numel(), device=tokens_BL.device)
        with as_written(self.policy):
            hidden_QD = self.policy.hidden(tokens_BL, None, every_Q)
        return SimpleNamespace(logits=self.policy.lm.lm_head(hidden_QD).view(*tokens_BL.shape, -1))


def d1(bench: SpeedBench, folder: Path) -> Way:
    path = folder / "d1" / FILES["d1"][0]
    with importing(path.parent):
        generate = function_of(module_at(path, "d1_generate"), "generate")
    network = PlainNetwork(bench.policy)

    def roll(rows: int, blocks: int) -> Any:
        prompt_BL, settings = asked(bench, rows, blocks)
        with their_surroundings():
            return generate(network, prompt_BL, None, **settings)

    return Way("exact", roll)


# --- Fast-dLLM


def fast_dllm(bench: SpeedBench, folder: Path) -> Way:
    path = folder / "Fast-dLLM" / FILES["Fast-dLLM"][0]
    with importing(path.parent):
        generate = function_of(module_at(path, "fast_dllm_generate"), "generate_with_dual_cache")
        parts = [importlib.import_module(f"model.{name}") for name in ("modeling_llada", "configuration_llada")]
    with their_surroundings():
        network = fast_network(bench, *parts)
        gap = _gap(bench, network)
    bench.note("peers", kind="network of Fast-dLLM beside ours", **gap)

    def roll(rows: int, blocks: int) -> Any:
        prompt_BL, settings = asked(bench, rows, blocks)
        with their_surroundings():
            torch.backends.cuda.enable_mem_efficient_sdp(False)  # as the constructor of its network does
            return generate(network, prompt_BL, **settings)

    return Way("dual cache", roll)


def fast_network(bench: SpeedBench, modeling: ModuleType, configuration: ModuleType) -> nn.Module:
    """Fast-dLLM's own network around the weights of our policy."""
    ours = bench.policy.lm.config
    shape = {
        "d_model": ours.hidden_size,
        "n_layers": ours.num_hidden_layers,
        "n_heads": ours.num_attention_heads,
        "n_kv_heads": ours.num_key_value_heads,
        "mlp_hidden_size": ours.intermediate_size,
        "vocab_size": ours.vocab_size,
        "embedding_size": ours.vocab_size,
        "max_sequence_length": ours.max_position_embeddings,
        "rms_norm_eps": ours.rms_norm_eps,
        "rope_theta": ours.rope_parameters["rope_theta"],
        "mask_token_id": bench.policy.mask_id,
        "eos_token_id": bench.policy.eos_id,
        "pad_token_id": bench.policy.pad_id,
        **LLADA_8B,
    }
    config = function_of(configuration, "LLaDAConfig")(**shape)
    config.use_cache = False  # transformers 5 does not keep it
    body = function_of(modeling, "LLaDAModel")(function_of(configuration, "ModelConfig")(**shape))
    network = function_of(modeling, "LLaDAModelLM")(config, body)
    # Detached, since loading changes whether a parameter has a gradient.
    weights = {LLADA.own(name): weight.detach() for name, weight in bench.policy.lm.named_parameters()}
    network.load_state_dict(weights, assign=True)
    return network.requires_grad_(False).eval()


LLADA_8B = {
    "activation_type": "silu",
    "block_type": "llama",
    "layer_norm_type": "rms",
    "bias_for_layer_norm": False,
    "rope": True,
    "rope_full_precision": True,
    "flash_attention": False,
    "weight_tying": False,
    "attention_dropout": 0.0,
    "residual_dropout": 0.0,
    "embedding_dropout": 0.0,
    "init_device": "meta",
}
"""What config.json of LLaDA-8B-Instruct says besides sizes."""


@torch.no_grad()
def _gap(bench: SpeedBench, network: nn.Module) -> dict[str, float]:
    """How far the logits of Fast-dLLM's network are from those of ours, on one canvas: is it the same model?"""
    prompt_BL, settings = asked(bench, 1, BLOCKS["exact"])
    masks_BL = prompt_BL.new_full((1, settings["gen_length"]), settings["mask_id"])
    tokens_BL = torch.cat([prompt_BL, masks_BL], dim=1)
    ours_BLV, theirs_BLV = (each(tokens_BL).logits.float() for each in (PlainNetwork(bench.policy), network))
    gap_BLV = (ours_BLV - theirs_BLV).abs()
    return {"largest_gap_of_logits": float(gap_BLV.max()), "deviation_of_logits": float(ours_BLV.std())}


# --- their files


def check_peers(folder: Path | None) -> Path:
    """The folder, if it has all files that the section imports."""
    if folder is None:
        names = " and ".join(HOMES)
        raise SystemExit(f"the section peers needs --peers FOLDER, a folder with checkouts of {names}")
    for name, home in HOMES.items():
        if not (folder / name).is_dir():
            raise SystemExit(f"--peers: there is no folder {folder / name}: git clone {home} {folder / name}")
        for file in FILES[name]:
            if not (folder / name / file).is_file():
                raise SystemExit(f"--peers: there is no file {folder / name / file}, which {home} had when we read it")
    return folder


def commit_of(checkout: Path) -> str | None:
    """None for a folder that is no checkout of its own."""
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None


@contextmanager
def importing(folder: Path) -> Iterator[None]:
    """Inside it modules are looked for in the folder first, and `model` is not that of another checkout."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "model"]:
        del sys.modules[name]
    before = sys.path.copy()
    sys.path.insert(0, str(folder))
    try:
        yield
    except ImportError as error:
        raise SystemExit(f"--peers: {folder} cannot be imported: {error}") from error
    finally:
        sys.path[:] = before


def module_at(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def function_of(module: ModuleType, name: str) -> Callable[..., Any]:
    """A function or a class of theirs."""
    if not hasattr(module, name):
        raise SystemExit(f"--peers: {module.__file__} has no {name}, which it had when we read it")
    return getattr(module, name)


@contextmanager
def their_surroundings() -> Iterator[None]:
    """What their code expects of a process. Afterwards the kernels of attention are chosen as before.

    d1 asks for its rank, and one other than 0 shows no progress; on a CPU its autocast warns.
    """
    flash, efficient = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()
    with patch("torch.distributed.get_rank", return_value=1), redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.backends.cuda.enable_flash_sdp(flash)
            torch.backends.cuda.enable_mem_efficient_sdp(efficient)
