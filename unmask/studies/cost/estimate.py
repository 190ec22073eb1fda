"""What a run would cost: passes, memory, hours. Nothing is loaded, no GPU is started, no folder is made.

Passes are counted by sending a stand-in through the real sampler and the real update (counting.py). Seconds are
operations over a measured rate, memory is what is allocated at once; docs/dry_run.md says how they were derived.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from unmask.config import Config
from unmask.config.defaults import micro_batch_sizes
from unmask.core.options import LoraOptions
from unmask.core.policy import PIECE
from unmask.models.load import Outline, outline
from unmask.models.lora import linear_layers, read_adapter_config, target_paths
from unmask.models.tiny import CharacterTokenizer
from unmask.studies.cost.counting import Tally, counted, prompt_tokens
from unmask.studies.cost.hardware import NAMES, Hardware, hardware_of
from unmask.training.batch import RESAMPLES
from unmask.training.run.folder import checkpoint_of
from unmask.training.setup import decoder_of, decoding_of

GIB = 2**30

# --- the network ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    parameters: int
    item: int
    """Bytes of a weight."""
    layers: int
    width: int
    inner: int
    vocabulary: int
    queries: int
    """Channels of all query heads."""
    keys: int
    """Channels of all key heads."""
    linear: int
    """Weights of the layers' matrices, each used once a column."""
    adapter: int
    """Weights of the adapter; 0: all weights are trained."""
    adapter_b: int
    """Of these the ones of B, which a fresh adapter has at zero."""

    @property
    def trained(self) -> int:
        return self.adapter or self.parameters


def network_of(config: Config, found: Outline) -> Network:
    shape, tiny = found.lm.config, isinstance(found.tokenizer, CharacterTokenizer)
    full = config.full if config.full is not None else tiny and found.adapter is None
    policy: Any = SimpleNamespace(lm=found.lm, names=found.family.names)
    channels = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    linears = linear_layers(policy)
    a, b = (0, 0) if full else _adapter_weights(config, found, policy, linears)
    return Network(
        parameters=found.parameters,
        item=(getattr(torch, config.dtype) if config.dtype else found.dtype).itemsize,
        layers=shape.num_hidden_layers,
        width=shape.hidden_size,
        inner=shape.intermediate_size,
        vocabulary=shape.vocab_size,
        queries=channels * shape.num_attention_heads,
        keys=channels * getattr(shape, "num_key_value_heads", shape.num_attention_heads),
        linear=sum(linears[path].weight.numel() for path in target_paths(policy, "all")),
        adapter=a + b,
        adapter_b=b,
    )


def _adapter_weights(config: Config, found: Outline, policy: Any, linears: Mapping[str, nn.Linear]) -> tuple[int, int]:
    """Those of A and of B."""
    if found.adapter is None:
        paths, rank = target_paths(policy, config.lora.targets), config.lora.rank
    else:
        stated = read_adapter_config(found.adapter)
        named, rank = stated.target_modules, stated.r
        pattern = named if isinstance(named, str) else "|".join(rf"(.*\.)?{re.escape(name)}" for name in named)
        paths = [path for path in linears if any(re.fullmatch(pattern, n) for n in (path, policy.names.own(path)))]
    a, b = (sum(getattr(linears[path], side) for path in paths) for side in ("in_features", "out_features"))
    return rank * a, rank * b


# --- operations, seconds, bytes -------------------------------------------------------------------------------------


def operations(network: Network, kind: str, tally: Tally, seen: int, gradient_checkpointing: bool = False) -> float:
    """Floating-point operations of passes whose columns see `seen` columns; a multiplication and an addition are two.

    The way back goes through every matrix once, and once more where its weights are trained.
    """
    linear, low = 2 * tally.columns * network.linear, 2 * tally.columns * network.adapter
    attention = 4 * tally.columns * seen * network.queries * network.layers
    head = 2 * tally.positions * network.width * network.vocabulary
    if kind != "update, gradient":
        return linear + attention + head + (0 if kind == "update, reference" else low)
    frozen = linear + head if network.adapter else 2 * (linear + head)
    total = linear + low + attention + head + frozen + 2 * (low + attention)
    if gradient_checkpointing:
        total += linear + low + attention
    if tally.states and tally.positions / tally.states * tally.most > PIECE // network.vocabulary:
        total += head  # done in pieces, each computed again on the way back
    return total


def seconds(
    network: Network, on: Hardware, kind: str, tally: Tally, seen: int, gradient_checkpointing: bool = False
) -> float:
    """Pass by pass, whichever takes longer: operations over the rate they reach, reading the weights, or launching.

    A pass with gradient is launched three times: forward, and a way back of two.
    """
    if not tally.states:
        return 0.0
    drawn = kind.startswith(("rollout", "evaluation"))
    shares, last = on.shares, kind.split(", ")[-1]
    share = {"gradient": shares.gradient, "window": shares.window}.get(last, shares.whole)
    state = operations(network, kind, tally, seen, gradient_checkpointing) / (on.rate * share) / tally.states
    launched = shares.launch * network.layers * (3 if last == "gradient" else 1) if network.adapter else 0.0
    least = max(network.item * network.parameters / on.bandwidth, launched)
    logits = tally.positions * network.vocabulary * shares.vocabulary / on.bandwidth if drawn else 0.0
    return sum(passes * max(size * state, least) for size, passes in tally.sizes.items()) + logits


