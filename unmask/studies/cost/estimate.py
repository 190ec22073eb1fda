"""The cost of a run: passes, memory, hours. It loads nothing, starts no GPU and makes no folder.

Passes are counted with a stand-in that goes through the real sampler and the real update (counting.py). Seconds are
operations over a measured rate; memory is the sum of what is allocated at once. docs/dry_run.md derives both.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from unmask.config import Config
from unmask.config.key_checks import check_trainable
from unmask.core.options import LoraOptions
from unmask.core.policy import PIECE
from unmask.models.load import Outline, outline
from unmask.models.tiny import CharacterTokenizer
from unmask.studies.cost.counting import Tally, planned_passes, prompt_tokens
from unmask.studies.cost.gpus import GPUS, check_hardware
from unmask.studies.cost.hardware import CPU, WITHOUT_GROUPED, Hardware, hardware_of
from unmask.studies.cost.network import Network, network_of
from unmask.training.batch import RESAMPLES
from unmask.training.run.folder import checkpoint_of
from unmask.training.setup import decoder_of, decoding_of

GIB = 2**30
MERGING = 40
"""Bytes of traffic for each weight that is merged with an adapter and restored."""
QUANTIZING = 15
"""Bytes of traffic for each weight that is quantized to fp8."""
OPTIMIZER_BYTES, ACCUMULATION_BYTES = 46, 12
"""Memory traffic for each trained weight: of an optimizer step, and of accumulating the gradients of one pass."""
POOL = "pool of captured steps"

# --- operations, seconds, bytes -------------------------------------------------------------------------------------


def operations(network: Network, kind: str, tally: Tally, seen: int, gradient_checkpointing: bool = False) -> float:
    """Floating-point operations of passes whose columns see `seen` columns; a multiplication and an addition are two.

    The backward pass goes through every matrix once, and once more if its weights are trained. Attention then has five
    products instead of two: it computes its weights again.
    """
    linear = 2 * tally.columns * network.linear
    low = 2 * tally.columns * (network.adapter - network.adapter_unused)
    attention = 4 * tally.columns * seen * network.queries * network.layers
    head = 2 * tally.positions * network.width * network.vocabulary
    if kind != "update, gradient":
        return linear + attention + head + (0 if kind == "update, reference" else low)
    frozen = linear + head if network.adapter else 2 * (linear + head)
    total = linear + low + attention + head + frozen + 2 * low + 2.5 * attention
    if gradient_checkpointing:
        total += linear + low + attention
    if tally.states and tally.positions / tally.states * tally.most > PIECE // network.vocabulary:
        total += head  # done in pieces, each computed again in the backward pass
    return total


def seconds(
    network: Network, device: Hardware, kind: str, tally: Tally, seen: int, gradient_checkpointing: bool = False
) -> float:
    """For each pass the longest of three: operations over their rate, reading the weights, launching kernels.

    A pass with gradient is launched three times: once forward, twice backward. The attention of a window takes at least
    the time to read the cached keys and values. A captured step takes a constant time more.
    """
    if not tally.states:
        return 0.0
    drawn = kind.startswith(("rollout", "evaluation"))
    shares, last = device.shares, kind.split(", ")[-1]
    rate = device.rate * {"gradient": shares.gradient, "window": shares.window}.get(last, shares.whole)
    state = operations(network, kind, tally, seen, gradient_checkpointing) / rate / tally.states
    if last == "window":
        attention = 4 * tally.width * seen * network.queries * network.layers / rate
        state += max(0.0, cache_bytes(network, seen) / device.bandwidth - attention)
    launch = (shares.launch if network.adapter else shares.bare_launch) * network.layers
    least = max(network.item * network.parameters / device.bandwidth, launch * (3 if last == "gradient" else 1))
    logits = tally.positions * network.vocabulary * shares.vocabulary / device.bandwidth if drawn else 0.0
    replay = shares.replay * network.layers
    return sum(passes * (max(size * state, least) + replay) for size, passes in tally.sizes.items()) + logits


def cache_bytes(network: Network, width: int) -> int:
    """Keys and values of all layers for a canvas of `width` columns."""
    return width * 2 * network.keys * network.layers * network.item


def preparing_seconds(config: Config, network: Network, device: Hardware) -> float:
    """Merging the adapter for one rollout and restoring the weights: memory traffic of the copies and of the sum in
    fp32 (models/lora.py). The product B A takes less. Quantizing the layers that run in fp8 (models/fp8.py)."""
    merged = network.adapted if network.adapter and config.rollout.merge_adapter else 0
    quantized = network.fp8 if config.rollout.precision == "fp8" else 0
    return (MERGING * merged + QUANTIZING * quantized) / device.bandwidth


def optimizer_seconds(config: Config, network: Network, device: Hardware, gradient_passes: Tally) -> float:
    """The time of optimizer steps (norm, clipping, Adam, rounding) and of gradient accumulation in an update."""
    traffic = OPTIMIZER_BYTES * config.inner_steps + ACCUMULATION_BYTES * sum(gradient_passes.sizes.values())
    return traffic * network.trained / device.bandwidth


def _caches(config: Config, passes: Mapping[str, Tally]) -> bool:
    """Whether rollouts keep keys and values: as configured, or because the model is block-causal."""
    windows = passes["rollout, window"].states + passes["evaluation, window"].states
    return config.rollout.cache in ("prefix", "dual") or windows > 0


def memory(
    config: Config, network: Network, passes: Mapping[str, Tally], width: int, copied: int = 0, captured: bool = False
) -> dict[str, dict[str, float]]:
    """GiB at the peak of a rollout and of an update. `copied`: weights of which the reference has a copy. `captured`:
    steps are CUDA graphs, whose pool and KV cache stay in memory."""
    item, inner, deep = network.item, network.inner, network.width
    wide = max(4, item) * network.trained  # adapters and the optimiser's state are in fp32 at least (training/optim.py)
    copy = max(4, item) if network.adapter else item
    fixed = {
        "weights": item * network.parameters,
        "adapter": wide if network.adapter else 0,
        "reference": copy * copied,
        "teacher": copy * network.trained if passes["update, teacher"].states else 0,
        "fp32 copies": wide if item < 4 and not network.adapter else 0,
        "Adam": 2 * wide,
        "fp8 copies": network.fp8 + 4 * network.fp8_rows if config.rollout.precision == "fp8" else 0,
    }
    merged = network.adapted - (network.adapted_fp8 if config.rollout.precision == "fp8" else 0)
    # A block-causal model with a cache has no whole passes.
    drawn = [tally for kind, tally in passes.items() if kind.startswith(("rollout", "evaluation"))]
    rows, cached = max(tally.most for tally in drawn), _caches(config, passes)
    # Of one layer, in its feed-forward half.
    apart = network.adapter and not config.rollout.merge_adapter
    alive = item * ((4 if apart else 3) * inner + 2 * deep + network.routed)
    casts, saved = float(item * network.adapter if item < 4 else 0), kept_bytes(network, config.compile)
    column = saved * network.layers
    if config.gradient_checkpointing:
        column, casts = item * deep * network.layers + saved, casts / network.layers
    passing = max(tally.most * tally.width for tally in drawn) * alive
    drawing = _logits(network, max(tally.asked for tally in drawn))
    # With a cache the first graph is that of a window, and what it leaves to the pool has room for a whole pass.
    pool = max(passing, drawing) if cached else passing + drawing
    rollout = {
        **fixed,
        "copy of adapted layers": item * merged if config.rollout.merge_adapter else 0,
        "gradients": 0,
        "KV cache": rows * cache_bytes(network, width) if cached else 0,
        POOL: pool if captured else 0,
        "activations": passing,
        "logits": drawing,
    }
    # A compiled pass without gradient saves the same activations as one with gradient, until it ends.
    saving = "update" if config.compile else "update, gradient"
    updates = [
        {
            **rollout,
            "copy of adapted layers": 0,
            "gradients": wide if kind == "update, gradient" else 0,
            "KV cache": rollout["KV cache"] if captured else 0,
            "activations": tally.most * tally.width * column + casts,
            "logits": _logits(network, tally.asked),
        }
        for kind, tally in passes.items()
        if kind.startswith(saving)
    ]
    stages = {"rollout": rollout, "update": max(updates, key=lambda parts: sum(parts.values()))}
    return {name: {part: size / GIB for part, size in parts.items()} for name, parts in stages.items()}


def _rollout_network(config: Config, network: Network, device: Hardware) -> Network:
    """The network in rollouts and evaluations: a merged adapter adds no operations, and weights in fp8 count as the
    smaller number that would take the same time."""
    if config.rollout.merge_adapter:
        network = replace(network, adapter=0, adapter_unused=0)
    if config.rollout.precision == "model":
        return network
    if device.fp8_rate is None:
        raise ValueError(f"rollout.precision: {device.name} has no fp8; leave it out, or name another --hardware")
    return replace(
        network,
        linear=round(network.linear - network.fp8 * (1 - device.rate / device.fp8_rate)),
        parameters=round(network.parameters - network.fp8 * (1 - 1 / network.item)),
    )


def kept_bytes(network: Network, compiled: bool) -> int:
    """Bytes that a layer saves for the backward pass, for each column.

    Queries, keys, values and the output of attention, the four states of the feed-forward half, and for both norms the
    output, the input in fp32 and, if they are trained, the normalised input; of norms of queries and keys all
    but the output; with experts their inputs and outputs. Compiled: one of the four states is
    computed again, and the norms save input and output only.
    """
    item, states = network.item, 3 if compiled else 4
    norm = 2 * item if compiled else max(4, item) + (item if network.adapter else 2 * item)
    wide = 2 * network.queries + 2 * network.keys + states * network.inner + network.routed
    return 2 * network.width * norm + network.normed * (norm - item) + item * wide


def _logits(network: Network, positions: float) -> float:
    """Bytes: four fp32 tensors of one piece (raw, normalised, tempered, and a sum or gradient)."""
    return 4 * 4 * network.vocabulary * min(positions, max(1, PIECE // network.vocabulary))


def peak(parts: Mapping[str, float], rollout: bool) -> float:
    """GiB at the peak. A rollout frees its activations before the logits; an update needs both."""
    return sum(parts.values()) - (min(parts["activations"], parts["logits"]) if rollout else 0)


# --- the whole ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimeEstimate:
    """Seconds of the rollout and the update of one step and of one evaluation; hours of the run. One device."""

    hardware: str
    source: str
    memory_gib: float
    rollout_s: float
    update_s: float
    evaluation_s: float
    run_h: float


@dataclass(frozen=True)
class CostEstimate:
    name: str
    model: str
    family: str
    network: Network
    prompt: int
    length: int
    steps: int
    block: int
    updates: int
    evaluations: int
    passes: dict[str, Tally]
    """Of one update and of one evaluation, by kind."""
    memory_gib: dict[str, dict[str, float]]
    times: list[TimeEstimate]
    notes: list[str]

    def data(self) -> dict[str, Any]:
        return asdict(self)


def estimate(config: Config, hardware: str | None = None, prompt: int | None = None) -> CostEstimate:
    """The cost of the configuration on the named hardware. Without a name: on this machine, and on an H200 unless the
    model is embedded.

    prompt   tokens of the longest prompt; estimated if not given
    """
    if hardware is not None:
        check_hardware(hardware)
    check_trainable(config)
    model, task = outline(checkpoint_of(config.model), config.causal_block), config.build_task()
    method = config.build_method()
    for key in ("gradient_checkpointing", "compile"):
        if getattr(config, key) and model.family.encoder:
            decoder_of(None, key)
    network, decoding = network_of(config, model), decoding_of(config, task).for_policy(model)
    if config.lora != LoraOptions() and (model.adapter is not None or not network.adapter):
        raise ValueError("lora: has options, but no new adapter is trained; leave them out")
    notes = list(_notes(config))
    if network.routed:
        notes.append("a mixture of experts: seconds are between those of two models, each off by up to 40 %")
    if prompt is None:
        prompt, assumed = prompt_tokens(config, task, model)
        notes += assumed
    passes = planned_passes(config, decoding, model, prompt)
    width, tiny = prompt + decoding.length, isinstance(model.tokenizer, CharacterTokenizer)
    on_gpu = hardware in GPUS or (hardware is None and not tiny)
    captured = on_gpu and _captures(config, network, hardware in WITHOUT_GROUPED)
    copied = _copied_weights(config, model, network) if method.needs_reference else 0
    memory_gib = {
        name: {**parts, "peak": peak(parts, name == "rollout")}
        for name, parts in memory(config, network, passes, width, copied, captured).items()
    }
    evaluations = 2 + ((config.updates - 1) // config.eval.every if config.eval.every else 0)
    times: dict[str, TimeEstimate] = {}
    for name in [hardware] if hardware is not None else [None] if tiny else [None, "h200"]:
        device = hardware_of(name, network, config.compile, tiny)
        if isinstance(device, str):
            notes.append(device)
        elif device.name not in times:
            times[device.name] = _time(config, network, device, passes, width, evaluations, copied)
    return CostEstimate(
        name=f"{config.task}-{method.name}-seed{config.seed}",
        model=config.model,
        family=model.family.name,
        network=network,
        prompt=prompt,
        length=decoding.length,
        steps=decoding.steps,
        block=decoding.block,
        updates=config.updates,
        evaluations=evaluations,
        passes=passes,
        memory_gib=memory_gib,
        times=list(times.values()),
        notes=notes,
    )


def _captures(config: Config, network: Network, loops_over_experts: bool) -> bool:
    """Whether rollout steps are captured on a GPU. A loop over experts waits for the device, so it cannot be."""
    wanted = config.rollout.top_p == 1 and config.rollout.graphs is not False
    return wanted and network.captured and not (network.routed and loops_over_experts)


def _copied_weights(config: Config, model: Outline, network: Network) -> int:
    """Weights of which the reference has a copy: none with a new adapter, or B if layers are compiled."""
    if not network.adapter or model.adapter is not None:
        return network.trained
    return network.adapter_b if config.compile else 0


def _time(
    config: Config,
    network: Network,
    device: Hardware,
    passes: Mapping[str, Tally],
    width: int,
    evaluations: int,
    copied: int = 0,
) -> TimeEstimate:
    # A reference with its own weights has an adapter too, like the policy.
    like = {"update, reference": "update, no gradient"} if copied else {}
    drawing = _rollout_network(config, network, device)
    static = device
    if _captures(config, network, device.loops_over_experts) and device.shares is not CPU:
        static = replace(device, shares=device.shares.captured())
    spent = {
        kind: seconds(
            *((drawing, static) if kind.startswith(("rollout", "evaluation")) else (network, device)),
            like.get(kind, kind),
            tally,
            width,
            config.gradient_checkpointing,
        )
        for kind, tally in passes.items()
    }
    preparing = preparing_seconds(config, network, device)
    rollout = spent["rollout, whole"] + spent["rollout, window"] + preparing
    learning = sum(spent[kind] for kind in spent if kind.startswith(("cache check", "update")))
    learning += optimizer_seconds(config, network, device, passes["update, gradient"])
    evaluation = spent["evaluation, whole"] + spent["evaluation, window"] + preparing
    run = config.updates * (rollout + learning) + evaluations * evaluation
    return TimeEstimate(device.name, device.source, device.memory, rollout, learning, evaluation, run / 3600)


def _notes(config: Config) -> Iterator[str]:
    yield "an upper bound if rows end early, or if rewards are identical in a group and the method has no KL"
    if config.build_method().values is not None:
        yield "an upper bound if completions of a state are equal: equal canvases go through the model once"
    if config.rollout.threshold is not None:
        least = "one position" if config.rollout.min_per_step == 1 else f"{config.rollout.min_per_step} positions"
        yield f"decoding by threshold: an upper bound, with {least} a step"
    if config.rollout.precision == "fp8":
        yield "fp8: its speed was measured on an H200; experts of a mixture stay in the model's dtype"
    if config.idle_groups == "resample":
        yield f"idle_groups=resample may need up to {1 + RESAMPLES} times the rollouts"


def lines(cost: CostEstimate, config: Config) -> Iterator[str]:
    network = cost.network
    bits = {2: "16-bit", 4: "fp32", 8: "fp64"}[network.item]
    trained = f"an adapter of {network.adapter:,} weights (fp32)" if network.adapter else "all weights"
    yield f"{cost.name}: a dry run. Nothing is loaded or written."
    active = f", {network.active:,} of them used by a token" if network.active < network.parameters else ""
    yield f"model    {cost.model} ({cost.family}), {network.parameters:,} weights{active}, {bits}"
    yield f"trained  {trained}"
    yield f"canvas   prompt {cost.prompt} + completion {cost.length}; {cost.steps} steps, blocks of {cost.block}"
    times = f"{cost.updates} updates of {config.inner_steps}, {cost.evaluations} evaluations"
    yield f"batch    {config.prompts} prompts x {config.group} rollouts; {times}"
    yield ""
    yield f"{'passes of one update':28}{'canvases':>12}{'columns':>14}{'head at':>12}{'in a pass':>12}"
    for kind, tally in cost.passes.items():
        if tally.states:
            counts = f"{tally.states:12,}{tally.columns:14,}{tally.positions:12,}{tally.most:12,}"
            yield f"  {kind:26}{counts}"
    yield ""
    yield f"{'memory, GiB':28}{'rollout':>12}{'update':>14}"
    for part in cost.memory_gib["rollout"]:
        sizes = [cost.memory_gib[name][part] for name in ("rollout", "update")]
        if any(sizes):
            yield f"  {part:26}{sizes[0]:12.2f}{sizes[1]:14.2f}"
    yield ""
    yield f"{'time on one device':28}{'rollout s':>12}{'update s':>14}{'eval s':>12}{'run h':>12}"
    need = max(parts["peak"] for parts in cost.memory_gib.values())
    apart = max(parts["peak"] - parts["copy of adapted layers"] for parts in cost.memory_gib.values())
    rollout, update = cost.memory_gib["rollout"], cost.memory_gib["update"]
    plain = max(rollout["peak"] - rollout[POOL], update["peak"] - update[POOL] - update["KV cache"])
    for time in cost.times:
        fits = f"{need:.1f} of {time.memory_gib:.0f} GiB"
        if need >= time.memory_gib:
            keys = {"rollout.graphs": plain, "rollout.merge_adapter": apart}
            enough = [f"{fits}: set {key}=false" for key, less in keys.items() if less < time.memory_gib]
            fits = enough[0] if enough else "MEMORY DOES NOT SUFFICE"
        values = (time.rollout_s, time.update_s, time.evaluation_s, time.run_h)
        shown = [f"{value:.2f}" if value < 1e5 else f"{value:.1e}" for value in values]
        yield f"  {time.hardware:26}{shown[0]:>12}{shown[1]:>14}{shown[2]:>12}{shown[3]:>12}   {fits}; {time.source}"
    yield from (f"note: {note}" for note in cost.notes)