def memory(
    config: Config, network: Network, passes: Mapping[str, Tally], width: int, copied: int = 0
) -> dict[str, dict[str, float]]:
    """GiB at the peak of a rollout and of an update. `copied`: weights of which the reference has its own."""
    item, inner, deep = network.item, network.inner, network.width
    wide = max(4, item) * network.trained  # as adapters and what the optimiser holds are kept (masters.py)
    fixed = {
        "weights": item * network.parameters,
        "adapter": wide if network.adapter else 0,
        "reference": (max(4, item) if network.adapter else item) * copied,
        "fp32 copies": wide if item < 4 and not network.adapter else 0,
        "Adam": 2 * wide,
    }
    drawn = [passes["rollout, whole"], passes["evaluation, whole"]]
    rows, cached = max(tally.most for tally in drawn), config.rollout.cache != "none"
    alive = item * ((4 if network.adapter else 3) * inner + 2 * deep)  # of a layer, at once in its feed-forward half
    casts, kept = float(item * network.adapter if item < 4 else 0), kept_bytes(network, config.compile)
    column = kept * network.layers
    if config.gradient_checkpointing:
        column, casts = item * deep * network.layers + kept, casts / network.layers
    rollout = {
        **fixed,
        "gradients": 0,
        "KV cache": rows * width * 2 * network.keys * network.layers * item if cached else 0,
        "activations": rows * width * alive,
        "logits": _logits(network, max(tally.asked for tally in drawn)),
    }
    # Compiled, passes without gradient are asked as those with, and keep as much for as long as they last.
    held = "update" if config.compile else "update, gradient"
    updates = [
        {
            **rollout,
            "gradients": wide if kind == "update, gradient" else 0,
            "KV cache": 0,
            "activations": tally.most * width * column + casts,
            "logits": _logits(network, tally.asked),
        }
        for kind, tally in passes.items()
        if kind.startswith(held)
    ]
    found = {"rollout": rollout, "update": max(updates, key=lambda parts: sum(parts.values()))}
    return {name: {part: size / GIB for part, size in parts.items()} for name, parts in found.items()}


def kept_bytes(network: Network, compiled: bool) -> int:
    """Of a layer, for each column, all that the way back reads again.

    Queries, keys, values and what attention made of them, the four states of the feed-forward half, and of both norms
    the output, the input in fp32 and, if they are trained, what they scale. Compiled: of the four states one is
    computed again, and of the norms there are inputs, as they come, and outputs.
    """
    item, states = network.item, 3 if compiled else 4
    norm = 2 * item if compiled else max(4, item) + (item if network.adapter else 2 * item)
    return 2 * network.width * norm + item * (2 * network.queries + 2 * network.keys + states * network.inner)


def _logits(network: Network, positions: float) -> float:
    """Bytes: four fp32 tensors (as they come, normalised, tempered, and a sum or slope) of one piece."""
    return 4 * 4 * network.vocabulary * min(positions, max(1, PIECE // network.vocabulary))


def peak(parts: Mapping[str, float], rollout: bool) -> float:
    """A rollout's trunk has ended when its logits come; an update goes back from the logits into the trunk."""
    return sum(parts.values()) - (min(parts["activations"], parts["logits"]) if rollout else 0)


# --- the whole ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Time:
    """Seconds of one update's rollout and learning and of one evaluation; hours of the run. One device."""

    hardware: str
    source: str
    memory_gib: float
    rollout_s: float
    update_s: float
    evaluation_s: float
    run_h: float


@dataclass(frozen=True)
class Estimate:
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
    """Of one update, and of one evaluation."""
    memory_gib: dict[str, dict[str, float]]
    times: list[Time]
    notes: list[str]

    def data(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def estimate(config: Config, hardware: str | None = None, prompt: int | None = None) -> Estimate:
    """What the configuration would cost on the hardware at hand and on a named one (h200 for all but small models).

    prompt   tokens of the longest prompt, where the caller knows better
    """
    if hardware is not None and hardware not in NAMES:
        raise ValueError(f"--hardware: {hardware!r} is not known here; known: {', '.join(NAMES)}")
    if config.rollout.temperature == 0 or config.rollout.guidance:
        raise ValueError("rollout: training needs a temperature above 0 and guidance 0")
    found, task, method = outline(checkpoint_of(config.model)), config.build_task(), config.build_method()
    for wish in ("gradient_checkpointing", "compile"):
        if getattr(config, wish) and found.family.encoder:
            decoder_of(None, wish)
    network, decoding = network_of(config, found), decoding_of(config, task)
    if config.lora != LoraOptions() and (found.adapter is not None or not network.adapter):
        raise ValueError("lora: has options, but no new adapter is trained; leave them out")
    notes = list(_notes(config))
    if prompt is None:
        prompt, told = prompt_tokens(config, task, found)
        notes += told
    sizes = micro_batch_sizes(config, network.parameters + network.adapter)
    passes = counted(config, method, decoding, found, prompt, sizes)
    width = prompt + decoding.length
    copied = _copied(config, found, network) if method.needs_reference else 0
    memory_gib = {
        name: {**parts, "peak": peak(parts, name == "rollout")}
        for name, parts in memory(config, network, passes, width, copied).items()
    }
    tiny = isinstance(found.tokenizer, CharacterTokenizer)
    evaluations = 2 + ((config.updates - 1) // config.eval.every if config.eval.every else 0)
    times: dict[str, Time] = {}
    for name in (None, hardware or (None if tiny else "h200")):
        on = hardware_of(name, network, config.compile, tiny)
        if isinstance(on, str):
            notes.append(on)
        elif on.name not in times:
            times[on.name] = _time(config, network, on, passes, width, evaluations, copied)
    return Estimate(
        name=f"{config.task}-{method.name}-seed{config.seed}",
        model=config.model,
        family=found.family.name,
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


def _copied(config: Config, found: Outline, network: Network) -> int:
    """Weights of which the reference has its own: a fresh adapter's is the base, or compiled a copy of B."""
    if not network.adapter or found.adapter is not None:
        return network.trained
    return network.adapter_b if config.compile else 0


def _time(
    config: Config,
    network: Network,
    on: Hardware,
    passes: Mapping[str, Tally],
    width: int,
    evaluations: int,
    copied: int = 0,
) -> Time:
    # A reference with weights of its own is the policy's equal: it goes through an adapter too.
    like = {"update, reference": "update, no gradient"} if copied else {}
    spent = {
        kind: seconds(network, on, like.get(kind, kind), tally, width, config.gradient_checkpointing)
        for kind, tally in passes.items()
    }
    rollout = spent["rollout, whole"] + spent["rollout, window"]
    learning = sum(spent[kind] for kind in spent if kind.startswith(("cache check", "update")))
    evaluation = spent["evaluation, whole"] + spent["evaluation, window"]
    run = config.updates * (rollout + learning) + evaluations * evaluation
    return Time(on.name, on.source, on.memory, rollout, learning, evaluation, run / 3600)


def _notes(config: Config) -> Iterator[str]:
    yield "an upper bound where rows end early, or where groups are idle and the method has no KL"
    if config.rollout.threshold is not None:
        yield "decoding by threshold: an upper bound, as if every step committed one position"
    if config.idle_groups == "resample":
        yield f"idle_groups: resample may roll out up to {1 + RESAMPLES} times as much"


def lines(found: Estimate, config: Config) -> Iterator[str]:
    """For a person."""
    network = found.network
    bits = {2: "16-bit", 4: "fp32", 8: "fp64"}[network.item]
    trained = f"an adapter of {network.adapter:,} weights (fp32)" if network.adapter else "all weights"
    yield f"{found.name}: a dry run. Nothing is loaded or written."
    yield f"model    {found.model} ({found.family}), {network.parameters:,} weights, {bits}"
    yield f"trained  {trained}"
    yield f"canvas   prompt {found.prompt} + completion {found.length}; {found.steps} steps, blocks of {found.block}"
    times = f"{found.updates} updates of {config.inner_steps}, {found.evaluations} evaluations"
    yield f"batch    {config.prompts} prompts x {config.group} rollouts; {times}"
    yield ""
    yield f"{'passes of one update':28}{'canvases':>12}{'columns':>14}{'head at':>12}{'in a pass':>12}"
    for kind, tally in found.passes.items():
        if tally.states:
            counts = f"{tally.states:12,}{tally.columns:14,}{tally.positions:12,}{tally.most:12,}"
            yield f"  {kind:26}{counts}"
    yield ""
    yield f"{'memory, GiB':28}{'rollout':>12}{'update':>14}"
    for part in found.memory_gib["rollout"]:
        sizes = [found.memory_gib[name][part] for name in ("rollout", "update")]
        if any(sizes):
            yield f"  {part:26}{sizes[0]:12.2f}{sizes[1]:14.2f}"
    yield ""
    yield f"{'time on one device':28}{'rollout s':>12}{'update s':>14}{'eval s':>12}{'run h':>12}"
    need = max(parts["peak"] for parts in found.memory_gib.values())
    for time in found.times:
        fits = f"{need:.1f} of {time.memory_gib:.0f} GiB" if need < time.memory_gib else "MEMORY DOES NOT SUFFICE"
        told = (time.rollout_s, time.update_s, time.evaluation_s, time.run_h)
        shown = [f"{value:.2f}" if value < 1e5 else f"{value:.1e}" for value in told]
        yield f"  {time.hardware:26}{shown[0]:>12}{shown[1]:>14}{shown[2]:>12}{shown[3]:>12}   {fits}; {time.source}"
    yield from (f"note: {note}" for note in found.notes)
